"""The JSON Schema of plan.yaml, made from the decoders that read it and the table of defaults.

An editor with a YAML language server completes and checks a plan with it. The schema describes each
key by itself. Keys that contradict each other or the model are found by `meshplan check` only.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

from meshplan.spec.keys import KEYS
from meshplan.spec.schema import PLAN_FORM

SCHEMA_URL: Final = "https://raw.githubusercontent.com/meshplan/meshplan/main/docs/plan.schema.json"
EDITOR_LINE: Final = f"# yaml-language-server: $schema={SCHEMA_URL}"
"""The first line of a plan, by which editors find its schema."""


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft-07) of a plan file, with the default of each key."""
    schema: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": SCHEMA_URL,
        "title": "meshplan plan",
        **deepcopy(PLAN_FORM),
    }
    for key in KEYS:
        chosen = "; `meshplan plan` chooses it" if key.chosen else ""
        for form in _forms_at(schema, key.path.split(".")):
            form["description"] = f"If left out: {key.default}{chosen}."
    return schema


def _forms_at(form: dict[str, Any], path: list[str]) -> list[dict[str, Any]]:
    """Return the forms of a key in all alternatives of a form that has it."""
    if not path:
        return [form]
    inner = [form["properties"][path[0]]] if path[0] in form.get("properties", {}) else []
    found = [each for child in inner for each in _forms_at(child, path[1:])]
    return found + [each for one in form.get("anyOf", ()) for each in _forms_at(one, path)]
