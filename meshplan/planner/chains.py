"""The chain of blocks as ranks of tp, and of ep, compute it: each is read off once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from meshplan.cores import each
from meshplan.cost.chain import chain_of
from meshplan.cost.types import Chain
from meshplan.memory.told_works import loss_chunks_of, styled_of
from meshplan.plan import Plan, make_plan
from meshplan.planner.decision import Question
from meshplan.planner.space import with_axes
from meshplan.spec import Spec

_MANY: Final = 8
"""Chains that are worth a second core: to begin on one takes as long as to read one off."""


class _Key(NamedTuple):
    """Whether activations are cut beside tp is part of it."""

    tp: int
    ep: int
    cuts: bool


class Chains:
    """The chains of one question.

    Args:
        spec: As the plan file says it.
        element_bytes: Asked for what is computed in, once there is something to compute.
        cuts: Whether ranks of so many along tp cut activations along the sequence.
    """

    def __init__(
        self,
        question: Question,
        spec: Spec,
        *,
        element_bytes: Callable[[], int],
        cuts: Callable[[int], bool],
    ) -> None:
        self._spec, self._graph, self._traced = spec, question.graph, question.traced
        self._few = question.few or question.graph
        self._element_bytes, self._cuts = element_bytes, cuts
        self._known: dict[_Key, Chain] = {}

    def at(self, tp: int, ep: int = 1) -> Chain:
        """As one rank of so many along tp, and of ep, has it."""
        if self._traced is not None:
            return self._traced.chain()
        key = _Key(tp, ep, tp > 1 and self._cuts(tp))
        if key not in self._known:
            self._known[key] = self._read(key)
        return self._known[key]

    def of(self, plan: Plan, ep: int = 1) -> Chain:
        """As one rank of the plan's tp, and of ep, has it."""
        tp = plan.mesh.size("tp")
        key = _Key(tp, ep, tp > 1 and plan.spec.sequence_parallel)
        if key not in self._known:
            self._known[key] = self._read_off(plan, ep)
        return self._known[key]

    def read(self, cuts: Iterable[tuple[int, int]]) -> None:
        """Those of many (tp, ep) that are going to be asked for."""
        keys = [_Key(tp, ep, tp > 1 and self._cuts(tp)) for tp, ep in cuts]
        new = [key for key in keys if key not in self._known]
        if self._traced is None and len(new) >= _MANY:
            self._known.update(zip(new, each(self._read, new), strict=True))

    def _read(self, key: _Key) -> Chain:
        trial = with_axes(self._spec, {"tp": key.tp}, sequence_parallel=key.cuts)
        return self._read_off(make_plan(trial, self._few), key.ep)

    def _read_off(self, plan: Plan, ep: int) -> Chain:
        length, tp = self._spec.batch.seq_len, plan.mesh.size("tp")
        assert length is not None
        return chain_of(
            self._graph,
            seq_len=length,
            element_bytes=self._element_bytes(),
            tp=tp,
            ep=ep,
            styled=styled_of(plan) if tp > 1 else None,
            loss_chunks=loss_chunks_of(plan),
        )
