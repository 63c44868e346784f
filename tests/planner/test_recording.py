"""Traces that are kept on disk are taken for the model that was traced, and for no other one.

Which seeded bug would this catch? Something that a trace depends on is left out of its key; a trace
comes back with other bytes, another order of gradients or other FLOPs; a recording is taken that
was cut short, changed, or made by other code or versions; an upper bound is kept as exact.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshplan.api.recording import load_recording, record
from meshplan.cli.app import main
from meshplan.cost.types import Chain
from meshplan.errors import Problem, SpecError
from meshplan.files import CACHE_VARIABLE
from meshplan.memory.log.events import EventLog
from meshplan.own_process import IS_COMMAND
from meshplan.planner.objectives.answer import answer
from meshplan.runtime.live import block_traces, identity, stage_traces
from meshplan.runtime.live.bounded import Question
from meshplan.runtime.live.planned import request_of_entry
from meshplan.runtime.live.trace_json import costs_from_json, costs_to_json
from meshplan.runtime.live.traced import TracedModel
from meshplan.runtime.trace.bounds import UnknownShapeError

HERE = f"{__name__}:build"
SIZES: dict[str, int] = {}
"""What `build` takes instead of its own sizes."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.slope = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))) * self.slope)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = SIZES.get("width", 512)
        self.blocks = nn.ModuleList([Block(width) for _ in range(SIZES.get("blocks", 4))])
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def build() -> nn.Module:
    return Net()


def plan_of(entry: str = HERE, **more: Any) -> dict[str, Any]:
    return {
        "version": 1, "model": {"entry": entry}, "mesh": "auto", "strategy": "auto",
        "activation_checkpointing": "auto", "precision": "bf16-mixed", "batch": {"global": 16},
        "input": {"shape": [1, 64, 512], "dtype": "fp32"},
        "hardware": {"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"}, **more,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The traces that were made, by the name of what made them."""
    out: list[str] = []
    for module, name in ((block_traces, "watch"), (stage_traces, "trace_microbatch")):
        trace = getattr(module, name)

        def counted(*args: Any, trace: Any = trace, name: str = name, **kwargs: Any) -> Any:
            out.append(name)
            return trace(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return out


@pytest.fixture
def search(made: list[str]) -> Callable[..., tuple[Any, int]]:
    """Search a plan; the result is (what was chosen, how many traces were made)."""

    def of(plan: Mapping[str, Any] | Path) -> tuple[Any, int]:
        made.clear()
        decision = answer(request_of_entry(plan, (), None))
        chosen = decision.chosen
        assert chosen is not None
        found = chosen.stated, decision.best_s, decision.num_configs, chosen.memory.worst.band
        return found, len(made)

    return of


@pytest.fixture
def chain(made: list[str]) -> Callable[..., tuple[Chain, int, str]]:
    """Trace blocks on data ranks; the result is (their costs, how many traces, the lines told)."""

    def of(plan: Mapping[str, Any]) -> tuple[Chain, int, str]:
        made.clear()
        lines: list[str] = []
        request = request_of_entry(plan, (), None, report=lines.append)
        assert isinstance(request.traced, TracedModel)
        return request.traced.chain(request.read(())), len(made), "\n".join(lines)

    return of


def test_a_search_of_the_same_model_traces_nothing(search):
    first, count = search(plan_of())
    assert count >= 3
    assert search(plan_of()) == (first, 0)


@pytest.mark.parametrize(
    "more",
    [
        {"batch": {"global": 32}},
        {"hardware": {"nodes": 2, "gpus_per_node": 2, "gpu": "gh200", "inter": "20GB/s"}},
        {"solve": {"objective": "memory"}, "strategy": "full_shard"},
    ],
)
def test_a_search_for_another_machine_or_batch_traces_no_blocks(chain, more):
    first, count, _ = chain(plan_of())
    assert count == 1
    assert chain(plan_of(**more))[:2] == (first, 0)


@pytest.mark.parametrize(
    "more",
    [
        {"precision": "32-true"},
        {"input": {"shape": [1, 32, 512], "dtype": "fp32"}},
        {"hardware": {"nodes": 1, "gpus_per_node": 2, "gpu": "a100-sxm-40gb"}},
        {"compile": True},
        {"rules": [{"match": "head", "precision": "32-true"}]},
    ],
)
def test_what_changes_the_traces_is_traced(chain, more):
    chain(plan_of())
    assert chain(plan_of(**more))[1] == 1


def changed_attribute(patch: pytest.MonkeyPatch) -> None:
    plain = Block.__init__

    def init(self: Block, width: int) -> None:
        plain(self, width)
        self.kept = {"slope": 2}

    patch.setattr(Block, "__init__", init)


def changed_forward(patch: pytest.MonkeyPatch) -> None:
    plain = Block.forward
    patch.setattr(Block, "forward", lambda self, x: plain(self, x).relu())


def changed_sizes(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(SIZES, "blocks", 3)


def changed_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "2.99.0")


def changed_meshplan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(identity, "_own_files", lambda: "other")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed_attribute, "Net is traced anew: attributes of its modules have changed"),
        (changed_forward, "Net is traced anew: its forward runs other operators"),
        (changed_torch, "Net is traced anew: torch was 2."),
        (changed_meshplan, "Net is traced anew: the files of meshplan have changed"),
        (changed_sizes, ""),  # Another model, of which nothing was recorded.
    ],
)
def test_another_model_is_traced_anew(chain, change, words):
    chain(plan_of())
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        _, count, told = chain(plan_of())
        assert count == 1
        assert words in told
        assert bool(words) == ("traced anew" in told)
        assert not chain(plan_of())[1]
    assert not chain(plan_of())[1]  # What was recorded before is there still.


def test_other_code_is_traced_anew(chain, tmp_path, monkeypatch):
    """A helper that the model's module imports counts, too; its operators may stay the same."""
    monkeypatch.syspath_prepend(tmp_path)
    helper, module = tmp_path / "recorded_helper.py", tmp_path / "recorded_net.py"
    helper.write_text("import torch\ndef turned(x):\n    return torch.tanh(x)\n")
    module.write_text(
        "from torch import nn\nfrom recorded_helper import turned\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.blocks = nn.ModuleList([nn.Linear(512, 512) for _ in range(3)])\n"
        "    def forward(self, x):\n"
        "        for block in self.blocks:\n"
        "            x = turned(block(x))\n"
        "        return x.mean(1)\n"
    )

    def told() -> tuple[int, str]:
        for name in ("recorded_helper", "recorded_net"):
            sys.modules.pop(name, None)
        return chain(plan_of("recorded_net:Net"))[1:]

    assert told()[0] == 1
    assert not told()[0]
    helper.write_text(helper.read_text() + "# Another line.\n")
    count, words = told()
    assert count == 1
    assert "Net is traced anew: its code in recorded_helper has changed" in words


def test_bounds_are_not_kept(chain, kept):
    traced = request_of_entry(plan_of(), (), None).traced
    assert isinstance(traced, TracedModel)
    bounded = traced._bounded
    calls: list[int] = []

    def trace() -> int:
        calls.append(0)
        if len(calls) == 1:
            raise UnknownShapeError(Problem("aten.nonzero.default makes a tensor"))
        return len(calls)

    question = Question.of(traced._spec, "blocks", str, str)
    log = EventLog((), (), ("before",))
    assert bounded.recorded(question, [1], lambda numbers: [trace()], lambda _: log) == [2]
    assert bounded.bound
    assert bounded.recording is not None
    assert not bounded.recording.traces
    assert not [*kept.glob("*.trace")]


def test_traces_are_equal_after_json():
    plan = plan_of(mesh={"dp_shard": 1, "tp": 2}, tp_plan="auto")
    for each in (plan, plan_of(mesh={"dp_shard": 2})):
        traced = request_of_entry(each, (), None).traced
        assert isinstance(traced, TracedModel)
        traces = traced.traces(traced._spec)
        for both in traces._traces[0].values():
            for costs in (both.plain, both.recomputed):
                back = costs_from_json(json.loads(json.dumps(costs_to_json(costs))))
                assert back == costs
                assert [*back.trace.gradients] == [*costs.trace.gradients]
                assert [*back.done] == [*costs.done]


def test_a_recording_is_read_on_another_machine(search, tmp_path, monkeypatch):
    out = tmp_path / "net.tape.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, "off")  # The file has all traces without a folder, too.
        made = record(plan_of(), out=out)
    first, count = search(plan_of())
    assert made.num_traces >= count
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    assert load_recording(out).num_traces == made.num_traces
    assert search(plan_of()) == (first, 0)


def _digest(content: Mapping[str, Any]) -> str:
    rest = {key: content[key] for key in ("identity", "traces")}
    text = json.dumps(rest, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def test_what_is_no_whole_recording_of_these_versions_is_refused(tmp_path, kept):
    out = tmp_path / "net.tape.json"
    record(plan_of(), out=out)
    for file in kept.iterdir():
        file.unlink()
    text = out.read_text()
    content = json.loads(text)
    assert content["sha256"] == _digest(content)

    def signed(**more: Any) -> str:
        other = content | more
        return json.dumps(other | {"sha256": _digest(other)})

    def of_torch(version: str) -> str:
        versions = content["identity"]["versions"] | {"torch": version}
        return signed(identity=content["identity"] | {"versions": versions})

    key = next(iter(content["traces"]))
    less = content | {"traces": {k: v for k, v in content["traces"].items() if k != key}}
    for wrong, words in (
        (text[: len(text) // 2], "cut short"),
        (text.replace('"deltas":[', '"deltas":[512,', 1), "changed after it was made"),
        (json.dumps(less), "changed after it was made"),
        (of_torch("2.5.0"), "made by torch 2.5.0"),
        (json.dumps(content | {"version": 2}), "has version 2"),
        (json.dumps(content | {"format": "a plan"}), "this is no recording"),
        (signed(identity={"model": "Net"}), "of which model"),
        (signed(traces=[1]), "of which model"),
        (signed(traces={key: [{}]}), "a trace of the recording is malformed"),
        (signed(traces={key: {"kinds": 3}}), "a trace of the recording is malformed"),
        ("[1, 2]", "this is no recording"),
        ("[" * 100_000, "no JSON"),
        ("", "no JSON"),
    ):
        out.write_text(wrong)
        with pytest.raises(SpecError, match=words) as error:
            load_recording(out)
        assert "meshplan record" in error.value.problems[0].fix
        assert not [*kept.iterdir()]
    with pytest.raises(SpecError, match="does not exist"):
        load_recording(tmp_path / "none")


def test_a_file_that_was_cut_short_or_changed_is_made_anew(chain, kept):
    chain(plan_of())
    for file in kept.glob("*.trace"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert chain(plan_of())[1] == 1
    for file in kept.glob("*.trace"):
        file.write_bytes(file.read_bytes()[:-9])
    assert chain(plan_of())[1] == 1
    for file in kept.glob("*.trace"):
        file.chmod(0o666)  # Others may have written it.
    assert chain(plan_of())[1] == 1
    assert not chain(plan_of())[1]


def test_nothing_is_recorded_where_there_is_nothing_to_record():
    closed = plan_of(mesh={"tp": 2}, tp_plan="auto", activation_checkpointing="none")
    closed["batch"] = {"micro": 8, "accumulate": 1}
    del closed["strategy"]
    assert "leaves nothing open" in record(closed).why


def test_the_command_records_without_a_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--set", "input={shape: [1, 64, 512], dtype: fp32}"]
    out = ["-o", "net.tape.json", "--set", "hardware.gpus_per_node=2"]
    assert main(["record", "--model", HERE, *words, *out, "-q", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["model"], result["file"]) == ("Net", "net.tape.json")
    assert result["num_traces"] == len(json.loads(Path("net.tape.json").read_text())["traces"])
    assert main(["record", "--load", "net.tape.json"]) == 0
    assert "of Net from net.tape.json" in capsys.readouterr().out
    assert main(["record", "--load", "net.tape.json", "--model", HERE]) == 2
    assert "leave the other flags out" in capsys.readouterr().err


def test_an_answer_about_a_live_model_is_read_by_the_command_that_asks_again(search, made):
    token = IS_COMMAND.set(True)

    def searched() -> bool:
        lines: list[str] = []
        answer(request_of_entry(plan_of(), (), None), lines.append)
        return not any("to the same question" in line for line in lines)

    try:
        first, _ = search(plan_of())
        assert search(plan_of()) == (first, 0)
        assert not searched()
        with pytest.MonkeyPatch.context() as patch:
            changed_attribute(patch)
            assert searched()
    finally:
        IS_COMMAND.reset(token)
