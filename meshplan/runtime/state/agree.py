"""Agreement between ranks about work on files: it succeeds on all of them, or fails on all.

A full disk or a damaged file is found by one rank only. Its error is raised on every rank, and the
process group stays usable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshplan.errors import MeshplanError, MissingStateError, Origin, Problem, StateError
from meshplan.runtime.train.fast_dev_run import note_folder, num_dev_batches, own_folder
from meshplan.runtime.watch.board import Board


def agree(
    board: Board,
    topic: str,
    own: Callable[[], Any],
    first: Callable[[list[Any]], Any] = lambda parts: None,
) -> Any:
    """Do a piece of work on every rank, then another on rank 0 with the results of all.

    Args:
        board: The messages between the ranks.
        topic: A name that this board has not used yet.
        own: The work of every rank. Returns what rank 0 needs to know, as JSON can express it.
        first: The work of rank 0, with the results of all ranks; it is skipped if any rank failed.

    Returns:
        The result of `first`, on every rank.

    Raises:
        MissingStateError: On every rank, if `first` raised it.
        StateError: On every rank, if the work of any rank failed.
    """
    board.post(_outcome(own), topic)
    if board.rank == 0:
        board.post(_outcome(lambda: first(_taken(board, topic))), f"{topic}-end")
    outcome = json.loads(board.take(f"{topic}-end", 0))
    if "problems" in outcome:
        kind = MissingStateError if outcome["is_missing"] else StateError
        raise kind(
            Problem(what, Origin(place) if place else None, fix)
            for what, place, fix in outcome["problems"]
        )
    return outcome["result"]


def agree_on_folder(board: Board, path: str | os.PathLike[str]) -> Path:
    """Return where all ranks write what the script wants at `path`.

    Raises:
        StateError: On every rank, if a fast development run cannot have a folder there.
    """
    if num_dev_batches() is None:
        return Path(path)
    made = agree(board, "folder", lambda: None, lambda parts: str(own_folder(path)))
    return note_folder(path, made)


def _taken(board: Board, topic: str) -> list[Any]:
    """Return the results of all ranks; raise the problems of those that failed."""
    outcomes = []
    for rank in range(board.size):
        outcomes.append(json.loads(board.take(topic, rank)))
        board.clear(topic, rank)
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        for problem in outcome.get("problems", ()):
            ranks.setdefault(tuple(problem), []).append(rank)
    if ranks:
        is_missing = all(outcome.get("is_missing", True) for outcome in outcomes)
        raise (MissingStateError if is_missing else StateError)(
            Problem(
                what if len(found) == board.size else f"rank {found[0]}: {what}",
                Origin(place) if place else None,
                fix,
            )
            for (what, place, fix), found in ranks.items()
        )
    return [outcome["result"] for outcome in outcomes]


def _outcome(work: Callable[[], Any]) -> str:
    """Return the result of `work`, or its problems, as JSON."""
    problems: list[Problem] = []
    is_missing = False
    try:
        return json.dumps({"result": work()})
    except MeshplanError as error:
        problems += error.problems
        is_missing = isinstance(error, MissingStateError)
    except OSError as error:
        reason = error.strerror or str(error)
        what = f"a file of the state cannot be read or written: {reason}"
        place = Origin(str(error.filename)) if error.filename else None
        fix = "make room there, or name a folder that all ranks can read and write"
        problems.append(Problem(what, place, fix))
    except Exception as error:  # Whatever it is, the other ranks must not wait in vain.
        problems.append(Problem(f"{type(error).__name__}: {error}"))
    texts = [(p.what, p.origin.file if p.origin else "", p.fix) for p in problems]
    return json.dumps({"problems": texts, "is_missing": is_missing})
