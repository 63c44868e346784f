"""Output of `meshplan show`: the mesh, every layout with the line that decided it, and the bytes.

Blocks whose rows would be equal share one row (`layers.{0..31}`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.assign import Placed, Reason
from meshplan.memory import StateBytes, state_bytes_by_rank
from meshplan.plan.plan import Plan
from meshplan.render.base.findings import place_to_json
from meshplan.render.base.text import columns, paint
from meshplan.render.base.tree import Entry, TreeLine, fold_tree
from meshplan.render.layouts.ranks import map_of_ranks
from meshplan.spec.match import fold
from meshplan.units import format_bytes

_WRAPPERS: Mapping[str, str] = {
    "none": "not applied: the mesh has no data axis",
    "ddp": "applied as DistributedDataParallel around the whole model",
    "units": "applied as FSDP2, unit by unit",
}


def plan_to_text(plan: Plan, *, colour: bool = False) -> list[str]:
    """Return the lines of the answer: mesh, settings, a tree of layouts, and resident bytes."""
    graph = plan.graph
    title = f"{graph.name}, {graph.num_params:,} parameters, under {plan.spec.source}"
    sections = [
        [paint(title, "bold", colour)],
        map_of_ranks(plan),
        *([stages_to_text(plan)] if plan.assignment.stages else []),
        columns(settings(plan), "<<"),
        _tree(plan),
        states_to_text(plan),
    ]
    return "\n\n".join("\n".join(section) for section in sections).splitlines()


def settings(plan: Plan) -> list[tuple[str, str]]:
    """Return the settings that concern the whole model, as pairs (name, text)."""
    spec, assignment = plan.spec, plan.assignment
    stated = spec.strategy is not None
    source = spec.origin("strategy" if stated else "mesh")
    strategy = Reason(assignment.strategy.name + ("" if stated else " (implied)"), source)
    clip = spec.clip_grad_norm
    precision = spec.precision
    roles = {"param": precision.param, "reduce": precision.reduce,
             "output": precision.output, "master": precision.master}  # fmt: skip
    stated_roles = [f"{role} {dtype}" for role, dtype in roles.items() if dtype]
    return [
        ("strategy", f"{why_to_text(strategy, plan)}; {_WRAPPERS[assignment.wrapper]}"),
        ("precision", ", ".join(stated_roles) or "the model's own"),
        ("optimizer", spec.optimizer + (f", gradient norm at most {clip:g}" if clip else "")),
        *([("allocator", "expandable segments")] if spec.allocator == "expandable" else []),
        ("batch", _batch(plan)),
        *([("tp", "sequence parallel")] if assignment.sequence_parallel else []),
        *([("loss", _loss(plan))] if assignment.chunked_loss else []),
        *([("cp", _context(plan))] if assignment.context else []),
    ]


def _loss(plan: Plan) -> str:
    chunked = plan.assignment.chunked_loss
    assert chunked is not None
    words = f"{chunked.head} and cross-entropy over {chunked.chunks} chunks of the tokens"
    return f"{why_to_text(chunked.reason, plan)}; {words}"


def _context(plan: Plan) -> str:
    """Describe context parallelism: its attention, what decided it, and rank 0's sequence shard."""
    context, size = plan.assignment.context, plan.mesh.size("cp")
    assert context is not None
    chunks, seq_len = context.chunks(size, 0), plan.spec.batch.seq_len
    chunks_text = f"chunks {chunks[0]} and {chunks[1]}" if context.balance else f"chunk {chunks[0]}"
    tokens = f", {seq_len // size:,} tokens," if seq_len else ""
    return (
        f"{why_to_text(context.reason, plan)}; rank 0 holds {chunks_text} of "
        f"{context.num_chunks(size)}{tokens} of each sample"
    )


def _batch(plan: Plan) -> str:
    seq_len = plan.spec.batch.seq_len
    each = f" of {seq_len:,} tokens" if seq_len else ""
    ranks = plan.num_data_ranks
    if plan.micro is None:
        return f"{plan.accumulate} x micro (not stated){each} x {ranks} data ranks"
    samples = plan.micro * plan.accumulate * ranks
    tokens = f" = {samples * seq_len:,} tokens" if seq_len else ""
    return (
        f"micro {plan.micro} x accumulate {plan.accumulate} x {ranks} data rank"
        f"{'' if ranks == 1 else 's'} = {samples} samples{each}{tokens} per step"
    )


def _tree(plan: Plan) -> list[str]:
    header: tuple[str, ...] = ("class", "shape", "at rest", "on rank 0", "dtype")
    header = ("module or tensor", *header, f"decided by (line:column of {plan.spec.source})")
    rows = [("  " * row.depth + row.name, *row.cells) for row in tree(plan)]
    return columns([header, *rows], "<<<<<<<")


def tree(plan: Plan) -> list[TreeLine]:
    """Return a row for each tensor, and for each module that has a decision, such as an FSDP unit.

    The cells are: class, shape, layout, local shape on rank 0, dtype, and what decided the layout.
    """
    return fold_tree(_entries(plan))


def _entries(plan: Plan) -> list[Entry]:
    """Return the rows of `tree` before equal blocks are folded, in definition order."""
    graph, assignment = plan.graph, plan.assignment
    notes: dict[str, list[str]] = {fqn: [] for fqn in graph.modules}
    for fqn, unit in assignment.units.items():
        notes[fqn].append(f"{_unit(plan, fqn)}: {why_to_text(unit.reason, plan)}")
        if unit.precision != plan.spec.precision and unit.precision.word:
            notes[fqn].append(f"precision {unit.precision.word}")
    for fqn, recompute in assignment.recompute.items():
        save = f", saving {', '.join(recompute.policy.save)}" if recompute.policy.save else ""
        reason = Reason(
            f"activation_checkpointing: {recompute.policy.mode}{save}", recompute.reason.origin
        )
        notes[fqn].append(why_to_text(reason, plan))
    for fqn, reason in assignment.host_activations.items():
        notes[fqn].append(why_to_text(reason, plan))
    if assignment.chunked_loss is not None:
        chunked = assignment.chunked_loss
        notes[chunked.head].append(why_to_text(chunked.reason, plan))
    for fqn, code, stated in assignment.apply:
        notes[fqn].append(why_to_text(Reason(f"apply: {code}", stated.origin), plan))
    by_module: dict[str, list[Placed]] = {}
    for placed in assignment.tensors.values():
        holder = placed.info.module
        by_module.setdefault(holder if holder in graph.modules else "", []).append(placed)
    for fqn, use in assignment.styles.items():
        if not any(placed.tp_reason == use.reason for placed in by_module.get(fqn, ())):
            notes[fqn].append(why_to_text(use.reason, plan))
    pieces: dict[tuple[object, ...], str] = {}
    out = []
    for fqn, module in graph.modules.items():
        if notes[fqn] or not fqn:
            cells = (module.type, "", "", "", "", "; ".join(notes[fqn]))
            out.append(Entry(fqn, True, cells))
        out += [
            Entry(placed.info.fqn, False, (module.type, *_tensor_cells(plan, placed, pieces)))
            for placed in by_module.get(fqn, ())
        ]
    return out


def _unit(plan: Plan, fqn: str) -> str:
    unit = plan.assignment.units[fqn]
    if not unit.is_sharded:
        return "replicated unit"
    reshard = unit.reshard_after_forward
    where = ", at rest in host memory" if unit.on_host else ""
    if isinstance(reshard, bool):
        freed = (
            "unit resharded after forward"
            if reshard
            else "unit kept gathered until its last backward"
        )
        return freed + where
    return f"unit resharded over {reshard} ranks after forward{where}"


def _tensor_cells(
    plan: Plan, placed: Placed, pieces: dict[tuple[object, ...], str]
) -> tuple[str, ...]:
    info, mesh = placed.info, plan.mesh
    stages = plan.assignment.stages
    is_held = stages is None or stages.holds(info.fqn, 0)
    key = (info.shape, placed.stored, is_held)
    if key not in pieces:
        pieces[key] = _pieces(plan, placed) if is_held else "on another stage"
    dtype = placed.dtype
    if placed.compute_dtype != dtype:
        dtype += f", computed in {placed.compute_dtype}"
    # Drop the text after the comma, such as "repeated block": the row of the FSDP unit has it.
    data = Reason(placed.data_reason.text.partition(", ")[0], placed.data_reason.origin)
    why = [why_to_text(r, plan) for r in (placed.tp_reason, placed.ep_reason, data) if r]
    if not info.is_buffer and not info.trainable:
        why.append("frozen")
    if info.aliases:
        why.append(f"also named {', '.join(info.aliases)}")
    return shape_to_text(info.shape), placed.stored.spell(mesh), pieces[key], dtype, "; ".join(why)


def _pieces(plan: Plan, placed: Placed) -> str:
    """Return the local shape on rank 0, and the smallest local shape if they differ."""
    first = placed.local_shape(plan.mesh)
    smallest = placed.stored.least_local_shape(placed.info.shape, plan.mesh)
    return shape_to_text(first) + (
        f", smallest {shape_to_text(smallest)}" if smallest != first else ""
    )


def shape_to_text(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def why_to_text(reason: Reason, plan: Plan) -> str:
    """Return line, column and reason, such as `13:17 tp: colwise`.

    If the reason is not from the plan file, the name of its file is included.
    """
    origin = reason.origin
    if origin is None:
        return reason.text
    here = origin.file == plan.spec.source
    place = (f"{origin.line}:{origin.column}" if origin.line else "") if here else origin.place
    return f"{place} {reason.text}" if place else reason.text


def states_to_text(plan: Plan) -> list[str]:
    """Return a table of resident bytes: one row if all ranks are equal, else the two extremes."""
    every = state_bytes_by_rank(plan.assignment, plan.spec.optimizer)
    totals = [states.total_bytes for states in every]
    most, least = totals.index(max(totals)), totals.index(min(totals))
    header = ("rank", "parameters", "gradients", plan.spec.optimizer, "buffers", "total", "")
    rows: list[tuple[str, ...]] = [header]
    if len(set(every)) == 1:
        rows.append(_states_row("every rank" if len(every) > 1 else "the one rank", every[0]))
    else:
        rows.append(_states_row(f"{most} (most)", every[most]))
        rows.append(_states_row(f"{least} (least)", every[least]))
    title = "resident state between backward and the optimizer step, without activations"
    return [title, *columns(rows, "<>>>>>>")]


def _states_row(name: str, states: StateBytes) -> tuple[str, ...]:
    parts = (states.parameters_bytes, states.gradients_bytes, states.optimizer_bytes,
             states.buffers_bytes, states.total_bytes)  # fmt: skip
    there = f", {format_bytes(states.host_bytes)} on the host" if states.host_bytes else ""
    return (name, *map(format_bytes, parts), f"= {states.total_bytes:,} B{there}")


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the `result` of schema show/1: all modules and tensors, and the bytes of all ranks."""
    assignment, spec, mesh = plan.assignment, plan.spec, plan.mesh
    return {
        "source": spec.source,
        "model": plan.graph.name,
        "num_params": plan.graph.num_params,
        "mesh": mesh.sizes,
        "world_size": mesh.world_size,
        "nodes": spec.hardware.nodes if spec.hardware else None,
        "strategy": assignment.strategy.name,
        "wrapper": assignment.wrapper,
        "sequence_parallel": assignment.sequence_parallel,
        "chunked_loss": None
        if assignment.chunked_loss is None
        else {
            "head": assignment.chunked_loss.head, "chunks": assignment.chunked_loss.chunks,
            "decided_by": reason_to_json(assignment.chunked_loss.reason),
        },
        "context": None
        if assignment.context is None
        else {
            "attention": assignment.context.attention, "balance": assignment.context.balance,
            "decided_by": reason_to_json(assignment.context.reason),
        },
        "pipeline": stages_to_json(plan),
        "optimizer": spec.optimizer,
        "clip_grad_norm": spec.clip_grad_norm,
        "allocator": spec.allocator,
        "batch": {
            "micro": plan.micro, "accumulate": plan.accumulate,
            "data_ranks": plan.num_data_ranks, "seq_len": spec.batch.seq_len,
        },
        "units": [
            {
                "module": unit.fqn,
                "shard_axes": unit.shard_axes,
                "replicate_axes": unit.replicate_axes,
                "reshard_after_forward": unit.reshard_after_forward,
                "on_host": unit.on_host,
                "precision": {
                    "param": unit.precision.param, "reduce": unit.precision.reduce,
                    "output": unit.precision.output, "master": unit.precision.master,
                },
                "decided_by": reason_to_json(unit.reason),
            }
            for unit in assignment.units.values()
        ],
        "styles": [
            {"module": fqn, "style": use.style.name, "axis": use.axis,
             "decided_by": reason_to_json(use.reason)}
            for fqn, use in assignment.styles.items()
        ],
        "activation_checkpointing": [
            {"module": fqn, "mode": recompute.policy.mode, "save": recompute.policy.save,
             "decided_by": reason_to_json(recompute.reason)}
            for fqn, recompute in assignment.recompute.items()
        ],
        "host_activations": [
            {"module": fqn, "decided_by": reason_to_json(reason)}
            for fqn, reason in assignment.host_activations.items()
        ],
        "apply": [
            {"module": fqn, "function": code, "decided_by": reason_to_json(reason)}
            for fqn, code, reason in assignment.apply
        ],
        "tensors": [_tensor_to_json(plan, placed) for placed in assignment.tensors.values()],
        "state_bytes": [
            states_to_json(states)
            for states in state_bytes_by_rank(plan.assignment, plan.spec.optimizer)
        ],
    }  # fmt: skip


def _tensor_to_json(plan: Plan, placed: Placed) -> dict[str, Any]:
    info = placed.info
    return {
        "name": info.fqn,
        "aliases": info.aliases,
        "shape": info.shape,
        "layout": placed.stored.spell(plan.mesh),
        "local_shape": placed.local_shape(plan.mesh),
        "dtype": placed.dtype,
        "compute_dtype": placed.compute_dtype,
        "is_buffer": info.is_buffer,
        "trainable": info.trainable,
        "unit": placed.unit,
        "decided_by": [
            reason_to_json(r)
            for r in (placed.tp_reason, placed.ep_reason, placed.data_reason)
            if r is not None
        ],
    }


def states_to_json(states: StateBytes) -> dict[str, int]:
    """Return the state bytes of one rank by category, and their total."""
    return {
        "parameters_bytes": states.parameters_bytes,
        "gradients_bytes": states.gradients_bytes,
        "optimizer_bytes": states.optimizer_bytes,
        "buffers_bytes": states.buffers_bytes,
        "total_bytes": states.total_bytes,
        "host_bytes": states.host_bytes,
    }


def reason_to_json(reason: Reason) -> dict[str, Any]:
    return {"text": reason.text, **place_to_json(reason.origin)}


def stages_to_text(plan: Plan) -> list[str]:
    """Return a title and a row per stage; [] without a pp axis."""
    stages = plan.assignment.stages
    if stages is None:
        return []
    rows = [("stage", "pp", "modules", "parameters")]
    for stage in range(stages.num):
        modules = ", ".join(fold(dict.fromkeys(m for m, s in stages.units if s == stage)))
        rows.append(
            (str(stage), str(stages.rank_of(stage)), modules, f"{_numel_of(plan, stage):,}")
        )
    why = stages.reason
    where = f", {why.origin.place}" if why.origin else ""
    title = f"pipeline {stages.schedule}, {stages.microbatches} microbatches ({why.text}{where})"
    return [title, *columns(rows, ">><>")]


def stages_to_json(plan: Plan) -> dict[str, Any] | None:
    """Return the pipeline as JSON values; None without a pp axis."""
    stages = plan.assignment.stages
    if stages is None:
        return None
    return {
        "schedule": stages.schedule,
        "microbatches": stages.microbatches,
        "stages": [
            {
                "pp": stages.rank_of(stage),
                "modules": [module for module, at in stages.units if at == stage],
                "tensors": [fqn for fqn, stages_of in stages.tensors.items() if stage in stages_of],
            }
            for stage in range(stages.num)
        ],
    }


def _numel_of(plan: Plan, stage: int) -> int:
    stages, tensors = plan.assignment.stages, plan.assignment.tensors
    assert stages is not None
    return sum(
        tensors[fqn].info.numel
        for fqn, stages_of in stages.tensors.items()
        if stage in stages_of and not tensors[fqn].info.is_buffer
    )
