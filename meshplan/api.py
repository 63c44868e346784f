"""The verbs, each a straight line through the rooms."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.blueprint import OtherModelError, from_config
from meshplan.errors import Origin, PlanError, Problem, SpecError, UnstatedError
from meshplan.formulas import ROWS
from meshplan.graph import ModelGraph
from meshplan.sizing import check_enough, graph_of, questions, read_limit, read_sizing
from meshplan.solve import (
    STATES_ONLY,
    Answer,
    StatesEstimate,
    StatesRow,
    max_params,
    min_gpus,
    tabulate,
)
from meshplan.spec import Spec
from meshplan.trust import UntrustedError, check_code

if TYPE_CHECKING:
    from meshplan.memory import MemoryEstimate
    from meshplan.plan import Plan
    from meshplan.planner.decision import Question
    from meshplan.planner.lock import Lock
    from meshplan.rehearsal import Rehearse
    from meshplan.verdict import Verdict

PlanSource = str | os.PathLike[str] | Mapping[str, Any]
_WITHOUT_MODEL = "rules, heads and shapes were not checked"
_NAME_MODEL = "add --model pkg.mod:function, --config PATH, or one of them to the plan's 'model'"


def estimate_states(
    *,
    params: str | int | float | None = None,
    config: str | Path | None = None,
    gpus: str | int | None = None,
    nodes: str | int | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    plan: str | Path | None = None,
    overrides: Sequence[str] = (),
    ask_max_params: bool = False,
    ask_min_gpus: bool = False,
) -> StatesEstimate:
    """Memory of the training states under every textbook strategy.

    Args:
        params: Number of parameters, or `config`, a Hugging Face config to count them in.
        gpus: All GPUs together; `nodes` divides them.
        gpu: Name of the device whose memory is the limit, or `memory`, the limit itself.
        plan: A plan file that states any of these; what both state must agree.
        overrides: `KEY=VALUE` for the plan file.
        ask_max_params: Also solve for the largest model.
        ask_min_gpus: Also solve for the fewest GPUs.

    Raises:
        SpecError: Something is missing, cannot be read, or is stated twice and differs.
        PlanError: The plan's mesh and strategy contradict each other.

    >>> estimate = estimate_states(params="3e9", gpus=8)
    >>> [row.bytes_per_gpu for row in estimate.rows if row.row.strategy == "full_shard"]
    [6000000000]
    """
    if overrides and plan is None:
        what = "there is no plan file to change"
        raise SpecError(Problem(what, Origin("--set"), "add -f plan.yaml"))
    spec = None
    if plan is not None:
        from meshplan.reader import load_spec  # yaml would cost the flags alone 20 ms

        spec = load_spec(plan, overrides)
    size = read_sizing(
        {
            "params": params, "config": config, "gpus": gpus, "nodes": nodes, "gpu": gpu,
            "memory": memory,
        },
        spec,
    )  # fmt: skip
    check_enough(size, ask_max_params, ask_min_gpus)
    a, n, limit_bytes = size.num_params, size.num_gpus, size.memory_bytes
    rows: tuple[StatesRow, ...] = ()
    largest, fewest = list[Answer](), list[Answer]()
    if a and n:
        rows = tabulate(
            num_params=a, num_gpus=n, nodes=size.nodes, memory_bytes=limit_bytes, plan=size.plan_row
        )
    if ask_max_params and n and limit_bytes:
        largest = [
            max_params(r, num_gpus=n, nodes=size.nodes, memory_bytes=limit_bytes) for r in ROWS
        ]
    if ask_min_gpus and a and limit_bytes:
        fewest = [
            min_gpus(r, num_params=a, nodes=size.nodes, memory_bytes=limit_bytes) for r in ROWS
        ]
    notes = [STATES_ONLY, *size.notes]
    if size.nodes == 1:
        notes.append("on one node hybrid_shard is full_shard; --nodes says how many there are")
    return StatesEstimate(
        num_params=a,
        num_gpus=n,
        nodes=size.nodes,
        memory_bytes=limit_bytes,
        rows=rows,
        max_params=tuple(largest),
        min_gpus=tuple(fewest),
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What `check_plan` found.

    Args:
        plan: The decision; None where problems forbid one, or where no model is known.
        problems: What is wrong.
        warnings: What works but is probably not meant.
        notes: What a reader has to know about this answer.
    """

    plan: Plan | None = None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        return not self.problems


def check_plan(
    plan: PlanSource,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    config: str | Path | None = None,
) -> CheckResult:
    """Everything that can be known to be wrong before a process starts.

    Args:
        plan: A plan file, or the same thing as a mapping.
        overrides: `KEY=VALUE` for the plan.
        model: "pkg.mod:function" that builds the model, or `config`, its Hugging Face config;
            both go before the plan's own `model`. Without any, or where the plan names code that
            may not run, rules are not matched.

    Raises:
        SpecError: The plan or the model cannot be read.
    """
    from meshplan.plan import problems_without_model
    from meshplan.reader import load_spec

    try:
        return _checked(plan, overrides, model, config)
    except UntrustedError as error:
        problems = problems_without_model(load_spec(plan, overrides))
        left_out = f"{error.problems[0]}\nnote: so {_WITHOUT_MODEL}"
        return CheckResult(problems=tuple(problems), notes=(left_out,))


def _checked(
    plan: PlanSource, overrides: Sequence[str], model: str | None, config: str | Path | None,
    lock: Lock | None = None,
) -> CheckResult:  # fmt: skip
    from meshplan.plan import make_plan, problems_without_model  # half of the start-up
    from meshplan.reader import load_spec

    spec = load_spec(plan, overrides)
    try:
        graph, notes, rehearse = _find_model(spec, model, config)
    except PlanError as error:
        return CheckResult(problems=tuple(error.problems))
    if graph is None:
        return CheckResult(problems=tuple(problems_without_model(spec)), notes=notes)
    told: list[str] = []
    try:
        spec = _whole(plan, overrides, spec, graph, model, config, told.append, lock)
        decided = make_plan(spec, graph, rehearse=rehearse)
    except PlanError as error:
        return CheckResult(problems=tuple(error.problems), notes=notes)
    warnings = decided.assignment.warnings
    return CheckResult(plan=decided, warnings=warnings, notes=(*notes, *told[:1]))


def _whole(
    plan: PlanSource,
    overrides: Sequence[str],
    spec: Spec,
    graph: ModelGraph,
    model: str | None,
    config: str | Path | None,
    told: Callable[[str], None],
    lock: Lock | None = None,
) -> Spec:
    """The spec with nothing left to the planner."""
    if lock is None and not spec.free_fields:
        return spec
    from meshplan.planner import asking, whole  # numpy

    def ask() -> Question:
        from meshplan.runtime.planned import question_of_entry  # torch

        return question_of_entry(plan, overrides, model, told=told)

    is_live = model is not None or (spec.model is not None and spec.model.entry is not None)
    path = None if is_live else asking.config_of(spec, config)[0]
    load = asking.loading(plan, overrides)
    return whole.whole_spec(plan, load, graph, told, ask if is_live else None, path, lock)


def _closed(
    plan: PlanSource, overrides: Sequence[str], model: str | None, config: str | Path | None,
    told: Callable[[str], None],
) -> Spec:  # fmt: skip
    """The same for a model that has yet to be found."""
    from meshplan.reader import load_spec

    spec = load_spec(plan, overrides)
    if not spec.free_fields:
        return spec
    graph, _, _ = _find_model(spec, model, config)
    return spec if graph is None else _whole(plan, overrides, spec, graph, model, config, told)


def decide(
    plan: PlanSource,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    config: str | Path | None = None,
    lock: Lock | None = None,
) -> Plan:
    """The Plan of a plan file, decided for its model; other arguments as for `check_plan`.

    Args:
        lock: Its choices complete the plan; None takes those of the lock beside the file.

    Raises:
        SpecError: One of them cannot be read, the lock does not hold, or no model is known.
        PlanError: The plan does not fit the model.
    """
    checked = _checked(plan, overrides, model, config, lock)
    if checked.problems:
        raise PlanError(checked.problems)
    if checked.plan is None:
        what = "nothing says which modules the model has"
        raise SpecError(Problem(what, Origin(str(plan), "model"), _NAME_MODEL))
    return checked.plan


def verify_plan(
    plan: PlanSource,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    config: str | Path | None = None,
    max_ranks: int | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Run a plan, made small, on local processes beside one process that knows of no plan.

    Args:
        plan: As for `check_plan`, like the arguments after it.
        max_ranks: The most processes to start; 16 when not stated.
        told: Is told what is being done.

    Raises:
        SpecError: The plan or the model cannot be read or made small.
        PlanError: The plan's mesh contradicts itself.
    """
    from meshplan.runtime.shrink import MAX_RANKS, shrink, source_of
    from meshplan.runtime.verify import verify
    from meshplan.verdict import refused

    spec = _closed(plan, overrides, model, config, told)
    source = source_of(spec, model, config)
    try:
        problems = check_plan(plan, overrides, model=model, config=config).problems
    except OtherModelError as error:
        problems = ()
        told(f"the plan was not checked on the whole model: {error.problems[0].what}")
    if problems:
        # A small model may divide where the whole one does not.
        return refused(problems)
    for code, origin in spec.applied_code:
        check_code(code, origin)
    return verify(shrink(spec, source, max_ranks or MAX_RANKS), told)


def estimate_memory(
    plan: PlanSource,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    config: str | Path | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    fixes: bool | None = None,
    trace: bool = False,
    tier: int | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> MemoryEstimate:
    """The peak memory of every rank, to the byte, without a GPU, and whether it fits.

    Args:
        plan: As for `check_plan`, like the arguments after it.
        gpu: Name of the device whose memory is the limit, or `memory`, the limit itself; where
            the plan states one too, they must agree.
        fixes: Whether to look for single changes that would fit, where it does not; None looks
            where that takes seconds.
        trace: Whether to trace the step with torch even where the config alone tells it, in a
            second and to within one per cent.
        tier: 1 composes blocks that were traced once, 2 traces the step with few blocks, 3 traces
            it whole; None takes the cheapest that can.
        told: Is told what is being done.

    Raises:
        SpecError: The plan or the model cannot be read or built.
        PlanError: The plan does not fit the model, says too little, or its step cannot be traced.
        ApplyError: A process that traces was killed.
    """
    spec = _closed(plan, overrides, model, config, told)
    device, limit_bytes, notes = read_limit(gpu, memory, spec)
    is_config = model is None and (config is not None or (spec.model and spec.model.config))
    if is_config and not trace and not fixes and tier in (None, 1):
        from meshplan.memory.told import told_estimate
        from meshplan.plan import make_plan

        try:
            graph, more, _ = _find_model(spec, None, config)
            assert graph is not None
            decided = make_plan(spec, graph)
            return told_estimate(
                decided, device=device, limit_bytes=limit_bytes, notes=(*notes, *more),
                tells_worst=True, tells_modules=True,
            )  # fmt: skip
        except UnstatedError:
            raise
        except (PlanError, OtherModelError) as error:
            told(f"the config alone does not tell it: {error.problems[0].what}")
    from meshplan.runtime.fixes import with_fixes  # torch
    from meshplan.runtime.foretell import foretell
    from meshplan.runtime.question import Question
    from meshplan.runtime.shrink import source_of

    question = Question(
        spec=spec,
        source=source_of(spec, model, config),
        device=device,
        limit_bytes=limit_bytes,
        tier=tier,
    )
    began = time.monotonic()
    estimate = foretell(question, told, notes)
    return with_fixes(question, estimate, fixes, told, time.monotonic() - began)


def _find_model(
    spec: Spec, model: str | None, config: str | Path | None
) -> tuple[ModelGraph | None, tuple[str, ...], Rehearse | None]:
    """The model that the flags or else the plan name, notes, and a rehearsal if it is live."""
    if model is not None and config is not None:
        what = "--model and --config both state the model"
        raise SpecError(Problem(what, Origin("--model"), "leave one of them out"))
    stated = spec.model
    notes = []
    if stated is not None and (model, config) != (None, None):
        flag = "--model" if model is not None else "--config"
        if (model, config) not in ((stated.entry, None), (None, stated.config)):
            notes.append(f"{flag} goes before the model of {spec.origin('model')}")
    entry, origin = model, Origin("--model")
    if (model, config) == (None, None) and stated is not None and stated.entry is not None:
        entry, origin = stated.entry, spec.origin("model.entry")
    if entry is not None:
        from meshplan.runtime.live import live_graph  # torch

        live, rehearse = live_graph(entry, origin, spec)
        return live, tuple(notes), rehearse
    if config is not None or (stated is not None and stated.config is not None):
        graph = graph_of(spec) if config is None else from_config(config, Origin("--config"))
        assert graph is not None
        return graph, (*notes, *graph.notes, *questions(params=graph.num_params)), None
    known = "only the number of parameters" if stated is not None else "nothing"
    notes.append(
        f"{known} is known of the model, so {_WITHOUT_MODEL}; "
        "--model pkg.mod:function or --config PATH does"
    )
    return None, tuple(notes), None
