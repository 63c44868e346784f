"""The hunt: models and loops that nobody prepared, under every kind of layout, on real ranks.

    python -m tests.bench.wild [--only 'gan*'] [--layouts ddp pp] [--jobs N] [--timeout S]
                               [--json FILE] [--again OUTCOME ...] [--dry] [--write]

Each cell trains three steps beside one process on the same global batches and compares losses, the
output in evaluation mode and the whole state. Its outcome is one of

    pass     the same to within the tolerance
    own      an exception that one process raises as well (in the same precision)
    refused  a MeshplanError on every rank
    wrong    another number
    crash    any other exception, or a refusal on some ranks only
    hang     no answer

Models of packages (diffusers, peft, timm, vit-pytorch, x-transformers, open_clip,
segmentation-models-pytorch; put them on PYTHONPATH with `pip install --no-deps --target DIR`) are
among them where these are installed. With --json results are appended to a file as they come and
cells that stand in it are not run again, unless their outcome is one of --again. --write makes
wild.md. Exit code 1 if anything is wrong, a crash or a hang.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.bench import wild_cases
from tests.bench.wild_cell import LAYOUTS, OUTCOMES, TIMEOUT_S, Cell, run_cell
from tests.bench.wild_table import TABLE, reasons, report, write
from tests.helpers.pool import Pool


def done(path: Path | None) -> dict[tuple[str, str], Cell]:
    """The cells of an earlier run; the last one counts."""
    if path is None or not path.exists():
        return {}
    cells = [Cell(*json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    return {(cell.name, cell.layout): cell for cell in cells}


def sweep(
    names: Sequence[str],
    layouts: Sequence[str],
    path: Path | None,
    jobs: int,
    timeout_s: float,
    again: Collection[str],
) -> dict[tuple[str, str], Cell]:
    """Run what is not done yet, `jobs` cases at a time; print each row as it is ready."""
    cells = {key: cell for key, cell in done(path).items() if cell.outcome not in again}
    todo = iter(names)
    lock = threading.Lock()
    width = max(map(len, names), default=0)

    def work() -> None:
        pools: dict[int, Pool] = {}
        try:
            while True:
                with lock:
                    name = next(todo, None)
                if name is None:
                    return
                is_new = False
                for layout in layouts:
                    if (name, layout) in cells:
                        continue
                    ranks, is_new = LAYOUTS[layout][0], True
                    pool = pools.setdefault(ranks, Pool(ranks))
                    cell = run_cell(pool, name, layout, timeout_s)
                    with lock:
                        cells[name, layout] = cell
                        if path is not None:
                            with path.open("a") as file:
                                file.write(json.dumps(cell) + "\n")
                row = [cells[name, layout] for layout in layouts]
                words = [c.outcome.ljust(9) for c in row]
                why = next((c.why[:150] for c in row if c.outcome in OUTCOMES[3:]), "")
                if is_new:
                    print(name.ljust(width), *words, why, flush=True)
        finally:
            for pool in pools.values():
                pool.close()

    print("".ljust(width), *(layout.ljust(9) for layout in layouts), flush=True)
    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="globs of cases")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for a cell")
    parser.add_argument("--json", type=Path, help="append results here, skip what is there")
    parser.add_argument("--again", nargs="+", default=[], choices=OUTCOMES, help="run these anew")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--dry", action="store_true", help="run nothing, report what --json has")
    asked = parser.parse_args(arguments)
    known = wild_cases.load()
    names = [name for name in known if any(fnmatch.fnmatch(name, glob) for glob in asked.only)]
    began = time.monotonic()
    if asked.dry:
        found = done(asked.json)
    else:
        found = sweep(names, asked.layouts, asked.json, asked.jobs, asked.timeout, asked.again)
    cells = [found[n, lay] for n in names for lay in asked.layouts if (n, lay) in found]
    print(f"\n{len(cells)} cells in {time.monotonic() - began:.0f} s")
    print(*report(cells, asked.layouts), *reasons(cells), sep="\n")
    if asked.write:
        write(cells, asked.layouts)
    return 1 if any(cell.outcome in ("wrong", "crash", "hang") for cell in cells) else 0


if __name__ == "__main__":
    raise SystemExit(main())
