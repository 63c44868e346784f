"""One cell of the hunt: a case under a layout, on real ranks, beside one process.

Three steps of SGD on the same global batches, then the output in evaluation mode and the whole
state. Every parameter has a learning rate with which its largest gradient moves it alike, so that
a wrong gradient shows wherever it is. What data parallelism is defined as, statistics of each
rank's part in BatchNorm, is compared with the mean over the same parts; nothing else is.

In bf16-mixed the yardstick is rounding itself: one process computes each step once in float32 and
once with parameters and inputs cast to bfloat16, and a cell may be four times as far from the
first as the second is. A gradient that is lost, doubled or not reduced moves a parameter by a
third of its way or more; rounding of 8 bits of mantissa, by a few per cent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import meshplan
from meshplan.runtime.base.batch import as_arguments, chunked, mapped
from meshplan.runtime.watch import guard
from tests.bench import wild_cases as cases
from tests.bench.wild_cases import BATCH, STEPS, Wild
from tests.helpers.pool import Pool, PoolError

TOLERANCE: Final = 1e-5
DOUBLE: Final = 1e-8
HALF: Final = 1e-2
"""Of models that hold half precision themselves, beyond which rounding says nothing."""
UPDATE: Final = 1e-2
SMALL: Final = 1e-3
RATE: Final = 0.05
"""Of loops of one's own, and of what has no gradient in the first step."""
TIMEOUT_S: Final = 100.0

LAYOUTS: Final[Mapping[str, tuple[int, int, Mapping[str, Any]]]] = {
    "ddp": (2, 2, {"strategy": "ddp"}),
    "full_shard": (2, 2, {"strategy": "full_shard"}),
    "hybrid": (4, 4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "tp": (2, 1, {"mesh": {"tp": 2}, "tp_plan": "auto"}),
    "tp_fsdp": (4, 2, {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}),
    "pp": (2, 2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}}),
    "bf16": (2, 2, {"strategy": "full_shard", "precision": "bf16-mixed"}),
    "recompute": (2, 2, {"strategy": "full_shard", "activation_checkpointing": "full"}),
}
"""(ranks, parts of the batch, plan) of each column."""

OUTCOMES: Final = ("pass", "own", "refused", "wrong", "crash", "hang")


class CrashError(Exception):
    """What a rank raised that is not meshplan's."""


class Cell(NamedTuple):
    """What became of one cell."""

    name: str
    layout: str
    outcome: str
    difference: float = 0.0
    why: str = ""
    fix: str = ""


class Result(NamedTuple):
    """What a run gives: losses of `train_step`, tensors of the state and of evaluation."""

    losses: list[float]
    state: dict[str, Tensor]
    outputs: list[Tensor]


class Alone:
    """The verbs of a loop in one process."""

    def __init__(self, parts: int, rates: Mapping[str, float], *, is_pipeline: bool) -> None:
        self.parts, self.rates, self.is_pipeline = parts, rates, is_pipeline
        self.losses: list[float] = []

    def spread(self, model: nn.Module, example: Any) -> nn.Module:
        return model

    def batches(self, inputs: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
        for number in range(STEPS):
            yield self.local(part(inputs, number)), self.local(part(targets, number))

    def local(self, batch: Any) -> Any:
        return batch

    def sgd(self, model: nn.Module, params: Any = None) -> torch.optim.SGD:
        named = list(model.named_parameters() if params is None else params)
        groups = [{"params": [p], "lr": self.rates.get(plain(n), RATE)} for n, p in named]
        # A stage may hold none of them.
        return torch.optim.SGD(groups or [torch.zeros(1)], lr=RATE)

    def step(self, model: nn.Module, optimizer: Any, x: Any, y: Any, loss: Any) -> None:
        total = 0.0
        xs, ys = chunked(x, self.parts), chunked(y, self.parts)
        begun = {n: b.clone() for n, b in model.named_buffers()}
        first: dict[str, Tensor] = {}
        for number in range(self.parts):
            if number and not self.is_pipeline:
                _set_buffers(model, begun)  # Each rank starts from what the first one had.
            args, kwargs = as_arguments(xs[number])
            value = loss(model(*args, **kwargs), ys[number]) / self.parts
            value.backward()
            total += value.item()
            first = first or {n: b.clone() for n, b in model.named_buffers()}
        if self.parts > 1 and not self.is_pipeline:
            _set_buffers(model, first)
        self.losses.append(total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def clip(self, model: nn.Module, norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

    def evaluate(self, model: nn.Module, inputs: Any) -> Any:
        was_training = model.training
        model.eval()
        args, kwargs = as_arguments(inputs)
        with torch.no_grad():
            output = model(*args, **kwargs)
        model.train(was_training)
        return output

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        return {n: t.detach().clone() for n, t in model.state_dict().items()}


class Spread(Alone):
    """The same on many ranks."""

    def __init__(self, layout: str, rates: Mapping[str, float]) -> None:
        super().__init__(1, rates, is_pipeline=False)
        self.plan = {"version": 1, **LAYOUTS[layout][2]}
        self.root: nn.Module | None = None
        self.num_steps = 0

    def spread(self, model: nn.Module, example: Any) -> nn.Module:
        wrapped = meshplan.parallelize(model, self.plan, example_inputs=example)
        self.root = self.root or wrapped
        return wrapped

    def local(self, batch: Any) -> Any:
        assert self.root is not None
        return meshplan.local_batch(self.root, batch)

    def step(self, model: nn.Module, optimizer: Any, x: Any, y: Any, loss: Any) -> None:
        self.losses.append(meshplan.train_step(model, optimizer, x, y, loss))
        self.num_steps += 1

    def clip(self, model: nn.Module, norm: float) -> None:
        meshplan.clip_grad_norm_(model, norm)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        return meshplan.full_state_dict(model)


@torch.no_grad()
def _set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def plain(name: str) -> str:
    return name.removeprefix("module.").partition("@")[0]


def part(batch: Any, number: int) -> Any:
    """The global batch of one step."""
    return mapped(batch, lambda t: t[number * BATCH : (number + 1) * BATCH] if t.ndim else t)


def run(made: Wild, env: Alone) -> Result:
    """Train, evaluate, gather."""
    if made.loop is not None:
        models = made.loop(made, env)
    else:
        model = env.spread(made.model, part(made.inputs, 0))
        optimizer = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            env.step(model, optimizer, x, y, made.loss)
        models = {"": model}
    outputs: list[Tensor] = []
    if "" in models:
        outputs = list(tensors(env.evaluate(models[""], part(made.inputs, 0))))
    state = {
        f"{key}.{name}" if key else name: tensor
        for key, model in models.items()
        for name, tensor in env.state(model).items()
    }
    return Result(env.losses, state, outputs)


def tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item.detach()
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from tensors(value)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from tensors(value)
    elif dataclasses.is_dataclass(item):
        for field in dataclasses.fields(item):
            yield from tensors(getattr(item, field.name))


class Reference(NamedTuple):
    result: Result
    rates: dict[str, float]
    noise: float
    start: dict[str, Tensor]


@functools.lru_cache(maxsize=4)
def reference(name: str, parts: int, is_pipeline: bool, dtype: torch.dtype) -> Reference:
    """What one process gives; the distance that bfloat16 makes is looked at where asked."""
    made = cases.make(name)
    start = {n: t.detach().clone() for n, t in made.model.state_dict().items()}
    rates: dict[str, float] = {}
    if made.loop is None:
        probe = cases.make(name)
        args, kwargs = as_arguments(part(probe.inputs, 0))
        probe.loss(probe.model(*args, **kwargs), part(probe.targets, 0)).backward()
        largest = {
            n: float(p.grad.to_dense().abs().max()) if p.grad is not None and p.numel() else 0.0
            for n, p in probe.model.named_parameters()
        }
        floor = SMALL * max(largest.values())
        rates = {n: UPDATE / max(v, floor) for n, v in largest.items() if v}
    result = run(made, Alone(parts, rates, is_pipeline=is_pipeline))
    return Reference(result, rates, 0.0, start)


@functools.lru_cache(maxsize=2)
def rounding(name: str, parts: int) -> float | Exception:
    """How far bfloat16 takes one process from itself, as a share of the way it went.

    Returns:
        Where the model cannot be computed so in one process either, what that raises. Norms
        with running statistics keep float32.
    """
    told = reference(name, parts, False, torch.float32)
    made = cases.make(name)
    kept = {
        f"{fqn}.{n}" if fqn else n
        for fqn, module in made.model.named_modules()
        if isinstance(module, _NormBase)
        for n, _ in module.named_parameters()
    }

    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made.model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            def half(t: Tensor) -> Tensor:
                return t.bfloat16() if t.dtype == torch.float32 else t

            params = {n: half(p) for n, p in self.inner.named_parameters() if n not in kept}
            given = mapped(args, half), mapped(kwargs, half)
            return torch.func.functional_call(self.inner, params, *given)

    model = Halved()
    env = Alone(parts, {f"inner.{n}": r for n, r in told.rates.items()}, is_pipeline=False)
    optimizer = env.sgd(model)
    try:
        for x, y in env.batches(made.inputs, made.targets):
            env.step(model, optimizer, x, y, made.loss)
            if made.loop is not None:
                return 0.0  # Another loop goes another way: its tolerance is the least.
    except Exception as error:
        return error
    return share(made.model.state_dict(), told)


def share(state: Mapping[str, Tensor], told: Reference) -> float:
    """The distance from the reference as a share of the way that training went."""
    far = way = 0.0
    for name, value in told.result.state.items():
        if not value.is_floating_point():
            continue
        begun = told.start.get(name, torch.zeros_like(value)).double()
        far += float((state[name].double() - value.double()).square().sum())
        way += float((value.double() - begun).square().sum())
    return (far / max(way, 1e-30)) ** 0.5


def difference(result: Result, told: Result, *, is_first: bool) -> tuple[float, str]:
    """(largest difference, relative above 1, and where it is)."""
    found = {
        f"loss of step {number}": abs(a - b) / max(1.0, abs(b))
        for number, (a, b) in enumerate(zip(result.losses, told.losses, strict=True))
    }
    pairs = {}
    if is_first:
        if list(result.state) != list(told.state) and result.state.keys() != told.state.keys():
            return float(
                "inf"
            ), f"other keys: {sorted(result.state.keys() ^ told.state.keys())[:4]}"
        pairs = {key: (result.state[key], value) for key, value in told.state.items()}
    if len(result.outputs) != len(told.outputs):
        return float("inf"), f"{len(result.outputs)} outputs instead of {len(told.outputs)}"
    both = zip(result.outputs, told.outputs, strict=True)
    pairs |= {f"output {number} of evaluation": pair for number, pair in enumerate(both)}
    for key, (own, value) in pairs.items():
        if own.shape != value.shape or own.dtype != value.dtype:
            return float("inf"), f"{key} is {own.dtype} {tuple(own.shape)}, not {value.dtype}"
        if value.numel() and not torch.equal(own, value):
            wide = torch.complex128 if value.is_complex() else torch.float64
            apart = (own.to(wide) - value.to(wide)).abs().max().item()
            found[key] = apart / max(1.0, value.to(wide).abs().max().item())
    worst = max(found, key=lambda k: found[k] if found[k] == found[k] else float("inf"), default="")
    value = found.get(worst, 0.0)
    return (value if value == value else float("inf")), worst


def train(name: str, layout: str) -> tuple[str, float, str, str, bool]:
    """One cell on this rank: (outcome, difference, why, fix, whether the group is dead)."""
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        dist.barrier()  # Ranks may take their time to import the model's code.
        out = _train(name, layout)
        if out[0] == "wrong" and layout != "bf16":
            # A kink, such as that of ReLU at 0, makes much of a rounding error: a wrong number
            # stays one in double precision, and rounding does not.
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
            again = _train(name, layout)
            # Rounding shrinks by 5e8, by whatever the model multiplies it.
            if again[0] in ("pass", "wrong") and again[1] <= max(DOUBLE, 1e-6 * out[1]):
                return (
                    "pass",
                    out[1],
                    f"{out[2]}, but {again[1]:.1e} in double precision",
                    "",
                    False,
                )
            return out[0], out[1], f"{out[2]}; in double precision {again[1]:.1e}", "", again[4]
        return out


def _train(name: str, layout: str) -> tuple[str, float, str, str, bool]:
    _, parts, _ = LAYOUTS[layout]
    rank, dtype = dist.get_rank(), torch.get_default_dtype()
    parts = parts if cases.make(name).coupled else 1
    told: list[Any] = [None]
    if rank == 0:
        told = [reference(name, parts, layout == "pp", dtype)]
    dist.broadcast_object_list(told, src=0)
    expected: Reference = told[0]
    env = Spread(layout, expected.rates)
    try:
        result = run(cases.make(name), env)
    except meshplan.MeshplanError as error:
        if isinstance(error.__cause__, Exception) and "lost its connection" in str(error):
            return "crash", 0.0, str(error)[:300], "", True
        whats = "; ".join(problem.what for problem in error.problems)
        fixes = "; ".join(problem.fix for problem in error.problems if problem.fix)
        late = f" (after {env.num_steps} steps)" if env.num_steps else ""
        return "refused", 0.0, whats + late, fixes, _is_dead()
    except Exception as error:
        if isinstance(error, AttributeError) and "meshplan.train_step" in str(error):
            return (
                "refused",
                0.0,
                str(error).partition(": ")[0],
                str(error).partition(": ")[2],
                True,
            )
        frames = list(traceback.extract_tb(error.__traceback__))
        where = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames[-4:])
        first = (str(error).strip() or repr(error)).splitlines()[0]
        if layout == "bf16" and type(rounding(name, parts)) is type(error):
            return "own", 0.0, f"{type(error).__name__}: {first[:260]}", "", True
        # It ends the job, as it would end the process of this rank.
        raise CrashError(f"{type(error).__name__}: {first[:260]} [{where}]") from None
    is_first = rank == 0
    if parts > 1 and not is_first and layout != "pp":
        result = result._replace(outputs=expected.result.outputs)  # Statistics of its own.
    if layout == "bf16":
        return _judge_half(name, parts, result, expected, is_first)
    apart, worst = difference(result, expected.result, is_first=is_first)
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, (apart, worst))
    apart, worst = max(verdicts, key=lambda v: v[0])
    limit = DOUBLE if dtype == torch.float64 else TOLERANCE
    if apart > limit and _is_half(cases.make(name).model):
        # Whose rounding it is: one process that adds up two halves gets as far from itself.
        own = reference(name, 2, False, dtype).result if is_first else None
        noise = [difference(own, expected.result, is_first=True)[0] if own is not None else 0.0]
        dist.broadcast_object_list(noise, src=0)
        limit = max(limit, min(4 * noise[0], HALF))
    return ("pass" if apart <= limit else "wrong"), apart, worst if apart > limit else "", "", False


def _is_half(model: nn.Module) -> bool:
    return any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())


def _judge_half(
    name: str, parts: int, result: Result, expected: Reference, is_first: bool
) -> tuple[str, float, str, str, bool]:
    out = ("pass", 0.0, "", "", False)
    if is_first:
        if result.state.keys() != expected.result.state.keys():
            apart, _ = difference(result, expected.result, is_first=True)
            out = "wrong", apart, "other keys", "", False
        else:
            apart, found = share(result.state, expected), rounding(name, parts)
            noise = 0.0 if isinstance(found, Exception) else found
            limit = max(0.1, 4 * noise)
            is_right = apart <= limit
            why = "" if is_right else f"{apart:.2f} of the way apart; rounding makes {noise:.2f}"
            out = ("pass" if is_right else "wrong"), apart, why, "", False
    told = [out]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _is_dead() -> bool:
    job = guard._job
    return job is not None and bool(job.cause)


def run_cell(pool: Pool, name: str, layout: str, timeout_s: float = TIMEOUT_S) -> Cell:
    """One cell on a pool."""
    try:
        results = pool.run(train, name, layout, timeout=timeout_s)
    except PoolError as error:
        story = str(error).strip()
        failed = re.findall(r"^(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$", story, re.M)
        is_hung = "hung, killed" in story and not failed
        where = re.search(r"^ *File .*$", story, re.M)  # The innermost frame comes first.
        failed = [
            line.partition("CrashError: ")[2] for line in failed if "CrashError" in line
        ] or failed
        why = failed[0] if failed else where[0].strip() if where else story.split("\n")[-1]
        return Cell(name, layout, "hang" if is_hung else "crash", 0.0, why[:300])
    if any(result[4] for result in results):
        pool.close()
    outcomes = {result[0] for result in results}
    if "refused" in outcomes and len(outcomes) > 1:
        why = next(result[2] for result in results if result[0] == "refused")
        return Cell(name, layout, "crash", 0.0, f"refused on some ranks only: {why}")
    own = [r for r in results if r[0] == "refused" and "failed:" not in r[2]] or results
    return Cell(name, layout, *own[0][:4])
