"""Scale a plan and its model down to a few processes on this machine, with the same structure.

Every axis, stage, kind of layer and rule is kept. Only sizes shrink, and each change is reported.
The small plan is then applied and run like any plan, so this module need not interpret it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from meshplan.errors import Origin, Problem, SpecError
from meshplan.layout.mesh import Mesh
from meshplan.model.blueprint.config import config_file, foreign_problem, read_json
from meshplan.model.graph import ModelGraph
from meshplan.runtime.estimate.small_split import small_split
from meshplan.runtime.estimate.tiny_config import shrink_layers, shrink_sizes
from meshplan.runtime.torch_private.modes import built_on
from meshplan.runtime.trace.entry import model_of_entry
from meshplan.runtime.trace.sample import TOKENS, call, check_size, sample_inputs
from meshplan.runtime.trace.structure import graph_of
from meshplan.runtime.trace.trace_errors import alone_problem
from meshplan.spec.match import compile_selector
from meshplan.spec.spec import AUTO, Batch, Borrow, Rule, Spec
from meshplan.spec.strategies import resolve_mesh
from meshplan.spec.values import quote
from meshplan.units import format_gib

MAX_RANKS: Final = 16
"""Default limit of processes."""
MODEL_LIMIT: Final = 2 * 2**30
"""Most bytes of parameters and buffers of the small model: every process has a copy of it."""
_FULL: Final = 8
"""A pipeline runs all its microbatches if they are at most this many per pipeline rank."""
_SMALL: Final = 2
"""Size of axes in the small mesh: the smallest with which an axis has an effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A description from which every process builds the same model.

    It names either a function of the user or a config of transformers.

    Args:
        entry: "pkg.mod:function" of the user's function; "" with a config.
        origin: Place where the user named the function or config.
        config: The config object of a transformers model; None with an entry.
        architecture: Name of the model's class in transformers; "" with an entry.
        blocks: Number of blocks to keep in each list of equal blocks; None keeps all.
        is_built_on_meta: If True, the function runs on meta, because the model with all its blocks
            is too large for memory.
    """

    entry: str = ""
    origin: Origin
    config: Any = None
    architecture: str = ""
    blocks: int | None = None
    is_built_on_meta: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """The small plan and model that run in place of the user's.

    Args:
        spec: The small plan.
        source: The source of the small model.
        notes: Descriptions of each size that was made smaller, such as "mesh: tp 8 to 2".
        unmatched: Descriptions of the rules that match a module of the whole model, but none of the
            small model.
    """

    spec: Spec
    source: ModelSource
    notes: tuple[str, ...]
    unmatched: tuple[str, ...]


def shrink(
    spec: Spec, source: ModelSource, max_ranks: int = MAX_RANKS, most_of_axis: int = _SMALL
) -> Small:
    """Scale a plan and its model down to at most `max_ranks` ranks.

    Args:
        spec: The plan, as declared.
        source: The source of the model.
        max_ranks: Highest number of ranks of the small mesh.
        most_of_axis: Highest size of an axis of the small mesh that needs no larger one.

    Raises:
        SpecError: Even the smallest mesh or model is too large, or the plan leaves the mesh open.
        PlanError: The mesh contradicts itself.
    """
    mesh, _ = resolve_mesh(spec)
    sizes = _small_sizes(spec, mesh, most_of_axis)
    world = _world(sizes)
    if world > max_ranks:
        words = ", ".join(f"{axis}: {size}" for axis, size in sizes.items())
        what = f"the smallest mesh with every axis, {{{words}}}, has {world} ranks, more than "
        fix = f"add --ranks {world}, or leave an axis out: --set mesh.dp_replicate=1"
        raise SpecError(Problem(f"{what}{max_ranks}", spec.origin("mesh"), fix))
    check_size(spec)
    notes = [
        f"mesh: {axis} {mesh.size(axis)} to {_number(size)}"
        for axis, size in sizes.items()
        if mesh.size(axis) != _number(size)
    ]
    virtual = spec.pipeline.virtual if spec.pipeline else 1
    blocks = 2 * max(1, _number(sizes.get("pp", 1)) * max(virtual, 2 if spec.pipeline else 1))
    small = replace(
        spec, mesh=MappingProxyType(sizes), hardware=None, model=None,
        batch=_small_batch(spec, _number(sizes.get("pp", 1))),
    )  # fmt: skip
    if spec.pipeline is not None:
        microbatches = _small_microbatches(spec, _number(sizes.get("pp", 1)))
        if microbatches != spec.pipeline.microbatches:
            notes.append(f"microbatches: {spec.pipeline.microbatches} to {microbatches}")
            small = replace(small, pipeline=replace(spec.pipeline, microbatches=microbatches))
    whole = model_of_source(source, on_meta=True)
    found, model, changed = _small_source(source, small, whole, mesh, sizes, blocks)
    if small.pipeline is not None and isinstance(small.pipeline.split, tuple):
        split, renamed = small_split(small.pipeline.split, whole, model)
        small = replace(small, pipeline=replace(small.pipeline, split=split))
        changed = [*changed, *renamed]
    rules, unmatched = rules_that_match(spec, graph_of(whole), graph_of(model))
    return Small(
        spec=replace(small, rules=rules),
        source=found,
        notes=(*notes, *changed),
        unmatched=unmatched,
    )


def model_source_of(spec: Spec, model: str | None, config: str | Path | None) -> ModelSource:
    """Return the source of the model that a flag names, or the plan if no flag is given.

    Args:
        spec: The plan.
        model: "pkg.mod:function" of the flag `--model`; None if it was not given.
        config: Path of the flag `--config`; None if it was not given.

    Raises:
        SpecError: No model is named, both flags are given, or the config cannot be read.
    """
    if model is not None and config is not None:
        what = "--model and --config both state the model"
        raise SpecError(Problem(what, Origin("--model"), "leave one of them out"))
    if model is not None:
        return ModelSource(entry=model, origin=Origin("--model"))
    if config is not None:
        return source_of_config(config, Origin("--config"))
    if spec.model is not None and spec.model.entry is not None:
        return ModelSource(entry=spec.model.entry, origin=spec.origin("model.entry"))
    if spec.model is not None and spec.model.config is not None:
        path = config_file(spec.model.config, Path(spec.source).parent)
        return source_of_config(path, spec.origin("model.config"))
    what = "the plan names no function or config of the model"
    fix = "add --model pkg.mod:function, --config PATH, or one of them to the plan's 'model'"
    raise SpecError(Problem(what, spec.origin("model"), fix))


def source_of_config(path: str | Path, origin: Origin) -> ModelSource:
    """Return the source of the model that a Hugging Face config.json describes.

    Args:
        path: The file, or the folder that contains it.
        origin: Place where the user named the path.

    Raises:
        SpecError: The file cannot be read, or transformers is missing or has no such model.
    """
    file = config_file(path)
    content = read_json(file, origin)
    if (problem := foreign_problem(content, str(file))) is not None:
        raise SpecError(problem)
    try:
        known = _transformers().CONFIG_MAPPING
        if (model_type := content.get("model_type")) not in known:
            what = f"transformers has no model_type {quote(str(model_type))}"
            fix = "correct it, or name a function that builds the model: --model pkg.mod:fn"
            raise SpecError(Problem(what, origin, fix))
        with _offline():
            config = known[content["model_type"]].from_dict(dict(content))
    except SpecError:
        raise
    except ImportError:
        fix = "install transformers, or name a function that builds the model: --model pkg.mod:fn"
        what = "building a model from a config needs transformers, which is not installed"
        raise SpecError(Problem(what, origin, fix)) from None
    except Exception as error:  # Each of transformers' config classes may raise anything.
        what = f"transformers cannot read {file} as a config: {type(error).__name__}: {error}"
        raise SpecError(Problem(what, origin, "name a config.json or its folder")) from None
    names = content.get("architectures") or [f"{type(config).__name__[:-6]}ForCausalLM"]
    is_name = isinstance(names, list) and names and isinstance(names[0], str)
    if not is_name or _model_class(names[0]) is None:
        what = f"transformers has no model class {quote(str(names[0] if is_name else names))}"
        fix = "set architectures in the config to a model class, such as LlamaForCausalLM"
        raise SpecError(Problem(what, origin, fix))
    return ModelSource(origin=origin, config=config, architecture=names[0])


def _transformers() -> Any:
    """Import and return transformers, only when it is needed, because the import takes seconds."""
    return importlib.import_module("transformers")


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep transformers from downloading inside the `with` block: a config may name files to fetch.

    The environment variable HF_HUB_OFFLINE=1 has the same effect, but huggingface_hub reads it only
    once, when it is imported.
    """
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _model_class(name: str) -> Any:
    """Return the model class of transformers with this name; None if no model class has it.

    The caller calls the class. A config may name any attribute of transformers, so anything that is
    no model class is refused.
    """
    found = getattr(_transformers(), name, None) if name.isidentifier() else None
    base = _transformers().PreTrainedModel
    is_model = isinstance(found, type) and issubclass(found, base) and found is not base
    return found if is_model else None


def model_of_source(source: ModelSource, *, on_meta: bool = False) -> nn.Module:
    """Build the model, on the CPU with its initial values, or on meta.

    Args:
        source: The source of the model.
        on_meta: If True, build it on meta, without memory.

    Raises:
        SpecError: The user's function cannot build the model.
    """
    if source.entry:
        model = model_of_entry(
            source.entry, source.origin, on_meta=on_meta or source.is_built_on_meta
        )
    else:
        cls = _model_class(source.architecture)
        device = torch.device("meta" if on_meta else "cpu")
        with built_on(device), _offline():
            model = cls(source.config)
    if source.blocks is not None:
        model = copy.deepcopy(model)  # The entry may be a model instead of a function.
        _keep_blocks(model, source.blocks)
    return model


def num_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers of a model."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def _small_sizes(spec: Spec, mesh: Mesh, most: int) -> dict[str, int | Any]:
    """Return the size of every axis in the small mesh: `most`, or the plan's if that is smaller.

    dp_shard has 4 if a rule states to how many ranks it reshards, and pp keeps its size if the plan
    names stages by number. A borrowed axis is a `Borrow`.
    """
    stated: Mapping[str, Any] = spec.mesh if isinstance(spec.mesh, Mapping) else mesh.sizes
    out: dict[str, int | Any] = {}
    for axis, size in stated.items():
        if isinstance(size, Borrow):
            out[axis] = Borrow(min(size.size, most), size.within)
            continue
        real = mesh.size(axis) if size == AUTO else int(size)
        least = most
        if axis == "dp_shard" and any(_is_count(r.reshard_after_forward) for r in spec.rules):
            # An axis of size 2 has no smaller group of ranks to reshard to.
            least = max(most, 2 * _SMALL)
        if axis == "pp" and (
            any(_is_count(r.stage) for r in spec.rules)
            or (spec.pipeline is not None and spec.pipeline.split != AUTO)
        ):
            least = real
        out[axis] = min(real, least)
    return out


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(size: Any) -> int:
    return size.size if isinstance(size, Borrow) else int(size)


def _world(sizes: Mapping[str, Any]) -> int:
    """Return the number of ranks; borrowed axes do not count, because their lender does."""
    world = 1
    for size in sizes.values():
        world *= 1 if isinstance(size, Borrow) else int(size)
    return world


def _small_batch(spec: Spec, pp: int) -> Batch:
    """Return a batch of two samples for each forward: BatchNorm may raise for one sample.

    Args:
        spec: The plan.
        pp: Size of pp in the small mesh. The pipeline schedule cuts `batch.micro` further.
    """
    batch = spec.batch
    accumulate = 1
    if isinstance(batch.accumulate, int):
        accumulate = batch.accumulate
    elif batch.global_ is not None and isinstance(batch.micro, int):
        # The plan leaves the count open. With two, the run covers gradient accumulation.
        accumulate = 2
    asked = _small_microbatches(spec, pp)
    cut = 1
    if pp > 1:
        cut = 2 * pp if asked == AUTO else asked  # `auto` takes at most two per pipeline rank.
    seq_len = None if batch.seq_len is None else min(batch.seq_len, TOKENS)
    return Batch(micro=_SMALL * cut, accumulate=min(accumulate, _SMALL), seq_len=seq_len)


def _small_microbatches(spec: Spec, pp: int) -> Any:
    """Return the number of the pipeline's microbatches, reduced if there are more than 8 per rank.

    A reduced number has the same remainder modulo pp. Return `AUTO` if the plan states it.
    """
    asked = spec.pipeline.microbatches if spec.pipeline else AUTO
    if asked == AUTO or asked <= _FULL * pp:
        return asked
    return _FULL // 2 * pp + asked % pp


def _small_source(
    source: ModelSource,
    spec: Spec,
    whole: nn.Module,
    mesh: Mesh,
    sizes: Mapping[str, Any],
    blocks: int,
) -> tuple[ModelSource, nn.Module, list[str]]:
    """Return (source of a small model, the model, descriptions of the changes).

    Of all candidates, the smallest that can be built and run is returned.

    Args:
        source: The source of the user's model.
        spec: The small plan.
        whole: The user's model on meta.
        mesh: The plan's mesh.
        sizes: Size of each axis in the small mesh.
        blocks: Number of blocks to keep in each list of equal blocks.

    Raises:
        SpecError: No candidate can be built and run.
    """
    small_tp, ep = _number(sizes.get("tp", 1)), _number(sizes.get("ep", 1))
    config = source.config if source.config is not None else getattr(whole, "config", None)
    # Candidates, smallest first: a config with smaller dims and fewer layers; a config with fewer
    # layers; the model of the user's function with fewer blocks; that model with all blocks.
    candidates: list[tuple[ModelSource, list[str]]] = []
    reasons: list[str] = []
    if config is not None and hasattr(config, "model_type"):
        architecture = source.architecture or type(whole).__name__
        of_config = replace(source, entry="", architecture=architecture)
        if _model_class(architecture) is not None:
            sizes_too = partial(
                shrink_sizes, layers=blocks, tp=mesh.size("tp"), small_tp=small_tp, ep=ep
            )
            for change in (sizes_too, partial(shrink_layers, layers=blocks)):
                try:
                    small, notes = change(config)
                except Exception as error:  # A config's class may refuse any value.
                    reasons.append(f"{type(error).__name__}: {error}".partition("\n")[0])
                else:
                    candidates.append((replace(of_config, config=small), notes))
    if source.entry:
        is_large = num_bytes(whole) > MODEL_LIMIT
        cut = replace(source, blocks=blocks, is_built_on_meta=is_large)
        kept = _keep_blocks(copy.deepcopy(whole), blocks)
        candidates.append((cut, kept))
        if kept:
            candidates.append((source, []))
    for candidate, notes in candidates:
        model, why = _try(candidate, spec)
        if model is not None:
            return candidate, model, notes
        if isinstance(why, Problem) and candidate is candidates[-1][0]:
            raise SpecError(why)  # It is the user's own model that fails, not a smaller one.
        reasons.append(why.what if isinstance(why, Problem) else why)
    what = f"no small model could be built: {'; then '.join(dict.fromkeys(reasons))}"
    fix = "name a function that builds a small model of the same structure: --model pkg.mod:fn"
    raise SpecError(Problem(what, source.origin, fix))


def _try(source: ModelSource, spec: Spec) -> tuple[nn.Module | None, str | Problem]:
    """Return (model, "") if it is small enough and its forward runs, else (None, the reason).

    The reason is a problem if the forward fails.
    """
    try:
        on_meta = model_of_source(source, on_meta=True)
        size = num_bytes(on_meta)
        if size > MODEL_LIMIT:
            return None, f"the model has {format_gib(size)}, more than {format_gib(MODEL_LIMIT)}"
        if source.is_built_on_meta:
            return on_meta, ""
        model = model_of_source(source)
        inputs = sample_inputs(model, spec, _SMALL, 0)
    except SpecError:
        raise
    except Exception as error:  # The model's own code may raise anything.
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        with torch.no_grad():
            call(model, inputs)
    except Exception as error:
        return None, alone_problem(error, model, source.origin, inputs)
    return model, ""


def _keep_blocks(model: nn.Module, keep: int) -> list[str]:
    """Cut every ModuleList of equal blocks to its first `keep`; return descriptions of the cuts."""
    out = []
    for fqn, blocks in list(model.named_modules()):
        if not isinstance(blocks, nn.ModuleList) or len(blocks) <= keep:
            continue
        forms = {(type(b), tuple((n, p.shape) for n, p in b.named_parameters())) for b in blocks}
        if len(forms) == 1:
            out.append(f"{fqn} {len(blocks)} to {keep} blocks")
            del blocks[keep:]
    return out


def rules_that_match(
    spec: Spec, whole: ModelGraph, small: ModelGraph
) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """Make those rules optional that match the whole model but not the small one.

    Otherwise the small plan would be rejected because of a rule that matches nothing.

    Returns:
        (all rules of the plan, descriptions of the rules that were made optional).
    """
    rules, unmatched = [], []
    for rule in spec.rules:
        lost = [
            selector
            for selector in rule.match
            if _matches(selector, whole) and not _matches(selector, small)
        ]
        if lost:
            unmatched.append(f"{rule}: {', '.join(map(str, lost))}")
            rule = replace(rule, optional=True)
        rules.append(rule)
    return tuple(rules), tuple(unmatched)


def _matches(selector: Any, graph: ModelGraph) -> bool:
    matcher = compile_selector(selector)
    if selector.kind == "param":
        return any(matcher.matches(name) for t in graph.parameters for name in t.names)
    return any(
        matcher.matches(name, info.type, info.qualified_type)
        for fqn, info in graph.modules.items()
        for name in (fqn, *info.aliases)
    )
