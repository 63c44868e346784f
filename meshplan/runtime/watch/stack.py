"""The stack of a thread, and whether the thread can only be waiting for other ranks.

A rank that computes, reads data or saves must never count as waiting. So the lists here name only
functions and files in which a thread that is off the processor can do nothing but wait.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from dataclasses import dataclass
from itertools import takewhile
from types import FrameType
from typing import Final, TypeAlias

import torch

Line: TypeAlias = tuple[str, int, str]
"""(File, line number, function)."""

_DEPTH: Final = 200
"""Frames of a stack that are read."""
_SHOWN: Final = 3
"""Lines of the user's code that are reported."""
_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_OWN: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_STDLIB: Final = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES: Final = sysconfig.get_paths()["purelib"] + os.sep

_PASSED: Final = tuple(_TORCH + n for n in ("_ops.py", "_library/", "autograd/function.py"))
"""Files of torch whose frames are skipped: they only show that an operator runs."""

_COLLECTIVES: Final = _TORCH + "distributed/distributed_c10d.py"
_WAITING: Final = tuple(
    _TORCH + name
    for name in (
        "distributed/distributed_c10d.py",
        "distributed/_functional_collectives.py",
        "distributed/fsdp/",
        "distributed/tensor/",
        "distributed/_composable/",
        "nn/parallel/distributed.py",
    )
) + (_OWN + "runtime/apply/pipeline/", _OWN + "runtime/watch/meeting.py")
"""Files in which a thread that is off the processor can only be waiting for other ranks."""

_IN_STORE: Final = (_OWN + "runtime/watch/",)
"""Files with requests to the store and waits for entries of other ranks in it."""

_BACKWARD: Final = (_TORCH + "autograd/graph.py", "_engine_run_backward")
"""(File, function) in which backward runs. On CPUs, a thread off the processor here waits for
collectives that hooks in C++ began."""

_SETUP: Final = frozenset(
    {
        "init_process_group", "new_group", "_new_group_with_tag", "_new_process_group_helper",
        "split_group", "new_subgroups", "destroy_process_group", "_store_based_barrier",
        "init_device_mesh", "monitored_barrier",
    }
)  # fmt: skip
"""Functions that may also take long for another reason: they look up hosts and open connections."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the thread that runs the verbs, the guarded functions such as `train_step`.

    Attributes:
        lines: The stack of the thread, innermost first.
        state: The kernel's letter for the state of the thread, such as "S" if it sleeps; "" without
            /proc.
        ticks: Processor time that the thread has used, in clock ticks of the kernel.
        wait: The function in which the thread, if it sleeps, can only be waiting for other ranks;
            "" if it may be doing something else.
        is_shared: True if another thread of this process is in a collective, too.
        has_company: True if another thread runs the user's code, which may begin a collective next.
    """

    lines: tuple[Line, ...]
    state: str
    ticks: int
    wait: str
    is_shared: bool = False
    has_company: bool = False

    @property
    def user_lines(self) -> list[str]:
        """The innermost `_SHOWN` lines of the user's code, such as "train.py:12 in main"."""
        own = [line for line in self.lines if is_of_user(line[0])]
        return [f"{os.path.basename(f)}:{n} in {name}" for f, n, name in own[:_SHOWN]]

    @property
    def needs_store(self) -> bool:
        """True if the thread cannot go on while the process that serves the store is stopped."""
        in_store = bool(self.lines) and self.lines[0][0].startswith(_IN_STORE)
        return in_store or _is_in_setup(self.lines) or bool(self.wait)

    @property
    def where(self) -> str:
        """The innermost line of the user's code; "" if there is none."""
        return next(iter(self.user_lines), "")


def look_at(ident: int, native: int) -> Look:
    """Return a look at a thread, given its Python identifier and its native (kernel) id."""
    frames = sys._current_frames()
    lines = lines_of(frames.pop(ident, None))
    frames.pop(threading.get_ident(), None)
    state, ticks = _kernel_says(native)
    files = {file for frame in frames.values() for file, _, _ in lines_of(frame)}
    in_others = any(file.startswith(_COLLECTIVES) for file in files)
    # Threads of installed packages, such as progress bars and loggers, begin no collectives.
    has_company = any(is_of_user(file) and not file.startswith(_PACKAGES) for file in files)
    return Look(lines, state, ticks, wait_in(lines), in_others, has_company)


def lines_of(frame: FrameType | None) -> tuple[Line, ...]:
    """Return the innermost `_DEPTH` lines of the stack of a frame, innermost first."""
    out: list[Line] = []
    while frame is not None and len(out) < _DEPTH:
        out.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(out)


def user_line() -> str:
    """Return the innermost line of the user's code on the caller's stack; "" if there is none."""
    return Look(lines_of(sys._getframe(1)), "", 0, "").where


def wait_in(lines: tuple[Line, ...]) -> str:
    """Return the function in which a sleeping thread can only be waiting for other ranks, or "".

    Args:
        lines: The stack of the thread, innermost first.
    """
    inner = next((line for line in lines if not line[0].startswith(_PASSED)), None)
    if inner is None or _is_in_setup(lines):
        return ""
    file = inner[0]
    if (file, inner[2]) == _BACKWARD:
        return "backward"
    if not file.startswith(_WAITING):
        return ""
    inside = takewhile(lambda line: not is_of_user(line[0]), lines)
    called = [line[2] for line in inside if line[0].startswith(_COLLECTIVES)]
    # Name the outermost function of torch.distributed, since that is what the user's code calls.
    return called[-1] if called else "a collective"


def _is_in_setup(lines: tuple[Line, ...]) -> bool:
    """Return True if one of the innermost functions sets up or destroys a process group."""
    return any(name in _SETUP for _, _, name in lines[:12])


def is_of_user(file: str) -> bool:
    """Return True for a file of the user's program, or of any package but torch and meshplan."""
    if file.startswith((_TORCH, _OWN, "<")):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_STDLIB)


def _kernel_says(native: int) -> tuple[str, int]:
    """Return (state letter, processor time in ticks) of a thread of this process."""
    return _stat(f"/proc/self/task/{native}/stat")[:2]


def process_state(pid: int) -> tuple[str, int]:
    """Return (the kernel's state letter, start tick) of a process; ("", 0) once it has ended."""
    state, _, began = _stat(f"/proc/{pid}/stat")
    return state, began


def _stat(path: str) -> tuple[str, int, int]:
    """Return (state letter, processor time in ticks, start tick); ("", 0, 0) without the file."""
    try:
        with open(path) as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return "", 0, 0
    return words[0], int(words[11]) + int(words[12]), int(words[19])
