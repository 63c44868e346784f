"""Checkpoints of Hugging Face: what transformers reads and writes is what the model has."""

from __future__ import annotations

import json

import pytest
import torch

import meshplan
from meshplan.errors import MissingStateError, StateError
from tests.helpers.stated import LAYOUTS, Model, plan_of


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
        )
    )  # fmt: skip


FULL = {"version": 1, "strategy": "full_shard"}


def write_llama(path, tied):
    model = meshplan.parallelize(llama(tied), FULL)
    meshplan.save_pretrained(model, path)


def read_llama(path, tied):
    torch.manual_seed(9)
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(path))
    model = meshplan.parallelize(model, FULL)
    assert meshplan.load_pretrained(model, path) == ()
    return meshplan.full_state_dict(model)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_what_is_written(pool, tmp_path, tied):
    from transformers import LlamaForCausalLM

    pool(4).run(write_llama, tmp_path, tied)
    again, expected = (
        LlamaForCausalLM.from_pretrained(tmp_path).state_dict(),
        llama(tied).state_dict(),
    )
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    sizes = [each.stat().st_size for each in tmp_path.glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("tied", [False, True])
def test_it_reads_what_transformers_writes(pool, tmp_path, tied):
    model = llama(tied)
    model.save_pretrained(tmp_path, max_shard_size="6KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    again, expected = pool(2).run(read_llama, tmp_path, tied)[0], model.state_dict()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def there_and_back(path, source):
    torch.manual_seed(0)
    expected = Model()
    model = meshplan.parallelize(Model(), plan_of(source))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model = meshplan.parallelize(expected, plan_of(source))
    meshplan.save_pretrained(model, path)
    other = meshplan.parallelize(Model(), plan_of(source))
    meshplan.load_pretrained(other, path)
    return meshplan.full_state_dict(other), meshplan.full_state_dict(model)


@pytest.mark.parametrize("layout", ["pp", "packed", "ep_fsdp", "pp_fsdp_tp"])
def test_any_layout_writes_whole_tensors(pool, tmp_path, layout):
    again, expected = pool(LAYOUTS[layout].world).run(there_and_back, tmp_path, layout)[0]
    assert again.keys() == expected.keys()
    assert "unit" not in expected
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())


def read_wrapped(path):
    torch.manual_seed(9)
    model = meshplan.parallelize(llama(), FULL)
    with pytest.warns(
        UserWarning, match=r"21 tensors were .*: module.model.embed_tokens.weight as"
    ):
        assert meshplan.load_pretrained(model, path) == ()
    return meshplan.full_state_dict(model)


def test_names_of_a_wrapped_model_are_read_with_a_note(pool, tmp_path):
    from safetensors.torch import save_file

    expected = llama().state_dict()
    save_file({f"module.{name}": t for name, t in expected.items()}, tmp_path / "model.safetensors")
    again = pool(2).run(read_wrapped, tmp_path)[0]
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def refused(path, kind):
    model = meshplan.parallelize(Model(), plan_of("ddp"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verb = meshplan.save_pretrained if kind == "save" else meshplan.load_pretrained
    with pytest.raises(StateError) as caught:
        verb(model, path)
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(caught.value), isinstance(caught.value, MissingStateError), same


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("none", "this folder has no safetensors files"),
        ("nowhere", "this folder has no safetensors files"),
        ("save", "this folder has a checkpoint, which is not overwritten"),
        ("other", "the state has 3 tensors that the model lacks"),
        ("index", "the index is not valid"),
        ("outside", "the index names the file"),
        ("torn", "not a whole safetensors file"),
        ("both", "head.weight and module.head.weight in the state could each be head.weight"),
        ("lost", "the index names head.weight, which is not in model.safetensors"),
    ],
)
def test_what_cannot_be_read_or_written_is_told_on_all_ranks(pool, tmp_path, kind, text):
    from safetensors.torch import save_file

    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    if kind not in ("none", "nowhere"):
        save_file({name: torch.ones(3) for name in "abc"}, file)
    if kind == "both":
        save_file({name: torch.ones(3) for name in ("head.weight", "module.head.weight")}, file)
    if kind == "index":
        index.write_text("[]")
    elif kind == "outside":
        index.write_text(json.dumps({"weight_map": {"a": "/".join(["..", "a.safetensors"])}}))
    elif kind == "torn":
        file.write_bytes(file.read_bytes()[:-4])
    elif kind == "lost":
        index.write_text(json.dumps({"weight_map": {"head.weight": "model.safetensors"}}))
    path = tmp_path / "nowhere" if kind == "nowhere" else tmp_path
    for found, is_missing, same in pool(2).run(refused, path, kind):
        assert text in found
        assert is_missing == (kind in ("none", "nowhere"))
        assert same
