"""A machine that no table has, from calibration to a step: told beside measured on 2 gloo ranks.

    python -m tests.bench.own_machine [--steps 12]

The ranks time what they reach and send, which becomes a profile; six plans for
`hardware: {memory: 16GB}` are priced by it, and trained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

CONFIG: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 384,
    "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 6, "vocab_size": 4096, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
SAMPLES, LENGTH = 16, 128
PLANS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ddp": {"mesh": {"dp_replicate": 2}, "strategy": "ddp"},
    "full_shard": {"mesh": {"dp_shard": 2}, "strategy": "full_shard"},
    "full_shard, recomputed": {"mesh": {"dp_shard": 2}, "strategy": "full_shard",
                               "activation_checkpointing": "full"},
    "zero2": {"mesh": {"dp_shard": 2}, "strategy": "zero2"},
    "pp, 2 microbatches": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}},
    "pp, 8 microbatches": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 8}},
}  # fmt: skip


def plan_of(words: Mapping[str, Any]) -> dict[str, Any]:
    """A plan for two ranks of this machine."""
    ranks = 1 if "pp" in words["mesh"] else 2
    return {
        "version": 1, "hardware": {"nodes": 1, "gpus_per_node": 2, "memory": "16GB"},
        "precision": "32-true", "activation_checkpointing": "none", "offload": "none",
        "batch": {"micro": SAMPLES // ranks, "accumulate": 1, "seq_len": LENGTH}, **words,
    }  # fmt: skip


def calibrated(path: str) -> None:
    """Time this rank among the others; the first one writes the profile."""
    import torch.distributed as dist

    from meshplan.cost.calibration import profile_from, write_profile
    from meshplan.runtime.calibrate import measure

    found = profile_from(measure())
    if dist.get_rank() == 0:
        write_profile(found, Path(path))


def trained(plan: dict[str, Any], steps: int) -> float:
    """The median of the seconds of this rank's steps, the first two left out."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, LlamaConfig

    import meshplan

    config = LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    config.use_cache = False
    model = meshplan.parallelize(AutoModelForCausalLM.from_config(config).train(), plan)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = meshplan.local_batch(model, torch.randint(3, 4096, (SAMPLES, LENGTH)))

    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    found = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        meshplan.train_step(model, optimizer, {"input_ids": tokens}, tokens, loss)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:])


def main() -> int:
    """Calibrate, tell, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    from meshplan.api.planning import search_plan
    from meshplan.cost.calibration import read_profile
    from meshplan.render.profile import profile_to_text
    from tests.helpers.pool import Pool

    pool = Pool(2)
    with tempfile.TemporaryDirectory() as folder:
        profile, config = Path(folder) / "mine.json", Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        try:
            pool.run(calibrated, str(profile), timeout=600)
            print(*profile_to_text(read_profile(profile)), sep="\n")
            print(f"\n{'plan':24} {'told':>8} {'measured':>9} {'off':>6}")
            for name, words in PLANS.items():
                plan = plan_of(words)
                decision = search_plan(plan, config=config, profile=profile)
                assert decision.chosen is not None
                told = decision.chosen.seconds
                ran = max(pool.run(trained, plan, args.steps, timeout=600))
                print(f"{name:24} {told:7.3f}s {ran:8.3f}s {told / ran - 1:+6.0%}", flush=True)
        finally:
            pool.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
