"""Adapters of peft on architectures of transformers, under every kind of plan, on real ranks.

    PYTHONPATH=DIR:. python -m tests.bench.peft_cases [--num N] [--only 'llama*'] [--layouts ddp pp]
                                                      [--json FILE]

DIR has peft (`pip install --no-deps --target DIR peft`). Each cell trains two steps of SGD with
momentum in float64 beside one process on the same global batch, and compares the losses and every
tensor of the state to within 1e-6; the bytes that each rank holds with those predicted from the
layouts; and the adapters that `save_pretrained` writes with those that peft itself writes. Frozen
parameters must be as they were, bit for bit, and a new model that loads the adapters under another
plan must have the same state.

The cell's outcome is pass, refused (a MeshplanError on every rank), wrong, crash or hang. Exit
code 1 if anything is wrong, a crash or a hang.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib.util
import json
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshplan
from meshplan.memory import state_bytes_by_rank
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.held_bytes import live_bytes
from tests.bench import wild_cell, zoo_cell
from tests.bench import zoo_models as zoo
from tests.bench.zoo_cell import Cell
from tests.helpers.pool import Pool, PoolError

TOLERANCE: Final = 1e-6
STEPS: Final = 2
MOMENTUM: Final = 0.5
TIMEOUT_S: Final = 120.0

LAYOUTS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "zero2": (2, {"strategy": "zero2"}),
    "hybrid": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "tp_fsdp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}),
    "pp_fsdp": (
        4, {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}},
    ),
}  # fmt: skip
"""(ranks, plan) of each column."""

LORA: Final = {"r": 4, "target_modules": "all-linear"}
KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "lora": LORA,
    "dora": {**LORA, "use_dora": True},
    "rslora": {**LORA, "use_rslora": True, "bias": "lora_only"},
    "head": {**LORA, "modules_to_save": ["lm_head"]},
    "int8": LORA,
    "tower": {},
}
"""Arguments of LoraConfig by kind; int8 holds the base as integers, tower freezes without peft."""

TOWERS: Final = {
    "llava": "model.vision_tower", "whisper": "model.encoder", "qwen2": "model.layers.0",
}  # fmt: skip
"""The part of each architecture that is frozen without peft."""

CASES: Final = (
    "llama/lora", "gpt2/lora", "llama/int8", "qwen3/dora", "mistral/head", "gemma3_text/lora",
    "phi3/rslora", "gpt_neox/lora", "bloom/dora", "opt/int8", "falcon/lora", "mixtral/lora",
    "qwen3_moe/lora", "olmo2/int8", "starcoder2/rslora", "bert/lora", "t5/lora", "bart/dora",
    "vit/lora", "llava/tower", "whisper/tower", "clip/dora", "deepseek_v3/lora", "qwen2/tower",
)  # fmt: skip
"""architecture/kind; the first three are those of the test suite."""


class Int8Linear(nn.Module):
    """A frozen projection held in int8 buffers, with a scale for each output feature."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        bias = linear.bias
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def is_there() -> bool:
    """True if peft is installed."""
    return importlib.util.find_spec("peft") is not None


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a case and its global batch, the same in every process."""
    architecture, _, kind = name.partition("/")
    base = zoo.build(architecture)
    if hasattr(base, "set_experts_implementation"):
        base.set_experts_implementation("eager")  # torch's grouped product takes no float64.
    batch = zoo.inputs_of(architecture, base)
    model = _frozen_tower(base, architecture) if kind == "tower" else _adapted(base, kind)
    return model.double(), zoo_cell._doubled(batch)


def _frozen_tower(base: nn.Module, architecture: str) -> nn.Module:
    base.get_submodule(TOWERS[architecture]).requires_grad_(False)
    return base


def _adapted(base: nn.Module, kind: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = dict(KINDS[kind])
    if not isinstance(getattr(base, "base_model_prefix", None), str):
        settings["target_modules"] = [n for n, m in base.named_modules() if type(m) is nn.Linear]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, LoraConfig(init_lora_weights=False, **settings))
    if kind == "int8":
        for module in model.modules():
            if isinstance(getattr(module, "base_layer", None), nn.Linear):
                module.base_layer = Int8Linear(module.base_layer)
    return model.train(base.training)


class Reference(NamedTuple):
    """Training in one process."""

    losses: list[float]
    state: dict[str, Tensor]
    rates: dict[str, float]
    adapters: dict[str, Tensor]


@functools.lru_cache(maxsize=2)
def reference(name: str) -> Reference:
    """What one process gives, and the learning rate of each parameter."""
    model, batch = build(name)
    first = zoo.gradients(model, batch, 1)
    largest = {n: float(g.abs().max()) for n, g in first.items() if g.numel()}
    floor = zoo_cell.SMALL * max(largest.values())
    rates = {n: zoo_cell.UPDATE / max(value, floor) for n, value in largest.items()}
    sgd = optimizer(model, rates)
    losses = []
    for _ in range(STEPS):
        loss = zoo.loss(model(**batch), zoo.targets().double())
        loss.backward()
        losses.append(loss.item())
        sgd.step()
        sgd.zero_grad(set_to_none=True)
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return Reference(losses, state, rates, _adapters_of_peft(model))


def optimizer(model: nn.Module, rates: Mapping[str, float]) -> torch.optim.SGD:
    """SGD of the trainable parameters, as their users write it."""
    groups = [
        {"params": [p], "lr": rates.get(wild_cell.plain(n), 0.0)}
        for n, p in model.named_parameters()
        if p.requires_grad
    ]
    return torch.optim.SGD(groups or [torch.zeros(1)], momentum=MOMENTUM)


def _adapters_of_peft(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that peft's own `save_pretrained` writes; none without adapters."""
    if not hasattr(model, "peft_config"):
        return {}
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "adapter_model.safetensors")


def train(name: str, layout: str, folder: str) -> tuple[str, float, str]:
    """One cell on this rank: (outcome, largest difference, why)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.barrier()  # Ranks may take their time to import the model's code.
        told: list[Any] = [reference(name) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told, src=0)
        expected: Reference = told[0]
        model, batch = build(name)
        frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        plan = {"version": 1, **LAYOUTS[layout][1]}
        try:
            wrapped = meshplan.parallelize(model, plan, example_inputs=batch)
            sgd = optimizer(wrapped, expected.rates)
            inputs, targets = meshplan.local_batch(wrapped, (batch, zoo.targets().double()))
            held = []
            sgd.register_step_pre_hook(lambda *_: held.append(live_bytes(wrapped, sgd)))
            losses = [
                meshplan.train_step(wrapped, sgd, inputs, targets, zoo.loss) for _ in range(STEPS)
            ]
            state = meshplan.full_state_dict(wrapped)
            loaded = state
            if expected.adapters:
                meshplan.save_pretrained(wrapped, folder)
                loaded = _loaded_under_another_plan(name, layout, folder)
        except meshplan.MeshplanError as error:
            return "refused", 0.0, "; ".join(problem.what for problem in error.problems)
        assignment = applied(wrapped).plan.assignment
        predicted = state_bytes_by_rank(assignment, "sgd_momentum")[dist.get_rank()]
        wrong = ""
        if held[-1] != predicted:
            wrong = f"bytes {held[-1]}, predicted {predicted}"
        one = zoo_cell.Reference(expected.losses, expected.state, expected.rates)
        apart, worst = 0.0, ""
        if dist.get_rank() == 0:
            apart, worst = zoo_cell.difference(losses, state, one)
            if not apart <= TOLERANCE:
                wrong = wrong or worst
            changed = [n for n, t in frozen.items() if not torch.equal(state[n], t)]
            if changed:
                wrong = wrong or f"frozen parameters have changed: {changed[:3]}"
            changed = [n for n, t in state.items() if not torch.equal(loaded[n], t)]
            if changed:
                wrong = wrong or f"loaded under another plan, these differ: {changed[:3]}"
            if expected.adapters:
                wrong = wrong or _compare_adapters(Path(folder), expected.adapters)
        verdicts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(verdicts, wrong)
        wrong = next((each for each in verdicts if each), "")
        return "wrong" if wrong else "pass", apart, wrong


def _loaded_under_another_plan(name: str, layout: str, folder: str) -> dict[str, Tensor]:
    """The state of a new model, whose adapters are zero before they are loaded."""
    model, batch = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    plan = {"version": 1, "strategy": "ddp" if layout == "full_shard" else "full_shard"}
    wrapped = meshplan.parallelize(model, plan, example_inputs=batch)
    assert meshplan.load_pretrained(wrapped, folder) == ()
    return meshplan.full_state_dict(wrapped)


def _compare_adapters(folder: Path, expected: Mapping[str, Tensor]) -> str:
    """Say what is wrong with the adapters of a folder; "" if peft would have written the same."""
    from safetensors.torch import load_file

    files = sorted(each.name for each in folder.iterdir())
    if not {"adapter_config.json", "adapter_model.safetensors"} <= set(files):
        return f"the folder has {files}"
    written = load_file(folder / "adapter_model.safetensors")
    if written.keys() != expected.keys():
        return f"adapters have other names: {sorted(written.keys() ^ expected.keys())[:4]}"
    for key, value in expected.items():
        if written[key].dtype != value.dtype or written[key].shape != value.shape:
            return f"{key} is {written[key].dtype} {tuple(written[key].shape)}"
        if not torch.allclose(written[key], value, rtol=TOLERANCE, atol=TOLERANCE):
            return f"{key} has other values"
    return ""


def run(pool: Pool, name: str, layout: str, timeout_s: float = TIMEOUT_S) -> Cell:
    """One cell on a pool."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = pool.run(train, name, layout, f"{folder}/adapters", timeout=timeout_s)
        except PoolError as error:
            story = str(error).strip().split("\n")
            raised = [line for line in story if "Error" in line or "Exception" in line]
            outcome = "hang" if "hung" in story[0] and not raised else "crash"
            return Cell(name, layout, outcome, 0.0, (raised or story)[0][:300])
    if len({result[0] for result in results}) > 1:
        return Cell(name, layout, "crash", 0.0, f"ranks disagree: {results}"[:300])
    return Cell(name, layout, *results[0])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num", type=int, default=20, help="number of cases")
    parser.add_argument("--only", nargs="+", default=["*"], help="globs of cases")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--json", type=Path, help="append results here")
    asked = parser.parse_args(arguments)
    if not is_there():
        parser.error("peft is not installed: pip install --no-deps --target DIR peft")
    chosen = [n for n in CASES if any(fnmatch.fnmatch(n, glob) for glob in asked.only)]
    pools: dict[int, Pool] = {}
    cells: list[Cell] = []
    began = time.monotonic()
    try:
        for name in chosen[: asked.num]:
            for layout in asked.layouts:
                ranks = LAYOUTS[layout][0]
                pool = pools.setdefault(ranks, Pool(ranks))
                cells.append(run(pool, name, layout))
                if cells[-1].outcome in ("crash", "hang", "refused"):
                    pools.pop(ranks).close()
                print(*cells[-1], flush=True)
                if asked.json is not None:
                    with asked.json.open("a") as file:
                        file.write(json.dumps(cells[-1]._asdict()) + "\n")
    finally:
        for pool in pools.values():
            pool.close()
    outcomes = [cell.outcome for cell in cells]
    found = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
    print(f"{len(cells)} cells in {time.monotonic() - began:.0f} s: {found}")
    return 1 if {"wrong", "crash", "hang"} & set(outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
