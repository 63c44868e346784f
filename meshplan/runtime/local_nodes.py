"""The environments of several nodes of a job that this one machine stands for."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import torch

from meshplan.errors import Origin, Problem, SpecError


def environments_of_nodes(
    environment: Mapping[str, str], nodes: int, ranks_per_node: int
) -> list[dict[str, str]]:
    """Return the environment of each node: GPUs of its own if there are enough, else the CPU.

    Raises:
        SpecError: The machine has GPUs, but too few for all nodes.
    """
    shared = dict(environment)
    num_gpus, needed = torch.cuda.device_count(), nodes * ranks_per_node
    if not num_gpus:
        # gloo would look for the address of this machine's name, which may be of no interface.
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
        shared.setdefault("GLOO_SOCKET_IFNAME", loopback)
        return [shared] * nodes
    if num_gpus < needed:
        what = f"{nodes} nodes x {ranks_per_node} ranks need {needed} GPUs, and {num_gpus} are seen"
        fix = "set CUDA_VISIBLE_DEVICES= to try the job on CPUs"
        raise SpecError(Problem(what, Origin("--local"), fix))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = seen.split(",") if seen else [str(index) for index in range(num_gpus)]
    return [
        shared | {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + ranks_per_node])}
        for first in range(0, needed, ranks_per_node)
    ]
