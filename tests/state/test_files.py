"""Files, manifests and folders: what is read is what was written, and damage is found."""

from __future__ import annotations

import json
import random
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import MissingStateError, StateError
from meshplan.state.boxes import TensorBox
from meshplan.state.folder import (
    begin_folder,
    find_state,
    finish_folder,
    folder_of,
    incomplete,
    remove_old,
    steps_in,
)
from meshplan.state.manifest import Manifest, SavedFile, SavedPiece, SavedTensor, read_manifest
from meshplan.state.safetensors import TensorEntry, TensorFile, digest_of, write

DATA = np.arange(24, dtype=np.float32).reshape(4, 6)


def write_one(path, data=DATA):
    return write(
        path, {"x": TensorEntry("F32", data.shape)}, lambda _: (data.reshape(-1).view("u1"),)
    )


def save_one(path, step, values=None):
    """A state of one tensor in two pieces, in two files."""
    folder = begin_folder(path, step)
    files, pieces = {}, []
    for number, rows in enumerate((slice(0, 1), slice(1, 4))):
        name = f"rank-{number:05d}.safetensors"
        files[name] = SavedFile(*write_one(folder / name, DATA[rows]))
        box = TensorBox((rows.start, 0), DATA[rows].shape)
        pieces.append(SavedPiece(name, "x", box))
    manifest = Manifest(
        step=step,
        world_size=2,
        mesh={"dp_shard": 2},
        plan="plan",
        lock="sha256:1f3a",
        versions={"meshplan": "1"},
        files=files,
        tensors={"model/x": SavedTensor("F32", DATA.shape, tuple(pieces), ("y",))},
        values=values or {"extra": {"a": [1.5, None]}},
    )
    return finish_folder(folder, manifest), manifest


def test_the_library_of_that_name_reads_it(tmp_path):
    write_one(tmp_path / "a.safetensors")
    assert (safetensors.numpy.load_file(tmp_path / "a.safetensors")["x"] == DATA).all()


def test_it_reads_what_the_library_writes(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {"x": DATA, "s": np.array(2.5), "none": np.zeros((0, 3), np.int8)}
    safetensors.numpy.save_file(tensors, path)
    file = TensorFile(path)
    assert {n: (e.dtype, e.shape) for n, e in file.tensors.items()} == {
        "x": ("F32", (4, 6)), "s": ("F64", ()), "none": ("I8", (0, 3)),
    }  # fmt: skip
    into = np.zeros((5, 5), np.float32)
    box, local = TensorBox((1, 2), (3, 2)), TensorBox((0, 1), (3, 2))
    file.read("x", box, into.reshape(-1).view("u1"), local, (5, 5))
    assert (into[0:3, 1:3] == DATA[1:4, 2:4]).all()
    assert into.sum() == DATA[1:4, 2:4].sum()


@given(st.data())
def test_any_box_is_read_into_its_place(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "a.safetensors"
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    write(path, {"x": TensorEntry("I16", shape)}, lambda _: (whole.reshape(-1).view("u1"),))
    size = tuple(data.draw(st.integers(1, n)) for n in shape)
    start = tuple(data.draw(st.integers(0, n - m)) for n, m in zip(shape, size, strict=True))
    room = tuple(m + data.draw(st.integers(0, 2)) for m in size)
    at = tuple(data.draw(st.integers(0, n - m)) for n, m in zip(room, size, strict=True))
    into, expected = np.full(room, -1, np.int16), np.full(room, -1, np.int16)
    box, local = TensorBox(start, size), TensorBox(at, size)
    TensorFile(path).read("x", box, into.reshape(-1).view("u1"), local, room)
    expected[local.slices] = whole[box.slices]
    assert (into == expected).all()


def test_a_file_that_was_cut_after_it_was_opened_is_no_crash(tmp_path):
    path = tmp_path / "a.safetensors"
    write_one(path)
    file, whole, into = TensorFile(path), TensorBox.whole(DATA.shape), np.zeros_like(DATA)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(StateError, match="it ends within a tensor"):
        file.read("x", whole, into.reshape(-1).view("u1"), whole, DATA.shape)


def test_its_digest_is_that_of_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    size, digest = write_one(path)
    assert (size, digest) == (path.stat().st_size, digest_of(path))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(StateError, match="not a whole safetensors file"):
        TensorFile(path)


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 97]}},
        {"x": {"dtype": "F32", "shape": [4, 7], "data_offsets": [0, 96]}},
        {"x": {"dtype": "F32", "shape": [-4, -6], "data_offsets": [0, 96]}},
        {"x": {"dtype": "F99", "shape": [4, 6], "data_offsets": [0, 96]}},
        {"x": {"dtype": "F32", "shape": [4, 6], "data_offsets": [8, 104]}},
        {"x": {"dtype": "F32", "shape": [4, 6], "data_offsets": [-96, 0]}},
        {"x": {"dtype": "F32", "shape": [4.0, 6], "data_offsets": [0, 96]}},
        {"x": []},
        ["x"],
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header):
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(text)) + text + bytes(96))
    with pytest.raises(StateError, match="not a whole safetensors file"):
        TensorFile(tmp_path / "a")


def test_a_manifest_comes_back(tmp_path):
    folder, manifest = save_one(tmp_path, 3)
    back = read_manifest(folder)
    assert back.digest
    assert back.dump() == manifest.dump()
    assert back.num_bytes == DATA.nbytes


def test_a_manifest_of_a_version_without_locks_is_read(tmp_path):
    from meshplan.state import manifest as module

    folder, _ = save_one(tmp_path, 3)
    content = json.loads((folder / "manifest.json").read_bytes())
    del content["digest"], content["lock"]
    content["digest"] = module._digest(content)
    (folder / "manifest.json").write_text(json.dumps(content))
    assert read_manifest(folder).lock is None


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path):
    folder, _ = save_one(tmp_path, 3)
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in (1, 32):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            try:
                same = read_manifest(folder)
            except StateError:
                continue
            # White space is no content.
            assert json.loads(path.read_bytes()) == json.loads(whole), at
            assert same.step == 3
    path.write_bytes(whole[:-20])
    with pytest.raises(StateError):
        read_manifest(folder)


LIES = {
    "a piece twice": lambda c: c["tensors"]["model/x"]["pieces"].append(
        c["tensors"]["model/x"]["pieces"][0]
    ),
    "a piece less": lambda c: c["tensors"]["model/x"]["pieces"].pop(),
    "no such file": lambda c: c["tensors"]["model/x"]["pieces"][0].__setitem__(0, 7),
    "a file elsewhere": lambda c: c["files"][0].__setitem__(
        0, "/".join(["..", "rank-00000.safetensors"])
    ),
    "a dtype": lambda c: c["tensors"]["model/x"].__setitem__("dtype", "F128"),
    "a shape": lambda c: c["tensors"]["model/x"].__setitem__("shape", [4, -6]),
    "dims": lambda c: c["tensors"]["model/x"].__setitem__("shape", [4, 6, 1]),
    "a step": lambda c: c.__setitem__("step", "3"),
    "values": lambda c: c.__setitem__("values", []),
    "nothing": lambda c: c.pop("tensors"),
    "tensors": lambda c: c.__setitem__("tensors", [1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(tmp_path, lie):
    from meshplan.state import manifest as module

    folder, _ = save_one(tmp_path, 3)
    path = folder / "manifest.json"
    content = json.loads(path.read_bytes())
    content.pop("digest")
    LIES[lie](content)
    content["digest"] = module._digest(content)  # It is made by someone who knows how.
    path.write_text(json.dumps(content))
    with pytest.raises(StateError, match="the manifest is not valid"):
        read_manifest(folder)


def test_a_manifest_of_others_is_named(tmp_path):
    folder, _ = save_one(tmp_path, 3)
    content = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(content | {"version": 9}))
    with pytest.raises(StateError, match="the state has version 9"):
        read_manifest(folder)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(StateError, match="not the manifest of a state that meshplan saved"):
        read_manifest(folder)


def test_the_newest_whole_state_is_found(tmp_path):
    for step in (5, 10, 20):
        save_one(tmp_path, step)
    assert find_state(tmp_path, None)[1].step == 20
    (folder_of(tmp_path, 20) / "manifest.json").unlink()
    assert find_state(tmp_path, None)[1].step == 10
    (folder_of(tmp_path, 10) / "rank-00001.safetensors").write_bytes(b"short")
    assert find_state(tmp_path, None)[1].step == 5
    with pytest.raises(StateError, match=r"5 bytes, but .* were saved"):
        find_state(tmp_path, 10)
    with pytest.raises(MissingStateError, match="no state of step 7") as caught:
        find_state(tmp_path, 7)
    assert "load one of the steps 20, 10, 5" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_a_folder_without_a_state_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(MissingStateError, match="there is no state in this folder"):
            find_state(path, None)


def test_a_state_is_never_overwritten(tmp_path):
    folder, _ = save_one(tmp_path, 3)
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    with pytest.raises(StateError, match="step 3 was saved before"):
        save_one(tmp_path, 3)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before


def test_old_states_go_and_what_is_not_whole_stays(tmp_path):
    for step in (1, 2, 3, 4):
        save_one(tmp_path, step)
    (folder_of(tmp_path, 3) / "manifest.json").unlink()
    incomplete(tmp_path, 2).mkdir()
    incomplete(tmp_path, 9).mkdir()
    (tmp_path / "notes.txt").touch()
    remove_old(tmp_path, 1)
    assert steps_in(tmp_path) == [4, 3]
    assert {each.name for each in tmp_path.iterdir()} == {
        "step-00000004", "step-00000003", "step-00000009.incomplete", "notes.txt",
    }  # fmt: skip


def test_a_step_of_nine_digits_is_found(tmp_path):
    step = random.Random(0).randrange(10**8, 10**9)
    save_one(tmp_path, step)
    assert find_state(tmp_path, None)[1].step == step
