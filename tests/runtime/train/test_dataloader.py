"""`dataloader`: losses of one process under every plan, positions that mean the same everywhere.

Which seeded bug would this catch? Samples dealt out by global rank, other samples along tp or pp,
augmentations drawn from the rank's or the worker's generator, a position that the prefetching of
workers moves, a last batch whose padding counts, an iterable that is entered anew after a restart.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, IterableDataset, Subset

import meshplan
from meshplan.errors import ApplyError, StateError
from meshplan.runtime.train.sample_order import order_of
from tests.helpers.pool import Pool
from tests.helpers.stated import BATCH, LAYOUTS, SEQ_LEN, VOCAB, Model, next_token_loss, plan_of


class Numbers(Dataset):
    """Samples of their own number, and random numbers of all three generators."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        drawn = [random.random(), np.random.random(), torch.rand(()).item()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64), index


class Lists(Numbers):
    """The same, read as lists."""

    def __getitems__(self, indices):
        return [(torch.tensor([float(i)]), i) for i in indices]


class Stream(IterableDataset):
    """The same as an iterable, in an order of its epoch."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        samples = Numbers(self.length)
        return (samples[(i + self.epoch) % self.length] for i in range(self.length))


class Tokens(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCAB, (SEQ_LEN + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


KINDS = {"map": Numbers, "lists": Lists, "stream": Stream, "subset": lambda n: Subset(
    Numbers(2 * n), range(n))}  # fmt: skip


def wrapped(layout, **more):
    # The ranks of tests are daemons, which may not start workers, and whose workers would import
    # everything anew. A rank of torchrun is not.
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    torch.manual_seed(0)
    return meshplan.parallelize(Model(), plan_of(layout) | more)


def rows(batch):
    """The samples of a batch, from float64 to Python's numbers."""
    return [tuple(row) for row in batch[0].tolist()]


def epochs(layout, kind, length, num_epochs, **options):
    """This rank's place and its rows, step by step."""
    model = wrapped(layout)
    options.setdefault("shuffle", kind != "stream")
    loader = meshplan.dataloader(KINDS[kind](length), model, batch_size=BATCH, **options)
    steps = [rows(batch) for _ in range(num_epochs) for batch in loader]
    assert (loader.epoch, loader.samples) == (num_epochs, 0)
    plan = model.meshplan.plan
    rank = torch.distributed.get_rank()
    return plan.mesh.index(rank, ("dp_replicate", "dp_shard")), steps


def together(results):
    """The rows of each step in the order of the data ranks; their other ranks have the same."""
    by_place = {}
    for place, steps in results:
        assert by_place.setdefault(place, steps) == steps
    steps = zip(*(by_place[place] for place in sorted(by_place)), strict=True)
    return [list(itertools.chain(*parts)) for parts in steps]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout",
    ["ddp", "full_shard", "tp_fsdp", "pp", pytest.param("pp_fsdp_tp", marks=pytest.mark.wide)],
)
def test_all_layouts_read_what_one_process_reads(pool, layout, kind):
    ((_, alone),) = pool(1).run(epochs, "one", kind, 28, 2)
    assert together(pool(LAYOUTS[layout].world).run(epochs, layout, kind, 28, 2)) == alone
    assert len(alone) == 6
    drawn = {row[1:] for step in alone for row in step}
    assert len(drawn) == (1 if kind == "lists" else 48)  # No two samples draw the same numbers.
    for epoch in (alone[:3], alone[3:]):
        indices = [row[0] for step in epoch for row in step]
        assert len(set(indices)) == 24
    assert alone[:3] != alone[3:]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_workers_change_nothing(pool, kind):
    alone = pool(2).run(epochs, "ddp", kind, 28, 2)
    assert pool(2).run(epochs, "ddp", kind, 28, 2, num_workers=2) == alone


def parted(layout, kind, state, steps, num_workers):
    """This rank's place, the rows of some steps from a state on, the state after them."""
    model = wrapped(layout)
    loader = meshplan.dataloader(
        KINDS[kind](28), model, batch_size=BATCH, shuffle=kind != "stream", num_workers=num_workers
    )
    if state is not None:
        loader.load_state_dict(state)
    found, states = [], []
    for batch in itertools.islice((b for _ in range(3) for b in loader), steps):
        found.append(rows(batch))
        states.append(loader.state_dict())
    place = model.meshplan.plan.mesh.index(
        torch.distributed.get_rank(), ("dp_replicate", "dp_shard")
    )
    return place, found, states


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_goes_on_where_it_was_on_another_number_of_ranks(pool, kind, num_workers):
    ((_, whole, states),) = pool(1).run(parted, "one", kind, None, 8, num_workers)
    assert len(whole) == 8
    for steps in (1, 3, 4, 6):
        results = pool(4).run(parted, "full_shard", kind, states[steps - 1], 8 - steps, num_workers)
        assert together([(place, found) for place, found, _ in results]) == whole[steps:]


def random_state():
    return random.random(), np.random.random(), torch.rand(()).item()


def leaves_randomness(num_workers):
    model = wrapped("one")
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [random_state() for _ in range(3)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    loader = meshplan.dataloader(Numbers(24), model, batch_size=BATCH, num_workers=num_workers)
    assert [random_state() for _ in loader] == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_programs_own_random_numbers_are_left_alone(pool, num_workers):
    pool(1).run(leaves_randomness, num_workers)


def trained(layout, length, loss, **options):
    """The losses of two epochs of a model that counts tokens."""
    model = wrapped(layout, loss=loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = meshplan.dataloader(Tokens(length), model, batch_size=BATCH, **options)
    return [
        meshplan.train_step(model, optimizer, inputs, targets, next_token_loss)
        for _ in range(2)
        for inputs, targets in loader
    ]


def trained_by_hand(length):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = [Tokens(length)[i] for i in range(length)]
    losses = []
    for _ in range(2):
        for start in range(0, length, BATCH):
            inputs, targets = map(torch.stack, zip(*tokens[start : start + BATCH], strict=True))
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", ["full_shard", "pp", "cp", "one"])
def test_a_last_batch_of_any_size_counts_as_in_one_process(pool, layout):
    for length in (9, 21):
        expected = pytest.approx(trained_by_hand(length), abs=1e-5)
        for losses in pool(LAYOUTS[layout].world).run(
            trained, layout, length, "tokens", drop_last=False
        ):
            assert losses == expected


def test_a_last_batch_that_divides_needs_no_loss_of_tokens(pool):
    expected = pytest.approx(trained_by_hand(12), abs=1e-5)
    assert pool(4).run(trained, "full_shard", 12, "mean", drop_last=False)[0] == expected


def refused(layout, case):
    """The text of an error, the same on all ranks."""
    model = wrapped(layout)
    rank = torch.distributed.get_rank()
    cases = {
        "odd": lambda: meshplan.dataloader(Tokens(24), model, batch_size=6),
        "unstated": lambda: meshplan.dataloader(Tokens(24), model),
        "short": lambda: meshplan.dataloader(Tokens(7), model, batch_size=BATCH),
        "empty": lambda: meshplan.dataloader([], model, batch_size=BATCH, drop_last=False),
        "mean": lambda: meshplan.dataloader(Tokens(9), model, batch_size=BATCH, drop_last=False),
        "stream": lambda: meshplan.dataloader(Stream(9), model, batch_size=BATCH, shuffle=True),
        "strange": lambda: meshplan.dataloader(iter([]), model, batch_size=BATCH),
        "seed": lambda: meshplan.dataloader(Tokens(24), model, batch_size=BATCH, seed=-1),
        "ranks": lambda: meshplan.dataloader(Tokens(24 + rank // 2), model, batch_size=BATCH),
    }
    with pytest.raises(ApplyError) as caught:
        cases[case]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("odd", "batch_size 6 does not divide over 4 data ranks"),
        ("unstated", "the plan does not state a batch size"),
        ("short", "the dataset has 7 samples, and no batch of 8"),
        ("empty", "the dataset has 0 samples, and no batch of 8 at all"),
        ("mean", "the last batch of 1 samples does not divide over 4 data ranks"),
        ("stream", "shuffle needs the length of the dataset, but Stream is iterable"),
        ("strange", "a list_iterator is no dataset"),
        ("seed", "seed is -1, but cannot be negative"),
        ("ranks", "rank 2 has samples in its dataset 25, but rank 0 24"),
    ],
)
def test_what_cannot_be_read_is_refused_on_all_ranks(pool, case, text):
    for message in pool(4).run(refused, "full_shard", case):
        assert text in message


def refused_states():
    model = wrapped("one")
    loader = meshplan.dataloader(Tokens(24), model, batch_size=BATCH)
    state = loader.state_dict()
    for changed, text in (
        ({"length": 25}, "has length 25, but the loader 24"),
        ({"seed": 3}, "has seed 3, but the loader 0"),
        ({"samples": -1}, "an invalid position"),
        ({"epoch": 1.5}, "an invalid position"),
        ({"more": 1}, "was not saved by a loader"),
    ):
        with pytest.raises(StateError, match=text):
            loader.load_state_dict(state | changed)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(ApplyError, match="moved while a loop"):
        next(batches)
    assert len(loader) == len(list(loader)) == 3
    model = wrapped("one", loss="tokens", batch={"micro": 4, "accumulate": 2})
    floats = meshplan.dataloader(
        Numbers(9), model, drop_last=False, collate_fn=lambda s: torch.stack([x for x, _ in s])
    )
    with pytest.raises(ApplyError, match="no class indices"):
        next(iter(floats))
    for length in (0, 7):
        short = meshplan.dataloader(Stream(length), wrapped("one"), batch_size=BATCH)
        with pytest.raises(ApplyError, match="less than one batch of 8 samples"):
            list(short)


def test_states_of_other_data_are_refused(pool):
    pool(1).run(refused_states)


class Broken(Tokens):
    def __getitem__(self, index):
        if index == 13:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def breaks():
    model = wrapped("ddp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for inputs, targets in meshplan.dataloader(Broken(16), model, batch_size=BATCH):
            meshplan.train_step(model, optimizer, inputs, targets, next_token_loss)
    except (OSError, ApplyError) as error:
        return str(error)


def test_a_sample_that_cannot_be_read_ends_all_ranks():
    ranks = Pool(2)  # Of its own: the group is not usable afterwards.
    try:
        one, other = ranks.run(breaks)
    finally:
        ranks.close()
    assert other == "the disk is gone"
    assert "rank 1 failed" in one
    assert "the disk is gone" in one


def accumulated(layout, schedule):
    """Rows and losses of each step with as many microbatches as the epoch has."""
    model = wrapped(layout, batch={"accumulate": 2})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = meshplan.dataloader(Tokens(24), model, batch_size=8, shuffle=True, accumulate=schedule)
    test = meshplan.dataloader(Tokens(8), model, batch_size=8)
    found = []
    for _ in range(3):
        for part in test:  # It has the plan's number of microbatches, whatever the epoch has.
            meshplan.eval_step(model, *part, next_token_loss)
        for inputs, targets in loader:
            loss = meshplan.train_step(model, optimizer, inputs, targets, next_token_loss)
            found.append((model.meshplan.plan.accumulate, len(inputs), loss))
    return found, {n: v for n, v in meshplan.full_state_dict(model).items() if "embed" in n}


@pytest.mark.parametrize("layout", ["full_shard", "ddp", "pp"])
def test_accumulation_follows_a_schedule_of_epochs(pool, layout):
    """The global batches are 8, 4 and 12 samples: 2, 1 and 3 microbatches of a step."""
    schedule = {0: 2, 1: 1, 2: 3}
    ranks = pool(LAYOUTS[layout].world).run(accumulated, layout, schedule)
    (found, weights), *_ = ranks
    data_ranks = {"full_shard": 4, "ddp": 2, "pp": 1}[layout]
    expected = [(2, 8)] * 3 + [(1, 4)] * 6 + [(3, 12)] * 2
    assert [(count, size * data_ranks) for count, size, _ in found] == expected
    torch.manual_seed(0)
    alone = Model()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    losses = []
    for epoch, (_, size) in zip((0, 1, 2), ((2, 8), (1, 4), (3, 12)), strict=True):
        order = order_of(24, 0, epoch, shuffles=True).tolist()
        for start in range(0, 24, size):
            samples = [Tokens(24)[i] for i in order[start : start + size]]
            inputs, targets = (torch.stack(each) for each in zip(*samples, strict=True))
            loss = next_token_loss(alone(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    assert [loss for _, _, loss in found] == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-4, atol=1e-5)


def wrong_schedule():
    model = wrapped("one")
    messages = []
    for schedule in ({-1: 2}, {0: 0}, {"0": 2}, {1: 100}):
        with pytest.raises(ApplyError) as error:
            meshplan.dataloader(Tokens(24), model, batch_size=8, accumulate=schedule)
        messages.append(str(error.value))
    return messages


def test_wrong_schedules_are_refused(pool):
    epoch, count, word, many = pool(1).run(wrong_schedule)[0]
    assert "names the epoch -1" in epoch
    assert "has 0 microbatches" in count
    assert "names the epoch '0'" in word
    assert "no batch of 800" in many
