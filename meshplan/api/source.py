"""`Source`: the plan, the model and the machine that a question is about."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from meshplan.errors import Origin, Problem, SpecError
from meshplan.shown import shown
from meshplan.spec.spec import Spec

PlanSource = str | os.PathLike[str] | Mapping[str, Any]
"""Path of a plan file, or its content as a mapping."""


class SourceArguments(TypedDict, total=False):
    """Keyword arguments that state the model and the machine; the same fields as in `Source`."""

    model: str | None
    config: str | Path | None
    gpu: str | None
    memory: str | int | None
    profile: str | Path | None


@shown
@dataclass(frozen=True, slots=True)
class Source:
    """The plan, the model and the machine that a question is about.

    Args:
        plan: Path of a plan file, or its content as a mapping.
        overrides: `KEY=VALUE` statements that change the plan.
        model: "pkg.mod:function" that builds the model; None for the model that the plan states.
        config: A Hugging Face config.json, or its folder, instead of `model`.
        gpu: Name of the device whose memory is the limit; None for the device that the plan states.
        memory: The memory limit itself, as a text such as "80GiB" or in bytes, instead of `gpu`.
        profile: A profile written by `meshplan calibrate`; None takes the profile that the plan's
            lock was made with, or else meshplan's own figures for the device.
    """

    plan: PlanSource
    overrides: tuple[str, ...] = ()
    model: str | None = None
    config: str | Path | None = None
    gpu: str | None = None
    memory: str | int | None = None
    profile: str | Path | None = None

    @property
    def spec(self) -> Spec:
        """The plan with its overrides, read anew each time.

        Raises:
            SpecError: The plan cannot be read.
        """
        from meshplan.spec.reader import load_spec  # yaml

        return load_spec(self.plan, self.overrides)

    @property
    def names_model(self) -> bool:
        """True if `model` or `config` is given; it replaces the model that the plan states."""
        return (self.model, self.config) != (None, None)

    def entry(self, spec: Spec) -> tuple[str, Origin] | None:
        """Return ("pkg.mod:function", where it is stated); None if no function builds the model.

        Args:
            spec: The plan as it is read; its model counts if the caller names none.

        Raises:
            SpecError: Both `model` and `config` are given.
        """
        if self.model is not None and self.config is not None:
            what = "--model and --config both state the model"
            raise SpecError(Problem(what, Origin("--model"), "leave one of them out"))
        if self.model is not None:
            return self.model, Origin("--model")
        if self.config is None and spec.model is not None and spec.model.entry is not None:
            return spec.model.entry, spec.origin("model.entry")
        return None

    def with_overrides(self, statements: Sequence[str]) -> Source:
        """Return a copy with these `KEY=VALUE` statements after the overrides."""
        return replace(self, overrides=(*self.overrides, *statements))


def source_of(
    plan: PlanSource | Source, overrides: Sequence[str], **given: Unpack[SourceArguments]
) -> Source:
    """Return `plan` if it is a `Source`, else make one from the arguments.

    Raises:
        TypeError: A `Source` was passed together with other arguments.
    """
    if isinstance(plan, Source):
        if overrides or given:
            raise TypeError("a Source has its own overrides, model and machine")
        return plan
    return Source(plan, tuple(overrides), **given)
