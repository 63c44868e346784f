"""The model of a question, and the spec that is in force for it: by its lock, or by its defaults.

`planner.objectives.complete` decides it; here are the ways into that room that need no planner
where there is nothing to plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.errors import Origin, Problem, SpecError
from meshplan.model.blueprint import from_config
from meshplan.model.graph import ModelGraph
from meshplan.model.rehearsal import Rehearse
from meshplan.spec.spec import Spec
from meshplan.textbook.inputs import graph_of, questions

if TYPE_CHECKING:
    from meshplan.planner.lock.lock import Lock
    from meshplan.planner.problem.decision import PlanRequest

PlanSource = str | os.PathLike[str] | Mapping[str, Any]
Found = tuple[ModelGraph, Rehearse | None]
WITHOUT_MODEL = "rules, heads and shapes were not checked"


def find_model(
    spec: Spec, model: str | None, config: str | Path | None
) -> tuple[ModelGraph | None, tuple[str, ...], Rehearse | None]:
    """The model that the flags or else the plan name, notes, and a rehearsal if it is live."""
    if model is not None and config is not None:
        what = "--model and --config both state the model"
        raise SpecError(Problem(what, Origin("--model"), "leave one of them out"))
    stated = spec.model
    notes = []
    if stated is not None and (model, config) != (None, None):
        flag = "--model" if model is not None else "--config"
        if (model, config) not in ((stated.entry, None), (None, stated.config)):
            notes.append(f"{flag} goes before the model of {spec.origin('model')}")
    entry, origin = model, Origin("--model")
    if (model, config) == (None, None) and stated is not None and stated.entry is not None:
        entry, origin = stated.entry, spec.origin("model.entry")
    if entry is not None:
        from meshplan.runtime.live.named_model import live_graph  # torch

        live, rehearse = live_graph(entry, origin, spec)
        return live, tuple(notes), rehearse
    if config is not None or (stated is not None and stated.config is not None):
        graph = graph_of(spec) if config is None else from_config(config, Origin("--config"))
        assert graph is not None
        return graph, (*notes, *graph.notes, *questions(params=graph.num_params)), None
    known = "only the number of parameters" if stated is not None else "nothing"
    notes.append(
        f"{known} is known of the model, so {WITHOUT_MODEL}; "
        "--model pkg.mod:function or --config PATH does"
    )
    return None, tuple(notes), None


def spec_in_force(
    plan: PlanSource,
    overrides: Sequence[str],
    spec: Spec,
    found: Found,
    model: str | None,
    config: str | Path | None,
    *,
    noted: Callable[[str], None],
    told: Callable[[str], None] = lambda text: None,
    lock: Lock | None = None,
) -> tuple[Spec, ModelGraph, Rehearse | None]:
    """The spec with nothing left to the planner, by its lock, by planning or by its defaults.

    Args:
        spec: As the plan file says it.
        found: The model that `model` and `config` name as for `check_plan`, and its rehearsal. It
            is given back, with its data flow if the whole spec reads that.
        noted: Is told in one line which lock the plan goes by, or why by none; nothing where there
            is none to go by, and nothing that needs one.
        told: Is told what is being done.
        lock: Somebody's choice among the locks; None asks the one beside the plan file.
    """
    from meshplan.planner.lock.lock import has_lock

    if lock is None and not spec.free_fields and not has_lock(plan):
        return spec, *found
    from meshplan.planner.objectives import complete  # numpy
    from meshplan.planner.problem import request  # numpy

    def ask(profile: Path | None) -> PlanRequest:
        from meshplan.runtime.live.planned import question_of_entry  # torch

        return question_of_entry(plan, overrides, model, profile=profile, told=told)

    is_live = model is not None or (spec.model is not None and spec.model.entry is not None)
    path = None if is_live else request.config_of(spec, config)[0]
    load = request.loading(plan, overrides)
    stated = complete.complete_spec(
        plan, load, found[0], told, ask if is_live else None, path, lock, noted=noted
    )
    if stated.reads_flow and not spec.reads_flow:
        graph, _, rehearse = find_model(stated, model, config)
        assert graph is not None
        return stated, graph, rehearse
    return stated, *found
