"""Traces of a live model's microbatches under one `TracedChoices`, and what follows from them.

Microbatches of two numbers of samples are traced, each once without recomputation and once with
every block recomputed; of three, if the model runs other operators on one sample than on two. Block
costs follow from the recorded operations. The memory of a microbatch with other samples and other
recomputed blocks is composed from the recorded storages (`memory.repeat.compose`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

from torch import nn

from meshplan.cost.types import Chain
from meshplan.errors import MeshplanError, Origin, PlanError, Problem
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.repeat.compose import Composer
from meshplan.memory.repeat.scale import scaled
from meshplan.memory.repeat.segments import NotComposableError
from meshplan.memory.replay import Prepared
from meshplan.plan.plan import Plan
from meshplan.runtime.fake_step.chain import Kept, Staged, Traces, chain_of, check_speed
from meshplan.runtime.fake_step.costs import (
    Ask,
    MicrobatchCosts,
    watch,
)
from meshplan.runtime.fake_step.default_loop import DefaultLoop, Returned, loop_of
from meshplan.runtime.live.bounded import BoundedTraces, Question
from meshplan.runtime.live.trace_json import costs_from_json, costs_to_json
from meshplan.runtime.trace.bounds import UnknownShapeError
from meshplan.runtime.trace.trace_errors import refused

MOST: Final = 3
"""Most samples of the microbatches from which all others are extrapolated: one and two samples, or
two and three if the model runs other operators on one sample than on two."""


class BlockTraces:
    """Costs and memory of a live model's blocks on one rank of tp.

    Args:
        model: The unsharded model of one process, on any device. It is copied, and its values are
            not read.
        plan: The plan under which microbatches are traced: two data ranks, `MOST` samples at once
            and nothing else but tp.
        device: Name of the device whose kernels are emulated.
        origin: Place where the user named the model; None if the user passed the model itself.
        report: Called with lines on the progress.
        bounded: Runs the traces of this model.
        expects_unlike: Returns True if the model seems to run other operators on one sample than on
            several; the microbatches that are then needed are traced at once.

    Attributes:
        plan: The plan under which microbatches are traced.
        exact: Microbatches that were traced as they are, by (samples, recomputed blocks).
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        device: str,
        origin: Origin | None,
        report: Callable[[str], None],
        bounded: BoundedTraces,
        expects_unlike: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model, self.plan, self._device = model, plan, device
        self._bounded, self._expects_unlike = bounded, expects_unlike
        self._origin, self._report = origin, report
        self._blocks = plan.graph.blocks()
        self.exact: dict[tuple[int, frozenset[str]], Prepared] = {}
        self._known: dict[tuple[int, frozenset[str]], tuple[Prepared, Prepared]] = {}
        self._composers: dict[int, Composer] = {}
        self._is_steady = False
        self._doubted: set[int] = set()
        """Numbers of samples for which the memory of a composed trace turned out to be too low."""

    def works(self, plan: Plan) -> tuple[Prepared, Prepared]:
        """Return (lower, upper): two logs of a plan's microbatch that bound what it allocates.

        They are the same object if the log is exact.
        """
        if problems := list(self.clashes(plan)):
            raise PlanError(problems)
        key = _key(plan)
        if key in self.exact or key[0] in self._doubted:
            return (self.traced_as_is(plan),) * 2
        if key not in self._known:
            try:
                low, high = self._composer(key[0]).trace(key[1])
            except NotComposableError:
                return (self.traced_as_is(plan),) * 2
            least = Prepared(low)
            self._known[key] = least, least if high is low else Prepared(high)
        return self._known[key]

    def traced_as_is(self, plan: Plan) -> Prepared:
        """Return a microbatch traced under a plan itself; `works` returns it from now on."""
        key = _key(plan)
        if key not in self.exact:
            composed = self._known.get(key)
            self.exact[key] = Prepared(self._traced_already(key) or self._traced(plan, key))
            # The composed upper bound was too low. No longer compose for this number of samples.
            if composed is not None and _peak(composed[1]) < _peak(self.exact[key]):
                self._doubted.add(key[0])
        return self.exact[key]

    def is_exact(self, prepared: Prepared) -> bool:
        """Return True if a microbatch was traced with its own samples and recomputed blocks."""
        return any(prepared is each for each in self.exact.values())

    def clashes(self, plan: Plan) -> Iterator[Problem]:
        """Yield reasons why the traces are not valid for a plan."""
        asked, traced = _computed(plan), _computed(self.plan)
        # Casts to the dtype that a tensor already has change nothing.
        is_cast = any(each.plain.has_cast for each in self._traces[0].values())
        if asked.dtypes != traced.dtypes or (is_cast and asked.casts != traced.casts):
            what = "this strategy computes with parameters in other dtypes than were traced"
            at = plan.spec.origin("precision")
            yield Problem(what, at, "state the strategy in the plan")

    @cached_property
    def chain(self) -> Chain:
        """The costs of the blocks, and of the modules before and after them."""
        traces, base = self._traces
        chain = chain_of(self.plan, traces[base], traces[base + 1])
        check_speed(
            self._model,
            self.plan,
            flops=sum(kind.forward.flops for kind in chain.kinds),
            convolved=traces[base].plain.convolved,
            unknown=traces[base].plain.unknown | traces[base].recomputed.unknown,
            origin=self._origin,
            report=self._report,
        )
        return chain

    @property
    def is_traced(self) -> bool:
        """True once the microbatches from which all others are extrapolated have been traced."""
        return "_traces" in vars(self)

    @property
    def is_single_unlike(self) -> bool:
        """True if the model runs other operators on one sample than on several."""
        return self._traces[1] > 1

    def staged_chain(self, staged: Staged, samples: int) -> Chain:
        """Return the costs of the blocks, and of the modules around them, in pipeline stages.

        Args:
            staged: Where stages may cut the model.
            samples: Samples of a microbatch: 1, or 2 for any number above 1. They matter only if
                `is_single_unlike`.
        """
        assert self.chain  # Checks that the speed of the operators is known.
        traces, base = self._traces
        if samples < base:
            return chain_of(self.plan, traces[samples], None, staged)
        return chain_of(self.plan, traces[base], traces[base + 1], staged)

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
    def loop(self) -> DefaultLoop:
        """The inputs, targets and loss of `MOST` samples."""
        return self._looped(self.plan, None)

    def loop_of(self, plan: Plan) -> DefaultLoop:
        """Return the inputs, targets and loss of `batch.micro` samples of a plan."""
        one = replace(plan, accumulate=1)
        return self._looped(one, self.loop.returned)

    def _looped(self, plan: Plan, returned: Returned | None) -> DefaultLoop:
        run = partial(self._in_words, lambda: loop_of(self._model, plan, returned))
        return self._bounded.run(run, lambda _: ())

    def _loop(self, plan: Plan) -> DefaultLoop:
        """Return the inputs, targets and loss of one microbatch of a plan, and maybe of more."""
        is_enough = plan.micro is not None and plan.micro <= MOST
        return self.loop if is_enough else self.loop_of(plan)

    def _watched(self, loop: DefaultLoop, asks: Sequence[Ask]) -> list[MicrobatchCosts]:
        def run(numbers: Sequence[int]) -> list[MicrobatchCosts]:
            words = "microbatches" if len(asks) > 1 else "a microbatch of the plan"
            tp = self.plan.mesh.size("tp")
            as_rank = f" as a rank of tp {tp}" if tp > 1 else ""
            self._report(f"tracing {words} of {type(self._model).__name__}{as_rank}")
            made: list[MicrobatchCosts] = self._in_words(
                lambda: watch(
                    self._model, self.plan, loop.inputs, loop.targets, loop.loss_fn, self._device,
                    [asks[number] for number in numbers], is_steady=self._is_steady,
                )
            )  # fmt: skip
            return made

        asked = [(each.samples, each.recomputed) for each in asks]
        return self._bounded.recorded(self._question, asked, run, lambda costs: costs.trace.log)

    @cached_property
    def _question(self) -> Question[MicrobatchCosts]:
        about = "blocks", self.plan.assignment
        return Question.of(self.plan.spec, about, costs_to_json, costs_from_json)

    def _in_words(self, run: Callable[[], Any]) -> Any:
        return in_words(run, self._model, self._origin)

    @cached_property
    def _traces(self) -> tuple[dict[int, Traces], int]:
        """(traces by number of samples, base): other numbers scale from `base` and `base + 1`."""
        blocks = frozenset(self._blocks)
        found = self._seen((1, 2, MOST) if self._expects_unlike() else (1, 2), blocks)
        # A model may run other operators on one sample than on two. Then the base is 2.
        try:
            scaled(found[1].plain.trace, found[2].plain.trace, 1)
            scaled(found[1].recomputed.trace, found[2].recomputed.trace, 1)
        except NotComposableError:
            return found if MOST in found else found | self._seen((MOST,), blocks), 2
        return found, 1

    def _seen(self, sizes: tuple[int, ...], blocks: frozenset[str]) -> dict[int, Traces]:
        recomputed_sets = (frozenset(), blocks) if blocks else (frozenset(),)
        asks = [Ask(samples, recomputed) for recomputed in recomputed_sets for samples in sizes]
        seen = dict(zip(asks, self._watched(self.loop, asks), strict=True))
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


def in_words(run: Callable[[], Any], model: nn.Module, origin: Origin | None) -> Any:
    """Return `run()`, with every exception of the model's own code raised as a PlanError.

    It is an UnknownShapeError if only a shape depends on values.

    Args:
        run: Runs the model.
        model: The model, which the message names.
        origin: Place where the user named the model; None if the user passed the model itself.
    """
    try:
        return run()
    except UnknownShapeError:
        raise
    except MeshplanError as error:
        raise PlanError(error.problems) from None
    except Exception as error:
        raise refused(error, model, origin) from None


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
