"""Test whether a module's own forward can compute on a subset of its experts and tokens.

Expert parallelism calls the forward of a module that holds experts with this rank's experts only,
and with the tokens that arrived, each with one slot: one chosen expert and its weight. That is
right if the output for a token is a sum over its slots, in which each term depends only on the
token, the weight and the parameters of the chosen expert. The test runs the forward on a few random
tokens with one or two random experts, before anything is wrapped. It needs next to no memory and
works for a model on meta.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.base.mesh import device

_TOLERANCE: Final = 1e-2
"""Tolerance of comparisons, relative to the largest output. It is far above rounding errors in any
dtype that a module may compute in, and far below the effect of a wrong expert, a wrong weight or a
missing token [Empirical].
"""

_PLAIN: Final = (int, float, str, type(None))

_tried: WeakKeyDictionary[nn.Module, tuple[object, Protocol | str]] = WeakKeyDictionary()
"""Test results by module, as (key, result); the key tells if the module has changed since. Deciding
on a plan and applying it both look here, so that a module is tested once.
"""

_CHUNK: Final = 4
"""Most tokens in a test call, to save memory: some modules copy parameters for every slot."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """The calling convention of a module that holds experts.

    Args:
        names: Names of the forward's parameters for tokens, expert indices and weights, in this
            order.
        order: The same three names, in the order of the forward's signature.
        counters: Names of the module's attributes whose value is the number of experts.
    """

    names: tuple[str, str, str]
    order: tuple[str, str, str]
    counters: tuple[str, ...]

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return [tokens, expert indices, weights] of a call.

        Raises:
            ApplyError: The call does not pass exactly these three arguments.
        """
        given = {**dict(zip(self.order, args, strict=False)), **kwargs}
        if len(args) > len(self.order) or set(given) != set(self.order):
            what = f"expert-parallel experts were called with arguments other than {self.order}"
            raise ApplyError(Problem(what, fix="pass exactly these three arguments"))
        return [given[name] for name in self.names]

    def ordered(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """Return (tokens, indices, weights) in the order of the forward's signature."""
        by_name = dict(zip(self.names, values, strict=True))
        return [by_name[name] for name in self.order]


def expert_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each expert-parallel module that needs all of its experts to compute.

    Of modules with the same reason, only the first is reported.

    Args:
        model: The live model, before anything is wrapped.
        plan: The plan whose expert-parallel modules are tested.
    """
    if plan.mesh.size("ep") == 1:
        return
    reported: set[str] = set()
    for fqn, found in find_protocols(model, plan).items():
        if isinstance(found, str) and found not in reported:
            reported.add(found)
            kind = type(model.get_submodule(fqn)).__name__
            yield Problem(
                f"'{fqn}' ({kind}) cannot compute with a subset of its experts: {found}",
                plan.assignment.experts[fqn].reason.origin,
                "let its forward take tokens (n, width), expert indices and weights (n, slots), "
                "and return the sum over the slots, or leave these experts out of ep",
            )


def find_protocols(model: nn.Module, plan: Plan) -> dict[str, Protocol | str]:
    """Return, for every expert-parallel module by fqn, its protocol, or the reason why it has none.

    Modules that compute the same function (`_function_key`) are tested once.
    """
    known: dict[object, Protocol | str] = {}
    out = {}
    for fqn, use in plan.assignment.experts.items():
        module = model.get_submodule(fqn)
        key = (use.num_experts, _function_key(module))
        before = _tried.get(module)
        if before is not None and before[0] == key:
            known[key] = before[1]
        elif key not in known:
            known[key] = find_protocol(module, use.num_experts)
        _tried[module] = key, known[key]
        out[fqn] = known[key]
    return out


def reuse_protocols(model: nn.Module, other: nn.Module, plan: Plan) -> None:
    """Reuse the test results of `model` for its copy `other`, whose parameters may lack values."""
    for fqn, found in (find_protocols(model, plan) if plan.mesh.size("ep") > 1 else {}).items():
        module = other.get_submodule(fqn)
        _tried[module] = (plan.assignment.experts[fqn].num_experts, _function_key(module)), found


def _function_key(module: nn.Module) -> object:
    """Return a key that is equal for modules that compute the same function."""

    def plain(part: nn.Module) -> Iterator[object]:
        for leaf, tensor in part._parameters.items():
            yield leaf, tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.device)
        for name, value in vars(part).items():
            if not isinstance(
                value, dict | set
            ):  # nn.Module's own tables of parameters, hooks, ...
                yield name, value if isinstance(value, _PLAIN) else id(value)

    return tuple((name, type(part), *plain(part)) for name, part in module.named_modules())


@contextmanager
def with_experts(
    module: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    counters: tuple[str, ...],
    num_experts: int,
) -> Iterator[None]:
    """Make a module compute with other parameters and another number of experts inside the context.

    The given tensors are set as instance attributes, which hide the parameters of the same names.
    Autograd therefore records the given tensors, and the registered parameters stay untouched.

    Args:
        module: The module that holds the experts.
        parameters: Tensors to compute with, by the parameter's name in `module`.
        counters: Names of the module's attributes whose value is the number of experts.
        num_experts: Value of those attributes inside the context.
    """
    kept = {name: vars(module)[name] for name in counters}
    hidden = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], value)
              for name, value in parameters.items()]  # fmt: skip
    try:
        for owner, leaf, value in hidden:
            vars(owner)[leaf] = value
        vars(module).update(dict.fromkeys(counters, num_experts))
        yield
    finally:
        vars(module).update(kept)
        for owner, leaf, _ in hidden:
            vars(owner).pop(leaf, None)


def find_protocol(module: nn.Module, num_experts: int) -> Protocol | str:
    """Find out how to call a module with a subset of its experts.

    Args:
        module: The module that holds the experts.
        num_experts: Number of its experts.

    Returns:
        The first calling convention that passes the test, or the reason why none does.
    """
    names = _arguments(module.forward)
    if isinstance(names, str):
        return names
    hidden, second, third = names
    raised, wrong = "", ""
    for protocol in (
        Protocol((hidden, *pair), names, counters)
        for counters in _counters(module, num_experts)
        for pair in ((second, third), (third, second))
    ):
        for dtype in dict.fromkeys((torch.float32, next(module.parameters()).dtype)):
            for width in _widths(module):
                trial = _ProtocolTrial(module, protocol, num_experts, width, dtype)
                try:
                    complaint = trial.complaint()
                except Exception as error:  # A wrong call may raise anything.
                    first_line = str(error).partition("\n")[0]
                    raised = raised or f"a test call raised {type(error).__name__}: {first_line}"
                    continue
                if complaint is None:
                    return protocol
                wrong = wrong or complaint
    # A wrong result explains more than an exception does.
    return wrong or raised


def _arguments(forward: Callable[..., Any]) -> tuple[str, str, str] | str:
    """Return the names of the forward's three parameters, or the reason why it has not three."""
    parameters = inspect.signature(forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds]
    required = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    if len(names) < 3 or len(required) > 3:
        taken = f"({', '.join(names)})" if names else "no named arguments"
        return f"its forward must take tokens, expert indices and weights, but takes {taken}"
    return names[0], names[1], names[2]


def _counters(module: nn.Module, num_experts: int) -> list[tuple[str, ...]]:
    """Return candidates for `Protocol.counters`, the likeliest first."""
    equal = tuple(
        name for name, value in vars(module).items() if type(value) is int and value == num_experts
    )
    named = tuple(name for name in equal if "expert" in name and "per_tok" not in name)
    return list(dict.fromkeys((named, (), equal)))


def _widths(module: nn.Module) -> list[int]:
    """Return candidates for the width of a token: sizes of parameter dims, most frequent first."""
    sizes = [size for p in module.parameters() for size in p.shape[1:]]
    return sorted(dict.fromkeys(sizes), key=lambda size: -sizes.count(size))


class _NoDropout(TorchFunctionMode):
    """Torch function mode that skips dropout, with which two calls in training would differ."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (F.dropout, torch.dropout):
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


class _ProtocolTrial:
    """A test of one calling convention, with two random experts and three random tokens."""

    def __init__(
        self, module: nn.Module, protocol: Protocol, num_experts: int, width: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.module, self.protocol, self.num_experts = module, protocol, num_experts
        self.device = device()  # The training device: the CPU may lack its kernels.
        self.generator = torch.Generator().manual_seed(0)
        self.two = {
            name: self._random(2, *p.shape[1:], dtype=dtype) / max(p.shape[1:]) ** 0.5
            for name, p in module.named_parameters()
        }
        self.tokens = self._random(3, width, dtype=dtype)
        self.weights = self._random(3, 2, dtype=dtype).abs() + 0.1

    def _random(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype)

    def complaint(self) -> str | None:
        """Return the reason why the module fails the test; None if it passes.

        The module is tested in evaluation mode and in training mode.
        """
        modes = [(m, m.training) for m in self.module.modules()]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _NoDropout():
                for is_training in (False, True):
                    self.module.train(is_training)
                    complaint = self._complaint()
                    if complaint is not None:
                        return complaint
                return None
        finally:
            for m, training in modes:
                m.training = training

    def _complaint(self) -> str | None:
        tokens, weights = self.tokens, self.weights
        num = tokens.shape[0]
        first = torch.zeros(num, 1, dtype=torch.int64, device=self.device)
        # of[expert][slot]: the output if all tokens choose this expert only, weighted by column
        # `slot` of `weights`.
        of = [
            [self._call(self._only(e), 1, tokens, first, weights[:, slot : slot + 1])
             for slot in (0, 1)]
            for e in (0, 1)
        ]  # fmt: skip
        shown = of[0][0]
        if not isinstance(shown, torch.Tensor) or shown.shape != tokens.shape:
            return "its forward does not return one row per token"
        if _same(of[0][0], of[1][0]):
            return "its output does not depend on the expert"
        mixed = torch.tensor([[0, 1], [1, 0], [1, 1]], device=self.device)
        both = self._call(self.two, 2, tokens, mixed, weights)
        alone = sum(
            torch.where(mixed[:, slot : slot + 1] == 0, of[0][slot], of[1][slot]) for slot in (0, 1)
        )
        if not _same(both, alone):
            return "its output is not the sum of the experts' outputs over the slots"
        for token in range(num):
            at = slice(token, token + 1)
            single = self._call(self._only(0), 1, tokens[at], first[at], weights[at, :1])
            if not _same(single, shown[at]):
                return "its output for a token depends on the other tokens"
        # Give all experts the parameters of expert 0, so that they differ in their index only.
        alike = {n: p[:1].expand(self.num_experts, *p.shape[1:]) for n, p in self.two.items()}
        for begin in range(0, self.num_experts, _CHUNK):
            ids = torch.arange(begin, min(begin + _CHUNK, self.num_experts), device=self.device)
            one, score = tokens[:1].expand(len(ids), -1), weights[:1, :1].expand(len(ids), 1)
            out = self._call(alike, self.num_experts, one, ids.unsqueeze(-1), score)
            if not _same(out, shown[:1].expand(len(ids), -1)):
                return "its output depends on an expert's index, not only on its parameters"
        if not _same(self._call(alike, self.num_experts, tokens, first, weights[:, :1]), shown):
            return "its output for a token depends on how many tokens go to the same expert"
        return None

    def _only(self, expert: int) -> dict[str, torch.Tensor]:
        return {name: p[expert : expert + 1] for name, p in self.two.items()}

    def _call(self, parameters: Mapping[str, torch.Tensor], count: int, *values: Any) -> Any:
        with with_experts(self.module, parameters, self.protocol.counters, count):
            return self.module.forward(*self.protocol.ordered(*values))


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if two tensors are equal except for rounding; a NaN equals nothing."""
    if left.shape != right.shape:
        return False
    return bool((left - right).abs().max() <= _TOLERANCE * right.abs().max())
