"""Precision words and roles, observed on the live model."""
# ruff: noqa: E501 - a table of cases

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshplan
from tests.helpers import models
from tests.runtime.apply.test_tensor_parallel import PLAIN

NORMS_IN_FP32 = [{"match": "**.norm*", "precision": "32-true"}]


def observed(plan: dict[str, Any]) -> dict[str, Any]:
    """Three steps: what was stored, what was computed with, what came out, and the losses."""
    model = meshplan.parallelize(models.build("own_llama"), plan)
    seen: dict[str, tuple[str, ...]] = {}

    def look(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen[name] = tuple(str(t.dtype)[6:] for t in (module.weight, args[0], output))

        return hook

    inner = getattr(model, "module", model)
    for name in ("layers.0.norm1", "layers.0.attn.wq", "head"):
        inner.get_submodule(name).register_forward_hook(look(name))
    sgd = models.optimizer(model)
    losses = []
    for step in range(3):
        inputs, targets = meshplan.local_batch(model, models.batch("own_llama", step))
        output = model(inputs)
        models.loss(output, targets).backward()
        stored = {str(p.dtype)[6:] for p in model.parameters()}
        gradients = {str(p.grad.dtype)[6:] for p in model.parameters()}
        sgd.zero_grad()
        losses.append(meshplan.train_step(model, sgd, inputs, targets, models.loss))
    return {
        "seen": seen,
        "stored": stored,
        "gradients": gradients,
        "output": str(output.dtype)[6:],
        "losses": losses,
    }


FP32, BF16, FP16 = ("float32",) * 3, ("bfloat16",) * 3, ("float16",) * 3
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[str, ...]], str, str]] = {
    "32-true": ({"strategy": "full_shard", "precision": "32-true"}, {"head": FP32}, "float32", "float32"),
    "bf16-true": ({"strategy": "ddp", "precision": "bf16-true"}, {"head": BF16}, "bfloat16", "bfloat16"),
    "bf16-mixed": ({"strategy": "full_shard", "precision": "bf16-mixed"}, {"layers.0.attn.wq": BF16, "head": BF16}, "float32", "bfloat16"),
    "bf16-mixed ddp": ({"strategy": "ddp", "precision": "bf16-mixed"}, {"head": BF16}, "float32", "bfloat16"),
    "16-mixed": ({"strategy": "zero2", "precision": "16-mixed"}, {"head": FP16}, "float32", "float16"),
    "bf16-mixed tp": ({"mesh": {"tp": 2}, "precision": "bf16-mixed", "rules": PLAIN}, {"layers.0.attn.wq": BF16}, "float32", "bfloat16"),
    "roles": ({"strategy": "full_shard", "precision": {"param": "bf16", "reduce": "fp32", "output": "fp32"}}, {"head": BF16}, "float32", "float32"),
    "master": ({"strategy": "full_shard", "precision": {"param": "bf16", "master": "bf16"}}, {"head": BF16}, "bfloat16", "bfloat16"),
    "norms in fp32": ({"strategy": "full_shard", "precision": "bf16-mixed", "rules": NORMS_IN_FP32}, {"layers.0.norm1": ("float32", "float32", "bfloat16"), "layers.0.attn.wq": BF16}, "float32", "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_roles(pool, case):
    plan, seen, stored, output = CASES[case]
    result = pool(2).run(observed, {"version": 1, **plan})[0]
    assert {name: result["seen"][name] for name in seen} == seen
    assert result["stored"] == {stored}
    assert result["gradients"] == {stored}
    assert result["output"] == output
    # Half precision is coarse, not wrong: three steps stay within a few of its units.
    expected = models.reference("own_llama")[0]
    assert result["losses"] == pytest.approx(expected, abs=1e-6 if case == "32-true" else 0.01)


def reduce_dtypes(plan: dict[str, Any]) -> set[str]:
    """The dtypes that gradients really travel in."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[str] = set()

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if "reduce" in func.__name__ and func.namespace == "c10d":
                tensors = [a for a in args if isinstance(a, torch.Tensor)]
                seen.update(str(t.dtype)[6:] for t in tensors or args[0])
            return func(*args, **(kwargs or {}))

    model = meshplan.parallelize(models.build("own_llama"), plan)
    inputs, targets = meshplan.local_batch(model, models.batch("own_llama", 0))
    loss = models.loss(model(inputs), targets)
    with Spy():
        loss.backward()
    return seen


@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_gradients_are_reduced_in_the_stated_dtype(pool, strategy, reduce):
    precision = {"param": "bf16", "reduce": reduce, "master": "fp32"}
    plan = {"version": 1, "strategy": strategy, "precision": precision}
    # The ranks also tell each other, in integers, which gradients there are.
    assert pool(2).run(reduce_dtypes, plan)[0] - {"int64"} == {reduce}
