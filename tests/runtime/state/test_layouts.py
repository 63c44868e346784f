"""A state saved under any layout is loaded under any other, to the last bit."""

from __future__ import annotations

import json
import sys
import warnings

import pytest
import torch

import meshplan
from meshplan.errors import MissingStateError, StateError
from meshplan.state.held import plain_name
from tests.helpers.stated import LAYOUTS, Job, Model, loaded, plan_of, saved

PAIRS = {
    ("pp_fsdp_tp", "ep_fsdp"), ("ep_fsdp", "packed"), ("packed", "one"), ("one", "pp"),
    ("hybrid", "cp"), ("ddp", "ddp"),
}  # fmt: skip
"""Those that cut a tensor in other ways, each on either side."""


def merged(results):
    """The numbers of all ranks, of which stages of a pipeline have different ones."""
    out = {}
    for numbers, _ in results:
        out |= numbers
    return out


def differences(one, other):
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one
        or name not in other
        or not (
            torch.equal(one[name], other[name])
            if isinstance(one[name], torch.Tensor)
            else one[name] == other[name]
        )
    ]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(a, b, marks=() if (a, b) in PAIRS else pytest.mark.wide)
        for a in LAYOUTS
        for b in LAYOUTS
    ],
)
def test_it_goes_on_as_if_nothing_had_happened(pool, tmp_path, source, target):
    before = pool(LAYOUTS[source].world).run(saved, source, tmp_path)
    after = pool(LAYOUTS[target].world).run(loaded, target, tmp_path)
    assert not differences(merged(before), merged(after))
    tolerance = 0.0 if source == target else 1e-6
    assert before[0][1] == pytest.approx(after[0][1], abs=tolerance, rel=0)


def test_it_is_the_same_when_it_is_written_while_it_trains(pool, tmp_path):
    before = pool(4).run(saved, "full_shard", tmp_path, asynchronous=True)
    after = pool(2).run(loaded, "packed", tmp_path)
    assert not differences(merged(before), merged(after))


def one_process_of_its_own(path):
    """A state without the optimizer, loaded by name into a module without meshplan's wrappers."""
    job = Job(plan_of("full_shard"))
    meshplan.save(path, job.model, step=0)
    return meshplan.full_state_dict(job.model)


def test_any_reader_of_safetensors_finds_the_weights(pool, tmp_path):
    from safetensors import safe_open

    expected = pool(4).run(one_process_of_its_own, tmp_path)[0]
    (folder,) = tmp_path.iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {n.removeprefix("model/") for n in manifest["tensors"]} == set(expected)
    for name, tensor in expected.items():
        saved_as = manifest["tensors"][f"model/{name}"]
        again = torch.full(saved_as["shape"], torch.nan)
        for number, key, start, size in saved_as["pieces"]:
            with safe_open(folder / manifest["files"][number][0], "pt") as file:
                part = again
                for dim, (first, count) in enumerate(zip(start, size, strict=True)):
                    part = part.narrow(dim, first, count)
                part.copy_(file.get_tensor(key))
        assert torch.equal(again, tensor)


def test_replicas_share_the_work(pool, tmp_path):
    pool(2).run(saved, "ddp", tmp_path)
    (folder,) = tmp_path.iterdir()
    sizes = [each.stat().st_size for each in folder.glob("*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 1.3 * min(sizes)


def test_names_that_wrappers_add_are_left_out():
    assert plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.w") == "layers.0.w"
    assert plain_name("model_orig_mod.w") == "model_orig_mod.w"


def tied_model():
    model = Model()
    model.head.weight = model.embed.weight
    return model


def save_tied(path):
    model = meshplan.parallelize(tied_model(), plan_of("full_shard"))
    meshplan.save(path, model, step=1)


def load_untied(path):
    model = meshplan.parallelize(Model(), plan_of("full_shard"))
    meshplan.load(path, model)
    state = meshplan.full_state_dict(model)
    return not state or torch.equal(state["head.weight"], state["embed.weight"])


def test_a_tied_tensor_is_saved_once_and_found_by_both_names(pool, tmp_path):
    pool(4).run(save_tied, tmp_path)
    names = json.loads((tmp_path / "step-00000001/manifest.json").read_text())["tensors"]
    assert names["model/embed.weight"]["aliases"] == ["head.weight"]
    assert "model/head.weight" not in names
    assert all(pool(4).run(load_untied, tmp_path))


class Wrapper(torch.nn.Module):
    """A module whose names begin with those that DistributedDataParallel adds."""

    def __init__(self):
        super().__init__()
        self.module = Counting()

    def forward(self, x):
        return self.module(x)


class Counting(torch.nn.Linear):
    """A layer with an extra state."""

    def __init__(self):
        super().__init__(8, 8)
        self.count = 0

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


def trained_wrapper(path, made, is_resumed):
    """The loss of a step after the first, or after its state: with which notes it was loaded."""
    module = made()
    layer = getattr(module, "module", module)
    model = meshplan.parallelize(module, {"version": 1, "strategy": "full_shard"})
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    part = meshplan.local_batch(model, x)

    def step():
        return meshplan.train_step(model, optimizer, part, part, torch.nn.functional.mse_loss)

    notes = []
    if is_resumed:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            meshplan.load(path, model, optimizer)
        notes = [str(each.message) for each in caught if "other names" in str(each.message)]
        assert layer.count == 7
    else:
        step()
        layer.count = 7
        meshplan.save(path, model, optimizer, step=1)
    return step(), notes


@pytest.mark.parametrize(("source", "target"), [(Wrapper, Counting), (Counting, Wrapper)])
def test_a_wrapped_module_and_a_bare_one_load_each_other(pool, tmp_path, source, target):
    before = pool(2).run(trained_wrapper, tmp_path, source, False)
    for (loss, notes), (expected, _) in zip(
        pool(2).run(trained_wrapper, tmp_path, target, True), before, strict=True
    ):
        assert loss == expected
        (note,) = notes
        assert "2 tensors were loaded under other names" in note
        assert "module.weight" in note


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self._orig_mod = torch.nn.Linear(8, 8), torch.nn.Module()
        self._orig_mod.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self._orig_mod.layer(self.layer(x))


def save_twice(path):
    model = meshplan.parallelize(Twice(), {"version": 1, "strategy": "ddp"})
    with pytest.raises(
        StateError, match=r"layer\.weight and _orig_mod.layer.weight would be saved"
    ):
        meshplan.save(path, model, step=1)


def test_two_tensors_are_never_saved_under_one_name(pool, tmp_path):
    pool(1).run(save_twice, tmp_path)


class Other(Model):
    def __init__(self):
        super().__init__()
        self.layers[0].norm = torch.nn.Identity()
        self.tail = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(16, 30, bias=False)


def load_other(path, strict):
    model = Other()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model = meshplan.parallelize(model, {"version": 1, "strategy": "ddp"})
    try:
        state = meshplan.load(path, model, strict=strict)
    except StateError as error:
        same = all(torch.equal(v, before[n]) for n, v in model.module.state_dict().items())
        return str(error), same
    return state.skipped


def test_what_does_not_fit_is_listed_and_nothing_is_loaded(pool, tmp_path):
    pool(2).run(saved, "ddp", tmp_path)
    for text, same in pool(2).run(load_other, tmp_path, True):
        assert "the state has 2 tensors that the model lacks (layers.0.norm.weight, " in text
        assert ", and the model has 2 tensors that the state lacks (tail.weight, tail.bias)" in text
        assert "head.weight has the shape [32, 16] in the state, and [30, 16] in the model" in text
        assert "pass strict=False" in text
        assert same


def load_part(path):
    model = Other()
    model.head = torch.nn.Linear(16, 32, bias=False)
    model = meshplan.parallelize(model, {"version": 1, "strategy": "ddp"})
    with pytest.warns(UserWarning, match="4 tensors were skipped: tail.weight"):
        return meshplan.load(path, model, strict=False).skipped


def test_what_does_not_fit_can_be_skipped(pool, tmp_path):
    pool(2).run(saved, "ddp", tmp_path)
    assert pool(2).run(load_part, tmp_path)[1] == (
        "tail.weight", "tail.bias", "layers.0.norm.weight", "layers.0.norm.bias",
    )  # fmt: skip


def load_with(path, optimizer, **more):
    job = Job(plan_of("ddp"))
    made = {
        "right": lambda: job.optimizer,
        "sgd": lambda: torch.optim.SGD(job.model.parameters(), 0.1),
        "one group": lambda: torch.optim.AdamW(job.model.parameters()),
        "others": lambda: torch.optim.AdamW(
            [{"params": list(job.model.parameters())[:1]},
             {"params": list(job.model.parameters())[1:]}]
        ),
        "strange": lambda: torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]),
    }  # fmt: skip
    meshplan.load(path, job.model, made[optimizer](), **more)


@pytest.mark.parametrize(
    ("optimizer", "more", "text"),
    [
        ("sgd", {}, "the state is of the optimizer AdamW, not SGD"),
        ("one group", {}, "the state has 2 parameter groups of the optimizer, not 1"),
        ("others", {}, "parameters in other groups than the state: "),
        ("strange", {}, r"a parameter of shape \[3\] that is not in the model"),
        ("sgd", {"step": 7}, "there is no state of step 7 in this folder"),
        ("sgd", {"step": "newest"}, "step must be a whole number or 'latest', not 'newest'"),
        ("right", {"data": 1}, "data=1 has no load_state_dict"),
    ],
)
def test_what_cannot_be_loaded_is_said(pool, tmp_path, optimizer, more, text):
    pool(2).run(saved, "ddp", tmp_path)
    with pytest.raises(AssertionError, match=text):
        pool(2).run(load_with, tmp_path, optimizer, **more)


def audited(path):
    """The names of what a load looks up in order to run: pickles, imports of pickled classes."""
    events = []
    sys.addaudithook(lambda event, args: events.append(event) if "pickle" in event else None)
    job = Job(plan_of("one"), seed=1)
    meshplan.load(path, job.model, job.optimizer, scheduler=job.scheduler)
    return events


def test_nothing_is_unpickled(pool, tmp_path):
    pool(1).run(saved, "one", tmp_path, extra={"x": torch.ones(3), "y": (1, None)})
    assert pool(1).run(audited, tmp_path) == [[]]


def missing(path):
    job = Job(plan_of("ddp"))
    try:
        meshplan.load(path, job.model)
    except FileNotFoundError as error:
        return isinstance(error, MissingStateError), str(error), job.train(1)
    return None


def test_a_loop_may_ask_for_a_state_that_is_not_there(pool, tmp_path):
    """All ranks are told, and the job goes on."""
    for is_missing, text, losses in pool(2).run(missing, tmp_path / "none"):
        assert is_missing
        assert "there is no state in this folder" in text
        assert losses
