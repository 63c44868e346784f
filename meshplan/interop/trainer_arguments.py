"""Arguments of a Trainer that a plan leaves no room for."""

from __future__ import annotations

from typing import Any, Final

from meshplan.errors import ApplyError, Problem

_HOOKS: Final = (
    "create_accelerator_and_postprocess", "get_decay_parameter_names", "get_tp_size",
    "floating_point_ops", "_clip_grad_norm", "_get_dataloader", "_get_grad_norm",
    "_load_best_model", "_prepare_for_training", "_save_optimizer_and_scheduler", "_save_scaler",
)  # fmt: skip
"""Methods of the Trainer that a plan takes the place of; without them the plan would be ignored."""


def check_hooks(base: type) -> None:
    """Raise if a Trainer is of a version that has other methods.

    Raises:
        ApplyError: Methods are missing.
    """
    if missing := [name for name in _HOOKS if not hasattr(base, name)]:
        import transformers

        what = f"the Trainer of transformers {transformers.__version__} has no {', '.join(missing)}"
        raise ApplyError(Problem(what, fix="pip install 'transformers>=5.23'"))


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
