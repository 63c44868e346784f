"""How long `meshplan.explore` takes from a slider's event to finished pictures.

`python -m tests.bench.sliders` prints the median and the slowest, in milliseconds of CPU, of moves
that were never made before: first those of the sliders and the strategy, then those of tp and pp.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Final

import meshplan

_ROOT: Final = Path(__file__).resolve().parent.parent.parent
_CONFIG: Final = str(_ROOT / "plans" / "models" / "llama-3.1-8b.json")
_PLAN: Final = {
    "version": 1,
    "hardware": {"nodes": 2, "gpus_per_node": 8, "gpu": "h100-sxm-80gb", "inter": "50GB/s"},
    "mesh": {"dp_replicate": 2, "dp_shard": 8},
    "strategy": "hybrid_shard",
    "precision": "bf16-mixed",
    "batch": {"micro": 1, "accumulate": 4, "seq_len": 8192},
    "activation_checkpointing": "full",
}
_MOVES: Final = {
    "nodes": [("nodes", 4), ("nodes", 1), ("nodes", 8), ("nodes", 3), ("nodes", 16)],
    "GPUs per node": [("gpus_per_node", n) for n in (4, 2, 6, 7, 16)],
    "micro batch": [("micro", n) for n in (2, 3, 4, 5)],
    "strategy": [("strategy", s) for s in ("full_shard", "zero2", "zero1", "ddp")],
    "tp": [("strategy", "full_shard"), ("micro", 4), ("gpus_per_node", 8), ("tp", 2), ("tp", 4)],
    "pp": [("tp", 1), ("pp", 2), ("pp", 4)],
}


def main() -> int:
    """Move and print."""
    explorer = meshplan.explore(_PLAN, config=_CONFIG)
    if explorer.widget is None:
        print("pip install ipywidgets")
        return 2
    ours: list[float] = []
    for name, moves in _MOVES.items():
        took = []
        for control, value in moves:
            began = time.process_time()
            explorer.controls[control].value = value
            if control == moves[-1][0]:
                took.append((time.process_time() - began) * 1e3)
            assert explorer.scene.is_possible, explorer.scene
        ours += took if name not in ("tp", "pp") else []
        print(f"{name:14} median {statistics.median(took):4.0f} ms, most {max(took):4.0f} ms")
    print(
        f"{'all but tp, pp':14} median {statistics.median(ours):4.0f} ms, most {max(ours):4.0f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
