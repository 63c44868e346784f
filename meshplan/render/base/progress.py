"""Progress on stderr: a bar on a terminal, a few plain lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NUM_LINES = 8


@contextmanager
def loss_progress(
    title: str, steps: int, *, is_quiet: bool = False
) -> Iterator[Callable[[int, float], None]]:
    """Show the progress of a training; yield a function to call as f(step, loss) after each step.

    Args:
        title: Name of the training.
        steps: Number of steps; the first step has number 1.
        is_quiet: If True, show nothing.
    """
    if is_quiet:
        yield lambda step, loss: None
    elif sys.stderr.isatty():
        with _bar(title, steps) as on_step:
            yield on_step
    else:
        every = max(1, steps // _NUM_LINES)

        def on_step(step: int, loss: float) -> None:
            if step in (1, steps) or step % every == 0:
                print(f"{title}: step {step}/{steps}, loss {loss:.3f}", file=sys.stderr, flush=True)

        yield on_step


@contextmanager
def _bar(title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    terminal = getattr(sys.stderr, "beneath", sys.stderr)
    shown = ("[bold]{task.description}", "loss {task.fields[loss]}")
    bar = Progress(
        TextColumn(shown[0]), BarColumn(), MofNCompleteColumn(), TextColumn(shown[1]),
        TimeElapsedColumn(), console=Console(file=terminal),
    )  # fmt: skip
    with bar:
        task = bar.add_task(title, total=steps, loss="-")
        yield lambda step, loss: bar.update(task, completed=step, loss=f"{loss:.3f}")
