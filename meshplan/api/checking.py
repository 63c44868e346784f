"""Functions behind `meshplan estimate`, `check` and `verify`; and `decide`, used by most others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from meshplan.api.in_force import WITHOUT_MODEL, find_model, is_built, spec_in_force
from meshplan.api.source import PlanSource, Source, SourceArguments, source_of
from meshplan.errors import MeshplanError, Origin, PlanError, Problem, SpecError, UnstatedError
from meshplan.plan.verdict import CheckResult
from meshplan.spec.spec import Spec
from meshplan.spec.trust import UntrustedError, check_code
from meshplan.textbook.formulas import ROWS
from meshplan.textbook.inputs import check_enough, read_limit, read_sizing
from meshplan.textbook.inverse import (
    STATES_ONLY,
    Answer,
    StatesEstimate,
    StatesRow,
    max_params,
    min_gpus,
    rows_of,
    tabulate,
)

if TYPE_CHECKING:
    from meshplan.memory import EventLog, MemoryEstimate
    from meshplan.plan.plan import Plan
    from meshplan.plan.verdict import Verdict
    from meshplan.planner.lock.lock import Lock
    from meshplan.runtime.estimate.request import EstimateRequest

_NAME_MODEL = "add --model pkg.mod:function, --config PATH, or one of them to the plan's 'model'"


def estimate_states(
    *,
    params: str | int | float | None = None,
    config: str | Path | None = None,
    gpus: str | int | None = None,
    nodes: str | int | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    lora: str | None = None,
    plan: str | Path | None = None,
    overrides: Sequence[str] = (),
    ask_max_params: bool = False,
    ask_min_gpus: bool = False,
) -> StatesEstimate:
    """Estimate the bytes of parameters, gradients and optimizer state by textbook formulas.

    The result has a row for every strategy, such as DDP, ZeRO-1 and FSDP. Activations are not
    included.

    Args:
        params: Number of parameters.
        config: A Hugging Face config from which the parameters are counted; instead of `params`.
        gpus: Number of GPUs on all nodes together.
        nodes: Number of nodes; 1 if neither this nor the plan states it.
        gpu: Name of the device whose memory is the limit.
        memory: The memory limit itself; instead of `gpu`.
        lora: Adapters beside which the model is frozen in bf16: "r=16,targets=q_proj:v_proj",
            "r=16,targets=all-linear", or "params=6.8M" if only their size is known.
        plan: A plan file that states any of these. Values stated in both places must agree.
        overrides: `KEY=VALUE` statements that change the plan file.
        ask_max_params: If True, also solve for the largest model.
        ask_min_gpus: If True, also solve for the fewest GPUs.

    Raises:
        SpecError: A value is missing, cannot be read, or is stated twice with different values.
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
        from meshplan.spec.reader import load_spec  # Importing yaml takes 20 ms.

        spec = load_spec(plan, overrides)
    if config is not None and params is None and lora is None:
        params, config = _counted(config)
    size = read_sizing(
        {
            "params": params, "config": config, "gpus": gpus, "nodes": nodes, "gpu": gpu,
            "memory": memory, "lora": lora,
        },
        spec,
    )  # fmt: skip
    if lora is not None and ask_max_params:
        what = "--max-params looks for a model, and the size of adapters depends on the model"
        raise SpecError(Problem(what, Origin("--max-params"), "leave out one of the two flags"))
    check_enough(size, ask_max_params, ask_min_gpus)
    a, n, limit_bytes = size.num_params, size.num_gpus, size.memory_bytes
    rows: tuple[StatesRow, ...] = ()
    largest, fewest = list[Answer](), list[Answer]()
    if a and n:
        rows = tabulate(
            num_params=a, num_gpus=n, nodes=size.nodes, memory_bytes=limit_bytes,
            num_adapter_params=size.num_adapter_params, plan=size.plan_row,
        )  # fmt: skip
    if ask_max_params and n and limit_bytes:
        largest = [
            max_params(r, num_gpus=n, nodes=size.nodes, memory_bytes=limit_bytes) for r in ROWS
        ]
    if ask_min_gpus and a and limit_bytes:
        fewest = [
            min_gpus(
                r, num_params=a, nodes=size.nodes, memory_bytes=limit_bytes,
                num_adapter_params=size.num_adapter_params,
            )
            for r in rows_of(size.num_adapter_params)
        ]  # fmt: skip
    notes = [STATES_ONLY, *size.notes]
    if size.nodes == 1:
        notes.append(
            "on one node hybrid_shard equals full_shard; --nodes states the number of nodes"
        )
    if lora is not None and plan is not None:
        notes.append(
            "the peak of a step with adapters is traced from the model itself: name a function "
            "that returns it, with its adapters, by --model or model.entry, and leave out --lora"
        )
    return StatesEstimate(
        num_params=a,
        num_gpus=n,
        nodes=size.nodes,
        memory_bytes=limit_bytes,
        num_adapter_params=size.num_adapter_params,
        rows=rows,
        max_params=tuple(largest),
        min_gpus=tuple(fewest),
        notes=tuple(notes),
    )


def _counted(config: str | Path) -> tuple[int | None, str | Path | None]:
    """Return (parameters, None) of a model that is built to count them, or (None, its config)."""
    source, spec = Source({"version": 1}, config=config), Spec()
    if not is_built(source, spec):
        return None, config
    graph, _, _ = find_model(spec, source)
    return (graph.num_params, None) if graph is not None else (None, config)


def check_plan(
    plan: PlanSource | Source, overrides: Sequence[str] = (), **given: Unpack[SourceArguments]
) -> CheckResult:
    """Find every mistake of a plan that can be found before a process starts.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`.
        overrides: `KEY=VALUE` statements that change the plan.
        given: The model, by the names of `Source`: `model` and `config`.

    Returns:
        The problems, warnings and notes, and the plan if there are no problems. If no model is
        known, or the plan names code that the user has not trusted, the rules are not checked.

    Raises:
        SpecError: The plan or the model cannot be read.
    """
    from meshplan.plan.plan import problems_without_model
    from meshplan.spec.contradictions import ContradictionError

    source = source_of(plan, overrides, **given)
    try:
        return _tried(_checked(source), source)
    except ContradictionError as error:
        raise SpecError([*error.problems, *_problems_of_rules(error.spec, source)]) from None
    except UntrustedError as error:
        problems = problems_without_model(source.spec)
        left_out = f"{error.problems[0]}\nnote: {WITHOUT_MODEL}"
        return CheckResult(problems=tuple(problems), notes=(left_out,))


def _problems_of_rules(spec: Spec, source: Source) -> list[Problem]:
    """Return the problems with the patterns of the rules; [] if the model cannot be read."""
    from meshplan.plan.plan import check_rules

    try:
        graph, _, _ = find_model(spec, source)
    except MeshplanError:  # Told in the next round, with all that needs the model.
        return []
    return check_rules(spec, graph)[0] if graph is not None else []


def _tried(checked: CheckResult, source: Source) -> CheckResult:
    """Return the result, extended by problems that a step of the plan would raise.

    If the model is a Python function, its forward runs as on a rank of the plan. An error becomes a
    problem; a note says why the forward could not be tried.
    """
    from meshplan.plan.plan import check_adafactor  # slow to import

    decided = checked.plan
    if decided is None or checked.problems:
        return checked
    try:
        check_adafactor(decided)
    except PlanError as error:
        return replace(checked, plan=None, problems=tuple(error.problems))
    if not is_built(source, decided.spec):
        return checked
    from meshplan.runtime.estimate.scale_down import model_source_of  # torch
    from meshplan.runtime.estimate.tried import try_source

    problem, untried = try_source(
        model_source_of(decided.spec, source.model, source.config), decided
    )
    if problem is not None:
        return replace(checked, plan=None, problems=(problem,))
    notes = (f"the forward under the plan was not checked: {untried}",) if untried else ()
    return replace(checked, notes=(*checked.notes, *notes))


def _checked(
    source: Source, lock: Lock | None = None, report: Callable[[str], None] = lambda text: None
) -> CheckResult:
    from meshplan.plan.plan import (  # slow to import
        check_rules,
        make_plan,
        problems_without_model,
    )

    spec = source.spec
    try:
        graph, notes, rehearse = find_model(spec, source)
    except PlanError as error:
        return CheckResult(problems=tuple(error.problems))
    if graph is None:
        return CheckResult(problems=tuple(problems_without_model(spec)), notes=notes)
    noted: list[str] = []
    try:
        whole, graph, rehearse = spec_in_force(
            source, spec, (graph, rehearse), noted=noted.append, report=report, lock=lock
        )
        decided = make_plan(whole, graph, rehearse=rehearse)
    except PlanError as error:
        return CheckResult(problems=tuple(error.problems), notes=(*notes, *noted))
    warnings = (*decided.assignment.warnings, *check_rules(whole, graph)[1])
    return CheckResult(plan=decided, warnings=warnings, notes=(*notes, *noted))


def _closed(source: Source, report: Callable[[str], None]) -> tuple[Spec, tuple[str, ...]]:
    """Return the spec with all open fields filled in, and notes on the lock that filled them in.

    Without a known model, the spec is returned as it was read.
    """
    from meshplan.planner.lock.lock import has_lock

    spec = source.spec
    if not spec.free_fields and not has_lock(source.plan):
        return spec, ()
    graph, _, rehearse = find_model(spec, source)
    if graph is None:
        return spec, ()
    noted: list[str] = []
    whole, _, _ = spec_in_force(source, spec, (graph, rehearse), noted=noted.append, report=report)
    return whole, tuple(noted)


def decide(
    plan: PlanSource | Source,
    overrides: Sequence[str] = (),
    *,
    lock: Lock | None = None,
    noted: Callable[[str], None] = lambda text: None,
    **given: Unpack[SourceArguments],
) -> Plan:
    """Return the `Plan` of a plan file and its model: a layout for every tensor, stages and so on.

    Fields that the file leaves open are filled in from the lock, by a search, or by defaults.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`.
        overrides: `KEY=VALUE` statements that change the plan.
        lock: A lock whose choices complete the plan; None takes the lock next to the plan file.
        noted: Called with each note for the reader, such as which lock the plan uses.
        given: The model, by the names of `Source`: `model` and `config`.

    Raises:
        SpecError: The plan or the model cannot be read, `lock` was made for something else, or no
            model is known.
        PlanError: The plan does not fit the model.
    """
    source = source_of(plan, overrides, **given)
    checked = _checked(source, lock)
    for note in checked.notes:
        noted(note)
    if checked.problems:
        raise PlanError(checked.problems)
    if checked.plan is None:
        what = "the plan names no function or config of the model, so its modules are unknown"
        raise SpecError(Problem(what, Origin(str(source.plan), "model"), _NAME_MODEL))
    return checked.plan


def verify_plan(
    plan: PlanSource | Source,
    overrides: Sequence[str] = (),
    *,
    max_ranks: int | None = None,
    report: Callable[[str], None] = lambda text: None,
    **given: Unpack[SourceArguments],
) -> Verdict:
    """Train a scaled-down model under the plan in local processes, and compare with one process.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`.
        overrides: `KEY=VALUE` statements that change the plan.
        max_ranks: Maximum number of processes to start; None for 16.
        report: Called with lines on the progress.
        given: The model, by the names of `Source`: `model` and `config`.

    Returns:
        The compared losses, weights, bytes and collectives; or the problems of the plan for the
        full-size model, if it has any.

    Raises:
        SpecError: The plan or the model cannot be read or scaled down.
        PlanError: The plan's mesh contradicts itself.
    """
    from meshplan.plan.verdict import refused
    from meshplan.runtime.estimate.scale_down import MAX_RANKS, model_source_of, shrink
    from meshplan.runtime.verify.verify import verify

    source = source_of(plan, overrides, **given)
    spec, notes = _closed(source, report)
    for note in notes:
        report(note)
    builder = model_source_of(spec, source.model, source.config)
    if problems := check_plan(source).problems:
        # A dim of the scaled-down model may divide evenly although the full-size one does not.
        return refused(problems)
    for code, origin in spec.applied_code:
        check_code(code, origin)
    return verify(shrink(spec, builder, max_ranks or MAX_RANKS), report)


def estimate_memory(
    plan: PlanSource | Source,
    overrides: Sequence[str] = (),
    *,
    fixes: bool | None = None,
    trace: bool = False,
    tier: int | None = None,
    report: Callable[[str], None] = lambda text: None,
    **given: Unpack[SourceArguments],
) -> MemoryEstimate:
    """Estimate the peak memory of every rank to the byte, without a GPU, and check that it fits.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`.
        overrides: `KEY=VALUE` statements that change the plan.
        fixes: If True and the plan does not fit, look for single changes that would make it fit.
            With None, look for them only if that takes a few seconds at most.
        trace: If True, trace the step with torch even if the model has a config. An estimate from
            the config alone takes a second and is within one per cent of a trace.
        tier: With 1, each kind of block is traced once, and the step is composed of these traces;
            with 3 (or 2) the whole step is traced. None takes the cheapest tier that works.
        report: Called with lines on the progress.
        given: The model and the machine, by the names of `Source`: `model`, `config`, `gpu` and
            `memory`. If the plan states a limit too, both must agree.

    Raises:
        SpecError: The plan or the model cannot be read or built.
        PlanError: The plan does not suit the model, lacks a needed value, or its step cannot be
            traced.
        ApplyError: A tracing process was killed.
    """
    source = source_of(plan, overrides, **given)
    spec, by = _closed(source, report)
    device, limit_bytes, notes = read_limit(source.gpu, source.memory, spec)
    notes = (*by, *notes)
    names_config = source.config is not None or (spec.model is not None and spec.model.config)
    is_config = source.model is None and names_config
    has_model = is_built(source, spec)
    if is_config and has_model and not trace:
        report("meshplan knows no such config, so transformers builds the model, which is traced")
    began = time.monotonic()
    if is_config and not has_model and not trace and tier in (None, 1):
        from meshplan.memory.analytic.estimate import estimate_analytic
        from meshplan.plan.plan import make_plan

        graph = rehearse = planned = None
        try:
            graph, more, rehearse = find_model(spec, source)
            assert graph is not None
            planned = make_plan(spec, graph)
            estimate = estimate_analytic(
                planned, device=device, limit_bytes=limit_bytes, notes=(*notes, *more),
                worst_routing=True, by_module=True,
            )  # fmt: skip
        except UnstatedError:
            raise
        except PlanError as error:
            if graph is not None and planned is None and rehearse is None:
                raise  # `make_plan` refused the model's modules, which are the same in a trace.
            why = error.problems[0].what
            report(f"the config alone is not enough, so the step is traced with torch: {why}")
        else:
            if not fixes:
                return estimate
            from meshplan.runtime.estimate.fixes import with_fixes  # torch

            def estimate_again(other: Spec) -> MemoryEstimate:
                changed = make_plan(other, graph)
                return estimate_analytic(
                    changed, device=device, limit_bytes=limit_bytes, try_expandable=False
                )

            took_s = time.monotonic() - began
            return with_fixes(planned, estimate, estimate_again, fixes, report, took_s)
    from meshplan.runtime.estimate.estimate import estimate_by_trace
    from meshplan.runtime.estimate.fixes import with_fixes  # torch
    from meshplan.runtime.estimate.request import decided

    request = replace(request_of_trace(spec, source), tier=tier)
    estimate = estimate_by_trace(request, report, notes)
    took_s = time.monotonic() - began
    if estimate.fits is not False or fixes is False:
        return estimate

    def trace_again(other: Spec) -> MemoryEstimate:
        return estimate_by_trace(
            replace(request, spec=other, tier=int(estimate.tier)), lambda text: None
        )

    _, planned = decided(request.spec, request.source)
    return with_fixes(planned, estimate, trace_again, fixes, report, took_s)


def traced_log(
    plan: Plan, rank: int, source: Source, report: Callable[[str], None] = lambda text: None
) -> EventLog:
    """Trace one step of one rank on fake tensors, and return its allocations and frees in order.

    Args:
        plan: A plan decided for its model.
        rank: The rank to trace.
        source: The model and the machine of the plan.
        report: Called with lines on the progress.

    Raises:
        SpecError: The model cannot be read or built.
        PlanError: The step cannot be traced.
        ApplyError: A tracing process was killed.
    """
    from meshplan.runtime.estimate.estimate import log_of_rank  # torch

    return log_of_rank(request_of_trace(plan.spec, source), rank, report)


def request_of_trace(spec: Spec, source: Source) -> EstimateRequest:
    """Return the request for an estimate from a trace of the model.

    Args:
        spec: The plan, with nothing left open.
        source: The model and the machine of the plan.

    Raises:
        SpecError: The model or the limit cannot be read.
    """
    from meshplan.runtime.estimate.request import EstimateRequest  # torch
    from meshplan.runtime.estimate.scale_down import model_source_of

    device, limit_bytes, _ = read_limit(source.gpu, source.memory, spec)
    builder = model_source_of(spec, source.model, source.config)
    return EstimateRequest(spec=spec, source=builder, device=device, limit_bytes=limit_bytes)
