"""Arguments of a Trainer that a plan leaves no room for."""

from __future__ import annotations

from typing import Any, Final

from meshplan.errors import ApplyError, Problem
from meshplan.interop.second_strategy import strategy_problems
from meshplan.plan.plan import Plan
from meshplan.spec.spec import Spec
from meshplan.spec.strategies import resolve_mesh

_HOOKS: Final = (
    "create_accelerator_and_postprocess", "get_decay_parameter_names", "get_tp_size",
    "floating_point_ops", "_clip_grad_norm", "_get_dataloader", "_get_grad_norm",
    "_load_best_model", "_prepare_for_training", "_save_checkpoint", "get_batch_samples",
    "_get_train_sampler", "_get_eval_sampler", "_save_optimizer_and_scheduler", "_save_scaler",
    "_finalize_training",
)  # fmt: skip
"""Methods of the Trainer that a plan takes the place of; without them the plan would be ignored."""
_DEFAULT_NORM: Final = 1.0
"""`TrainingArguments.max_grad_norm` if it was left out."""


def check_base(base: Any, kind: type, planned: type) -> None:
    """Raise if no plan can be given to a class.

    Args:
        base: The class.
        kind: transformers' Trainer.
        planned: A base of the classes that have a plan.

    Raises:
        ApplyError: It is no Trainer, has a plan already, or is of a version with other methods.
    """
    if not (isinstance(base, type) and issubclass(base, kind)):
        what = f"{base!r} is not a Trainer of transformers"
        raise ApplyError(Problem(what, fix="pass the class: meshplan.trainer(Trainer)"))
    if issubclass(base, planned):
        what = f"{base.__name__} is a class that meshplan.trainer has made"
        raise ApplyError(Problem(what, fix="use it as it is: it takes plan="))
    if missing := [name for name in _HOOKS if not hasattr(base, name)]:
        import transformers

        what = f"the Trainer of transformers {transformers.__version__} has no {', '.join(missing)}"
        raise ApplyError(Problem(what, fix="pip install 'transformers>=5.23'"))


def argument_problems(args: Any) -> list[Problem]:
    """Return the arguments of a Trainer that contradict any plan, or each other under one."""
    problems = strategy_problems({})

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
    refuse(
        get("activation_offloading"),
        "activation_offloading=True",
        "set it to False, and say offload: {activations: true} in the plan",
    )
    if get("train_sampling_strategy") == "batch_rebalance":
        what = "train_sampling_strategy='batch_rebalance' was given, which gives the ranks unequal "
        what += "numbers of samples"
        problems.append(Problem(what, fix="use 'group_by_length', or leave it out"))
    for name in ("dispatch_batches", "split_batches"):
        fix = "leave it out: each data rank reads batches of per_device_train_batch_size"
        refuse(getattr(accelerator, name, None), f"accelerator_config.{name}=True", fix)
    if args.save_only_model and args.load_best_model_at_end:
        what = "load_best_model_at_end=True needs the state that save_only_model=True leaves out"
        problems.append(Problem(what, fix="leave out one of them"))
    return problems


def recording_problems(trainer: Any, spec: Spec) -> list[Problem]:
    """Return the arguments with which a forward cannot be recorded that a pipeline cuts.

    Args:
        trainer: The Trainer.
        spec: The plan.
    """
    args = trainer.args
    if getattr(args, "loss_type", None) != "chunked_nll" or spec.free_fields:
        return []
    if resolve_mesh(spec, args.world_size)[0].size("pp") == 1:
        return []
    what = "loss_type='chunked_nll', which this version of TRL takes by default, counts tokens in "
    what += "the model's forward, which a pipeline records without values"
    fix = "set loss_type='nll', or pip install 'trl>=1.16'"
    return [Problem(what, spec.origin("mesh.pp"), fix)]


def plan_problems(trainer: Any, plan: Plan) -> list[Problem]:
    """Return what a Trainer and a plan contradict each other in, or no Trainer can do.

    Args:
        trainer: The Trainer.
        plan: The plan as it was given.
    """
    args = trainer.args
    spec = plan.spec
    problems = []

    def refuse(what: str, key: str, fix: str) -> None:
        problems.append(Problem(what, spec.origin(key), fix))

    if plan.assignment.stages is not None and getattr(args, "predict_with_generate", False):
        refuse("predict_with_generate=True was given, but a pipeline cannot generate",
               "mesh.pp", "leave it out, and generate from what trainer.save_model('model') "
               "writes: AutoModelForSeq2SeqLM.from_pretrained('model').generate(...); or use a "
               "plan without pp")  # fmt: skip
    if plan.assignment.stages is not None and getattr(trainer, "padding_free", False):
        given, fix = "padding_free=True", "leave it out"
        if getattr(args, "packing", False):
            given = f"packing_strategy={args.packing_strategy!r}"
            fix = "say packing_strategy='wrapped'"
        refuse(f"{given} puts the samples of a batch into one row, which a pipeline cannot cut "
               "into microbatches", "mesh.pp", f"{fix}, or use a plan without pp")  # fmt: skip
    for name in ("bf16_full_eval", "fp16_full_eval", "torch_empty_cache_steps"):
        if plan.assignment.stages is not None and getattr(args, name, None):
            refuse(f"{name}={getattr(args, name)} was given, which has no effect on a pipeline",
                   "mesh.pp", "leave it out")  # fmt: skip
    if plan.assignment.context is not None:
        refuse("the Trainer counts tokens of whole sequences, which cp cuts", "mesh.cp",
               "use a plan without cp, or a loop around meshplan.train_step")  # fmt: skip
    placed = plan.assignment.tensors.values()
    is_sharded = plan.assignment.wrapper == "units" or any(each.stored.axes for each in placed)
    is_cut = is_sharded or plan.assignment.stages is not None
    if getattr(args, "sync_ref_model", False) and is_cut:
        refuse("sync_ref_model=True copies the model into a whole reference model, but the plan "
               "shards it", "strategy", "leave it out, or use strategy: ddp")  # fmt: skip
    if args.optim == "adafactor" and is_sharded:
        refuse(
            "optim='adafactor' was given, which does not support sharded parameters, and the plan "
            "shards them",
            "strategy",
            "use optim='adamw_torch', or strategy: ddp in the plan",
        )
    if spec.loss != "mean":
        refuse(f"the plan states loss: {spec.loss}, but the Trainer weights tokens itself",
               "loss", "leave it out")  # fmt: skip
    if spec.precision.scales_loss:
        refuse("the plan states a float16 loss scale, which the Trainer does not ask for",
               "precision", "use precision: bf16-mixed")  # fmt: skip
    given = "bf16" if args.bf16 else "fp16" if args.fp16 else ""
    if given:
        own = f"precision: {spec.precision.word}" if spec.precision.word else "no precision"
        refuse(f"{given}=True was given, but the plan states {own}", "precision",
               f"leave out {given}=, and state the precision in the plan")  # fmt: skip
    if not args.average_tokens_across_devices:
        refuse("average_tokens_across_devices=False weights the tokens of ranks unequally", "",
               "leave it out")  # fmt: skip
    batch = spec.batch
    if (
        batch.accumulate is not None or batch.global_ is not None
    ) and args.gradient_accumulation_steps != plan.accumulate:
        refuse(f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, but the "
               f"plan accumulates over {plan.accumulate} microbatches", "batch.accumulate",
               f"set gradient_accumulation_steps={plan.accumulate}")  # fmt: skip
    if plan.micro is not None and args.per_device_train_batch_size != plan.micro:
        refuse(f"per_device_train_batch_size is {args.per_device_train_batch_size}, but a "
               f"microbatch of the plan has {plan.micro} samples", "batch.micro",
               f"set per_device_train_batch_size={plan.micro}")  # fmt: skip
    elif plan.micro is not None and args.auto_find_batch_size:
        refuse("auto_find_batch_size changes the samples of a microbatch, which the plan "
               "states", "batch.micro", "leave it out")  # fmt: skip
    clip = spec.clip_grad_norm
    if clip is not None and args.max_grad_norm not in (clip, _DEFAULT_NORM):
        refuse(f"max_grad_norm is {args.max_grad_norm}, but the plan clips at {clip}",
               "clip_grad_norm", "state it in one of them")  # fmt: skip
    return problems
