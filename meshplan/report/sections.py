"""Content of the report's sections, as HTML: the tables and texts that answer each question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from meshplan.memory.answer.estimate import MemoryEstimate, RankGroup, left_in_words
from meshplan.model.graph import pattern_of
from meshplan.pictures.base.words import speed
from meshplan.pictures.mesh.links import links_of
from meshplan.pictures.notebook import rule_in_words
from meshplan.pictures.plans.pareto import difference, words_of
from meshplan.plan.plan import Plan
from meshplan.planner.answers.explain import WhyNot
from meshplan.planner.answers.infeasible import Trouble
from meshplan.planner.problem.decision import Decision, Evaluated
from meshplan.render.base.statements import plan_lines, statement_lines
from meshplan.render.layouts.show import settings, tree
from meshplan.render.memory.memory import ranks_to_text
from meshplan.render.plans.explain import verdict
from meshplan.render.plans.trouble import conflict_to_text, ended
from meshplan.report.page import bullets, folded, heading, numbered, pairs, paragraph
from meshplan.report.tables import Cell, Table, gib, seconds, share, size
from meshplan.textbook.inverse import StatesEstimate
from meshplan.units import format_bytes, format_seconds

_MOST_RULES: Final = 8


def key_figures(
    plan: Plan | None, estimate: MemoryEstimate | None, decision: Decision | None
) -> str:
    """Return the most important numbers: GPUs, memory, step time, throughput and MFU."""
    found: list[tuple[str, str]] = []
    if plan is not None:
        found.append(("GPUs", f"{plan.mesh.world_size:,}"))
    if estimate is not None:
        # The title of the page has the rest: what is expected, and the limit.
        found.append(("memory per GPU, at most", format_bytes(estimate.worst.band[1])))
    evaluated = decision.chosen if decision else None
    if decision is not None and evaluated is not None:
        found.append(("step time, by the cost model", format_seconds(evaluated.seconds)))
        if decision.tokens:
            found.append(("tokens/s per GPU", f"{decision.tokens_per_s(evaluated):,.0f}"))
        else:
            found.append(("samples/s per GPU", f"{decision.samples_per_s(evaluated):,.1f}"))
        found.append(("MFU", f"{decision.mfu(evaluated):.1%}"))
    return pairs(found, "figures")


def chosen_plan(plan: Plan | None, decision: Decision | None) -> str:
    """Return a box with the plan itself: mesh, strategy, batch, recomputation and rules."""
    if plan is None:
        return ""
    spec, assignment, chosen = plan.spec, plan.assignment, decision.chosen if decision else None
    stages = assignment.stages
    items = [("mesh", str(plan.mesh)), ("strategy", assignment.strategy.name)]
    if stages is not None:
        many = f"{stages.num} stages, {stages.microbatches} microbatches"
        items.append(("pipeline", f"{stages.schedule}, {many}"))
    settled = dict(settings(plan))
    items += [(name, settled[name]) for name in ("precision", "batch", "tp", "cp")
              if name in settled]  # fmt: skip
    modes = [again.policy.mode for again in assignment.recompute.values()]
    counts = [f"{modes.count(mode)} blocks {mode}" for mode in dict.fromkeys(modes)]
    items.append(("recomputed", ", ".join(counts) or "nothing"))
    if chosen is not None:
        # What else the search chose; rules are listed below, and all else above.
        said = ("mesh", "strategy", "batch", "pipeline", "activation_checkpointing", "tp_plan")
        more = {path: value for path, value in chosen.stated.items()
                if path.split(".")[0] not in said and not path.startswith("rules[")}  # fmt: skip
        lines = statement_lines(more, plan.graph.blocks())
        items += [(name, text) for name, _, text in (line.partition(": ") for line in lines)]
    if not spec.rules:
        items.append(("rules", "none"))
    rules = [rule_in_words(rule) for rule in spec.rules[:_MOST_RULES]]
    if len(spec.rules) > _MOST_RULES:
        rules.append(f"… {len(spec.rules) - _MOST_RULES:,} more rules")
    free = decision.spec.free_fields if decision else ()
    note = paragraph(f"Chosen by the planner: {', '.join(free)}.", "quiet") if free else ""
    named = f"<div>{bullets(rules)}</div>" if rules else ""
    head = "<h2>The plan</h2>"
    title = '<dl class="pairs"><dt>rules</dt><dd></dd></dl>' if rules else ""
    return f'<div class="plan">{head}{pairs(items)}{title}{named}{note}</div>'


def about_plan(
    plan: Plan | None, decision: Decision | None, text: str, overrides: Sequence[str]
) -> Iterator[str]:
    """Yield the plan's settings, the planner's choices, the overrides and the file."""
    if plan is not None:
        yield pairs([("mesh", str(plan.mesh)), *settings(plan)])
    chosen = decision.chosen if decision else None
    if decision is not None and chosen is not None and decision.spec.free_fields:
        yield folded("Chosen by the planner, as statements of the file",
                     bullets(plan_lines(chosen)))  # fmt: skip
    if overrides:
        yield heading("Overrides of the file")
        yield bullets(overrides)
    if text:
        yield heading("The file")
        yield numbered(text)


def about_memory(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield tables of memory by rank, by category, and from the textbook's figure to ours."""
    yield _groups(estimate).to_html()
    worst = estimate.worst
    where = f"in {worst.at.module}" if worst.at.module else f"for {worst.at.term}"
    whole = worst.peak.requested_bytes
    caption = f"At the peak of ranks {ranks_to_text(worst.ranks)}, in {worst.at.phase}, {where}"
    parts = sorted(worst.terms.items(), key=lambda item: -item[1])
    rows = [[Cell(str(term)), size(num), share(num / whole)] for term, num in parts]
    yield Table(caption=caption, columns=("what", ">bytes", ">share"), rows=rows).to_html()
    if estimate.reconciliation:
        first = estimate.reconciliation[0]
        rows = [
            [Cell(step.name),
             Cell("" if step is first else _signed(step.delta_bytes)),
             size(step.total_bytes), Cell(step.why)]
            for step in estimate.reconciliation
        ]  # fmt: skip
        table = Table(
            caption="From the textbook formula to this estimate, step by step",
            columns=("step", ">change", ">result", "why"),
            rows=rows,
            is_ordered=True,
        )
        yield folded("The steps from the textbook formula as a table", table.to_html())
    if estimate.fixes:
        rows = [
            [Cell(fix.change), Cell(fix.setting), gib(fix.total_bytes),
             Cell("fits", mark="good") if fix.fits else Cell("does not fit", mark="bad")]
            for fix in estimate.fixes
        ]  # fmt: skip
        columns = ("change", "in the plan", ">at most", "")
        yield Table(caption="What would help", columns=columns, rows=rows).to_html()
    basis = f"an upper bound: {estimate.bound}" if estimate.bound else estimate.certified
    yield paragraph(f"Basis of these figures: {basis}.", "quiet")
    yield bullets(f"assumed: {what}: {value}" for what, value in estimate.assumed)


def _groups(estimate: MemoryEstimate) -> Table:
    has_stages = any(group.stages for group in estimate.groups)
    columns = ["ranks", *(["stages"] if has_stages else []), ">tensors", ">allocated", ">reserved",
               ">driver", ">total", ">from", ">to", "verdict"]  # fmt: skip
    rows = []
    for group in estimate.groups:
        rows.append(
            [Cell(ranks_to_text(group.ranks), float(group.ranks[0])),
             *([Cell(ranks_to_text(group.stages), float(group.stages[0]))] if has_stages else []),
             *map(gib, group.peak), gib(group.peak.total_bytes), *map(gib, group.band),
             _left(group, estimate.limit_bytes)]
        )  # fmt: skip
    return Table(
        caption="Memory of one rank at its peak; ranks with equal memory share a row",
        columns=columns,
        rows=rows,
    )


def _left(group: RankGroup, limit_bytes: int | None) -> Cell:
    if limit_bytes is None:
        return Cell("no limit stated")
    words, left = left_in_words(group.band[1], limit_bytes), float(limit_bytes - group.band[1])
    if group.fits:
        return Cell(f"fits, {words}", left, mark="good")
    return Cell(words, left, mark="bad")


def about_states(states: StatesEstimate) -> Iterator[str]:
    """Yield the textbook's table, for plans without a model."""
    rows = [
        [Cell(row.row.strategy + (" (the plan's)" if row.is_plan else "")),
         Cell(row.row.precision), Cell(row.row.formula), gib(row.bytes_per_gpu), _fits(row.fits)]
        for row in states.rows
    ]  # fmt: skip
    yield Table(
        caption="Training states of each GPU by the textbook formulas, without activations",
        columns=("strategy", "precision", "formula", ">bytes", ""),
        rows=rows,
    ).to_html()


def _fits(fits: bool | None) -> Cell:
    if fits is None:
        return Cell("no limit stated")
    return Cell("fits", mark="good") if fits else Cell("does not fit", mark="bad")


def about_layouts(plan: Plan) -> Iterator[str]:
    """Yield a table of all tensors with their layouts and the lines that decided them."""
    rows = []
    for row in tree(plan):
        kind, shape, at_rest, piece, dtype, why = row.cells
        rows.append([Cell(row.name, depth=row.depth),
                     *map(Cell, (at_rest, why, shape, piece, dtype, kind))])  # fmt: skip
    source = plan.spec.source
    yield Table(
        caption=f"Layout of each module and tensor, and what decided it (line:column of {source})",
        columns=("module or tensor", "at rest", "decided by", "shape", "on rank 0", "dtype",
                 "class"),
        rows=rows,
    ).to_html()  # fmt: skip


def about_traffic(plan: Plan) -> Iterator[str]:
    """Yield a table of the collectives of rank 0."""
    links = links_of(plan)
    crosses = {True: "across nodes", False: "within a node", None: "not stated"}
    rows = [
        [Cell(lane.kind), Cell(" × ".join(lane.axes)), Cell(f"{lane.num_ranks:,}", lane.num_ranks),
         size(lane.sent_bytes), Cell(crosses[lane.crosses], mark="bad" if lane.crosses else ""),
         Cell(speed(lane.bytes_per_s), lane.bytes_per_s)]
        for lane in links.lanes
    ]  # fmt: skip
    if rows:
        yield Table(
            caption="What rank 0 sends in a step, by collective",
            columns=("collective", "along", ">ranks", ">sent", "where", ">slowest link"),
            rows=rows,
        ).to_html()
    # What is not counted of one block is mostly not counted of the others either.
    yield bullets(f"not counted: {text}" for text in dict.fromkeys(map(pattern_of, links.unknown)))


def about_choice(decision: Decision, why_not: Sequence[WhyNot]) -> Iterator[str]:
    """Yield the proof, and tables of candidates, `why_not` answers and settings not searched."""
    chosen = decision.chosen
    found = f"{decision.num_configs:,} configurations, {decision.num_options} options per block"
    if decision.is_whole:
        proved = "none of them fits" if chosen is None else f"optimal to within {decision.gap:.2%}"
        yield paragraph(f"Exhaustive search: {found}; {proved}.")
    else:
        end = "interrupted" if decision.is_interrupted else "time limit reached"
        better = "faster" if decision.objective in ("time", "cost") else "better"
        known = f"no configuration is more than {decision.gap:.1%} {better} than the best found"
        known = "no plan that fits was found" if chosen is None else known
        yield paragraph(f"Search incomplete ({end}): {found}; {known}.")
    if note := decision.profile.note:
        yield paragraph(f"{note[0].upper()}{note[1:]}.")
    evaluated_plans = {
        id(evaluated): evaluated
        for evaluated in (*([chosen] if chosen else []), *decision.alternatives, *decision.measured)
    }
    unique: dict[tuple[str, float], Evaluated] = {}
    for evaluated in evaluated_plans.values():
        unique.setdefault((words_of(evaluated), evaluated.seconds), evaluated)
    if unique:
        yield _candidates(decision, list(unique.values()))
    if why_not:
        rows = [
            [Cell(answer.setting),
             Cell("") if answer.seconds is None else seconds(answer.seconds),
             Cell(verdict(answer)),
             Cell("; ".join(plan_lines(answer.evaluated)) if answer.evaluated else "")]
            for answer in why_not
        ]  # fmt: skip
        yield Table(
            caption="Why not another setting: the best plan with that setting fixed",
            columns=("setting", ">a step", "verdict", "best plan with it"),
            rows=rows,
        ).to_html()
    if decision.rejected:
        rows = [[Cell(each.what), Cell(each.why)] for each in decision.rejected]
        yield Table(
            caption="Not in the search space, and why", columns=("what", "why"), rows=rows
        ).to_html()


def _candidates(decision: Decision, evaluated_plans: Sequence[Evaluated]) -> str:
    base = decision.chosen.seconds if decision.chosen else None
    rows = []
    for evaluated in sorted(evaluated_plans, key=lambda each: each.seconds):
        is_over = evaluated.memory.fits is False
        name = "chosen" if evaluated is decision.chosen else "does not fit" if is_over else "fits"
        slower = Cell("") if base is None else share(evaluated.seconds / base - 1, signed=True)
        words = words_of(evaluated)
        if decision.chosen is not None and evaluated is not decision.chosen:
            words = f"as chosen, but {difference(evaluated, decision.chosen)}"
        rows.append(
            [
                Cell(words),
                seconds(evaluated.seconds),
                slower,
                gib(evaluated.memory.worst.band[1]),
                Cell(name, mark="bad" if is_over else "good"),
            ]
        )
    return Table(
        caption="Candidates whose memory was simulated event by event",
        columns=("candidate", ">a step", ">slower by", ">peak memory, at most", "verdict"),
        rows=rows,
    ).to_html()


def about_trouble(trouble: Trouble) -> Iterator[str]:
    """Yield the statements that cannot be satisfied together, and changes that would help."""
    first, *rest = conflict_to_text(trouble)
    yield heading("Why nothing fits")
    yield paragraph(f"{first[0].upper()}{first[1:]}.")
    yield bullets(line.strip() for line in rest)
    if not trouble.remedies:
        more = "" if trouble.is_whole else f" before {ended(trouble)}"
        yield paragraph(f"No single change that helps was found{more}.")
        return
    rows = [
        [Cell(each.change),
         Cell("; ".join(statement_lines(each.setting, each.evaluated.plan.graph.blocks()))),
         seconds(each.evaluated.seconds), gib(each.evaluated.memory.worst.band[1]),
         Cell(f"{each.num_gpus:,}", each.num_gpus)]
        for each in trouble.remedies
    ]  # fmt: skip
    yield Table(
        caption="What would help: one change at a time, each searched and its memory simulated",
        columns=("change", "in the plan", ">a step", ">peak memory, at most", ">GPUs"),
        rows=rows,
    ).to_html()


def about_rest(
    left_out: Iterable[tuple[str, str]], warnings: Iterable[str], notes: Iterable[str]
) -> Iterator[str]:
    """Yield a table of parts that are not on the page, the warnings, and the notes."""
    rows = [[Cell(what), Cell(why)] for what, why in left_out]
    if rows:
        columns = ("left out", "why")
        yield Table(caption="Not in this report", columns=columns, rows=rows).to_html()
    for title, texts in (("Warnings", list(warnings)), ("Notes", list(notes))):
        if texts:
            yield heading(title)
            yield bullets(texts)


def _signed(num_bytes: int) -> str:
    return f"{'+' if num_bytes >= 0 else '−'}{format_bytes(abs(num_bytes))}"
