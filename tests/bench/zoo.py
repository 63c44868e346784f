"""Every architecture of transformers and timm under every kind of layout, against one process.

    python -m tests.bench.zoo [--only 'qwen*'] [--layouts full_shard pp] [--sample]
                              [--jobs N] [--timeout S] [--json FILE] [--write] [--dry]

Each cell trains two steps of SGD in float32 and compares the losses and every parameter with one
process on the same global batch. Its outcome is one of

    pass     the same to within the tolerance
    refused  parallelize or train_step said why not, on every rank
    not yet  refused because this version cannot do it for any model
    wrong    another number
    error    any other exception
    timeout  no answer

timm's models are among them where it is installed (`pip install --no-deps timm`; torchvision is not
needed here). With --json, results are appended to a file as they come and cells that stand in it
are not run again; --dry runs nothing at all. --write makes zoo.md, the table kept in the
repository. Exit code 1 if anything is wrong, an error or without answer.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.bench import zoo_models as zoo
from tests.bench.zoo_cell import LAYOUTS, OUTCOMES, TIMEOUT_S, Cell, run
from tests.bench.zoo_table import SHORT, TABLE, reasons, report, write
from tests.helpers.pool import Pool

SAMPLE: Final = (
    "llama", "qwen3", "gemma3_text", "gpt2", "bloom",  # decoders
    "mixtral", "deepseek_v3",  # mixtures of experts
    "qwen3_next", "mamba", "rwkv",  # recurrences
    "bert", "albert", "modernbert",  # encoders
    "t5", "bart",  # encoders and decoders
    "whisper", "wav2vec2", "audio-spectrogram-transformer",
    "vit", "swin", "resnet", "segformer",
    "blip", "llava", "qwen2_vl",
)  # fmt: skip
"""What tests/bench/test_zoo.py runs."""


def done(path: Path | None) -> dict[tuple[str, str], Cell]:
    """The cells of an earlier run; the last one counts."""
    if path is None or not path.exists():
        return {}
    cells = [Cell(*json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    return {(cell.name, cell.layout): cell for cell in cells}


def sweep(
    names: Sequence[str], layouts: Sequence[str], path: Path | None, jobs: int, timeout_s: float
) -> list[Cell]:
    """Run what is not done yet, `jobs` architectures at a time; print each row as it is ready."""
    cells = done(path)
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
                for layout in layouts:
                    if (name, layout) in cells:
                        continue
                    ranks = LAYOUTS[layout][0]
                    cell = run(pools.setdefault(ranks, Pool(ranks)), name, layout, timeout_s)
                    with lock:
                        cells[name, layout] = cell
                        if path is not None:
                            with path.open("a") as file:
                                file.write(json.dumps(cell) + "\n")
                row = [cells[name, layout] for layout in layouts]
                words = [SHORT[c.outcome].ljust(max(len(c.layout), 5)) for c in row]
                why = next((c.why[:100] for c in row if c.outcome in OUTCOMES[3:]), "")
                print(name.ljust(width), *words, why, flush=True)
        finally:
            for pool in pools.values():
                pool.close()

    print("".ljust(width), *(layout.ljust(5) for layout in layouts), flush=True)
    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [cells[name, layout] for name in names for layout in layouts if (name, layout) in cells]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="globs of architectures")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--sample", action="store_true", help="the architectures of the test")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for a cell")
    parser.add_argument("--json", type=Path, help="append results here, skip what is there")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--dry", action="store_true", help="run nothing, report what --json has")
    asked = parser.parse_args(arguments)
    names = [
        name
        for name in (SAMPLE if asked.sample else zoo.entries())
        if any(fnmatch.fnmatch(name, glob) for glob in asked.only)
    ]
    began = time.monotonic()
    if asked.dry:
        known = done(asked.json)
        cells = [known[n, lay] for n in names for lay in asked.layouts if (n, lay) in known]
    else:
        cells = sweep(names, asked.layouts, asked.json, asked.jobs, asked.timeout)
    print(f"\n{len(cells)} cells in {time.monotonic() - began:.0f} s")
    print(*report(cells, asked.layouts), *reasons(cells), sep="\n")
    if asked.write:
        write(cells, asked.layouts)
    return 1 if any(cell.outcome in ("wrong", "error", "timeout") for cell in cells) else 0


if __name__ == "__main__":
    raise SystemExit(main())
