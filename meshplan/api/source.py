"""What a question is about: a plan, its model and its machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from meshplan.errors import Origin, Problem, SpecError
from meshplan.spec.spec import Spec

PlanSource = str | os.PathLike[str] | Mapping[str, Any]
"""Path of a plan file, or its content as a mapping."""


class SourceArguments(TypedDict, total=False):
    """The model and the machine of a question, as keyword arguments: fields of `Source`."""

    model: str | None
    config: str | Path | None
    gpu: str | None
    memory: str | int | None
    profile: str | Path | None


@dataclass(frozen=True, slots=True)
class Source:
    """The plan, the model and the machine that a question is about.

    Args:
        plan: Path of a plan file, or its content as a mapping.
        overrides: `KEY=VALUE` statements that change the plan.
        model: "pkg.mod:function" that builds the model; None for the plan's own model.
        config: A Hugging Face config.json, or its folder, instead of `model`.
        gpu: Name of the device whose memory is the limit; None for the plan's own.
        memory: The memory limit itself, such as "80GiB" or bytes, instead of `gpu`.
        profile: A profile written by `meshplan calibrate`; None takes the known figures of the
            device, or the profile that the plan's lock was made with.
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
        """Read the plan with its overrides.

        Raises:
            SpecError: The plan cannot be read.
        """
        from meshplan.spec.reader import load_spec  # yaml

        return load_spec(self.plan, self.overrides)

    @property
    def names_model(self) -> bool:
        """True if the caller names a model, which replaces the plan's own."""
        return (self.model, self.config) != (None, None)

    def entry(self, spec: Spec) -> tuple[str, Origin] | None:
        """Return "pkg.mod:function" and the place that names it; None if a config is the model.

        Args:
            spec: The plan as it is read.

        Raises:
            SpecError: The caller names a function and a config.
        """
        if self.model is not None and self.config is not None:
            what = "--model and --config both state the model"
            raise SpecError(Problem(what, Origin("--model"), "leave one of them out"))
        if self.model is not None:
            return self.model, Origin("--model")
        if self.config is None and spec.model is not None and spec.model.entry is not None:
            return spec.model.entry, spec.origin("model.entry")
        return None

    def on_top(self, statements: Sequence[str]) -> Source:
        """Return the same question with more overrides."""
        return replace(self, overrides=(*self.overrides, *statements))


def source_of(
    plan: PlanSource | Source, overrides: Sequence[str], **given: Unpack[SourceArguments]
) -> Source:
    """Return the source of a question that is asked with a plan, or with a `Source` alone."""
    if isinstance(plan, Source):
        if overrides or given:
            raise TypeError("a Source has its own overrides, model and machine")
        return plan
    return Source(plan, tuple(overrides), **given)
