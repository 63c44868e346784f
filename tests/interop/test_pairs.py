"""`meshplan.trainer` of TRL's DPOTrainer and RewardTrainer has the numbers of one process under pp.

Which seeded bug would this catch? A batch that is cut between the chosen answers and the rejected
ones, a reference with adapters in it, or without the copy of those that had begun to learn,
repeated samples in a last batch that is not full, and metrics of a part of a batch.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")
pytest.importorskip("lightning", reason="lightning is not installed: its helpers start the ranks")
for package in ("peft", "datasets", "trl"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")

ALL = (
    "reward", "reward_before", "reward_margin", "reward_lora", "dpo_other", "dpo_gpt2",
    "dpo_precomputed", "dpo_lora", "dpo_adapted", "dpo_ipo",
)  # fmt: skip


def jobs():
    return importlib.import_module("tests.helpers.pair_jobs")


# Functions of the pool's ranks, which import TRL there.


def alone(*args):
    return jobs().alone(*args)


def planned(*args):
    return jobs().planned(*args)


def refused(*args):
    return jobs().refused(*args)


DPO = tuple(case for case in ALL if case.startswith("dpo"))


@pytest.mark.parametrize(
    ("name", "cases", "is_exact"),
    [
        ("pp", ("reward_before", "reward_margin", "dpo_lora"), True),
        *(pytest.param(*each, marks=pytest.mark.wide)
          for each in (("pp", ALL, True), ("pp", DPO, False), ("pp_ddp", ALL, True),
                       ("pp_fsdp", ("reward", "dpo_lora"), True),
                       ("pp_tp", ("reward_lora", "dpo_lora", "dpo_other"), True))),
    ],
)  # fmt: skip
def test_all_numbers_are_those_of_one_process(pool, tmp_path: Path, name, cases, is_exact):
    more = {"num": 29, "is_exact": is_exact}
    (expected,) = pool(1).run(alone, str(tmp_path / "alone"), cases, more, timeout=480)
    world = 2 if name == "pp" else 4
    for every in pool(world).run(planned, name, str(tmp_path / name), cases, more, timeout=480):
        for case, found in every.items():
            assert len(found) == len(expected[case]) > 4
            for logs, wanted in zip(found, expected[case], strict=True):
                # They are means over the ranks' means.
                left_out = {"accuracy", "margin"} if name not in ("pp", "pp_tp") else set()
                assert logs.keys() == wanted.keys()
                for key in wanted.keys() - left_out:
                    # TRL computes log-probabilities, of about 20, in float32; the Trainer adds up
                    # losses in float32.
                    bound = (1e-6 if "loss" in key else 1e-12) if is_exact else 1e-5
                    assert logs[key] == pytest.approx(wanted[key], rel=bound, abs=bound), (
                        case,
                        key,
                    )


@pytest.mark.parametrize(
    ("case", "more", "words"),
    [
        ("dpo_other", {"loss_type": ["aot"]}, "parts together, into which a pipeline cuts it"),
        ("dpo_other", {"sync_ref_model": True}, "fix: leave it out, or use strategy: ddp"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(pool, tmp_path: Path, case, more, words):
    for found in pool(2).run(refused, "pp", str(tmp_path), case, more, timeout=240):
        assert words in found
