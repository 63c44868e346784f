"""Everything that needs a GPU, in one command: predictions beside what one device does.

    python -m tests.gpu [--device cuda|cpu] [--size full|tiny] [--out gpu.json] [--seconds 470]
                        [--memory-jobs 6] [SECTION ...]
    python -m tests.gpu --table FILE
    python -m tests.gpu --predict FILE

The sections are memory, workspaces, seconds, by_hand, states, ranks and fixes (`SECTIONS` says what
each does). Nothing runs in the process of the command itself, so that the failure of one row does
not end the others. What is measured is written to the file at once. A section for which no time is
left is listed as skipped. `--predict` needs no GPU: it predicts anew what a file has measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.gpu.run import Room, Row, Run, Workers, apart, line_of, outcome, stream

_CONTEXT: Final = 1 << 30
"""Bytes of a process on the device beside what its allocator reserves."""


def memory(run: Run) -> None:
    """Peaks of rank 0 of many, under a group of fakes, for the models and plans of `plans`."""
    from tests.gpu import memory as section
    from tests.gpu.plans import CASES

    kind = run.gpu or "cpu"

    def one(name: str) -> None:
        row: Row = {"name": name, "ranks": CASES[name].world}
        told = predicting.call(section.predicted, name, run.size, kind, seconds=run.left)
        if isinstance(told, str):
            return run.note("memory", row | {"error": f"predicted: {told}"})
        with room.of(told.get("reserved_bytes", 0) + _CONTEXT):
            # The allocator's settings cannot be taken back.
            call = apart if "allocator" in CASES[name].plan else measuring.call
            found = call(section.measured, name, run.size, run.device, seconds=run.left)
        row["predicted"] = told
        if isinstance(found, str):
            return run.note("memory", row | {"error": f"measured: {found}"})
        return run.note("memory", row | {"measured": found})

    cores, room = os.cpu_count() or 2, Room(run.memory_bytes)
    with (
        Workers(max(1, cores - 2 * run.memory_jobs), cuda=False) as predicting,
        Workers(run.memory_jobs) as measuring,
        ThreadPoolExecutor(4 * cores) as threads,
    ):
        list(threads.map(one, CASES))


def workspaces(run: Run) -> None:
    """Memory that single kernels allocate and free."""
    from tests.gpu import workspaces as section

    if run.device == "cpu":
        return run.note("workspaces", {"name": "all", "skipped": "a CPU has no such kernels"})
    found = apart(section.measured, seconds=run.left)
    for row in [{"name": "all", "error": found}] if isinstance(found, str) else found:
        run.note("workspaces", row)
    return None


def seconds(run: Run) -> None:
    """Calibrate, then seconds and peaks of steps on one rank as `plan` and `estimate` say them."""
    from tests.gpu import seconds as section

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        profile = str(folder / "profile.json")
        told = apart(section.calibrated, profile, seconds=run.left)
        row: Row = {"name": "calibrate"}
        run.note("calibrate", row | ({"error": told} if isinstance(told, str) else told))
        measured = isinstance(told, dict) and "profile" in told
        answers = section.predictions(run.gpu, run.size, folder, profile if measured else None)
        generic = section.predictions(run.gpu, run.size, folder, None) if run.gpu else {}

    def note(name: str, found: Any) -> None:
        row: Row = {"name": name, "predicted": answers[name]}
        if "seconds" in generic.get(name, {}):
            row["generic_s"] = generic[name]["seconds"]
        run.note("seconds", row | outcome(found))

    left, why = dict.fromkeys(answers), "not run"
    for answer in stream(section.all_measured, run.gpu, run.size, run.device, seconds=run.left):
        if isinstance(answer, str):
            why = answer
            break
        note(*answer)
        del left[answer[0]]
    for name in left:
        note(name, why)


def by_hand(run: Run) -> None:
    """The wrapped model beside the model wrapped by hand: losses, seconds, peaks."""
    from tests.gpu import by_hand as section

    for kind in section.KINDS:
        found = apart(section.beside, kind, run.size, run.device, seconds=run.left)
        run.note("by_hand", {"name": kind, **outcome(found)})


def states(run: Run) -> None:
    """Saved, resumed and pretrained states."""
    from tests.gpu import states as section

    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        *((f"resumed, {p}", section.resumed, (p,)) for p in section.PRECISIONS),
        ("seconds", section.timed, ()),
        ("load_pretrained", section.pretrained, ()),
    ]
    for name, function, args in calls:
        found = apart(function, *args, run.size, run.device, seconds=run.left)
        run.note("states", {"name": name, **outcome(found)})


def ranks(run: Run) -> None:
    """Four ranks that share the device by gloo: losses as in one process."""
    from tests.gpu import ranks as section

    (reference, *names) = section.PLANS
    expected = section.losses(reference, run.device, min(60.0, run.left))
    if isinstance(expected, str):
        return run.note("ranks", {"name": reference, "error": expected})

    def one(name: str) -> None:
        found = section.losses(name, run.device, min(60.0, max(run.left, 0.1)))
        row: Row = {"name": name}
        if isinstance(found, str):
            row["error"] = found
        else:
            worst = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
            row["measured"] = {"losses": found, "one_process": expected, "difference": worst}
        run.note("ranks", row)

    with ThreadPoolExecutor(3 if run.device == "cuda" else 1) as threads:
        list(threads.map(one, names))
    return None


def fixes(run: Run) -> None:
    """A plan that runs out of memory, and the first change that `--fixes` says is enough."""
    from tests.gpu import fixes as section

    with tempfile.TemporaryDirectory() as folder:
        told = section.predicted(run.gpu, run.size, Path(folder))
        row: Row = {"name": "as written", "predicted": told}
        if "error" in told or told["first"] is None:
            return run.note("fixes", row)
        for name, settings in (("as written", []), ("first fix", told["first"]["settings"])):
            row = {"name": name, "predicted": told} if not settings else {"name": name}
            row |= {"settings": settings} if settings else {}
            found = apart(section.train, told["plan"], settings, run.device, seconds=run.left)
            run.note("fixes", row | outcome(found))
    return None


SECTIONS: Final[dict[str, Callable[[Run], None]]] = {
    "memory": memory, "seconds": seconds, "by_hand": by_hand, "fixes": fixes, "states": states,
    "workspaces": workspaces, "ranks": ranks,
}  # fmt: skip


def table(book: dict[str, Any]) -> list[str]:
    """Return all rows as lines of text."""
    lines = [f"{book['device']}, torch {book['torch']}, meshplan {book['meshplan']}"]
    for section, rows in book["sections"].items():
        lines += ["", section, *(f"  {line_of(row)}" for row in rows)]
    return lines


def predict(book: dict[str, Any]) -> None:
    """Replace the predictions of a book of a GPU by those of today."""
    from tests.gpu import memory as held
    from tests.gpu import seconds as timed

    gpu, size, sections = book["gpu"], book["size"], book["sections"]
    cores = os.cpu_count() or 2
    with Workers(cores, cuda=False) as workers, ThreadPoolExecutor(cores) as threads:
        names = [row["name"] for row in sections["memory"]]
        found = threads.map(
            lambda name: workers.call(held.predicted, name, size, gpu, seconds=600), names
        )
        for row, told in zip(sections["memory"], found, strict=True):
            row["predicted"] = told if isinstance(told, dict) else {"error": told}
    with tempfile.TemporaryDirectory() as temporary:
        folder, path = Path(temporary), Path(temporary, "profile.json")
        path.write_text(json.dumps(sections["calibrate"][0]["profile"]))
        for row, told, generic in zip(
            sections["seconds"],
            timed.predictions(gpu, size, folder, str(path)).values(),
            timed.predictions(gpu, size, folder, None).values(),
            strict=True,
        ):
            row["predicted"], row["generic_s"] = told, generic.get("seconds")


def _head(run: Run) -> dict[str, Any]:
    import torch

    import meshplan

    name = torch.cuda.get_device_name() if run.device == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "python": platform.python_version(),
                "meshplan": meshplan.__version__}  # fmt: skip
    return {"device": name, "gpu": run.gpu, "size": run.size, **versions}


def _gpu() -> str:
    from meshplan.runtime.calibrate import seen_devices

    found, _ = seen_devices()
    return found.name if found is not None else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "tiny"), help="default: full on a GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=470.0)
    parser.add_argument("--memory-jobs", type=int, default=6)
    parser.add_argument("--table", type=Path, help="print the table of a file, and nothing else")
    parser.add_argument("--predict", type=Path, help="predict anew what a file has measured")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    args = parser.parse_args(argv)
    if args.table is not None:
        print(*table(json.loads(args.table.read_text())), sep="\n")
        return 0
    if args.predict is not None:
        book = json.loads(args.predict.read_text())
        predict(book)
        args.predict.write_text(json.dumps(book, indent=1) + "\n")
        print(*table(book), sep="\n")
        return 0
    if unknown := sorted(set(args.sections) - set(SECTIONS)):
        parser.error(f"no such section: {', '.join(unknown)}")
    start = time.monotonic()
    run = Run(
        args.device,
        _gpu() if args.device == "cuda" else "",
        args.size or ("full" if args.device == "cuda" else "tiny"),
        args.memory_jobs,
        args.out,
        start + args.seconds,
        {},
    )
    run.head = _head(run)
    for name, section in SECTIONS.items():
        if args.sections and name not in args.sections:
            continue
        begin = time.monotonic()
        if run.left <= 0:
            run.note(name, {"name": "all", "skipped": "no time was left"})
            continue
        try:
            section(run)
        except Exception:
            run.note(name, {"name": "all", "error": traceback.format_exc()})
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    print(f"wrote {args.out} after {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
