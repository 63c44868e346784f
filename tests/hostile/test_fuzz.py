"""Files changed at random: every one is answered, with 0, 1 or 2, and soon.

    MESHPLAN_FUZZ=200000 [MESHPLAN_FUZZ_SEED=1] python -m pytest -m wide tests/hostile/test_fuzz.py

Half of the changes are of bytes, half put another value where one stood. What reaches lines that
no input before it reached is kept, and changed further; one input in four is watched for that,
since watching takes longer than the answer. Which seeded bug would this catch? A key
that is read without a look at its type, a size without a bound of time or memory.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import yaml

import meshplan
from meshplan.cli.app import main
from meshplan.planner.lock.lock import _hash_of, lock_path
from tests.cost.test_calibrate import MADE
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

ROUNDS = int(os.environ.get("MESHPLAN_FUZZ", "0"))
SEED = int(os.environ.get("MESHPLAN_FUZZ_SEED", "1"))
WATCHED = 4  # one input in so many is watched for new lines
SLOWEST_S = 10.0
MOST_BYTES = 12 << 30  # of addresses beyond what the process has; torch maps some, and writes few
OFTEN = 200  # calls of a function after which its lines are no longer looked at
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 10**9, 10**30, -(10**30), 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "auto", "no", "3e9", "80GiB", "\x1b[31m", "\u202e", "a" * 5000, "**",
    "{0..9}", "/(a+)+/", "../../etc", "/dev/zero", "pkg.mod:fn", [], {}, [[]], [None], {"": ""},
    {"a": {"b": [1, 2]}}, [1] * 300, "S(0)", "colwise", "full", "2 in dp_shard",
)  # fmt: skip
BITS = (b"", b"\0", b"\xff", b"\t", b": ", b"- ", b"{", b"}", b"[", b"]", b"&a ", b"*a", b"!!set ",
        b"<<: ", b"'", b'"', b"#", b"\n", b"\r", b"---\n", b"99999999999999999999", b"-", b"e400",
        b"\xe2\x80\xae", b"\x1b")  # fmt: skip
OWN = str(Path(meshplan.__file__).parent)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in inside:
        yield from paths_of(inner, (*path, key))


def changed(rng: random.Random, data: bytes, kind: str) -> bytes:
    if rng.random() < 0.5:
        content = _parsed(data)
        if content is not None:
            return _other_value(rng, content, kind)
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randint(0, len(data)) for _ in range(2))
        end = min(end, at + rng.randint(0, 20)) if rng.random() < 0.9 else end
        data = data[:at] + rng.choice(BITS) * rng.choice((1, 1, 1, 2, 50)) + data[end:]
    return data


def _parsed(data: bytes) -> Any:
    try:
        content = json.loads(data)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _other_value(rng: random.Random, content: Any, kind: str) -> bytes:
    for _ in range(rng.randint(1, 2)):
        path = rng.choice(list(paths_of(content)))
        if not path:
            content[rng.choice(("x", "version", "rules", "model_type"))] = deepcopy(rng.choice(ODD))
            continue
        where = content
        for key in path[:-1]:
            where = where[key]
        if rng.random() < 0.15 and isinstance(where, dict):
            del where[path[-1]]
        else:
            where[path[-1]] = deepcopy(rng.choice(ODD))
    if kind == "lock" and rng.random() < 0.9 and "hash" in content:
        content["hash"] = _hash_of(content)
    return json.dumps(content).encode(errors="surrogatepass")


class Lines:
    """Lines of the package that were reached, by any input and by the one that runs."""

    def __init__(self) -> None:
        self.known: set[tuple[str, int]] = set()
        self.has_new = False
        self._calls: Counter[CodeType] = Counter()

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "call":
            code = frame.f_code
            self._calls[code] += 1
            if self._calls[code] > OFTEN or not code.co_filename.startswith(OWN):
                return None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            if line not in self.known:
                self.known.add(line)
                self.has_new = True
        return self.trace


def _cpu_s() -> float:
    """Seconds of processors that this process and those that it has waited for have used."""
    return sum(os.times()[:4])


def _queued_s() -> float:
    """Seconds in which this thread could have run, and other work had the processors."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Inside, who asks for too much gets a MemoryError, which no verb expects."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def seeds(job: Any) -> dict[str, tuple[Path, list[bytes], list[list[str]]]]:
    """By kind of file: where it lies, what it is at first, what is asked of it."""
    from meshplan.cost.calibration import profile_from, write_profile

    plan = job(
        mesh={"dp_shard": 8}, strategy="auto", optimizer="adamw", precision="bf16-mixed",
        activation_checkpointing="selective", clip_grad_norm=1.0,
        rules=[{"match": ["model.layers.0", "model.layers.1"], "reshard_after_forward": True}],
    )  # fmt: skip
    assert main(["plan", "-f", str(plan), "-q"]) == 0
    lock, profile = lock_path(plan), plan.with_name("profile.json")
    write_profile(profile_from(MADE), profile)
    whole = {**json.loads(plan.read_text()), "strategy": "full_shard"}
    piped = {**whole, "mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "tp_plan": "auto",
             "pipeline": {"schedule": "1F1B", "microbatches": 4}, "offload": "none"}  # fmt: skip
    content = yaml.safe_load(lock.read_text())
    config = plan.with_name("config.json")
    name = str(plan)
    return {
        "plan": (plan, [json.dumps(each).encode() for each in (whole, piped)],
                 [["check", "-f", name], ["show", "-f", name], ["estimate", "-f", name]]),
        "lock": (lock, [json.dumps(content).encode(), lock.read_bytes()],
                 [["check", "-f", name], ["diff", name, str(lock)]]),
        "config": (config, [json.dumps(LLAMA).encode()],
                   [["estimate", "--config", str(config), "--gpus", "8"], ["check", "-f", name]]),
        "profile": (profile, [profile.read_bytes()],
                    [["explain", "-f", name, "--profile", str(profile), "model.layers.0"]]),
    }  # fmt: skip


def fuzz(job: Any, kind: str, rounds: int, seed: int, capsys: Any) -> None:
    rng = random.Random(f"{kind} {seed}")
    found = seeds(job)
    path, corpus, asked = found[kind]
    before = {each: each.read_bytes() for each, _, _ in found.values()}
    if kind != "lock":
        lock_path(found["plan"][0]).unlink()
        before[found["plan"][0]] = found["plan"][1][0]
    lines = Lines()
    for number in range(rounds):
        data = changed(rng, rng.choice(corpus), kind)[:100_000]
        for each, content in before.items():
            if each.exists() or each == path or each == found["plan"][0]:
                each.write_bytes(content)
        path.write_bytes(data)
        words = rng.choice(asked)
        lines.has_new = False
        began, ran, queued = time.perf_counter(), _cpu_s(), _queued_s()
        sys.settrace(lines.trace if number % WATCHED == 0 else None)
        try:
            with bounded_memory():
                code = main(words)
        finally:
            sys.settrace(None)
        took = _cpu_s() - ran
        waited = time.perf_counter() - began - took - (_queued_s() - queued)
        err = capsys.readouterr().err
        assert code in (0, 1, 2), (number, words, data, err)
        assert took < SLOWEST_S, (number, words, took, data)
        # For a lock, a pipe or a process of its own, which other work on the machine may hold up.
        assert waited < 10 * SLOWEST_S, (number, words, waited, data)
        if lines.has_new and len(corpus) < 500:
            corpus.append(data)


@pytest.mark.parametrize("kind", ["plan", "lock", "config", "profile"])
def test_files_changed_at_random_are_answered(job, capsys, kind):
    fuzz(job, kind, 15, 0, capsys)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["plan", "lock", "config", "profile"])
def test_many_files_changed_at_random_are_answered(job, capsys, kind):
    fuzz(job, kind, max(ROUNDS, 2000) // 4, SEED, capsys)
