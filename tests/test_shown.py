"""What public values show of themselves: a repr of one screen, and HTML for a notebook.

Every name of `meshplan.__all__` is either made here, with a model as large as users have, or said
to give no value of ours. The walk then goes through everything that the value holds.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import meshplan
from meshplan.api.batch_size import BatchSize
from meshplan.errors import Origin, Problem
from meshplan.plan.verdict import refused
from meshplan.runtime.state.load import LoadedState
from meshplan.shown import fields_of, short, shown, whole_repr

ROOT = Path(__file__).resolve().parent.parent
CONFIG = str(ROOT / "plans/models/llama-3.1-8b.json")
FULL_SHARD, AUTO = str(ROOT / "plans/full_shard.yaml"), str(ROOT / "plans/auto.yaml")
MANY = [Problem(f"module {n} " + "is wrong " * 9, Origin("plan.yaml"), "x") for n in range(999)]
LARGE_STATES = ["batch.micro=1", "batch.seq_len=2048"]


def large_plan() -> Any:
    return meshplan.decide(FULL_SHARD, config=CONFIG)


MADE: Mapping[str, Callable[[], Any]] = {
    "estimate_states": lambda: meshplan.estimate_states(config=CONFIG, gpus=8, memory="80GiB"),
    "estimate_memory": lambda: meshplan.estimate_memory(
        FULL_SHARD, LARGE_STATES, config=CONFIG, memory="80GiB"
    ),
    "check_plan": lambda: meshplan.check_plan(FULL_SHARD, config=CONFIG),
    "verify_plan": lambda: refused(MANY),
    "search_plan": lambda: meshplan.search_plan(AUTO),
    "explain": lambda: meshplan.explain(AUTO, ("why-not", "mesh.tp=8"))[0],
    "retarget": lambda: meshplan.retarget(AUTO, "nodes=4"),
    "calibrate": lambda: meshplan.search_plan(AUTO).profile,
    "decide": large_plan,
    "load_spec": lambda: meshplan.load_spec(AUTO),
    "make_plan": lambda: large_plan().assignment,
    "make_report": lambda: meshplan.make_report(AUTO),
    "explore": lambda: meshplan.explore(large_plan()),
    "import_config": lambda: meshplan.import_config(str(ROOT / "examples/configs/deepspeed.json")),
    "export_config": lambda: meshplan.export_config(FULL_SHARD, "accelerate"),
    "Spec": lambda: meshplan.load_spec(
        {
            "version": 1,
            "strategy": "ddp",
            "rules": [{"match": f"layers.{n}", "place": "replicate"} for n in range(999)],
        }
    ),
    "Plan": large_plan,
    "Mesh": lambda: large_plan().mesh,
    "Layout": lambda: next(iter(large_plan().assignment.tensors.values())).stored,
    "MeshplanError": lambda: meshplan.MeshplanError(MANY),
    "SpecError": lambda: meshplan.SpecError(MANY),
    "PlanError": lambda: meshplan.PlanError(MANY),
    "ApplyError": lambda: meshplan.ApplyError(MANY),
    "StateError": lambda: meshplan.StateError(MANY),
    "MissingStateError": lambda: meshplan.MissingStateError(MANY),
    "find_batch_size": lambda: BatchSize(4, 2**34, 2**35, (1, 2, 4)),
    "load": lambda: LoadedState(step=10, extra={"a": 1}, folder=Path("states/step-00000010")),
}
"""By the name of what gives it: a value, of a large model if it grows with the model."""

NOT_OURS = {
    "parallelize": "an nn.Module; what it has in `meshplan` is tested below",
    "data_rank": "two numbers",
    "local_batch": "tensors",
    "train_step": "a float",
    "eval_step": "a float",
    "predict": "tensors",
    "reduce": "a float or a tensor",
    "Run": "an object that records",
    "Callback": "an object of the user's",
    "EMA": "an object with a context manager",
    "is_main": "a bool",
    "main_first": "a context manager",
    "rank_logger": "a logging.Logger",
    "seed_everything": "None",
    "chunked_loss": "a context manager",
    "loss_parallel": "a context manager",
    "stop_requested": "a bool",
    "register_grad_hook": "a handle of torch",
    "clip_grad_norm_": "a tensor",
    "clip_grad_value_": "None",
    "gather_batch": "a tensor",
    "global_mean": "a tensor",
    "full_state_dict": "a dict of tensors",
    "dataloader": "an iterable over tensors",
    "save": "a path",
    "save_pretrained": "a path",
    "load_pretrained": "names",
    "guarded": "a context manager",
    "lock_plan": "a path",
    "trainer": "a class of transformers",
    "__version__": "a string",
}


def held(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield the value and every value of ours that it holds, by attributes and collections."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, Mapping):
        inner = [*value, *value.values()]
    elif isinstance(value, tuple | list | set | frozenset):
        inner = list(value)
    elif dataclasses.is_dataclass(value) or hasattr(value, "__repr_fields__"):
        yield value
        inner = [item for _, item in fields_of(value)]
    else:
        return
    for item in inner:
        yield from held(item, seen)


def wrong(value: Any) -> Iterator[str]:
    name, text = type(value).__name__, repr(value)
    if len(text.splitlines()) > 40 or len(text) > 4000:
        yield f"repr of {name}: {len(text.splitlines())} lines, {len(text)} characters"
    if hasattr(value, "_repr_mimebundle_"):
        return  # a notebook prefers it
    if not hasattr(value, "_repr_html_"):
        yield f"{name} has no _repr_html_"
        return
    html = value._repr_html_()
    if "<script" in html or "<html" in html:
        yield f"{name}: a script, or a page"
    ElementTree.fromstring(html)  # a fragment with one root, all of whose text is escaped


def test_every_public_name_is_judged() -> None:
    assert MADE.keys() | NOT_OURS.keys() == set(meshplan.__all__)


@pytest.mark.parametrize("name", MADE)
def test_a_value_and_all_that_it_holds_are_a_screen(name: str) -> None:
    value = MADE[name]()
    assert list(wrong(value)) == []
    kinds: dict[type, Any] = {}
    for each in held(value, {}):
        largest = kinds.get(type(each))
        if largest is None or len(whole_repr(each)) > len(whole_repr(largest)):
            kinds[type(each)] = each
    assert [text for each in kinds.values() for text in wrong(each)] == []


@pytest.mark.parametrize(
    "plan", ["pp_fsdp_tp", "tp_hybrid", "context_parallel", "moe_ep", "hybrid_mixture"]
)
def test_all_that_other_plans_hold_is_a_screen(plan: str) -> None:
    decided = meshplan.decide(ROOT / f"plans/{plan}.yaml")
    kinds = {type(each): each for each in held(decided, {})}
    assert [text for each in kinds.values() for text in wrong(each)] == []


def live(plan: dict[str, Any]) -> tuple[str, str]:
    from meshplan.runtime.demo_model import ByteLlama

    model = meshplan.parallelize(ByteLlama(), plan)
    return repr(model.meshplan), model.meshplan._repr_html_()


def test_what_a_parallel_model_has(pool: Any) -> None:
    for text, html in pool(2).run(live, {"version": 1, "strategy": "full_shard"}):
        assert "mesh=DeviceMesh((dp_shard=2)" in text
        assert len(text.splitlines()) < 40
        ElementTree.fromstring(html)


def test_a_screen_says_what_the_value_is() -> None:
    text = repr(meshplan.search_plan(AUTO))
    assert text.startswith("Decision(\n    spec=Spec(version=1, ")
    assert "\n    objective='time',\n" in text
    assert " more),\n" in text  # of the bounds, the first
    assert max(map(len, text.splitlines())) <= 96


def test_a_small_value_is_shown_as_dataclasses_do() -> None:
    mesh = large_plan().mesh
    assert repr(mesh) == whole_repr(mesh) == "Mesh(axes=(Axis(name='dp_shard', size=8),), loans=())"


@shown
@dataclasses.dataclass(frozen=True)
class _Odd:
    name: str
    held: Any = None


@pytest.mark.parametrize(
    "value",
    [(), (1,), [1, "b"], set(), {2}, frozenset({3}), frozenset(), {"a": (1, 2)}, None, 1.5, "x'y",
     Path("a"), _Odd("b"), int, b"c", {1: {2: {3: {4: 5}}}}],
    ids=str,
)  # fmt: skip
def test_what_fits_is_the_whole_repr(value: object) -> None:
    odd = _Odd("n", value)
    assert repr(odd) == whole_repr(odd)
    assert short(odd, 90) == repr(odd)


@pytest.mark.parametrize("room", [12, 20, 40, 80])
@pytest.mark.parametrize(
    "value",
    ["s" * 10**6, dict.fromkeys(range(10 ** 5), "long " * 9), [[[list(range(99))] * 9] * 9] * 9,
     _Odd("n" * 999, [_Odd("m")] * 999), ("s" * 99, Path("p" * 999))],
    ids=["text", "mapping", "lists", "values", "path"],
)  # fmt: skip
def test_what_does_not_fit_is_abbreviated(value: object, room: int) -> None:
    assert 0 < len(short(value, room)) <= room


def test_a_name_is_escaped() -> None:
    html = _Odd("<script>alert(1)</script>")._repr_html_()  # type: ignore[attr-defined]
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_a_value_of_many_fields_counts_the_others() -> None:
    many = shown(dataclasses.make_dataclass("Many", [(f"f{n}", int, n) for n in range(99)]))
    lines = repr(many()).splitlines()
    assert len(lines) == 40
    assert lines[-2] == "    … 62 more fields"


def test_a_repr_imports_no_torch() -> None:
    code = (
        "import sys, meshplan\n"
        f"plan = meshplan.decide({FULL_SHARD!r}, config={CONFIG!r})\n"
        "repr(plan), repr(plan.assignment)\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)\n"
        "plan.assignment._repr_html_()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
