"""The seconds of each part of a step, for every configuration of a grid: work, and what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Final, NamedTuple

import numpy as np

from meshplan.cost.collectives import (
    CollectiveGroup,
    all_gather,
    all_reduce,
    all_to_all,
    group,
    group_along,
    stride_of,
)
from meshplan.cost.grid import CONTEXT_WORDS, DDP, SHARD, Array
from meshplan.cost.host import OffloadSeconds, crossing, has_params_on_host, host_rate
from meshplan.cost.profile import Profile
from meshplan.cost.shares import expert_share, share
from meshplan.cost.types import BlockKind, ElementBytes, Sent, Tally
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.hardware import devices
from meshplan.layout.mesh import AXES, GRADIENT_AXES, SHARD_AXES
from meshplan.memory.decoder.cp_all_gather import takes_masks
from meshplan.spec.spec import Precision

_CACHED_KV: Final = 2
"""Collectives of one attention along cp with `all_gather`: keys and values."""
_MASKED: Final = 2.0
"""Factor by which attention takes longer in a kernel that reads a mask and skips no masked block.

Source: Dao 2023 (FlashAttention-2), section 4.1: FlashAttention-2 is about twice as fast as
xformers' kernel, which torch uses for masks where cuDNN does not support them."""
_EXCHANGED: Final = 4
"""Collectives of one attention along cp with `all_to_all`: queries, keys, values and output."""


def widths_of(precision: Precision, dtype: str = "float32") -> ElementBytes:
    """Return the bytes per element of parameters and gradients.

    Args:
        precision: Dtypes by role; a role that is not set has the dtype of the parameters.
        dtype: Dtype of the model's parameters.
    """
    compute = precision.param or dtype
    stored = DTYPE_BYTES[precision.master or dtype]
    return ElementBytes(
        compute=DTYPE_BYTES[compute],
        reduce=DTYPE_BYTES[precision.reduce or compute],
        stored=stored,
        # Passes over the gradient: division (2), absolute value (2), comparison (1), the gradient
        # itself (2). Then passes over boolean tensors of one byte per element (6).
        unscaling=7 * stored + 6 if precision.scales_loss else 0,
    )


class UnitPart(NamedTuple):
    """Parameters of a block that are sharded along other axes than those of its mode.

    Attributes:
        share: Their share of the block's parameters.
        shard_axes: Data axes that shard them; () if they are replicated.
        replicate_axes: Data axes along which their gradients are all-reduced.
    """

    share: float
    shard_axes: tuple[str, ...]
    replicate_axes: tuple[str, ...]


def compute_seconds(tally: Tally, samples: Array | float, profile: Profile) -> Array:
    """Return the seconds of computation by an affine roofline: kernels, products, memory traffic.

    Args:
        tally: The work.
        samples: Samples of a microbatch, [configurations].
        profile: Constants of the device.
    """
    others = (tally.flops - tally.attention_flops) / profile.efficiency
    attention = tally.attention_flops / profile.attention_efficiency
    flops = samples * (others + attention) / profile.peak_flops
    read = (samples * tally.product_bytes + tally.weight_bytes) / profile.memory_bytes_per_s
    moved = samples * tally.moved_bytes / profile.memory_bytes_per_s
    return np.asarray(tally.kernels * profile.kernel_s + np.maximum(flops, read) + moved)


def traffic_seconds(tally: Tally, samples: Array | float, profile: Profile) -> Array:
    """Return the part of `compute_seconds` that is not spent on products.

    It is the memory traffic of the other operations, and what every kernel takes whatever its size.
    """
    moved = samples * tally.moved_bytes / profile.memory_bytes_per_s
    return np.asarray(tally.kernels * profile.kernel_s + moved)


class Rows:
    """A grid with its groups of ranks, for all kinds of blocks of one tp and ep.

    Methods return seconds per microbatch, [configurations], unless they state something else.

    Args:
        grid: Configurations of `grid.GRID`.
        profile: Constants of the device and its links.
        gpus_per_node: Devices of one node.
        widths: Bytes per element of parameters and gradients.
        order: The axes of the mesh, outermost first.
    """

    def __init__(
        self,
        grid: Array,
        profile: Profile,
        gpus_per_node: int,
        widths: ElementBytes,
        order: Sequence[str] = AXES,
    ) -> None:
        self.profile, self.widths = profile, widths
        cp, shard, replicate = (
            grid[name].astype(np.float64) for name in ("cp", "dp_shard", "dp_replicate")
        )
        along = partial(group_along, grid, order=order, gpus_per_node=gpus_per_node)
        self.mode, self.microbatches = grid["mode"], grid["microbatches"]
        # True where a pipeline crosses nodes.
        self.is_far = (grid["pp"] > 1) & (along(("pp",)).nodes > 1)
        self.micro = grid["micro"].astype(np.float64)
        self.samples = self.micro / cp
        self.shards = shard * cp
        self.along_tp, self.along_cp = along(("tp",)), along(("cp",))
        self.along_shards, self.along_replicas = along(SHARD_AXES), along(("dp_replicate",))
        self.grid, ep = grid, grid["ep"].astype(np.float64)
        near, lent = partial(group, gpus_per_node=gpus_per_node), stride_of(grid, "dp_shard", order)
        self.along_ep, self.along_rest = near(ep, lent), near(self.shards / ep, lent * ep)
        self.has_whole = bool((self.mode == DDP).any())
        self.offloads = bool(grid["offload"].any())
        self.gathers_kv = grid["gathers_kv"] == CONTEXT_WORDS.index("all_gather")
        # True where FSDP2 runs over a single rank, without communication.
        self.are_alone = (self.mode == SHARD) & (self.shards * replicate == 1)
        self._per_node, self._order = gpus_per_node, order
        self._along = along

    @cached_property
    def along_all(self) -> CollectiveGroup:
        """The groups of all data ranks."""
        return self._along(GRADIENT_AXES)

    def compute(self, tally: Tally) -> Array:
        """Return the seconds of computation.

        Ranks of cp that gather keys and values have two chunks of the queries each, one from each
        end of the sequence. A chunk attends to all keys up to its own end, which needs a mask, and
        no kernel skips the masked half of the square on the diagonal.

        Assumes: sequence shards are balanced (`context.balance`).
        """
        seconds = compute_seconds(tally, self.samples, self.profile)
        if not self.gathers_kv.any():
            return seconds
        cp, profile = self.grid["cp"].astype(np.float64), self.profile
        kernels = 1.0 if takes_masks(profile.device) else _MASKED
        more = np.where(self.gathers_kv, kernels * (1 + 1 / (2 * cp)) - 1, 0.0)
        attention = tally.attention_flops / (profile.attention_efficiency * profile.peak_flops)
        return np.asarray(seconds + more * self.samples * attention)

    def launch(self, tally: Tally, sent: Sent) -> Array:
        """Return the seconds that the host process needs to launch all kernels and collectives."""
        profile, ranks = self.profile, self.along_tp.ranks
        waits = ranks * profile.collective_rank_s + self._across()
        each = profile.collective_s + np.where(self.is_far, waits, 0.0)
        count = sent.all_reduces + sent.gathers + sent.all_to_alls + sent.statistics
        return tally.kernels * profile.launch_s + count * each

    def _across(self) -> Array:
        """Return the seconds that crossing nodes adds to one tp collective of any size."""
        return np.asarray(np.log2(self.along_tp.nodes) * self.profile.collective_node_s)

    def sent(self, sent: Sent) -> Array:
        """Return the seconds of the communication inside a microbatch that products do not hide."""
        out = np.zeros_like(self.samples)
        if sent.all_reduces:
            num_bytes = self.samples * sent.all_reduce_bytes + sent.all_reduce_once_bytes
            out = out + all_reduce(num_bytes, self.along_tp, self.profile, sent.all_reduces)
        if sent.gathers:
            num_bytes = self.samples * sent.gather_bytes + sent.gather_once_bytes
            # What forward gathers, backward scatters and the other way round, so of a forward and
            # its backward one half are reduce-scatters.
            mean = (1 + self.profile.reduce_scatter_factor) / 2
            out = out + mean * all_gather(num_bytes, self.along_tp, self.profile, sent.gathers)
        for gather_bytes, flops in sent.overlapped:
            wire = all_gather(self.samples * gather_bytes, self.along_tp, self.profile)
            product = self.samples * flops / (self.profile.efficiency * self.profile.peak_flops)
            hidden = (1 - self.profile.contention) * np.minimum(wire, product)
            out = np.asarray(out - hidden)
        out = out * self.profile.tp_exposed
        out = out + (sent.all_reduces + sent.gathers) * self._across()
        if sent.all_to_alls:
            num_bytes = self.samples * sent.all_to_all_bytes + sent.all_to_all_once_bytes
            out = out + all_to_all(num_bytes, self.along_ep, self.profile, sent.all_to_alls)
        if sent.statistics:
            num_bytes = np.full_like(self.samples, sent.statistics_bytes)
            out = out + all_reduce(num_bytes, self.along_all, self.profile, sent.statistics)
        return np.asarray(out)

    def keys(self, num_bytes: float) -> Array:
        """Return the seconds to gather keys and values along cp, or to scatter their gradients.

        `num_bytes` is their bytes for one sample.
        """
        if not num_bytes:
            return np.zeros_like(self.samples)
        return all_gather(self.micro * num_bytes, self.along_cp, self.profile, _CACHED_KV)

    def exchanged(self, num_bytes: float) -> Array:
        """Return the seconds of the all-to-alls of queries, keys, values and output along cp.

        `num_bytes` is their bytes for one sample.
        """
        if not num_bytes:
            return np.zeros_like(self.samples)
        sent = self.samples * num_bytes
        # Tensors are copied before and after the all-to-all; each copy reads and writes once.
        moved = np.where(self.along_cp.ranks > 1, 4 * sent / self.profile.memory_bytes_per_s, 0.0)
        return moved + all_to_all(sent, self.along_cp, self.profile, _EXCHANGED)

    def data(
        self, kind: BlockKind, parts: tuple[UnitPart, ...] = ()
    ) -> tuple[Array, Array, Array, Array | None]:
        """Return the seconds of the communication of a block's parameters and gradients, each once.

        Returns:
            Seconds to gather parameters, to reduce-scatter gradients over shards, to all-reduce
            these shards over replicas, and to all-reduce unsharded gradients. The last is None if
            no configuration is of mode "ddp".
        """
        if parts:
            return (*self._data_of(kind, parts), None)
        profile, widths = self.profile, self.widths
        numel = np.full_like(self.samples, sum(kind.numels))
        one, other = self._unit_numel(kind)
        gathered = all_gather(one * widths.compute, self.along_shards, profile)
        scatters = profile.reduce_scatter_factor
        reduced = scatters * all_gather(one * widths.reduce, self.along_shards, profile)
        reduced = reduced + self._single_rank_copies(one)
        summed = all_reduce(one * widths.reduce / self.shards, self.along_replicas, profile)
        if other.any():
            whole = other * self.along_rest.ranks
            gathered = gathered + all_gather(whole * widths.compute, self.along_rest, profile)
            reduced = reduced + scatters * all_gather(
                whole * widths.reduce, self.along_rest, profile
            )
            summed = summed + all_reduce(other * widths.reduce, self.along_replicas, profile)
        if not self.has_whole:
            return gathered, reduced, summed, None
        return gathered, reduced, summed, all_reduce(numel * widths.stored, self.along_all, profile)

    def _data_of(self, kind: BlockKind, parts: tuple[UnitPart, ...]) -> tuple[Array, Array, Array]:
        """Return the first three of `data` for parameters that are sharded in several ways."""
        gathered, reduced, summed = np.zeros((3, len(self.grid)))
        for part in parts:
            numel = np.full_like(self.samples, part.share * sum(kind.numels))
            along, across = self._along(part.shard_axes), self._along(part.replicate_axes)
            factor, bytes_ = self.profile.reduce_scatter_factor, numel * self.widths.reduce
            gathered = gathered + all_gather(numel * self.widths.compute, along, self.profile)
            reduced = reduced + factor * all_gather(bytes_, along, self.profile)
            summed = summed + all_reduce(bytes_ / along.ranks, across, self.profile)
        return gathered, reduced, summed

    def regathered(self, kind: BlockKind, gathered: Array, ranks: int) -> Array:
        """Return the seconds to gather parameters that forward resharded over fewer ranks.

        Args:
            kind: The kind of the block.
            gathered: Seconds to gather them from all shards (`data`).
            ranks: Neighbouring ranks that shard the block's unit after forward.
        """
        inner = "cp" if (self.grid["cp"] > 1).any() else "dp_shard"
        stride = stride_of(self.grid, inner, self._order)
        nodes = self.along_shards.job_nodes
        near = group(np.full_like(self.samples, ranks), stride, self._per_node, nodes)
        num_bytes = self._unit_numel(kind)[0] * self.widths.compute
        farther = all_gather(num_bytes, self.along_shards, self.profile)
        return gathered - farther + all_gather(num_bytes, near, self.profile)

    def _unit_numel(self, kind: BlockKind) -> tuple[Array, Array]:
        """Return a block's parameters as (unsharded elements of its unit, one rank's of experts).

        Without ep, the block's unit has the experts, too, and the second is 0.
        """
        experts = expert_share(self.grid, kind)
        is_apart = (self.grid["ep"] > 1) & (experts > 0)
        others = float(sum(kind.numels) - kind.expert_numel)
        own = others + np.where(is_apart, 0.0, experts * self.shards)
        return own, np.where(is_apart, experts, 0.0)

    def cast(self, kind: BlockKind) -> Array:
        """Return the seconds of FSDP2's casts and copies over a single rank, in place of gathers.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `wait_for_unshard`.
        """
        widths, numel = self.widths, float(sum(kind.numels))
        casts = 2 * widths.compute if widths.stored != widths.compute else 0
        moved = numel * (casts + widths.stored + widths.compute)
        return np.where(self.are_alone, moved / self.profile.memory_bytes_per_s, 0.0)

    def _single_rank_copies(self, numel: Array) -> Array:
        """Return the seconds of the copies that FSDP2 over a single rank makes instead of reducing.

        It concatenates gradients in their dtype, copies them, and adds them to accumulated ones.

        Source: as above, _fsdp_collectives.py, `foreach_reduce`.
        """
        moved = numel * (self.widths.compute + (1 + 2 + 3) * self.widths.reduce)
        return np.where(self.are_alone, moved / self.profile.memory_bytes_per_s, 0.0)

    def accumulation(self, kind: BlockKind, is_at_once: Array) -> tuple[Array, Array]:
        """Return the seconds to keep the gradients of a step's first microbatch, and to add others.

        Whole gradients are kept in the dtype of their reduction, and added up with two reads and a
        write. Where backward reduces at once, only this rank's shard of them is.

        Args:
            kind: The kind of the block, with its trained parameters alone.
            is_at_once: [configurations] mask of those that reduce in every backward.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py,
        `to_accumulated_grad_if_needed` and `accumulate_unsharded_grad_if_needed`; without mixed
        precision, autograd adds in place.
        """
        widths, numel = self.widths, float(sum(kind.numels))
        kept = np.where(self.mode == DDP, widths.stored, widths.reduce)
        casts = kept != widths.compute
        first = np.where(casts, widths.compute + kept, 0) * numel
        further = np.where(casts, widths.compute + 2 * kept, 3 * kept) * numel
        first = np.where(is_at_once | (self.microbatches == 1), 0.0, first)
        shard = (widths.reduce + 2 * widths.stored) * share(self.grid, kind)
        # `cost.host` adds up shards on the host, and `_single_rank_copies` those of a single rank.
        shard = np.where(has_params_on_host(self.grid) | self.are_alone, 0.0, shard)
        rate = max(self.profile.memory_bytes_per_s, self.profile.streamed_bytes_per_s)
        return first / rate, np.where(is_at_once, shard, further) / rate

    def slows(self) -> Array | float:
        """Return the `Profile.contention` of DDP's all-reduce with the backward that hides it."""
        usual, alone = self.profile.contention, self.profile.contention_alone
        if alone is None:
            return usual
        group = self.along_all
        return np.where((group.per_node == 1) & (group.nodes > 1), alone, usual)

    def update(self, kind: BlockKind, parts: tuple[UnitPart, ...] = ()) -> Array:
        """Return the seconds per step in which the optimizer updates a block.

        Assumes: an optimizer with matrix products (Muon) has whole parameters. It multiplies in
        bfloat16, as efficiently as the model does.
        """
        numel = float(sum(kind.numels))
        local_numel = np.where(self.mode == DDP, numel, share(self.grid, kind))
        if parts:
            cut = sum(part.share / self._along(part.shard_axes).ranks for part in parts)
            local_numel = numel * np.asarray(cut)
        widths = self.widths
        moved = local_numel * (widths.stored * self.profile.optimizer_bytes + widths.unscaling)
        rate: Array | float = self.profile.memory_bytes_per_s
        if self.offloads:
            own = host_rate(self.grid, self.profile, self._per_node)
            rate = np.where(has_params_on_host(self.grid), own, rate)
        device = devices().get(self.profile.device)
        peak = device.peak_flops.get("bfloat16") if device is not None else None
        products = kind.step_flops / (self.profile.efficiency * (peak or self.profile.peak_flops))
        return np.asarray(moved / rate + products)

    def crossing(self, kind: BlockKind) -> OffloadSeconds:
        """Return the seconds in which a block is offloaded."""
        return crossing(self.grid, kind, self.profile, self._per_node, self.widths.stored)
