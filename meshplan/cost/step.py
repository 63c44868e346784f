"""Seconds of a step of each kind of block.

What hides what, in meshplan's own runtime:

- A unit's parameters are gathered while the unit before it computes, its gradients reduced while
  the one behind it does; what lies in no block is of the root unit, whose parameters nobody waits
  with. Hidden communication slows what hides it by `Profile.contention` of its time.
- In mode "shard" gradients are reduced after every microbatch, across replicas after the last one.
  "ddp" and "zero1" reduce after the last one only. Parameters that are given back after forward
  are gathered for every forward and every backward, others for the first forward of a step.
- Where backwards are run in two halves, all of that waits until the last is done, and nothing is
  left to hide it. Each half takes half as long.
- What tp sends stands in the way of what is computed next; so does what cp gathers.

Source: `runtime.apply.data.set_gradient_sync`, `traffic.units` and `traffic.data`, which count the
same collectives; Zhao et al. 2023 (PyTorch FSDP), section 3.3, for what overlaps.
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

Array = NDArray[Any]

_DDP: Final = MODES.index("ddp")
_ZERO1: Final = MODES.index("zero1")
_SHARD: Final = MODES.index("shard")
_CACHED_KV: Final = 2
"""Collectives of one attention along cp: keys and values."""
_MASKED: Final = 2.0
"""How many times as long attention takes in a kernel that takes a mask and skips nothing.

Source: Dao 2023 (FlashAttention-2), section 4.1: about twice as fast as xformers' kernel, which is
the one that torch has for masks where cuDNN does not serve them.
"""
_EXCHANGED: Final = 4
"""With queries, and what is made of them."""


def widths_of(precision: Precision, dtype: str = "float32") -> ElementBytes:
    """Args: dtype: Of the model's parameters."""
    compute = precision.param or dtype
    stored = DTYPE_BYTES[precision.master or dtype]
    return ElementBytes(
        compute=DTYPE_BYTES[compute],
        reduce=DTYPE_BYTES[precision.reduce or compute],
        stored=stored,
        # Divided (2 passes), its absolute value taken (2), that compared (1), and itself (2); three
        # passes over what is true of each element, one over all of them, a byte each.
        unscaling=7 * stored + 6 if precision.scales_loss else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """One block of a kind, on every row of a grid.

    Args:
        seconds: [rows, options], for each microbatch, with what comes once shared among them; inf
            where the option does not exist.
        forward_s, backward_s: Likewise, of a microbatch that is neither the first nor the last.
        settle_s: What the first forward and the last backward take longer.
        update_s: [rows], of the optimizer and of what follows it.
        compute_s: [rows], forward and backward of a microbatch without anything sent or recomputed.
        exposed_tp_s: [rows], of it what tp and cp send.
        host_s: [rows], of `seconds` what an optimizer on the host takes, and what waits for copies.
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
    """An affine roofline: launches, products and what memory moves, one after the other."""
    others = (tally.flops - tally.attention_flops) / profile.efficiency
    attention = tally.attention_flops / profile.attention_efficiency
    flops = samples * (others + attention) / profile.peak_flops
    read = (samples * tally.product_bytes + tally.weight_bytes) / profile.memory_bytes_per_s
    moved = samples * tally.moved_bytes / profile.memory_bytes_per_s
    return np.asarray(tally.kernels * profile.kernel_s + np.maximum(flops, read) + moved)


def hidden(
    work: Array, behind: Array, quiet: Array | float = 0.0, *, contention: Array | float
) -> Array:
    """Two things at once, of which one slows the other.

    Args:
        quiet: What follows `behind`, and slows nothing: copies, which no kernel makes.
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
    """Seconds for each microbatch of one block.

    Args:
        grid: Rows of `grid.GRID`, all of the tp and ep that `kind` is of.
        precision: Dtypes by role.
        dtype: Of the model's parameters.
        is_awaited: Whether nothing hides the gathering and reducing of its unit; None for what
            is of no block.
        exchanges: Whether cp exchanges heads (`context.attention: all_to_all`), instead of
            gathering keys and values.
    """
    rows = rows or Rows(grid, profile, gpus_per_node, widths_of(precision, dtype))
    is_awaited = not kind.has_options if is_awaited is None else is_awaited
    join = _one_by_one if is_awaited else partial(hidden, contention=profile.contention)
    compute = rows.compute if exchanges else rows.compute_masked
    forward_c, backward_c = compute(kind.forward), compute(kind.backward)
    forward_t, backward_t = rows.sent(kind.sent_forward), rows.sent(kind.sent_backward)
    keys = rows.exchanged(kind.exchanged_bytes) if exchanges else rows.keys(kind.context_bytes)
    host = rows.launch
    forward = np.maximum(forward_c + forward_t + keys, host(kind.forward, kind.sent_forward))
    gathered, reduced, summed, whole = rows.data(kind)
    if kind.frozen:
        _, reduced, summed, whole = rows.data(trained(kind))
    halved = in_halves(grid)
    there: Array | float
    there, back, waited_for = rows.crossing(kind) if rows.offloads else (0.0, 0.0, 0.0)
    is_whole, is_at_once = rows.mode == _DDP, (rows.mode == _SHARD) & ~halved
    gathers = gathered if whole is None else np.where(is_whole, 0.0, gathered)
    after = np.zeros_like(gathered)
    if profile.gathers_once:
        after = np.where(rows.mode == _ZERO1, gathered, 0.0)
    # Over one rank nothing is fetched ahead, on no stream of its own.
    fetched = np.where(rows.are_alone, there, 0.0)
    alone, there = rows.cast(kind) + fetched, there - fetched
    waited = join(forward, gathers - after, there) + alone
    forwards, first, last = [], [], []
    backwards = []
    for again, (work, sent) in enumerate(zip(kind.again, kind.sent_again, strict=True)):
        device = compute(work) + rows.sent(sent) + keys * (1 + (again > 0))
        process = host(kind.backward, kind.sent_backward) + host(work, sent)
        backwards.append(np.maximum(backward_c + backward_t + device, process))
    at_once = np.where(is_at_once, reduced, 0.0)
    later = reduced - at_once + summed
    back_at_once = np.where(is_at_once, back, 0.0)
    for again, reshard in OPTIONS:
        backward = backwards[again]
        each = at_once + gathers if reshard else at_once
        copied = back_at_once + there if reshard else back_at_once
        usual = join(backward, each, copied)
        end = join(backward, each + later, copied + back - back_at_once)
        if whole is not None:
            usual = np.where(is_whole, backward, usual)
            # DDP knows no root: buckets leave whatever they are of.
            end = np.where(is_whole, hidden(backward, whole, contention=rows.slows()), end)
            later = np.where(is_whole, whole, later)
        end = np.where(halved, usual + later, end)
        if reshard:
            usual, end = usual + alone, end + alone
        forwards.append(waited if reshard else forward)
        first.append(usual + waited_for)
        last.append(end - usual + (0.0 if reshard else waited - forward))
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
    """A grid with its groups of ranks, for all kinds of blocks of one tp."""

    def __init__(
        self, grid: Array, profile: Profile, gpus_per_node: int, widths: ElementBytes
    ) -> None:
        self.profile, self.widths = profile, widths
        tp, cp, shard, replicate = (
            grid[name].astype(np.float64) for name in ("tp", "cp", "dp_shard", "dp_replicate")
        )
        self.mode, self.microbatches = grid["mode"], grid["microbatches"]
        # A pipeline along which something leaves its node.
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
        # FSDP2 over one rank, of which nothing is sent.
        self.are_alone = (self.mode == _SHARD) & (self.shards * replicate == 1)
        self._per_node = gpus_per_node
        self.along_all = near(self.shards * replicate, tp) if has_whole else None

    def compute(self, tally: Tally) -> Array:
        return compute_seconds(tally, self.samples, self.profile)

    def compute_masked(self, tally: Tally) -> Array:
        """Where keys and values are gathered along cp, and chunks of queries have a mask.

        A chunk meets all keys up to its own end, and no kernel skips half of its own: of 2 cp
        chunks a rank has the nth from both ends.

        Assumes: parts are balanced (`context.balance`).
        """
        cp, profile = self.grid["cp"].astype(np.float64), self.profile
        kernels = 1.0 if takes_masks(profile.device) else _MASKED
        more = np.where(cp > 1, kernels * (1 + 1 / (2 * cp)) - 1, 0.0)
        attention = tally.attention_flops / (profile.attention_efficiency * profile.peak_flops)
        return np.asarray(self.compute(tally) + more * self.samples * attention)

    def launch(self, tally: Tally, sent: Sent) -> Array:
        """What the process needs to start it all, however small the tensors are."""
        profile, ranks = self.profile, self.along_tp.ranks
        waits = ranks * profile.collective_rank_s + self._across()
        each = profile.collective_s + np.where(self.is_far, waits, 0.0)
        count = sent.all_reduces + sent.gathers + sent.all_to_alls
        return tally.kernels * profile.launch_s + count * each

    def _across(self) -> Array:
        """Of one collective of tp that leaves its node, whatever it sends."""
        return np.asarray((self.along_tp.nodes - 1) * self.profile.collective_node_s)

    def sent(self, sent: Sent) -> Array:
        """What tp and ep send, nothing of which is hidden."""
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
        """Keys and values gathered along cp, or their gradients scattered."""
        if not num_bytes:
            return np.zeros_like(self.samples)
        return all_gather(self.micro * num_bytes, self.along_cp, self.profile, _CACHED_KV)

    def exchanged(self, num_bytes: float) -> Array:
        """Queries, keys and values to ranks of cp that have the heads, and what they make back."""
        if not num_bytes:
            return np.zeros_like(self.samples)
        sent = self.samples * num_bytes
        # Stacked before, laid after: each reads and writes it once.
        moved = np.where(self.along_cp.ranks > 1, 4 * sent / self.profile.memory_bytes_per_s, 0.0)
        return moved + all_to_all(sent, self.along_cp, self.profile, _EXCHANGED)

    def data(self, kind: BlockKind) -> tuple[Array, Array, Array, Array | None]:
        """Seconds that parameters and gradients take.

        Returns:
            To gather parameters, to scatter gradients over shards, to sum these over replicas, and
            to sum gradients that are not cut at all; None where no row is of that mode.
        """
        profile, widths = self.profile, self.widths
        numel = np.full_like(self.samples, sum(kind.numels))
        experts = expert_share(self.grid, kind)
        is_apart = (self.grid["ep"] > 1) & (experts > 0)  # A unit of their own.
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
        """What FSDP2 does over one rank where it would gather: cast and copy, between kernels.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `wait_for_unshard`.
        """
        widths, numel = self.widths, float(sum(kind.numels))
        casts = 2 * widths.compute if widths.stored != widths.compute else 0
        moved = numel * (casts + widths.stored + widths.compute)
        return np.where(self.are_alone, moved / self.profile.memory_bytes_per_s, 0.0)

    def _laid(self, numel: Array) -> Array:
        """What it does over one rank where it would reduce, beside the kernels.

        Gradients are put side by side in their dtype, copied, and added to those before.

        Source: as above, _fsdp_collectives.py, `foreach_reduce`.
        """
        moved = numel * (self.widths.compute + (1 + 2 + 3) * self.widths.reduce)
        return np.where(self.are_alone, moved / self.profile.memory_bytes_per_s, 0.0)

    def slows(self) -> Array | float:
        """By what share of it DDP's sum slows the backward that hides it."""
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
