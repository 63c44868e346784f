"""The examples that train a whole model, as they stand: they learn under any plan."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
INPUTS = {
    "train": {"shape": [8, 64], "dtype": "int64"},
    "nanogpt": {"shape": [8, 64], "dtype": "int64"},
    "vit": {"shape": [8, 1, 16, 16], "dtype": "float32"},
    "hf_finetune": {"shape": [8, 24], "dtype": "int64"},
}
PLANS = {
    "ddp": {"strategy": "ddp"},
    "full_shard": {"strategy": "full_shard"},
    "tp": {"mesh": {"tp": 2}, "tp_plan": "auto"},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}},
    "hybrid": {"strategy": "hybrid_shard", "mesh": [2, 2]},
    "fsdp_tp": {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"},
}
ON_FOUR = ("hybrid", "fsdp_tp")
"""The plans of four ranks; the others are of two."""
WORDS = {"train": ["out"], "nanogpt": ["out"], "vit": [], "hf_finetune": ["out"]}
"""The words after the plan, which are folders."""


def printed(path, words):
    """What a script prints on this rank."""
    sys.argv, out = [path, *words], io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


@pytest.fixture
def run(pool, tmp_path):
    """Runs an example under a plan: the losses that rank 0 prints, and all of its lines."""

    def run(example, plan, *words):
        content = {"version": 1, "input": INPUTS[example], **PLANS[plan]}
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(content))
        files = [str(tmp_path / each) for each in ("plan.yaml", *words)]
        text = pool(4 if plan in ON_FOUR else 2).run(
            printed, str(ROOT / f"examples/{example}.py"), files
        )[0]
        return [float(each) for each in re.findall(r" loss (\d\.\d+)", text)], text

    return run


@pytest.mark.wide  # `test_torchrun.py` has an example that goes on.
def test_nanogpt_learns_and_goes_on_under_another_plan(run, tmp_path):
    losses, text = run("nanogpt", "full_shard", "states")
    unseen = [float(each) for each in re.findall(r"unseen text (\d\.\d+)", text)]
    assert len(losses) == 3
    for each in (losses, unseen):
        assert each == sorted(each, reverse=True)
    shutil.rmtree(tmp_path / "states/step-00000060")
    again, text = run("nanogpt", "tp", "states")
    assert text.startswith("step 60: ")
    assert again == pytest.approx(losses[2:], abs=2e-3)


def test_vit_learns_alike_in_replicas_and_in_stages(run):
    losses, text = run("vit", "ddp")
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 4
    assert text.endswith("accuracy 1.00\n")
    assert run("vit", "pp")[0] == pytest.approx(losses, abs=2e-3)


def test_a_model_of_transformers_learns_and_is_tuned_further_under_another_plan(run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses, _ = run("hf_finetune", "full_shard", "first")
    assert losses == sorted(losses, reverse=True)
    again, _ = run("hf_finetune", "tp", "second", "first")
    assert again[0] < losses[-1]
    assert again[-1] < again[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "second")("1 + 1 =", return_tensors="pt")
    assert model(**tokens).logits.shape[-1] == 384


@pytest.mark.wide
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("example", INPUTS)
def test_every_example_learns_under_every_plan(run, example, plan):
    losses, _ = run(example, plan, *WORDS[example])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("example", [*INPUTS, "ray_train"])
def test_an_example_fits_on_a_screen(example):
    assert len((ROOT / f"examples/{example}.py").read_text().splitlines()) <= 60
