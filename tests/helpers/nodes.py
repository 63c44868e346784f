"""Nodes of a cluster as network namespaces, with links of a stated bandwidth between and inside.

A holder process keeps the namespaces. It reads a pipe of this process and is process 1 of a process
namespace: when this process ends in whatever way, the pipe closes, the kernel kills all that was
started on the nodes, and with the last process the namespaces and their links are gone. Nothing of
the host's own network is touched, since all of it is made inside another namespace.

Delay is not set: it needs netem, which many kernels lack.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INTERFACE: Final = "eth0"
"""The interface of every node to the others."""
_TIMEOUT_S: Final = 20

_SETUP: Final = """
read -r pid rest < /proc/self/stat
# Ranks look each other up in /proc, which must be that of their process namespace.
mount -t proc proc /proc
mount -t tmpfs none /run
ip netns add switch
ip -n switch link add bridge type bridge
ip -n switch link set bridge up
for ((node = 0; node < {count}; node++)); do
    ip netns add node$node
    ip -n node$node link add eth0 type veth peer name port$node netns switch
    ip -n switch link set port$node master bridge up
    ip -n node$node addr add 10.77.0.$((node + 1))/24 dev eth0
    ip -n node$node link set eth0 up
    # As on eth0, packets of 1500 bytes: larger ones would leave the link in bursts.
    ip -n node$node link set lo mtu 1500 up
done
echo $pid
exec cat
"""
_UNSHARE: Final = (
    "unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Nodes:
    """Running nodes.

    Args:
        count: Number of nodes.
        holder: Process identifier of the process that keeps the namespaces.
    """

    count: int
    holder: int

    @property
    def host(self) -> str:
        """The address of the first node."""
        return "10.77.0.1"

    def enter(self, node: int) -> tuple[str, ...]:
        """Return the words before a command that run it on a node."""
        return (
            "nsenter", f"--target={self.holder}", "--user", "--preserve-credentials", "--net",
            "--mount", "--pid", "ip", "netns", "exec", f"node{node}",
        )  # fmt: skip


def limit(interface: str, rate: str | None) -> tuple[str, ...]:
    """Return the command that limits what leaves through an interface of the node that runs it.

    Args:
        interface: `INTERFACE`, or "lo" for what the ranks of the node send to each other.
        rate: Bits per second, as tc writes them ("100mbit"); None removes the limit.
    """
    if rate is None:
        return ("tc", "qdisc", "del", "dev", interface, "root")
    # A small bucket: what it holds is sent at once after a pause, which would look faster.
    return ("tc", "qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate,
            "burst", "32kb", "limit", "4mb")  # fmt: skip


@contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """Make nodes that reach each other only through a switch; take them down at the end.

    Raises:
        OSError: Namespaces are not allowed here; the message has the reason.
    """
    script = _SETUP.replace("{count}", str(count))
    with subprocess.Popen(
        [*_UNSHARE, "bash", "-ec", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            pid = process.stdout.readline().strip()
            if not pid:
                raise OSError(f"network namespaces are not allowed: {process.stderr.read()[-300:]}")
            yield Nodes(count, int(pid))
        finally:
            process.stdin.close()
            process.kill()  # With it, `--kill-child` ends process 1, and so all that runs there.


def why_none(*, limits: bool = False) -> str:
    """Return why no nodes can be made here; "" if they can.

    Args:
        limits: If True, links also need a bandwidth.
    """
    if missing := [word for word in ("unshare", "nsenter", "ip", "tc") if not shutil.which(word)]:
        return f"no nodes as network namespaces: {', '.join(missing)} not found"
    try:
        with nodes(1) as made:
            command = [*made.enter(0), *(limit("lo", "100mbit") if limits else ("true",))]
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        return f"no nodes as network namespaces: {error.stderr.decode()[-300:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""


def sent(interface: str) -> tuple[int, int]:
    """Return (bytes, packets) that an interface of this process's node has sent so far."""
    rows = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts: Sequence[str] = next(
        row.partition(":")[2].split() for row in rows if row.split(":")[0].strip() == interface
    )
    return int(counts[8]), int(counts[9])
