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
from collections.abc import Iterable
from typing import Final

_TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED: Final = "01"

End = tuple[str, str]
"""(local, remote) address of a connection, as the kernel spells them."""


def own_ends() -> dict[int, End]:
    """Every established TCP connection of this process, by file descriptor.

    Empty where the kernel has no /proc, so that nothing can be told apart.
    """
    by_inode = {}
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for name in descriptors:
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
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
    others = {(remote, local) for text in tables for local, remote in json.loads(text)}
    spared = f":{spared_port:04X}" if spared_port else None
    closed = 0
    for descriptor, end in own_ends().items():
        if end not in others or (spared and any(each.endswith(spared) for each in end)):
            continue
        try:
            duplicate = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue  # gloo has closed it meanwhile.
        with duplicate:
            try:
                duplicate.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # The other end was first.
            closed += 1
    return closed
