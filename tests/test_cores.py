"""Two cores find what one finds, in its order, and raise what it raises.

Which seeded bug would this catch? What the copy found put in the wrong places, or not waited for;
the first of two errors by the clock, and not by place; a copy that nobody ends, or whose end nobody
notices; a process with threads that is copied.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

needs_two = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="there is one core"
)

BEGIN = """
import os, sys, threading, time
from meshplan.two_cores import each, has_another

def slowly(piece):
    time.sleep(0.05)
    return piece, os.getpid()
"""


def said(script: str, *args: str, cwd: Path | None = None) -> str:
    """What a process without torch or threads prints; what it prints on stderr fails."""
    code = textwrap.dedent(BEGIN) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, cwd=cwd
    )
    assert not done.stderr, done.stderr[-2000:]
    assert done.returncode == 0
    return done.stdout.strip()


@needs_two
def test_both_cores_work_and_everything_stands_in_its_place() -> None:
    script = """
        before = os.listdir("/proc/self/fd")
        found = each(slowly, range(9))
        assert [piece for piece, _ in found] == [*range(9)]
        processes = [process for _, process in found]
        assert len(set(processes)) == 2
        assert processes[0] == os.getpid() != processes[-1]
        assert processes == sorted(processes, key=lambda process: process != os.getpid())
        assert os.listdir("/proc/self/fd") == before  # Nothing is left open,
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:  # and nobody is left.
            print("alone")
        """
    assert said(script) == "alone"


@pytest.mark.parametrize(
    "before",
    [
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
        "sys.modules['torch'] = os",
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()",
    ],
    ids=["one core", "torch", "threads"],
)
@needs_two
def test_otherwise_one_process_does_all(before: str) -> None:
    script = f"""
        assert has_another()
        {before}
        assert not has_another()
        assert each(slowly, range(3)) == [(piece, os.getpid()) for piece in range(3)]
        """
    assert said(script) == ""


@needs_two
def test_pieces_that_have_pieces_do_not_multiply() -> None:
    script = """
        def whole(piece):
            return {process for _, process in each(slowly, range(3))}

        one, two = each(whole, range(2))
        assert len(one) == len(two) == 1 and one != two
        """
    assert said(script) == ""


@pytest.mark.parametrize("bad", [{1}, {8}, {1, 8}, {7, 8}, set(range(9))], ids=str)
def test_the_first_error_by_place_is_raised(bad: set[int]) -> None:
    script = """
        bad = {*map(int, sys.argv[1].split())}

        def some(piece):
            time.sleep(0.05 if piece < 7 else 0)
            if piece in bad:
                raise ValueError(piece)
            return piece

        try:
            print(each(some, range(9)))
        except ValueError as error:
            print(error)
        """
    assert said(script, " ".join(map(str, bad))) == str(min(bad))


@needs_two
@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), 9)",
        "return lambda: 'cannot be pickled'",
        "return Dying()",
        "raise KeyboardInterrupt",
    ],
    ids=["killed", "not pickled", "killed while it sends", "interrupted"],
)
def test_what_a_copy_could_not_do_is_done_nevertheless(end: str) -> None:
    script = f"""
        own = os.getpid()

        import pickle

        class Dying:
            def __reduce__(self):
                os.write(6, pickle.dumps([*range(9)])[:-4])  # The last of two pipes' ends.
                os.kill(os.getpid(), 9)

        def some(piece):
            if os.getpid() != own and piece == 7:
                {end}
            return slowly(piece)[0]

        print(each(some, range(9)))
        """
    assert said(script) == str([*range(9)])


@needs_two
def test_an_error_of_a_copy_is_the_one_that_a_single_core_raises() -> None:
    script = """
        from meshplan.two_cores import _SECOND
        from meshplan.errors import PlanError, Problem

        def some(piece):
            if piece == 8:
                raise PlanError([Problem("this"), Problem("that", fix="another")])
            return slowly(piece)

        def raised():
            try:
                each(some, range(9))
            except PlanError as error:
                return str(error), error.problems, error.__traceback__.tb_next is not None

        two = raised()
        with _SECOND:
            assert raised() == two
        print(two[0].count("this"))
        """
    assert said(script) == "1"


@needs_two
def test_where_there_is_no_room_for_a_copy_one_process_does_all() -> None:
    script = """
        def no_room():
            raise BlockingIOError(11, "Resource temporarily unavailable")

        before, os.fork = os.listdir("/proc/self/fd"), no_room
        assert each(slowly, range(3)) == [(piece, os.getpid()) for piece in range(3)]
        assert os.listdir("/proc/self/fd") == before
        """
    assert said(script) == ""


@needs_two
def test_whoever_waits_hears_an_interrupt_and_nobody_else() -> None:
    script = """
        import signal

        own = os.getpid()

        def some(piece):
            if piece == 2 and os.getpid() == own:
                os.killpg(0, signal.SIGINT)
            return slowly(piece)

        os.setpgrp()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored in what runs behind.
        try:
            each(some, range(9))
        except KeyboardInterrupt:
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
            print(os.getpid() == own)
        """
    assert said(script) == "True"


@needs_two
def test_nobody_works_for_a_process_that_is_gone() -> None:
    """Its copy, which shares the output, would keep whoever waits for that."""
    script = """
        import signal

        own = os.getpid()

        def some(piece):
            if os.getpid() == own:
                os.kill(own, signal.SIGKILL)
            time.sleep(0.2)
            return bytes(1 << 20)

        print(os.getpid(), flush=True)
        each(some, range(200))
        """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(script)],
        capture_output=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == -9
    assert time.monotonic() - began < 20


@needs_two
def test_a_worker_of_a_pool_may_use_it() -> None:
    script = """
        import multiprocessing

        def whole(piece):
            return [piece for piece, _ in each(slowly, range(4))]

        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(pool.map(whole, [0]))
        """
    assert said(script) == str([[*range(4)]])


@needs_two
@pytest.mark.parametrize(
    ("stated", "kind"),
    [("mesh: auto", "_read"), ("mesh: auto", "_call")],
    ids=["chains", "other layouts"],
)
def test_the_lock_is_the_same_on_one_core_and_on_two(
    tmp_path: Path, stated: str, kind: str
) -> None:
    """Whole command lines: the same bytes are written, wherever they were computed."""
    config = (
        '{"model_type": "deepseek_v3", "num_hidden_layers": 8, "hidden_size": 512,'
        ' "intermediate_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 8,'
        ' "num_key_value_heads": 8, "vocab_size": 4096, "n_routed_experts": 16,'
        ' "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}'
    )
    plan = (
        "{version: 1, model: {config: config.json}, STATED, strategy: auto,"
        " precision: bf16-mixed, activation_checkpointing: auto,"
        " batch: {global: 256, seq_len: 2048},"
        " hardware: {nodes: 2, gpus_per_node: 8, gpu: a100-sxm-40gb, inter: 25GB/s}}"
    )
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "plan.yaml").write_text(plan.replace("STATED", stated))
    script = """
        from meshplan import two_cores as cores
        from meshplan.cli import main

        copied, begin = [], cores._from_both_ends
        cores._from_both_ends = lambda *args: copied.append(args) or begin(*args)
        if sys.argv[1] == "1":
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        code = main(["plan", "-f", "plan.yaml", "-q", "-o", sys.argv[2]])
        kinds = sorted({work.func.__name__ if hasattr(work, "func") else work.__name__
                        for work, _ in copied})
        print(code, *kinds)
        """
    one, two = (said(script, each, f"{each}.yaml", cwd=tmp_path).splitlines() for each in "12")
    assert one[-1] == "0"
    assert kind in two[-1].split()
    assert (tmp_path / "1.yaml").read_bytes() == (tmp_path / "2.yaml").read_bytes()
