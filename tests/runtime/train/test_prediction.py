"""`predict`: every sample once, in order, under every plan.

Which seeded bug would this catch? Samples that fill up the last batch in the result, samples in
the order of ranks instead of the dataset, ranks along tp or pp that count twice, a sequence
of which only one rank's tokens are kept, or a model that stays in evaluation mode.
"""

from __future__ import annotations

import pytest
import torch

import meshplan
from meshplan.errors import ApplyError
from tests.helpers.stated import LAYOUTS, SEQ_LEN, VOCAB, Model, plan_of


def samples(num):
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(VOCAB, (num, SEQ_LEN + 1), generator=generator)
    return [(row[:-1], row[1:]) for row in drawn]


def first(batch):
    return batch[0]


def wrapped(layout):
    torch.manual_seed(0)
    return meshplan.parallelize(Model(), plan_of(layout))


def alone(num):
    torch.manual_seed(0)
    with torch.no_grad():
        return Model().eval()(torch.stack([inputs for inputs, _ in samples(num)]))


def predicted(layout, num):
    model = wrapped(layout)
    found = meshplan.predict(model, samples(num), inputs=first, batch_size=8)
    best = meshplan.predict(
        model, Stream(num), inputs=first, batch_size=8, take=lambda x: {"best": (x.argmax(-1),)}
    )
    assert all(module.training for module in model.modules())
    return found, best


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, num):
        self.num = num

    def __iter__(self):
        return iter(samples(self.num))


@pytest.mark.parametrize("num", [3, 21])
@pytest.mark.parametrize(
    "layout",
    ["one", "full_shard", "packed", "pp", "cp", *(pytest.param(name, marks=pytest.mark.wide)
     for name in ("ddp", "hybrid", "tp_fsdp", "pp_fsdp_tp", "ep_fsdp"))],
)  # fmt: skip
def test_every_sample_is_predicted_once_and_in_order(pool, layout, num):
    expected = alone(num)
    for found, best in pool(LAYOUTS[layout].world).run(predicted, layout, num):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(best["best"][0], found.argmax(-1))


def refused():
    model = wrapped("full_shard")
    messages = []
    for dataset, take in (
        (samples(8), torch.Tensor.mean),
        (samples(8), lambda output: {"all": output, "cache": object()}),
        ([], None),
        ([(torch.zeros(n, dtype=torch.long), 0) for n in (4, 4, 8, 8)], None),
        ([(torch.zeros(n, dtype=torch.long), 0) for n in (4, 8)], None),
        (samples(4 + torch.distributed.get_rank()), None),
    ):
        with pytest.raises(ApplyError) as error:
            meshplan.predict(model, dataset, inputs=first, take=take, batch_size=2)
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_joined_is_refused_on_all_ranks(pool):
    for scalar, cache, empty, batches, ranks, lengths in pool(2).run(refused):
        assert "tensor of shape []" in scalar
        assert "object at cache" in cache
        assert "no samples" in empty
        assert "different shapes" in batches
        assert "different shapes" in ranks
        assert "rank 1 has 5 samples" in lengths.replace("samples in its dataset 5", "5 samples")
