"""Rules for loops of other tools that call backward and the optimizer themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshplan.errors import ApplyError, PlanError, Problem
from meshplan.layout.mesh import DATA_AXES, Mesh
from meshplan.plan.plan import Plan
from meshplan.spec.spec import Spec
from meshplan.spec.strategies import resolve_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopWords:
    """The words of a tool for the parts of a loop.

    Args:
        loop: The loop.
        instead: What runs plans with pp or cp.
        prepare: The call that applies a plan.
        backward: The call of backward.
        clip: The call that clips gradients by their norm, with {norm} in the place of the norm.
        accumulate: What the loop does to accumulate over {count} microbatches.
    """

    loop: str
    instead: str
    prepare: str
    backward: str
    clip: str
    accumulate: str


def loop_problems(plan: Plan, words: LoopWords, *, accumulate: int = 1) -> list[Problem]:
    """Return what a plan states that a loop of a user's own does not do.

    Args:
        plan: The plan.
        words: The words of the loop's tool.
        accumulate: Number of microbatches that the tool was told.
    """
    spec = plan.spec
    is_cut = plan.assignment.stages is not None, plan.assignment.context is not None
    problems = _axis_problems(spec, *is_cut, words)

    def refuse(what: str, key: str, fix: str) -> None:
        problems.append(Problem(what, spec.origin(key), fix))

    loop = words.loop
    leave = "leave it out, and call"
    if spec.loss != "mean":
        what = f"the plan states loss: {spec.loss}, which {loop} does not weight"
        refuse(what, "loss", f"{leave} {words.backward}(meshplan.global_mean(total, count))")
    if spec.clip_grad_norm is not None:
        norm = spec.clip_grad_norm
        what = f"the plan clips gradients at the norm {norm}, but {loop} clips itself"
        refuse(what, "clip_grad_norm", f"{leave} {words.clip.format(norm=norm)}")
    if plan.accumulate not in (1, accumulate):
        what = f"the plan accumulates gradients over {plan.accumulate} microbatches, but {loop} "
        what += "counts them itself"
        way = words.accumulate.format(count=plan.accumulate)
        refuse(what, "batch", f"leave out accumulate, and {way}")
    return problems


def check_axes(spec: Spec, world_size: int, words: LoopWords) -> None:
    """Raise if a plan has axes that a loop of a user's own cannot have, before a model is recorded.

    Args:
        spec: The plan. What it leaves open is left to `loop_problems`.
        world_size: Number of ranks.
        words: The words of the loop's tool.

    Raises:
        PlanError: It has pp or cp, or its mesh does not have as many ranks.
    """
    if not spec.free_fields:
        mesh = resolve_mesh(spec, world_size)[0]
        if problems := _axis_problems(spec, mesh.size("pp") > 1, mesh.size("cp") > 1, words):
            raise PlanError(problems)


def _axis_problems(spec: Spec, has_pp: bool, has_cp: bool, words: LoopWords) -> list[Problem]:
    loop, found = words.loop, []
    instead = "write loss = meshplan.train_step(model, optimizer, inputs, targets, loss_fn) in the "
    instead += "place of forward, backward, clipping, optimizer.step() and zero_grad(), with model "
    instead += "= meshplan.parallelize(model, plan, example_inputs=(inputs,)), an optimizer of its "
    instead += "parameters, and loader = meshplan.dataloader(data, model, batch_size=...) in the "
    instead += f"place of {words.prepare}; or use {words.instead}"
    if has_pp:
        what = f"{loop} calls backward itself, but a pipeline runs its own"
        found.append(Problem(what, spec.origin("mesh.pp"), instead))
    if has_cp:
        what = f"{loop} has whole sequences, which cp cuts"
        found.append(Problem(what, spec.origin("mesh.cp"), instead))
    return found


def each_sample_once(gathered: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the samples of the data ranks in what all ranks gathered, without copies.

    Args:
        gathered: A tensor whose dim 0 has as many rows of every rank, in the order of the ranks.
        mesh: The mesh of all ranks.
    """
    every = gathered.unflatten(0, (mesh.world_size, -1))
    return every[ranks_with_own_samples(mesh)].flatten(0, 1)


def ranks_with_own_samples(mesh: Mesh) -> list[int]:
    """Return the first rank of each data rank: those after it have the same samples."""
    indices = list(mesh.indices(DATA_AXES))
    return [indices.index(index) for index in range(mesh.size(*DATA_AXES))]


def reduction_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the reduction over dim 0 that `accelerator.reduce` knows by a name.

    Raises:
        ApplyError: There is none of this name.
    """
    over: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda every: every.sum(0),
        "mean": lambda every: every.mean(0),
        "max": lambda every: every.amax(0),
    }
    if name not in over:
        what = f"accelerator.reduce was given reduction={name!r}"
        raise ApplyError(Problem(what, fix='use "sum", "mean" or "max"'))
    return over[name]
