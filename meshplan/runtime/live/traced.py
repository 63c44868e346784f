"""Costs and memory of a live model for the planner, from traces on fake tensors.

Four microbatches are enough: with one and with two samples, each once without recomputation and
once with every block recomputed. Block costs follow from the recorded operations. The memory of a
plan is composed from the recorded storages (`memory.repeat.compose`), and the actions of the plan's
wrappers are added. The plan that the search chooses is then traced itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from torch import nn

from meshplan.cost.types import Chain
from meshplan.errors import MeshplanError, Origin, PlanError, Problem
from meshplan.memory.analytic.ranks import ERROR, OverError
from meshplan.memory.answer.assemble import assemble
from meshplan.memory.answer.estimate import MemoryEstimate, Tier
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.memory.answer.reserved import ReplayCache, ReservedLog
from meshplan.memory.log.events import EventLog
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.repeat.compose import Composer
from meshplan.memory.repeat.scale import scaled
from meshplan.memory.repeat.segments import NotComposableError
from meshplan.memory.replay import Prepared
from meshplan.memory.replay.optimizer import check_optimizer
from meshplan.memory.replay.step import composed_log
from meshplan.model.graph import ModelGraph
from meshplan.plan.plan import Plan, make_plan
from meshplan.planner.problem.live_model import Priced
from meshplan.planner.space.trials import with_axes
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.estimate.estimate import estimate_by_trace
from meshplan.runtime.estimate.request import EstimateRequest
from meshplan.runtime.estimate.scale_down import ModelSource
from meshplan.runtime.fake_step.chain import Kept, Traces, chain_of, check_speed
from meshplan.runtime.fake_step.costs import Ask, MicrobatchCosts, watch
from meshplan.runtime.fake_step.default_loop import DefaultLoop, loop_of
from meshplan.runtime.live.priced import priced
from meshplan.runtime.trace.trace_errors import problem_of
from meshplan.spec.spec import Spec

_MOST: Final = 3
"""Most samples of the microbatches from which all others are extrapolated: one and two samples, or
two and three if the model runs other operators on one sample than on two."""
_AS_STATED: Final = "of a live model is priced as the plan states it, and not searched"


class TracedModel:
    """Costs and memory of a live model; implements `planner.problem.live_model.Traced`.

    Args:
        model: The unsharded model of one process, on any device. It is copied, and its values are
            not read.
        graph: The graph of the model.
        spec: The plan file, which may leave fields open.
        device: Name of the device, as in the plan's `hardware`.
        limit_bytes: Bytes that one device may reserve.
        source: Source from which another process can build the model; None if the model exists in
            this process only.
        origin: Place where the user named the model; None if the user passed the model itself.
        report: Called with lines on the progress.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ModelGraph,
        spec: Spec,
        *,
        device: str,
        limit_bytes: int,
        source: ModelSource | None,
        origin: Origin | None,
        report: Callable[[str], None],
    ) -> None:
        self._model, self._graph, self._spec = model, graph, spec
        self._source = source
        self._device, self._limit_bytes = device, limit_bytes
        self._origin, self._report = origin, report
        self._exact: dict[tuple[int, frozenset[str]], Prepared] = {}
        self._known: dict[tuple[int, frozenset[str]], tuple[Prepared, Prepared]] = {}
        self._composers: dict[int, Composer] = {}
        self._is_steady = False
        self._doubted: set[int] = set()
        """Numbers of samples for which the memory of a composed trace turned out to be too low."""

    # Interface of the planner

    def refuses(self, spec: Spec) -> str:
        """Return why the planner cannot search plans like this spec; "" if it can.

        The plan file, with any mesh, must pass the same checks.
        """
        stated = replace(self._spec, mesh=None)
        whys = ((*_unsearched(each), *_without_figures(each)) for each in (spec, stated))
        return next((why for each in whys for why in each), "")

    def is_priced(self, spec: Spec) -> bool:
        """Return True if `priced` can handle a spec without open fields, searchable or not."""
        return self._source is not None and not any(_without_figures(spec))

    def priced(self, spec: Spec) -> Priced:
        """Return the memory and the costs of a plan that leaves no field open, without a search."""
        return priced(self._asked(spec), self._report)

    def _asked(self, spec: Spec) -> EstimateRequest:
        assert self._source is not None
        return EstimateRequest(
            spec=spec, source=self._source, device=self._device, limit_bytes=self._limit_bytes
        )

    def chain(self) -> Chain:
        """Return the costs of the blocks, and of the modules before and after them."""
        return self._chain

    def memory(self, plan: Plan, stop_above_bytes: float = float("inf")) -> MemoryEstimate:
        """Estimate every rank's memory, never below what the plan needs.

        Args:
            plan: A plan of this model.
            stop_above_bytes: Bytes per rank above which the estimate stops with an OverError.

        Raises:
            OverError: A rank needs more than `stop_above_bytes`.
            PlanError: The traces are not valid for the plan, or the model cannot be traced.
        """
        least, most = self._works(plan)
        # No trace of this plan is needed if the composed upper bound fits into
        # `stop_above_bytes`, or if even the composed lower bound does not.
        try:
            return self._estimate(plan, most, stop_above_bytes)
        except OverError:
            if least is most:
                raise
        self._estimate(plan, least, stop_above_bytes)  # May raise OverError.
        self._trace_as_is(plan)
        return self._estimate(plan, self._exact[_key(plan)], stop_above_bytes)

    def certify(self, plan: Plan, stop_above_bytes: float = float("inf")) -> MemoryEstimate:
        """Estimate every rank's memory from a microbatch traced under the plan itself.

        If a subprocess can build the model, `estimate_by_trace` makes the estimate, so that the
        planner and `meshplan estimate` report the same bytes.
        """
        self._trace_as_is(plan)
        if self._source is not None:
            return estimate_by_trace(self._asked(plan.spec), self._report)
        return self._estimate(plan, self._exact[_key(plan)], stop_above_bytes)

    def _trace_as_is(self, plan: Plan) -> None:
        """Trace a microbatch under a plan once; `memory` uses the trace from now on."""
        key = _key(plan)
        if key not in self._exact:
            composed = self._known.get(key)
            self._exact[key] = Prepared(self._traced_already(key) or self._traced(plan, key))
            # The composed upper bound was too low. No longer compose for this number of samples.
            if composed is not None and _peak(composed[1]) < _peak(self._exact[key]):
                self._doubted.add(key[0])

    # Traces

    def _traced_already(self, key: tuple[int, frozenset[str]]) -> MicrobatchTrace | None:
        """Return the search's own trace of a key; None if there is none.

        Args:
            key: Number of samples, and the recomputed blocks. The search traced none and all.
        """
        samples, recomputed = key
        found = self._traces[0].get(samples)
        if found is None or recomputed not in (frozenset(), frozenset(self._blocks)):
            return None
        return found.recomputed.trace if recomputed else found.plain.trace

    def _traced(self, plan: Plan, key: tuple[int, frozenset[str]]) -> MicrobatchTrace:
        (seen,) = self._watched(self._loop(plan), [Ask(*key)])
        return seen.trace

    @cached_property
    def _plan(self) -> Plan:
        """The data-parallel plan whose traces the search uses, with `_MOST` samples at once."""
        axis = "dp_replicate" if self._spec.strategy == "ddp" else "dp_shard"
        trial = with_axes(self._spec, {axis: 2})
        trial = replace(trial, batch=replace(trial.batch, micro=_MOST))
        return make_plan(trial, self._graph)

    @cached_property
    def _few(self) -> DefaultLoop:
        return self._in_words(lambda: loop_of(self._model, self._plan))

    def _loop(self, plan: Plan) -> DefaultLoop:
        """Return the inputs, targets and loss of one microbatch of a plan."""
        if plan.micro is not None and plan.micro <= _MOST:
            return self._few
        one = replace(plan, accumulate=1)
        return self._in_words(lambda: loop_of(self._model, one, self._few.returned))

    def _watched(self, loop: DefaultLoop, asks: list[Ask]) -> list[MicrobatchCosts]:
        words = "microbatches" if len(asks) > 1 else "a microbatch of the plan"
        self._report(f"tracing {words} of {type(self._model).__name__}")
        return self._in_words(
            lambda: watch(
                self._model, self._plan, loop.inputs, loop.targets, loop.loss_fn, self._device,
                asks, is_steady=self._is_steady,
            )
        )  # fmt: skip

    def _in_words(self, run: Callable[[], Any]) -> Any:
        """Return `run()`, with every exception of the model's own code raised as a PlanError."""
        try:
            return run()
        except MeshplanError as error:
            raise PlanError(error.problems) from None
        except Exception as error:
            raise PlanError(problem_of(error, self._model, self._origin)) from None

    @cached_property
    def _traces(self) -> tuple[dict[int, Traces], int]:
        """(traces by number of samples, base): other numbers scale from `base` and `base + 1`."""
        blocks = frozenset(self._graph.blocks())
        found = self._seen((1, 2), blocks)
        # A model may run other operators on one sample than on two. Then the base is 2.
        try:
            scaled(found[1].plain.trace, found[2].plain.trace, 1)
            scaled(found[1].recomputed.trace, found[2].recomputed.trace, 1)
        except NotComposableError:
            return found | self._seen((_MOST,), blocks), 2
        return found, 1

    def _seen(self, sizes: tuple[int, ...], blocks: frozenset[str]) -> dict[int, Traces]:
        recomputed_sets = (frozenset(), blocks) if blocks else (frozenset(),)
        asks = [Ask(samples, recomputed) for recomputed in recomputed_sets for samples in sizes]
        seen = dict(zip(asks, self._watched(self._few, asks), strict=True))
        self._is_steady = all(each.is_steady for each in seen.values())
        out = {}
        for samples in sizes:
            plain, recomputed = (
                seen[Ask(samples, blocks_of)]
                for blocks_of in (recomputed_sets[0], recomputed_sets[-1])
            )
            kept, backward_bytes = self._kept(plain.trace, recomputed.trace)
            out[samples] = Traces(samples, plain, recomputed, kept, backward_bytes)
        return out

    def _kept(self, plain: MicrobatchTrace, recomputed: MicrobatchTrace) -> tuple[Kept, Kept]:
        try:
            composer = Composer(plain, recomputed, self._blocks)
        except NotComposableError:
            return {}, {}
        return composer.kept_bytes(), composer.backward_bytes()

    @property
    def _blocks(self) -> tuple[str, ...]:
        return self._graph.blocks()

    @cached_property
    def _chain(self) -> Chain:
        traces, base = self._traces
        chain = chain_of(self._plan, traces[base], traces[base + 1])
        check_speed(
            self._model,
            self._plan,
            flops=sum(kind.forward.flops for kind in chain.kinds),
            convolved=traces[base].plain.convolved,
            unknown=traces[base].plain.unknown | traces[base].recomputed.unknown,
            origin=self._origin,
            report=self._report,
        )
        return chain

    # Memory

    def _works(self, plan: Plan) -> tuple[Prepared, Prepared]:
        """Return (lower, upper): two logs of a plan's microbatch that bound what it allocates.

        They are the same object if the log is exact.
        """
        if problems := list(self._clashes(plan)):
            raise PlanError(problems)
        key = _key(plan)
        if key in self._exact:
            return (self._exact[key],) * 2
        if key[0] in self._doubted:
            self._trace_as_is(plan)
            return (self._exact[key],) * 2
        if key not in self._known:
            try:
                low, high = self._composer(key[0]).trace(key[1])
            except NotComposableError:
                self._trace_as_is(plan)
                return (self._exact[key],) * 2
            least = Prepared(low)
            self._known[key] = least, least if high is low else Prepared(high)
        return self._known[key]

    def _composer(self, samples: int) -> Composer:
        if samples not in self._composers:
            traces, base = self._traces
            if samples in traces:
                plain, recomputed = traces[samples].plain.trace, traces[samples].recomputed.trace
            else:
                plain, recomputed = (
                    scaled(getattr(traces[base], name).trace, getattr(traces[base + 1], name).trace,
                           samples - base)
                    for name in ("plain", "recomputed")
                )  # fmt: skip
            self._composers[samples] = Composer(plain, recomputed, self._blocks)
        return self._composers[samples]

    def _clashes(self, plan: Plan) -> Iterator[Problem]:
        """Yield reasons why the traces of the search are not valid for a plan."""
        asked, traced = _computed(plan), _computed(self._plan)
        # Casts to the dtype that a tensor already has change nothing.
        is_cast = any(each.plain.has_cast for each in self._traces[0].values())
        if asked.dtypes != traced.dtypes or (is_cast and asked.casts != traced.casts):
            what = "this strategy computes with parameters in other dtypes than were traced"
            yield Problem(what, self._spec.origin("precision"), "state the strategy in the plan")
        if plan.assignment.stages is not None or plan.mesh.size("tp", "cp", "ep") > 1:
            what = "pp, tp, cp or ep exceeds 1, but the live model was traced without these axes"
            fix = "remove them from the mesh, or state the whole plan and run meshplan estimate"
            yield Problem(what, self._spec.origin("mesh"), fix)

    def _estimate(self, plan: Plan, prepared: Prepared, stop_above_bytes: float) -> MemoryEstimate:
        groups = equal_ranks(plan.assignment)
        logs: list[EventLog] = []
        replayed: dict[int, ReservedLog] = {}
        holding = ReplayCache(self._device, plan.spec)
        for number, ranks in enumerate(groups):
            logs.append(composed_log(prepared, plan, ranks[0]))
            if logs[-1].pooled_bytes > stop_above_bytes:
                raise OverError(ranks[0], logs[-1].pooled_bytes)
            replayed[number] = holding.of(logs[-1])
            if replayed[number].reserve.reserved_bytes > stop_above_bytes:
                raise OverError(ranks[0], replayed[number].reserve.reserved_bytes)
        is_exact = any(prepared is each for each in self._exact.values())
        how = "under the plan" if is_exact else "block by block, not under the plan itself"
        return assemble(
            plan,
            groups,
            logs,
            device=self._device,
            limit_bytes=self._limit_bytes,
            tier=Tier.REPLAY,
            certified=f"a microbatch of the model was traced {how}; wrappers were added by rules",
            assumed=self._assumed(plan),
            error=ERROR,
            replayed=replayed,
        )

    def _assumed(self, plan: Plan) -> tuple[tuple[str, str], ...]:
        """Return the loop's assumptions, with the input shapes for one step of the plan."""
        samples = (plan.micro or 1) * plan.accumulate
        parts = [
            f"{[samples, *t.shape[1:]]} {str(t.dtype)[6:]}" for _, t in tensors_in(self._few.inputs)
        ]
        (name, _), *rest = self._few.assumed
        return ((name, ", ".join(parts)), *rest)


@dataclass(frozen=True, slots=True)
class _Computed:
    """The dtypes that a trace depends on, in addition to its samples and its recomputed blocks.

    Attributes:
        dtypes: (fqn of a tensor, dtype that it is computed with).
        casts: (fqn of a unit, its dtypes of parameters and output, True if it casts its inputs).
    """

    dtypes: tuple[tuple[str, str], ...]
    casts: tuple[tuple[str, str, bool], ...]


def _computed(plan: Plan) -> _Computed:
    a = plan.assignment
    return _Computed(
        tuple((fqn, p.compute_dtype) for fqn, p in a.tensors.items()),
        tuple(
            sorted(
                (fqn, f"{unit.precision.param} {unit.precision.output}", unit.casts_inputs)
                for fqn, unit in a.units.items()
                if unit.precision.param or unit.precision.output
            )
        ),
    )


def _key(plan: Plan) -> tuple[int, frozenset[str]]:
    assert plan.micro is not None
    return plan.micro, frozenset(plan.assignment.recompute)


def _peak(prepared: Prepared) -> int:
    return prepared.log.peak.live_bytes


def _unsearched(spec: Spec) -> Iterator[str]:
    """Yield reasons why a spec can only be priced as it is, not searched."""
    axes = {"pp": "pipeline parallelism", "tp": "tensor parallelism", "cp": "context parallelism"}
    yield from (f"{word} {_AS_STATED}" for axis, word in axes.items() if _spreads(spec, axis))
    modes = {spec.activation_checkpointing.mode} | {
        rule.activation_checkpointing.mode
        for rule in spec.rules
        if rule.activation_checkpointing is not None
    }
    if "selective" in modes:
        yield f"selective recomputation {_AS_STATED}"
    if spec.sequence_parallel:
        yield f"sequence_parallel {_AS_STATED}"


def _spreads(spec: Spec, axis: str) -> bool:
    return isinstance(spec.mesh, Mapping) and spec.mesh.get(axis, 1) != 1


def _without_figures(spec: Spec) -> Iterator[str]:
    """Yield reasons why neither step time nor memory of a live model is known under a spec."""
    ddp = spec.ddp.get("find_unused_parameters") or spec.ddp.get("static_graph")
    for is_present, why in (
        (_spreads(spec, "ep"), "expert parallelism of a live model is not planned yet"),
        (spec.compile, "compile of a live model is not planned yet"),
        (spec.sync_batchnorm, "sync_batchnorm of a live model is not planned yet"),
        (bool(ddp), "ddp's find_unused_parameters and static_graph are not planned yet"),
        (
            any(rule.apply for rule in spec.rules),
            "the planner cannot know what the code of 'apply' does to a model",
        ),
    ):
        if is_present:
            yield why
    try:
        check_optimizer(spec.optimizer)
    except PlanError as error:
        yield error.problems[0].what
