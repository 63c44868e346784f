"""Training states on a device: resumed training beside uninterrupted, seconds beside DCP."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

PRECISIONS: Final = ("bf16-mixed", "16-mixed", "32-true")


def _job(name: str, size: str, device: str, seed: int, precision: str) -> tuple[Any, Any, Any]:
    """Return (wrapped model, optimizer, function of a step) of a model on one rank."""
    import torch

    import meshplan
    from tests.gpu.models import MODELS

    given = MODELS[name](size)
    model, inputs, targets = given.start(device, 2, seed)
    plan = {"version": 1, "mesh": {"dp_shard": 1}, "precision": precision}
    wrapped = meshplan.parallelize(model, plan)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)

    def step() -> float:
        return meshplan.train_step(wrapped, optimizer, inputs, targets, given.loss)

    return wrapped, optimizer, step


def resumed(precision: str, size: str, device: str) -> dict[str, Any]:
    """Train GPT-2 with dropout, save in the background, go on; load into another model, go on."""
    import torch

    import meshplan

    with _folder() as folder:
        wrapped, optimizer, step = _job("gpt2", size, device, 0, precision)
        for _ in range(3):
            step()
        meshplan.save(folder, wrapped, optimizer, step=3, asynchronous=True)
        saved = _tensors(wrapped, optimizer)
        went_on = [step() for _ in range(3)]
        meshplan.save(folder, wrapped, optimizer, step=6)  # Waits for the one before.
        del wrapped, optimizer, step
        gc.collect()
        wrapped, optimizer, step = _job("gpt2", size, device, 1, precision)
        step()
        state = meshplan.load(folder, wrapped, optimizer, step=3)
        loaded = _tensors(wrapped, optimizer)
        differ = [n for n in saved if not torch.equal(saved[n], loaded[n])]
        again = [step() for _ in range(3)]
        return {"step": state.step, "tensors": len(saved), "tensors_that_differ": len(differ),
                "loss_difference": max(abs(a - b) for a, b in zip(went_on, again, strict=True)),
                "losses": went_on}  # fmt: skip


def _tensors(model: Any, optimizer: Any = None) -> dict[str, Any]:
    import torch

    from meshplan.runtime.base.mesh import local_of

    found = {name: local_of(t).detach().cpu().clone() for name, t in model.named_parameters()}
    for name, parameter in model.named_parameters() if optimizer is not None else ():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = local_of(value).detach().cpu().clone()
    return found


def timed(size: str, device: str) -> dict[str, float]:
    """Return seconds to save and load 4 GB of states: meshplan's, DCP's and `torch.save`'s."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import meshplan

    wrapped, optimizer, step = _job("bert", size, device, 0, "bf16-mixed")
    step()
    found: dict[str, float] = {}

    def clock(name: str, call: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        found[name] = min(seconds, found.get(name, seconds))
        return result

    with _folder() as folder:
        for number in range(2):
            mine, other, whole = (folder / f"{kind}{number}" for kind in ("m", "d", "t"))
            clock("save", lambda p=mine: meshplan.save(p, wrapped, optimizer, step=1))
            state = get_state_dict(wrapped, optimizer)
            both = {"model": state[0], "optimizer": state[1]}
            clock("dcp_save", lambda p=other, s=both: dcp.save(s, checkpoint_id=p))
            clock("torch_save", lambda p=whole, s=both: torch.save(s, p))
            clock("load", lambda p=mine: meshplan.load(p, wrapped, optimizer))

            def load(path: Path = other, into: Any = both) -> None:
                dcp.load(into, checkpoint_id=path)
                set_state_dict(wrapped, optimizer, model_state_dict=into["model"],
                               optim_state_dict=into["optimizer"])  # fmt: skip

            clock("dcp_load", load)
            found["bytes"] = sum(f.stat().st_size for f in mine.rglob("*") if f.is_file())
            for path in (mine, other):
                shutil.rmtree(path)
            whole.unlink()
    return found


def pretrained(size: str, device: str) -> dict[str, Any]:
    """Load a Hugging Face checkpoint from meta; return the peak relative to the parameters."""
    import torch

    import meshplan
    from tests.gpu.models import MODELS

    with _folder() as folder:
        wrapped, optimizer, _ = _job("qwen2", size, device, 0, "bf16-mixed")
        meshplan.save_pretrained(wrapped, folder / "hf")
        first = _tensors(wrapped, optimizer)
        del wrapped, optimizer
        gc.collect()
        with torch.device("meta"):
            model = MODELS["qwen2"](size).build()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        plan = {"version": 1, "mesh": {"dp_shard": 1}, "precision": "bf16-mixed"}
        model = meshplan.parallelize(model, plan)
        meshplan.load_pretrained(model, folder / "hf")
        own = sum(p.numel() * p.element_size() for p in model.parameters())
        found: dict[str, Any] = {"parameter_bytes": own}
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() - before
            found |= {"peak_bytes": peak, "peak_ratio": peak / own}
        second = {n: t.detach().cpu() for n, t in _tensors(model).items()}
        found["tensors_that_differ"] = sum(not torch.equal(first[n], second[n]) for n in second)
        return found


@contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)
