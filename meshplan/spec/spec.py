"""plan.yaml as Python values, each with the place where it was stated.

This module defines the data classes and the words of the format. `reader` reads the file, `assign`
applies the values to a model, and `planner` chooses the values that are `auto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from meshplan.errors import Origin
from meshplan.shown import shown, view

AUTO: Final = "auto"
"""The word that leaves a value to the planner."""
MOST_MICROBATCHES: Final = 2**16
"""Maximum number of microbatches of one step; a larger number is assumed to be a typing error."""

Auto = Literal["auto"]
Allocator = Literal["default", "expandable"]

STRATEGY_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "auto",
        "ddp": "ddp", "no_shard": "ddp",
        "zero1": "zero1",
        "zero2": "zero2", "shard_grad_op": "zero2",
        "full_shard": "full_shard", "fsdp": "full_shard", "zero3": "full_shard",
        "hybrid_shard": "hybrid_shard", "hsdp": "hybrid_shard",
        "hybrid_shard_zero2": "hybrid_shard_zero2", "_hybrid_shard_zero2": "hybrid_shard_zero2",
    }
)  # fmt: skip
"""The canonical name of a strategy, by each of its spellings in lower case."""

PROFILES: Final = (
    "generic", "hf-eager", "torchtitan", "torchtitan-compiled", "llm-foundry", "megatron",
    "deepspeed", "nanotron", "kempnerforge",
)  # fmt: skip
"""Code that may run a step, by which seconds are estimated. Constants of all but the first are in
`cost/profiles.json`."""

PRECISION_WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "32-true": {"param": "float32", "reduce": "float32", "master": "float32"},
        "bf16-true": {"param": "bfloat16", "reduce": "bfloat16", "master": "bfloat16"},
        "16-true": {"param": "float16", "reduce": "float16", "master": "float16"},
        "bf16-mixed": {"param": "bfloat16", "reduce": "float32", "master": "float32"},
        "16-mixed": {"param": "float16", "reduce": "float32", "master": "float32"},
    }
)
"""The dtypes of each role, by precision word (Lightning's names)."""

DTYPE_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "float32", "float32": "float32", "float": "float32", "32": "float32",
        "bf16": "bfloat16", "bfloat16": "bfloat16",
        "fp16": "float16", "float16": "float16", "half": "float16", "16": "float16",
        "fp64": "float64", "float64": "float64", "double": "float64",
    }
)  # fmt: skip

OPTIMIZER_STATES: Mapping[str, int] = MappingProxyType(
    {
        "adamw": 2,
        "adam": 2,
        "adamw_fused": 2,
        "adam_fused": 2,
        "sgd": 0,
        "sgd_momentum": 1,
        "lion": 1,
        "adagrad": 1,
        "rmsprop": 1,
    }
)
"""The number of state tensors of the parameter's shape and dtype, by optimizer name."""


@shown
@dataclass(frozen=True, slots=True)
class Borrow:
    """An axis of this size that reuses the ranks of another axis, as in `"4 in dp_shard"`."""

    size: int
    within: str


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The model for the command line: a config, an entry point or a count; exactly one is set."""

    config: str | None = None
    entry: str | None = None
    params: int | None = None


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """The machines. Memory is in bytes, per device; host memory in bytes per node.

    `intra` and `inter` are bandwidths per device, inside a node and between nodes. `headroom` is
    the fraction of a device's memory that a plan must leave free.
    """

    nodes: int = 1
    gpus_per_node: int
    gpu: str | None = None
    memory_bytes: int | None = None
    intra_bytes_per_s: float | None = None
    inter_bytes_per_s: float | None = None
    host_memory_bytes: int | None = None
    headroom: float = 0.0

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes by role; None keeps the model's own dtype.

    Args:
        param: The dtype in which forward and backward compute.
        reduce: The dtype in which gradients are reduced.
        output: The dtype that the module returns.
        master: The dtype of the parameters that the optimizer updates.
        word: The precision word that the dtypes came from, "" if none.
    """

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    master: str | None = None
    word: str = field(default="", compare=False, repr=False)

    @property
    def is_mixed(self) -> bool:
        """True if compute or reduction uses another dtype than the stored one."""
        roles = {r for r in (self.param, self.reduce, self.master) if r}
        return len(roles) > 1 or self.output is not None

    @property
    def scales_loss(self) -> bool:
        """True if the loss must be scaled so that small float16 gradients do not underflow."""
        return self.param == "float16" and self.is_mixed


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Batch sizes in samples; any two of micro, accumulate and global imply the third.

    Args:
        micro: Samples of one microbatch on one rank.
        accumulate: Microbatches of one step, or that number by the epoch from which it applies.
        global_: Samples of one step on all ranks.
        seq_len: Tokens of one sample.
        of_data_rank: Samples of one step on each rank that reads its own samples, used if nothing
            else determines it; never read from the file.
        per_rank: If True, computations across samples, such as batch statistics or the negatives of
            a contrastive loss, may be limited to one rank and one microbatch.
    """

    micro: int | Auto | None = None
    accumulate: int | Auto | Mapping[int, int] | None = None
    global_: int | None = None
    seq_len: int | None = None
    of_data_rank: int | None = field(default=None, repr=False)
    per_rank: bool = False


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An example of one input of the model, for models whose inputs cannot be derived.

    Args:
        shape: Shape of the example, with the samples as dim 0.
        dtype: Dtype of the input; None uses the dtype that the model's first layer reads.
    """

    shape: tuple[int, ...]
    dtype: str | None = None


PRODUCTS: Final = ("mm", "bmm", "conv", "sdpa")
"""Operations whose outputs `selective` saves if the plan lists none, because computing them again
costs most per saved byte: matrix products, convolutions and attention.

Source: Korthikanti et al. 2022, section 5; there, operations to recompute are listed instead.
"""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """Which activations are recomputed in backward instead of saved.

    Args:
        mode: none, full, selective or auto.
        every: Apply to every n-th block only.
        save: For selective: names of the ops whose outputs are saved ("mm", "sdpa", ...); () means
            `PRODUCTS`.
        budget: How many activations the planner may save: an int in bytes, or a float from 0 to 1
            as a fraction of all activations.
    """

    mode: Literal["none", "full", "selective", "auto"] = "none"
    every: int = 1
    save: tuple[str, ...] = ()
    budget: float | int | None = None

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the ops whose outputs are saved, so that the recompute skips them."""
        return (self.save or PRODUCTS) if self.mode == "selective" else ()

    @property
    def keeps_sums(self) -> bool:
        """True if a rowwise output is saved after its reduction over tp, not before.

        The recompute then repeats no all-reduce or, under `sequence_parallel`, no reduce-scatter.
        """
        return "mm" in self.kept


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Which tensors are in host memory between uses; None if not stated."""

    params: bool | Auto | None = None
    optimizer: bool | Auto | None = None
    activations: bool | Auto | None = None


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The pipeline: schedule, virtual stages per rank, microbatches, and the split into stages."""

    schedule: str = "1F1B"
    virtual: int = 1
    microbatches: int | Auto = AUTO
    split: Auto | tuple[tuple[str, ...], ...] = AUTO


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The computation of attention over shards of the sequence.

    Args:
        attention: all_gather (of keys and values) or all_to_all (of heads).
        balance: If True, each rank has one chunk near the start and one near the end of the
            sequence, so that causal attention is equal work for all ranks. None means True for
            all_gather and False for all_to_all.
    """

    attention: Literal["all_gather", "all_to_all"] = "all_gather"
    balance: bool | None = None


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Settings that apply to all mixtures of experts.

    Args:
        capacity: Number of tokens per ep rank for which memory is estimated, as a multiple of an
            even share. If a rank receives more, the step reports it and continues; no token is
            dropped. None if not stated.
    """

    capacity: float | None = None


@shown
@dataclass(frozen=True, slots=True)
class Selector:
    """A pattern that selects the modules or parameters of a rule.

    Args:
        kind: glob or regex (module fqns), type (module classes), param (parameter fqn glob).
        text: The pattern.
    """

    kind: Literal["glob", "regex", "type", "param"]
    text: str

    def __str__(self) -> str:
        return {"glob": "{}", "regex": "/{}/"}.get(self.kind, self.kind + ": {}").format(self.text)


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One entry of `rules`; None means not stated.

    Args:
        index: Position in the file; later rules win.
        match: The selectors; a module that matches any of them is selected.
        data: Placement along the data axes: replicate, shard or hybrid_shard.
        place: A placement word ("R", "S(0)"), a style name or "auto", by axis.
    """

    index: int
    match: tuple[Selector, ...]
    data: Literal["replicate", "shard", "hybrid_shard"] | None = None
    place: Mapping[str, str] = field(default_factory=dict)
    stage: int | Literal["first", "last"] | None = None
    unit: bool | None = None
    reshard_after_forward: bool | int | None = None
    precision: Precision | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    offload: Offload | None = None
    apply: str | None = None
    why: str = ""
    optional: bool = False

    def __str__(self) -> str:
        return f"rules[{self.index}] ({', '.join(map(str, self.match))})"


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A whole plan file.

    Args:
        mesh: Axis sizes, outermost first. None if not stated; "auto" if left to the planner; a
            tuple of ints for a list such as `[2, 4]`, whose axis names follow from the strategy.
        strategy: A canonical strategy word, None when not stated.
        loss: The reduction of the loss function over the samples it is given: their mean, their
            sum, or the mean over the tokens whose target is not -100.
        loss_chunks: Number of chunks of the tokens for which head and loss are computed one after
            another; 1 computes all tokens at once.
        allocator: "expandable" if the CUDA allocator uses expandable segments
            (`expandable_segments`), so that freed memory is merged again.
        profile: Name of the constants from which seconds are estimated, of `PROFILES`; None to
            choose by the model (`cost.profile.framework_of`).
        ddp: Keyword arguments for DistributedDataParallel that the format supports.
        origins: The place where each value was stated, by dotted path ("rules[0].place.tp").
        source: The file's name for messages.
        lock: Hash of the lock that made the choices that the file leaves open; None without one.
    """

    version: int = 1
    model: ModelSpec | None = None
    hardware: HardwareSpec | None = None
    mesh: Mapping[str, int | Auto | Borrow] | tuple[int, ...] | Auto | None = None
    strategy: str | None = None
    precision: Precision = Precision()
    batch: Batch = Batch()
    input: InputSpec | Mapping[str, InputSpec] | None = None
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    offload: Offload = Offload()
    pipeline: Pipeline | None = None
    context: Context | None = None
    experts: Experts = Experts()
    tp_plan: Literal["none", "hf", "auto"] = "none"
    sequence_parallel: bool = False
    loss: Literal["mean", "sum", "tokens"] = "mean"
    loss_parallel: bool = False
    loss_chunks: int | Literal["fused"] | Auto = 1
    sync_batchnorm: bool = False
    compile: bool = False
    ddp: Mapping[str, Any] = field(default_factory=dict)
    clip_grad_norm: float | None = None
    optimizer: str = "adamw"
    allocator: Allocator | Auto = "default"
    # Not in `repr`, of which `lock.spec_hash` hashes what earlier versions had.
    profile: str | None = field(default=None, repr=False)
    solve: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)
    source: str = field(default="<spec>", repr=False, compare=False)
    lock: str | None = field(default=None, repr=False, compare=False)

    @property
    def reads_flow(self) -> bool:
        """True if `assign` needs a recorded forward: for derived styles or pipeline stages."""
        axes = self.mesh if isinstance(self.mesh, Mapping) else {}
        return (
            self.tp_plan == AUTO
            or axes.get("pp", 1) != 1
            or any(rule.place.get("tp") == AUTO for rule in self.rules)
        )

    @property
    def free_fields(self) -> tuple[str, ...]:
        """Paths of values that are `auto` and do not follow from other statements."""
        out = []
        if self.mesh == AUTO:
            out.append("mesh")
        elif isinstance(self.mesh, Mapping):
            axes = [f"mesh.{axis}" for axis, size in self.mesh.items() if size == AUTO]
            out += axes if len(axes) > 1 else []  # A single `auto` follows from the other axes.
        offload = (self.offload.params, self.offload.optimizer, self.offload.activations)
        for path, value in (
            ("offload", AUTO if AUTO in offload else None),
            ("strategy", self.strategy),
            ("batch.micro", self.batch.micro),
            ("batch.accumulate", self.batch.accumulate),
            ("activation_checkpointing", self.activation_checkpointing.mode),
            ("pipeline.schedule", self.pipeline.schedule if self.pipeline else None),
            ("loss_chunks", self.loss_chunks),
            ("allocator", self.allocator),
        ):
            if value == AUTO:
                out.append(path)
        return tuple(out)

    @property
    def applied_code(self) -> tuple[tuple[str, Origin], ...]:
        """Pairs (function "pkg.mod:function", place where it is named) of `apply` in rules."""
        named = ((rule.apply, self.origin(f"rules[{rule.index}].apply")) for rule in self.rules)
        return tuple((code, origin) for code, origin in named if code is not None)

    def _repr_html_(self) -> str:
        html: str = view("spec_html")(self)
        return html

    def origin(self, path: str) -> Origin:
        """Return where `path` was stated, or the nearest enclosing statement, or the file."""
        parent = path
        while parent:
            if parent in self.origins:
                found = self.origins[parent]
                return Origin(found.file, path, found.line, found.column, found.digest)
            cut = max(parent.rfind("."), parent.rfind("["))
            parent = parent[:cut] if cut > 0 else ""
        return Origin(self.source, path)
