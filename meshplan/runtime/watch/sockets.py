"""The TCP connections between the ranks of this job, and how to end them.

gloo has no way to give up a collective: a rank that waits for another one waits until the
time-out. It stops at once when a connection is closed, so that is what a failing rank does. Only
connections whose both ends belong to ranks are touched: each rank publishes its ends, and what
nobody else publishes is somebody else's.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

if sys.platform != "win32":
    import fcntl
    import termios

_TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED: Final = "01"

End = tuple[str, str]
"""(local, remote) address of a connection, as the kernel spells them."""


def own_ends(process: int | str = "self") -> dict[int, End]:
    """Every established TCP connection of a process, this one or another, by file descriptor.

    Empty where the kernel has no /proc, so that nothing can be told apart.
    """
    connections = _connections()
    return {
        descriptor: connections[inode]
        for inode, descriptor in _sockets(process).items()
        if inode in connections
    }


def processes_at(port: int) -> list[int]:
    """The other processes of this machine that hold the far end of a connection to this port.

    One that was forked holds what its parent held. Empty where the kernel tells of none.
    """
    connections = _connections()
    own = _sockets("self").keys() & connections
    far = {tuple(reversed(end)) for end in map(connections.__getitem__, own) if _is_to(end, port)}
    inodes = {inode for inode, end in connections.items() if end in far}
    others = (int(name) for name in _listed("/proc") if name.isdigit() and int(name) != os.getpid())
    return [process for process in others if inodes and inodes & _sockets(process).keys()]


def _is_to(end: End, port: int) -> bool:
    return end[1].endswith(f":{port:04X}")


def _listed(folder: str) -> list[str]:
    """The names in a folder of /proc; none where it is another user's, or gone."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _sockets(process: int | str) -> dict[str, int]:
    """The sockets of a process by inode, with one descriptor of each."""
    out = {}
    for name in _listed(f"/proc/{process}/fd"):
        try:
            target = os.readlink(f"/proc/{process}/fd/{name}")
        except OSError:
            continue  # Closed meanwhile.
        if target.startswith("socket:["):
            out[target[8:-1]] = int(name)
    return out


def _connections() -> dict[str, End]:
    """Every established TCP connection that this process can see, by inode."""
    out: dict[str, End] = {}
    for path in _TABLES:
        try:
            with open(path) as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _ESTABLISHED:
                out[words[9]] = (words[1], words[2])
    return out


def spell(ends: Iterable[End]) -> str:
    """The ends as text that other ranks read."""
    return json.dumps(sorted(ends))


def close_between_ranks(tables: Iterable[str], spared_port: int | None = None) -> int:
    """Shut down every connection of this process whose other end one of the tables lists.

    The descriptors stay open: they are gloo's, which closes them when it notices.

    Args:
        tables: What the other ranks published, as `spell` made it.
        spared_port: Connections to this port stay: the store's, which a rank may serve.

    Returns:
        How many connections were ended.
    """
    closed = 0
    for connection in _between_ranks(tables, spared_port):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # The other end was first.
        closed += 1
    return closed


def is_cut_off(own: str, other: str, spared_port: int | None = None) -> bool:
    """Whether every connection that this rank once had with another one has ended.

    Args:
        own: What this rank published, as `spell` made it.
        other: What the other rank published.
        spared_port: Connections to this port do not count.
    """
    spared = f":{spared_port:04X}" if spared_port else "-"
    theirs = {(remote, local) for local, remote in json.loads(other)}
    mine = {(local, remote) for local, remote in json.loads(own)}
    once = {end for end in mine & theirs if not any(each.endswith(spared) for each in end)}
    return bool(once) and not once & set(own_ends().values())


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of this process to other ranks.

    Attributes:
        moved_bytes: What has ever gone through them, either way.
        waiting_bytes: What was sent and has not been taken at the other end, or here.
        num: How many there are.
    """

    moved_bytes: int
    waiting_bytes: int
    num: int


def traffic(tables: Iterable[str], spared_port: int | None = None) -> Connections | None:
    """Count what goes between the ranks; None where the kernel does not tell.

    Args:
        tables: What the other ranks published, as `spell` made it.
        spared_port: Connections to this port do not count.
    """
    moved = waiting = num = 0
    if sys.platform == "win32":
        return None
    for connection in _between_ranks(tables, spared_port):
        try:
            told = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
            moved += sum(_MOVED.unpack_from(told, _MOVED_OFFSET))
            for request in (termios.TIOCOUTQ, termios.FIONREAD):
                waiting += int.from_bytes(fcntl.ioctl(connection, request, bytes(4)), sys.byteorder)
        except (OSError, struct.error):
            return None
        num += 1
    return Connections(moved, waiting, num) if num else None


_TCP_INFO: Final = getattr(socket, "TCP_INFO", 11)
_INFO_BYTES: Final = 192
_MOVED: Final = struct.Struct("QQ")
_MOVED_OFFSET: Final = 120
"""Where `struct tcp_info` of linux/tcp.h has tcpi_bytes_acked and tcpi_bytes_received."""


def _between_ranks(tables: Iterable[str], spared_port: int | None) -> Iterator[socket.socket]:
    """A duplicate of each connection of this process whose other end one of the tables lists."""
    others = {(remote, local) for text in tables for local, remote in json.loads(text)}
    spared = f":{spared_port:04X}" if spared_port else None
    for descriptor, end in own_ends().items():
        if end not in others or (spared and any(each.endswith(spared) for each in end)):
            continue
        try:
            duplicate = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue  # gloo has closed it meanwhile.
        with duplicate:
            yield duplicate
