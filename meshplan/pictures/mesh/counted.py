"""Plans for a model of which nobody says more than how many parameters it has."""

from __future__ import annotations

from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.plan.plan import Plan, make_plan
from meshplan.spec.spec import Spec
from meshplan.textbook.inputs import graph_of

OF_COUNT: Final = ("mesh", "memory", "waterfall")
"""The pictures that states alone tell."""
ONLY_COUNT: Final = "only the number of the model's parameters is known"


def is_counted(plan: Plan) -> bool:
    """Whether the plan is for a number of parameters (`blueprint.from_params`)."""
    graph = plan.graph
    return (
        list(graph.modules) == [""]
        and graph.modules[""].type == "Module"
        and [tensor.dims for tensor in graph.tensors.values()] == [("",)]
    )


def counted_plan(spec: Spec) -> Plan | None:
    """The plan for as many parameters as the spec states; None where it states a model, or none.

    Raises:
        PlanError: It needs modules: stages, rules, or axes other than those of data.
    """
    if spec.model is None or spec.model.params is None:
        return None
    graph = graph_of(spec)
    assert graph is not None
    return make_plan(spec, graph)


def check_counted(plan: Plan, what: str) -> None:
    """Whether the picture can be drawn of what is known of the model.

    Raises:
        PlanError: It cannot.
    """
    if what not in OF_COUNT and is_counted(plan):
        fix = "name the model: model: {config: PATH}, --config PATH or --model pkg.mod:function"
        raise PlanError(Problem(ONLY_COUNT, plan.spec.origin("model.params"), fix))
