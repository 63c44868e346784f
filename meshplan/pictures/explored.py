"""A plan with a few settings changed by sliders, and the pictures of the result.

For each change, `make_plan` decides the plan anew; if it raises, its message is shown instead of
pictures. This module uses no widgets, no torch and no search.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from typing import Any, Final

import numpy as np

from meshplan.errors import MeshplanError, Origin, Problem
from meshplan.layout.mesh import DATA_AXES
from meshplan.model.rehearsal import Rehearser
from meshplan.pictures.base.page import EDGE, TEXT, WIDTH, Sheet, wrapped, write
from meshplan.pictures.base.palette import Theme, theme_of
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import counted
from meshplan.pictures.main import facts_of
from meshplan.pictures.memory.drawn_bars import draw_memory
from meshplan.pictures.mesh.mesh_map import MeshMap, draw_mesh, mesh_map
from meshplan.plan.plan import Plan, make_plan
from meshplan.shown import shown
from meshplan.spec.spec import AUTO, Auto, Borrow, HardwareSpec, Spec
from meshplan.spec.strategies import STRATEGIES

__all__ = ["Knobs", "Scene", "knobs_of", "png_of", "scene_of", "spec_at"]

_ORIGIN: Final = Origin("the controls")
_LINE: Final = 0.22
_MOST_NODES: Final = 4
"""Maximum number of nodes that are drawn: sliders redraw the picture many times a second."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The settings that sliders can change.

    Args:
        nodes: Number of nodes.
        gpus_per_node: GPUs of one node.
        micro: Samples per rank and microbatch.
        strategy: Name of a strategy in `STRATEGIES`.
        tp: Size of the tp axis; 1 for a mesh without it.
        pp: Size of the pp axis; 1 for a mesh without it.
    """

    nodes: int
    gpus_per_node: int
    micro: int
    strategy: str
    tp: int
    pp: int


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The texts and pictures for one combination of settings.

    Args:
        knobs: The settings.
        verdict: A sentence: does the plan fit, or that the settings are not possible.
        words: Further lines of text; if the settings are not possible, the reasons.
        is_possible: If True, the settings make a plan.
        pictures: Pictures of the plan; () if there is no plan.
    """

    knobs: Knobs
    verdict: str
    words: tuple[str, ...]
    is_possible: bool
    pictures: tuple[Picture, ...]

    def html(self) -> str:
        """Return an HTML element whose verdict screen readers announce when it changes."""
        mark = "" if self.is_possible else "border-left:4px solid #C8102E;padding-left:.6em;"
        lines = "".join(f"<div>{escape(line)}</div>" for line in self.words)
        role = "status" if self.is_possible else "alert"
        head = f'<div role="{role}" style="{mark}line-height:1.5"><b>{escape(self.verdict)}</b>'
        drawn = "".join(
            f'<div style="flex:1 1 34em;min-width:0">{_inline(each)}</div>'
            for each in self.pictures
        )
        row = '<div style="display:flex;flex-wrap:wrap;gap:1em">'
        return f"{head}{lines}</div>{row}{drawn}</div>"


def knobs_of(plan: Plan) -> Knobs:
    """Return the settings of a plan."""
    hardware, mesh = plan.spec.hardware, plan.mesh
    return Knobs(
        nodes=hardware.nodes if hardware is not None else 1,
        gpus_per_node=hardware.gpus_per_node if hardware is not None else mesh.world_size,
        micro=plan.micro or 1,
        strategy=plan.assignment.strategy.name,
        tp=mesh.size("tp"),
        pp=mesh.size("pp"),
    )


def spec_at(plan: Plan, knobs: Knobs) -> Spec:
    """Return the spec of a plan with other settings; everything else stays the same.

    If the plan states a global batch size, it is kept, and gradient accumulation follows from it;
    otherwise gradient accumulation is kept.
    """
    spec, now = plan.spec, knobs_of(plan)
    if knobs == now and spec.hardware is not None and plan.micro is not None:
        return spec
    batch = replace(spec.batch, micro=knobs.micro)
    if batch.global_ is not None:
        batch = replace(batch, accumulate=None)
    hardware = spec.hardware or HardwareSpec(gpus_per_node=knobs.gpus_per_node)
    more: dict[str, Any] = {}
    if knobs.tp > 1 and now.tp == 1 and not _places_tp(spec):
        more["tp_plan"] = AUTO
    is_same = replace(knobs, micro=now.micro) == now
    return replace(
        spec,
        hardware=replace(hardware, nodes=knobs.nodes, gpus_per_node=knobs.gpus_per_node),
        strategy=knobs.strategy,
        mesh=_stated(plan) if is_same else _mesh(plan, knobs),
        batch=batch,
        origins={
            **spec.origins,
            **dict.fromkeys(("hardware", "strategy", "mesh", "batch.micro"), _ORIGIN),
        },
        **more,
    )


def _places_tp(spec: Spec) -> bool:
    return spec.tp_plan != "none" or any("tp" in rule.place for rule in spec.rules)


def _stated(plan: Plan) -> dict[str, int | Auto | Borrow]:
    """Return the axes of the plan's mesh, in the form of `Spec.mesh`."""
    borrowed: dict[str, int | Auto | Borrow] = {
        loan.name: Borrow(loan.size, loan.within) for loan in plan.mesh.loans
    }
    return {**{axis.name: axis.size for axis in plan.mesh}, **borrowed}


def _mesh(plan: Plan, knobs: Knobs) -> dict[str, int | Auto | Borrow]:
    """Return the mesh for other settings, in the form of `Spec.mesh`.

    Data axes take the ranks that no other axis takes. With two data axes (HSDP), the groups of the
    inner one are within a node.
    """
    old = _stated(plan)
    data = STRATEGIES[knobs.strategy].axes
    inner = plan.mesh.size("cp") * knobs.tp
    mesh: dict[str, int | Auto | Borrow] = {"pp": knobs.pp} if knobs.pp > 1 else {}
    mesh |= dict.fromkeys(data, AUTO)
    if len(data) > 1:
        ranks = knobs.nodes * knobs.gpus_per_node // (inner * knobs.pp)
        mesh[data[-1]] = max(math.gcd(knobs.gpus_per_node // inner, ranks), 1)
    mesh |= {
        axis: size for axis, size in old.items() if axis not in (*mesh, "tp", "pp", *DATA_AXES)
    }
    if knobs.tp > 1:
        mesh["tp"] = knobs.tp
    return mesh


def scene_of(
    plan: Plan,
    knobs: Knobs,
    *,
    theme: str = "light",
    gpu: str | None = None,
    memory: str | int | None = None,
    rehearse: Rehearser | None = None,
) -> Scene:
    """Return the texts and pictures of a plan with other settings.

    Args:
        plan: The plan whose settings are changed.
        knobs: The settings.
        theme: "light" or "dark".
        gpu: Name of the device whose memory is the limit.
        memory: The memory limit itself, instead of `gpu`.
        rehearse: The argument of `make_plan` of this name; None unless the model is a function.
    """
    try:
        spec = spec_at(plan, knobs)
        turned = plan
        if spec is not plan.spec:
            turned = make_plan(spec, plan.graph, rehearse=rehearse)
        mesh = mesh_map(turned, most_nodes=_MOST_NODES)
        bars = facts_of(turned, "memory", gpu=gpu, memory=memory)
    except MeshplanError as error:
        lines = [_in_words(problem) for problem in error.problems]
        what = f"{_described(knobs)}: not possible"
        return Scene(knobs=knobs, verdict=what, words=tuple(lines), is_possible=False, pictures=())
    return Scene(
        knobs=knobs,
        verdict=bars.title,
        words=(mesh.title, _settings(turned, plan)),
        is_possible=True,
        pictures=(_map(mesh, theme), draw_memory(bars, theme_of(theme))),
    )


# Pictures are cached, because many changes leave one as it was: micro does not change the mesh map.


@lru_cache(maxsize=8)
def _map(facts: MeshMap, theme: str) -> Picture:
    return draw_mesh(facts, theme_of(theme), is_small=True)


@lru_cache(maxsize=16)
def _inline(picture: Picture) -> str:
    return picture.inline(caption=False)


def _described(knobs: Knobs) -> str:
    many = f"{counted(knobs.nodes, 'node')} of {counted(knobs.gpus_per_node, 'GPU')}"
    cuts = "".join(f", {axis} {n}" for axis, n in (("tp", knobs.tp), ("pp", knobs.pp)) if n > 1)
    return f"{many}, {knobs.strategy}{cuts}, micro batch {knobs.micro}"


def _in_words(problem: Problem) -> str:
    return f"{problem.what} ({problem.fix})" if problem.fix else problem.what


def _settings(turned: Plan, start: Plan) -> str:
    """Return a line with mesh, strategy and batch, and `tp_plan` if it changed."""
    axes = ", ".join(f"{axis.name}: {axis.size}" for axis in turned.mesh)
    lines = [f"mesh: {{{axes}}}", f"strategy: {turned.assignment.strategy.name}"]
    if turned.micro is not None:
        samples = turned.micro * turned.accumulate * turned.num_data_ranks
        times = f", {turned.accumulate} microbatches" if turned.accumulate > 1 else ""
        lines.append(f"{counted(turned.micro, 'sample')} per rank and microbatch{times}: "
                    f"{samples:,} a step")  # fmt: skip
    if turned.spec.tp_plan != start.spec.tp_plan:
        lines.append(f"tp_plan: {turned.spec.tp_plan}")
    return "; ".join(lines)


def png_of(scene: Scene, notes: Sequence[str] = (), *, theme: str = "light") -> bytes:
    """Return the text and pictures of a scene in one image, for viewers without sliders.

    Args:
        scene: The scene.
        notes: Further lines of text.
        theme: "light" or "dark".
    """
    import matplotlib.image

    pictures = [_still(scene, notes, theme_of(theme)), *scene.pictures]
    rows = [matplotlib.image.imread(io.BytesIO(each._repr_png_())) for each in pictures]
    wide = min(row.shape[1] for row in rows)
    out = io.BytesIO()
    whole = np.concatenate([row[:, :wide, :3] for row in rows])
    matplotlib.image.imsave(out, whole, format="png", metadata={"Software": "meshplan"})
    return out.getvalue()


def _still(scene: Scene, notes: Sequence[str], theme: Theme) -> Picture:
    """Draw the text of a scene as a picture."""
    lines = [line for words in scene.words for line in wrapped(words, WIDTH - 2 * EDGE, TEXT)]
    sheet = Sheet(theme, scene.verdict, _LINE * len(lines) + 0.05, notes=notes)
    plane = sheet.plane()
    for number, line in enumerate(lines):
        write(plane, EDGE, sheet.height - _LINE * (number + 1), line, theme)
    return Picture("explore", scene.verdict, " ".join(scene.words), sheet.figure)
