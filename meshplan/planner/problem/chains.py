"""Block costs of the model for each size of tp and ep, derived once each.

A chain (`cost.types.Chain`) lists the costs of all blocks in the order of forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from meshplan.cost.chain import chain_of, with_optimizer
from meshplan.cost.grid import ProgramKey
from meshplan.cost.types import Chain
from meshplan.memory.analytic.microbatches import loss_chunks_of, styled_of
from meshplan.plan.plan import Plan, make_plan
from meshplan.planner.problem.decision import PlanRequest
from meshplan.planner.space.trials import with_axes
from meshplan.shown import whole_repr
from meshplan.spec.spec import Spec
from meshplan.two_cores import each

_MANY: Final = 8
"""Number of chains from which a second core pays off: forking a process for it takes as long as
deriving one chain."""


class _ChainKey(NamedTuple):
    """The choices that a chain of costs depends on.

    Attributes:
        tp: Size of tp.
        ep: Size of ep.
        cuts: If True, tp shards activations along the sequence (sequence parallelism).
        cuts_loss: If True, tp shards the loss along the vocabulary (loss parallelism).
        loss_chunks: Number of token chunks in which the loss is computed.
    """

    tp: int
    ep: int
    cuts: bool
    cuts_loss: bool
    loss_chunks: int


class Chains:
    """The chains of one request, computed on first use.

    Args:
        request: The request.
        spec: The spec of the plan file.
        element_bytes: Returns the bytes of one element of the compute dtype. Called when the first
            chain is derived.
        cuts: Maps a size of tp to (True if activations are sharded along the sequence, True if the
            loss is sharded along the vocabulary).
    """

    def __init__(
        self,
        request: PlanRequest,
        spec: Spec,
        *,
        element_bytes: Callable[[], int],
        cuts: Callable[[int], tuple[bool, bool]],
    ) -> None:
        self._spec, self._graph, self._traced = spec, request.graph, request.traced
        self._few = request.few or request.graph
        self._element_bytes, self._cuts = element_bytes, cuts
        self._known: dict[_ChainKey, Chain] = {}
        self._read_before = request.chains

    def at(
        self, tp: int, ep: int, loss_chunks: int | None = None, *, stage_samples: int = 0
    ) -> Chain:
        """Return the chain for these sizes: the block costs of one rank of the tp and ep groups.

        The chain of a live model depends on tp and its settings, and on the pipeline's samples.

        Args:
            tp: Size of tp.
            ep: Size of ep.
            loss_chunks: Number of token chunks of the loss; None for the number that the plan
                states.
            stage_samples: As in `ProgramKey`.
        """
        if self._traced is not None:
            cuts, cuts_loss = self._cuts(tp) if tp > 1 else (False, False)
            sizes = {"tp": tp, "pp": 2} if stage_samples else {"tp": tp}
            trial = with_axes(self._spec, sizes, sequence_parallel=cuts, loss_parallel=cuts_loss)
            found = self._traced.chain(trial, stage_samples)
            return with_optimizer(found, self._graph, self._spec.optimizer)
        stated = self._spec.loss_chunks
        usual = stated if isinstance(stated, int) else 1
        key = self._key(ProgramKey(tp, ep, loss_chunks or usual))
        if key not in self._known:
            self._known[key] = self._read(key)
        return self._known[key]

    def of(self, plan: Plan, ep: int = 1) -> Chain:
        """Return the chain for the tp size of a plan and this size of ep."""
        tp = plan.mesh.size("tp")
        cuts, cuts_loss = plan.spec.sequence_parallel, plan.spec.loss_parallel
        key = _ChainKey(tp, ep, tp > 1 and cuts, tp > 1 and cuts_loss, loss_chunks_of(plan))
        if key not in self._known:
            self._known[key] = self._read_off(plan, ep)
        return self._known[key]

    def read(self, cuts: Iterable[ProgramKey]) -> None:
        """Derive the chains of these keys ahead of their use, on two cores if they are many."""
        keys = dict.fromkeys(self._key(cut) for cut in cuts)
        new = [key for key in keys if key not in self._known]
        if self._traced is None and len(new) >= _MANY:
            self._known.update(zip(new, each(self._read, new), strict=True))

    def _key(self, cut: ProgramKey) -> _ChainKey:
        cuts, cuts_loss = self._cuts(cut.tp) if cut.tp > 1 else (False, False)
        return _ChainKey(cut.tp, cut.ep, cuts, cuts_loss, cut.loss_chunks)

    def _read(self, key: _ChainKey) -> Chain:
        """Derive a chain from a trial plan with the choices of the key."""
        trial = with_axes(
            self._spec,
            {"tp": key.tp},
            sequence_parallel=key.cuts,
            loss_parallel=key.cuts_loss,
        )
        trial = replace(trial, loss_chunks=key.loss_chunks)
        return self._read_off(make_plan(trial, self._few), key.ep)

    def _read_off(self, plan: Plan, ep: int) -> Chain:
        """Derive the chain of a plan, or take it from the cache of the request."""
        length, tp = self._spec.batch.seq_len, plan.mesh.size("tp")
        assert length is not None
        # All searches of a request share this cache, since they need the same chains.
        key = id(self._graph), whole_repr(plan.spec), ep
        if key not in self._read_before:
            self._read_before[key] = self._chain_of(plan, ep, length, tp)
        return self._read_before[key]

    def _chain_of(self, plan: Plan, ep: int, length: int, tp: int) -> Chain:
        found = chain_of(
            self._graph,
            seq_len=length,
            element_bytes=self._element_bytes(),
            tp=tp,
            ep=ep,
            styled=styled_of(plan) if tp > 1 else None,
            loss_chunks=loss_chunks_of(plan),
            is_compiled=plan.spec.compile,
        )
        return with_optimizer(found, self._graph, self._spec.optimizer)
