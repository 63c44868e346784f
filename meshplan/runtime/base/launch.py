"""The command that starts this script on another number of ranks, for messages."""

from __future__ import annotations

import os
import shlex
import sys

import torch

from meshplan.spec.spec import HardwareSpec


def torchrun_line(num_ranks: int, hardware: HardwareSpec | None = None) -> str:
    """Return the torchrun command that starts this script with its arguments on so many ranks.

    Args:
        num_ranks: Number of ranks that the plan needs.
        hardware: The plan's hardware, whose nodes are taken if they have `num_ranks` devices. If
            not, the ranks are put on as few nodes as their GPUs allow.

    >>> torchrun_line(2).split()[:3]
    ['torchrun', '--nproc-per-node', '2']
    """
    nodes = _num_nodes(num_ranks, hardware)
    flags = ["--nproc-per-node", str(num_ranks // nodes)]
    if nodes > 1:
        # Every node runs the same line, so they meet at the first one.
        flags = ["--nnodes", str(nodes), *flags, "--rdzv-backend", "c10d"]
        flags += ["--rdzv-endpoint", "HOST:29400"]
    line = shlex.join(["torchrun", *flags, *_script()])
    return f"{line} on each of the {nodes} nodes, HOST being the first" if nodes > 1 else line


def _num_nodes(num_ranks: int, hardware: HardwareSpec | None) -> int:
    """Return the number of nodes for the ranks, a divisor of their number."""
    if hardware is not None and hardware.world_size == num_ranks:
        return hardware.nodes
    # On a CPU every number of ranks is tried on one machine.
    per_node = torch.cuda.device_count() or num_ranks
    if "WORLD_SIZE" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
        if nodes > 1 and num_ranks % nodes == 0 and num_ranks // nodes <= per_node:
            return nodes
    return num_ranks // per_node if num_ranks > per_node and not num_ranks % per_node else 1


def _script() -> list[str]:
    """Return the script of this process, or `-m` and its module, with its arguments."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    if module is not None:
        return ["-m", module.name.removesuffix(".__main__"), *sys.argv[1:]]
    return [sys.argv[0] or "train.py", *sys.argv[1:]]
