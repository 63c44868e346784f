"""Functions behind `meshplan record`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Unpack

from meshplan.api.source import PlanSource, Source, SourceArguments, source_of
from meshplan.files import check_writable
from meshplan.planner.objectives.answer import answer
from meshplan.planner.space.space import EmptySpaceError
from meshplan.shown import shown

OPEN_PLAN: Final[dict[str, Any]] = {
    "version": 1, "mesh": "auto", "strategy": "auto", "activation_checkpointing": "auto",
    "precision": "bf16-mixed", "batch": {"global": 64},
    "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
}  # fmt: skip
"""The plan under which a model is recorded if no plan is named: everything open, on eight GPUs."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedModel:
    """The traces of a live model, as `record` made them or `load_recording` read them.

    Attributes:
        model: Name of the model's class.
        num_traces: Number of traces.
        file: The file of the recording; None if they are kept on this machine only.
        why: Reason why nothing was recorded; "" if something was.
    """

    model: str
    num_traces: int
    file: Path | None
    why: str = ""


def record(
    plan: PlanSource | Source,
    overrides: Sequence[str] = (),
    *,
    out: str | os.PathLike[str] | None = None,
    report: Callable[[str], None] = lambda text: None,
    **given: Unpack[SourceArguments],
) -> RecordedModel:
    """Trace a live model under everything that a plan leaves open, and keep the traces.

    A later search of the same model reads them instead of running the model: for another machine,
    batch or memory limit, too. They are kept where `plan` keeps its answers, and in a file for
    another machine.

    Args:
        plan: Path of the plan file, its content as a mapping, or a `Source`.
        overrides: "path=value" statements on top of the plan file.
        out: The file to write; None to write none.
        report: Called with lines on the progress.
        given: The model and the machine, as the fields of `Source`.

    Raises:
        SpecError: The plan cannot be read, or the file cannot be written.
        PlanError: The plan does not suit the model.
    """
    from meshplan.runtime.live.planned import request_of_entry  # torch
    from meshplan.runtime.live.traced import TracedModel

    if out is not None:
        check_writable(out, "the recording")
    source = source_of(plan, overrides, **given)
    profile = Path(source.profile) if source.profile is not None else None
    request = request_of_entry(
        source.plan, source.overrides, source.model, source.config, gpu=source.gpu,
        memory=source.memory, profile=profile, records=True, report=report,
    )  # fmt: skip
    traced = request.traced
    if not isinstance(traced, TracedModel):
        why = "it is planned from its config, so no search traces it"
        return _nothing(request.graph.modules[""].type, why)
    if (recording := traced.recording) is None:
        why = "its forward cannot be recorded, so nothing tells this model from another one"
        return _nothing(request.graph.modules[""].type, why)
    try:
        # Without an identity, no earlier answer is taken for this one.
        answer(replace(request, identity=lambda: "", other_layouts=True), report)
    except EmptySpaceError as error:
        report(f"no plan is searched to its end: {error.problems[0].what}")
    if not recording.traces:
        why = "the plan leaves nothing open that needs a trace"
        return _nothing(recording.identity.name, why)
    if out is not None:
        recording.write(out)
    file = Path(out) if out is not None else None
    return RecordedModel(model=recording.identity.name, num_traces=len(recording.traces), file=file)


def _nothing(model: str, why: str) -> RecordedModel:
    return RecordedModel(model=model, num_traces=0, file=None, why=why)


def load_recording(path: str | os.PathLike[str]) -> RecordedModel:
    """Keep the traces of a file that `record` wrote where searches look for them.

    Args:
        path: The file.

    Raises:
        SpecError: The file cannot be read, is no recording, was cut short or changed, or was made
            by other versions than are installed.
    """
    from meshplan.runtime.live.recording import load  # torch

    identity, count = load(Path(path))
    return RecordedModel(model=identity.name, num_traces=count, file=Path(path))
