"""The inputs of the formulas, read from flags, a config.json and a plan file.

They are four numbers: parameters, GPUs, nodes and the memory of a GPU. If a flag and a file state
the same number, their values must agree: a flag never silently replaces a value of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshplan.errors import MeshplanError, Origin, Problem, SpecError
from meshplan.layout.hardware import SOME_GPU, find_device
from meshplan.layout.mesh import DATA_AXES
from meshplan.model.blueprint import from_config, from_params
from meshplan.model.blueprint.config import config_file
from meshplan.model.graph import ModelGraph
from meshplan.spec.spec import AUTO, Spec
from meshplan.spec.strategies import resolve_mesh
from meshplan.textbook.formulas import LORA
from meshplan.textbook.lora import count_adapters, read_adapters
from meshplan.units import format_count, format_gib, parse_count, parse_memory

_PATHS: Final[Mapping[str, str]] = {
    "params": "model",
    "gpus": "hardware",
    "nodes": "hardware.nodes",
    "memory": "hardware",
}
"""The path at which a plan file states each of the four numbers."""


_BEYOND: Final[Mapping[str, tuple[int, str]]] = {
    "params": (10**14, "parameters are more than ten times those of the largest trained model"),
    "gpus": (10**6, "GPUs are more than any cluster has"),
    "memory": (10**13, "bytes in one GPU are more than any device has"),
}
"""(limit beyond any existing machine or model, text for a number above it), by name of the input.

A larger number is probably a typing error.
"""


def questions(**facts: int | None) -> list[str]:
    """Return a note for each number above its limit in `_BEYOND`, asking if the number is right.

    Args:
        facts: Numbers by the names params, gpus and memory; None for a number that is not stated.
    """
    asked = []
    for name, value in facts.items():
        most, what = _BEYOND[name]
        if value is not None and value > most:
            asked.append(f"is {name} right? {value:,} {what}")
    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The inputs of the formulas. A number that is not stated is None.

    Args:
        num_params: Number of parameters.
        num_gpus: Number of GPUs on all nodes together.
        nodes: Number of nodes.
        memory_bytes: Memory of one GPU that the states may use.
        num_adapter_params: Number of parameters of LoRA adapters; None if the model is trained.
        plan_row: The (strategy, precision) of the table row that matches the plan file; None if no
            row does.
        notes: Remarks on these numbers, for the user.
    """

    num_params: int | None
    num_gpus: int | None
    nodes: int
    memory_bytes: int | None
    num_adapter_params: int | None = None
    plan_row: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()


def read_sizing(
    flags: Mapping[str, str | int | float | Path | None], spec: Spec | None = None
) -> Sizing:
    """Return the inputs that flags and a plan file state together.

    Args:
        flags: Values by the names params, config, gpus, nodes, gpu, memory and lora; None for a
            flag that is not given.
        spec: The plan file, if any.

    Raises:
        SpecError: A value cannot be read, or is stated twice and differs.
        PlanError: The plan's mesh and strategy contradict each other.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    facts, graph = _facts_of_flags(flags, problems, notes)
    if problems:
        raise SpecError(problems)
    row = None
    if spec is not None:
        planned, of_plan = _facts_of_plan(spec, notes)
        facts, graph = _merge(facts, planned, spec, flags), graph or of_plan
        _check_nodes(facts)
        row = _plan_row(spec, facts, notes)
        if "memory" in facts:
            facts["memory"] = _without_headroom(facts["memory"], spec, notes)
    _check_nodes(facts)
    notes += questions(**{name: facts.get(name) for name in _BEYOND})
    num_adapter_params = None
    if (lora := flags.get("lora")) is not None:
        adapters = read_adapters(str(lora))
        if "params" in facts:  # Without a model, `check_enough` says what is missing.
            num_adapter_params = count_adapters(adapters, graph)
        if row is not None and spec is not None:
            given = spec.precision
            if given.is_mixed or "float32" in (given.param, given.master):
                what = "the formulas have the base in bf16, and the plan keeps it in float32"
                notes.append(f"no row of the table matches the plan: {what}")
                row = None
            else:  # The model is in its own dtype.
                row = row[0], LORA
    return Sizing(
        num_adapter_params=num_adapter_params,
        num_params=facts.get("params"),
        num_gpus=facts.get("gpus"),
        nodes=facts.get("nodes", 1),
        memory_bytes=facts.get("memory"),
        plan_row=row,
        notes=tuple(notes),
    )


def config_of(spec: Spec, config: str | Path | None = None) -> tuple[str | Path | None, Origin]:
    """Return the config of a plan's model, and the plan line or flag that names it.

    Args:
        spec: The spec of the plan file.
        config: A config that takes precedence over the plan's; None for none.

    Returns:
        The path of the config and its origin. The path is None if neither the plan nor the
        argument names a config.
    """
    if config is None and spec.model is not None and spec.model.config is not None:
        file = config_file(spec.model.config, Path(spec.source).parent)
        return file, spec.origin("model.config")
    return config, Origin("--config")


def graph_of(spec: Spec) -> ModelGraph | None:
    """Return the model that a plan states; None if it states no model, or one that needs torch.

    A relative path of a config.json starts at the plan file's folder.
    """
    if spec.model is None:
        return None
    if spec.model.params is not None:
        return from_params(spec.model.params)
    path, origin = config_of(spec)
    return from_config(path, origin) if path is not None else None


def _facts_of_flags(
    flags: Mapping[str, Any], problems: list[Problem], notes: list[str]
) -> tuple[dict[str, int], ModelGraph | None]:
    """Return the numbers that flags state, and the model of --config; None without it.

    The names of numbers are params, gpus, nodes and memory. Problems and notes are appended to the
    lists given.
    """

    def read(name: str, parse: Callable[[Any], Any], example: str) -> Any:
        if flags.get(name) is None:
            return None
        try:
            return parse(flags[name])
        except MeshplanError as error:
            problems.extend(error.problems)
        except ValueError as error:
            problems.append(Problem(str(error), Origin(f"--{name}"), f"for example {example}"))
        return None

    for one, other, fact in (
        ("params", "config", "number of parameters"),
        ("gpu", "memory", "memory of a GPU"),
    ):
        if flags.get(one) is not None and flags.get(other) is not None:
            what = f"--{one} and --{other} both state the {fact}"
            problems.append(Problem(what, Origin(f"--{one}"), "remove one of the two flags"))
    facts = {
        "params": read("params", parse_count, "--params 3e9"),
        "gpus": read("gpus", parse_count, "--gpus 8"),
        "nodes": read("nodes", parse_count, "--nodes 2"),
        "memory": read("memory", parse_memory, "--memory 80GiB"),
    }
    graph = read("config", lambda path: from_config(path, Origin("--config")), "")
    if graph is not None:
        facts["params"] = graph.num_params
        notes += graph.notes
    memory = read("gpu", lambda name: _memory_of(name, Origin("--gpu"), notes), "")
    if memory is not None:
        facts["memory"] = memory
    return {name: value for name, value in facts.items() if value is not None}, graph


def _memory_of(gpu: str, origin: Origin, notes: list[str]) -> int:
    """Return the usable bytes of a device; append the source of this number to `notes`."""
    device = find_device(gpu, origin)
    if device.size not in notes:
        notes.append(device.size)
    return device.usable_bytes


def _memory_of_plan(spec: Spec, notes: list[str]) -> dict[str, int]:
    """Return {"memory": bytes of one GPU}, stated as bytes or by a GPU's name; {} if not stated."""
    hardware = spec.hardware
    if hardware is not None and hardware.memory_bytes is not None:
        return {"memory": hardware.memory_bytes}
    if hardware is not None and hardware.gpu is not None:
        return {"memory": _memory_of(hardware.gpu, spec.origin("hardware.gpu"), notes)}
    return {}


def _without_headroom(limit_bytes: int, spec: Spec, notes: list[str]) -> int:
    """Return the bytes of a limit that the plan's `hardware.headroom` leaves; note the headroom."""
    headroom = spec.hardware.headroom if spec.hardware is not None else 0.0
    if not headroom:
        return limit_bytes
    notes.append(f"hardware.headroom leaves {headroom:.0%} of memory free")
    return int(limit_bytes * (1 - headroom))


def _facts_of_plan(spec: Spec, notes: list[str]) -> tuple[dict[str, int], ModelGraph | None]:
    """Return the numbers that a plan states, and its model, as `_facts_of_flags` does.

    The model is None if the plan states only its number of parameters.
    """
    facts = {}
    if (graph := graph_of(spec)) is not None:
        facts["params"] = graph.num_params
        notes += graph.notes
    if (hardware := spec.hardware) is not None:
        facts |= {"gpus": hardware.world_size, "nodes": hardware.nodes}
    has_modules = spec.model is not None and spec.model.config is not None
    return facts | _memory_of_plan(spec, notes), graph if has_modules else None


def _merge(
    stated: dict[str, int], planned: dict[str, int], spec: Spec, flags: Mapping[str, Any]
) -> dict[str, int]:
    """Return the numbers of the flags (`stated`) and those of the plan (`planned`) as one dict.

    Raises:
        SpecError: Flags and plan state different values.
    """
    problems = []
    for name in _PATHS:
        if name in stated and name in planned and stated[name] != planned[name]:
            flag = {"params": "config", "memory": "gpu"}.get(name, name)
            flag = flag if flags.get(flag) is not None else name
            path = _PATHS[name]
            if name == "memory" and spec.hardware is not None:
                path += ".gpu" if spec.hardware.memory_bytes is None else ".memory"
            form: Callable[[int], str] = {"params": format_count, "memory": format_gib}.get(
                name, "{:,}".format
            )
            if form(stated[name]) == form(planned[name]):
                form = "{:,}".format
            one, other = form(stated[name]), form(planned[name])
            if flag == "gpu":
                one = f"{find_device(flags['gpu']).name} ({one})"
            if path == "hardware.gpu" and spec.hardware is not None:
                other = f"{spec.hardware.gpu} ({other})"
            what = f"{one} differs from {other} in {spec.origin(path)}"
            fix = _remedy(flag, path, stated, planned, spec, flags)
            problems.append(Problem(what, Origin(f"--{flag}"), fix))
    if problems:
        raise SpecError(problems)
    return stated | planned


def _remedy(
    flag: str,
    path: str,
    stated: Mapping[str, int],
    planned: Mapping[str, int],
    spec: Spec,
    flags: Mapping[str, Any],
) -> str:
    """Return the statements that have the effect of a flag which the plan contradicts.

    Args:
        flag: Name of the flag.
        path: Path of the plan's value.
        stated, planned, spec, flags: As for `_merge`.
    """
    statements = []
    if flag in ("gpu", "memory"):
        name = find_device(flags[flag]).name if flag == "gpu" else flags[flag]
        if path != f"hardware.{flag}":  # The plan may state only one of the two.
            statements.append(f"{path}=null")
        statements.append(f"hardware.{flag}={name}")
    elif flag == "gpus":
        per_node, rest = divmod(stated["gpus"], stated.get("nodes", planned["nodes"]))
        statements += [] if rest else [f"hardware.gpus_per_node={per_node}"]
    elif flag == "nodes":
        statements.append(f"hardware.nodes={stated['nodes']}")
    elif flag == "params" and spec.model is not None and spec.model.params is not None:
        statements.append(f"model.params={flags['params']}")
    if not statements:
        return f"remove --{flag}"
    words = " ".join(f"--set {each}" for each in statements)
    return f"remove --{flag}, or write {words} instead"


def _check_nodes(facts: Mapping[str, int]) -> None:
    """Raise SpecError if the number of GPUs is not a multiple of the number of nodes."""
    num_gpus, nodes = facts.get("gpus"), facts.get("nodes", 1)
    if num_gpus is not None and num_gpus % nodes:
        what = f"{nodes} nodes do not divide {num_gpus} GPUs"
        raise SpecError(Problem(what, Origin("--nodes"), "give a divisor of the number of GPUs"))


def _plan_row(spec: Spec, facts: dict[str, int], notes: list[str]) -> tuple[str, str] | None:
    """Return the (strategy, precision) of the table row that the plan matches, or None.

    Numbers of GPUs and nodes that only the plan's mesh states are added to `facts`.
    """
    if AUTO in (spec.mesh, spec.strategy) or (spec.mesh is None and spec.strategy is None):
        return None
    num_gpus = facts.get("gpus")
    mesh, strategy = resolve_mesh(spec, num_gpus, num_gpus and num_gpus // facts.get("nodes", 1))
    facts.setdefault("gpus", mesh.world_size)
    is_hybrid = strategy.name.startswith("hybrid")
    if is_hybrid:
        facts.setdefault("nodes", mesh.size("dp_replicate"))
    stored = spec.precision.master or (None if spec.precision.is_mixed else spec.precision.param)
    others = [axis.name for axis in mesh if axis.size > 1 and axis.name not in DATA_AXES]
    why = ""
    if others:
        why = f"the plan also uses {', '.join(others)}"
    elif any(rule.data or rule.place for rule in spec.rules):
        why = "rules place single modules"
    elif not spec.optimizer.startswith("adam"):
        why = f"the formulas assume Adam, and the optimizer is {spec.optimizer}"
    elif stored not in (None, "float32"):
        why = f"the formulas assume float32 weights, and the plan keeps them in {stored}"
    elif strategy.name == "hybrid_shard_zero2":
        why = "hybrid_shard_zero2 has no textbook formula"
    elif is_hybrid and mesh.size("dp_replicate") != facts["nodes"]:
        why = f"the plan does not replicate across {facts['nodes']} nodes"
    if why:
        notes.append(f"no row of the table matches the plan: {why}")
        return None
    is_mixed = strategy.name == "ddp" and spec.precision.is_mixed
    return strategy.name, "mixed" if is_mixed else "fp32"


def read_limit(
    gpu: str | None, memory: str | int | None, spec: Spec
) -> tuple[str, int | None, tuple[str, ...]]:
    """Return (name of the device or "cuda", memory limit in bytes or None, notes).

    Args:
        gpu: The flag --gpu; None if it is not given.
        memory: The flag --memory; None if it is not given.
        spec: The plan, with which the flags must agree.

    Raises:
        SpecError: A value cannot be read, or is stated twice and differs.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    flags = {"gpu": gpu, "memory": memory}
    stated, _ = _facts_of_flags(flags, problems, notes)
    if problems:
        raise SpecError(problems)
    hardware = spec.hardware
    limit = _merge(stated, _memory_of_plan(spec, notes), spec, flags).get("memory")
    if limit is not None:
        limit = _without_headroom(limit, spec, notes)
    device = find_device(gpu).name if gpu is not None else hardware.gpu if hardware else None
    return device or SOME_GPU, limit, tuple(notes)


def check_enough(size: Sizing, ask_max_params: bool, ask_min_gpus: bool) -> None:
    """Raise if a number is missing that the question needs.

    Args:
        size: The numbers that are stated.
        ask_max_params: True if the largest model is asked for.
        ask_min_gpus: True if the fewest GPUs are asked for.

    Raises:
        SpecError: Numbers are missing; the error names all of them.
    """
    missing = []
    if size.num_params is None and (ask_min_gpus or not ask_max_params):
        missing.append(("the size of the model", "--params 3e9, --config PATH"))
    if size.num_gpus is None and (ask_max_params or not ask_min_gpus):
        missing.append(("the number of GPUs", "--gpus 8"))
    if size.memory_bytes is None and (ask_max_params or ask_min_gpus):
        missing.append(("the memory of a GPU", "--gpu h100-sxm-80gb, --memory 80GiB"))
    if missing:
        raise SpecError(
            [
                Problem(
                    f"no flag or plan states {what}",
                    None,
                    f"add {flags}, or -f with a plan that states {what}",
                )
                for what, flags in missing
            ]
        )
