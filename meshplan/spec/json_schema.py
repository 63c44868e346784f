"""The JSON Schema of plan.yaml, made from the decoders that read it, the meanings and the defaults.

An editor with a YAML language server completes and checks a plan with it. The schema describes each
key by itself. Keys that contradict each other or the model are found by `meshplan check` only.
"""

from __future__ import annotations

import json
from typing import Any, Final

from meshplan.spec.keys import KEYS
from meshplan.spec.meanings import MEANINGS
from meshplan.spec.schema import PLAN_FORM

SCHEMA_URL: Final = "https://raw.githubusercontent.com/meshplan/meshplan/main/docs/plan.schema.json"
EDITOR_LINE: Final = f"# yaml-language-server: $schema={SCHEMA_URL}"
"""The first line of a plan, by which editors find its schema."""


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft-07) of a plan file; it describes each key and its default."""
    schema: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": SCHEMA_URL,
        "title": "meshplan plan",
        # Keys share the forms of their decoders. In JSON each has its own, which can be described.
        **json.loads(json.dumps(PLAN_FORM)),
    }
    texts = {path: f"{means}." for keys in MEANINGS.values() for path, means in keys.items()}
    for key in KEYS:
        chosen = "; `meshplan plan` chooses it" if key.chosen else ""
        before = f"{texts[key.path]} " if key.path in texts else ""
        texts[key.path] = f"{before}If left out: {key.default}{chosen}."
    for path, says in texts.items():
        for form in _forms_at(schema, path.split(".")):
            form["description"] = says
    return schema


def _forms_at(form: dict[str, Any], path: list[str]) -> list[dict[str, Any]]:
    """Return the forms of a key in all alternatives of a form, or of its items, that has it."""
    if not path:
        return [form]
    child = form.get("properties", {}).get(path[0], {"not": None})
    # A form with "not" is one of `states`, which demands a key and says nothing about its values.
    found = [] if "not" in child else _forms_at(child, path[1:])
    others = [*form.get("anyOf", ()), *([form["items"]] if "items" in form else [])]
    return found + [each for one in others for each in _forms_at(one, path)]
