"""Does `parallelize` add to the step? Beside hand-written torch code for the same layout.

    python -m tests.bench.step_overhead [--steps 100] [--layouts full_shard tp] [--seq-len 64]
                                        [--dim 16] [--blocks 4]

Both models live in the same processes and take turns, step by step, in the order A B B A, so that
whatever else the machine does hits both alike. A ratio is the median over the pairs of steps; the
range behind it is that median's 95 % interval. CPU time is that of all threads of rank 0: it
knows nothing of waiting. "added" is the median difference of a pair's CPU times: what a step
costs more, whatever its length. With `--dim 16` the arithmetic is so small that it is exact to
about 0.1 ms. Before the clock starts, every parameter's local shape is compared, and
after it stops the two losses are.

Rows "wrapping" run the same plain loop on both. Rows "agreement" run it on two models that
`parallelize` made, one of them without the agreement of the ranks on which parameters have a
gradient, one small all-reduce a step (FSDP2 only): where the wrapping's time goes. Rows
"train_step" run `meshplan.train_step` against a loop by hand that also returns the global mean
loss. Rows "checks" run `train_step` on two models that `parallelize` made, one of them without any
of the checks of `runtime.checks` and their like: their CPU time per step is told of all steps
together too, those at which more is looked at (16, 32, 64, ...) among them.

The layouts whose names begin with "local" are beside `tests.bench.megatron_layers`: tensor
parallelism written by hand on local tensors, without DTensor. Of these, rows "pass" are a forward
and a backward without the optimizer, whose operators on DTensors cost what they cost under FSDP2.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan.layout.mesh import DATA_AXES, Mesh
from meshplan.runtime import parallelize
from meshplan.runtime.apply import wrap
from meshplan.runtime.apply.data import gradients
from meshplan.runtime.base import optimizer_steps
from meshplan.runtime.base.mesh import local_of
from meshplan.runtime.comparisons.steps import StepCheck
from meshplan.runtime.demo_model import ByteLlama, ByteLlamaConfig, next_byte_loss
from meshplan.runtime.train import step as train
from meshplan.runtime.watch import guard
from meshplan.spec.recipes import recipe_path
from tests.bench.megatron_layers import by_hand
from tests.helpers.pool import Pool

TARGET: Final = 1.02
WARM_UP: Final = 6
BATCH, SEQ_LEN = 4, 64
"""Small, so that what the wrapping costs is not drowned in arithmetic."""


class Layout(NamedTuple):
    """A recipe, the mesh it is run on here, and how one would write it by hand."""

    recipe: str
    mesh: dict[str, int]
    by_hand: Callable[[nn.Module, dict[str, int]], nn.Module]
    overrides: tuple[str, ...] = ()
    contests: tuple[str, ...] = ("wrapping", "train_step", "checks", "agreement")


def by_hand_full_shard(
    model: nn.Module, sizes: dict[str, int], mesh: DeviceMesh | None = None
) -> nn.Module:
    if mesh is None:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_hand_ddp(model: nn.Module, sizes: dict[str, int]) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def by_hand_tp(model: nn.Module, sizes: dict[str, int]) -> nn.Module:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    columns, rows = ("attn.wq", "attn.wk", "attn.wv", "ffn.w1", "ffn.w3"), ("attn.wo", "ffn.w2")
    styles = {f"layers.*.{name}": ColwiseParallel() for name in columns}
    styles |= {f"layers.*.{name}": RowwiseParallel() for name in rows}
    styles["embed"] = RowwiseParallel(input_layouts=Replicate())
    styles["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], styles)
    if "dp_shard" in sizes:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    return model


def by_hand_local(model: nn.Module, sizes: dict[str, int], *, is_sequence: bool = False) -> Any:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    by_hand(model, mesh["tp"].get_group(), is_sequence=is_sequence)
    if "dp_shard" in sizes:
        by_hand_full_shard(model, {"dp_shard": sizes["dp_shard"]}, mesh["dp_shard"])
    return model


UNCHECKED: Final = {
    wrap: (
        "watch_forward_writes", "refuse_calls_of_parts", "watch_first_forward", "watch_first_step",
        "watch_replicas", "prove_first_forward", "refuse_second_derivatives",
    ),
    parallelize: (
        "watch_torch_hooks", "watch_batches", "watch_drift", "watch_optimizers", "note_forwards",
    ),
    train: ("check_batches_agree",),
    guard: ("publish_ends",),
}  # fmt: skip
"""What looks at numbers, by the module that calls it. Taking part in another rank's failure and
averaging what no unit reduces is no check: a loop without that is another loop."""


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the checks: for what is made inside, and while it steps."""
    with ExitStack() as stack:
        for module, names in UNCHECKED.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, _nothing))
        for name in ("see", "finish"):
            stack.enter_context(mock.patch.object(StepCheck, name, _nothing))
        with unlooked():
            yield


@contextmanager
def unlooked() -> Iterator[None]:
    """Without what the models that are not stepping now look at before any optimizer steps."""
    with mock.patch.object(optimizer_steps, "_looks", []):
        yield


def _nothing(*unused: Any) -> None:
    """In place of a check; a `Mock` would take longer than some of them."""


_LOCAL: Final = ("wrapping", "pass")
LAYOUTS: Final = {
    "full_shard": Layout("full_shard", {"dp_shard": 2}, by_hand_full_shard),
    "hybrid_shard": Layout("hybrid_2x4", {"dp_replicate": 2, "dp_shard": 2}, by_hand_full_shard),
    "ddp": Layout("ddp", {"dp_replicate": 2}, by_hand_ddp),
    "tp": Layout("tp", {"tp": 2}, by_hand_tp),
    "tp_full_shard": Layout("tp_full_shard", {"dp_shard": 2, "tp": 2}, by_hand_tp),
    "local_tp": Layout("tp", {"tp": 2}, by_hand_local, (), _LOCAL),
    "local_sp": Layout(
        "tp_auto", {"tp": 2}, partial(by_hand_local, is_sequence=True),
        ("sequence_parallel=true",), _LOCAL,
    ),
    "local_tp_full_shard": Layout(
        "tp_full_shard", {"dp_shard": 2, "tp": 2}, by_hand_local, (), _LOCAL
    ),
}  # fmt: skip


def plan_of(layout: Layout) -> meshplan.Spec:
    """The recipe on this mesh, without clipping: the loops by hand do not clip."""
    mesh = "{" + ", ".join(f"{axis}: {size}" for axis, size in layout.mesh.items()) + "}"
    overrides = [f"mesh={mesh}", "hardware=", "batch=", "clip_grad_norm=", *layout.overrides]
    return meshplan.load_spec(recipe_path(layout.recipe), overrides)


def measure(
    name: str, steps: int, seq_len: int, dim: int, blocks: int
) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of every timed step on this rank, by contender."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    layout = LAYOUTS[name]
    planned = meshplan.parallelize(build(dim, blocks), plan_of(layout))
    hand = layout.by_hand(build(dim, blocks), layout.mesh)
    compare_shapes(planned, hand)
    optimizers = {model: torch.optim.AdamW(model.parameters()) for model in (planned, hand)}
    mesh = Mesh.of(layout.mesh)
    inputs, targets = batch(mesh.index(dist.get_rank(), DATA_AXES), seq_len)

    def plain(model: nn.Module) -> None:
        loop(model, optimizers[model], inputs, targets)

    def train_step() -> None:
        meshplan.train_step(planned, optimizers[planned], inputs, targets, next_byte_loss)

    data_ranks = mesh.size(*DATA_AXES)

    def reported() -> None:
        loss = loop(hand, optimizers[hand], inputs, targets) / data_ranks
        if data_ranks == dist.get_world_size():
            dist.all_reduce(loss)
        elif data_ranks > 1:
            dist.all_reduce(loss, group=planned.meshplan.mesh["dp_shard"].get_group())
        float(loss)

    def passed(model: nn.Module) -> None:
        next_byte_loss(model(inputs), targets).backward()
        model.zero_grad(set_to_none=True)

    with unchecked():
        bare = meshplan.parallelize(build(dim, blocks), plan_of(layout))
    optimizers[bare] = torch.optim.AdamW(bare.parameters())

    with mock.patch.object(gradients, "on_reduction", return_value=False):
        parted = meshplan.parallelize(build(dim, blocks), plan_of(layout))
    optimizers[parted] = torch.optim.AdamW(parted.parameters())

    def step_bare() -> None:
        meshplan.train_step(bare, optimizers[bare], inputs, targets, next_byte_loss)

    out: dict[str, list[tuple[float, float]]] = {}
    contests = (
        ("wrapping", lambda: plain(planned), lambda: plain(hand), unlooked),
        ("train_step", train_step, reported, unlooked),
        ("checks", train_step, step_bare, unchecked),
        ("agreement", lambda: plain(planned), lambda: plain(parted), nullcontext),
        ("pass", lambda: passed(planned), lambda: passed(hand), unlooked),
    )
    for what, ours, theirs, around in contests:
        if what not in layout.contests:
            continue
        if what == "checks":  # The planned model goes on by itself.
            compare_losses(planned, hand, inputs, targets)
        for number in range(WARM_UP + steps):
            pair = [("ours", ours, nullcontext), ("theirs", theirs, around)]
            for who, step, context in pair if number % 2 else reversed(pair):
                with context():
                    seconds = timed(step)
                if number >= WARM_UP:
                    out.setdefault(f"{what} {who}", []).append(seconds)
    return out


def build(dim: int, blocks: int) -> ByteLlama:
    torch.manual_seed(0)
    return ByteLlama(ByteLlamaConfig(dim=dim, ffn_dim=11 * dim // 4, num_layers=blocks))


def batch(index: int, seq_len: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    text = torch.randint(256, (BATCH, seq_len + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> Tensor:
    loss = next_byte_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def timed(step: Callable[[], None]) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare_shapes(planned: nn.Module, hand: nn.Module) -> None:
    ours, theirs = (
        {name: tuple(local_of(p).shape) for name, p in model.named_parameters()}
        for model in (planned, hand)
    )
    assert ours == theirs, "the two are not the same layout"


@torch.no_grad()
def compare_losses(planned: nn.Module, hand: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    ours, theirs = (float(next_byte_loss(model(inputs), targets)) for model in (planned, hand))
    assert abs(ours - theirs) < 1e-3, f"they learnt otherwise: {ours} and {theirs}"


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval, from order statistics."""
    ordered, half = sorted(ratios), 0.98 * len(ratios) ** 0.5
    low, high = round(len(ordered) / 2 - half), round(len(ordered) / 2 + half)
    return (
        statistics.median(ordered),
        ordered[max(0, low)],
        ordered[min(len(ordered) - 1, high)],
    )


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN, help="longer steps hide more")
    parser.add_argument("--dim", type=int, default=ByteLlamaConfig().dim, help="of the model")
    parser.add_argument("--blocks", type=int, default=ByteLlamaConfig().num_layers)
    asked = parser.parse_args(arguments)
    print(f"{'layout':14} {'ranks':>5} {'compared':11} {'by hand':>9} {'meshplan':>9}"
          f"  {'wall ratio':22} {'CPU ratio':22} added")  # fmt: skip
    slower = 0
    for name in asked.layouts:
        world = Mesh.of(LAYOUTS[name].mesh).world_size
        pool = Pool(world)
        timeout = 60 + 4.0 * asked.steps * max(1.0, asked.seq_len / SEQ_LEN, asked.blocks / 4)
        rank_0 = pool.run(
            measure, name, asked.steps, asked.seq_len, asked.dim, asked.blocks, timeout=timeout
        )[0]
        pool.close()
        for what in LAYOUTS[name].contests:
            ours, theirs = rank_0[f"{what} ours"], rank_0[f"{what} theirs"]
            wall, cpu = (
                interval([a[i] / b[i] for a, b in zip(ours, theirs, strict=True)]) for i in (0, 1)
            )
            slower += what == "wrapping" and min(wall[1], cpu[1]) > TARGET
            in_all = sum(s[1] for s in ours) / sum(s[1] for s in theirs)
            added = 1e3 * statistics.median(a[1] - b[1] for a, b in zip(ours, theirs, strict=True))
            whole = f"   all steps {in_all:.3f}" if what == "checks" else ""
            times = [1e3 * statistics.median(s[0] for s in side) for side in (theirs, ours)]
            print(f"{name:14} {world:5} {what:11} {times[0]:6.1f} ms {times[1]:6.1f} ms"
                  f"  {wall[0]:.3f} ({wall[1]:.3f}..{wall[2]:.3f})"
                  f"   {cpu[0]:.3f} ({cpu[1]:.3f}..{cpu[2]:.3f})"
                  f"   {added:+.2f} ms{whole}", flush=True)  # fmt: skip
    verdict = f"{slower} are slower" if slower else "none is slower"
    print(f"target: at most {TARGET:.2f}; {verdict} beyond doubt")
    return 1 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
