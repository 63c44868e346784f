"""Output of `meshplan plan`: the chosen plan, its memory, its speed, its limits, alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from meshplan.cost.profile import Profile, runs_of
from meshplan.planner.answers.written import Written
from meshplan.planner.objectives.simplify import SLACK
from meshplan.planner.problem.decision import Decision, Evaluated, Ladder
from meshplan.planner.solve.search import TOLERANCE
from meshplan.planner.solve.shares import Shares
from meshplan.planner.space.space import EmptySpaceError, Rejected
from meshplan.render.base.statements import flow, plan_lines, settings_in_words
from meshplan.render.base.text import columns, packed, paint, wrapped
from meshplan.render.memory.memory import ranks_in_words
from meshplan.render.plans.layouts import layouts_to_text, other_layouts_to_json, other_lines
from meshplan.render.plans.robust import robustness_to_json, robustness_to_text
from meshplan.units import format_gib, format_step

_MOST_REJECTED = 12
_LEAST_SHOWN = 0.0005
"""The smallest share of a step that is not printed as 0.0%."""


def shares_to_json(shares: Shares | None) -> dict[str, float] | None:
    """Return the seconds of each part of a step, such as `compute_s`; None if not known."""
    return None if shares is None else {f"{k}_s": v for k, v in asdict(shares).items()}


def decision_to_json(decision: Decision) -> dict[str, Any]:
    """Return the `result` of schema plan/1."""
    chosen = decision.chosen
    ladder = decision.ladder
    return {
        **(evaluated_to_json(decision, chosen) if chosen else dict.fromkeys(_KEYS)),
        "limit_bytes": decision.limit_bytes,
        "fits": chosen is not None,
        "gap": decision.gap if chosen else None,
        "objective": decision.objective,
        "is_whole": decision.is_whole,
        "is_interrupted": decision.is_interrupted,
        "num_configs": decision.num_configs,
        "num_measured": decision.num_measured,
        "search_s": decision.search_s,
        "ladder": None
        if ladder is None
        else {
            "roofline_s": ladder.roofline_s,
            "no_network_s": ladder.no_network_s,
            "no_memory_limit_s": ladder.no_memory_limit_s,
            "plan_s": ladder.plan_s,
            "shares": shares_to_json(ladder.shares),
        },
        "chosen": dict(chosen.stated) if chosen else None,
        "alternatives": [
            {**evaluated_to_json(decision, evaluated), "chosen": dict(evaluated.stated)}
            for evaluated in decision.alternatives
        ],
        "other_layouts": other_layouts_to_json(decision, partial(evaluated_to_json, decision)),
        "robust": robustness_to_json(decision),
        "rejected": [{"what": each.what, "why": each.why} for each in decision.rejected],
        "profile": {
            "device": decision.profile.device,
            "framework": decision.profile.framework,
            "dtype": decision.profile.dtype,
            "residual": decision.profile.residual,
            "runs": _runs(decision.profile),
            "assumed_network": decision.profile.assumed_network or None,
            "note": decision.profile.note or None,
            "file": str(decision.profile_path) if decision.profile_path else None,
        },
    }


def _runs(profile: Profile) -> dict[str, Any] | None:
    """Return the runs behind a profile; None for generic and measured constants."""
    runs = runs_of(profile.framework, profile.device)
    return (
        None
        if runs is None
        else {key: runs[key] for key in ("num_runs", "devices", "left_out", "sources")}
    )


_KEYS = (
    "mesh", "strategy", "batch", "pipeline", "activation_checkpointing", "step_s",
    "tokens_per_s_per_gpu", "mfu", "expected_bytes", "peak_bytes",
    "host_bytes",
)  # fmt: skip


def evaluated_to_json(decision: Decision, evaluated: Evaluated) -> dict[str, Any]:
    """Return one plan with the keys that plans have in the `result` of schema plan/1."""
    plan = evaluated.plan
    a, stages = plan.assignment, plan.assignment.stages
    batch = plan.spec.batch
    return {
        "mesh": {each.name: each.size for each in (*a.mesh, *a.mesh.loans)},
        "strategy": a.strategy.name,
        "batch": {
            "micro": plan.micro,
            "accumulate": plan.accumulate,
            "global": batch.global_ or decision.samples,
        },
        "pipeline": stages and {
            "schedule": stages.schedule,
            "virtual": stages.virtual,
            "microbatches": stages.microbatches,
        },
        "activation_checkpointing": {
            mode: sum(r.policy.mode == mode for r in a.recompute.values())
            for mode in ("selective", "full")
        },
        "step_s": evaluated.seconds,
        "tokens_per_s_per_gpu": decision.tokens_per_s(evaluated),
        "mfu": decision.mfu(evaluated),
        "expected_bytes": evaluated.memory.worst.peak.total_bytes,
        "peak_bytes": evaluated.memory.high_bytes,
        "host_bytes": evaluated.memory.host.held_bytes if evaluated.memory.host else 0,
    }  # fmt: skip


def written_to_json(written: Written) -> dict[str, Any]:
    """Return the key `as_written` of schema plan/1."""
    memory = written.memory
    return {
        "step_s": written.seconds,
        "expected_bytes": memory.worst.peak.total_bytes,
        "peak_bytes": memory.high_bytes,
        "fits": memory.fits,
    }


def written_to_text(written: Written) -> str:
    """Return a note on the memory of the plan file without a lock, with default settings."""
    return f"with the file's defaults, without the lock: {written.memory.size_and_left}"


def no_space_to_json(error: EmptySpaceError) -> dict[str, Any]:
    """Return the `result` of schema plan/1 for a plan file that no configuration satisfies."""
    return {
        **dict.fromkeys(_KEYS),
        "fits": False,
        "gap": None,
        "is_whole": True,
        "num_configs": 0,
        "ladder": None,
        "chosen": None,
        "alternatives": [],
        "other_layouts": [],
        "rejected": [
            {"what": "everything", "why": error.problems[0].what},
            *({"what": each.what, "why": each.why} for each in error.rejected),
        ],
    }


def no_space_to_text(error: EmptySpaceError, title: str) -> list[str]:
    """Return the lines of the answer for a plan file that no configuration satisfies.

    Args:
        error: The error of the search.
        title: Name of the plan.
    """
    problem = error.problems[0]
    fix = problem.fix if problem.origin and problem.origin.path == "batch.global" else ""
    lines = [*wrapped(f"{title}: {problem.what}", 4), *(wrapped(f"  fix: {fix}", 4) if fix else [])]
    return [*lines, *_section(_rejected(error.rejected))]


def decision_to_text(
    decision: Decision,
    title: str,
    costs: Sequence[str] = (),
    *,
    colour: bool = False,
    why_not_searched: bool = False,
) -> list[str]:
    """Return the lines of the answer, without the notes.

    The order is that of a user's questions: the plan, whether it fits, how fast it is, what limits
    it, and what else there is.

    Args:
        decision: The planner's decision.
        title: Name of the plan.
        costs: Lines on the cost; empty if the user did not ask for it.
        colour: If True, the lines are coloured.
        why_not_searched: If True, list the settings that were not searched with the reasons; if
            False, only say how many they are. Without a plan they are always listed.
    """
    chosen = decision.chosen
    if chosen is None:
        limit = format_gib(decision.limit_bytes)
        line = f"{title}: no configuration fits into {limit}"
        if not decision.is_whole:
            end = "interrupted" if decision.is_interrupted else "time limit reached"
            line = f"{title}: {end} before a plan was found that fits into {limit}"
        return [paint(line, "bold", colour), *_section(_rejected(decision.rejected))]
    return [
        paint(f"{title}: {_what(decision, chosen)}", "bold", colour) + _offload(decision, chosen),
        "",
        *(part for line in plan_lines(chosen) for part in wrapped(f"  {line}", 4)),
        "",
        *_memory(chosen),
        *_least(decision),
        "",
        *_speed(decision, chosen),
        *_section(_ladder(decision)),
        *_unproved(decision),
        *_section(robustness_to_text(decision)),
        *_section(costs),
        *_section(layouts_to_text(decision)),
        *_section(_faster(decision, chosen)),
        *_section(
            _rejected(decision.rejected) if why_not_searched else _not_searched(decision.rejected)
        ),
    ]


def _what(decision: Decision, chosen: Evaluated) -> str:
    """Return what the chosen plan is among all plans."""
    if decision.num_configs == 1 and not chosen.stated:
        return "the plan as it is stated"
    if decision.is_interrupted:
        return "interrupted, the best plan so far"
    if not decision.is_whole:
        return "the best plan found so far"
    if decision.objective == "memory":
        return "the plan with the least memory"
    if decision.objective == "balanced":
        return "the plan with the smallest product of seconds and bytes"
    if decision.objective == "cost":
        return "the plan with the fewest GPU-hours"
    if (found := decision.robustness) is not None and found.is_changed:
        return f"the plan that loses least if constants are {found.share * 100:g}% off"
    if chosen.seconds <= decision.best_s * (1 + TOLERANCE):
        return "the fastest plan that fits"
    return f"the simplest plan within {SLACK:.0%} of the fastest that fits"


def _section(lines: Sequence[str]) -> list[str]:
    """Return the lines with an empty line before them; [] for no lines."""
    return ["", *lines] if lines else []


def _speed(decision: Decision, chosen: Evaluated) -> list[str]:
    """Return lines on the seconds and the rate of a step."""
    line = f"speed   {format_step(chosen.seconds)} a step, {_rate(decision, chosen)} per GPU"
    lines = wrapped(f"{line}, MFU {decision.mfu(chosen):.1%}", 8)
    profile = decision.profile
    if (runs := runs_of(profile.framework, profile.device)) is not None:
        where = ", ".join(runs["devices"])
        if profile.device not in runs["devices"]:
            where += f" (none on {profile.device}, where the error is not known)"
        kind = "constants" if runs["constants"] else "generic constants"
        off, most = runs["left_out"]["median"], runs["left_out"]["p90"]
        text = (
            f"        by {kind} for {profile.framework}: with them, its {runs['num_runs']:,} "
            f"runs on {where} of models left out of the fit are {off:.1%} off in the "
            f"median, 90% of them at most {most:.1%}"
        )
        lines += wrapped(text, 8)
    if profile.assumed_network:
        text = f"        assumed: {profile.assumed_network}; if yours differs, state hardware.inter"
        lines += wrapped(text, 8)
    if precision := chosen.plan.assumed_precision:
        asked = "`explain why-not precision=bf16-mixed` compares another one"
        lines += wrapped(f"        assumed: precision {precision}; {asked}", 8)
    return lines


def _offload(decision: Decision, chosen: Evaluated) -> str:
    """Return text on the offload that the planner chose, and the step time without it; else "".

    The step time is given with this text, because the plan file did not ask for offload, and
    offload makes a step longer.
    """
    host = chosen.memory.host
    if chosen.stated.get("offload", "none") == "none" or host is None:
        return ""
    without_s, price = decision.unoffloaded_s, ""
    if without_s == float("inf"):
        price = "no plan fits" if decision.is_whole else "no plan that fits was found"
        price = f"; without offload {price}"
    elif without_s is not None:
        price = f"; without offload {format_step(without_s)} a step"
    used, limit = format_gib(host.held_bytes), format_gib(host.limit_bytes)
    known = "" if host.is_stated else " (assumed)"
    what = flow(chosen.stated["offload"])
    return f", with offload: {what}, {used} of a node's {limit} host memory{known}{price}"


def _rate(decision: Decision, evaluated: Evaluated) -> str:
    """Return tokens per second of one GPU as text; samples per second if they are no sequences."""
    if decision.tokens:
        return f"{decision.tokens_per_s(evaluated):,.0f} tokens/s"
    return f"{decision.samples_per_s(evaluated):,.1f} samples/s"


def _memory(evaluated: Evaluated) -> list[str]:
    worst = evaluated.memory.worst
    return [
        f"memory  {'fits: ' if evaluated.memory.fits else ''}{evaluated.memory.size_and_left}",
        f"        on {ranks_in_words(worst.ranks)}, in {worst.at.phase}"
        + (f" of {worst.at.module}" if worst.at.module else ""),
        *(
            line
            for what, value in evaluated.memory.assumed
            if what == "routing"
            for line in wrapped(f"        if {value}", 8)
        ),
        *(f"host    {line}" for line in _host(evaluated)),
        *_allocator(evaluated),
    ]


def _allocator(evaluated: Evaluated) -> Iterator[str]:
    """Yield lines on how to turn on expandable segments, if the memory estimate assumes them."""
    if evaluated.stated.get("allocator") == "expandable":
        yield "        with expandable segments: parallelize() turns them on before it moves the"
        yield "        model; if the script allocates GPU memory earlier, start the job with"
        yield "        PYTORCH_ALLOC_CONF=expandable_segments:True"


def _host(evaluated: Evaluated) -> Iterator[str]:
    """Yield a line on the host memory of a node and its limit, if anything is offloaded."""
    host = evaluated.memory.host
    if host is not None:
        much, limit = format_gib(host.held_bytes), format_gib(host.limit_bytes)
        known = "" if host.is_stated else " (assumed; state hardware.host_memory)"
        yield f"{much} of a node's {limit}{known}"


def _least(decision: Decision) -> list[str]:
    if decision.objective == "balanced":
        return [
            f"        seconds times bytes: no configuration is more than {decision.gap:.1%} lower"
        ]
    if decision.objective != "memory":
        return []
    return [f"        the least found; lower bound of all configurations: {decision.gap:.1%} less"]


_PARTS: Final = {
    "compute": "matrix products",
    "traffic": "memory traffic of other operations",
    "recompute": "recomputation",
    "tensor_parallel": "exposed communication of tp, ep and cp",
    "data": "exposed gathers and reductions",
    "pipeline": "pipeline bubbles",
    "launch": "waits for the host to launch kernels",
    "update": "the optimizer",
    "host": "the optimizer on the host and waits for copies",
}
"""{part of a step's time, an attribute of `Shares`: words for it}."""
_LEAST_PART: Final = 0.02
"""Share of a step below which a part of it is not printed."""


def _ladder(decision: Decision) -> list[str]:
    ladder = decision.ladder
    if ladder is None:
        return []
    return [
        f"limits  {format_step(ladder.roofline_s)} if all flops ran at peak throughput",
        f"        {format_step(ladder.no_network_s)} if communication were free: the network costs "
        f"{ladder.plan_s / ladder.no_network_s - 1:.1%}",
        f"        {format_step(ladder.no_memory_limit_s)} if memory were unlimited: the limit "
        f"costs {ladder.plan_s / ladder.no_memory_limit_s - 1:.1%}",
        f"        {format_step(ladder.plan_s)} for the fastest of {decision.num_configs:,} "
        f"configurations, each with {decision.num_options} options per block"
        + ("" if decision.is_whole else " so far"),
        *_spent(ladder),
        *(
            [f"        proved: no plan is more than {decision.gap:.2%} faster than that"]
            if decision.is_whole
            else []
        ),
    ]


def _spent(ladder: Ladder) -> list[str]:
    """Return a line on the largest parts of the fastest plan's step; [] if they are not known."""
    if ladder.shares is None:
        return []
    parts = {words: getattr(ladder.shares, name) / ladder.plan_s for name, words in _PARTS.items()}
    large = sorted((part, words) for words, part in parts.items() if part >= _LEAST_PART)[::-1]
    return wrapped("        of it " + ", ".join(f"{part:.0%} {words}" for part, words in large), 14)


def _unproved(decision: Decision) -> list[str]:
    if decision.is_whole:
        return []
    end = "interrupted" if decision.is_interrupted else "time limit reached"
    if decision.objective in ("memory", "balanced"):
        return [f"search incomplete: {end}"]
    return [f"search incomplete: {end}; no configuration is more than {decision.gap:.1%} faster"]


def _faster(decision: Decision, chosen: Evaluated) -> list[str]:
    """Return lines on the alternatives that are faster than the chosen plan, and less simple."""
    listed = {str(o.evaluated.stated) for o in decision.other_layouts if o.evaluated is not None}
    faster = [
        evaluated
        for evaluated in decision.alternatives
        if evaluated.seconds < chosen.seconds * (1 - _LEAST_SHOWN)
        and str(evaluated.stated) not in listed
    ]
    if not faster:
        return []
    heads = columns(
        [
            (
                f"{evaluated.seconds / chosen.seconds - 1:+.1%}",
                format_step(evaluated.seconds),
                format_gib(evaluated.memory.high_bytes),
            )
            for evaluated in faster
        ],
        ">>>",
    )
    lines = [
        part
        for head, evaluated in zip(heads, faster, strict=True)
        for part in packed(f"  {head}  ", other_lines(evaluated, chosen))
    ]
    return ["faster, but less simple", *lines]


def _not_searched(rejected: Sequence[Rejected]) -> list[str]:
    """Return a line on the number of settings that were not searched; [] for none."""
    count = sum(len(each.what.partition("=")[2].split(", ")) for each in rejected)
    if not count:
        return []
    were = "setting was" if count == 1 else "settings were"
    return [f"{count} {were} not searched: --why-not-searched lists the reasons"]


def _rejected(rejected: Iterable[Rejected]) -> list[str]:
    """Return lines on settings that are not in the search space, grouped by reason."""
    by_why: dict[str, list[str]] = {}
    for each in rejected:
        by_why.setdefault(each.why, []).append(each.what)
    reasons = [f"  {settings_in_words(whats)}: {why}" for why, whats in by_why.items()]
    lines = [part for line in reasons[:_MOST_REJECTED] for part in wrapped(line, 4)]
    if (more := len(reasons) - _MOST_REJECTED) > 0:
        lines.append(f"  and {more} more (--json)")
    return ["not in the search space", *lines] if lines else []
