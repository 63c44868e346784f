"""Output of `meshplan estimate` for states: the table, formulas, largest model, fewest GPUs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.render.base.text import columns, gib, paint
from meshplan.textbook.inverse import STATES_ONLY, Answer, StatesEstimate, StatesRow
from meshplan.units import format_bytes, format_count, format_gib


def estimate_to_json(estimate: StatesEstimate, *, explain: bool = False) -> dict[str, Any]:
    """Return the `result` of schema estimate/1.

    Args:
        estimate: The estimate.
        explain: If True, each row also has its formulas with numbers, and their source.
    """
    result: dict[str, Any] = {
        "num_params": estimate.num_params,
        "num_gpus": estimate.num_gpus,
        "nodes": estimate.nodes,
        "memory_bytes": estimate.memory_bytes,
        **(
            {}
            if estimate.num_adapter_params is None
            else {"num_adapter_params": estimate.num_adapter_params}
        ),
        "rows": [_row_to_json(row, estimate, explain) for row in estimate.rows],
    }
    for question, unknown in (("max_params", "num_params"), ("min_gpus", "num_gpus")):
        answers: Sequence[Answer] = getattr(estimate, question)
        if answers:
            result[question] = [
                {
                    "strategy": answer.row.strategy,
                    "precision": answer.row.precision,
                    "solution": answer.solution,
                    unknown: answer.value,
                }
                for answer in answers
            ]
    return result


def _row_to_json(row: StatesRow, estimate: StatesEstimate, explain: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "strategy": row.row.strategy,
        "precision": row.row.precision,
        "formula": row.row.formula,
        "terms": dict(row.terms),
        "bytes_per_gpu": row.bytes_per_gpu,
        "fits": row.fits,
    }
    if row.is_plan:
        out["is_plan"] = True
    if explain:
        out["written"] = dict(row.row.written())
        out["substituted"] = _substitute(row.row.formula, _values(estimate))
        out["source"] = row.row.source
    return out


def estimate_to_text(
    estimate: StatesEstimate, *, explain: bool = False, colour: bool = False
) -> list[str]:
    """Return the lines of the answer, and a note that activations are not included.

    Args:
        estimate: The estimate.
        explain: If True, also print the formulas with their numbers and sources.
        colour: If True, the lines are coloured.
    """
    sections = []
    if estimate.rows:
        sections.append(_table(estimate, colour))
        if explain:
            sections += [_explanation(row, estimate) for row in estimate.rows]
    if estimate.max_params:
        sections.append(_largest_models(estimate, explain))
    if estimate.min_gpus:
        sections.append(_fewest_gpus(estimate, explain))
    sections.append([STATES_ONLY])
    return "\n\n".join("\n".join(section) for section in sections).splitlines()


def _table(estimate: StatesEstimate, colour: bool) -> list[str]:
    assert estimate.num_params is not None
    fullest_first = sorted(estimate.rows, key=lambda row: -len(row.terms))
    terms = list(dict.fromkeys(term for row in fullest_first for term in row.terms))
    header = ["strategy", "precision", "formula", *(t.replace("_", " ") for t in terms), "total"]
    rows = [
        [
            row.row.strategy,
            row.row.precision,
            row.row.formula,
            *(gib(row.terms[term]) if term in row.terms else "" for term in terms),
            gib(row.bytes_per_gpu),
        ]
        for row in estimate.rows
    ]
    lines = columns([header, *rows], "<<<" + ">" * (len(terms) + 1))
    title = f"{_model(estimate)} on {_where(estimate)}: training states of each GPU in GiB"
    if estimate.memory_bytes is not None:
        title += f", of {format_gib(estimate.memory_bytes)}"
    marked = [
        line + _verdict(row, colour) + ("  <- the plan" if row.is_plan else "")
        for line, row in zip(lines[1:], estimate.rows, strict=True)
    ]
    return [paint(title, "bold", colour), "", lines[0], *marked]


def _verdict(row: StatesRow, colour: bool) -> str:
    if row.left_bytes is None:
        return ""
    if row.fits:
        return "  " + paint(f"ok, {format_bytes(row.left_bytes)} left", "green", colour)
    return "  " + paint(f"OVER by {format_bytes(-row.left_bytes)}", "red", colour)


def _explanation(row: StatesRow, estimate: StatesEstimate) -> list[str]:
    values = _values(estimate)
    written = {**row.row.written(), "total": row.row.formula}
    results = {**row.terms, "total": row.bytes_per_gpu}
    cells = [
        (
            f"  {term.replace('_', ' ')}",
            f"{formula} = {_substitute(formula, values)}",
            f"= {results[term]:,} B = {format_bytes(results[term])}",
        )
        for term, formula in written.items()
    ]
    head = f"{row.row.strategy} {row.row.precision}"
    source = textwrap.wrap(
        f"source: {row.row.source}", width=96, initial_indent="  ", subsequent_indent="    "
    )
    return [head, *columns(cells, "<<<"), *source]


def _largest_models(estimate: StatesEstimate, explain: bool) -> list[str]:
    assert estimate.memory_bytes is not None
    title = (
        f"largest model whose states fit into {format_gib(estimate.memory_bytes)} on each of "
        f"{_where(estimate)}"
    )
    cells = [
        (
            answer.row.strategy,
            answer.row.precision,
            "none" if answer.value is None else format_count(answer.value),
            "" if answer.value is None else f"{answer.value:,} parameters",
            *_solution(answer, estimate, explain),
        )
        for answer in estimate.max_params
    ]
    return [title, "", *columns(cells, "<<>><<"[: len(cells[0])])]


def _fewest_gpus(estimate: StatesEstimate, explain: bool) -> list[str]:
    assert estimate.num_params is not None
    assert estimate.memory_bytes is not None
    title = (
        f"fewest GPUs of {format_gib(estimate.memory_bytes)} whose memory holds the states of "
        f"{_model(estimate)} on {_nodes(estimate.nodes)}"
    )
    cells = [
        (
            answer.row.strategy,
            answer.row.precision,
            "never" if answer.value is None else f"{answer.value:,}",
            *_solution(answer, estimate, explain),
        )
        for answer in estimate.min_gpus
    ]
    return [title, "", *columns(cells, "<<><<"[: len(cells[0])])]


def _solution(answer: Answer, estimate: StatesEstimate, explain: bool) -> tuple[str, ...]:
    """Return the cells of an answer's equation; with `explain`, one with its numbers follows."""
    solution = answer.solution or f"{answer.row.formula} does not shrink with n"
    if not explain:
        return (solution,)
    return (solution, _substitute(answer.solution, _values(estimate)))


def _model(estimate: StatesEstimate) -> str:
    assert estimate.num_params is not None
    text = f"{format_count(estimate.num_params)} parameters"
    if estimate.num_adapter_params is None:
        return text
    return f"{text}, frozen, and {format_count(estimate.num_adapter_params)} of adapters"


def _values(estimate: StatesEstimate) -> Mapping[str, int | None]:
    return {
        "a": estimate.num_params,
        "n": estimate.num_gpus,
        "nodes": estimate.nodes,
        "M": estimate.memory_bytes,
        "t": estimate.num_adapter_params,
    }


def _substitute(formula: str, values: Mapping[str, int | None]) -> str:
    """Replace the symbols on a formula's right-hand side by their numbers."""
    left, equals, right = formula.rpartition("= ")
    right = re.sub(r"[A-Za-z]+", lambda m: str(values[m[0]] or m[0]), right)
    return left + equals + right


def _where(estimate: StatesEstimate) -> str:
    num_gpus = estimate.num_gpus
    return f"{num_gpus:,} GPU{'' if num_gpus == 1 else 's'} ({_nodes(estimate.nodes)})"


def _nodes(nodes: int) -> str:
    return f"{nodes:,} node{'' if nodes == 1 else 's'}"
