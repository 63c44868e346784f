"""How much memory does a rank take to load a checkpoint of Hugging Face into a model from meta?

    python -m tests.bench.pretrained_peak [--params 1e9] [--ranks 8] [--folder DIR]

A decoder of transformers is wrapped from meta under full_shard, saved by `save_pretrained`, and
loaded into another one. Told is the most anonymous memory of a rank (pages of mapped files are the
system's) beyond that before `parallelize`, beside its shard and the largest tensor.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import meshplan
from meshplan.runtime.base.mesh import local_of
from tests.helpers.pool import Pool


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell RssAnon")


@contextmanager
def most_bytes() -> Iterator[list[int]]:
    """The most anonymous memory beyond that at the start, looked at every five milliseconds."""
    before, most, is_over = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.005):
            most[0] = max(most[0], anonymous_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


def build(params: float) -> torch.nn.Module:
    """A Llama of about so many parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 64 * round((params / 180) ** 0.5 / 64)  # 14 layers of 12 w^2, and the tokens' table.
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=14, intermediate_size=8 * width // 3,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, vocab_size=12 * width,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


PLAN = {"version": 1, "strategy": "full_shard"}


def write(params: float, folder: Path) -> None:
    meshplan.save_pretrained(meshplan.parallelize(build(params), PLAN), folder)


def measure(params: float, folder: Path) -> tuple[int, int, int, int, int]:
    """Return parameters, bytes of the largest tensor and of this rank's shard, and two peaks."""
    with most_bytes() as wrapping:
        model = meshplan.parallelize(build(params), PLAN)
        dist.barrier()
    with most_bytes() as loading:
        meshplan.load_pretrained(model, folder)
        dist.barrier()
    own = sum(local_of(p).numel() * 4 for p in model.parameters())
    sizes = [p.numel() for p in model.parameters()]
    return sum(sizes), max(sizes) * 4, own, wrapping[0], own + loading[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--params", type=float, default=1e9)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where to write; the default is /tmp")
    asked = parser.parse_args()
    path = Path(tempfile.mkdtemp(dir=asked.folder))
    try:
        for work in (write, measure):  # Each in fresh processes.
            pool = Pool(asked.ranks)
            found = pool.run(work, asked.params, path / "hf", timeout=900.0)
            pool.close()
    finally:
        shutil.rmtree(path)
    count, largest, *_ = found[0]
    print(f"{count:,} parameters, largest tensor {largest / 2**20:.0f} MiB, {asked.ranks} ranks")
    for rank, (_, _, own, wrapping, loading) in enumerate(found):
        limit = 1.3 * own + largest
        print(
            f"rank {rank}: shard {own / 2**20:.0f} MiB, parallelize {wrapping / own:.2f} and "
            f"load_pretrained {loading / own:.2f} of it ({wrapping / limit:.2f} and "
            f"{loading / limit:.2f} of 1.3 shards and the largest tensor)"
        )


if __name__ == "__main__":
    main()
