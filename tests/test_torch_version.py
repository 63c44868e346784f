"""The versions of torch that predictions hold for, what is said of others, and what spans them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshplan.api import planning
from meshplan.api.checking import estimate_memory
from meshplan.memory.answer import assemble
from meshplan.memory.log import torch_version
from meshplan.runtime.apply.data.data import mixed_precision
from meshplan.runtime.base.mesh import _packed, replicated
from meshplan.runtime.torch_private import values
from meshplan.runtime.torch_private.ops import _FromLocal, as_dtensor
from meshplan.spec.spec import Precision
from tests.bench import torch_versions

ROOT = Path(__file__).parents[1]
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
PLAN = {
    "version": 1, "model": {"config": "config.json"}, "mesh": {"dp_shard": 2},
    "precision": "bf16-mixed", "batch": {"micro": 1, "accumulate": 1, "seq_len": 64},
    "hardware": {"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"},
}  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "plan.yaml").write_text(json.dumps(PLAN))
    return tmp_path / "plan.yaml"


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for module in (assemble, planning):
        monkeypatch.setattr(module, "installed", lambda: version)


def test_the_package_asks_for_the_versions_that_rules_are_of():
    (stated,) = re.findall(r'"torch(>[^"]*)"', (ROOT / "pyproject.toml").read_text())
    range_ = SpecifierSet(stated)
    minors = [(2, minor) for minor in range(20)] + [(3, 0)]
    assert tuple(n for n in minors if range_.contains(f"{n[0]}.{n[1]}.1")) == torch_version.KNOWN


def test_the_installed_version_is_torchs_own():
    # A wheel of PyPI keeps what it was built for (+cu130) to itself.
    assert torch.__version__.startswith(torch_version.installed().partition("+")[0])
    assert torch_version.installed()


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("", True), ("2.10.0", False), ("2.11.0+cpu", True), ("2.12.1", False), ("2.13.0+cpu", True),
     ("2.14.1+cu130", True), ("2.15.0", False), ("2.15.0a0+git1234567", False), ("3.0", False)],
)  # fmt: skip
def test_other_versions_are_known_by_their_first_two_numbers(version, is_known):
    assert bool(torch_version.unlike(version)) != is_known


def test_bytes_of_another_version_are_not_called_exact(plan, monkeypatch):
    pretend(monkeypatch, "2.14.1")
    assert "is installed" not in estimate_memory(plan).certified
    pretend(monkeypatch, "2.15.0")
    assert "torch 2.15.0 is installed" in estimate_memory(plan).certified


def test_a_search_says_it_first(plan, monkeypatch):
    pretend(monkeypatch, "2.15.0")
    said: list[str] = []
    planning.search_plan(plan, report=said.append)
    assert said[0].startswith("torch 2.15.0 is installed")


def test_gradients_are_reduced_in_what_computes_unless_the_plan_says_another():
    """Which torch before 2.15 does where nobody says, and 2.15 does not."""
    assert mixed_precision(Precision(param="bfloat16")).reduce_dtype == torch.bfloat16
    told = mixed_precision(Precision(param="bfloat16", reduce="float32"))
    assert (told.param_dtype, told.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert mixed_precision(Precision()).reduce_dtype is None


def addends(world: int) -> list[tuple[Any, Any]]:
    """(gradient that came back, this rank's addend) by each way in."""
    tp = init_device_mesh("cpu", (world,))
    rank = tp.get_local_rank()
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(3, 4), torch.randn(4, 2 * world), torch.randn(3, 2 * world)
    cut = distribute_tensor(weight, tp, [Shard(1)], src_data_rank=None)
    found = []
    for enter in (as_dtensor, _FromLocal.apply):
        local = x.clone().requires_grad_()
        out = enter(local, tp, Replicate(), Partial()) @ cut
        out.to_local().backward(gradient.chunk(world, 1)[rank])
        own = gradient.chunk(world, 1)[rank] @ weight.chunk(world, 1)[rank].T
        found.append((local.grad, own))
    return found


def test_what_enters_as_a_dtensor_takes_back_this_ranks_addend(pool: Callable[[int], Any]):
    for found in pool(2).run(addends, 2):
        for came, own in found:
            torch.testing.assert_close(came, own)


def gathered(world: int) -> list[list[float]]:
    """A packed tensor made whole by torch, and where torch cannot."""
    tp = init_device_mesh("cpu", (world,))
    whole = torch.arange(24.0).reshape(12, 2)
    parts = [piece.chunk(world)[tp.get_local_rank()] for piece in whole.chunk(3)]
    cut = _packed(0, 3)
    packed = DTensor.from_local(torch.cat(parts), tp, [cut], run_check=False, shape=whole.shape,
                                stride=whole.stride())  # fmt: skip
    uneven = DTensor.from_local(torch.cat(parts)[1:], tp, [cut], run_check=False,
                                shape=(10, 2), stride=(2, 1))  # fmt: skip
    found = [replicated(packed, 0).to_local().flatten().tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "redistribute", _raises)
        found.append(replicated(packed, 0).to_local().flatten().tolist())
        with pytest.raises(ValueError, match="another's order"):
            replicated(uneven, 0)
    return found


def _raises(*unused: Any, **named: Any) -> DTensor:
    raise ValueError("another's order")


def test_a_packed_tensor_is_made_whole_where_torch_cannot(pool: Callable[[int], Any]):
    for found in pool(2).run(gathered, 2):
        assert found == [[float(n) for n in range(24)]] * 2


REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one[x | y]">
<failure message="AssertionError: no more&#10; assert 1 == 2">...</failure></testcase>
<testcase classname="tests.test_a" name="test_two"/>
<testcase classname="tests.test_a" name="test_three"><skipped message="why"/></testcase>
<testcase classname="tests.test_b" name="test_far"><failure message="pool.PoolError: on 2">
E   pool.PoolError: on 2
E   Traceback (most recent call last):
E     File x
E   TypeError: an 'y'
</failure></testcase>
</testsuite></testsuites>"""


def test_the_bench_tells_each_failure_in_one_line():
    found = torch_versions.cases(REPORT)
    assert [how for _, how, _ in found] == ["failed", "passed", "skipped", "failed"]
    failed = {test: why for test, how, why in found if how == "failed"}
    assert failed == {
        "test_a::test_one[x | y]": "AssertionError: no more",
        "test_b::test_far": "TypeError: an 'y'",
    }
    result = torch_versions.Result(1, failed, 1, ("test_c::test_slow",), 2.0, ("tests/test_a.py",))
    page = torch_versions.page({"2.9.1": result, "2.13.0+cpu": result})
    assert page.index("| 2.9.1 |") < page.index("| 2.13.0+cpu | 1 | 2 | 1 |")
    assert r"| `test_a::test_one[x \| y]` | `AssertionError: no more` |" in page
    assert "Passed by themselves only: `test_c::test_slow`." in page
    assert "Of `pytest tests/test_a.py`." in page


def test_what_a_module_takes_is_found_and_replaced_by_each_way_in(monkeypatch):
    first, second = torch.ones(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    value = ([first, torch.ones(1)], {"a": (second, "word")})
    found = []
    for _ in range(2):
        taken = values.tensors_with_gradient(value)
        out = values.with_tensors_replaced(value, [t * 2 for t in taken])
        found.append((taken, out[0][0].tolist(), out[1]["a"][0].tolist(), out[1]["a"][1]))
        assert out[0][1] is value[0][1]
        monkeypatch.setattr(values, "_common_utils", None)  # As before torch 2.12.
    assert [taken is first for taken in found[0][0]] == [True, False]
    assert found[0][1:] == found[1][1:] == ([2.0, 2.0], [0.0] * 3, "word")
    assert all(a is b for a, b in zip(found[0][0], found[1][0], strict=True))
