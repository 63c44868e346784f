"""Four ranks that share one device, beside one process: losses of three steps under each layout.

NCCL refuses two ranks on one GPU, so the ranks talk by gloo, which copies CUDA tensors through the
host, except those of stages of a pipeline: `_send_through_host` does it for them. Streams, events,
kernels and the allocator are the device's.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import traceback
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tests.gpu.plans import TP

WORLD: Final = 4
_STEPS: Final = 3
PLANS: Final[Mapping[str, Mapping[str, Any]]] = {
    "one process": {"mesh": {"dp_replicate": 1}, "strategy": "ddp"},
    "ddp": {"mesh": {"dp_replicate": 4}, "strategy": "ddp"},
    "zero1": {"mesh": {"dp_shard": 4}, "strategy": "zero1"},
    "zero2": {"mesh": {"dp_shard": 4}, "strategy": "zero2"},
    "full_shard": {"mesh": {"dp_shard": 4}},
    "full_shard, recomputed, accumulated, clipped": {
        "mesh": {"dp_shard": 4}, "activation_checkpointing": "full", "batch": {"accumulate": 2},
        "clip_grad_norm": 0.1},
    "full_shard, loss in 2 chunks": {"mesh": {"dp_shard": 4}, "loss_chunks": 2},
    "full_shard, parameters on the host": {"mesh": {"dp_shard": 4}, "offload": "params"},
    "hybrid_shard": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
    "tp": {"mesh": {"tp": 4}, "rules": TP},
    "tp x full_shard": {"mesh": {"dp_shard": 2, "tp": 2}, "rules": TP},
    "pp": {"mesh": {"pp": 4}, "pipeline": {"schedule": "1F1B", "microbatches": 4}},
    "pp x full_shard": {"mesh": {"pp": 2, "dp_shard": 2},
                        "pipeline": {"schedule": "GPipe", "microbatches": 2}},
    "cp x full_shard": {"mesh": {"dp_shard": 2, "cp": 2}},
}  # fmt: skip
"""The first is the reference."""


def losses(name: str, device: str, seconds: float) -> list[float] | str:
    """Train under a plan on as many ranks as it has; return rank 0's losses, or what went wrong."""
    from torch.distributed import TCPStore

    world = 1 if name == "one process" else WORLD
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(
            target=_rank, args=(rank, world, store.port, name, device, seconds, answers)
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < world:
            number, answer = answers.get(timeout=seconds)
            found[number] = answer
            if isinstance(answer, str):
                return answer
    except queue.Empty:
        return f"ranks {sorted(set(range(world)) - set(found))} did not answer in {seconds:.0f} s"
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return found[0]  # type: ignore[no-any-return]


def _rank(
    rank: int, world: int, port: int, name: str, device: str, seconds: float, answers: Any
) -> None:
    # What a rank waits for that will not answer goes to stderr.
    faulthandler.dump_traceback_later(max(1.0, seconds - 5), exit=False)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0",
                      GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")  # fmt: skip
    try:
        answers.put((rank, _train(rank, world, port, name, device)))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _send_through_host() -> None:
    """Let `batch_isend_irecv` copy tensors of the device through the host, which gloo does not."""
    import torch
    import torch.distributed as dist

    class Arriving(NamedTuple):
        work: Any
        host: torch.Tensor
        tensor: torch.Tensor

        def wait(self) -> None:
            self.work.wait()
            with torch.no_grad():
                self.tensor.copy_(self.host)

    def batch(ops: list[Any]) -> list[Any]:
        works: list[Any] = []
        for op in ops:
            if op.op is dist.isend:
                works.append(dist.isend(op.tensor.cpu(), op.peer, op.group))
            else:
                host = torch.empty_like(op.tensor, device="cpu")
                work = dist.irecv(host, op.peer, op.group)
                works.append(Arriving(work, host, op.tensor))
        return works

    dist.batch_isend_irecv = batch


def _train(rank: int, world: int, port: int, name: str, device: str) -> list[float]:
    import torch
    import torch.distributed as dist

    import meshplan
    from tests.gpu.models import MODELS

    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:gloo"
    store = dist.TCPStore("127.0.0.1", port)
    if device != "cpu":
        _send_through_host()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    given = MODELS["llama"]("tiny")
    torch.manual_seed(0)
    model = given.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        model.freqs_cis.copy_(torch.polar(torch.ones(32, 4), torch.rand(32, 4)))
    wrapped = meshplan.parallelize(model.to(device), {"version": 1, **PLANS[name]})
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (8, 32)).to(device)
    inputs = meshplan.local_batch(wrapped, tokens)
    targets = meshplan.local_batch(wrapped, tokens.roll(1, 1))
    return [
        meshplan.train_step(wrapped, optimizer, inputs, targets, given.loss) for _ in range(_STEPS)
    ]
