"""Estimate the seconds of a step of each kind of block.

Communication and computation overlap as in meshplan's own runtime:

- A unit's parameters are gathered while the unit before it computes, and its gradients are reduced
  while the one after it, in the order of backward, computes. What lies in no block belongs to the
  root unit, whose communication nothing hides. Hidden communication slows the computation that
  hides it by `Profile.contention` of the communication's time.
- In mode "shard" gradients are reduced after every microbatch, and across replicas after the last
  one. "ddp" and "zero1" reduce after the last one only. `wrappers.fsdp.gathers_of_block` counts the
  gathers: parameters that are resharded after forward are gathered for every forward and every
  backward, others for the first forward of a step.
- With a split backward (zero bubble), gradients are reduced after the last backward, and nothing is
  left to hide that. Each half takes half as long.
- Computation waits for tp's communication, and for what cp gathers: nothing hides them.

Source: `runtime.apply.data.data.set_gradient_sync`, `traffic.units` and `traffic.data`, which count
the same collectives; Zhao et al. 2023 (PyTorch FSDP), section 3.3, for what overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.collectives import all_gather, all_reduce, all_to_all, group
from meshplan.cost.grid import (
    MODES,
    OPTION_RECOMPUTE,
    OPTION_RESHARD,
    OPTIONS,
    in_halves,
)
from meshplan.cost.host import OffloadSeconds, crossing, host_rate, is_there
from meshplan.cost.profile import Profile
from meshplan.cost.shares import expert_share, share, trained
from meshplan.cost.types import BlockKind, ElementBytes, Sent, Tally
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.memory.decoder.cp_all_gather import takes_masks
from meshplan.spec.spec import Precision
from meshplan.wrappers.fsdp import gathers_of_block

Array = NDArray[Any]

_DDP: Final = MODES.index("ddp")
_ZERO1: Final = MODES.index("zero1")
_SHARD: Final = MODES.index("shard")
_CACHED_KV: Final = 2
"""Collectives of one attention along cp when it gathers: keys and values."""
_MASKED: Final = 2.0
"""Factor by which attention takes longer in a kernel that takes a mask and skips nothing.

Source: Dao 2023 (FlashAttention-2), section 4.1: about twice as fast as xformers' kernel, which is
the one that torch has for masks where cuDNN does not serve them."""
_EXCHANGED: Final = 4
"""Collectives of one attention along cp when it exchanges heads: queries, keys, values and output.
"""


def widths_of(precision: Precision, dtype: str = "float32") -> ElementBytes:
    """Return the bytes per element, by role, for parameters of the given dtype."""
    compute = precision.param or dtype
    stored = DTYPE_BYTES[precision.master or dtype]
    return ElementBytes(
        compute=DTYPE_BYTES[compute],
        reduce=DTYPE_BYTES[precision.reduce or compute],
        stored=stored,
        # Division (2 passes), absolute value (2), comparison (1), and the gradient itself (2); then
        # three passes over one boolean per element, of a byte each, and one over all of them.
        unscaling=7 * stored + 6 if precision.scales_loss else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds of one block of a kind, for every configuration of a grid.

    Args:
        seconds: [configurations, options], for each microbatch, with once-per-step costs divided
            among microbatches; inf where the option does not exist.
        forward_s, backward_s: [configurations, options], for a microbatch that is neither the first
            nor the last.
        settle_s: [configurations, options], the further time of the first forward and last
            backward.
        update_s: [configurations], for the optimizer step and what follows it.
        compute_s: [configurations], for forward and backward of a microbatch without communication
            and recomputation.
        exposed_tp_s: [configurations], for the communication of tp, ep and cp in forward and
            backward of a microbatch, without recomputation.
        host_s: [configurations], the part of `seconds` that an optimizer on the host and waiting
            for copies take.
    """

    seconds: Array
    forward_s: Array
    backward_s: Array
    settle_s: Array
    update_s: Array
    compute_s: Array
    exposed_tp_s: Array
    host_s: Array


def compute_seconds(tally: Tally, samples: Array | float, profile: Profile) -> Array:
    """Seconds of computation by an affine roofline: launches, products and memory traffic."""
    others = (tally.flops - tally.attention_flops) / profile.efficiency
    attention = tally.attention_flops / profile.attention_efficiency
    flops = samples * (others + attention) / profile.peak_flops
    read = (samples * tally.product_bytes + tally.weight_bytes) / profile.memory_bytes_per_s
    moved = samples * tally.moved_bytes / profile.memory_bytes_per_s
    return np.asarray(tally.kernels * profile.kernel_s + np.maximum(flops, read) + moved)


def hidden(
    work: Array, behind: Array, quiet: Array | float = 0.0, *, contention: Array | float
) -> Array:
    """Seconds of two things at the same time, of which one slows the other.

    Args:
        work: Seconds of computation.
        behind: Seconds of communication that it hides.
        quiet: Seconds of copies that follow `behind`. They run no kernels and slow nothing.
        contention: Share of the shorter of the two by which the total is longer.
    """
    return np.asarray(np.maximum(work, behind + quiet) + contention * np.minimum(work, behind))


def _one_by_one(work: Array, behind: Array, quiet: Array | float = 0.0) -> Array:
    return work + behind + quiet


def terms(
    grid: Array,
    kind: BlockKind,
    profile: Profile,
    gpus_per_node: int,
    precision: Precision,
    *,
    dtype: str = "float32",
    is_awaited: bool | None = None,
    exchanges: bool = False,
    rows: Rows | None = None,
) -> Terms:
    """Estimate the seconds of one block, for each microbatch.

    Args:
        grid: Configurations of `grid.GRID`, all with the tp and ep of `kind`.
        kind: The kind of the block.
        profile: Constants of the device.
        gpus_per_node: Devices of one node.
        precision: Dtypes by role.
        dtype: Dtype of the model's parameters.
        is_awaited: If True, nothing hides the gathers and reductions of the block's unit; None
            means True for what is in no block, and False for blocks.
        exchanges: If True, cp exchanges heads (`context.attention: all_to_all`) instead of
            gathering keys and values.
        rows: A `Rows` of the same grid, to be shared among kinds; None builds one.
    """
    rows = rows or Rows(grid, profile, gpus_per_node, widths_of(precision, dtype))
    is_awaited = not kind.has_options if is_awaited is None else is_awaited
    join = _one_by_one if is_awaited else partial(hidden, contention=profile.contention)
    compute = rows.compute if exchanges else rows.compute_masked
    forward_c, backward_c = compute(kind.forward), compute(kind.backward)
    forward_t, backward_t = rows.sent(kind.sent_forward), rows.sent(kind.sent_backward)
    keys = rows.exchanged(kind.exchanged_bytes) if exchanges else rows.keys(kind.context_bytes)
    host = rows.launch
    # The host process launches ahead of the device, so the slower of the two sets the pace.
    forward = np.maximum(forward_c + forward_t + keys, host(kind.forward, kind.sent_forward))
    gathered, reduced, summed, whole = rows.data(kind)
    if kind.frozen:
        _, reduced, summed, whole = rows.data(trained(kind))
    halved = in_halves(grid)
    there: Array | float
    there, back, waited_for = rows.crossing(kind) if rows.offloads else (0.0, 0.0, 0.0)
    is_whole, is_at_once = rows.mode == _DDP, (rows.mode == _SHARD) & ~halved
    # DDP gathers nothing, and with `gathers_once` ZeRO-1 gathers after the update instead.
    gathers = gathered if whole is None else np.where(is_whole, 0.0, gathered)
    after = np.zeros_like(gathered)
    if profile.gathers_once:
        after = np.where(rows.mode == _ZERO1, gathered, 0.0)
    # Over one rank, FSDP2 prefetches nothing and has no stream of its own.
    fetched = np.where(rows.are_alone, there, 0.0)
    alone, there = rows.cast(kind) + fetched, there - fetched
    waited = join(forward, gathers - after, there) + alone
    forwards, first, last = [], [], []
    backwards = []
    for again, (work, sent) in enumerate(zip(kind.again, kind.sent_again, strict=True)):
        device = compute(work) + rows.sent(sent) + keys * (1 + (again > 0))
        process = host(kind.backward, kind.sent_backward) + host(work, sent)
        backwards.append(np.maximum(backward_c + backward_t + device, process))
    # Mode "shard" reduces in every backward; other modes, and replicas, after the last one.
    at_once = np.where(is_at_once, reduced, 0.0)
    later = reduced - at_once + summed
    back_at_once = np.where(is_at_once, back, 0.0)
    for again, reshard in OPTIONS:
        backward, use = backwards[again], gathers_of_block(reshards=bool(reshard))
        each = at_once + use.backward * gathers
        copied = back_at_once + use.backward * there
        usual = join(backward, each, copied)
        end = join(backward, each + later, copied + back - back_at_once)
        if whole is not None:
            usual = np.where(is_whole, backward, usual)
            # DDP has no root unit: a full bucket is sent whatever module its parameters are in.
            end = np.where(is_whole, hidden(backward, whole, contention=rows.slows()), end)
            later = np.where(is_whole, whole, later)
        end = np.where(halved, usual + later, end)
        usual, end = usual + use.backward * alone, end + use.backward * alone
        forwards.append(waited if use.forward else forward)
        first.append(usual + waited_for)
        last.append(end - usual + (use.first_forward - use.forward) * (waited - forward))
    # Only mode "shard" reshards, and a split backward neither reshards nor recomputes.
    missing = OPTION_RESHARD[None] & ~is_at_once[:, None]
    missing |= (OPTION_RECOMPUTE[None] > 0) & halved[:, None]
    forward_s, backward_s, settle_s = (np.stack(each, axis=1) for each in (forwards, first, last))
    update = rows.update(trained(kind)) + after
    once = (settle_s + update[:, None]) / rows.microbatches[:, None]
    seconds = forward_s + backward_s + once
    return Terms(
        seconds=np.where(missing, np.inf, seconds),
        forward_s=forward_s,
        backward_s=backward_s,
        settle_s=settle_s,
        update_s=update,
        compute_s=forward_c + backward_c,
        exposed_tp_s=forward_t + backward_t + 2 * keys,
        host_s=waited_for + np.where(is_there(grid), update / rows.microbatches, 0.0),
    )


class Rows:
    """A grid with its groups of ranks, shared by all kinds of blocks of one tp."""

    def __init__(
        self, grid: Array, profile: Profile, gpus_per_node: int, widths: ElementBytes
    ) -> None:
        self.profile, self.widths = profile, widths
        tp, cp, shard, replicate = (
            grid[name].astype(np.float64) for name in ("tp", "cp", "dp_shard", "dp_replicate")
        )
        self.mode, self.microbatches = grid["mode"], grid["microbatches"]
        # True where a pipeline crosses nodes.
        self.is_far = (grid["pp"] > 1) & (grid["pp"] * replicate * shard * cp * tp > gpus_per_node)
        self.micro = grid["micro"].astype(np.float64)
        self.samples = self.micro / cp
        self.shards = shard * cp
        near = partial(group, gpus_per_node=gpus_per_node)
        self.along_tp = near(tp, np.ones_like(tp))
        self.along_cp = near(cp, tp)
        self.along_shards = near(self.shards, tp)
        self.along_replicas = near(replicate, tp * self.shards)
        self.grid, ep = grid, grid["ep"].astype(np.float64)
        self.along_ep, self.along_rest = near(ep, tp * cp), near(self.shards / ep, tp * cp * ep)
        has_whole = bool((self.mode == _DDP).any())
        self.offloads = bool(grid["offload"].any())
        # True where FSDP2 runs over a single rank, which communicates nothing.
        self.are_alone = (self.mode == _SHARD) & (self.shards * replicate == 1)
        self._per_node = gpus_per_node
        self.along_all = near(self.shards * replicate, tp) if has_whole else None

    def compute(self, tally: Tally) -> Array:
        return compute_seconds(tally, self.samples, self.profile)

    def compute_masked(self, tally: Tally) -> Array:
        """Seconds of computation if cp gathers keys and values, and chunks of queries need a mask.

        A chunk attends to all keys up to its own end, and no kernel skips the masked half of the
        chunk itself. Of 2 cp chunks, a rank has the nth from both ends.

        Assumes: sequence shards are balanced (`context.balance`).
        """
        cp, profile = self.grid["cp"].astype(np.float64), self.profile
        kernels = 1.0 if takes_masks(profile.device) else _MASKED
        more = np.where(cp > 1, kernels * (1 + 1 / (2 * cp)) - 1, 0.0)
        attention = tally.attention_flops / (profile.attention_efficiency * profile.peak_flops)
        return np.asarray(self.compute(tally) + more * self.samples * attention)

    def launch(self, tally: Tally, sent: Sent) -> Array:
        """Seconds that the host process needs to launch kernels and collectives of any size."""
        profile, ranks = self.profile, self.along_tp.ranks
        waits = ranks * profile.collective_rank_s + self._across()
        each = profile.collective_s + np.where(self.is_far, waits, 0.0)
        count = sent.all_reduces + sent.gathers + sent.all_to_alls
        return tally.kernels * profile.launch_s + count * each

    def _across(self) -> Array:
        """Seconds added to one tp collective that crosses nodes, whatever its size."""
        return np.asarray((self.along_tp.nodes - 1) * self.profile.collective_node_s)

    def sent(self, sent: Sent) -> Array:
        """Seconds of the communication of tp and ep, none of which is hidden."""
        out = np.zeros_like(self.samples)
        if sent.all_reduces:
            num_bytes = self.samples * sent.all_reduce_bytes
            out = out + all_reduce(num_bytes, self.along_tp, self.profile, sent.all_reduces)
        if sent.gathers:
            num_bytes = self.samples * sent.gather_bytes
            out = out + all_gather(num_bytes, self.along_tp, self.profile, sent.gathers)
        out = out * self.profile.tp_exposed
        out = out + (sent.all_reduces + sent.gathers) * self._across()
        if sent.all_to_alls:
            num_bytes = self.samples * sent.all_to_all_bytes + sent.all_to_all_once_bytes
            out = out + all_to_all(num_bytes, self.along_ep, self.profile, sent.all_to_alls)
        return np.asarray(out)

    def keys(self, num_bytes: float) -> Array:
        """Seconds to gather keys and values along cp, or to scatter their gradients."""
        if not num_bytes:
            return np.zeros_like(self.samples)
        return all_gather(self.micro * num_bytes, self.along_cp, self.profile, _CACHED_KV)

    def exchanged(self, num_bytes: float) -> Array:
        """Seconds to exchange heads along cp: queries, keys and values, and the output back."""
        if not num_bytes:
            return np.zeros_like(self.samples)
        sent = self.samples * num_bytes
        # Copied before and after the exchange; each copy reads and writes once.
        moved = np.where(self.along_cp.ranks > 1, 4 * sent / self.profile.memory_bytes_per_s, 0.0)
        return moved + all_to_all(sent, self.along_cp, self.profile, _EXCHANGED)

    def data(self, kind: BlockKind) -> tuple[Array, Array, Array, Array | None]:
        """Seconds of the communication of parameters and gradients.

        Returns:
            Seconds to gather parameters, to reduce-scatter gradients over shards, to all-reduce
            these over replicas, and to all-reduce unsharded gradients. The last is None if no
            configuration is of mode "ddp".
        """
        profile, widths = self.profile, self.widths
        numel = np.full_like(self.samples, sum(kind.numels))
        experts = expert_share(self.grid, kind)
        is_apart = (self.grid["ep"] > 1) & (
            experts > 0
        )  # With ep, experts are a unit of their own.
        # Unsharded elements of the block's own unit; experts spread over ep have another.
        one = numel - kind.expert_numel + np.where(is_apart, 0.0, experts * self.shards)
        gathered = all_gather(one * widths.compute, self.along_shards, profile)
        reduced = all_gather(one * widths.reduce, self.along_shards, profile) + self._laid(one)
        summed = all_reduce(one * widths.reduce / self.shards, self.along_replicas, profile)
        if is_apart.any():
            other = np.where(is_apart, experts, 0.0)
            whole = other * self.along_rest.ranks
            gathered = gathered + all_gather(whole * widths.compute, self.along_rest, profile)
            reduced = reduced + all_gather(whole * widths.reduce, self.along_rest, profile)
            summed = summed + all_reduce(other * widths.reduce, self.along_replicas, profile)
        if self.along_all is None:
            return gathered, reduced, summed, None
        return gathered, reduced, summed, all_reduce(numel * widths.stored, self.along_all, profile)

    def cast(self, kind: BlockKind) -> Array:
        """Seconds of the casts and copies that FSDP2 makes, over one rank, where it would gather.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `wait_for_unshard`.
        """
        widths, numel = self.widths, float(sum(kind.numels))
        casts = 2 * widths.compute if widths.stored != widths.compute else 0
        moved = numel * (casts + widths.stored + widths.compute)
        return np.where(self.are_alone, moved / self.profile.memory_bytes_per_s, 0.0)

    def _laid(self, numel: Array) -> Array:
        """Seconds of the copies that FSDP2 makes, over one rank, where it would reduce.

        Gradients are concatenated in their dtype, copied, and added to the accumulated ones.

        Source: as above, _fsdp_collectives.py, `foreach_reduce`.
        """
        moved = numel * (self.widths.compute + (1 + 2 + 3) * self.widths.reduce)
        return np.where(self.are_alone, moved / self.profile.memory_bytes_per_s, 0.0)

    def slows(self) -> Array | float:
        """The share of its time by which the all-reduce of DDP slows the backward that hides it."""
        usual, alone, group = self.profile.contention, self.profile.contention_alone, self.along_all
        if alone is None or group is None:
            return usual
        return np.where((group.per_node == 1) & (group.nodes > 1), alone, usual)

    def update(self, kind: BlockKind) -> Array:
        held = np.where(self.mode == _DDP, float(sum(kind.numels)), share(self.grid, kind))
        widths = self.widths
        moved = held * (widths.stored * self.profile.optimizer_bytes + widths.unscaling)
        rate: Array | float = self.profile.memory_bytes_per_s
        if self.offloads:
            own = host_rate(self.grid, self.profile, self._per_node)
            rate = np.where(is_there(self.grid), own, rate)
        return np.asarray(moved / rate)

    def crossing(self, kind: BlockKind) -> OffloadSeconds:
        return crossing(self.grid, kind, self.profile, self._per_node, self.widths.stored)
