"""Peaks of a real allocator beside those foretold: rank 0 of many, alone on one device.

    python -m tests.bench.gpu_memory [--device cuda|cpu] [--model 1b|8b|tiny] [--out FILE]
                                     [--gpu h200-sxm-141gb] [--seconds 520] [NAME ...]
    python -m tests.bench.gpu_memory --table FILE

The real model and the real wrappers run in a process group of fakes, in which nothing is sent: what
is computed is wrong, and what is allocated is what rank 0 of the job would allocate. Read are the
allocator's peaks from the second step on. Every case is foretold first and then measured, each in
a process of its own, and written to FILE at once: a call that is stopped, or that has no time left
for one more case (exit code 3), goes on where it ended when it is called again.

On a CPU the live bytes of tensors are counted in place of an allocator's, and must be those
foretold, to the byte: so the script is tested where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.bench.gpu_plans import PLANS, SHAPES, world_of

_STEPS: Final = 3
"""The first is not like the others; of those the most is taken."""
_COUNTED: Final = {
    "requested_bytes": "requested_bytes.all.peak",
    "allocated_bytes": "allocated_bytes.all.peak",
    "active_bytes": "active_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.peak",
}
"""Names of `torch.cuda.memory_stats`."""

Figures = dict[str, int]
Row = dict[str, Any]


def _decided(size: str, plan: Mapping[str, Any]) -> tuple[Any, Any, tuple[int, int]]:
    """(the model on meta, its plan, the shape of a rank's tokens)."""
    import torch

    from meshplan.plan.plan import make_plan
    from meshplan.runtime.trace.ops import record
    from meshplan.runtime.trace.rehearse import rehearser
    from meshplan.runtime.trace.structure import graph_of
    from meshplan.spec.reader import load_spec
    from tests.bench.llama import Llama

    shape, spec = SHAPES[size], load_spec(dict(plan))
    with torch.device("meta"):
        model = Llama(shape)
        example = (torch.zeros(4, shape.seq_len, dtype=torch.long),)
    flow = record(model, example) if spec.reads_flow else None
    rehearse = rehearser(model, example) if spec.reads_flow else None
    found = make_plan(spec, graph_of(model, flow), world_size=world_of(plan), rehearse=rehearse)
    stages = found.assignment.stages
    samples = found.accumulate * (stages.microbatches if stages is not None else 1)
    return model, found, (samples, shape.seq_len)


def foretold(size: str, plan: Mapping[str, Any], device: str) -> Figures | str:
    """What `estimate` would say of rank 0; or what was raised.

    Args:
        device: "cpu", or as of `fake_step`.
    """
    warnings.simplefilter("ignore")
    try:
        import torch

        from meshplan.memory import reserve, with_workspaces
        from meshplan.runtime.fake_step.step import fake_step
        from tests.bench.llama import loss

        model, found, shape = _decided(size, plan)
        tokens = torch.empty(shape, dtype=torch.long, device="meta")
        log = fake_step(model, found, tokens, tokens, loss, _adamw, device=device)
        if device == "cpu":
            return {"live_bytes": log.peak.live_bytes}
        held = reserve(with_workspaces(log, device))
        return {
            "requested_bytes": held.requested_bytes,
            "allocated_bytes": held.allocated_bytes,
            "reserved_bytes": held.reserved_bytes,
            "host_bytes": log.host_bytes,
        }
    except Exception:
        return traceback.format_exc()


def measured(size: str, plan: Mapping[str, Any], device: str) -> Figures | str:
    """What this rank's steps really take from the second one on; or what was raised.

    Args:
        device: "cpu" or "cuda".
    """
    warnings.simplefilter("ignore")
    try:
        return _measured(size, plan, device)
    except Exception:
        return traceback.format_exc()


@contextmanager
def _real_replicas() -> Iterator[None]:
    """The wrapper of replicas is the real one: tensors have numbers, only others do not answer."""
    from meshplan.runtime.apply.data import data

    ask = data.is_fake_execution
    data.is_fake_execution = lambda: False
    try:
        yield
    finally:
        data.is_fake_execution = ask


def _answered(wrapped: Any) -> None:
    """A group of fakes ends no sum of a bucket; each bucket is its own sum."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def done(buffer: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(buffer)
        return future

    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(None, lambda state, bucket: done(bucket.buffer()))


def _measured(size: str, plan: Mapping[str, Any], device: str) -> Figures:
    import torch

    from meshplan.runtime.apply.parameters.materialize import InitialValues
    from meshplan.runtime.apply.wrap import applied, apply_plan
    from meshplan.runtime.base.batch_agreement import open_groups
    from meshplan.runtime.base.fake_mode import fake_execution
    from meshplan.runtime.base.mesh import device_mesh
    from meshplan.runtime.fake_step.step import watch_steps
    from meshplan.runtime.torch_private.fakes import group_of_fakes
    from meshplan.runtime.train.step import train_step
    from tests.bench.llama import Llama, loss

    _, found, shape = _decided(size, plan)
    with group_of_fakes(0, found.mesh.world_size), fake_execution(), _real_replicas():
        mesh = device_mesh(found.mesh)
        open_groups(found, mesh)
        with torch.device(device):
            model = Llama(SHAPES[size])
            tokens = torch.zeros(shape, dtype=torch.long)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
            model.freqs_cis.zero_()
        wrapped = apply_plan(model, found, mesh, InitialValues())
        applied(wrapped).is_tested = True
        _answered(wrapped)
        optimizer = _adamw(wrapped)
        targets = tokens.clone()
        if device == "cpu":
            logs = watch_steps(wrapped, optimizer, tokens, targets, loss, _STEPS - 1)
            return {"live_bytes": min(log.peak.live_bytes for log in logs)}
        del model
        gc.collect()
        torch.cuda.empty_cache()
        peaks = []
        for _ in range(_STEPS):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            train_step(wrapped, optimizer, tokens, targets, loss)
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            peaks.append({name: stats[key] for name, key in _COUNTED.items()})
        free, total = torch.cuda.mem_get_info()
        most = {name: max(peak[name] for peak in peaks[1:]) for name in _COUNTED}
        return {**most, "driver_bytes": total - free - torch.cuda.memory_reserved()}


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _apart(function: Any, *args: Any, seconds: float) -> Figures | str:
    """In a process of its own, so that nothing is left of the case before."""
    context = multiprocessing.get_context("spawn")
    is_hidden = function is foretold  # On fake tensors of the CPU, whatever there is.
    with ProcessPoolExecutor(1, context, initializer=_begin, initargs=(is_hidden,)) as executor:
        future = executor.submit(function, *args)
        try:
            found: Figures | str = future.result(timeout=max(seconds, 1.0))
            return found
        except TimeoutError:
            for process in multiprocessing.active_children():
                process.kill()
            return "stopped: no time was left"
        except BrokenProcessPool:
            return "the process died"


def _begin(is_hidden: bool) -> None:
    if is_hidden:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def run(args: argparse.Namespace) -> int:
    """Case by case, as long as there is time."""
    start, longest = time.monotonic(), 0.0
    book = _book(args)
    rows: list[Row] = book["rows"]
    done = {row["name"] for row in rows if "error" not in row}
    for name in args.names or PLANS:
        if name in done:
            continue
        begun = time.monotonic()
        left = args.seconds - (begun - start)
        if left < longest:
            print(f"no time is left for {name}: call again", file=sys.stderr)
            return 3
        row = _row(name, args, left)
        longest = max(longest, time.monotonic() - begun)
        if row.get("error", "").startswith("stopped"):
            print(f"no time was left for {name}: call again", file=sys.stderr)
            return 3
        rows[:] = [each for each in rows if each["name"] != name] + [row]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(book, indent=1) + "\n")
        print(_line(row), flush=True)
    return 0


def _row(name: str, args: argparse.Namespace, seconds: float) -> Row:
    plan, start = PLANS[name], time.monotonic()
    kind = "cpu" if args.device == "cpu" else args.gpu
    row: Row = {"name": name, "plan": plan, "ranks": world_of(plan)}
    for what, function, on in (("predicted", foretold, kind), ("measured", measured, args.device)):
        left = seconds - (time.monotonic() - start)
        found = _apart(function, args.model, plan, on, seconds=left)
        if isinstance(found, str):
            return row | {"error": found}
        row[what] = found
    return row


def _book(args: argparse.Namespace) -> dict[str, Any]:
    """What there is already, of the same device, model and torch."""
    import torch

    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU: live bytes of tensors"
    head = {
        "device": name, "gpu": args.gpu if args.device == "cuda" else "",
        "torch": torch.__version__,
        "model": {"name": args.model, **asdict(SHAPES[args.model])},
    }  # fmt: skip
    if not args.out.exists():
        return {**head, "rows": []}
    book: dict[str, Any] = json.loads(args.out.read_text())
    if {key: book[key] for key in head} != head:
        raise SystemExit(f"{args.out} is of another device, model or torch: name another file")
    return book


def _line(row: Row) -> str:
    """A line of the table: bytes, or what went wrong."""
    if "error" in row:
        return f"| {row['name']} | {row['ranks']} | {row['error'].strip().splitlines()[-1]} |"
    cells = [row["name"], str(row["ranks"])]
    for key in ("live_bytes", "requested_bytes", "allocated_bytes", "reserved_bytes"):
        if key in row["predicted"]:
            mine, real = row["predicted"][key], row["measured"][key]
            cells += [f"{mine:,}", f"{real:,}", f"{100 * (mine / real - 1):+.3f} %"]
    return f"| {' | '.join(cells)} |"


def table(book: Mapping[str, Any]) -> list[str]:
    """All rows, predicted beside measured."""
    keys = [k for k in ("live", "requested", "allocated", "reserved")
            if any(f"{k}_bytes" in row.get("predicted", {}) for row in book["rows"])]  # fmt: skip
    head = ["plan", "ranks", *(w for k in keys for w in (f"{k}: predicted", "measured", "error"))]
    title = f"{book['model']['name']} on {book['device']}, torch {book['torch']}"
    return [title, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|",
            *(_line(row) for row in book["rows"])]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(SHAPES), default="1b")
    parser.add_argument("--out", type=Path, default=Path("tests/measured/gpu_memory.json"))
    parser.add_argument("--gpu", default="h200-sxm-141gb", help="as meshplan names it")
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--table", type=Path, help="print the table of a file, and nothing else")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PLANS)}")
    args = parser.parse_args(argv)
    if args.table is not None:
        print(*table(json.loads(args.table.read_text())), sep="\n")
        return 0
    if unknown := sorted(set(args.names) - set(PLANS)):
        parser.error(f"no such plan: {', '.join(unknown)}")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
