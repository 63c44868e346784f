"""Arguments of a Trainer that a plan leaves no room for."""

from __future__ import annotations

from typing import Any

from meshplan.errors import Problem


def argument_problems(args: Any) -> list[Problem]:
    """Return the arguments of a Trainer that contradict any plan, or each other under one."""
    problems = []

    def refuse(is_asked: object, name: str, fix: str) -> None:
        if is_asked:
            what = f"{name} was given, but the plan decides this"
            problems.append(Problem(what, fix=fix))

    def get(name: str) -> Any:
        return getattr(args, name, None)  # Not every version of transformers has each of them.

    other = "leave it out: the plan states how the model is sharded"
    accelerator = args.accelerator_config
    refuse(get("torch_compile"), "torch_compile=True", "say compile: true in the plan")
    refuse(get("fsdp"), "fsdp=", other)
    refuse(get("fsdp_config"), "fsdp_config=", other)
    refuse(get("deepspeed"), "deepspeed=", other + " (meshplan import translates the file)")
    refuse(get("parallelism_config"), "parallelism_config=", other)
    refuse(
        get("gradient_checkpointing") or get("activation_checkpointing"),
        "gradient_checkpointing=True",
        "set it to False, and say activation_checkpointing: full in the plan",
    )
    for name in ("dispatch_batches", "split_batches"):
        fix = "leave it out: each data rank reads batches of per_device_train_batch_size"
        refuse(getattr(accelerator, name, None), f"accelerator_config.{name}=True", fix)
    if args.save_only_model and args.load_best_model_at_end:
        what = "load_best_model_at_end=True needs the state that save_only_model=True leaves out"
        problems.append(Problem(what, fix="leave out one of them"))
    return problems
