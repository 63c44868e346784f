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
    by_inode = {}
    try:
        descriptors = os.listdir(f"/proc/{process}/fd")
    except OSError:
        return {}
    for name in descriptors:
        try:
            target = os.readlink(f"/proc/{process}/fd/{name}")
        except OSError:
            continue  # Closed meanwhile.
        if target.startswith("socket:["):
            by_inode[target[8:-1]] = int(name)
    out: dict[int, End] = {}
    for path in _TABLES:
        try:
            with open(path) as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _ESTABLISHED and words[9] in by_inode:
                out[by_inode[words[9]]] = (words[1], words[2])
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
class Traffic:
    """The connections of this process to other ranks.

    Attributes:
        moved_bytes: What has ever gone through them, either way.
        waiting_bytes: What was sent and has not been taken at the other end, or here.
        num: How many there are.
    """

    moved_bytes: int
    waiting_bytes: int
    num: int


def traffic(tables: Iterable[str], spared_port: int | None = None) -> Traffic | None:
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
    return Traffic(moved, waiting, num) if num else None


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
