"""plan.yaml -> Spec: what is understood, where it stood, and that nothing else ever comes out."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshplan.errors import Origin, SpecError
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import ActivationCheckpointing, Borrow, InputSpec, Offload, Selector, Spec
from tests.helpers.calls import calls_of

PLANS = sorted((Path(__file__).parents[2] / "plans").glob("*.yaml"))


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads a text as plan.yaml; `version: 1` goes before it."""
    monkeypatch.chdir(tmp_path)

    def of(text: str, *overrides: str) -> Spec:
        Path("plan.yaml").write_text(f"version: 1\n{text}", encoding="utf-8")
        return load_spec("plan.yaml", overrides)

    return of


def test_the_traps_of_older_yaml(read: Any) -> None:
    spec = read(
        "model: {params: 3e9}\n"
        "clip_grad_norm: 1e-5\n"
        "rules:\n"
        "  - {match: no, place: shard, why: 1:30}\n"
        "  - {match: on, place: shard, why: 2024-01-01}\n"
        "  - {match: 'y', place: shard, why: '017'}\n"
    )
    assert spec.model.params == 3_000_000_000
    assert spec.clip_grad_norm == 1e-5
    assert [rule.match[0].text for rule in spec.rules] == ["no", "on", "y"]
    assert [rule.why for rule in spec.rules] == ["1:30", "2024-01-01", "017"]


@pytest.mark.parametrize(
    ("text", "params"),
    [("3e9", 3 * 10**9), ("3B", 3 * 10**9), ("350M", 350 * 10**6), ('"7e9"', 7 * 10**9), ("8", 8)],
)
def test_counts(read: Any, text: str, params: int) -> None:
    assert read(f"model: {{params: {text}}}").model.params == params


def test_hardware(read: Any) -> None:
    spec = read(
        "hardware: {nodes: 2, gpus_per_node: 4, memory: 80GiB, intra: 450GB/s, inter: 400Gb/s}"
    )
    assert spec.hardware.world_size == 8
    assert spec.hardware.memory_bytes == 80 * 2**30
    assert spec.hardware.intra_bytes_per_s == 450e9
    assert spec.hardware.inter_bytes_per_s == 50e9
    assert spec.hardware.headroom == 0  # Nobody asked for any.
    assert read("hardware: {gpus_per_node: 8, gpu: A100 40G}").hardware.gpu == "a100-sxm-40gb"


def test_forms_of_a_mesh(read: Any) -> None:
    assert read("strategy: ddp").mesh is None
    assert read("mesh: auto").mesh == "auto"
    assert read("mesh: [2, 4]").mesh == (2, 4)
    assert list(read("mesh: {tp: 2, dp_shard: auto}").mesh.items()) == [
        ("tp", 2),
        ("dp_shard", "auto"),
    ]
    assert read("mesh: {dp_shard: 8, ep: 4 in dp_shard}").mesh["ep"] == Borrow(4, "dp_shard")


def test_borrowed_ranks_do_not_multiply(read: Any) -> None:
    text = "hardware: {gpus_per_node: 8}\nmesh: {dp_shard: 8, ep: 4 in dp_shard}"
    assert read(text).hardware.world_size == 8


@pytest.mark.parametrize(
    ("word", "canonical"),
    [
        ("NO_SHARD", "ddp"),
        ("SHARD_GRAD_OP", "zero2"),
        ("fsdp", "full_shard"),
        ("Zero3", "full_shard"),
        ("HSDP", "hybrid_shard"),
        ("_HYBRID_SHARD_ZERO2", "hybrid_shard_zero2"),
    ],
)
def test_strategy_words(read: Any, word: str, canonical: str) -> None:
    assert read(f"strategy: {word}").strategy == canonical


def test_precision(read: Any) -> None:
    spec = read("precision: BF16-mixed")
    assert (spec.precision.param, spec.precision.reduce) == ("bfloat16", "float32")
    assert spec.precision.word == "bf16-mixed"
    spec = read("precision: {param: torch.bfloat16, reduce: fp32, output: 16}")
    assert (spec.precision.param, spec.precision.output) == ("bfloat16", "float16")
    assert spec.precision.master is None


def test_activation_checkpointing_and_offload(read: Any) -> None:
    assert read("activation_checkpointing: full").activation_checkpointing.mode == "full"
    text = "activation_checkpointing: {mode: selective, every: 2, save: [mm, aten.bmm], budget: %s}"
    expected = {"mode": "selective", "every": 2, "save": ("mm", "aten.bmm")}
    for budget, meaning in (("0.5", 0.5), ("1", 1.0), ("4GiB", 4 * 2**30)):
        policy = read(text % budget).activation_checkpointing
        assert policy == ActivationCheckpointing(**expected, budget=meaning)
        assert type(policy.budget) is type(meaning)
    assert read("offload: optimizer").offload == Offload(optimizer=True)
    assert read("offload: {params: auto, activations: true}").offload == Offload(
        params="auto", activations=True
    )


def test_inputs_by_the_names_of_arguments(read: Any) -> None:
    spec = read(
        "input: {image: {shape: [1, 3, 8, 8], dtype: bf16}, shape: {shape: [1], dtype: int64}}"
    )
    image, shape = (
        InputSpec(shape=(1, 3, 8, 8), dtype="bfloat16"),
        InputSpec(shape=(1,), dtype="int64"),
    )
    assert dict(spec.input) == {"image": image, "shape": shape}
    with pytest.raises(SpecError) as caught:
        read("input: {image: {shape: [1, 3, 8, 8]}, text: {size: [1], dtype: int64}}")
    assert [each.what for each in caught.value.problems] == [
        "'dtype' is missing", "unknown key", "'shape' is missing",
    ]  # fmt: skip


def test_the_other_sections(read: Any) -> None:
    spec = read(
        "batch: {micro: auto, accumulate: {0: 8, 4: 4}, global: 256, seq_len: 128}\n"
        "input: {shape: [3, 224, 224], dtype: bf16}\n"
        "pipeline: {schedule: gpipe, virtual: 2, microbatches: 8, split: [[a, b], [c]]}\n"
        "ddp: {bucket_mb: 25, static_graph: true}\n"
        "solve: {objective: memory, time_limit: 5min, keep: 3}\n"
        "tp_plan: hf\nsequence_parallel: true\nloss_parallel: True\ncompile: false\n"
        "optimizer: SGD\n"
    )
    assert (spec.batch.micro, spec.batch.accumulate) == ("auto", {0: 8, 4: 4})
    assert (spec.batch.global_, spec.batch.seq_len) == (256, 128)
    assert (spec.input.shape, spec.input.dtype) == ((3, 224, 224), "bfloat16")
    assert (spec.pipeline.schedule, spec.pipeline.split) == ("GPipe", (("a", "b"), ("c",)))
    assert spec.ddp == {"bucket_mb": 25.0, "static_graph": True}
    assert spec.solve == {"objective": "memory", "time_limit_s": 300.0, "keep": 3}
    assert (spec.tp_plan, spec.sequence_parallel, spec.loss_parallel) == ("hf", True, True)
    assert spec.optimizer == "sgd"


def test_rules(read: Any) -> None:
    spec = read(
        "rules:\n"
        "  - match: [layers.*, '/h\\.\\d+/', {type: nn.Linear}, {param: '**.bias'}]\n"
        "    place: {tp: Shard(0), dp_shard: shard( -1 ), ep: Replicate, cp: auto}\n"
        "  - {match: embed, place: hybrid_shard, unit: true, reshard_after_forward: 4}\n"
        "  - {match: head, stage: last, precision: 32-true, optional: true}\n"
        "  - {match: norm, apply: 'pkg.mod:fn', reshard_after_forward: false, stage: 0}\n"
    )
    assert spec.rules[0].match == (
        Selector("glob", "layers.*"),
        Selector("regex", r"h\.\d+"),
        Selector("type", "nn.Linear"),
        Selector("param", "**.bias"),
    )
    assert spec.rules[0].place == {"tp": "S(0)", "dp_shard": "S(-1)", "ep": "R", "cp": "auto"}
    assert spec.rules[0].data is None
    assert (spec.rules[1].data, spec.rules[1].place) == ("hybrid_shard", {})
    assert (spec.rules[1].unit, spec.rules[1].reshard_after_forward) == (True, 4)
    assert (spec.rules[2].stage, spec.rules[2].optional) == ("last", True)
    assert spec.rules[2].precision.word == "32-true"
    assert (spec.rules[3].apply, spec.rules[3].stage) == ("pkg.mod:fn", 0)
    assert spec.rules[3].reshard_after_forward is False
    assert [rule.index for rule in spec.rules] == [0, 1, 2, 3]


def test_every_value_has_its_place(read: Any) -> None:
    spec = read("mesh:\n  tp: 2\nrules:\n  - match: [a, b]\n    place: {tp: rowwise}\n")
    assert spec.origins["mesh.tp"] == Origin("plan.yaml", "mesh.tp", 3, 7)
    assert spec.origins["rules[0].match[1]"] == Origin("plan.yaml", "rules[0].match[1]", 5, 16)
    assert spec.origins["rules[0].place.tp"].place == "plan.yaml:6:17"
    assert spec.origin("rules[0].unit").place == "plan.yaml:5:5"


def test_a_key_without_a_value_is_not_stated(read: Any) -> None:
    assert read("strategy:\nmesh: ~\nrules: null\nbatch: {micro: }\n") == read("")


def test_a_file_may_begin_with_marks(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"\xef\xbb\xbf# caf\xc3\xa9\r\n---\r\nversion: 1\r\nstrategy: ddp\r\n...\r\n")
    assert load_spec(path).strategy == "ddp"


def test_overrides_come_last_and_in_order(read: Any) -> None:
    spec = read(
        "strategy: fdsp\nmesh: {dp_shard: 8}\nrules: [{match: a, place: {dp_shard: R}}]",
        "strategy=full_shard",
        "mesh={dp_shard: 4, tp: 2}",
        "mesh.tp=4",
        "rules[0].place.tp=colwise",
        "rules[1].match=**.norm",
        "rules[1].place=replicate",
        "batch.micro = 4",
        "model.params=3e9",
    )
    assert spec.strategy == "full_shard"
    assert spec.mesh == {"dp_shard": 4, "tp": 4}
    assert spec.rules[1].match == (Selector("glob", "**.norm"),)
    assert (spec.batch.micro, spec.model.params) == (4, 3 * 10**9)
    assert spec.origin("mesh.tp") == Origin("--set", "mesh.tp")
    assert spec.origin("rules[0].match").file == "plan.yaml"


def test_overrides_can_take_back(read: Any) -> None:
    assert read("strategy: ddp\nmesh: {tp: 2}", "mesh=", "strategy=null") == read("")


def test_an_override_of_a_word_by_an_entry_replaces_nothing(read: Any) -> None:
    with pytest.raises(SpecError, match=r"place is 'shard', not a mapping with a key 'tp'"):
        read("rules: [{match: a, place: shard}]", "rules[0].place.tp=colwise")


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_recipe_equals_its_mapping(path: Path) -> None:
    assert load_spec(yaml.safe_load(path.read_text())) == load_spec(path)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_recipe_is_read_in_milliseconds(path: Path) -> None:
    """In calls, which grow with the words that it has."""
    assert calls_of(lambda: load_spec(path)) < 20 * len(path.read_text())


def test_ten_thousand_levels(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    deep = [
        "[" * 10_000,
        "{a: " * 10_000,
        "- " * 10_000,
        "version: 1\nmesh: " + "[" * 5000 + "]" * 5000,
        "".join(" " * level + "a:\n" for level in range(1000)),
    ]
    for text in deep:
        path.write_text(text)
        with pytest.raises(SpecError, match="values are nested more than 32 levels deep"):
            load_spec(path)
    nested: dict[str, Any] = {"version": 1}
    nested["rules"] = nested
    with pytest.raises(SpecError, match="values are nested more than 32 levels deep"):
        load_spec(nested)


def test_what_is_too_deep_is_not_read_on(tmp_path: Path) -> None:
    """In calls: yaml takes the longer for each bracket the more of them are open."""
    path = tmp_path / "plan.yaml"
    path.write_text("[" * 6000)

    def refused() -> None:
        with pytest.raises(SpecError, match="nested more than 32 levels deep"):
            load_spec(path)

    assert calls_of(refused) < 100_000


def test_bombs(tmp_path: Path) -> None:
    aliases = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    path = tmp_path / "plan.yaml"
    path.write_text("a0: &a0 [1]\n" + aliases)
    with pytest.raises(SpecError, match="anchors such as '&a0' are not supported"):
        load_spec(path)
    shared: list[Any] = [1] * 10
    for _ in range(20):
        shared = [shared] * 10
    with pytest.raises(SpecError, match="the plan has more than 20,000 values"):
        load_spec({"version": 1, "rules": shared})


@pytest.mark.parametrize(
    "text",
    [
        "version: 1\nrules:\n" + "  - {match: embed, place: shard}\n" * 29_000,
        "version: 1\n" + "".join(f"k{i}: 1\n" for i in range(90_000)),
        "version: 1\nmesh: {" + "tp: 1, " * 140_000 + "}",
        'version: 1\nstrategy: "' + "a " * 450_000 + '"',
        "version: 1\na: " + "b:" * 450_000,
    ],
    ids=["rules", "keys", "twice", "text", "colons"],
)
def test_a_megabyte_of_nonsense_is_refused_soon(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    start = time.perf_counter()
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert time.perf_counter() - start < 15
    assert len(caught.value.problems) <= 101


def test_numbers_beyond_reason() -> None:
    for number in (10**40, -1, 0, math.inf, math.nan, 1.5, "9" * 5000, True):
        with pytest.raises(SpecError) as caught:
            load_spec({"version": 1, "mesh": {"tp": number}})
        assert len(caught.value.problems) == 1


WORDS = st.sampled_from([
    "version", "model", "hardware", "mesh", "strategy", "precision", "batch", "input", "rules",
    "match", "place", "tp", "dp_shard", "micro", "accumulate", "global", "params", "entry",
    "gpu", "memory", "auto", "full_shard", "colwise", "S(0)", "R", "P", "layers.*", "**.norm",
    "/x/", "3e9", "1", "0", "-1", "2.5", "80GiB", "true", "no", "~", "&", "*", "!", "|", ">", "%",
    "@", "`", "{", "}", "[", "]", ",", ":", "-", "?", "'", '"', "#", "\\", "4\u00a0GiB", "\u2028",
    "é", "0x1F", ".nan", ".inf", "<<", "=", "1:30", "\t", "---", "...",
    '"\\ud800"', '"\\U99999999"',
])  # fmt: skip
MARKS = st.sampled_from(["\n", "\n  ", "\n    - ", ": ", ", ", " ", "{", "}", "[", "]", ""])
SOUP = st.lists(st.tuples(WORDS, MARKS), max_size=40).map(
    lambda pairs: "version: 1\n" + "".join(itertools.chain(*pairs))
)
FUZZ = settings(
    max_examples=300,
    deadline=5000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def is_read_or_refused(source: Any, *overrides: str) -> bool:
    """A Spec, or a SpecError that names its problems; any other exception passes through."""
    try:
        return isinstance(load_spec(source, overrides), Spec)
    except SpecError as error:
        return len(error.problems) > 0 and str(error).startswith("meshplan: ")


@FUZZ
@given(st.binary(max_size=300))
def test_fuzz_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(data)
    assert is_read_or_refused(path)


@FUZZ
@given(SOUP)
def test_fuzz_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    assert is_read_or_refused(path)


@FUZZ
@given(st.sampled_from(PLANS), st.data())
def test_fuzz_recipes(tmp_path: Path, recipe: Path, data: st.DataObject) -> None:
    text = recipe.read_text()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 20)))
    path = tmp_path / "plan.yaml"
    path.write_text(text[:start] + data.draw(WORDS) + text[stop:], encoding="utf-8")
    assert is_read_or_refused(path)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10), WORDS, st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(WORDS, st.integers(), st.none()), inner, max_size=4),
    ),
    max_leaves=15,
)
KEYS = st.sampled_from([
    "model", "hardware", "mesh", "strategy", "precision", "batch", "input", "offload", "pipeline",
    "activation_checkpointing", "tp_plan", "compile", "ddp", "clip_grad_norm", "optimizer", "solve",
])  # fmt: skip
RULE_KEYS = st.sampled_from([
    "match", "place", "stage", "unit", "reshard_after_forward", "precision", "offload", "apply",
    "activation_checkpointing", "why", "optional",
])  # fmt: skip
RULES = st.lists(st.dictionaries(RULE_KEYS, VALUES, max_size=4), max_size=3)


@FUZZ
@given(st.dictionaries(KEYS, VALUES, max_size=4), RULES)
def test_fuzz_mappings(sections: dict[str, Any], rules: list[Any]) -> None:
    assert is_read_or_refused({"version": 1, "rules": rules, **sections})


@FUZZ
@given(st.lists(st.one_of(SOUP, st.builds("{}={}".format, KEYS, SOUP), st.text()), max_size=3))
def test_fuzz_overrides(overrides: list[str]) -> None:
    assert is_read_or_refused({"version": 1, "mesh": {"tp": 2}, "rules": []}, *overrides)
