"""Plans for a model of which nothing but the number of parameters is known ("counted plans")."""

from __future__ import annotations

from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.plan.plan import Plan, make_plan
from meshplan.spec.spec import Spec
from meshplan.textbook.inputs import graph_of

OF_COUNT: Final = ("mesh", "memory", "waterfall")
"""Pictures that can be drawn for a counted plan, because they need no modules."""
ONLY_COUNT: Final = "only the number of the model's parameters is known"


def is_counted(plan: Plan) -> bool:
    """Return True if the model of a plan was made by `blueprint.from_params`."""
    graph = plan.graph
    return (
        list(graph.modules) == [""]
        and graph.modules[""].type == "Module"
        and [tensor.dims for tensor in graph.tensors.values()] == [("",)]
    )


def counted_plan(spec: Spec) -> Plan | None:
    """Return a counted plan if the spec states a number of parameters as its model, else None.

    Raises:
        PlanError: The plan needs modules: stages, rules, or axes other than data axes.
    """
    if spec.model is None or spec.model.params is None:
        return None
    graph = graph_of(spec)
    assert graph is not None
    return make_plan(spec, graph)


def check_counted(plan: Plan, what: str) -> None:
    """Check that the plan has modules if the picture needs them.

    Raises:
        PlanError: The picture needs modules, and only the number of parameters is known.
    """
    if what not in OF_COUNT and is_counted(plan):
        fix = "name the model: model: {config: PATH}, --config PATH or --model pkg.mod:function"
        raise PlanError(Problem(ONLY_COUNT, plan.spec.origin("model.params"), fix))
