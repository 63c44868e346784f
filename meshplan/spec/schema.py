"""The keys of plan.yaml: from `PlanValue`s to a `Spec`, with every problem that needs no model.

This module checks the form of each key and what can contradict itself inside one file. yaml is
parsed in `reader`, the model is checked in `assign`, and strategy and mesh in `strategies`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from meshplan.errors import Origin, SpecError
from meshplan.layout.hardware import OWN_FACTS, devices, find_device, names_pattern
from meshplan.layout.mesh import AXES
from meshplan.layout.optimizers import SHAPED_STATES
from meshplan.layout.schedules import SCHEDULES
from meshplan.spec.contradictions import ContradictionError, disagreements
from meshplan.spec.inputs import model_input
from meshplan.spec.rules import (
    RULE_FORM,
    RULE_KEYS,
    activation_checkpointing,
    axis_ok,
    code_name,
    offload,
    precision,
    rule,
)
from meshplan.spec.spec import (
    AUTO,
    MOST_MICROBATCHES,
    OPTIMIZER_STATES,
    PROFILES,
    STRATEGY_WORDS,
    Batch,
    Borrow,
    Context,
    Experts,
    HardwareSpec,
    ModelSpec,
    Pipeline,
    Rule,
    Spec,
)
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
    duration,
    integer,
    is_mapping,
    is_stated,
    items,
    join,
    list_form,
    mapping_form,
    measured,
    number,
    or_null,
    section,
    share,
    show,
    states,
    text,
    words_form,
)
from meshplan.units import parse_bandwidth, parse_count, parse_memory

VERSION: Final = 1
_MAX_DEVICES: Final = 10**6
_count, _steps = integer(1, AUTO, high=MOST_MICROBATCHES), integer(1, high=MOST_MICROBATCHES)
Mesh = Mapping[str, Any] | tuple[int, ...] | str
_size = integer(1, high=_MAX_DEVICES)
_positive = number(
    lambda x: x > 0, "a number above 0", "write 1.0, or leave the key out", exclusiveMinimum=0
)


@decoder({"const": VERSION})
def _version(value: PlanValue, found: Findings) -> int | None:
    if value.data == VERSION and not isinstance(value.data, bool):
        return VERSION
    what = f"{show(value)} is not a plan format version that this meshplan supports"
    found.add(value, what, f"write version: {VERSION}")
    return None


_MODEL: Final[Mapping[str, Decoder]] = {
    "config": text("the path of a config.json"),
    "entry": code_name,
    "params": measured(parse_count),
}


@decoder(
    any_of(*(mapping_form({key: each}, required=(key,), title=key) for key, each in _MODEL.items()))
)
def _model(value: PlanValue, found: Findings) -> ModelSpec | None:
    example = "model: {params: 3e9}, {config: PATH} or {entry: module:name}"
    num_before = len(found.problems)
    got = section(value, found, _MODEL, example)
    if got is None or len(found.problems) > num_before:
        return None
    if len(got) != 1:
        what = f"{join(got, 'and')} cannot be combined" if got else "the section states no model"
        found.add(value, what, "keep one of them" if got else f"write {example}")
        return None
    return ModelSpec(**got)


_OWN_GPU: Final[Mapping[str, Decoder]] = {key: measured(read) for key, read in OWN_FACTS.items()}


@decoder(
    {"enum": list(devices())},
    {"type": "string", "pattern": names_pattern()},
    mapping_form(_OWN_GPU, required=("memory",)),
)
def _gpu(value: PlanValue, found: Findings) -> str | None:
    name: str | None
    if isinstance(value.data, dict):
        num_before = len(found.problems)
        example = "gpu: {memory: 48GB, bf16: 181e12, hbm: 960GB/s}"
        required = {"memory": "add memory: 48GB"}
        got = section(value, found, _OWN_GPU, example, required=required)
        if not got or len(found.problems) > num_before:
            return None
        name = ",".join(f"{key}={value.data[key].text}" for key in got)
    elif isinstance(value.data, int) and (
        names := [each for each in devices() if value.text in each.split("-")]
    ):
        found.add(value, f"{show(value)} is a number, not a name", f"write {join(names)}")
        return None
    else:
        name = text("the name of a GPU, or {memory: 48GB, bf16: 181e12}")(value, found)
    try:
        return find_device(name, value.origin).name if name else None
    except SpecError as error:
        found.problems += error.problems
        return None


_HARDWARE: Final[Mapping[str, Decoder]] = {
    "nodes": _size,
    "gpus_per_node": _size,
    "gpu": _gpu,
    "memory": measured(parse_memory),
    "host_memory": measured(parse_memory),
    "intra": measured(parse_bandwidth),
    "inter": measured(parse_bandwidth),
    "headroom": number(
        lambda x: 0 <= x < 1, "a fraction of at least 0 and below 1", "write something like 0.1",
        minimum=0, exclusiveMaximum=1,
    ),
}  # fmt: skip
_HARDWARE_NAMES: Final = {
    "memory": "memory_bytes",
    "host_memory": "host_memory_bytes",
    "intra": "intra_bytes_per_s",
    "inter": "inter_bytes_per_s",
}


@decoder(
    mapping_form(
        _HARDWARE,
        required=("gpus_per_node",),
        **{"not": {"allOf": [states("gpu"), states("memory")]}},
    )
)
def _hardware(value: PlanValue, found: Findings) -> HardwareSpec | None:
    example = "hardware: {nodes: 1, gpus_per_node: 8}"
    required = {"gpus_per_node": "add gpus_per_node: 8"}
    got = section(value, found, _HARDWARE, example, required=required)
    if got is None:
        return None
    if "gpus_per_node" not in got:
        return None
    return HardwareSpec(**{_HARDWARE_NAMES.get(key, key): what for key, what in got.items()})


_BORROW: Final = re.compile(r"\s*(\d{1,7})\s+in\s+(\S+)\s*")
_MESH_EXAMPLE: Final = "mesh: {dp_replicate: 2, dp_shard: 4}"


def _axis_size(value: PlanValue, found: Findings) -> int | str | Borrow | None:
    borrow = _BORROW.fullmatch(value.data) if isinstance(value.data, str) else None
    if borrow and int(borrow[1]) >= 1:
        return Borrow(int(borrow[1]), borrow[2])
    size: int | str | None = integer(1, AUTO, high=_MAX_DEVICES)(value, found)
    return size


_BORROW_FORM: Final[Form] = {"type": "string", "pattern": r"^\s*0*[1-9]\d{0,6}\s+in\s+\S+\s*$"}
_AXIS_FORM: Final = or_null(any_of(integer(1, AUTO, high=_MAX_DEVICES).form, _BORROW_FORM))


@decoder(
    {"const": AUTO},
    list_form(_size.form),
    {
        "type": "object",
        "properties": dict.fromkeys(AXES, _AXIS_FORM),
        "additionalProperties": False,
        "minProperties": 1,
    },
)
def _mesh(value: PlanValue, found: Findings) -> Mesh | None:
    if value.data == AUTO:
        return AUTO
    if isinstance(value.data, list):
        sizes = [_size(v, found) for v in items(value, found, _MESH_EXAMPLE)]
        return tuple(size for size in sizes if size is not None)
    if not is_mapping(value, found, f"{_MESH_EXAMPLE} or mesh: auto"):
        return None
    if not value.data:
        found.add(value, "the mesh has no axes", f"write {_MESH_EXAMPLE}, or leave mesh out")
    mesh: dict[str, Any] = {}
    for axis, child in value.data.items():
        if axis_ok(axis, child, found) and is_stated(child):
            mesh[axis] = _axis_size(child, found)
    for axis, size in mesh.items():
        if isinstance(size, Borrow):
            _check_borrow(axis, size, value, mesh, found)
    return mesh


def _check_borrow(
    axis: str, borrow: Borrow, value: PlanValue, mesh: Mapping[str, Any], found: Findings
) -> None:
    lender = mesh.get(borrow.within)
    if borrow.within == axis or borrow.within not in value.data or isinstance(lender, Borrow):
        others = [name for name, size in mesh.items() if not isinstance(size, Borrow)]
        what = f"'{axis}' cannot borrow ranks from '{borrow.within}'"
        fix = f"name one of {', '.join(others)}" if others else "write a size"
        found.add(value.data[axis], what, did_you_mean(borrow.within, others, fix))
    elif isinstance(lender, int) and lender % borrow.size:
        what = f"{borrow.size} does not divide {borrow.within}: {lender}"
        found.add(value.data[axis], what, f"write a divisor of {lender}")


@decoder(
    _count.form,
    {
        "type": "object",
        "patternProperties": {"^[0-9]{1,9}$": or_null(_steps.form)},
        "additionalProperties": False,
    },
)
def _accumulate(value: PlanValue, found: Findings) -> Any:
    """Decode a number of microbatches, `auto`, or a mapping of first epoch to number."""
    if not isinstance(value.data, dict):
        return _count(value, found)
    out = dict[int, int]()
    for epoch, child in value.data.items():
        if not re.fullmatch(r"[0-9]{1,9}", epoch):
            found.add(
                child.key or child.origin, f"'{epoch}' is not an epoch", "write an epoch from 0 on"
            )
        elif is_stated(child) and (steps := _steps(child, found)) is not None:
            out[int(epoch)] = steps
    return out


_BATCH: Final[Mapping[str, Decoder]] = {
    "micro": integer(1, AUTO),
    "accumulate": _accumulate,
    "global": integer(1),
    "seq_len": integer(1),
    "per_rank": boolean,
}


@decoder(mapping_form(_BATCH))
def _batch(value: PlanValue, found: Findings) -> Batch | None:
    got = section(value, found, _BATCH, "batch: {micro: 4, seq_len: 2048}")
    if got is None:
        return None
    return Batch(global_=got.pop("global", None), **got)


_module_name = text("the name of a module")


@decoder({"const": AUTO}, list_form(list_form(_module_name.form)))
def _split(value: PlanValue, found: Findings) -> str | tuple[tuple[str, ...], ...] | None:
    if value.data == AUTO:
        return AUTO
    example = "split: auto, or one list of modules per stage: [[embed, layers.0], [layers.1, head]]"
    stages = []
    for stage in items(value, found, example):
        names = [_module_name(v, found) for v in items(stage, found, example)]
        stages.append(tuple(filter(None, names)))
    return tuple(stages) or None


_PIPELINE: Final[Mapping[str, Decoder]] = {
    "schedule": choice((*SCHEDULES, AUTO), "a pipeline schedule"),
    "virtual": integer(1),
    "microbatches": _count,
    "split": _split,
}


@decoder(mapping_form(_PIPELINE))
def _pipeline(value: PlanValue, found: Findings) -> Pipeline | None:
    got = section(value, found, _PIPELINE, "pipeline: {schedule: 1F1B, microbatches: 8}")
    return Pipeline(**got) if got is not None else None


_CONTEXT: Final[Mapping[str, Decoder]] = {
    "attention": choice(("all_gather", "all_to_all"), "a context-parallel attention method"),
    "balance": boolean,
}


@decoder(mapping_form(_CONTEXT))
def _context(value: PlanValue, found: Findings) -> Context | None:
    got = section(value, found, _CONTEXT, "context: {attention: all_gather, balance: true}")
    return Context(**got) if got else None


_EXPERTS: Final[Mapping[str, Decoder]] = {
    "capacity": number(
        lambda x: x >= 1, "a number of at least 1: a multiple of an even share",
        "write something like 1.5", minimum=1,
    ),
}  # fmt: skip


@decoder(mapping_form(_EXPERTS))
def _experts(value: PlanValue, found: Findings) -> Experts | None:
    got = section(value, found, _EXPERTS, "experts: {capacity: 1.5}")
    return Experts(**got) if got is not None else None


_DDP: Final[Mapping[str, Decoder]] = {
    "bucket_mb": _positive,
    "find_unused_parameters": boolean,
    "gradient_as_bucket_view": boolean,
    "static_graph": boolean,
    "broadcast_buffers": boolean,
}


@decoder(mapping_form(_DDP))
def _ddp(value: PlanValue, found: Findings) -> dict[str, Any] | None:
    return section(value, found, _DDP, "ddp: {bucket_mb: 25, static_graph: true}")


_SOLVE: Final[Mapping[str, Decoder]] = {
    "objective": choice(("time", "memory", "balanced", "cost"), "an objective"),
    "robust": share,
    "time_limit": duration,
    "keep": integer(1),
}
_NOT_BY_TIME: Final = {
    "required": ["objective"],
    "properties": {"objective": {"not": or_null(words_form("time"))}},
}


@decoder(mapping_form(_SOLVE, **{"not": {"allOf": [states("robust"), _NOT_BY_TIME]}}))
def _solve(value: PlanValue, found: Findings) -> dict[str, Any] | None:
    got = section(value, found, _SOLVE, "solve: {objective: time, time_limit: 30s}")
    if got and "robust" in got and got.get("objective", "time") != "time":
        what = f"robust is about the time of a step, and the objective is {got['objective']}"
        found.add(value.data["robust"], what, "leave robust or objective out")
    if got and "time_limit" in got:
        got["time_limit_s"] = got.pop("time_limit")
    return got


@decoder({"type": "array", "items": RULE_FORM})
def _rules(value: PlanValue, found: Findings) -> tuple[Rule, ...] | None:
    if not isinstance(value.data, list):
        fix = "begin each rule with a dash: - match: embed"
        found.add(value, f"{show(value)} is not a list of rules", fix)
        return None
    homes = dict.fromkeys(_PLAN, "write it at the top level of the file")
    entries = enumerate(value.data)
    read = [rule(i, entry, found, homes) for i, entry in entries if not entry.is_broken]
    return tuple(filter(None, read))


_PLAN: Final[Mapping[str, Decoder]] = {
    "version": _version,
    "model": _model,
    "hardware": _hardware,
    "mesh": _mesh,
    "strategy": choice(STRATEGY_WORDS, "a strategy"),
    "precision": precision,
    "batch": _batch,
    "input": model_input,
    "activation_checkpointing": activation_checkpointing,
    "offload": offload,
    "pipeline": _pipeline,
    "context": _context,
    "experts": _experts,
    "tp_plan": choice(("hf", "auto", "none"), "a tp_plan"),
    "sequence_parallel": boolean,
    "loss": choice(("mean", "sum", "tokens"), "a loss reduction"),
    "loss_parallel": boolean,
    "loss_chunks": integer(1, "fused", AUTO),
    "sync_batchnorm": boolean,
    "compile": boolean,
    "ddp": _ddp,
    "clip_grad_norm": _positive,
    "optimizer": choice((*OPTIMIZER_STATES, *SHAPED_STATES), "an optimizer"),
    "allocator": choice(("default", "expandable", AUTO), "an allocator"),
    "profile": choice(PROFILES, "a profile"),
    "solve": _solve,
    "rules": _rules,
}

PLAN_FORM: Final = mapping_form(_PLAN, required=("version",))
"""The JSON Schema of a plan, without titles and defaults."""

_HOMES: Final = {
    **dict.fromkeys(RULE_KEYS, "write it in an entry of 'rules'"),
    **{
        key: f"write it under '{name}'"
        for name, fields in {
            "model": _MODEL, "hardware": _HARDWARE, "batch": _BATCH,
            "pipeline": _PIPELINE, "context": _CONTEXT, "experts": _EXPERTS, "ddp": _DDP,
        }.items()
        for key in fields
    },
    **{axis: f"write mesh: {{{axis}: ...}}" for axis in AXES},
}  # fmt: skip
"""For each key that is valid only elsewhere, the fix to report if it is at the top level."""


def read_spec(
    value: PlanValue, found: Findings, origins: Mapping[str, Origin], source: str
) -> Spec | None:
    """Return the `Spec` that a plan's values declare; None if the plan is not a mapping.

    Problems are added to `found`; the returned `Spec` is complete only if there are none. If there
    are none but contradictions, a ContradictionError with the whole `Spec` is raised.

    Args:
        value: The whole plan.
        found: The findings that problems are added to.
        origins: The place where each value was stated, by dotted path.
        source: The plan's name for messages.
    """
    required = {"version": f"begin the file with version: {VERSION}"}
    example = "a plan beginning with version: 1"
    got = section(value, found, _PLAN, example, required=required, homes=_HOMES)
    if got is None:
        return None
    spec = Spec(**got, origins=origins, source=source)
    problems = disagreements(spec, [p.origin.path for p in found.problems if p.origin])
    if problems and not found.problems:
        raise ContradictionError(problems, spec)
    found.problems += problems
    return spec
