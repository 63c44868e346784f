"""Find the model of a request, and fill in the fields that its plan leaves open.

`planner.objectives.complete` fills them in: from the lock, by a search, or by defaults. It is
imported only if a field is open or there is a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from meshplan.api.source import Source
from meshplan.errors import Origin, SpecError
from meshplan.model.blueprint import from_config, other_model
from meshplan.model.blueprint.config import config_file, read_json
from meshplan.model.graph import ModelGraph
from meshplan.model.rehearsal import Rehearser
from meshplan.spec.spec import Spec
from meshplan.textbook.inputs import config_of, graph_of, questions

if TYPE_CHECKING:
    from meshplan.plan.plan import Plan
    from meshplan.planner.lock.lock import Lock
    from meshplan.planner.problem.decision import PlanRequest

Found = tuple[ModelGraph, Rehearser | None]
WITHOUT_MODEL = "rules, heads and shapes were not checked"


def is_built(source: Source, spec: Spec) -> bool:
    """Return True if the model itself is built, with torch, to answer questions about it.

    A function of the user builds it, or transformers does, from a config of a family that meshplan
    does not know.

    Args:
        source: The plan and its model.
        spec: The plan as it is read; its model counts if the caller names none.
    """
    if source.entry(spec) is not None:
        return True
    path, origin = config_of(spec, source.config)
    if path is None or not all(map(find_spec, ("torch", "transformers"))):
        return False
    try:
        file = config_file(path)
        return other_model(read_json(file, origin), str(file)) is not None
    except SpecError:  # Told by what reads the config for its answer.
        return False


def find_model(
    spec: Spec, source: Source
) -> tuple[ModelGraph | None, tuple[str, ...], Rehearser | None]:
    """Build the graph of the model that the caller or the plan names.

    Args:
        spec: The plan. It may have more fields than the plan in `source`, from a lock or a search.
        source: The plan, and the model that replaces the plan's own model, if any.

    Returns:
        (graph, notes for the reader, rehearse). `graph` is None if no model is named. `rehearse` is
        the argument of `make_plan` that runs a model on local shapes; None unless the model itself
        is built (`is_built`).

    Raises:
        SpecError: The caller names a function and a config, or the model cannot be read.
    """
    entry = source.entry(spec)
    stated, config = spec.model, source.config
    notes = []
    if stated is not None and source.names_model:
        flag = "--model" if source.model is not None else "--config"
        if (source.model, config) not in ((stated.entry, None), (None, stated.config)):
            notes.append(f"{flag} replaces the model of {spec.origin('model')}")
    if entry is not None:
        from meshplan.runtime.live.named_model import live_graph  # torch

        live, rehearse = live_graph(*entry, spec)
        return live, tuple(notes), rehearse
    if is_built(source, spec):
        from meshplan.runtime.live.named_model import live_graph_of_config  # torch

        live, rehearse = live_graph_of_config(config, spec)
        notes.append(f"{live.name} is built by transformers: meshplan knows no such config")
        return live, tuple(notes), rehearse
    if config is not None or (stated is not None and stated.config is not None):
        graph = graph_of(spec) if config is None else from_config(config, Origin("--config"))
        assert graph is not None
        return graph, (*notes, *graph.notes, *questions(params=graph.num_params)), None
    known = (
        "states only the model's number of parameters" if stated is not None else "names no model"
    )
    notes.append(
        f"the plan {known}: {WITHOUT_MODEL}; "
        "add --model pkg.mod:function or --config PATH to check them"
    )
    return None, tuple(notes), None


def plan_of_spec(spec: Spec, graph: ModelGraph, source: Source) -> Plan:
    """Return the plan of a spec; the model's forward is recorded again if the spec reads it.

    Args:
        spec: A spec without open fields.
        graph: The graph of the model, which is enough for specs that do not read its data flow.
        source: The plan and its model.

    Raises:
        PlanError: The plan does not fit the model.
    """
    from meshplan.plan.plan import make_plan  # slow to import

    rehearse = None
    if spec.reads_flow:
        found, _, rehearse = find_model(spec, source)
        assert found is not None
        graph = found
    return make_plan(spec, graph, rehearse=rehearse)


def spec_in_force(
    source: Source,
    spec: Spec,
    found: Found,
    *,
    noted: Callable[[str], None],
    report: Callable[[str], None] = lambda text: None,
    lock: Lock | None = None,
) -> tuple[Spec, ModelGraph, Rehearser | None]:
    """Return the spec with its open fields filled in: from the lock, by a search, or by defaults.

    Args:
        source: The plan and its model.
        spec: The plan as it is read.
        found: (graph, rehearse), as `find_model` returns them.
        noted: Called with a line that names the lock in use, or says why none is used; not called
            if there is no lock and the plan needs none.
        report: Called with lines on the progress.
        lock: The lock that the user named; None takes the lock next to the plan file.

    Returns:
        (completed spec, graph, rehearse). If only the completed spec needs the model's data flow,
        the last two are built anew and include it; otherwise they are those of `found`.
    """
    from meshplan.planner.lock.lock import has_lock

    if lock is None and not spec.free_fields and not has_lock(source.plan):
        return spec, *found
    from meshplan.planner.objectives import complete  # numpy
    from meshplan.planner.problem import request  # numpy

    def ask(profile: Path | None) -> PlanRequest:
        from meshplan.runtime.live.planned import request_of_entry  # torch

        return request_of_entry(
            source.plan, source.overrides, source.model, source.config, profile=profile,
            report=report,
        )  # fmt: skip

    is_live = is_built(source, spec)
    path = None if is_live else config_of(spec, source.config)[0]
    load = request.loading(source.plan, source.overrides)
    stated = complete.complete_spec(
        source.plan, load, found[0], report, ask if is_live else None, path, lock, noted=noted
    )
    if stated.reads_flow and not spec.reads_flow:
        graph, _, rehearse = find_model(stated, source)
        assert graph is not None
        return stated, graph, rehearse
    return stated, *found
