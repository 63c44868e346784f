"""Files that are written are old or new and never between; what is read has an end.

Which seeded bug would this catch? A file that is opened for writing under its own name, a temporary
name that can be guessed, a rename before the content is on the disk, a read without a bound.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from meshplan import files
from meshplan.cli.app import CRASHED, main
from meshplan.cli.configs import write_config
from meshplan.cli.starting import write_plan
from meshplan.cost.calibration import profile_from, read_profile, write_profile
from meshplan.errors import MeshplanError, SpecError
from meshplan.launch.slurm import write_slurm_script
from meshplan.pictures.base.types import SUFFIXES, Picture
from meshplan.planner.lock.lock import lock_path, read, write
from meshplan.report.main import Report
from meshplan.runtime.live.identity import ModelIdentity
from meshplan.runtime.live.recording import Recording
from meshplan.runtime.train.callbacks import write_table
from meshplan.runtime.train.run import write_summary
from meshplan.spec.reader import load_spec
from meshplan.spec.trust import trust
from meshplan.state.pretrained import INDEX, write_index
from tests.cost.test_calibrate import MADE
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

OLD = b"old " * 1000


class Crash(BaseException):
    """As a process that is killed: nothing after it runs, not even what tidies up."""


CALLS = ("mkdir", "open", "lstat", "fchmod", "write", "fsync", "close", "replace", "unlink")
"""What writing asks of the operating system."""


class Injected:
    """Something goes wrong at one call of the operating system.

    Args:
        how: "killed": that call and all after it raise, and a write is torn; "fails": it alone is
            refused; "interrupted": Ctrl-C comes before it; "late": Ctrl-C comes after it.
        number: Of the call, from 1; 0 for none.
    """

    def __init__(self, monkeypatch, how="", number=0):
        self.how, self.number, self.num_calls = how, number, 0
        self._real = {name: getattr(os, name) for name in CALLS}
        self._opened: set[int] = set()
        for name in CALLS:
            monkeypatch.setattr(files.os, name, functools.partial(self._call, name))

    def _call(self, name, *args, **more):
        self.num_calls += 1
        is_here = self.number == self.num_calls
        if self.how == "killed" and 0 < self.number <= self.num_calls:
            if is_here and name == "write":
                self._real[name](args[0], args[1][: len(args[1]) // 2])
            raise Crash
        if is_here and self.how == "fails":
            raise OSError(errno.EIO, "Input/output error")
        if is_here and self.how == "interrupted":
            raise KeyboardInterrupt
        done = self._real[name](*args, **more)
        if name == "open":
            self._opened.add(done)
        elif name == "close":
            self._opened.discard(args[0])
        if is_here and self.how == "late":
            raise KeyboardInterrupt
        return done

    def tidy(self):
        """Close what the crash kept open, as the end of a process does."""
        for handle in self._opened:
            self._real["close"](handle)


def picture():
    from matplotlib.figure import Figure

    return Picture(what="mesh", title="a mesh", alt="of nothing", figure=Figure(figsize=(1, 1)))


def content_of(kind, folder):
    """(how a file of this kind is written to a path, the path)."""
    if kind == "lock":
        return lambda path: write(path, {"lock": 2, "chosen": {}}), folder / "plan.lock.yaml"
    if kind == "report":
        report = Report(verdict="v", html="new " * 1000, fits=True, shown=(), left_out=())
        return report.save, folder / "report.html"
    if kind == "profile":
        profile = profile_from(MADE)
        return lambda path: write_profile(profile, path), folder / "profile.json"
    if kind == "trust":
        plan = folder / "plan.yaml"
        plan.write_text("version: 1")
        origin = load_spec(plan).origins[""]
        return lambda path: trust(origin), folder / "record"
    if kind == "plan":
        return lambda path: write_plan(path, "version: 1\n"), folder / "plan.yaml"
    if kind == "config":
        return lambda path: write_config(path, "{}\n"), folder / "theirs.json"
    if kind == "decision":
        cache = files.DiskCache(folder, ".decision", 4)
        return lambda path: cache.put("hash", b"an answer"), folder / "hash.decision"
    if kind == "recording":
        nothing = dict.fromkeys(("modules", "attributes", "forward"), "")
        identity = ModelIdentity(model="mypkg.Net", versions={}, code={}, **nothing)
        return Recording(identity).write, folder / "model.tape.json"
    if kind == "sbatch":
        return lambda path: write_slurm_script(path, "#!/bin/bash\n"), folder / "job.sbatch"
    if kind == "index":
        shards = {"a": "1.safetensors", "b": "2.safetensors"}
        return lambda path: write_index(path.parent, shards, 8), folder / INDEX
    if kind == "run":
        return lambda path: write_summary(path, {"step_s": 1.0}), folder / "run.json"
    if kind == "metrics":
        rows = [{"step": 1, "loss": 2.5}]
        return lambda path: write_table(path, ["step", "loss"], rows), folder / "metrics.csv"
    return picture().save, folder / f"picture{kind}"


WRITTEN = {
    "lock": "planner/lock/lock.py", "report": "report/main.py", "profile": "cost/calibration.py",
    "trust": "spec/trust.py", "plan": "cli/starting.py", "sbatch": "launch/slurm.py",
    "config": "cli/configs.py", "decision": "files.py", "recording": "runtime/live/recording.py",
    "index": "state/pretrained.py",
    "run": "runtime/train/run.py", "metrics": "runtime/train/callbacks.py",
    **dict.fromkeys(SUFFIXES, "pictures/base/types.py"),
}  # fmt: skip
"""By kind of file, where the package writes it."""
LEAST = 76
"""Places at which writing one kind of file is stopped: more than 800 for the twelve."""


def test_every_kind_of_file_that_is_written_is_known():
    package = Path(files.__file__).parent
    writes = re.compile(r"\bwrite_bytes\(|\.write_text\(|\bopen\([^)\n]*, [\"'][wax]|\.savefig\(")
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if writes.search(path.read_text()) and path != Path(files.__file__)
    }
    # These write to a pipe, to nowhere, and once to the file that torchrun made for it.
    others = {"two_cores.py", "cli/app.py", "runtime/watch/uncaught.py"}
    assert found - others == set(WRITTEN.values()) - {"files.py"}


@pytest.mark.parametrize("kind", WRITTEN)
def test_whatever_stops_a_write_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    save, path = content_of(kind, tmp_path)
    path = save(path) or path  # What is trusted says itself where.
    new = path.read_bytes()
    path.unlink()
    others = {each for each in tmp_path.rglob("*") if each.is_file()}
    num_stops = 0
    for old in (None, OLD):
        for how in ("killed", "fails", "interrupted", "late"):
            for number in itertools.count(1):
                if old is not None:
                    path.write_bytes(old)
                with pytest.MonkeyPatch.context() as patch:
                    stopped = Injected(patch, how, number)
                    with suppress(Crash, KeyboardInterrupt, SpecError):
                        save(path)
                stopped.tidy()
                now = path.read_bytes() if path.exists() else None
                where = how, number, "new" if old is None else "over an old one"
                assert now in (old, new), where
                left = {each for each in tmp_path.rglob("*") if each.is_file()} - others - {path}
                if how == "killed":  # Nobody is left to tidy up.
                    assert all(re.fullmatch(r"\..*\.[0-9a-f]{16}\.tmp", x.name) for x in left)
                else:
                    assert not left, where
                save(path)  # Nothing that is left is in the way.
                assert path.read_bytes() == new
                for each in (*left, path):
                    each.unlink()
                if number > stopped.num_calls:
                    assert now == new
                    break
                num_stops += 1
    assert num_stops >= LEAST, num_stops


def test_a_write_that_takes_a_part_at_a_time_is_whole(tmp_path, monkeypatch):
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", lambda handle, data: real(handle, data[:100]))
        files.write_bytes(tmp_path / "file", OLD, "the lock")
    assert (tmp_path / "file").read_bytes() == OLD


@pytest.mark.parametrize("call", ["open", "write", "fsync", "close", "replace"])
def test_a_full_or_read_only_disk_leaves_everything_as_it_was(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    path.write_bytes(OLD)

    def fail(*args, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail)
        with pytest.raises(SpecError, match="the lock cannot be written: No space left on device"):
            files.write_bytes(path, b"new", "the lock")
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_links_are_replaced_and_not_followed(tmp_path):
    target, path = tmp_path / "target", tmp_path / "plan.lock.yaml"
    target.write_bytes(OLD)
    path.symlink_to(target)
    for name in (".plan.lock.yaml.new", "plan.lock.yaml.tmp"):
        (tmp_path / name).symlink_to(target)
    files.write_bytes(path, b"new", "the lock")
    assert target.read_bytes() == OLD
    assert not path.is_symlink()
    assert path.read_bytes() == b"new"


def test_permissions_stay(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    path.chmod(0o640)
    files.write_bytes(path, b"new", "the lock")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        files.write_bytes(tmp_path / "other", b"new", "the lock")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o640


def test_two_writers_and_a_reader(tmp_path):
    path = tmp_path / "file"
    contents = [bytes([65 + n]) * 200_000 for n in range(2)]
    files.write_bytes(path, contents[0], "the lock")
    broken: list[int] = []
    is_over = threading.Event()

    def read_on():
        while not is_over.is_set():
            found = path.read_bytes()
            if found not in contents:
                broken.append(len(found))

    def write_on(content):
        for _ in range(100):
            files.write_bytes(path, content, "the lock")

    reader = threading.Thread(target=read_on)
    writers = [threading.Thread(target=write_on, args=(content,)) for content in contents]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    is_over.set()
    reader.join()
    assert not broken
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["fifo", "folder", "huge", "device", "link to a device"])
def test_what_is_read_is_a_file_and_has_an_end(tmp_path, kind):
    path = tmp_path / "file"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "huge":
            with path.open("wb") as file:
                file.truncate(5 * 10**9)  # Without a block of the disk.
        case "device":
            path = Path("/dev/zero")
        case _:
            path.symlink_to("/dev/zero")
    began = time.monotonic()
    words = "not a regular file|bytes, but a plan has at most 1,000|directory"
    with pytest.raises(SpecError, match=words):
        files.read_bytes(path, 1000, "a plan")
    for read_it in (read, read_profile, load_spec):
        with pytest.raises(MeshplanError):
            read_it(path)
    for words in (["--config", str(path), "--gpus", "8"], ["-f", str(path)]):
        assert main(["estimate", *words]) == 2
    assert time.monotonic() - began < 5


BAD_LOCKS = {
    "aliases": "lock: 2\nx: &a [1, 1]\ny: &b [*a, *a]\nz: [*b, *b]\n",
    "merge keys": "lock: 2\n" + "".join(f"k{n}: &k{n} {{<<: *k{n - 1}}}\n" for n in range(1, 99)),
    "dates": "lock: 2\nchosen: {mesh: 2020-01-01}\ninputs: {plan: a, model: b}\n",
    "sets": "lock: 2\nchosen: !!set {a, b}\n",
    "binary": "lock: 2\nchosen: !!binary aGVsbG8=\n",
    "python": "lock: 2\nchosen: !!python/object/apply:os.system [true]\n",
}


@pytest.mark.parametrize("kind", BAD_LOCKS)
def test_locks_that_no_planner_writes(job, capsys, kind):
    plan = job(mesh={"dp_shard": 8}, strategy="auto")
    lock_path(plan).write_text(BAD_LOCKS[kind])
    began = time.monotonic()
    for verb in ("check", "estimate"):
        assert main([verb, "-f", str(plan)]) == 2
        assert "plan.lock.yaml" in capsys.readouterr().err
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("pattern", ["/(([a-z_.0-9]+)+)+!/", "/(a*)*b/", "{a,aa}" * 40 + "!",
                                     "*o*" * 30 + "!", "{0..999}" * 20_000])  # fmt: skip
def test_patterns_take_linear_time(job, pattern):
    plan = job(rules=[{"match": pattern, "activation_checkpointing": "full"}])
    began = time.monotonic()
    assert main(["check", "-f", str(plan)]) in (1, 2)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peak_flops", -1), ("peak_flops", 10**40), ("efficiency", 0), ("efficiency", True),
        ("kernel_s", float("nan")), ("intra_bytes_per_s", float("inf")), ("device", {}),
        ("sources", "text"), ("num_runs", "3"), ("contention", None), ("launch_s", "1"),
    ],
)  # fmt: skip
def test_profiles_say_what_a_machine_may_do(tmp_path, name, value):
    path = tmp_path / "profile.json"
    write_profile(profile_from(MADE), path)
    facts = json.loads(path.read_text())
    facts["profile"][name] = value
    path.write_text(json.dumps(facts))
    with pytest.raises(MeshplanError, match=rf"{name} is .*, not "):
        read_profile(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"schema": "profile/1", "profile": 3}', "\xff", "{}"]
)
def test_other_content_is_no_profile(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(MeshplanError):
        read_profile(path)


def test_counts_have_a_bound_or_a_closed_form(job, capsys):
    hardware = {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    deep = job(LLAMA | {"num_hidden_layers": 10**6}, mesh={"dp_shard": 8}, hardware=hardware)
    began = time.monotonic()
    assert main(["estimate", "-f", str(deep)]) == 2
    assert "1000000 is not a size" in capsys.readouterr().err
    for change in ("batch.accumulate=1000000000", "mesh.dp_shard=2000000"):
        assert main(["draw", "--what", "gantt", "-f", str(deep), "--set", change]) == 2
        assert "is too large" in capsys.readouterr().err
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("word", ["nothing", "model.layers.0"])
def test_near_misses_take_linear_time_too(job, word):
    plan = job(rules=[{"match": "{*,*}" * 30 + word, "activation_checkpointing": "full"}])
    began = time.monotonic()
    assert main(["check", "-f", str(plan)]) == 1
    assert time.monotonic() - began < 5


def test_an_answer_that_nobody_can_take_is_no_crash(tmp_path):
    """Whether it is one, or the list of what is wrong."""
    (tmp_path / "bad.yaml").write_text("version: 3")
    for words in (["check", "-f", str(tmp_path / "bad.yaml")], ["estimate", "--params", "1e9"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "meshplan", *words, "--json"],
                stdout=full, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_no_name_is_no_file():
    with pytest.raises(SpecError, match="cannot be written: its name is not valid"):
        files.write_bytes("", b"new", "the lock")


def test_names_steer_no_terminal(tmp_path, capsys):
    name = "\x1b]0;owned\x07\x1b[31m\u202eevil"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": name}))
    assert main(["estimate", "--config", str(tmp_path), "--gpus", "8"]) == 2
    assert main(["check", "-f", f"{tmp_path}/{name}.yaml"]) == 2
    out, err = capsys.readouterr()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err.replace("\x1b[31m", ""))
    assert r"\x1b]0;owned\x07" in err


def test_a_crash_is_no_answer(monkeypatch, capsys):
    def fail(**_):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("meshplan.api.checking.estimate_states", fail)
    assert main(["estimate", "--params", "3e9", "--gpus", "8"]) == CRASHED == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError in test_files.py" in err
    assert "Traceback" not in err
    monkeypatch.setenv("MESHPLAN_TRACEBACK", "1")
    assert main(["estimate", "--params", "3e9", "--gpus", "8"]) == CRASHED
    assert "Traceback" in capsys.readouterr().err
