"""The torchrun command that starts the ranks of a plan, and its environment."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.spec.spec import Spec
from meshplan.spec.strategies import WorldSizeProblem, resolve_mesh

PORT: Final = 29400
"""Port of the rendezvous on the first node, which is also torchrun's default."""
GRACE_S: Final = 60
"""Seconds between SIGTERM and SIGKILL in which the ranks may save."""
FLIGHTS: Final = "nccl_trace_rank_"
"""Beginning of the names of the files that NCCL's flight recorder writes."""
_CALLS: Final = "2000"
"""Collectives that the flight recorder keeps; torch's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunJob:
    """A job for torchrun to start.

    Args:
        nodes: Number of nodes.
        ranks_per_node: Number of ranks of each node.
        script: The script and its arguments, or the module and its arguments.
        is_module: True if the script is a module, which `python -m` runs.
        host: The first node, where the nodes meet; "" if there is one node.
        port: Port on that node.
        run_id: Name of the job, equal on all nodes.
        node_rank: Number of this node; None lets torchrun number the nodes as they arrive.
        max_restarts: How many times all ranks are started again after one has failed.
        grace_s: Seconds between SIGTERM and SIGKILL in which the ranks may save.
        is_host: True if this node is known to be the first one; if not, torchrun finds it out, by
            the names of this machine.
        address: Address at which other nodes reach this one; "" lets torchrun take its name.
    """

    nodes: int
    ranks_per_node: int
    script: Sequence[str]
    is_module: bool = False
    host: str = ""
    port: int = PORT
    run_id: str = "meshplan"
    node_rank: int | None = None
    max_restarts: int = 0
    grace_s: int = GRACE_S
    is_host: bool = False
    address: str = ""

    def command(self, python: str = sys.executable) -> list[str]:
        """Return the command line of one node. It does not need torchrun on the PATH.

        >>> TorchrunJob(nodes=1, ranks_per_node=2, script=["train.py"]).command("python")[3:]
        ['--standalone', '--nnodes', '1', '--nproc-per-node', '2', 'train.py']
        """
        size = ["--nnodes", str(self.nodes), "--nproc-per-node", str(self.ranks_per_node)]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.host}:{self.port}"]
        if self.nodes == 1:
            flags = ["--standalone", *size]  # On a port that is free.
        elif self.node_rank is None:
            flags = [*size, *meeting, "--rdzv-id", self.run_id]
            flags += ["--rdzv-conf", "is_host=true"] * self.is_host
            flags += ["--local-addr", self.address] if self.address else []
        else:  # With c10d torchrun numbers the nodes itself, and ignores --node-rank.
            flags = [*size, "--node-rank", str(self.node_rank)]
            flags += ["--master-addr", self.host, "--master-port", str(self.port)]
        if self.max_restarts:
            flags += ["--max-restarts", str(self.max_restarts)]
        flags += ["-m"] * self.is_module
        return [python, "-m", "torch.distributed.run", *flags, *self.script]

    def environment(self, environ: Mapping[str, str], num_local_nodes: int = 1) -> dict[str, str]:
        """Return the environment of the ranks. What the user has set stays as it is.

        Args:
            environ: The environment of the user.
            num_local_nodes: Number of nodes of the job that this machine stands for.
        """
        cores = len(os.sched_getaffinity(0)) // (self.ranks_per_node * num_local_nodes)
        defaults = {
            **flight_recorder(environ),
            "OMP_NUM_THREADS": str(max(1, cores)),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.grace_s),
        }
        return {**defaults, **environ}


def own_address(host: str) -> str:
    """Return the address of this machine on the way to a host; "" if the host is not known.

    torchrun would publish the machine's name, whose address may be of another interface.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, PORT))  # Sends nothing, but chooses the interface.
            own = str(probe.getsockname()[0])
    except OSError:
        return ""
    # Debian gives a machine's own name an address of its loopback, at which no other node finds it.
    is_asked_for = host == "localhost" or host.startswith("127.")
    return "" if own.startswith("127.") and not is_asked_for else own


def serves_unasked(host: str, own: str) -> bool:
    """Return True if this node is the first one, but torchrun would not find that out.

    torchrun only looks up the addresses of the machine's own name. If no node serves the
    rendezvous, all of them wait for it.

    Args:
        host: The first node.
        own: The address of this machine on the way to it.
    """
    return (
        own in _addresses(host)
        and not own.startswith("127.")
        and own not in _addresses(socket.gethostname())
    )


def _addresses(name: str) -> list[str]:
    try:
        return socket.gethostbyname_ex(name)[2]
    except OSError:  # The name is not known.
        return []


def flight_recorder(environ: Mapping[str, str], folder: str = "") -> dict[str, str]:
    """Return the variables that turn on NCCL's flight recorder, without those that the user set.

    After a time-out of NCCL each rank then writes its last collectives to a file, which
    `torchfrtrace` reads. Older names of a variable, which torch reads too, count as set.

    Args:
        environ: The environment of the user.
        folder: Folder of the files; "" for the working directory.
    """
    # Source: torch 2.13, csrc/distributed/c10d/FlightRecorder.hpp and ProcessGroupNCCL.hpp. torch
    # warns about the older names.
    variables = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): _CALLS,
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): os.path.join(
            folder or os.getcwd(), FLIGHTS
        ),
    }
    return {
        names[0]: value
        for names, value in variables.items()
        if not any(name in environ for name in names)
    }


def job_size(
    spec: Spec | None, nodes: int | None = None, gpus_per_node: int | None = None
) -> tuple[int, int]:
    """Return (number of nodes, ranks of each): as stated, else the plan's hardware or its mesh.

    Args:
        spec: The plan; None if there is none.
        nodes: Number of nodes, if stated outside the plan.
        gpus_per_node: Number of ranks of each node, if stated outside the plan.

    Raises:
        SpecError: A number is not positive, or nothing states how many ranks there are.
        PlanError: The plan's mesh has another number of devices.
    """
    for flag, number in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if number is not None and number < 1:
            raise SpecError(Problem(f"{number} is not a number of at least 1", Origin(flag)))
    hardware = spec.hardware if spec is not None else None
    is_free = spec is not None and any(
        path == "strategy" or path.partition(".")[0] == "mesh" for path in spec.free_fields
    )
    if hardware is not None:
        nodes, gpus_per_node = nodes or hardware.nodes, gpus_per_node or hardware.gpus_per_node
    nodes = nodes or 1
    if gpus_per_node is None:
        if spec is None or is_free or spec.mesh is None:
            what = "nothing states how many ranks a node has"
            raise SpecError(Problem(what, None, "add --gpus-per-node 8, or hardware to the plan"))
        num_ranks = resolve_mesh(spec)[0].world_size
        if num_ranks % nodes:
            what = f"the {num_ranks} devices of the mesh cannot be split over {nodes} nodes"
            fix = f"state a divisor of {num_ranks}"
            raise PlanError(Problem(what, Origin("--nodes"), fix))
        return nodes, num_ranks // nodes
    if spec is not None and not is_free:
        _check_mesh(spec, nodes, gpus_per_node)
    return nodes, gpus_per_node


def _check_mesh(spec: Spec, nodes: int, gpus_per_node: int) -> None:
    """Raise PlanError if the plan's mesh has another number of devices than the job has ranks."""
    try:
        resolve_mesh(spec, nodes * gpus_per_node, gpus_per_node)
    except PlanError as error:
        for problem in error.problems:
            if isinstance(problem, WorldSizeProblem):
                what = f"{nodes} nodes x {gpus_per_node} ranks are {nodes * gpus_per_node}, but "
                what += f"the mesh has {problem.needed} devices"
                fix = f"state --nodes and --gpus-per-node of product {problem.needed}, or correct "
                fix += "mesh and hardware"
                raise PlanError(Problem(what, problem.origin, fix)) from None
        raise


def check_script(script: Sequence[str], is_module: bool) -> None:
    """Check that there is a script to start, before anything is started.

    Raises:
        SpecError: No script is named, or the file does not exist.
    """
    if not script:
        what = "launch needs the script to start"
        fix = "end the line with it and its arguments: meshplan launch -f plan.yaml train.py"
        raise SpecError(Problem(what, None, fix))
    if script[0].startswith("-"):
        fix = "write flags of launch before the script, and flags of the script behind it"
        raise SpecError(Problem(f"launch has no flag {script[0]}", None, fix))
    if not is_module and not Path(script[0]).is_file():
        what = "there is no such script"
        raise SpecError(Problem(what, Origin(script[0]), "name a file, or -m and a module"))
