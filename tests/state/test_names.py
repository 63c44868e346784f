"""Names of a state that wrappers of torch have lengthened are those of the model."""

from __future__ import annotations

import pytest

from meshplan.state.boxes import TensorBox
from meshplan.state.manifest import Manifest, SavedPiece, SavedTensor
from meshplan.state.names import find_renaming, with_names


@pytest.mark.parametrize(
    ("saved", "own", "names"),
    [
        (["w"], ["w"], {}),
        (["module.w"], ["w"], {"module.w": "w"}),
        (["w"], ["module.w"], {"w": "module.w"}),
        (["module._orig_mod.a.w"], ["a.w"], {"module._orig_mod.a.w": "a.w"}),
        # `module` is a word of the model here, and DistributedDataParallel's in front of it.
        (["module.a.module.w"], ["a.module.w"], {"module.a.module.w": "a.module.w"}),
        (["module.w", "w"], ["module.w", "w"], {}),
        (["module.w"], ["module.w", "w"], {}),
        (["module.v"], ["w"], {}),
        (["modules.w"], ["w"], {}),
    ],
)
def test_names_that_differ_in_wrappers_alone_are_one(saved, own, names):
    found = find_renaming([(name,) for name in saved], own)
    assert (dict(found.names), found.clashes) == (names, ())


def test_names_of_a_tied_tensor_are_no_two_tensors():
    found = find_renaming([("module.net.w", "net.w")], ["net.w"])
    assert (dict(found.names), found.clashes) == ({}, ())
    found = find_renaming([("module.a", "module.b")], ["a", "b"])
    assert dict(found.names) == {"module.a": "a", "module.b": "b"}


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (["module.w", "_orig_mod.w"], ["w"]),
        (["module.w", "w"], ["w"]),
        (["_orig_mod.a.w"], ["a.module.w", "a.w"]),
    ],
)
def test_names_that_become_the_same_are_told(saved, own):
    found = find_renaming([(name,) for name in saved], own)
    assert not found.names
    assert found.clashes == ((tuple(saved), tuple(own)),)


def test_all_parts_of_a_manifest_are_renamed():
    piece = SavedPiece("a", "model/module.w", TensorBox((), ()))
    manifest = Manifest(
        step=1, world_size=1, mesh={}, plan="", versions={}, files={},
        tensors={
            "model/module.w": SavedTensor("F32", (), (piece,), ("module.v",)),
            "optimizer/module.w/step": SavedTensor("F32", (), ()),
            "values/0": SavedTensor("F32", (), ()),
        },
        values={
            "optimizer": {"type": "SGD", "groups": [{"options": {}, "params": ["module.w"]}],
                          "plain": {"module.w": {"step": 1}}},
        },
    )  # fmt: skip
    again = with_names(manifest, {"module.w": "w", "module.v": "v"})
    assert list(again.tensors) == ["model/w", "optimizer/w/step", "values/0"]
    assert again.tensors["model/w"].aliases == ("v",)
    assert again.tensors["model/w"].pieces == (piece,)
    assert again.values["optimizer"]["groups"][0]["params"] == ["w"]
    assert again.values["optimizer"]["plain"] == {"w": {"step": 1}}
