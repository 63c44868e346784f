"""Output of `meshplan import` and `export`: what became of every key, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshplan.interop.configs.exporting import ExportedConfig
from meshplan.interop.configs.importing import ImportedPlan, TranslatedKey, shortly


def keys_to_text(imported: ImportedPlan, *, verbose: bool = False) -> list[str]:
    """Return a line with the counts, the refused keys, and with `verbose` all others."""
    counts = {each: len(imported.of(each)) for each in ("honoured", "irrelevant", "refused")}
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines = [f"{imported.file}: {imported.tool}, {len(imported.keys)} keys: {words}"]
    if verbose:
        lines += [f"  {key.key}: {shortly(key.value)} -> {key.plan_key}"
                  for key in imported.of("honoured")]  # fmt: skip
        lines += _reasons(imported.of("irrelevant"), "irrelevant")
    return lines + _reasons(imported.of("refused"), "refused")


def _reasons(keys: Sequence[TranslatedKey], verdict: str) -> list[str]:
    return [
        f"  {verdict} {key.origin.place if key.origin and key.origin.line else ''}"
        f"{': ' if key.origin and key.origin.line else ''}{key.key}: {shortly(key.value)}"
        f"\n    {key.note}"
        for key in keys
    ]


def import_to_json(imported: ImportedPlan, *, is_given: bool, file: str | None) -> dict[str, Any]:
    """Return the `result` of schema import/1.

    Args:
        imported: The import.
        is_given: False if keys were refused and the rest was not asked for: `plan` is then null.
        file: The plan file that was written; None if none was.
    """

    def entry(key: TranslatedKey) -> dict[str, Any]:
        line = key.origin.line if key.origin is not None and key.origin.line else None
        plan_key = {"plan_key": key.plan_key} if key.verdict == "honoured" else {}
        return {"key": key.key, "value": key.value, **plan_key, "note": key.note, "line": line}

    return {
        "from": imported.tool,
        "plan": imported.text if is_given else None,
        "file": file,
        "honoured": [entry(key) for key in imported.of("honoured")],
        "irrelevant": [entry(key) for key in imported.of("irrelevant")],
        "refused": [entry(key) for key in imported.of("refused")],
    }


def unsaid_to_text(exported: ExportedConfig) -> list[str]:
    """Return a line for each statement that the file lacks, or that the tool adds."""
    lines = [f"not in the file: {statement} ({why})" for statement, why in exported.unsaid]
    return lines + [f"not in the plan: {each} ({why})" for each, why in exported.assumed]


def export_to_json(exported: ExportedConfig, *, is_given: bool, file: str | None) -> dict[str, Any]:
    """Return the `result` of schema export/1; the arguments are as in `import_to_json`."""
    return {
        "to": exported.tool,
        "config": exported.text if is_given else None,
        "file": file,
        "unsaid": [{"statement": statement, "why": why} for statement, why in exported.unsaid],
        "assumed": [{"statement": statement, "why": why} for statement, why in exported.assumed],
    }
