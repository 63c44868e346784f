"""Configs that describe no model that can be built: every problem at once, and where it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshplan.errors import Origin, SpecError
from meshplan.model.blueprint import from_config, from_mapping
from tests.model.test_blueprint import PUBLISHED, sizes


def _message(config: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        from_mapping(config, file="config.json")
    return str(caught.value)


OTHERWISE = (
    "for any other model, install torch and transformers, which then build it, or give the model "
    "itself (model: {entry: PKG.MOD:FN} in the plan), or its number of parameters (--params)"
)


def test_unknown_family() -> None:
    assert _message({"model_type": "bert"}) == (
        "meshplan: 1 problem\n"
        "config.json: model_type: model_type 'bert' is not supported\n"
        "    fix: supported are deepseek_v3, gemma2, gpt2, granite, llama, mistral, mixtral, "
        f"qwen2, qwen2_moe, qwen3, qwen3_moe; {OTHERWISE}"
    )
    assert "config.json: model_type: the key is missing\n" in _message({})


def test_another_head_is_refused() -> None:
    assert _message({"model_type": "llama", "architectures": ["LlamaModel"]}) == (
        "meshplan: 1 problem\n"
        "config.json: architectures: ['LlamaModel'] is not LlamaForCausalLM\n"
        f"    fix: only LlamaForCausalLM is supported for llama; {OTHERWISE}"
    )


def test_all_problems_at_once() -> None:
    assert _message(
        {
            "model_type": "llama",
            "hidden_size": "4096",
            "num_hidden_layers": 0,
            "mlp_bias": 1,
            "vocab_size": True,
        }
    ) == (
        "meshplan: 4 problems\n"
        "config.json: vocab_size: True is not a size\n"
        "    fix: write an int from 1 to 1000000000\n"
        "config.json: hidden_size: '4096' is not a size\n"
        "    fix: write an int from 1 to 1000000000\n"
        "config.json: num_hidden_layers: 0 is not a size\n"
        "    fix: write an int from 1 to 10000\n"
        "config.json: mlp_bias: 1 is not true or false\n"
        "    fix: write true or false"
    )


def test_sizes_that_do_not_fit_together() -> None:
    assert _message({"model_type": "llama", **sizes(100, 65, 96, 1, 4, 3)}) == (
        "meshplan: 2 problems\n"
        "config.json: num_attention_heads: 4 heads do not divide hidden_size 65\n"
        "    fix: change num_attention_heads or hidden_size, or add head_dim\n"
        "config.json: num_key_value_heads: 3 key-value heads do not divide 4 attention heads\n"
        "    fix: write a divisor of num_attention_heads"
    )
    assert "cross attention is not supported" in _message(
        {"model_type": "gpt2", "add_cross_attention": True}
    )
    assert "'3' is not a list of layer indices" in _message(
        {"model_type": "qwen3_moe", "mlp_only_layers": "3"}
    )


def test_a_directory_or_a_file(tmp_path: Path) -> None:
    config, count = PUBLISHED["GPT-2"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert from_config(tmp_path).num_params == count
    assert from_config(tmp_path / "config.json").num_params == count


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot read "),
        (b"", "config.json:1:1: not JSON: Expecting value"),
        (b'{"a": 1,\n "b" 2}', "config.json:2:6: not JSON: Expecting ':' delimiter"),
        (b"\x89PNG\r\n\xff\xfe\x00", "the file is not UTF-8 text"),
        (b"[1, 2]", "the file holds a list, not an object of keys and values"),
        (b"[" * 200_000, "not readable JSON: a number is too long, or the nesting too deep"),
        (b" " * 17_000_000, "bytes, but a config.json has at most 16,000,000"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes | None, what: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        from_config(tmp_path, Origin("--config"))
    assert what in str(caught.value)
    assert "fix: give a Hugging Face config.json, or the directory" in str(caught.value)
