"""Dim classes on flows written by hand: what each operation links, and what it blocks."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.model.dims import DimClasses, classify
from meshplan.model.dims.factors import Factors
from meshplan.model.flow import UPDATE, Call, Flow, Op, Ref, Value

Shape = tuple[int, ...]


class Tape:
    """Writes a flow: inputs first, then operations by name."""

    def __init__(self, **weights: Shape) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.at: dict[str, int] = {}
        for name, shape in weights.items():
            self._new(name, shape, "parameter", name)

    def _new(self, name: str, shape: Shape, origin: Any, label: str = "") -> int:
        number = len(self.values)
        self.values.append(
            Value(id=number, shape=shape, dtype="float32", origin=origin, name=label)
        )
        self.at[name] = number
        return number

    def op(self, out: str, shape: Shape, name: str, *args: Any, pointwise: bool = False) -> None:
        def spell(item: Any) -> Any:
            if isinstance(item, str):
                return Ref(self.at[item])
            return tuple(map(spell, item)) if isinstance(item, tuple | list) else item

        spelled = spell(args)
        number = self._new(out, shape, "op")
        self.ops.append(
            Op(
                name=name,
                args=spelled,
                kwargs={},
                outputs=(number,),
                call=0,
                is_pointwise=pointwise,
            )
        )

    def classes(self) -> DimClasses:
        root = Call(id=0, module="", parent=None, inputs=(), outputs=(), ops=(0, len(self.ops)))
        flow = Flow(values=tuple(self.values), ops=tuple(self.ops), calls=(root,))
        return classify(flow)


def sizes(classes: DimClasses, tape: Tape, name: str) -> list[list[int]]:
    return [[classes.sizes[f] for f in dim] for dim in classes.dims[tape.at[name]]]


def why(classes: DimClasses, tape: Tape, name: str, dim: int = 0) -> list[str]:
    return [classes.blocked.get(f, "") for f in classes.dims[tape.at[name]][dim]]


def test_a_product_links_rows_and_columns_and_notes_what_it_sums_over() -> None:
    tape = Tape(x=(6, 4), w=(4, 8))
    tape.op("y", (6, 8), "aten.mm.default", "x", "w")
    found = tape.classes()
    x, w, y = (found.dims[tape.at[n]] for n in "xwy")
    assert y == (x[0], w[1])
    assert x[1] == w[0] == found.summed[0]
    assert found.blocked == {}


def test_a_view_splits_a_dim_for_everybody() -> None:
    tape = Tape(x=(6, 32), bias=(32,))
    tape.op("y", (6, 32), "aten.add.Tensor", "x", "bias", pointwise=True)
    tape.op("z", (6, 4, 8), "aten.view.default", "y", (6, 4, 8))
    tape.op("p", (6, 4, 8), "aten._softmax.default", "z", -1, False)
    found = tape.classes()
    assert sizes(found, tape, "bias") == [[4, 8]]
    assert why(found, tape, "bias") == ["", "_softmax mixes elements along one of its dims"]


def test_a_view_across_factors_blocks_them() -> None:
    tape = Tape(x=(4, 6))
    tape.op("y", (4, 6), "aten.view.default", "x", (4, 6))
    tape.op("z", (3, 8), "aten.view.default", "y", (3, 8))
    found = tape.classes()
    assert why(found, tape, "x", 0) == ["a view regroups one of its dims unevenly"]
    assert set(why(found, tape, "x", 1)) == {"a view regroups one of its dims unevenly"}


def test_dims_split_in_different_ways_have_common_factors_or_are_blocked() -> None:
    factors = Factors()
    whole = factors.new(24)
    factors.unify(whole, (*factors.new(4), *factors.new(6)), "unlike")
    factors.unify(whole, (*factors.new(8), *factors.new(3)), "unlike")
    assert [factors.size((f,)) for f in factors.leaves(whole)] == [4, 2, 3]
    assert not any(factors.blocked(f) for f in factors.leaves(whole))
    factors.unify(whole, (*factors.new(3), *factors.new(8)), "unlike")
    assert {factors.blocked(f) for f in factors.leaves(whole)} == {"unlike"}


def test_equal_pieces_are_places_of_an_outer_factor_and_others_block() -> None:
    tape = Tape(x=(2, 24))
    tape.op("a", (2, 8), "aten.slice.Tensor", "x", 1, 0, 8)
    tape.op("b", (2, 8), "aten.slice.Tensor", "x", 1, 16, 24)
    found = tape.classes()
    assert sizes(found, tape, "x") == [[2], [3, 8]]
    assert why(found, tape, "x", 1) == ["the pieces of one of its dims are used separately", ""]
    assert found.dims[tape.at["a"]][1] == found.dims[tape.at["b"]][1]
    tape.op("c", (2, 9), "aten.slice.Tensor", "x", 1, 0, 9)
    assert set(why(tape.classes(), tape, "x", 1)) == {
        "the pieces of one of its dims are used separately",
        "a slice takes a part of one of its dims",
    }


def test_pieces_shifted_by_half_a_piece_block() -> None:
    tape = Tape(x=(2, 24))
    tape.op("a", (2, 8), "aten.slice.Tensor", "x", 1, 4, 12)
    assert why(tape.classes(), tape, "x", 1) == ["a slice takes a part of one of its dims"]


@pytest.mark.parametrize(
    ("name", "args", "shape", "blocked"),
    [
        ("aten.cumsum.default", (1,), (4, 6), {1}),
        ("aten.flip.default", ((0,),), (4, 6), {0}),
        ("aten.sum.dim_IntList", ((1,),), (4,), {1}),
        ("aten.mean.dim", (None,), (), {0, 1}),
        ("aten.amax.default", ((0,), True), (1, 6), {0}),
        ("aten.select.int", (0, 2), (6,), {0}),
        ("aten.constant_pad_nd.default", ((1, 1),), (4, 8), {1}),
        ("aten.slice.Tensor", (1, 0, 6, 2), (4, 3), {1}),
        ("aten.native_layer_norm.default", ((6,), None, None, 1e-5), (4, 6), {1}),
        ("nobody.knows.this", (), (4, 6), {0, 1}),
        ("aten.transpose.int", (0, 1), (6, 4), set()),
        ("aten.clone.default", (), (4, 6), set()),
        ("aten.unsqueeze.default", (-1,), (4, 6, 1), set()),
        ("aten.repeat.default", ((2, 1),), (8, 6), set()),
    ],
)
def test_what_an_operation_looks_across_is_blocked_and_nothing_else(
    name: str, args: tuple[Any, ...], shape: Shape, blocked: set[int]
) -> None:
    tape = Tape(x=(4, 6))
    tape.op("y", shape, name, "x", *args)
    found = tape.classes()
    assert {d for d in (0, 1) if any(why(found, tape, "x", d))} == blocked


def test_attention_keeps_heads_apart_and_shares_those_of_keys() -> None:
    tape = Tape(q=(2, 8, 5, 4), k=(2, 2, 7, 4), v=(2, 2, 7, 4), mask=(8, 1, 7))
    tape.op("o", (2, 8, 5, 4), "aten._scaled_dot_product_flash_attention_for_cpu.default",
            "q", "k", "v", 0.0, False, "mask")  # fmt: skip
    found = tape.classes()
    assert sizes(found, tape, "q")[1] == sizes(found, tape, "mask")[0] == [2, 4]
    assert found.dims[tape.at["k"]][1] == found.dims[tape.at["q"]][1][:1]
    assert why(found, tape, "q", 1) == ["", ""]
    assert why(found, tape, "q", 3) == ["attention mixes the features of a head"]
    assert why(found, tape, "k", 2) == ["attention mixes positions of the sequence"]


def test_one_class_in_two_dims_is_blocked() -> None:
    tape = Tape(x=(6, 4))
    tape.op("t", (4, 6), "aten.t.default", "x")
    tape.op("y", (6, 6), "aten.mm.default", "x", "t")
    found = tape.classes()
    assert why(found, tape, "x", 0) == ["one of its dims occurs twice in a tensor"]
    assert why(found, tape, "x", 1) == [""]


def test_a_lookup_blocks_rows_and_keeps_columns() -> None:
    tape = Tape(table=(10, 6), rows=(3, 2))
    tape.op("y", (3, 2, 6), "aten.embedding.default", "table", "rows")
    tape.op("z", (3, 2, 6), "aten.index.Tensor", "table", ("rows",))
    found = tape.classes()
    assert why(found, tape, "table", 0) == ["its rows are looked up by index"]
    assert found.dims[tape.at["y"]][2] == found.dims[tape.at["z"]][2]
    assert why(found, tape, "table", 1) == [""]


def test_what_is_written_through_a_view_runs_along_with_it() -> None:
    tape = Tape(x=(4, 6), y=(4, 2))
    tape.op("v", (4, 2), "aten.slice.Tensor", "x", 1, 0, 2)
    tape.op("w", (4, 2), "aten.copy_.default", "v", "y")
    tape.op("u", (4, 6), UPDATE, "x", "w")
    found = tape.classes()
    assert found.dims[tape.at["u"]][0] == found.dims[tape.at["y"]][0]
    assert why(found, tape, "y", 0) == [""]
