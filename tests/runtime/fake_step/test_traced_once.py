"""What is traced once is not traced twice, unless the second time could be another.

Which seeded bug would this catch? A model that keeps something, in a module or out of it, of which
the first microbatch is taken for all; flops remembered for another product; a trace's garbage.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from meshplan.garbage import collecting_rarely
from meshplan.memory.log.events import Term
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.plan.plan import make_plan
from meshplan.runtime.fake_step import kernels
from meshplan.runtime.fake_step.microbatch import trace_microbatch
from meshplan.runtime.torch_private.fakes import group_of_fakes
from meshplan.runtime.trace import flops
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec

_TABLES: Final[dict[int, torch.Tensor]] = {}


class Keeping(nn.Module):
    """Takes more the first time, or leaves something behind."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.line, self.how = nn.Linear(8, 8), how
        self.is_first, self.kept = True, None
        self.state: dict[str, bool] = {}
        self.object = SimpleNamespace()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts.append(0)
        out = self.line(x)
        if self.how == "flag":
            if self.is_first:
                out = out + (out.repeat(1, 9).exp()).sum(1, keepdim=True)
            self.is_first = False
        if self.how == "table":
            if "done" not in self.state:
                out = out + (out.repeat(1, 9).exp()).sum(1, keepdim=True)
            self.state["done"] = True
        if self.how == "object":
            if not vars(self.object):
                out = out + (out.repeat(1, 9).exp()).sum(1, keepdim=True)
            self.object.done = True
        if self.how == "tensor":
            self.kept = out.detach() * 2
        if self.how == "buffer":
            self.seen = self.seen + 1
        if self.how == "outside":
            out = out + _TABLES.setdefault(len(x), torch.ones(8, device=x.device))
        return out


counts: list[int] = []


IN_STAGES: Final = {
    "version": 1,
    "mesh": {"pp": 2, "dp_replicate": 2},
    "pipeline": {"schedule": "1F1B", "microbatches": 2, "split": [["0"], ["1"]]},
    "batch": {"micro": 2},
}


def traced(how: str, plan: dict[str, Any]) -> tuple[int, int, int]:
    """(how often the model ran, bytes at the most, bytes that were there before)."""
    warnings.simplefilter("ignore")
    counts.clear()
    _TABLES.clear()
    keeping = Keeping(how)
    model = nn.Sequential(keeping, nn.Linear(8, 8)) if "pipeline" in plan else keeping
    if how == "hook":
        keeping.line.register_forward_hook(lambda *_: None)
    found = make_plan(load_spec(plan), graph_of(model), world_size=4)
    counts.clear()
    _TABLES.clear()
    batch = torch.zeros(2, 8), torch.zeros(2, 8)
    work: MicrobatchTrace = trace_microbatch(model, found, *batch, nn.functional.mse_loss)
    live, most = 0, 0
    for event in work.log.events:
        live += event.delta
        most = max(most, live)
    before = sum(e.delta for e in work.log.events if not e.phase)
    _TABLES.clear()
    return len(counts), most, before


@pytest.mark.parametrize(
    ("plan", "numbers"),
    # A pipeline records the forward first, and its step has two microbatches.
    [({"version": 1, "strategy": "full_shard"}, (1, 2)), (IN_STAGES, (1 + 2, 1 + 2 * 2))],
    ids=["whole", "in stages"],
)
@pytest.mark.parametrize(
    "how", ["", "flag", "table", "object", "tensor", "buffer", "outside", "hook"]
)
def test_the_first_microbatch_tells_all_where_it_leaves_nothing(
    apart: ProcessPoolExecutor, how: str, plan: dict[str, Any], numbers: tuple[int, int]
) -> None:
    plain = apart.submit(traced, "", plan).result()
    count, most, before = apart.submit(traced, how, plan).result()
    assert count == numbers[bool(how)]
    if how in ("flag", "table", "object", "hook"):
        assert (most, before) == plain[1:]  # What it does the first time is not what it does.
    elif how in ("tensor", "outside"):
        assert before > plain[2]  # What it keeps is there when the next one begins.


def _products() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    x, w = torch.zeros(2, 4, 9, 9), torch.zeros(4, 4, 3, 3)
    conv = torch.ops.aten.convolution.default
    rest = ([0, 0], [1, 1], False, [0, 0])
    return [
        (conv, (x, w, None, [1, 1], *rest, 1)),
        (conv, (x, w, None, [2, 2], *rest, 1)),
        (conv, (x, w[:, :2], None, [1, 1], *rest, 2)),
        (conv, (x, w, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1)),
        (torch.ops.aten.mm.default, (x[0, 0], x[0, 1])),
        (torch.ops.aten.mm.default, (x[0, 0], x[0, 1, :, :5])),
        (torch.ops.aten.bmm.default, (x[0], x[1])),
    ]


def test_flops_are_of_the_product_that_is_asked_for() -> None:
    flops._FLOPS_CACHE.clear()
    for _ in range(2):
        for func, args in _products():
            out = func(*args)
            told = kernels._done(func, args, {}, out)
            rule: Any = flop_registry[func.overloadpacket]  # type: ignore[attr-defined]
            assert told is not None
            assert told.flops == rule(*args, out_val=out)
    assert len(flops._FLOPS_CACHE) == len(_products())


def test_cycles_are_looked_for_as_before() -> None:
    before = gc.get_threshold()
    with collecting_rarely():
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_search_made_is_not_looked_through_at_its_end(frozen: bool) -> None:
    """In a process of its own, since what was frozen stays so."""
    code = (
        "import gc\n"
        "from meshplan.garbage import collecting_rarely\n"
        f"{'gc.freeze()' if frozen else ''}\n"
        "before, seen = gc.get_freeze_count(), []\n"
        "def note(phase, info):\n"
        "    if phase == 'start':\n"
        "        seen.append(len(gc.get_objects(info['generation'])))\n"
        "gc.callbacks.append(note)\n"
        "with collecting_rarely():\n"
        "    made = [[n] for n in range(200_000)]\n"
        "more = [[n] for n in range(2_000)]\n"
        "assert gc.get_freeze_count() == before\n"
        "assert seen, 'it is looked for again'\n"
        "print(max(seen) < 100_000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{not frozen}\n"


def test_a_process_that_ends_frees_nothing_but_runs_what_is_registered() -> None:
    code = (
        "import atexit, sys\n"
        "from meshplan.own_process import leave_at_once\n"
        "class Freed:\n"
        "    def __del__(self): print('freed')\n"
        "kept = Freed()\n"
        "atexit.register(print, 'registered')\n"
        "print('printed', end=' ')\n"
        "leave_at_once(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "printed registered\n")


def test_a_process_that_ends_waits_for_its_threads() -> None:
    code = (
        "import threading, time\n"
        "from meshplan.own_process import leave_at_once\n"
        "def late(): time.sleep(0.2); print('late')\n"
        "threading.Thread(target=late).start()\n"
        "leave_at_once(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "late\n")


def terms_of_two_layers() -> dict[str, Term]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    spec = load_spec({"version": 1, "strategy": "full_shard"})
    plan = make_plan(spec, graph_of(model), world_size=4)
    batch = torch.zeros(2, 8), torch.zeros(2, 4)
    work = trace_microbatch(model, plan, *batch, nn.functional.mse_loss)
    return {s.module: s.term for s in work.log.storages if s.phase == "forward"}


def test_the_output_counts_as_logits_and_what_is_inside_as_activations(apart: ProcessPoolExecutor):
    terms = apart.submit(terms_of_two_layers).result()
    assert terms == {"0": Term.ACTIVATIONS, "1": Term.LOSS}


def test_an_error_after_an_estimate_is_printed_as_before_it():
    """The hook of a group would print "[rank0]:" before each line, once for every group."""
    before = sys.excepthook
    with group_of_fakes(0, 2):
        assert sys.excepthook is not before
    assert sys.excepthook is before
