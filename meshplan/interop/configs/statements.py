"""Facts that the keys of a file state together, with their sources, and the plan made of them.

A fact has the name of the plan's key, such as `batch.micro`. Besides there are
`world_size` (all ranks), `precision.reduce` (beside `precision`, a mapping of dtypes by role),
`units` (classes that are FSDP units of their own), `reshard_after_forward` and `tp_rules`
(pairs of a pattern and a style).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from meshplan.errors import Origin, Problem
from meshplan.layout.mesh import AXES, DATA_AXES
from meshplan.spec.contradictions import split_batch
from meshplan.spec.spec import DTYPE_WORDS, PRECISION_WORDS, Borrow, Rule, Spec
from meshplan.spec.strategies import STRATEGIES, resolve_mesh

Facts = dict[str, Any]
IN_RULES: Final[Mapping[str, str]] = {
    "units": "rules.unit", "reshard_after_forward": "rules.reshard_after_forward",
    "recompute_units": "rules.activation_checkpointing", "tp_rules": "rules.place",
    "world_size": "hardware",
}  # fmt: skip
"""The plan's key that says a fact with a name of its own."""
_ROLES: Final = ("param", "reduce", "output", "master")


@dataclass(frozen=True, slots=True)
class StatedFact:
    """One fact that a file states.

    Args:
        value: The plan's value.
        sources: The keys that state it, as in `zero_optimization.stage: 3`.
        origin: The place of the first of them; None for a default of the tool.
        is_default: True if the tool assumes it without being told.
    """

    value: Any
    sources: tuple[str, ...] = ()
    origin: Origin | None = None
    is_default: bool = False


def _told(fact: StatedFact) -> str:
    """Return the value of a fact, or what stated it if the value is a mapping of ours."""
    return fact.sources[0] if isinstance(fact.value, dict) else word_of(fact.value)


@dataclass(slots=True)
class Draft:
    """The facts of a file on their way to a plan.

    Args:
        facts: The statements, by name of the fact.
        problems: What contradicts itself.
        notes: Remarks for the reader of the plan.
        without_effect: Why a fact is not in the plan after all, by name.
        moved: The plan's key that says a fact in other terms, by name of the fact.
        refused: Why no plan says a fact after all, by name.
        counts_microbatches: True if the tool's microbatch goes through a pipeline by itself, and
            the accumulated ones are those of the pipeline.
    """

    facts: dict[str, StatedFact] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    without_effect: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    counts_microbatches: bool = True

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return the value of a fact."""
        found = self.facts.get(name)
        return otherwise if found is None else found.value

    def origin(self, name: str) -> Origin | None:
        """Return where a fact was stated."""
        found = self.facts.get(name)
        return None if found is None else found.origin

    def add(self, name: str, new: StatedFact) -> None:
        """Add a statement; a default gives way, and two that differ are a problem."""
        old = self.facts.get(name)
        if old is None or (old.is_default and not new.is_default):
            self.facts[name] = new
        elif new.is_default and not old.is_default:
            return
        elif old.value == new.value:
            self.facts[name] = replace(old, sources=(*old.sources, *new.sources))
        else:
            what = f"{' and '.join((*old.sources, *new.sources))} state two different {name}"
            fix = f"keep one: {_told(old)} or {_told(new)}"
            self.problems.append(Problem(what, new.origin or old.origin, fix))

    def set(self, name: str, value: Any, because: str = "", after: str = "") -> None:
        """Set a fact that follows from another one, whose sources it takes over."""
        old = self.facts.get(after or name, StatedFact(value))
        sources = (because,) if because else old.sources
        self.facts[name] = StatedFact(value, sources, old.origin, old.is_default)

    def pop(self, name: str, why: str = "") -> Any:
        """Remove a fact; with a reason, its keys count as without effect on the plan."""
        found = self.facts.pop(name, None)
        if found is not None and why:
            self.without_effect[name] = why
        return None if found is None else found.value

    def refuse(self, name: str, why: str) -> None:
        """Remove a fact, whose keys count as refused, for a reason."""
        if self.facts.pop(name, None) is not None:
            self.refused[name] = why


def word_of(value: Any) -> str:
    """Return a plan's value as one writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {word_of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(word_of, value)) + "]"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


MODEL_AXES: Final = ("pp", "cp", "tp")
"""Axes whose ranks read the same samples."""


def settle(draft: Draft, nodes: int | None, gpus_per_node: int | None) -> None:
    """Make the facts of a file agree with each other: ranks, mesh, batch, precision.

    Args:
        draft: The facts, which change.
        nodes: Number of nodes that the user states on the command line; None if not stated.
        gpus_per_node: Number of GPUs of each that the user states.
    """
    _settle_machine(draft, nodes, gpus_per_node)
    _settle_precision(draft)
    _settle_axes(draft)
    _settle_batch(draft)
    _settle_mesh(draft)


def _settle_machine(draft: Draft, nodes: int | None, gpus_per_node: int | None) -> None:
    world = draft.get("world_size")
    for name, flag, value in (
        ("hardware.nodes", "--nodes", nodes),
        ("hardware.gpus_per_node", "--gpus-per-node", gpus_per_node),
    ):
        if value is not None:
            draft.add(name, StatedFact(value, (f"{flag} {value}",), Origin(flag)))
    if world is not None and "hardware.gpus_per_node" not in draft.facts:
        per_node, rest = divmod(world, draft.get("hardware.nodes", 1))
        if rest:
            what = f"{world} processes cannot be spread over {draft.get('hardware.nodes')} nodes"
            draft.problems.append(
                Problem(what, draft.origin("world_size"), "make it a multiple of the nodes")
            )
        else:
            draft.set("hardware.gpus_per_node", per_node, after="world_size")
    elif world is not None:
        known = draft.get("hardware.nodes", 1) * draft.get("hardware.gpus_per_node")
        if known != world:
            sources = " and ".join(draft.facts["world_size"].sources)
            what = f"{sources}: {world} ranks, but there are {known} GPUs"
            draft.problems.append(Problem(what, draft.origin("world_size"), "correct one of them"))


def world_of(draft: Draft) -> int | None:
    """Return the number of ranks; None if nothing says it."""
    per_node = draft.get("hardware.gpus_per_node")
    if per_node is None:
        return None
    return int(draft.get("hardware.nodes", 1) * per_node)


def _settle_precision(draft: Draft) -> None:
    for role in ("reduce", "master"):
        dtype = draft.get(f"precision.{role}")
        draft.pop(f"precision.{role}", "nothing else states a precision")
        if dtype is not None and "precision" in draft.facts:
            draft.moved[f"precision.{role}"] = "precision"
            draft.set("precision", {**draft.get("precision"), role: dtype})


def _settle_axes(draft: Draft) -> None:
    """Remove settings of axes that have one rank, and say how tensor parallelism is found."""
    tp = draft.get("mesh.tp", 1)
    if tp == 1:
        why = "it has no effect on one tensor-parallel rank"
        for name in ("sequence_parallel", "tp_plan", "tp_rules", "loss_parallel"):
            draft.pop(name, why)
    elif "tp_plan" not in draft.facts and "tp_rules" not in draft.facts:
        draft.set("tp_plan", "auto", after="mesh.tp")
    if draft.get("mesh.pp", 1) == 1:
        for name in [each for each in draft.facts if each.startswith("pipeline.")]:
            draft.pop(name, "it has no effect on one pipeline stage")
    if draft.get("mesh.cp", 1) == 1:
        for name in [each for each in draft.facts if each.startswith("context.")]:
            draft.pop(name, "it has no effect on one context-parallel rank")


def _settle_batch(draft: Draft) -> None:
    """Check the batch triangle, which says the number of data ranks if nothing else does."""
    given = {name: draft.get(f"batch.{name}") for name in ("global", "micro", "accumulate")}
    if all(value is not None for value in given.values()):
        _check_triangle(draft, given)
    elif None not in (given["global"], given["micro"], world_of(draft)):
        _check_accumulated(draft, given)
    if draft.get("mesh.pp", 1) > 1 and draft.counts_microbatches and not draft.problems:
        _join_microbatches(draft, given)


def _join_microbatches(draft: Draft, given: dict[str, int | None]) -> None:
    """State the samples that a pipeline takes at once, and the number of its microbatches."""
    micro, accumulate = given["micro"], given["accumulate"]
    accumulate_is_stated = accumulate is not None
    if micro is None:
        if accumulate is not None:
            draft.moved["batch.accumulate"] = "pipeline.microbatches"
            draft.set("pipeline.microbatches", accumulate, after="batch.accumulate")
            draft.pop("batch.accumulate")
        return
    if accumulate is None and given["global"] is not None:
        world = world_of(draft)
        model = math.prod(draft.get(f"mesh.{axis}", 1) for axis in MODEL_AXES)
        if world is None:
            what = "the number of microbatches of the pipeline follows from the number of GPUs"
            fix = "add --nodes N --gpus-per-node M"
            draft.problems.append(Problem(what, draft.origin("batch.global"), fix))
            return
        accumulate = max(1, given["global"] * model // (micro * world))
    names = ("batch.accumulate",) if accumulate_is_stated else ("batch.global",)
    accumulate = accumulate or 1
    sources = tuple(
        source
        for name in ("batch.micro", *names)
        if name in draft.facts
        for source in draft.facts[name].sources
    )
    origin = draft.origin("batch.micro")
    draft.facts["batch.micro"] = StatedFact(micro * accumulate, sources, origin)
    draft.facts["pipeline.microbatches"] = StatedFact(accumulate, sources, origin)
    draft.moved["batch.accumulate"] = "pipeline.microbatches"
    draft.pop("batch.accumulate")


def _check_triangle(draft: Draft, given: dict[str, Any]) -> None:
    model = math.prod(draft.get(f"mesh.{axis}", 1) for axis in MODEL_AXES)
    world = world_of(draft)
    product = given["micro"] * given["accumulate"]
    ranks, rest = divmod(given["global"], product)
    origin = draft.origin("batch.global")
    sources = {name: " and ".join(draft.facts[f"batch.{name}"].sources) for name in given}
    three = f"{sources['global']}; {sources['micro']}; {sources['accumulate']}"
    fix = "leave out one of the three, or make the first the product of the others and the ranks"
    if rest:
        what = (
            f"{three}: {given['global']} is not a multiple of {given['micro']} x "
            f"{given['accumulate']} = {product}"
        )
        draft.problems.append(Problem(what, origin, fix))
    elif world is not None and world % model == 0 and ranks != world // model:
        what = f"{three}: they imply {ranks} data-parallel ranks, but there are {world // model}"
        draft.problems.append(Problem(what, origin, fix))
    elif world is None:
        draft.set("ranks", ranks * model, f"{given['global']} / ({product} per data rank)")


def _check_accumulated(draft: Draft, given: dict[str, Any]) -> None:
    """Check that a global batch is whole microbatches of all data ranks."""
    model = math.prod(draft.get(f"mesh.{axis}", 1) for axis in MODEL_AXES)
    ranks = (world_of(draft) or model) // model
    product = given["micro"] * ranks
    if product and given["global"] % product:
        both = " and ".join(
            source
            for name in ("global", "micro")
            for source in draft.facts[f"batch.{name}"].sources
        )
        what = f"{both}: {given['global']} is not a multiple of {given['micro']} x {ranks} data "
        what += f"ranks = {product}"
        fix = f"make it a multiple of {product}"
        draft.problems.append(Problem(what, draft.origin("batch.global"), fix))


def _settle_mesh(draft: Draft) -> None:
    """Turn axis sizes and the number of ranks into one mesh, outermost axis first."""
    strategy = draft.get("strategy", "ddp")
    world = world_of(draft)
    ranks = world if world is not None else draft.get("ranks")
    sizes = {axis: draft.get(f"mesh.{axis}") for axis in AXES if axis != "ep"}
    model = math.prod(sizes[axis] or 1 for axis in MODEL_AXES)
    axes = STRATEGIES[strategy].axes
    origin = draft.origin("world_size") or draft.origin("hardware.gpus_per_node")
    if ranks is not None:
        stated = math.prod(sizes[axis] or 1 for axis in axes)
        missing = [axis for axis in axes if sizes[axis] is None]
        left, rest = divmod(ranks, model * stated)
        if rest or (not missing and left != 1):
            known = {axis: sizes[axis] for axis in AXES if axis != "ep" and (sizes[axis] or 1) > 1}
            what = f"{ranks} ranks cannot be a mesh of {word_of(known)}"
            draft.problems.append(
                Problem(what, origin, "make the product of the axes the number of ranks")
            )
            return
        if len(missing) == 2:
            nodes = draft.get("hardware.nodes", 1)
            replicas = math.gcd(nodes, left)
            sizes |= {"dp_replicate": replicas, "dp_shard": left // replicas}
        elif missing:
            sizes[missing[0]] = left
    elif model > 1 or any((sizes[axis] or 1) > 1 for axis in DATA_AXES):
        free = [axis for axis in axes if sizes[axis] is None]
        if len(free) > 1:
            what = f"{strategy} beside {model} model-parallel ranks: nothing says how many replicas"
            fix = "add --nodes N --gpus-per-node M"
            draft.problems.append(Problem(what, draft.origin("strategy"), fix))
            return
        sizes |= dict.fromkeys(free, "auto")
    _write_mesh(draft, sizes, axes, has_size=ranks is not None)


def _write_mesh(draft: Draft, sizes: dict[str, Any], axes: tuple[str, ...], has_size: bool) -> None:
    is_stated = has_size or any(size not in (None, 1) for size in sizes.values())
    borrowed = draft.get("mesh.ep", 1)
    for axis in AXES:
        if axis == "ep":
            continue
        size = sizes[axis]
        if (size in (None, 1) and axis not in axes) or not is_stated:
            draft.pop(f"mesh.{axis}", f"1 is what a plan assumes of {axis}")
        elif f"mesh.{axis}" not in draft.facts:
            known = [name for name in ("ranks", "world_size", "strategy") if name in draft.facts]
            draft.set(f"mesh.{axis}", size, after=known[0] if known else "")
    draft.pop("ranks")
    draft.pop("world_size")
    if borrowed == 1:
        draft.pop("mesh.ep", "1 is what a plan assumes of ep")
        return
    lender = "dp_shard"
    if lender not in axes:
        why = (
            f"experts are sharded over ranks of dp_shard, which strategy: {draft.get('strategy')} "
        )
        draft.refuse("mesh.ep", why + "has not: shard the optimizer's state, or use full_shard")
        return
    if f"mesh.{lender}" not in draft.facts:
        draft.set(f"mesh.{lender}", "auto", after="strategy")
    size = draft.get(f"mesh.{lender}")
    if isinstance(size, int) and size % borrowed:
        what = f"{borrowed} expert-parallel ranks do not divide {lender}: {size}"
        draft.problems.append(Problem(what, draft.origin("mesh.ep"), f"use a divisor of {size}"))
        return
    draft.set("mesh.ep", f"{borrowed} in {lender}")


def facts_of(spec: Spec) -> Facts:
    """Return what a plan states as facts; what it leaves to defaults is left out.

    Raises:
        PlanError: The mesh of the plan contradicts itself.
    """
    facts: Facts = {}
    if spec.strategy is None or spec.hardware is not None or isinstance(spec.mesh, Mapping):
        mesh, strategy = resolve_mesh(spec)
        facts["strategy"] = strategy.name
        facts |= {f"mesh.{axis.name}": axis.size for axis in mesh if axis.size > 1}
        borrow = spec.mesh.get("ep") if isinstance(spec.mesh, Mapping) else None
        if isinstance(borrow, Borrow):
            facts["mesh.ep"] = borrow.size
        facts["world_size"] = mesh.world_size
    else:
        facts["strategy"] = spec.strategy
    if spec.hardware is not None:
        facts["hardware.nodes"] = spec.hardware.nodes
        facts["hardware.gpus_per_node"] = spec.hardware.gpus_per_node
    roles = {
        role: getattr(spec.precision, role) for role in ("param", "reduce", "output", "master")
    }
    if any(roles.values()):
        facts["precision"] = {role: dtype for role, dtype in roles.items() if dtype}
    facts |= _memory_facts(spec)
    batch = {"global": spec.batch.global_, "micro": spec.batch.micro,
             "accumulate": spec.batch.accumulate, "seq_len": spec.batch.seq_len}  # fmt: skip
    sizes = (batch["global"], batch["micro"], batch["accumulate"])
    if "world_size" in facts and None in sizes and any(isinstance(n, int) for n in sizes[:2]):
        ranks = math.prod(facts.get(f"mesh.{axis}", 1) for axis in DATA_AXES)
        accumulate, micro, _ = split_batch(spec, ranks)
        batch |= {"micro": micro, "accumulate": accumulate}
        batch["global"] = (micro or 0) * accumulate * ranks
    facts |= {f"batch.{key}": value for key, value in batch.items() if value is not None}
    if spec.pipeline is not None and facts.get("mesh.pp", 1) > 1:
        facts["pipeline.schedule"] = spec.pipeline.schedule
        for key, assumed in (("virtual", 1), ("microbatches", "auto"), ("split", "auto")):
            value = getattr(spec.pipeline, key)
            facts |= {f"pipeline.{key}": value} if value != assumed else {}
    if spec.context is not None and facts.get("mesh.cp", 1) > 1:
        facts["context.attention"] = spec.context.attention
        if spec.context.balance is not None:
            facts["context.balance"] = spec.context.balance
    assumed_spec = Spec()
    for key in ("tp_plan", "sequence_parallel", "loss", "loss_parallel", "loss_chunks",
                "sync_batchnorm", "compile", "clip_grad_norm", "allocator"):  # fmt: skip
        if getattr(spec, key) != getattr(assumed_spec, key):
            facts[key] = getattr(spec, key)
    facts |= {f"ddp.{key}": value for key, value in spec.ddp.items()}
    if "optimizer" in spec.origins:
        facts["optimizer"] = spec.optimizer
    return facts | _rule_facts(spec)


def _memory_facts(spec: Spec) -> Facts:
    facts: Facts = {}
    recompute = spec.activation_checkpointing
    details: Facts = {"every": recompute.every} if recompute.every != 1 else {}
    details |= {"save": recompute.save} if recompute.save else {}
    if recompute.mode != "none":
        facts["activation_checkpointing"] = (
            {"mode": recompute.mode, **details} if details else recompute.mode
        )
    for part in ("params", "optimizer", "activations"):
        if getattr(spec.offload, part):
            facts[f"offload.{part}"] = True
    return facts


def _rule_facts(spec: Spec) -> Facts:
    """Return rules that some tool can say, and the others by their number."""
    facts: Facts = {}
    for rule in spec.rules:
        stated = replace(rule, index=0, match=(), why="", optional=False)
        kinds = {selector.kind for selector in rule.match}
        texts = tuple(selector.text for selector in rule.match)
        if stated == Rule(index=0, match=(), unit=True) and kinds == {"type"}:
            facts["units"] = (*facts.get("units", ()), *texts)
        elif texts == ("**",) and stated == Rule(
            index=0, match=(), reshard_after_forward=rule.reshard_after_forward
        ):
            facts["reshard_after_forward"] = rule.reshard_after_forward
        else:
            facts[f"rules[{rule.index}]"] = ", ".join(texts)
    return facts


def split_microbatches(facts: Facts) -> None:
    """State the batch of a pipeline as tools do whose microbatch goes through it by itself."""
    count, micro = facts.get("pipeline.microbatches"), facts.get("batch.micro")
    if facts.get("mesh.pp", 1) == 1 or count is None:
        return
    if micro is not None and micro % count:
        return
    if micro is not None:
        facts["batch.micro"] = micro // count
    facts.pop("pipeline.microbatches")
    facts["batch.accumulate"] = count * facts.get("batch.accumulate", 1)


def precision_of(roles: Mapping[str, str]) -> Any:
    """Return the precision word of dtypes by role, or the roles if no word means them."""
    for word, meant in PRECISION_WORDS.items():
        if dict(roles) == dict(meant):
            return word
    short = {name: word for word, name in DTYPE_WORDS.items() if word in ("bf16", "fp16", "fp32")}
    return {role: short.get(roles[role], roles[role]) for role in _ROLES if role in roles}


def mixed(param: str, reduce: str = "float32", output: str = "") -> dict[str, str]:
    """Return dtypes by role: computed in `param`, with parameters in float32 for the optimizer."""
    roles = {"param": param, "reduce": reduce, "master": "float32"}
    return roles | ({"output": output} if output else {})


def leaves(facts: Mapping[str, StatedFact]) -> Iterator[tuple[str, StatedFact]]:
    """Yield the facts in the order in which a plan states them."""
    order = {name: number for number, name in enumerate(ORDER)}
    yield from sorted(facts.items(), key=lambda each: order.get(each[0], len(order)))


ORDER: Final = (
    "strategy", *(f"mesh.{axis}" for axis in AXES), "tp_plan", "sequence_parallel",
    "context.attention", "context.balance", "experts.capacity", "pipeline.schedule",
    "pipeline.virtual", "pipeline.microbatches", "precision", "activation_checkpointing",
    "offload", "batch.global", "batch.micro", "batch.accumulate", "batch.seq_len", "loss",
    "loss_parallel", "optimizer", "clip_grad_norm", "sync_batchnorm", "compile",
)  # fmt: skip
