"""Estimate the seconds of a step that each kind of block takes.

Communication and computation overlap as in meshplan's own runtime:

- A unit's parameters are gathered while the previous unit computes. Its gradients are reduced while
  the next unit in the order of backward computes. Modules outside the blocks belong to the root
  unit, whose communication nothing hides. Hidden communication slows the computation that hides it
  by `Profile.contention` times the time of the communication.
- In mode "shard", gradients are reduce-scattered after every microbatch, and all-reduced across
  replicas after the last one. "ddp" and "zero1" reduce after the last microbatch only, and add the
  whole gradients of each further microbatch to those that are kept.
- `wrappers.fsdp.gathers_of_block` counts the gathers: parameters that are resharded after forward
  are gathered for every forward and every backward, others only for the first forward of a step.
- With a split backward (zero bubble), gradients are reduced after the last backward, when no
  computation is left to hide the reduction. Each half of a backward takes half as long.
- Nothing hides the communication of tp and cp: computation waits for it.

Source: `runtime.apply.data.data.set_gradient_sync`, `traffic.units` and `traffic.data`, which count
the same collectives; Zhao et al. 2023 (PyTorch FSDP), section 3.3, for what overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from meshplan.cost.grid import (
    DDP,
    OPTION_RECOMPUTE,
    OPTION_RESHARD,
    OPTIONS,
    SHARD,
    ZERO1,
    Array,
    in_halves,
)
from meshplan.cost.host import has_params_on_host
from meshplan.cost.profile import Profile
from meshplan.cost.rows import Rows, UnitPart, traffic_seconds, widths_of
from meshplan.cost.shares import trained
from meshplan.cost.types import BlockKind
from meshplan.layout.mesh import AXES
from meshplan.spec.spec import Precision
from meshplan.wrappers.fsdp import gathers_of_block


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds of one block of a kind, for every configuration of a grid.

    Args:
        seconds: [configurations, options], per microbatch; costs that occur once per step are
            divided by the number of microbatches; inf where the option does not exist.
        forward_s, backward_s: [configurations, options], for a microbatch that is neither the first
            nor the last.
        ends_s: [configurations, options], by which the first forward and the last backward of a
            step take longer, together.
        update_s: [configurations], for the optimizer step and a gather of parameters after it.
        compute_s: [configurations], for forward and backward of a microbatch, without communication
            and recomputation.
        traffic_s: [configurations], the part of `compute_s` that is not spent on products.
        exposed_tp_s: [configurations], for the communication of tp, ep and cp in forward and
            backward of a microbatch, without recomputation.
        host_s: [configurations], per microbatch, for the optimizer step on the host and for waits
            for copies. These seconds are included in `seconds`.
        launch_s: [configurations], by which the host process takes longer to launch the kernels of
            forward and backward of a microbatch than the device takes to run them, without
            recomputation.
    """

    seconds: Array
    forward_s: Array
    backward_s: Array
    ends_s: Array
    update_s: Array
    compute_s: Array
    traffic_s: Array
    exposed_tp_s: Array
    host_s: Array
    launch_s: Array


def hidden(
    compute: Array, communication: Array, copies: Array | float = 0.0, *, contention: Array | float
) -> Array:
    """Return the seconds of computation that hides communication and is slowed by it.

    Args:
        compute: Seconds of computation.
        communication: Seconds of communication.
        copies: Seconds of copies that follow the communication. They run no kernels, so they do not
            slow the computation.
        contention: Fraction of the shorter of `compute` and `communication` that is added to the
            total.
    """
    return np.asarray(
        np.maximum(compute, communication + copies)
        + contention * np.minimum(compute, communication)
    )


def _one_by_one(compute: Array, communication: Array, copies: Array | float = 0.0) -> Array:
    """Return the seconds of computation, communication and copies without overlap."""
    return compute + communication + copies


def terms(
    grid: Array,
    kind: BlockKind,
    profile: Profile,
    gpus_per_node: int,
    precision: Precision,
    *,
    dtype: str = "float32",
    is_awaited: bool | None = None,
    reshard_ranks: int | None = None,
    parts: tuple[UnitPart, ...] = (),
    rows: Rows | None = None,
    order: Sequence[str] = AXES,
) -> Terms:
    """Return the estimated seconds of one block, in every configuration and with every option.

    Args:
        grid: Configurations of `grid.GRID`, all with the tp and ep of `kind`.
        kind: The kind of the block.
        profile: Constants of the device.
        gpus_per_node: Devices of one node.
        precision: Dtypes by role.
        dtype: Dtype of the model's parameters.
        is_awaited: If True, nothing hides the gathers and reductions of the block's unit. None
            means False for blocks, and True for the modules outside blocks.
        reshard_ranks: Neighbouring ranks over which parameters are resharded after forward, and
            from which backward gathers them; None for all ranks that store them.
        parts: How the block's parameters are sharded, where a plan's rules place some of them
            otherwise; () for the layout of the mode.
        rows: A `Rows` of the same grid, which calls for several kinds may share; None makes one.
        order: The axes of the mesh, outermost first, which say what ranks share a node.
    """
    rows = rows or Rows(grid, profile, gpus_per_node, widths_of(precision, dtype), order)
    is_awaited = not kind.has_options if is_awaited is None else is_awaited
    join = _one_by_one if is_awaited else partial(hidden, contention=profile.contention)
    forward_c, backward_c = rows.compute(kind.forward), rows.compute(kind.backward)
    forward_t, backward_t = rows.sent(kind.sent_forward), rows.sent(kind.sent_backward)
    exchanged, keys = rows.exchanged(kind.exchanged_bytes), rows.keys(kind.context_bytes)
    keys = np.where(rows.gathers_kv, keys, exchanged)
    # Backward scatters the gradients of the keys and values that forward gathers.
    scatters = np.where(rows.gathers_kv, profile.reduce_scatter_factor, 1.0)
    host, traffic = rows.launch, partial(traffic_seconds, samples=rows.samples, profile=profile)
    # The host process launches kernels ahead of the device, so the slower one sets the pace.
    on_device = forward_c + forward_t + keys
    forward = np.maximum(on_device, host(kind.forward, kind.sent_forward))
    gathered, reduced, summed, whole = rows.data(kind, parts)
    if kind.frozen:
        _, reduced, summed, whole = rows.data(trained(kind), parts)
    halved = in_halves(grid)
    params_s: Array | float
    params_s, grads_s, exposed_s = rows.crossing(kind) if rows.offloads else (0.0, 0.0, 0.0)
    is_whole, is_at_once = rows.mode == DDP, (rows.mode == SHARD) & ~halved
    # DDP gathers nothing, and with `gathers_once` ZeRO-1 gathers after the update instead.
    gathers = gathered if whole is None else np.where(is_whole, 0.0, gathered)
    regathers = gathers if reshard_ranks is None else rows.regathered(kind, gathers, reshard_ranks)
    after = np.zeros_like(gathered)
    if profile.gathers_once:
        after = np.where(rows.mode == ZERO1, gathered, 0.0)
    # If FSDP2 runs over a single rank, it prefetches nothing and uses no separate stream.
    fetched = np.where(rows.are_alone, params_s, 0.0)
    alone, params_s = rows.cast(kind) + fetched, params_s - fetched
    waited = join(forward, gathers - after, params_s) + alone
    forwards, first, last = [], [], []
    backwards = []
    for recompute, (work, sent) in enumerate(zip(kind.recompute, kind.sent_recompute, strict=True)):
        device = rows.compute(work) + rows.sent(sent) + keys * (scatters + (recompute > 0))
        process = host(kind.backward, kind.sent_backward) + host(work, sent)
        backwards.append(np.maximum(backward_c + backward_t + device, process))
    # Mode "shard" reduce-scatters in every backward. Other modes, and all-reduces over replicas,
    # wait for the last one.
    at_once = np.where(is_at_once, reduced, 0.0)
    later = reduced - at_once + summed
    grads_at_once_s = np.where(is_at_once, grads_s, 0.0)
    first_sum, further_sum = rows.accumulation(trained(kind), is_at_once)
    sums = (first_sum + (rows.microbatches - 1) * further_sum) / rows.microbatches
    for recompute, reshard in OPTIONS:
        backward, use = backwards[recompute], gathers_of_block(reshards=bool(reshard))
        each = at_once + use.backward * (regathers if reshard else gathers)
        copied = grads_at_once_s + use.backward * params_s
        usual = join(backward, each, copied)
        end = join(backward, each + later, copied + grads_s - grads_at_once_s)
        if whole is not None:
            usual = np.where(is_whole, backward, usual)
            # DDP has no root unit: backward hides the buckets of modules outside blocks, too.
            end = np.where(is_whole, hidden(backward, whole, contention=rows.slows()), end)
            later = np.where(is_whole, whole, later)
        end = np.where(halved, usual + later, end)
        usual, end = usual + use.backward * alone, end + use.backward * alone
        usual, end = usual + further_sum, end + first_sum
        forwards.append(waited if use.forward else forward)
        first.append(usual + exposed_s)
        last.append(end - usual + (use.first_forward - use.forward) * (waited - forward))
    # Only mode "shard" reshards, and a split backward neither reshards nor recomputes.
    missing = OPTION_RESHARD[None] & ~is_at_once[:, None]
    missing |= (OPTION_RECOMPUTE[None] > 0) & halved[:, None]
    forward_s, backward_s, ends_s = (np.stack(each, axis=1) for each in (forwards, first, last))
    update = rows.update(trained(kind), parts) + after
    once = (ends_s + update[:, None]) / rows.microbatches[:, None]
    seconds = forward_s + backward_s + once
    return Terms(
        seconds=np.where(missing, np.inf, seconds),
        forward_s=forward_s,
        backward_s=backward_s,
        ends_s=ends_s,
        update_s=update,
        compute_s=forward_c + backward_c + sums,
        traffic_s=traffic(kind.forward) + traffic(kind.backward) + sums,
        exposed_tp_s=forward_t + backward_t + (1 + scatters) * keys,
        host_s=exposed_s + np.where(has_params_on_host(grid), update / rows.microbatches, 0.0),
        launch_s=forward
        - on_device
        + np.maximum(
            host(kind.backward, kind.sent_backward) - (backward_c + backward_t + keys * scatters), 0
        ),
    )
