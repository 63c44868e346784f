"""Tiers 3 and 2: a step of every rank that differs, imagined in a process of its own.

Decides which tier answers, and nothing else: the plan decides what is run, `imagine` runs it, and
`memory` reads the logs.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import nn

from meshplan.errors import ApplyError, MeshplanError, PlanError, SpecError
from meshplan.memory.assemble import assemble
from meshplan.memory.estimate import MemoryEstimate, Tier
from meshplan.memory.extrapolate import Blocks, NotRepeatingError, extrapolate, is_same
from meshplan.memory.groups import equal_ranks
from meshplan.memory.log import EventLog
from meshplan.plan import Plan, make_plan
from meshplan.runtime.apart import run_apart
from meshplan.runtime.assumed import Loop, check_stated, loop_of
from meshplan.runtime.example import find_example
from meshplan.runtime.imagine import imagine_step
from meshplan.runtime.private_fakes import fake_mode
from meshplan.runtime.record import record
from meshplan.runtime.rehearse import rehearser
from meshplan.runtime.repeats import Repeats, cut, is_alike, repeats_of
from meshplan.runtime.shadows import Shadows
from meshplan.runtime.shrink import Source, model_of_source, rules_that_match
from meshplan.runtime.stumble import problem_of
from meshplan.runtime.trace import graph_of
from meshplan.spec import Spec

SOME_GPU: Final = "cuda"
"""The device of a plan that names none: what it holds beside torch has the widest band."""
_CERTIFYING: Final = 2
"""How many periods more than the smallest model the one has that proves the others."""
_NOT_CERTIFIED: Final = "nothing is extrapolated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Args:
        spec: The plan, as declared.
        source: How to build its model.
        device: The name of the GPU, or "cuda" where nobody says.
        limit_bytes: What it may hold; None where nobody says.
    """

    spec: Spec
    source: Source
    device: str = SOME_GPU
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Imagined:
    """What a process found out about one rank.

    Args:
        assumed: As of `Loop`.
    """

    log: EventLog
    assumed: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The logs, and how they were found."""

    logs: list[EventLog]
    assumed: tuple[tuple[str, str], ...]
    tier: Tier
    certified: str


def foretell(
    question: Question, told: Callable[[str], None], notes: Sequence[str] = ()
) -> MemoryEstimate:
    """The memory of every rank.

    Args:
        told: Is told what is being done.
        notes: What is known already that a reader has to know.

    Raises:
        SpecError: The model cannot be built, or nothing says what it takes.
        PlanError: The plan does not fit the model, says too little, or its step cannot be imagined.
    """
    model, plan = decided(question.spec, question.source)
    check_stated(question.spec, plan.micro, reads_tokens=False)
    groups = equal_ranks(plan.assignment)
    answer = _logs(question, model, plan, [ranks[0] for ranks in groups], told)
    return assemble(
        plan,
        groups,
        answer.logs,
        device=question.device,
        limit_bytes=question.limit_bytes,
        tier=answer.tier,
        certified=answer.certified,
        assumed=answer.assumed,
        notes=notes,
    )


def log_of_rank(question: Question, rank: int, told: Callable[[str], None]) -> EventLog:
    """The step of one rank, event by event; arguments and errors as of `foretell`."""
    model, plan = decided(question.spec, question.source)
    check_stated(question.spec, plan.micro, reads_tokens=False)
    return _logs(question, model, plan, [rank], told).logs[0]


def _logs(
    question: Question,
    model: nn.Module,
    plan: Plan,
    ranks: Sequence[int],
    told: Callable[[str], None],
) -> _Answer:
    """The logs of these ranks, by the cheapest tier that can tell.

    THE place where tiers are chosen.
    """
    words = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    why = ""
    repeats = _worth_cutting(model, plan)
    if repeats is not None:
        told(f"imagining a step of {words} with few blocks")
        try:
            return _with_few_blocks(question, plan, ranks, repeats)
        except NotRepeatingError as error:
            why = f"; few blocks do not tell: {error}"
    told(f"imagining a step of {words}")
    found = run_apart(_imagine, [(question, rank) for rank in ranks])
    logs = [each.log for each in found]
    return _Answer(logs, found[0].assumed, Tier.WHOLE, _NOT_CERTIFIED + why)


def _worth_cutting(model: nn.Module, plan: Plan) -> Repeats | None:
    """What can be left out, if three models with few blocks cost less than the whole one.

    Stages are cut from the whole list of blocks: with fewer blocks they would be others.
    """
    if plan.assignment.stages is not None:
        return None
    repeats = repeats_of(model, plan)
    if repeats is None:
        return None
    kept = [sum(repeats.counts) - len(repeats.counts) * repeats.blocks.period * num
            for num in _left_out(repeats)]  # fmt: skip
    is_possible = repeats.spare > _CERTIFYING
    return repeats if is_possible and sum(kept) <= sum(repeats.counts) else None


def _left_out(repeats: Repeats) -> tuple[int, int, int]:
    """How many periods the three models leave out."""
    return (repeats.spare, repeats.spare - 1, repeats.spare - _CERTIFYING)


def _with_few_blocks(
    question: Question, plan: Plan, ranks: Sequence[int], repeats: Repeats
) -> _Answer:
    """Tier 2: two models tell what one more block adds, a third one proves it.

    Raises:
        NotRepeatingError: It is not so.
    """
    left_out = _left_out(repeats)
    wanted = [(rank, num) for rank in ranks for num in left_out[:2]]
    wanted.append((ranks[0], left_out[2]))  # Other ranks do the same with parts of other sizes.
    tasks = [(question, rank, (repeats.blocks, num, plan)) for rank, num in wanted]
    found = run_apart(_imagine_cut, tasks)
    refused = next((each for each in found if isinstance(each, str)), None)
    if refused is not None:
        raise NotRepeatingError(refused)
    *pairs, proof = [each.log for each in found]
    again = extrapolate(pairs[0], pairs[1], repeats.blocks, _CERTIFYING - 1)
    if not is_same(again, proof):
        raise NotRepeatingError("a third model with few blocks came out differently")
    logs = [
        extrapolate(few, more, repeats.blocks, repeats.spare - 1)
        for few, more in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    most = max(repeats.counts)
    kept = [most - repeats.blocks.period * num for num in _left_out(repeats)]
    certified = (
        f"from {kept[0]} and {kept[1]} of {most} blocks, and found again to the byte with {kept[2]}"
    )
    return _Answer(logs, found[0].assumed, Tier.FEW_BLOCKS, certified)


def decided(
    spec: Spec, source: Source, change: Callable[[nn.Module], nn.Module] | None = None
) -> tuple[nn.Module, Plan]:
    """The model, without memory, and its plan.

    Args:
        change: Made to the model first; rules that then match nothing are left out.

    Raises:
        SpecError: The model cannot be built.
        PlanError: The plan does not fit it.
    """
    model = built_without_memory(source).train()
    if change is not None:
        before = graph_of(model)
        model = change(copy.deepcopy(model))  # The user may have named a model, not a function.
        rules, _ = rules_that_match(spec, before, graph_of(model))
        spec = replace(spec, rules=rules)
    if not spec.reads_flow:
        return model, make_plan(spec, graph_of(model))
    inputs = find_example(model, spec)
    try:
        flow = record(model, inputs)
    except ApplyError as error:
        if isinstance(error.__cause__, Exception):
            raise PlanError(problem_of(error.__cause__, model, source.origin)) from None
        raise PlanError(error.problems) from None
    return model, make_plan(spec, graph_of(model, flow), rehearse=rehearser(model, inputs))


def built_without_memory(source: Source) -> nn.Module:
    """The model without memory: on meta, or where its code reads numbers meanwhile, as fakes.

    Raises:
        SpecError: It cannot be built.
    """
    if source.config is not None and getattr(source.config, "use_cache", False):
        config = copy.deepcopy(source.config)
        config.use_cache = False  # It is for generating; in training it would only hold tensors.
        source = replace(source, config=config)
    try:
        return model_of_source(source, on_meta=True)
    except SpecError:
        with contextlib.suppress(SpecError), fake_mode(), Shadows():
            return model_of_source(source)
        raise


def _imagine(question: Question, rank: int) -> Imagined:
    """One rank's step, in a process of its own."""
    model, plan = decided(question.spec, question.source)
    return _imagined(model, plan, question, rank)


def _imagine_cut(
    question: Question, rank: int, cutting: tuple[Blocks, int, Plan]
) -> Imagined | str:
    """The same with periods of blocks left out; or why that is not the same step."""
    blocks, num, whole = cutting

    def without(model: nn.Module) -> nn.Module:
        cut(model, blocks.lists, num * blocks.period)
        return model

    try:
        model, plan = decided(question.spec, question.source, without)
        if not is_alike(whole, plan):
            return "with fewer blocks the plan is another"
        return _imagined(model, plan, question, rank)
    except MeshplanError as error:
        return error.problems[0].what


def _imagined(model: nn.Module, plan: Plan, question: Question, rank: int) -> Imagined:
    warnings.simplefilter("ignore")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            loop = loop_of(model, plan)
            log = _step(model, plan, loop, rank, question.device)
    except MeshplanError:
        raise
    except Exception as error:  # The model's own code may raise anything.
        raise PlanError(problem_of(error, model, question.source.origin)) from None
    return Imagined(log, loop.assumed)


def _step(model: nn.Module, plan: Plan, loop: Loop, rank: int, device: str) -> EventLog:
    return imagine_step(
        model, plan, loop.inputs, loop.targets, loop.loss_fn, loop.make_optimizer, rank, device
    )
