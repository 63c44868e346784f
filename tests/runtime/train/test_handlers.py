"""What DTensors do in loops, operator by operator, where one rank's part is not the whole.

Which seeded bug would this catch? Values in another layout that are copied as they lie, values of
another shape or dtype that are taken, a write into a view that is lost, a mask or a sum of another
layout that is used as it is, an infinite gradient on one rank that the others do not hear of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from meshplan.errors import ApplyError
from meshplan.runtime.torch_private.handlers import handle_operators_of_loops


def sharded(values: torch.Tensor, placement: Any = None) -> DTensor:
    handle_operators_of_loops()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return distribute_tensor(values, mesh, [placement or Shard(0)], src_data_rank=None)


def assigned() -> tuple[bool, ...]:
    """Whether a parameter has the values that were assigned, in whatever layout they were."""
    values = torch.arange(16.0).view(4, 4)
    seen = []
    for given in (values, sharded(values, Shard(1)), sharded(values, Replicate()), sharded(values)):
        parameter = nn.Parameter(sharded(torch.zeros(4, 4)))
        memory = parameter._local_tensor.data_ptr()
        parameter.data = given
        seen.append(torch.equal(parameter.full_tensor(), values))
        seen.append(parameter._local_tensor.data_ptr() == memory)
    for other in (torch.zeros(4, 2), torch.zeros(4, 4, dtype=torch.float64)):
        with pytest.raises(ApplyError, match="assign values of the same shape, dtype and device"):
            parameter.data = other
    return tuple(seen)


def test_values_are_assigned_in_any_layout(pool):
    assert pool(2).run(assigned) == [(True,) * 8] * 2


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "row": lambda w: w[1].zero_(),
    "row of data": lambda w: w.data[1].zero_(),
    "rows": lambda w: w[1:3].mul_(3),
    "column": lambda w: w[:, 1].add_(1),
    "number": lambda w: w.__setitem__((1, 0), 7.0),
    "copied row": lambda w: w[3].copy_(w[2]),
    "plain part": lambda w: w[:2, :2].copy_(torch.eye(2)),
    "plain": lambda w: w.copy_(torch.arange(16.0).view(4, 4).t()),
    "flat": lambda w: w.view(-1)[3:9].fill_(2),
    "diagonal": lambda w: w.diagonal().fill_(9),
    "part of a view": lambda w: w.t()[2][1:].sub_(w[0, 1:]),
    "chunk": lambda w: w.chunk(2)[0].masked_fill_(w.chunk(2)[0] > 2, -1),
    "identity": nn.init.eye_,
}
"""What loops write into a part of a weight, or the whole of it."""


def written(placement: Placement) -> list[str]:
    """The writes after which a sharded weight has other values than in one process."""
    wrong = []
    for name, write in WRITES.items():
        parameter = nn.Parameter(sharded(torch.arange(16.0).view(4, 4), placement))
        expected = torch.arange(16.0).view(4, 4)
        with torch.no_grad():
            write(parameter)
            write(expected)
        if not torch.equal(parameter.full_tensor(), expected):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_writes_into_views_reach_the_shards(pool, placement):
    assert pool(2).run(written, placement) == [[], []]


def in_a_forward() -> list[torch.Tensor]:
    """The gradient of a sharded weight whose product has a row written, and that of a plain one."""
    out = []
    for values in (torch.ones(4, 4), sharded(torch.ones(4, 4))):
        weight = nn.Parameter(values)
        product = weight * 3
        product[1] = product[0] * 2
        (product * product).sum().backward()
        out.append(weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad)
    return out


def test_writes_into_views_have_their_gradient(pool):
    for expected, found in pool(2).run(in_a_forward):
        assert torch.equal(expected, found)


def overflowed() -> float:
    """What is found in gradients of which one shard has an infinite element."""
    whole = torch.ones(4)
    whole[3] = torch.inf
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(
        [sharded(whole), torch.ones(2)], found, torch.ones(())
    )
    return float(found)


def test_every_rank_hears_of_an_infinite_shard(pool):
    assert pool(2).run(overflowed) == [1.0, 1.0]


def summed() -> float:
    """A scalar of pending sums as a number; other pending sums are not copied as they lie."""
    mesh = sharded(torch.zeros(2)).device_mesh
    partial = DTensor.from_local(torch.ones(()), mesh, [Partial()], run_check=False)
    parameter = sharded(torch.zeros(4), Replicate())
    gradient = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    with pytest.raises(NotImplementedError):  # torch's own answer.
        torch._foreach_copy_([parameter], [gradient])
    return float(partial.item())


def test_a_pending_sum_is_taken_first(pool):
    assert pool(2).run(summed) == [2.0] * 2
