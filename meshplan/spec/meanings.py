"""The meaning of every key of plan.yaml, in the sections and the order of the plan reference.

`json_schema` puts them into the schema, which editors show; the tables of docs/reference/plan.md
are made from them. Defaults are in `keys`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

MEANINGS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "Model and machine": {
            "version": "version of the format: `1`",
            "model": (
                "the model that the command line looks at, one of `{config: config.json}`, `{entry:"
                ' "pkg.mod:function"}` and `{params: 3e9}`. `parallelize` takes the module from '
                "your program instead. A function runs only when you allow it"
            ),
            "hardware.nodes": "number of nodes",
            "hardware.gpus_per_node": "number of GPUs of each node; required under `hardware`",
            "hardware.gpu": (
                "a name that `meshplan gpus` lists. Its memory is what torch sees of it: 79.1 GiB "
                "of an H100 with 80 GB. Of a GPU that is not listed its facts, `{memory: 48GB, "
                "bf16: 181e12, hbm: 960GB/s}`: memory, operations per second (`bf16`, `fp16`, "
                "`fp32`), and bandwidth of its memory"
            ),
            "hardware.memory": "memory of one GPU, such as `24GB`, for a GPU that is not listed",
            "hardware.host_memory": "memory of one node's host, which limits offloading",
            "hardware.intra": "bandwidth of each GPU to the others of its node, such as `450GB/s`",
            "hardware.inter": (
                "bandwidth of each GPU to other nodes, such as `50GB/s`; left out, the one that "
                "nodes of the GPU usually have (`meshplan gpus`) is assumed, and `plan` says so"
            ),
            "hardware.headroom": (
                "fraction of a GPU's memory that a plan must leave free, at least 0 and below 1"
            ),
        },
        "How it is parallelized": {
            "strategy": (
                "`ddp` (also `no_shard`), `zero1`, `zero2` (`shard_grad_op`), `full_shard` (`fsdp`,"
                " `zero3`), `hybrid_shard` (`hsdp`), `hybrid_shard_zero2`, or `auto`"
            ),
            "mesh": (
                "sizes by axis, outermost first. One size may be `auto`: the ranks that are left. "
                "With several, or with `mesh: auto`, the planner decides. Without `mesh`, the "
                "strategy spreads over all ranks, and `hybrid_shard` over nodes × ranks of a node"
            ),
            "mesh.pp": "pipeline stages",
            "mesh.dp_replicate": "data-parallel replicas",
            "mesh.dp_shard": (
                "data-parallel ranks that shard parameters, gradients or optimizer state"
            ),
            "mesh.cp": "ranks that share the sequence (context parallelism)",
            "mesh.tp": "ranks that share each matrix (tensor parallelism)",
            "mesh.ep": "ranks that share the experts, borrowed from another axis: `2 in dp_shard`",
            "tp_plan": (
                "`auto` derives tensor parallelism from the model's recorded forward; `hf` takes "
                "the model's own plan from transformers; `none`. Rules override both"
            ),
            "sequence_parallel": (
                "`true` also shards activations along the sequence between tensor-parallel modules"
            ),
            "context.attention": (
                "`all_gather` or `all_to_all`: how attention runs over a sequence that `cp` shards"
            ),
            "context.balance": "`true` gives every rank an equal share of the causal mask's work",
            "experts.capacity": (
                "`1.5` reserves memory for 1.5 times an even share of the tokens per expert rank"
            ),
            "pipeline.schedule": (
                "`GPipe`, `1F1B`, `Interleaved1F1B`, `LoopedBFS`, `InterleavedZeroBubble`, "
                "`ZBVZeroBubble`, `DualPipeV`, or `auto`"
            ),
            "pipeline.virtual": "stages per rank",
            "pipeline.microbatches": "microbatches of a step",
            "pipeline.split": (
                "the modules of each stage, a list per stage, or `auto`: balanced by parameters"
            ),
        },
        "Memory": {
            "precision": (
                "`32-true`, `bf16-true`, `16-true`, `bf16-mixed`, `16-mixed`, or dtypes by role: "
                "`{param, reduce, output, master}`"
            ),
            "activation_checkpointing": (
                "`none`, `full`, `selective`, `auto`, or `{mode, every, save}`: `every` is every "
                "how many blocks, `save` lists the operations whose outputs are kept (`[mm, bmm, "
                "conv, sdpa, ...]`). `budget` is in the format and not available yet"
            ),
            "offload": (
                "`none`; `params`: parameters, gradients and optimizer state are in host memory "
                "(FSDP2's CPU offload); `optimizer`; by part, `{params, optimizer, activations}`, "
                "of which `activations` is what backward needs; `auto`, within "
                "`hardware.host_memory`"
            ),
            "allocator": (
                "`default`, or `expandable`: `parallelize` sets `expandable_segments:True` before "
                "it moves the model; or `auto`"
            ),
            "loss_chunks": (
                "`8` computes head and cross-entropy over 8 parts of the tokens, one after the "
                "other, so that only one part's logits exist at a time; or `auto`. `fused` is in "
                "the format and not available yet"
            ),
            "loss_parallel": (
                "`true` computes the cross-entropy over logits that are sharded over the vocabulary"
            ),
        },
        "Training": {
            "batch.micro": "samples of one microbatch on one data rank, or `auto`",
            "batch.accumulate": (
                "microbatches per optimizer step, or `auto`. Two of `micro`, `accumulate` and "
                "`global` imply the third"
            ),
            "batch.global": "samples of one optimizer step over all ranks",
            "batch.seq_len": "tokens of one sample",
            "batch.per_rank": (
                "`true` if each rank's batch stands alone on purpose: in-batch negatives, batch "
                "statistics, or equal samples on all ranks"
            ),
            "input.shape": (
                "shape of the input, with samples along dim 0, such as `[4, 3, 224, 224]`, for "
                "models that do not take tokens; required under `input`. If the forward takes "
                "several, one for each argument by its name, with a dtype: "
                "`input: {image: {shape: [1, 3, 224, 224], dtype: float32}, "
                "text: {shape: [1, 64], dtype: int64}}`"
            ),
            "input.dtype": "a dtype such as `float32`",
            "loss": (
                "what the loss function returns: `mean` over the samples, `sum`, or `tokens`, the "
                "mean over the targets that are not -100, counted over ranks, microbatches and "
                "stages. In any case it may return `(sum, count)` instead"
            ),
            "clip_grad_norm": "the norm that `train_step` clips at",
            "optimizer": (
                "whose state is estimated: `adamw`, `adam`, `adamw_fused`, `adam_fused`, `sgd`, "
                "`sgd_momentum`, `lion`, `adagrad`, `rmsprop`, `adafactor`, `muon`, `adamw_8bit`"
            ),
            "sync_batchnorm": "`true` computes BatchNorm's statistics over all data ranks",
            "compile": "`true` compiles each block with `torch.compile`",
            "ddp": (
                "options of DistributedDataParallel: `bucket_mb`, `find_unused_parameters`, "
                "`gradient_as_bucket_view`, `static_graph`, `broadcast_buffers`"
            ),
        },
        "Planning": {
            "profile": (
                "the code that runs the step, by whose runs its seconds are estimated: `hf-eager` "
                "(a model of transformers), `torchtitan`, `torchtitan-compiled`, "
                "`llm-foundry`, `megatron`, `deepspeed`, `nanotron`, `kempnerforge`, or `generic`, "
                "typical shares of a GPU's datasheet"
            ),
            "solve.objective": (
                "what `meshplan plan` minimizes: `time`, `memory`, `cost`, or `balanced`, which is "
                "seconds times bytes"
            ),
            "solve.robust": (
                "a share such as `10%`: choose the plan that loses least where a constant of the "
                "cost model, such as a bandwidth, is off by this share"
            ),
            "solve.time_limit": "when the search ends with the best plan so far, such as `30s`",
            "solve.keep": "how many other plans that fit are reported",
        },
        "Rules": {
            "rules.match": (
                "a glob on module names (`*`, `**.`, `{a,b}`, `{0..31}`), `/regex/`, `{type: "
                "Class}`, `{param: glob}`, or a list of these"
            ),
            "rules.place": (
                "`replicate`, `shard`, `hybrid_shard`; or by axis: `{dp_shard: S(1)}`, `{tp: "
                "STYLE}`, and `S(0)` or `R` on a parameter"
            ),
            "rules.stage": "pipeline stage: a number, `first` or `last`",
            "rules.unit": "`true` makes the module an FSDP2 group of its own",
            "rules.reshard_after_forward": (
                "as in FSDP2's `fully_shard`: `true`, `false`, or a number of ranks"
            ),
            "rules.precision": "as `precision` of the plan, for these modules",
            "rules.activation_checkpointing": (
                "as `activation_checkpointing` of the plan, for these modules, without `auto`"
            ),
            "rules.offload": "as `offload` of the plan, for these modules, without `auto`",
            "rules.apply": '`"pkg.mod:function"`, called with the module before it is wrapped',
            "rules.why": "a note for readers of the plan",
            "rules.optional": "`true`: the rule may match nothing",
        },
    }
)
"""Meanings by section of the reference, then by path of the key: `rules.match` for a rule's."""
