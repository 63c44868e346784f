"""TCP connections between the ranks of this job, and a function to close them.

gloo cannot abort a collective: a rank that waits for another rank waits until the time-out. But its
collective raises at once if a connection is closed, so a failing rank closes its connections. Only
connections between two ranks are closed. Each rank publishes its ends of connections; a connection
that no other rank has published is not one between ranks.
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
"""Files of the kernel that list TCP connections, one per line."""
_ESTABLISHED: Final = "01"
"""The state of an open connection in these files."""

End = tuple[str, str]
"""(Local, remote) address of a connection, each as "<hex address>:<hex port>"."""


def own_ends(process: int | str = "self") -> dict[int, End]:
    """Return every established TCP connection of a process, by file descriptor; {} without /proc.

    Args:
        process: Id of a process on this machine, or "self".
    """
    connections = _connections()
    return {
        descriptor: connections[inode]
        for inode, descriptor in _sockets(process).items()
        if inode in connections
    }


def processes_at(port: int) -> list[int]:
    """Return ids of the processes on this machine to which this process is connected at a port.

    They include children of such a process, which inherit its connections. The result is [] without
    /proc.
    """
    connections = _connections()
    own = _sockets("self").keys() & connections
    far = {tuple(reversed(end)) for end in map(connections.__getitem__, own) if _is_to(end, port)}
    inodes = {inode for inode, end in connections.items() if end in far}
    others = (int(name) for name in _listed("/proc") if name.isdigit() and int(name) != os.getpid())
    return [process for process in others if inodes and inodes & _sockets(process).keys()]


def _is_to(end: End, port: int) -> bool:
    """Return True if the remote address of a connection has this port."""
    return end[1].endswith(f":{port:04X}")


def _listed(folder: str) -> list[str]:
    """Return the names in a folder of /proc; [] if it is not readable or gone."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _sockets(process: int | str) -> dict[str, int]:
    """Return a file descriptor of each socket of a process, by the socket's inode."""
    out = {}
    for name in _listed(f"/proc/{process}/fd"):
        try:
            target = os.readlink(f"/proc/{process}/fd/{name}")
        except OSError:
            continue  # Closed in the meantime.
        if target.startswith("socket:["):
            out[target[8:-1]] = int(name)
    return out


def _connections() -> dict[str, End]:
    """Return every established TCP connection on this machine, by inode."""
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
    """Return a rank's ends of connections as JSON text for other ranks."""
    return json.dumps(sorted(ends))


def close_between_ranks(tables: Iterable[str], excluded_port: int | None = None) -> int:
    """Shut down every connection of this process whose other end is listed in one of the tables.

    The file descriptors stay open: they belong to gloo, which closes them after its error.

    Args:
        tables: Connections that each of the other ranks published, in the form of `spell`.
        excluded_port: Port whose connections stay open, that of the store.

    Returns:
        The number of connections shut down.
    """
    closed = 0
    for connection in _between_ranks(tables, excluded_port):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # The other end has closed it already.
        closed += 1
    return closed


def is_cut_off(own: str, other: str, excluded_port: int | None = None) -> bool:
    """Return True if this rank had connections to another rank and all of them have ended.

    Args:
        own: Connections that this rank published, in the form of `spell`.
        other: Connections that the other rank published, in the same form.
        excluded_port: Port whose connections do not count, that of the store.
    """
    excluded = f":{excluded_port:04X}" if excluded_port else "-"
    theirs = {(remote, local) for local, remote in json.loads(other)}
    mine = {(local, remote) for local, remote in json.loads(own)}
    once = {end for end in mine & theirs if not any(each.endswith(excluded) for each in end)}
    return bool(once) and not once & set(own_ends().values())


@dataclass(frozen=True, slots=True)
class Connections:
    """Totals over the connections of this process to other ranks.

    Attributes:
        moved_bytes: Bytes transferred since the connections were opened, in both directions.
        waiting_bytes: Bytes in buffers of this machine's kernel: sent but not acknowledged, or
            received but not read.
        num: Number of connections.
    """

    moved_bytes: int
    waiting_bytes: int
    num: int


def traffic(tables: Iterable[str], excluded_port: int | None = None) -> Connections | None:
    """Measure the traffic between this process and other ranks.

    Args:
        tables: Connections that each of the other ranks published, in the form of `spell`.
        excluded_port: Port whose connections do not count, that of the store.

    Returns:
        The totals; None if there is no connection or the kernel does not report the numbers.
    """
    moved = waiting = num = 0
    if sys.platform == "win32":
        return None
    for connection in _between_ranks(tables, excluded_port):
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
            moved += sum(_MOVED.unpack_from(info, _MOVED_OFFSET))
            for request in (termios.TIOCOUTQ, termios.FIONREAD):
                waiting += int.from_bytes(fcntl.ioctl(connection, request, bytes(4)), sys.byteorder)
        except (OSError, struct.error):
            return None
        num += 1
    return Connections(moved, waiting, num) if num else None


_TCP_INFO: Final = getattr(socket, "TCP_INFO", 11)
_INFO_BYTES: Final = 192
"""Bytes of `struct tcp_info` to ask the kernel for."""
_MOVED: Final = struct.Struct("QQ")
_MOVED_OFFSET: Final = 120
"""Offset of tcpi_bytes_acked and tcpi_bytes_received in `struct tcp_info` of linux/tcp.h."""


def _between_ranks(tables: Iterable[str], excluded_port: int | None) -> Iterator[socket.socket]:
    """Yield each connection of this process whose other end a table lists, as a new socket."""
    others = {(remote, local) for text in tables for local, remote in json.loads(text)}
    excluded = f":{excluded_port:04X}" if excluded_port else None
    for descriptor, end in own_ends().items():
        if end not in others or (excluded and any(each.endswith(excluded) for each in end)):
            continue
        try:
            duplicate = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue  # gloo has closed it in the meantime.
        with duplicate:
            yield duplicate
