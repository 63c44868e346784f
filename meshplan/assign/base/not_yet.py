"""Refuse settings that are in the format of plan.yaml but not supported by this version."""

from __future__ import annotations

from collections.abc import Mapping

from meshplan.errors import Problem
from meshplan.layout.styles import PLANNED_STYLES
from meshplan.spec.spec import AUTO, ActivationCheckpointing, Spec


def not_yet(spec: Spec) -> list[Problem]:
    """Return a problem for each setting that this version, or a plan with `auto`, cannot use."""
    requested: list[tuple[str, str, str]] = []
    open_: list[tuple[str, str, str]] = []

    def ask(condition: object, path: str, what: str, fix: str = "remove it") -> None:
        if condition:
            requested.append((path, what, fix))

    def free(condition: object, path: str, what: str, fix: str) -> None:
        if condition:
            open_.append((path, what, fix))

    parts = ("params", "optimizer", "activations")
    free(any(getattr(spec.offload, part) == AUTO for part in parts), "offload",
         "'offload: auto'", "write none, params or {activations: true}")  # fmt: skip
    for rule in spec.rules:
        for part in parts:
            ask(
                getattr(rule.offload, part, None) == AUTO,
                f"rules[{rule.index}].offload.{part}",
                "'auto' in the offload of a rule",
                "write true or false for each part",
            )
    ask(spec.loss_chunks == "fused", "loss_chunks",
        "'loss_chunks: fused' (a kernel outside torch, such as Liger's or cut cross-entropy, whose "
        "memory cannot be estimated)", "write a number such as 8: torch's own kernels then compute "
        "head and loss in 8 chunks of the tokens")  # fmt: skip
    free(spec.loss_chunks == AUTO, "loss_chunks", "'loss_chunks: auto'", "write 1, or 8")
    free(spec.allocator == AUTO, "allocator", "'allocator: auto'", "write default or expandable")
    for name in ("micro", "accumulate"):
        value = getattr(spec.batch, name)
        free(value == AUTO, f"batch.{name}", f"'{name}: auto'", "write the number")
        ask(
            isinstance(value, Mapping),
            f"batch.{name}",
            f"a schedule of '{name}' by epoch",
            "write one number",
        )
    free(spec.activation_checkpointing.mode == AUTO, "activation_checkpointing",
         "'activation_checkpointing: auto'", "write none, full or selective")  # fmt: skip
    ask(spec.activation_checkpointing.budget is not None, "activation_checkpointing.budget",
        "'budget' of activation_checkpointing", "write auto, none, full or selective")  # fmt: skip
    for rule in spec.rules:
        at = f"rules[{rule.index}]"
        ask(rule.activation_checkpointing and _is_planned(rule.activation_checkpointing),
            f"{at}.activation_checkpointing", "'auto' or 'budget' in a rule",
            "use none, full or selective")  # fmt: skip
        for axis, word in rule.place.items():
            path = f"{at}.place.{axis}"
            ask(word in PLANNED_STYLES, path, f"the style '{word}'")
            ask(axis == "pp", path, f"a placement on the axis '{axis}'")
            ask(axis == "dp_shard" and word == AUTO, path, "'dp_shard: auto'", "write S(0) or R")
    problems = [
        Problem(f"{what} is not available yet in this version", spec.origin(path), fix)
        for path, what, fix in requested
    ]
    problems += [
        Problem(f"{what} is left to the planner", spec.origin(path), f"run meshplan plan, or {fix}")
        for path, what, fix in open_
    ]
    for rule in spec.rules:
        if "cp" in rule.place:
            problems.append(
                Problem(
                    "cp shards the sequence, not parameters: the parameters of sharded modules are "
                    "sharded over dp_shard and cp together",
                    spec.origin(f"rules[{rule.index}].place.cp"),
                    "place the module on dp_shard",
                )
            )
        word = rule.place.get("dp_replicate", "R")
        if word != "R":
            problems.append(
                Problem(
                    f"'{word}' cannot be placed on dp_replicate, whose ranks are replicas",
                    spec.origin(f"rules[{rule.index}].place.dp_replicate"),
                    "place the module on dp_shard",
                )
            )
    return problems


def _is_planned(policy: ActivationCheckpointing) -> bool:
    return policy.mode == AUTO or policy.budget is not None
