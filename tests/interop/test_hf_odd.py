"""The Trainer with data that do not fill the last batch, losses of its own, and used folders.

Which seeded bug would this catch? Samples that are trained on twice because they fill up a batch,
a loss that is divided by the items of all ranks and by the ranks once more, a mean that is
multiplied by the ranks, batches that are grouped by length on each rank, workers of ranks along tp
that draw other tokens, and a job that ends because a checkpoint of its step is there already.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")
pytest.importorskip("lightning", reason="lightning is not installed: its helpers start the ranks")

PLANS = ("ddp", "hybrid", "tp_fsdp", "pp")
ALL = (
    "tokens", "classes", "numbers", "few", "unlogged", "smoothing", "stream", "worker", "drawn",
    "lengths", "documented", "over_ranks", "mean", "untyped", "ignoring", "flat", "flat_few",
    "flat_stream", "pairs", "neighbours", "samples", "plain",
    "shares", "scaled", "early", "translating",
)  # fmt: skip
NOT_UNDER_PP = ("numbers", "over_ranks", "mean", "ignoring", "flat", "flat_few", "flat_stream")
"""A stage cannot tell samples without classes apart, nor what a mean of its own is over; and it has
a part of the rows, which may be one."""


def jobs():
    return importlib.import_module("tests.helpers.hf_odd")


# Functions of the pool's ranks, which import transformers' Trainer there.


def alone(*args):
    return jobs().alone(*args)


def planned(*args):
    return jobs().planned(*args)


def hiding(*args):
    return jobs().hiding(*args)


def written_over(*args):
    return jobs().written_over(*args)


def of_rows(*args):
    return jobs().of_rows(*args)


@pytest.fixture(scope="module")
def one_process(pool, tmp_path_factory):
    """The figures of all cases in one process."""
    (found,) = pool(1).run(alone, str(tmp_path_factory.mktemp("alone")), timeout=240)
    return found


@pytest.mark.parametrize(
    "name",
    [each if each == "tp_fsdp" else pytest.param(each, marks=pytest.mark.wide) for each in PLANS],
)
def test_all_numbers_are_those_of_one_process(pool, one_process, tmp_path: Path, name):
    cases = tuple(each for each in ALL if name != "pp" or each not in NOT_UNDER_PP)
    for every in pool(4).run(planned, name, str(tmp_path), cases, timeout=480):
        for case, found in every.items():
            expected = one_process[case]
            assert found["kept"] == pytest.approx(expected["kept"], rel=1e-5), case
            for key in ("mean", "losses", "norms", "eval_loss"):
                assert found[key] == pytest.approx(expected[key], rel=2e-6), (case, key)
            assert found["tokens"] == expected["tokens"], case
            assert found["flops"] == pytest.approx(expected["flops"], rel=1e-3), case


def test_a_rank_without_samples_counts_nothing_under_pp(pool, one_process, tmp_path: Path):
    cases = ("scaled", "early")
    for every in pool(4).run(planned, "pp", str(tmp_path), cases, timeout=240):
        for case in cases:
            found, expected = every[case], one_process[case]
            assert len(expected["losses"]) == 6  # The last batch of each epoch has one sample.
            for key in ("mean", "losses", "norms", "kept"):
                assert found[key] == pytest.approx(expected[key], rel=2e-6), (case, key)


def test_a_model_with_a_decoder_is_evaluated_under_pp(pool, one_process, tmp_path: Path):
    expected = one_process["translating"]
    for found in pool(4).run(planned, "pp", str(tmp_path), ("translating",), timeout=240):
        for key in ("mean", "losses", "norms", "eval_loss"):
            assert found["translating"][key] == pytest.approx(expected[key], rel=2e-6), key


def test_workers_of_ranks_along_tp_draw_the_same(pool, tmp_path: Path):
    found = pool(4).run(hiding, "tp_fsdp", str(tmp_path), timeout=240)
    assert all(losses == found[0][0] for losses, _ in found)
    assert len(found[0][0]) == 4
    hidden = [each for _, each in found]
    assert hidden[0] == hidden[1] != hidden[2] == hidden[3]  # Data ranks draw others.


def test_checkpoints_are_written_over_and_the_newest_whole_one_is_taken(pool, tmp_path: Path):
    for found in pool(4).run(written_over, "hybrid", str(tmp_path), timeout=240):
        assert found["after"] == pytest.approx(found["before"][6:], rel=1e-6)
        checkpoints = [f"checkpoint-{step}" for step in (2, 4, 6, 8)]
        assert [each for each in found["files"] if "checkpoint" in each] == checkpoints
        assert not [each for each in found["files"] if "incomplete" in each]


def cut_off_twice(folder):
    from meshplan.interop.trainer_folders import in_place_of

    for _ in range(2):
        with suppress(KeyboardInterrupt), in_place_of(folder):
            Path(folder).mkdir(exist_ok=True)
            raise KeyboardInterrupt
    return sorted(each.name for each in Path(folder).parent.rglob("*.txt"))


def test_a_checkpoint_is_kept_until_another_is_whole(pool, tmp_path: Path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "weights.txt").write_text("whole")
    assert pool(1).run(cut_off_twice, str(folder)) == [["weights.txt"]]
    assert (tmp_path / "replaced-checkpoint-3" / "weights.txt").read_text() == "whole"


def test_samples_in_rows_of_a_worker_cannot_be_told_from_those_that_fill_it(pool, tmp_path: Path):
    for warned, found in pool(4).run(of_rows, "ddp", str(tmp_path), timeout=240):
        assert "filled up with 3 repeated samples, which are trained on: a worker reads" in warned
        assert "say dataloader_drop_last=True" in warned
        assert "its 2 samples are in 1 row" in found
        assert "choose per_device_eval_batch_size" in found


def error_of_adafactor(*args):
    return jobs().error_of_adafactor(*args)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["hybrid", "tp_fsdp", "ddp"])
def test_an_optimizer_that_cannot_step_on_shards_is_refused(pool, tmp_path: Path, name):
    for found in pool(4).run(error_of_adafactor, name, str(tmp_path), timeout=240):
        if name == "ddp":
            assert found == ""
        else:
            assert "PlanError" in found
            assert "optim='adafactor' was given" in found
            assert "use optim='adamw_torch'" in found


def pushed(*args):
    return jobs().pushed(*args)


@pytest.mark.parametrize("name", ["pp", pytest.param("hybrid", marks=pytest.mark.wide)])
def test_whole_models_are_pushed_by_rank_0_as_the_trainer_does(pool, tmp_path: Path, name):
    (expected,) = pool(1).run(pushed, "", str(tmp_path / "alone"), timeout=240)
    first, *others = pool(4).run(pushed, name, str(tmp_path / "planned"), timeout=240)
    assert all(not each["pushed"] for each in others)
    said = [message for message, _ in expected["pushed"]]
    assert said[-2:] == ["Model save", "done"]
    assert len(said) > 3  # Each checkpoint, too.
    assert [message for message, _ in first["pushed"]] == said
    for (_, files), (_, wanted) in zip(first["pushed"], expected["pushed"], strict=True):
        assert {"config.json", "generation_config.json"} < set(files)
        assert ("README.md" in files) == ("README.md" in wanted)
    for found, wanted in zip(first["logits"], expected["logits"], strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
