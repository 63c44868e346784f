"""Output of `meshplan doctor`: what was found by topic, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshplan.launch.machine import Checkup
from meshplan.render.base.findings import findings_to_json


def checkup_to_text(checkup: Checkup) -> Iterator[str]:
    """Yield the lines of one topic: the facts, then the problems and warnings, each with its fix.

    >>> list(checkup_to_text(Checkup("limits", {"open files": "1,024"})))
    ['limits: ok', '  open files: 1,024']
    """
    count, more = len(checkup.problems), len(checkup.warnings)
    words = [f"{number} {noun}{'s' * (number > 1)}" for number, noun in
             ((count, "problem"), (more, "warning")) if number]  # fmt: skip
    yield f"{checkup.topic}: {', '.join(words) or 'ok'}"
    for name, fact in checkup.facts.items():
        yield f"  {name}: {fact}"
    for noun, found in (("problem", checkup.problems), ("warning", checkup.warnings)):
        for each in found:
            yield from (f"  {line}" for line in f"{noun}: {each}".splitlines())


def checkups_to_json(checkups: Sequence[Checkup]) -> dict[str, Any]:
    """Return the `result` of schema doctor/1."""
    return {
        "ok": not any(each.problems for each in checkups),
        "topics": [
            {"topic": each.topic, "facts": dict(each.facts),
             **findings_to_json(each.problems, each.warnings)}
            for each in checkups
        ],
    }  # fmt: skip
