"""Patterns: what they match, what is refused, folding and near misses."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.spec.match import PatternError, compile_selector, fold, near, nearest
from meshplan.spec.spec import Selector

NAMES = [
    "", "embed", "layers", "norm", "head",
    *(f"layers.{i}" for i in range(12)),
    *(f"layers.{i}.{part}" for i in range(12) for part in ("attn", "ffn", "norm1", "norm2")),
    *(f"layers.{i}.attn.{w}" for i in range(12) for w in ("wq", "wk", "wv", "wo")),
]  # fmt: skip


def matched(glob: str) -> list[str]:
    matcher = compile_selector(Selector("glob", glob))
    return [name for name in NAMES if matcher.matches(name)]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("embed", ["embed"]),
        ("*", ["embed", "layers", "norm", "head"]),
        ("**", NAMES),
        ("layers.*", [f"layers.{i}" for i in range(12)]),
        ("layers.?", [f"layers.{i}" for i in range(10)]),
        ("layers.1?", ["layers.10", "layers.11"]),
        ("layers.3.norm*", ["layers.3.norm1", "layers.3.norm2"]),
        ("layers.{0..2}", ["layers.0", "layers.1", "layers.2"]),
        ("layers.{0..1,11}", ["layers.0", "layers.1", "layers.11"]),
        ("layers.{00..01}", []),
        ("layers.2.attn.{wq,wk}", ["layers.2.attn.wq", "layers.2.attn.wk"]),
        ("layers.2.attn.w{q,k}", ["layers.2.attn.wq", "layers.2.attn.wk"]),
        ("layers.2.{attn.{wq,wo},ffn}", ["layers.2.ffn", "layers.2.attn.wq", "layers.2.attn.wo"]),
        ("layers.2.norm{,1}", ["layers.2.norm1"]),
        ("{embed,head}", ["embed", "head"]),
        ("**.norm", ["norm"]),
        ("**.layers.4", ["layers.4"]),
        ("layers.**.wq", [f"layers.{i}.attn.wq" for i in range(12)]),
        ("layers.5.**", [n for n in NAMES if n.startswith("layers.5.")]),
        ("{**.wq,head}", ["head", *(f"layers.{i}.attn.wq" for i in range(12))]),
        ("layers", ["layers"]),
        ("layer", []),
        ("layers.*.wq", []),
        ("LAYERS", []),
    ],
)
def test_globs(glob: str, expected: list[str]) -> None:
    assert matched(glob) == expected


def test_a_glob_takes_other_characters_literally() -> None:
    matcher = compile_selector(Selector("glob", "a+b.c-d$(e)"))
    assert matcher.matches("a+b.c-d$(e)")
    assert not matcher.matches("aab.c-d$(e)")


def test_zeros_in_front_of_a_range_are_kept() -> None:
    matcher = compile_selector(Selector("glob", "block{08..11}"))
    found = [n for n in ("block8", "block08", "block11", "block12") if matcher.matches(n)]
    assert found == ["block08", "block11"]


def test_a_regular_expression_must_match_the_whole_name() -> None:
    matcher = compile_selector(Selector("regex", r"layers\.\d+\.attn"))
    assert matcher.matches("layers.3.attn")
    assert not matcher.matches("layers.3.attn.wq")


def test_a_type_is_a_class_name_with_or_without_its_module() -> None:
    matcher = compile_selector(Selector("type", "Linear"))
    assert matcher.matches("head", "Linear", "torch.nn.modules.linear.Linear")
    assert not matcher.matches("Linear", "Embedding", "torch.nn.modules.sparse.Embedding")
    full = compile_selector(Selector("type", "torch.nn.modules.linear.Linear"))
    assert full.matches("head", "Linear", "torch.nn.modules.linear.Linear")


def test_a_parameter_pattern_is_a_glob() -> None:
    matcher = compile_selector(Selector("param", "**.{bias,norm?.weight}"))
    assert matcher.matches("layers.0.norm1.weight")
    assert matcher.matches("bias")
    assert not matcher.matches("layers.0.attn.wq.weight")


@pytest.mark.parametrize(
    ("glob", "what"),
    [
        ("", "the pattern is empty"),
        ("layers..attn", "'layers..attn' has an empty name next to a dot"),
        (".layers", "'.layers' has an empty name next to a dot"),
        ("layers.", "'layers.' has an empty name next to a dot"),
        ("layers.0..3", "'layers.0..3' has an empty name next to a dot"),
        ("layers.{0..x}", "'layers.{0..x}' has an empty name next to a dot"),
        ("layers.{0..3", "a '}' is missing in 'layers.{0..3'"),
        ("layers.0..3}", "a '{' is missing in 'layers.0..3}'"),
        ("}layers{", "a '}' comes before its '{' in '}layers{'"),
        ("layers.{}", "the braces in 'layers.{}' are empty"),
        ("layers.{3..0}", "the range {3..0} counts down"),
        ("layers.{0..5000}", "the range {0..5000} has more than 1,000 numbers"),
        ("layers.a**", "'**' in 'layers.a**' must stand alone between dots"),
        ("layers.**x.wq", "'**' in 'layers.**x.wq' must stand alone between dots"),
        ("layers.[0]", "'[' is not supported in the pattern 'layers.[0]'"),
    ],
)
def test_broken_globs(glob: str, what: str) -> None:
    with pytest.raises(PatternError, match=f"^{re.escape(what)}$"):
        compile_selector(Selector("glob", glob))


@pytest.mark.parametrize("text", ["(", "*", "[", "(" * 20_000, "a{1,0}"])
def test_broken_regular_expressions(text: str) -> None:
    with pytest.raises(PatternError):
        compile_selector(Selector("regex", text))


@given(st.text(alphabet="ab01*?{},.[]/", max_size=30))
def test_any_glob_is_read_or_refused(glob: str) -> None:
    try:
        matcher = compile_selector(Selector("glob", glob))
    except PatternError:
        return
    assert matcher.matches("a.b") in (True, False)


parts = st.one_of(st.sampled_from(["a", "b", "01", ""]), st.integers(0, 12).map(str))
fqns = st.lists(parts, min_size=1, max_size=4).map(".".join)


@given(st.lists(fqns, max_size=40))
def test_folding_keeps_every_name_once(names: list[str]) -> None:
    readable = [n for n in names if "" not in n.split(".")]
    folded = fold(readable)
    assert len(folded) <= len(set(readable))
    universe = {".".join(c) for n in (1, 2, 3, 4) for c in itertools.product("ab", repeat=n)}
    universe |= set(readable)
    matchers = [compile_selector(Selector("glob", pattern)) for pattern in folded]
    for name in universe:
        assert sum(m.matches(name) for m in matchers) == (name in readable)


def test_folding_any_names_ends_and_starts_with_the_first() -> None:
    assert fold([]) == []
    assert fold([""]) == [""]
    assert fold(["b.1", "a.1", "b.2", "b.4", "b.3"]) == ["b.{1..4}", "a.1"]
    assert fold(["x.0.y.0", "x.0.y.1", "x.1.y.0", "x.1.y.1"]) == ["x.{0,1}.y.{0,1}"]
    assert fold(["x.0.y.0", "x.0.y.1", "x.1.y.0"]) == ["x.0.y.{0,1}", "x.1.y.0"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*.atn.wq", "layers.*.attn.wq"),
        ("layers.{0..3}.atn.{wq,wk}", "layers.{0..3}.attn.{wq,wk}"),
        ("layer.*.attn", "layers.*.attn"),
        ("layers.*.wq", "layers.*.attn.wq"),
        ("model.layers.*.attn.wq", "layers.*.attn.wq"),
        ("**.atn", "**.attn"),
        ("haed", "head"),
        ("Embed", "embed"),
        ("layers.{100..200}.attn", "layers.*.attn"),
        ("transformer.h.*.mlp.c_fc", None),
        ("", None),
        ("layers.{", "layers.*"),
    ],
)
def test_near_misses(pattern: str, expected: str | None) -> None:
    assert nearest(pattern, NAMES) == expected


@given(st.text(alphabet="layers.*{}0attnwq,", max_size=25))
def test_a_suggestion_always_matches_something(pattern: str) -> None:
    suggestion = nearest(pattern, NAMES[1:])
    assert suggestion is None or matched(suggestion)


def test_near_words() -> None:
    assert near("FULL_SHRAD", ["full_shard", "ddp"]) == "full_shard"
    assert near("x" * 100_000, ["full_shard", "ddp"]) is None
