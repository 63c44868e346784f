"""Warn about rounding that happens under a plan, but not in one process."""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.errors import Problem
from meshplan.layout.mesh import GRADIENT_AXES, Mesh
from meshplan.model.graph import ModelGraph
from meshplan.spec.spec import Spec


def rounding_warnings(spec: Spec, graph: ModelGraph, mesh: Mesh) -> Iterator[Problem]:
    """Yield a warning if a float32 model has some parameters in half precision.

    Sums of their gradients over ranks and microbatches are rounded to half precision.
    """
    half = {"bfloat16": "0.4%", "float16": "0.05%"}
    trained = [t for t in graph.parameters if t.trainable]
    found = next((t for t in trained if t.dtype in half), None)
    is_mixture = any(t.dtype == "float32" for t in trained)
    states = spec.precision.master or spec.precision.reduce
    if found is None or not is_mixture or states or mesh.size(*GRADIENT_AXES, "pp", "tp") == 1:
        return
    yield Problem(
        f"some parameters, such as {found.fqn}, are {found.dtype} and others float32: sums over "
        f"ranks and microbatches are rounded to {found.dtype}, so gradients differ from those of "
        f"one process by up to {half[found.dtype]}",
        None,
        "write precision: {master: fp32, reduce: fp32}, or ignore this warning",
    )
