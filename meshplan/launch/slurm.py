"""Scripts for `sbatch`."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import check_writable, write_bytes
from meshplan.launch.command import TorchrunJob, flight_recorder

_EXIT_S: Final = 30
"""Seconds between the last SIGKILL and the end of the job."""
_HOST: Final = "FIRST_NODE"
_MEETING: Final = f"""\
    read -r {_HOST} < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
"""

_SCRIPT: Final = """\
#!/bin/bash
# {nodes} x {ranks} GPUs. Submit it in one of two forms, after adding what your cluster asks for,
# such as #SBATCH --account, --partition and --time:
#   sbatch {name}          a torchrun on each node, which can start its ranks again
#   sbatch {name} tasks    a SLURM task for each GPU, without torchrun
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --gpus-per-node={ranks}
#SBATCH --exclusive
#SBATCH --open-mode=append
# The ranks get SIGTERM {signal_s} s before the time limit: meshplan.stop_requested() is then True.
#SBATCH --signal=TERM@{signal_s}
set -euo pipefail
cd {folder}
{exports}

case "${{1:-torchrun}}" in
torchrun)
{meeting}    srun --ntasks-per-node=1 --ntasks={nodes} --cpu-bind=none --kill-on-bad-exit=1 \\
        {torchrun}
    ;;
tasks)
    # parallelize reads rank, ranks and the first node from SLURM's variables.
    srun --ntasks-per-node={ranks} --ntasks={world} --distribution=block \\
        --cpu-bind=none --kill-on-bad-exit=1 \\
        {task}
    ;;
*)
    echo "$0: the form is torchrun or tasks, not $1" >&2
    exit 2
    ;;
esac
"""


def slurm_script(job: TorchrunJob, name: str, python: str) -> str:
    """Return a script for sbatch that starts the ranks in either of two forms.

    Args:
        job: The job; its host is taken from SLURM.
        name: Name of the script, for its comments.
        python: The Python that runs on the nodes.
    """
    exports = {
        **flight_recorder({}, "$PWD"),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.grace_s),
        "OMP_NUM_THREADS": "1",
    }
    torchrun = replace(job, host=_HOST, run_id=_HOST, node_rank=None).command(python)
    line = shlex.join(torchrun)
    if job.nodes > 1:
        line = line.replace(f"{_HOST}:", f'"${_HOST}":').replace(
            f"--rdzv-id {_HOST}", '--rdzv-id "$SLURM_JOB_ID"'
        )
    task = [python, "-u", *["-m"] * job.is_module, *job.script]
    return _SCRIPT.format(
        nodes=job.nodes, ranks=job.ranks_per_node, world=job.nodes * job.ranks_per_node,
        name=shlex.quote(name), job=shlex.quote(Path(job.script[0]).stem),
        meeting=_MEETING if job.nodes > 1 else "",
        signal_s=job.grace_s + _EXIT_S, folder=shlex.quote(os.getcwd()), torchrun=line,
        task=shlex.join(task),
        exports="\n".join(f'export {key}="${{{key}:-{text}}}"' for key, text in exports.items()),
    )  # fmt: skip


def check_new(path: str | os.PathLike[str]) -> None:
    """Check that a script can be written to a path where nothing is.

    Raises:
        SpecError: The file exists already, or its folder does not.
    """
    check_writable(path, "the script")
    if os.path.lexists(path):
        what = "this file exists already, and launch replaces nothing"
        raise SpecError(Problem(what, Origin(os.fspath(path)), "name another file: --slurm new.sh"))


def write_slurm_script(path: str | os.PathLike[str], text: str) -> None:
    """Write a script for sbatch to a file.

    Raises:
        SpecError: The file cannot be written.
    """
    write_bytes(path, text.encode(), "the script")
