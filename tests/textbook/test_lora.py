"""`meshplan estimate --lora`: how many parameters adapters have, and what their training takes.

Which seeded bug would this catch? An adapter counted on one side of a projection only, a head among
all linear layers, a projection counted twice because two targets name it, experts counted as
projections, a frozen base with gradients, and a guess in place of a size that is not known.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshplan import SpecError
from meshplan.cli.app import main
from meshplan.model.blueprint import from_config, from_mapping
from meshplan.textbook.lora import count_adapters, read_adapters

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "plans/models/llama-3.1-8b.json"


@pytest.fixture
def run(capsys):
    """`run("--params 3e9 ...")` -> (exit code, stdout, stderr)."""

    def of(words: str) -> tuple[int, str, str]:
        code = main(["estimate", *words.split()])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return of


@pytest.mark.parametrize(
    ("text", "num"),
    [
        # 32 layers of hidden size 4096, 8 of 32 heads for keys and values, MLPs of 14336.
        ("r=16,targets=q_proj:v_proj", 16 * 32 * (2 * 4096 + 4096 + 1024)),
        ("r=1,targets=q_proj", 32 * 2 * 4096),
        ("r=2,targets=self_attn.q_proj:q_proj", 2 * 32 * 2 * 4096),
        # As published for this model: "trainable params: 41,943,040".
        ("r=16,targets=all-linear", 41_943_040),
        ("r=1,targets=lm_head", 4096 + 128_256),
        # Spellings of peft, and separators that are tried first.
        ("r=16,targets=q_proj+v_proj", 16 * 32 * (2 * 4096 + 4096 + 1024)),
        ("rank=16, targets=q_proj, v_proj", 16 * 32 * (2 * 4096 + 4096 + 1024)),
        ("target_modules=all_linear,r=16", 41_943_040),
        ("params=6.8M", 6_800_000),
    ],
)
def test_llama_8b(text, num):
    assert count_adapters(read_adapters(text), from_config(LLAMA)) == num


def test_transposed_projections():
    gpt2 = from_mapping({"model_type": "gpt2"})
    blocks = 12 * ((768 + 3 * 768) + (768 + 768) + 2 * (768 + 4 * 768))
    assert count_adapters(read_adapters("r=4,targets=all-linear"), gpt2) == 4 * blocks


def test_adapters_of_fused_experts_are_no_guess():
    mixtral = from_config(ROOT / "plans/models/mixtral-8x7b.json")
    attention = 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    targets = "targets=q_proj:k_proj:v_proj:o_proj"
    assert count_adapters(read_adapters(f"r=8,{targets}"), mixtral) == 8 * attention
    deepseek = from_config(ROOT / "plans/models/deepseek-v3.json")  # With a shared expert.
    for model, other in ((mixtral, "all-linear"), (deepseek, "q_b_proj:gate_proj")):
        with pytest.raises(SpecError, match=f"{other} names modules of a mixture of experts"):
            count_adapters(read_adapters(f"r=8,targets={other}"), model)


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("r=16", "targets is missing", "r=16,targets=q_proj:v_proj"),
        ("targets=q_proj", "r is missing", "r=16,targets=q_proj:v_proj"),
        ("", "'' states no value", "r=16"),
        ("r=16,r=8,targets=q", "'r' is stated twice", "state it once"),
        ("r=0,targets=q_proj", "r: ", "r=16"),
        ("alpha=8,targets=q_proj", "'alpha' is no key", "r=16"),
        ("r=8,rank=8,targets=q_proj", "'r' is stated twice", "state it once"),
        ("r=8,target=q_proj", "'target' is no key", "did you mean 'targets'?"),
        ("r=8,targets=q_proj:", "is no list of names", "all-linear"),
        ("r=8,targets=all-linear:q_proj", "is no list of names", "all-linear"),
        ("r=8,params=6.8M", "also follows from r and targets", "params alone"),
        ("r=8,targets=q_prj", "has no projection 'q_prj'", "did you mean 'q_proj'?"),
        ("r=8,targets=proj", "has no projection 'proj'", "did you mean"),
        ("r=8,targets=layers", "has no projection 'layers'", "q_proj, k_proj, v_proj"),
    ],
)
def test_what_is_wrong_is_said(text, what, fix):
    with pytest.raises(SpecError) as caught:
        count_adapters(read_adapters(text), from_config(LLAMA))
    assert what in str(caught.value)
    assert fix in str(caught.value)


def test_the_table_has_a_frozen_base(run):
    code, out, _ = run(f"--config {LLAMA} --gpus 8 --lora r=16,targets=q_proj:v_proj --json")
    result = json.loads(out)["result"]
    assert (code, result["num_adapter_params"]) == (0, 6_815_744)
    rows = {row["strategy"]: row["terms"] for row in result["rows"]}
    assert list(rows) == ["ddp", "zero1", "zero2", "full_shard", "hybrid_shard"]
    base, num = 2 * 8_030_261_248, 6_815_744
    assert rows["ddp"] == {
        "base": base, "weights": 4 * num, "gradients": 4 * num, "adam": 8 * num, "buckets": 4 * num,
    }  # fmt: skip
    assert rows["full_shard"] == {
        "base": base // 8, "weights": num // 2, "gradients": num // 2, "adam": num
    }  # fmt: skip


def test_a_size_that_is_not_known_is_no_guess(run):
    code, _, err = run("--params 8e9 --gpus 8 --lora r=16,targets=q_proj:v_proj")
    assert code == 2
    assert "which a number of parameters does not tell" in err
    assert "--lora params=N" in err
    code, out, _ = run("--params 8e9 --gpus 8 --lora params=6.8M")
    assert (code, "8.00 B parameters, frozen, and 6.80 M of adapters" in out) == (0, True)
    assert "no flag or plan states the size of the model" in run("--gpus 8 --lora r=1,targets=q")[2]
    code, _, err = run("--gpus 8 --memory 8GiB --max-params --lora params=6.8M")
    assert (code, "the size of adapters depends on the model" in err) == (2, True)


def test_a_plan_states_the_model_and_the_row(run, tmp_path: Path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        f"version: 1\nmodel: {{config: {LLAMA}}}\nmesh: {{dp_shard: 8}}\nstrategy: full_shard\n"
        "hardware: {nodes: 1, gpus_per_node: 8, gpu: h100-sxm-80gb}\n"
    )
    code, out, err = run(f"-f {plan} --lora r=16,targets=all-linear --min-gpus")
    assert code == 0
    (marked,) = [line for line in out.splitlines() if "<- the plan" in line]
    assert marked.startswith("full_shard    lora       2*a/n + 16*t/n")
    assert "full_shard    lora  1  n = (2*a + 16*t)/M" in out
    assert "the peak of a step with adapters is traced from the model itself" in err
