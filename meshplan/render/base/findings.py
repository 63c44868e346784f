"""Output of `meshplan check`: problems and warnings as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshplan.errors import Origin, Problem


def findings_to_json(
    problems: Sequence[Problem], warnings: Sequence[Problem] = ()
) -> dict[str, Any]:
    """Return the `result` of schema check/1.

    In a finding without an origin, file, line, column and path are null.
    """
    return {
        "ok": not problems,
        "problems": [_finding_to_json(problem) for problem in problems],
        "warnings": [_finding_to_json(warning) for warning in warnings],
    }


def _finding_to_json(finding: Problem) -> dict[str, Any]:
    return {"what": finding.what, **place_to_json(finding.origin), "fix": finding.fix}


def place_to_json(origin: Origin | None) -> dict[str, Any]:
    """Return {file, line, column, path} of an origin; a value that is not known is None."""
    if origin is None:
        return dict.fromkeys(("file", "line", "column", "path"))
    return {
        "file": origin.file,
        "line": origin.line or None,
        "column": origin.column or None,
        "path": origin.path or None,
    }
