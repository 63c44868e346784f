"""Read one entry of `rules`, and the settings that a rule and the whole plan share.

This module checks the form of patterns, placements and settings. Whether a module exists is
checked in `assign`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from meshplan.layout.mesh import AXES, DATA_AXES
from meshplan.layout.styles import (
    EXPERT_STYLE,
    PLANNED_STYLES,
    STYLE_NAMES,
    parse_packed,
    parse_placement,
)
from meshplan.spec.match import PatternError, compile_selector
from meshplan.spec.spec import (
    AUTO,
    DTYPE_WORDS,
    PRECISION_WORDS,
    ActivationCheckpointing,
    Offload,
    Precision,
    Rule,
    Selector,
)
from meshplan.spec.trust import as_code_name
from meshplan.spec.values import (
    Decoder,
    Findings,
    Form,
    PlanValue,
    any_of,
    boolean,
    choice,
    decoder,
    did_you_mean,
    integer,
    is_mapping,
    is_stated,
    items,
    join,
    list_form,
    mapping_form,
    measured,
    or_null,
    pattern,
    quote,
    scalar_words_form,
    section,
    show,
    states,
    text,
    words_form,
)
from meshplan.units import any_case, parse_bytes

_STYLES: Final = (*STYLE_NAMES, *PLANNED_STYLES, EXPERT_STYLE)
_REPLICATE: Final = ("r", "replicate", "replicate()")
_PARTIAL: Final = re.compile(r"p|(p|_?partial)(\(.*\))?", re.IGNORECASE)

_MODES: Final = ("none", "full", "selective", AUTO)
_OFFLOAD_WORDS: Final[Mapping[str, Offload]] = {
    "none": Offload(params=False, optimizer=False, activations=False),
    "optimizer": Offload(optimizer=True),
    "params": Offload(params=True),
    AUTO: Offload(params=AUTO, optimizer=AUTO, activations=AUTO),
}

_CODE: Final = pattern(
    r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*",
    "a function in the form module:name",
    "my_package.my_module:build",
)


@decoder(_CODE.form)
def code_name(value: PlanValue, found: Findings) -> str | None:
    """Decode the name of a function, "pkg.mod:name"."""
    if isinstance(value.data, str) and as_code_name(value.data) != value.data:
        name = as_code_name(value.data)
        found.add(value, f"{show(value)} names a file, not a module", f"write {name}")
        return None
    code: str | None = _CODE(value, found)
    return code


axis_list: Final = f"the axes are {', '.join(AXES)}"


@decoder({"type": "boolean"}, {"const": AUTO})
def boolean_or_auto(value: PlanValue, found: Findings) -> bool | str | None:
    """Decode `true`, `false` or `auto`."""
    return AUTO if value.data == AUTO else boolean(value, found)


@decoder(scalar_words_form([*DTYPE_WORDS, *(f"torch.{word}" for word in DTYPE_WORDS)]))
def _dtype(value: PlanValue, found: Findings) -> str | None:
    """Decode a floating-point dtype, by any of its names, to torch's name."""
    word = value.text.lower().removeprefix("torch.")
    if not isinstance(value.data, (list, dict)) and word in DTYPE_WORDS:
        return DTYPE_WORDS[word]
    fix = f"write {join(dict.fromkeys(DTYPE_WORDS.values()))}"
    found.add(value, f"{show(value)} is not a dtype", did_you_mean(word, DTYPE_WORDS, fix))
    return None


_ROLES: Final = dict.fromkeys(("param", "reduce", "output", "master"), _dtype)


@decoder(words_form(*PRECISION_WORDS), mapping_form(_ROLES))
def precision(value: PlanValue, found: Findings) -> Precision | None:
    """Decode a precision word, or dtypes by role."""
    if isinstance(value.data, (list, dict)):
        roles = section(
            value,
            found,
            _ROLES,
            "precision: bf16-mixed, or {param: bf16, reduce: fp32, master: fp32}",
        )
        return Precision(**roles) if roles is not None else None
    word = value.text.lower()
    if word in PRECISION_WORDS:
        return Precision(**PRECISION_WORDS[word], word=word)
    dtype = DTYPE_WORDS.get(word)
    of_dtype = [known for known, roles in PRECISION_WORDS.items() if roles["param"] == dtype]
    fix = f"write {join(of_dtype or PRECISION_WORDS)}"
    if not of_dtype:
        fix = did_you_mean(word, PRECISION_WORDS, fix)
    found.add(value, f"{show(value)} is not a precision", fix)
    return None


@decoder({"type": "number", "minimum": 0, "maximum": 1}, measured(parse_bytes).form["anyOf"][1])
def _budget(value: PlanValue, found: Findings) -> float | int | None:
    """Decode a fraction of the activations, or bytes."""
    if isinstance(value.data, (int, float)) and not isinstance(value.data, bool):
        if 0 <= value.data <= 1:
            return float(value.data)
        fix = "write 0.5 for half of the activations, or a size such as 4GiB"
        found.add(value, f"{show(value)} is neither a fraction from 0 to 1 nor a size", fix)
        return None
    size: int | None = measured(parse_bytes)(value, found)
    return size


_operation = pattern(r"[A-Za-z_][\w.:]*", "the name of an operation", "mm")


@decoder(list_form(_operation.form))
def _operations(value: PlanValue, found: Findings) -> tuple[str, ...] | None:
    names = [_operation(v, found) for v in items(value, found, "save: [mm, sdpa]")]
    return tuple(filter(None, names))


_CHECKPOINTING_READS: Final = {
    "every": ("full", "selective"),
    "save": ("selective",),
    "budget": ("selective", AUTO),
}
"""For each key, the modes that use it; in any other mode the key would have no effect."""


_mode = choice(_MODES, "an activation checkpointing mode")
_CHECKPOINTING: Final[Mapping[str, Decoder]] = {
    "mode": _mode, "every": integer(), "save": _operations, "budget": _budget,
}  # fmt: skip


def _needs_mode(key: str) -> Form:
    """Return the form of a mapping whose mode reads this key, if the key has a value."""
    modes = words_form(*_CHECKPOINTING_READS[key])
    return any_of({"properties": {key: {"type": "null"}}}, {"properties": {"mode": modes}})


@decoder(
    _mode.form,
    mapping_form(
        _CHECKPOINTING, required=("mode",), allOf=[_needs_mode(key) for key in _CHECKPOINTING_READS]
    ),
)
def activation_checkpointing(value: PlanValue, found: Findings) -> ActivationCheckpointing | None:
    """Decode a mode, or a mode with its details."""
    if not isinstance(value.data, (list, dict)):
        word = _mode(value, found)
        return ActivationCheckpointing(mode=word) if word else None
    got = section(
        value,
        found,
        _CHECKPOINTING,
        "activation_checkpointing: full, or {mode: selective, save: [mm, sdpa]}",
        required={"mode": f"add mode: {join(_MODES[1:])}"},
    )
    if got is None or "mode" not in got:
        return None
    stated: Any = value.data
    for key in got:
        readers = _CHECKPOINTING_READS.get(key, _MODES)
        if got["mode"] not in readers:
            what = f"'{key}' has no effect with mode: {got['mode']}"
            found.add(stated[key], what, f"remove '{key}', or write mode: {join(readers)}")
    return ActivationCheckpointing(**got)


_OFFLOADED: Final = dict.fromkeys(("params", "optimizer", "activations"), boolean_or_auto)


@decoder(words_form(*_OFFLOAD_WORDS), mapping_form(_OFFLOADED))
def offload(value: PlanValue, found: Findings) -> Offload | None:
    """Decode one word, or a mapping with the keys params, optimizer and activations."""
    if not isinstance(value.data, (list, dict)):
        word: Offload | None = choice(_OFFLOAD_WORDS, "an offload setting")(value, found)
        return word
    got = section(
        value, found, _OFFLOADED, "offload: optimizer, or {params: true, optimizer: true}"
    )
    return Offload(**got) if got is not None else None


def axis_ok(name: str, value: PlanValue, found: Findings) -> bool:
    """Return True if this key is a mesh axis; otherwise record a problem."""
    if name in AXES:
        return True
    what = f"{quote(name)} is not a mesh axis"
    found.add(value.key or value.origin, what, did_you_mean(name, AXES, axis_list))
    return False


_MATCH_EXAMPLE: Final = 'match: "layers.*"'
_MATCH_KINDS: Final[Mapping[str, Decoder]] = {
    "type": text("the name of a class"),
    "param": text("a pattern of parameter names"),
}


_SELECTOR_FORM: Final = any_of(
    {"type": "string", "minLength": 1},
    *(mapping_form({key: each}, required=(key,)) for key, each in _MATCH_KINDS.items()),
)


def _selector(value: PlanValue, found: Findings) -> Selector | None:
    """Decode a glob, `/regex/`, `{type: CLASS}` or `{param: GLOB}`."""
    if isinstance(value.data, dict):
        got = section(value, found, _MATCH_KINDS, _MATCH_EXAMPLE) or {}
        if len(got) == 2 or not value.data:
            what = "a 'match' that is a mapping needs exactly one of 'type' and 'param'"
            found.add(value, what, "write one entry for each: [{type: Linear}, {param: bias}]")
        if len(got) != 1:
            return None
        selector = (
            Selector("type", got["type"]) if "type" in got else Selector("param", got["param"])
        )
    elif isinstance(value.data, str):
        is_regex = len(value.data) > 1 and value.data[0] == value.data[-1] == "/"
        selector = Selector("regex", value.data[1:-1]) if is_regex else Selector("glob", value.data)
    else:
        found.add(value, f"{show(value)} is not a pattern", f"write {_MATCH_EXAMPLE}")
        return None
    try:
        compile_selector(selector)
    except PatternError as error:
        found.add(value, str(error), error.fix)
    return selector


@decoder(_SELECTOR_FORM, list_form(_SELECTOR_FORM))
def _match(value: PlanValue, found: Findings) -> tuple[Selector, ...] | None:
    many = isinstance(value.data, list)
    each = items(value, found, _MATCH_EXAMPLE) if many else [value]
    return tuple(filter(None, [_selector(one, found) for one in each])) or None


def _placement(axis: str, value: PlanValue, found: Findings) -> str | None:
    """Decode a placement on one axis to its canonical word: `S(0)`, `R`, `auto` or a style name."""
    word = value.text.strip()
    lower = word.lower()
    dim = parse_placement(word)
    fix = "write R to replicate, or S(0) to shard tensor dim 0"
    if isinstance(value.data, (list, dict)):
        found.add(value, f"{show(value)} is not a placement", fix)
    elif axis == "pp":
        what = "'pp' divides the modules into stages and shards no tensor"
        found.add(
            value.key or value.origin,
            what,
            "write stage: 0 instead of place: {pp: ...}",
        )
    elif dim is not None:
        return f"S({dim})"
    elif lower in _REPLICATE:
        return "R"
    elif lower == AUTO:
        return AUTO
    elif _PARTIAL.fullmatch(word):
        found.add(value, f"{show(value)} cannot be declared: parameters are never partial", fix)
    elif parse_packed(word)[0] not in _STYLES:
        known = (*_STYLES, "replicate", AUTO, "S(0)", "S(1)")
        found.add(value, f"{show(value)} is not a placement", did_you_mean(word, known, fix))
    elif 0 in (sizes := parse_packed(word)[1]) or sizes == (1,):
        what = f"{show(value)} needs two or more pieces, none of size 0"
        found.add(value, what, "write packed_colwise(2) for two equal pieces, or list their sizes")
    elif (word == EXPERT_STYLE) != (axis == "ep"):
        what = f"'{word}' is not a style of the axis {axis}"
        found.add(value, what, f"write {'ep' if word == EXPERT_STYLE else 'tp'}: {word}")
    elif axis in DATA_AXES:
        what = f"'{word}' is a tensor-parallel style, and {axis} is a data axis"
        found.add(value, what, f"write tp: {word}, or {axis}: S(0)")
    else:
        return word
    return None


_DATA_WORDS: Final = ("replicate", "shard", "hybrid_shard")
_PLACEMENT_FORM: Final = any_of(
    words_form(*_REPLICATE, AUTO),
    {"type": "string", "pattern": rf"^(?:[sS]|{any_case('shard')})\(\s*-?\d+\s*\)$"},
)
_PIECES: Final = r"\s*(?:(?:[2-9]|[1-9]\d+)|[1-9]\d*(?:\s*,\s*[1-9]\d*)+)\s*"
"""The numbers of `packed_colwise(...)`: a count of at least 2, or two and more sizes."""
_STYLE_FORM: Final = any_of(
    {"enum": [style for style in _STYLES if style != EXPERT_STYLE]},
    {"type": "string", "pattern": rf"^packed_colwise\({_PIECES}\)$"},
    _PLACEMENT_FORM,
)
_AXIS_FORMS: Final[Mapping[str, Form]] = {
    **{axis: or_null(_PLACEMENT_FORM) for axis in DATA_AXES},
    # A placement on cp is refused later, with a reason that depends on the plan.
    "cp": or_null(_STYLE_FORM),
    "tp": or_null(_STYLE_FORM),
    "ep": or_null(any_of({"const": EXPERT_STYLE}, _PLACEMENT_FORM)),
    "pp": {"type": "null"},
}
"""The placements that `_placement` reads on each axis."""
_AXES_FORM: Final[Form] = {
    "type": "object",
    "properties": _AXIS_FORMS,
    "additionalProperties": False,
    "minProperties": 1,
}


@decoder(words_form(*_DATA_WORDS), _AXES_FORM)
def _place(value: PlanValue, found: Findings) -> str | dict[str, str] | None:
    """Decode one word, which is about the data axes, or a mapping of placements by axis."""
    example = "place: shard, or place: {tp: colwise}"
    if not isinstance(value.data, (list, dict)):
        word = value.text
        if word in _STYLES or parse_placement(word) is not None:
            found.add(value, f"{show(value)} states no mesh axis", f"write place: {{tp: {word}}}")
            return None
        data: str | None = choice(_DATA_WORDS, "a data-parallel placement")(value, found)
        return data
    if not is_mapping(value, found, example):
        return None
    axes: Any = value.data
    if not axes:
        found.add(value, "the mapping states no mesh axis", f"write {example}")
    out: dict[str, str] = {}
    for axis, child in axes.items():
        if axis_ok(axis, child, found) and is_stated(child):
            placement = _placement(axis, child, found)
            if placement is not None:
                out[axis] = placement
    return out


@decoder({"type": "boolean"}, {"type": "integer", "minimum": 2})
def _reshard(value: PlanValue, found: Findings) -> bool | int | None:
    if isinstance(value.data, bool):
        return value.data
    if isinstance(value.data, int) and value.data >= 2:
        return value.data
    what = f"{show(value)} is not true, false or a whole number of at least 2"
    fix = "write true, false, or the number of ranks that shard the parameters after forward"
    found.add(value, what, fix)
    return None


_FIELDS: Final[Mapping[str, Decoder]] = {
    "match": _match,
    "place": _place,
    "stage": integer(0, "first", "last"),
    "unit": boolean,
    "reshard_after_forward": _reshard,
    "precision": precision,
    "activation_checkpointing": activation_checkpointing,
    "offload": offload,
    "apply": code_name,
    "why": text("a string"),
    "optional": boolean,
}
RULE_KEYS: Final = tuple(_FIELDS)
_STATES: Final = tuple(key for key in _FIELDS if key not in ("match", "why", "optional"))
RULE_FORM: Final = mapping_form(
    _FIELDS,
    required=("match",),
    anyOf=[states(key) for key in _STATES],
)


def rule(index: int, value: PlanValue, found: Findings, homes: Mapping[str, str]) -> Rule | None:
    """Read one entry of `rules`; return None if it cannot be used.

    Args:
        index: The entry's position in the list.
        value: The value from the file.
        found: The findings that problems are added to.
        homes: The fix for each key that is valid only elsewhere in the plan.
    """
    num_before = len(found.problems)
    got = section(
        value,
        found,
        _FIELDS,
        "- {match: embed, place: shard}",
        required={"match": "add the modules that the rule applies to, such as " + _MATCH_EXAMPLE},
        homes={**homes, **{axis: f"write place: {{{axis}: ...}}" for axis in AXES}},
    )
    if len(found.problems) == num_before and not any(key in (got or {}) for key in _STATES):
        fix = f"add {join(_STATES)}, or remove the rule"
        found.add(value, "the rule has a match but no setting", fix)
    # A match that yaml could not read is already recorded; its rule is dropped silently.
    if got is None or "match" not in got or len(found.problems) > num_before:
        return None
    if isinstance(got.get("place"), str):
        got["data"] = got.pop("place")
    return Rule(index=index, **got)
