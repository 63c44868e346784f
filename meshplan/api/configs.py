"""Import configuration files of other tools as plans, and export plans as their files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Unpack

from meshplan.api import checking
from meshplan.api.source import PlanSource, Source, SourceArguments, source_of
from meshplan.errors import PlanError
from meshplan.interop.configs.exporting import ExportedConfig, check_name, export_spec
from meshplan.interop.configs.importing import ImportedPlan, import_file
from meshplan.interop.configs.tools import TOOLS


def import_config(
    path: str | os.PathLike[str],
    tool: str | None = None,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
) -> ImportedPlan:
    """Translate a configuration file of another tool into a plan; nothing in it is executed.

    Args:
        path: The file, or a folder with one such file.
        tool: Name of the tool: deepspeed, accelerate, lightning, hf, torchtitan, megatron or
            nanotron. None recognises it by the file's keys.
        nodes: Number of nodes, if the file does not say it.
        gpus_per_node: Number of GPUs of each node.
        gpu: Name of the GPU, of those that `meshplan gpus` lists.

    Returns:
        The text of the plan, and what became of every key.

    Raises:
        SpecError: The file cannot be read, no tool has such a file, or it contradicts itself.
    """
    return import_file(
        os.fspath(path), TOOLS, tool=tool, nodes=nodes, gpus_per_node=gpus_per_node, gpu=gpu
    )


def check_config_name(path: str | os.PathLike[str], to: str) -> None:
    """Refuse a name for an exported file that ends as files of another form do.

    Args:
        path: The file that is to be written.
        to: Name of the tool, as for `import_config`.

    Raises:
        SpecError: The name ends so, or there is no such tool.
    """
    check_name(os.fspath(path), to, TOOLS)


def export_config(
    plan: PlanSource | Source,
    to: str,
    overrides: Sequence[str] = (),
    **given: Unpack[SourceArguments],
) -> ExportedConfig:
    """Translate a plan, with the choices of its lock, into a configuration file of another tool.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`.
        to: Name of the tool, as for `import_config`.
        overrides: `KEY=VALUE` statements that change the plan.
        given: The model, by the names of `Source`: `model` and `config`.

    Returns:
        The text of the file, and what the plan states that the file does not say.

    Raises:
        SpecError: The plan cannot be read, or there is no such tool.
        PlanError: The plan contradicts itself, or leaves something to the planner.
    """
    source = source_of(plan, overrides, **given)
    checked = checking.check_plan(source)
    if checked.problems:
        raise PlanError(checked.problems)
    return export_spec(source.spec if checked.plan is None else checked.plan.spec, to, TOOLS)
