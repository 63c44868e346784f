"""The text of a new plan file: what the user named, what is left to the planner, and comments."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from meshplan.layout.hardware import find_device, usual_link
from meshplan.spec.json_schema import EDITOR_LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """The statements of a new plan.

    Args:
        config: Path or Hub name of a config.json, as the plan file writes it; None for none.
        entry: "pkg.mod:function" that builds the model; None for none.
        gpu: Name of the GPU in the hardware table; None if `memory_bytes` states its memory.
        memory_bytes: Memory of a GPU that the table lacks.
        nodes: Number of nodes.
        gpus_per_node: Number of GPUs of each node.
        seq_len: Tokens of a sample; None if the model reads no tokens.
        shape: Shape of an input of one sample; None if the model reads tokens.
        guesses: Remarks on what was assumed, which the user has to check.
    """

    config: str | None
    entry: str | None
    gpu: str | None
    memory_bytes: int
    nodes: int
    gpus_per_node: int
    seq_len: int | None
    shape: tuple[int, ...] | None
    guesses: tuple[str, ...]


_SAMPLES_PER_GPU: Final = 8
_INTER: Final = "50GB/s"
_LINES: Final = """\
{editor}
# Next: `meshplan plan` chooses what is left to it and writes plan.lock.yaml, `meshplan estimate`
# tells the memory, `meshplan check` finds mistakes, `meshplan show` prints every layout.
version: 1

# A Hugging Face config.json, or the function that returns the module: {{entry: "pkg.mod:build"}}
model: {model}
{input}
hardware:
  nodes: {nodes}
  gpus_per_node: {gpus}
  {gpu}
{inter}
mesh: auto                       # or ranks by axis: {{dp_replicate: 2, dp_shard: 4, tp: 2}}
strategy: auto                   # or ddp, zero1, zero2, full_shard, hybrid_shard
precision: {precision:22}# or 32-true, bf16-true, 16-mixed
activation_checkpointing: auto   # or none, selective, full
batch:
  global: {global_:<23}# samples of one optimizer step, on all GPUs together
{seq_len}optimizer: adamw                 # or adam, sgd, sgd_momentum, lion, muon
clip_grad_norm: 1.0

# Exceptions for single modules; of those that match a module, the last one counts.
# rules:
#   - {{match: "**.mlp", activation_checkpointing: full, why: "the widest activations"}}
"""


def starter_to_text(starter: Starter) -> str:
    """Return the content of the plan file."""
    gpus = starter.nodes * starter.gpus_per_node
    model = f"{{config: {_quoted(starter.config or 'config.json')}}}"
    if starter.entry is not None:
        model = f"{{entry: {json.dumps(starter.entry)}}}"
    gpu = starter.gpu
    link = usual_link(find_device(gpu)) if gpu else None
    rate = f"{link.bytes_per_s / 1e9:g}GB/s" if link else _INTER
    inter = f"  inter: {rate:23}# of each GPU to other nodes; 400 Gb/s InfiniBand has 50GB/s\n"
    size = f"memory: {starter.memory_bytes}"
    line = f"gpu: {gpu:25}# `meshplan gpus` lists the names" if gpu else size
    shape = ""
    if starter.shape is not None:
        sizes = ", ".join(map(str, starter.shape))
        shape = f"input: {{shape: [{sizes}]}}  # of one sample, dim 0 counts the samples\n"
    return _LINES.format(
        editor=EDITOR_LINE,
        model=model,
        input=shape,
        nodes=starter.nodes,
        gpus=starter.gpus_per_node,
        gpu=line,
        inter=inter if starter.nodes > 1 else "",
        precision="bf16-mixed",
        global_=_SAMPLES_PER_GPU * gpus,
        seq_len=f"  seq_len: {starter.seq_len}\n" if starter.seq_len else "",
    )


def _quoted(text: str) -> str:
    """Return a path as YAML; plain where nothing in it has a meaning of its own."""
    is_plain = all(c.isalnum() or c in "/._-" for c in text) and text[:1] not in ("-", ".")
    return text if is_plain or text.startswith(("./", "../")) else json.dumps(text)
