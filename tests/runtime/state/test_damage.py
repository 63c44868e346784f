"""Whatever stops a save, a whole state is left; damage is found, and told on every rank."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

import meshplan
from meshplan.errors import MissingStateError, StateError
from meshplan.state.manifest import read_manifest
from tests.helpers.stated import LAYOUTS, Job, plan_of, saved

CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
"""What a save asks of the system."""


class Stop(BaseException):
    """As if the process had been killed."""


class Stopped:
    """Stops the process at one of these calls, before it or after a part of it."""

    def __init__(self, patch, number, is_torn):
        self.count, self.number, self.is_torn = 0, number, is_torn
        for name in CALLS:
            patch.setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name, real):
        def call(*args, **kwargs):
            if self.count < 0:  # It is dead: its `finally` and `except` do nothing.
                self.stop()
            self.count += 1
            if self.count == self.number:
                self.count = -1
                if self.is_torn and name == "write":
                    real(args[0], bytes(args[1][: len(args[1]) // 2]))
                elif self.is_torn and name != "open":
                    real(*args, **kwargs)
                self.stop()
            return real(*args, **kwargs)

        return call

    def stop(self):
        raise Stop


def crash_everywhere(path):
    """Save at steps 1 and 2; stop the second save at each of its calls; what is found then."""
    job = Job(plan_of("one"))
    job.train(1)
    meshplan.save(path, job.model, step=1, extra="first")
    job.train(1)
    other = Job(plan_of("one"), seed=1)
    found, number, torn = [], 0, (False, True)
    while True:
        number += 1
        for is_torn in torn:
            with pytest.MonkeyPatch.context() as patch:
                stopped = Stopped(patch, number, is_torn)
                with suppress(Stop):
                    meshplan.save(path, job.model, step=2, extra="second", keep=1)
                is_done = stopped.count >= 0
            state = meshplan.load(path, other.model)
            found.append((state.step, state.extra, is_done))
            if is_done:
                return found
            # Go back to the state before, with what the crash has left lying about.
            if state.step == 2:
                shutil.rmtree(path / "step-00000002")
                if not (path / "step-00000001").exists():
                    with suppress(FileNotFoundError):
                        shutil.rmtree(path / "step-00000001.incomplete")
                    meshplan.save(path, job.model, step=1, extra="first")


def test_a_crash_at_any_moment_leaves_a_whole_state(pool, tmp_path):
    (found,) = pool(1).run(crash_everywhere, tmp_path)
    assert found[-1] == (2, "second", True)
    assert {each[:2] for each in found} == {(1, "first"), (2, "second")}
    steps = [step for step, _, _ in found]
    assert steps == sorted(steps)  # From some moment on it is the new state.
    assert len(found) > 40


def flipped(path):
    """Load a state with one flipped bit at a time: what was loaded all the same."""
    (folder,) = path.iterdir()
    passed = []
    job = Job(plan_of("one"), seed=1)
    for file in sorted(folder.glob("*.safetensors")):
        whole = file.read_bytes()
        for at in range(0, len(whole), 997):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            try:
                meshplan.load(path, job.model, job.optimizer)
                passed.append((file.name, at))
            except StateError as error:
                if f"{file.name}: the file was changed after it was saved" not in str(error):
                    raise
        file.write_bytes(whole)
    meshplan.load(path, job.model, job.optimizer)
    return passed


def test_a_flipped_bit_is_found(pool, tmp_path):
    pool(2).run(saved, "ddp", tmp_path)
    assert pool(1).run(flipped, tmp_path) == [[]]


def save_where_one_cannot(path, asynchronous):
    """Rank 1 cannot write its file; then it can."""
    job = Job(plan_of("ddp"))
    job.train(1)
    meshplan.save(path, job.model, job.optimizer, step=0)
    real = os.open

    def full(name, *args, **kwargs):
        if "rank-00001" in str(name):
            raise OSError(28, "No space left on device", str(name))
        return real(name, *args, **kwargs)

    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", full)
        try:
            save_and_train(path, job, asynchronous)
        except StateError as error:
            texts.append(str(error))
    left = sorted(each.name for each in path.iterdir())
    torch.distributed.barrier()
    meshplan.save(path, job.model, job.optimizer, step=1)
    return texts, left, sorted(each.name for each in path.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_of_one_rank_is_told_on_all(pool, tmp_path, asynchronous):
    for texts, left, after in pool(2).run(save_where_one_cannot, tmp_path, asynchronous):
        (text,) = texts
        assert "rank 1: a file of the state cannot be read or written: No space left" in text
        assert "rank-00001.safetensors" in text
        assert left == ["step-00000000"]
        assert after == ["step-00000000", "step-00000001"]


READ_ONLY = ("open", "mkdir", "rename", "unlink", "rmdir")
"""The calls that change a folder; `open` does if it may write."""


class ReadOnly:
    """A disk on which some of these calls fail, as on one that is mounted for reading."""

    def __init__(self, patch, calls, skipped=0):
        self.skipped = skipped
        for name in calls:
            patch.setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name, real):
        def call(path, *args, **kwargs):
            if name == "open" and not args[0] & (os.O_WRONLY | os.O_RDWR):
                return real(path, *args, **kwargs)
            self.skipped -= 1
            if self.skipped >= 0:
                return real(path, *args, **kwargs)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        return call


def save_on_a_read_only_disk(path, asynchronous):
    """What each save says where a call fails, and whether it left the folder as it was."""
    job = Job(plan_of("ddp"))
    meshplan.save(path, job.model, job.optimizer, step=0)
    found = []
    for calls in (*((name,) for name in READ_ONLY[:3]), READ_ONLY):
        before = contents(path)
        torch.distributed.barrier()
        with pytest.MonkeyPatch.context() as patch:
            ReadOnly(patch, calls)
            with pytest.raises(StateError) as caught:
                save_and_train(path, job, asynchronous)
        found.append((str(caught.value), contents(path) == before, len(job.train(1))))
    meshplan.save(path, job.model, job.optimizer, step=1, keep=1)
    return found, [each.name for each in path.iterdir()]


def save_and_train(path, job, asynchronous):
    meshplan.save(path, job.model, job.optimizer, step=1, asynchronous=asynchronous)
    job.train(1)
    meshplan.load(path, job.model)  # Told here, if it was written meanwhile.


def contents(path):
    return {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_read_only_disk_is_told_on_all_ranks_and_nothing_changes(pool, tmp_path, asynchronous):
    one, other = pool(2).run(save_on_a_read_only_disk, tmp_path, asynchronous)
    assert one == other
    for text, is_unchanged, steps in one[0]:
        assert "cannot be read or written: Read-only file system" in text
        assert str(tmp_path) in text
        assert (is_unchanged, steps) == (True, 1)
    assert one[1] == ["step-00000001"]


def save_where_nothing_is_removed(path):
    job = Job(plan_of("ddp"))
    meshplan.save(path, job.model, step=1)
    with pytest.MonkeyPatch.context() as patch:
        ReadOnly(patch, ("rename",), skipped=1)
        with pytest.raises(StateError) as caught:
            meshplan.save(path, job.model, step=2, keep=1)
    return str(caught.value), meshplan.load(path, job.model).step


def test_a_state_that_is_whole_is_kept_if_older_ones_stay(pool, tmp_path):
    for text, step in pool(2).run(save_where_nothing_is_removed, tmp_path):
        assert "step 2 is saved, but older states cannot be removed: Read-only file" in text
        assert step == 2


def save_bad(path, case):
    job = Job(plan_of("ddp"))
    rank = torch.distributed.get_rank()
    scheduler = data = extra = None
    step, keep = 1, None
    match case:
        case "step":
            step = -1
        case "keep":
            keep = 0
        case "another step":
            step = rank
        case "extra":
            extra = {"when": object()}
        case "data":
            data = Position(rank)
        case "scheduler":
            scheduler = object()
        case "a path":
            path = path / "file"
            if rank == 0:
                path.write_text("")
            torch.distributed.barrier()
        case "options":
            job.optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    optimizer = None if case == "no optimizer" and rank == 0 else job.optimizer
    with pytest.raises(StateError) as caught:
        meshplan.save(path, job.model, optimizer, step=step, keep=keep, extra=extra, data=data,
                      scheduler=scheduler)  # fmt: skip
    job.train(1)  # The group is usable.
    return str(caught.value)


class Position:
    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("step", "step must be a whole number of at least 0, not -1"),
        ("keep", "keep must be a whole number of at least 1, not 0"),
        ("another step", "rank 1 saves step 1 into .*, but rank 0 saves step 0 into"),
        ("extra", r"extra\['when'\] is a builtins.object, which is not saved"),
        ("data", "the state of data on rank 1 is not that of rank 0"),
        ("scheduler", "scheduler is a object, which has no state_dict to save"),
        ("a path", "cannot be read or written: (File exists|Not a directory)"),
        ("no optimizer", "rank 0 saves without an optimizer, but rank 1 with one"),
        ("options", "the options of the optimizer's group 0 on rank 1 are not those of rank 0"),
    ],
)
def test_what_cannot_be_saved_is_told_on_all_ranks(pool, tmp_path, case, text):
    for found in pool(2).run(save_bad, tmp_path, case):
        assert re.search(text, found), found
    assert not list(tmp_path.glob("step-*"))


def save_and_go(path):
    """Everything that a state has besides tensors of the model."""
    job = Job(plan_of("one"))
    meshplan.save(
        path, job.model, step=4, data=Position(3), extra={"t": torch.arange(3), "k": {1: 2}}
    )
    position = Position(0)
    state = meshplan.load(path, job.model, data=position)
    return position.number, state.extra["t"].tolist(), state.extra["k"]


def test_the_position_and_the_extra_come_back(pool, tmp_path):
    assert pool(1).run(save_and_go, tmp_path) == [(3, [0, 1, 2], {1: 2})]


class WithNothing(torch.nn.Module):
    """A model with a parameter and a buffer that have no elements."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.none = torch.nn.Parameter(torch.zeros(0, 8))
        self.register_buffer("index", torch.zeros(2, 0, dtype=torch.long))

    def forward(self, x):
        return self.inner(x) + self.none.sum()


def nothing(path, plan):
    """The names that are skipped, and the state's names, where some tensors have no elements."""
    model = meshplan.parallelize(WithNothing(), plan)
    folder = meshplan.save(path, model, step=1, extra=torch.zeros(0))
    state = meshplan.load(path, meshplan.parallelize(WithNothing(), plan))
    return state.skipped, tuple(state.extra.shape), sorted(read_manifest(folder).tensors)


@pytest.mark.parametrize("plan", [{"strategy": "ddp"}, {"strategy": "full_shard"}])
def test_tensors_without_elements_are_in_a_state(pool, tmp_path, plan):
    for skipped, extra, names in pool(2).run(nothing, tmp_path, {"version": 1, **plan}):
        assert skipped == ()
        assert extra == (0,)
        assert {"model/none", "model/index"} <= set(names)


class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.count = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), 0

    def forward(self, x):
        return self.drop(self.inner(x))

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def drop_steps(path, is_resumed):
    torch.manual_seed(5 if is_resumed else 0)
    model = Dropping()
    own = model
    model = meshplan.parallelize(model, {"version": 1, "strategy": "full_shard"})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    part = meshplan.local_batch(model, x)

    def step():
        return meshplan.train_step(model, optimizer, part, part, torch.nn.functional.mse_loss)

    if is_resumed:
        meshplan.load(path, model, optimizer)
    else:
        step()
        own.count = 7
        meshplan.save(path, model, optimizer, step=1)
    return [step(), step()], own.count


def test_masks_of_dropout_and_states_of_modules_go_on(pool, tmp_path):
    before = pool(2).run(drop_steps, tmp_path, False)
    assert pool(2).run(drop_steps, tmp_path, True) == before
    assert before[0][1] == 7


def draws(path, seeds, plan, is_resumed):
    """What a rank draws from every generator after a state was saved; the seeds are its own."""
    rank = torch.distributed.get_rank()
    seed = 100 * is_resumed + (rank if seeds == "of ranks" else 0)
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    random.gauss(0, 1), np.random.randn()  # Each of them keeps a second number for the next call.
    job = Job(plan_of(plan), seed=seed)
    (meshplan.load if is_resumed else meshplan.save)(
        path, job.model, job.optimizer, **({} if is_resumed else {"step": 1})
    )
    numbers = [random.gauss(0, 1), random.random(), *np.random.randn(3).tolist()]
    return [*numbers, np.random.randint(10**9), *torch.randn(3).tolist()]


def test_draws_of_python_numpy_and_torch_go_on(pool, tmp_path):
    before = pool(2).run(draws, tmp_path, "of ranks", "ddp", False)
    assert before[0] != before[1]
    assert pool(2).run(draws, tmp_path, "of ranks", "ddp", True) == before


@pytest.mark.parametrize("seeds", ["the same", "of ranks"])
def test_under_another_plan_only_draws_that_all_ranks_had_alike_go_on(pool, tmp_path, seeds):
    before = pool(2).run(draws, tmp_path, seeds, "ddp", False)
    for plan, world in (("zero1", 2), ("one", 1)):
        after = pool(world).run(draws, tmp_path, seeds, plan, True)
        assert all((one == before[0]) == (seeds == "the same") for one in after)
        assert len({tuple(one) for one in after}) == (1 if seeds == "the same" else world)


def spoiled(path, generator, state):
    """The error of a state whose generator has an impossible state, and what was changed."""
    job = Job(plan_of("one"))
    folder = meshplan.save(path, job.model, step=1)
    manifest = read_manifest(folder)
    values = manifest.values | {"random": manifest.values["random"] | {generator: [state]}}
    (folder / "manifest.json").write_bytes(replace(manifest, values=values).dump())
    other = Job(plan_of("one"), seed=1)
    random.random(), np.random.rand()
    before, drawn = other.numbers(), (random.getstate(), torch.get_rng_state())
    with pytest.raises(StateError) as caught:
        meshplan.load(path, other.model)
    after = other.numbers()
    assert all(np.array_equal(after[name], before[name]) for name in before)
    assert random.getstate() == drawn[0]
    assert torch.equal(torch.get_rng_state(), drawn[1])
    return str(caught.value)


@pytest.mark.parametrize(
    ("generator", "state"),
    [
        ("python", {"$tuple": [3, {"$bytes": "AAAA"}, None]}),
        ("numpy", {"$tuple": ["MT19937", {"$bytes": "AAAA"}, 0, 0, 0.0]}),
        ("cpu", {"$bytes": "AAAA"}),
        ("cpu", {"$tensor": "values/0"}),
    ],
)
def test_a_state_that_no_generator_takes_changes_nothing(pool, tmp_path, generator, state):
    (text,) = pool(1).run(spoiled, tmp_path, generator, state)
    assert f"no valid state of the random number generator {generator}: " in text


def killed(path):
    job = Job(plan_of("full_shard"))
    for step in range(1, 50):
        job.train(1)
        meshplan.save(path, job.model, job.optimizer, step=step, keep=2, scheduler=job.scheduler,
                      data=job.loader, asynchronous=step % 2 == 0)  # fmt: skip
        if step >= 5 and torch.distributed.get_rank() == 2:
            os.kill(os.getpid(), 9)


def test_a_killed_rank_leaves_a_state_to_go_on_from(pool, tmp_path):
    with pytest.raises(AssertionError, match="rank 2"):
        pool(LAYOUTS["full_shard"].world).run(killed, tmp_path)
    first = pool(1).run(whole_run, None)[0]
    step, losses = pool(1).run(whole_run, tmp_path)[0]
    assert step >= 4
    assert losses == pytest.approx(first[1][step:], abs=1e-6)


def whole_run(path):
    """The losses of eight steps in one process, or of what is left of them after a state."""
    job = Job(plan_of("one"))
    if path is None:
        return 0, job.train(8)
    objects = {"scheduler": job.scheduler, "data": job.loader}
    step = meshplan.load(path, job.model, job.optimizer, **objects).step
    return step, job.train(8 - step)


def test_a_state_that_is_not_there_is_a_missing_file():
    assert issubclass(MissingStateError, FileNotFoundError)
    assert issubclass(StateError, RuntimeError)
