"""FSDP2's rules beside FSDP2: the hooks of a real step, played, must act as torch did.

Which seeded bug would this catch? A prefetch of the wrong unit or of none, a unit that is resharded
when it stays gathered, a gather in recomputation that is not needed, a unit without a gradient
whose post-backward is forgotten, an order that outlives its step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from meshplan.runtime.torch_private.fakes import group_of_fakes
from meshplan.wrappers.fsdp import Units, UnitState

STEPS, MICROBATCHES = 2, 2
Event = tuple[str, str]


class Block(nn.Module):
    """Two layers, of which the inner one may be recomputed."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.outer(x).relu()
        if self.recomputes:
            return checkpoint(self._rest, y, use_reentrant=False)  # type: ignore[no-any-return]
        return self._rest(y)

    def _rest(self, y: torch.Tensor) -> torch.Tensor:
        return self.inner(y).relu()  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks of every kind: recomputed, run twice, and one that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(recomputes=number == 1) for number in range(4))
        self.unused, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number == 0 else block(x)
        x = self.blocks[2](x)
        self.unused(x.detach())
        return self.head(x)  # type: ignore[no-any-return]


UNITS: dict[str, bool | int] = {
    "blocks.0": True, "blocks.1.inner": True, "blocks.1": True, "blocks.2": False, "blocks.3": 2,
    "unused": True, "": False,
}  # fmt: skip
"""By module, inner ones first: whether it is resharded after forward, or over how many ranks."""


def recorded() -> tuple[list[Event], list[Event]]:
    """Train with FSDP2 in a group that sends nothing; return its hooks and what they did."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
    from torch.distributed.fsdp._fully_shard import _fsdp_state as states

    hooks: list[Event] = []
    actions: list[Event] = []
    group, state = groups.FSDPParamGroup, states.FSDPState
    name_of: dict[int, str] = {}
    is_ending = [False]

    def named(param_group: Any) -> str:
        return name_of[id(param_group.fsdp_params[0]._module_info.module)]

    def hook(owner: Any, method: str, kind: str, name: Callable[[Any], str]) -> Any:
        real = getattr(owner, method)

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_ending[0]:
                hooks.append((kind, name(self)))
            is_ending[0] = is_ending[0] or kind == "end"
            try:
                return real(self, *args, **kwargs)
            finally:
                is_ending[0] = is_ending[0] and kind != "end"

        return patch.object(owner, method, called)

    def action(owner: Any, method: str, kind: str, is_done: Callable[[Any], bool]) -> Any:
        real = getattr(owner, method)

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_done(self):
                actions.append((kind, name_of[id(self.modules[0])]))
            return real(self, *args, **kwargs)

        return patch.object(owner, method, called)

    def on_state(self: Any) -> str:
        return name_of[id(self._modules[0])]

    def on_group(self: Any) -> str:
        return name_of[id(self.modules[0])]

    with group_of_fakes(0, 4), ExitStack() as stack:
        for each in (
            hook(state, "_pre_forward", "before_forward", on_state),
            hook(state, "_post_forward", "after_forward", on_state),
            hook(state, "_pre_backward", "before_backward", on_state),
            hook(group, "post_backward", "after_backward", on_group),
            hook(state, "_root_post_backward_final_callback", "end", on_state),
            action(group, "unshard", "gather", lambda g: not (
                g._all_gather_result is not None or g.is_unsharded)),
            action(group, "wait_for_unshard", "wait", lambda g: bool(g._all_gather_result)),
            action(group, "_to_sharded", "free", lambda g: not g.is_sharded),
            action(group, "_to_sharded_post_forward", "keep_fewer", lambda g: True),
        ):  # fmt: skip
            stack.enter_context(each)  # Before the methods are registered as hooks.
        model = Model()
        for fqn, reshards in UNITS.items():
            fully_shard(model.get_submodule(fqn), reshard_after_forward=reshards)
        name_of.update({id(module): fqn for fqn, module in model.named_modules()})
        for _ in range(STEPS):
            for number in range(MICROBATCHES):
                is_last = number == MICROBATCHES - 1
                hooks.append(("begin", str(is_last)))
                for fqn, reshards in UNITS.items():
                    module = model.get_submodule(fqn)
                    assert isinstance(module, FSDPModule)
                    module.set_is_last_backward(is_last)
                    module.set_reshard_after_backward(is_last or bool(reshards), recurse=False)
                model(torch.ones(2, 8)).sum().backward()
    return hooks, actions


class Logged:
    """Actions as they come."""

    def __init__(self) -> None:
        self.log: list[Event] = []

    def __getattr__(self, kind: str) -> Any:
        return lambda unit=None: self.log.append((kind, unit.fqn if unit else ""))


def played(hooks: list[Event]) -> list[Event]:
    """Return what the rules do at these hooks."""
    actions = Logged()
    units = Units(
        [
            UnitState(
                fqn=fqn, has_params=True, reshards=bool(reshards),
                fewer_ranks=reshards if type(reshards) is int else 0,
            )
            for fqn, reshards in UNITS.items()
        ],
        actions,
    )  # fmt: skip
    is_last, in_backward = False, False
    for kind, name in hooks:
        if kind == "begin":
            is_last, in_backward = name == "True", False
            for unit in units.states.values():
                unit.reshards_after_backward = is_last or unit.reshards
        elif kind == "end":
            units.end_of_backward(is_last=is_last)
        elif kind == "after_forward":
            units.after_forward(name, in_backward=in_backward)
        else:
            in_backward = in_backward or "backward" in kind
            getattr(units, kind)(name)
    return [each for each in actions.log if each[0] in ("gather", "wait", "free", "keep_fewer")]


@pytest.fixture(scope="module")
def real(apart: ProcessPoolExecutor) -> tuple[list[Event], list[Event]]:
    return apart.submit(recorded).result()


def test_the_rules_act_as_torch_does(real: tuple[list[Event], list[Event]]) -> None:
    hooks, actions = real
    assert {kind for kind, _ in actions} == {"gather", "wait", "free", "keep_fewer"}
    assert played(hooks) == actions


@pytest.mark.parametrize(
    "mistake",
    [
        lambda units: setattr(units, "order", []),
        lambda units: [setattr(unit, "reshards", True) for unit in units.states.values()],
        lambda units: [setattr(unit, "fewer_ranks", 0) for unit in units.states.values()],
    ],
)
def test_a_mistake_is_seen(
    real: tuple[list[Event], list[Event]], mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rule: no order to prefetch by, no unit that stays gathered, none over fewer ranks."""
    before = Units.before_backward

    def wrong(self: Any, fqn: str) -> None:
        mistake(self)
        before(self, fqn)

    hooks, actions = real
    monkeypatch.setattr(Units, "before_backward", wrong)
    try:
        found = played(hooks)
    except IndexError:  # Nothing is left to prefetch.
        return
    assert found != actions
