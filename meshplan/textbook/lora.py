"""The size of LoRA adapters: read from a flag, and counted on a model's projections.

An adapter of rank r on a weight of shape (out, in) has r * (out + in) parameters, as peft's
`LoraConfig` makes it without `use_dora`, biases or saved modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.model.graph import ModelGraph, is_inside
from meshplan.spec.values import did_you_mean
from meshplan.units import parse_count

ALL_LINEAR: Final = "all-linear"
"""The target that peft calls so: every linear layer but the output head."""
FORM: Final = "r=16,targets=q_proj:v_proj"
_FLAG: Final = Origin("--lora")
_PEFT: Final = {"rank": "r", "target_modules": "targets"}
"""Keys as peft and others call them."""
_LINEAR: Final = {"all_linear": ALL_LINEAR}
_KINDS: Final = ("linear", "conv1d")
_HEADS: Final = ("lm_head", "embed_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters that a user states: by rank and targets, or by their size.

    Args:
        rank: Rank of each adapter; None if the size is stated.
        targets: Names of projections, each the end of a module's name; or `ALL_LINEAR` alone.
        num_params: Number of parameters of all adapters; None if rank and targets are stated.
    """

    rank: int | None = None
    targets: tuple[str, ...] = ()
    num_params: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} on {':'.join(self.targets)}"


def read_adapters(text: str) -> Adapters:
    """Read `r=16,targets=q_proj:v_proj`, `r=16,targets=all-linear` or `params=6.8M`.

    Targets may also be separated by + or commas, and the keys may be those of peft's `LoraConfig`.

    Raises:
        SpecError: The text has another form.

    >>> read_adapters("r=8,targets=q_proj:v_proj").targets
    ('q_proj', 'v_proj')
    """
    stated: dict[str, str] = {}
    problems = []
    fix = f"write {FORM}, r=16,targets={ALL_LINEAR}, or params=6.8M"
    last = ""
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        if key and not equals and last == "targets":  # targets=q_proj,v_proj
            stated[last] += f":{key}"
            continue
        key = last = _PEFT.get(key, key)
        if key in stated:
            problems.append(Problem(f"'{key}' is stated twice", _FLAG, "state it once"))
        elif not equals or not value:
            problems.append(Problem(f"'{word.strip()}' states no value", _FLAG, fix))
        elif key not in ("r", "targets", "params"):
            guess = did_you_mean(key, ("r", "targets", "params"), fix)
            problems.append(Problem(f"'{key}' is no key of adapters", _FLAG, guess))
        stated[key] = value
    counts: dict[str, int] = {}
    for key in ("r", "params"):
        if stated.get(key):
            try:
                counts[key] = parse_count(stated[key])
            except ValueError as error:
                problems.append(Problem(f"{key}: {error}", _FLAG, fix))
    if problems:
        raise SpecError(problems)
    if "params" in stated:
        if len(stated) > 1:
            what = "params states the size of the adapters, which also follows from r and targets"
            raise SpecError(Problem(what, _FLAG, "state params alone, or r and targets"))
        return Adapters(num_params=counts["params"])
    if missing := [key for key in ("r", "targets") if key not in stated]:
        what = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise SpecError(Problem(what, _FLAG, fix))
    names = stated["targets"].replace("+", ":").split(":")
    targets = tuple(dict.fromkeys(_LINEAR.get(each.strip(), each.strip()) for each in names))
    if "" in targets or (ALL_LINEAR in targets and len(targets) > 1):
        what = f"targets={stated['targets']} is no list of names"
        raise SpecError(Problem(what, _FLAG, f"write {FORM}, or targets={ALL_LINEAR}"))
    return Adapters(rank=counts["r"], targets=targets)


def count_adapters(adapters: Adapters, graph: ModelGraph | None) -> int:
    """Return the number of parameters of all adapters.

    Args:
        adapters: The adapters, as stated.
        graph: The model, from its config; None if only its number of parameters is known.

    Raises:
        SpecError: The size follows from a model that is not known, or a target is none of its
            projections.
    """
    if adapters.num_params is not None:
        return adapters.num_params
    assert adapters.rank is not None
    if graph is None:
        what = f"the size of adapters of {adapters} follows from the model's projections, which a "
        what += "number of parameters does not tell"
        fix = "add --config PATH in place of --params; or state the size, --lora params=N, which "
        fix += "print_trainable_parameters() of a peft model prints, without its commas"
        raise SpecError(Problem(what, _FLAG, fix))
    shapes = _projections(graph)
    chosen: set[str] = set()
    problems = []
    for target in adapters.targets:
        if target == ALL_LINEAR:
            found = {fqn for fqn in shapes if fqn.rpartition(".")[2] not in _HEADS}
        else:
            found = {fqn for fqn in shapes if fqn == target or fqn.endswith("." + target)}
        if not found:
            names = dict.fromkeys(fqn.rpartition(".")[2] for fqn in shapes)
            fix = did_you_mean(target, names, f"its projections are {', '.join(names)}")
            problems.append(Problem(f"{graph.name} has no projection '{target}'", _FLAG, fix))
        chosen |= found
    if problems:
        raise SpecError(problems)
    mixtures = _mixtures(graph)
    is_touched = any(is_inside(fqn, mixture) for fqn in chosen for mixture in mixtures)
    if is_touched or (mixtures and ALL_LINEAR in adapters.targets):
        # peft 0.21 turns such targets into adapters of the fused weights for some families.
        what = f"{':'.join(adapters.targets)} names modules of a mixture of experts, whose weights "
        what += "are fused; which of them get adapters depends on the version of peft"
        fix = "name projections of the attention alone, or state the size, --lora params=N, which "
        fix += "print_trainable_parameters() of the peft model prints, without its commas"
        raise SpecError(Problem(what, _FLAG, fix))
    return adapters.rank * sum(sum(shapes[fqn]) for fqn in chosen)


def _mixtures(graph: ModelGraph) -> set[str]:
    """Return the modules whose experts are fused into weights of three dims."""
    fused = (t for t in graph.parameters if len(t.shape) > 2)
    return {tensor.module.rpartition(".")[0] for tensor in fused}


def _projections(graph: ModelGraph) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each linear layer's weight, by the layer's name."""
    out = {}
    for fqn, module in graph.modules.items():
        if module.kind in _KINDS:
            for tensor in graph.owned(fqn):
                if f"{fqn}.weight" in tensor.names and len(tensor.shape) == 2:
                    out[fqn] = tensor.shape
    return out
