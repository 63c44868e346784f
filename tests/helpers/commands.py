"""Commands as a user runs them: in processes of their own, in a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def output_of(*command: object, folder: Path, timeout: float = 300) -> tuple[int, str, str]:
    """Run `python -m` with a command; return its exit code, output and errors.

    Args:
        command: A module and its arguments.
        folder: The folder in which it runs.
        timeout: Seconds after which it is killed and `subprocess.TimeoutExpired` raised.
    """
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                    "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env=environment, capture_output=True, text=True, timeout=timeout, check=False,
        cwd=folder,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr
