"""Draw plans and hold what the verbs say of each against each other.

    python -m tests.bench.consistency --num 300 --seed 0

Of a plan that `check` passes, every verb must go by the same lock, or say the same reason why by
none, and give the same bytes, seconds, size of the GPU and verdict: without a lock, with the one
that `plan` wrote, and with one of another state of the file. Exit code 1 where two differ.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshplan.cli.app import main as run
from meshplan.planner.lock.lock import lock_path, overrides

LLAMA: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": LLAMA,
    "wide llama": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
                           "num_attention_heads": 32},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
                      "head_dim": 64, "tie_word_embeddings": True},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 8,
             "n_embd": 1024, "n_head": 16, "n_positions": 4096, "vocab_size": 50257},
}  # fmt: skip
LIVE: Final = ("vit", "odd", "unet")
MESHES: Final[tuple[Mapping[str, Any], ...]] = (
    {"mesh": {"dp_shard": 8}},
    {"mesh": {"dp_shard": 8}, "strategy": "full_shard"},
    {"mesh": {"dp_shard": 8}, "strategy": "zero2"},
    {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "strategy": "hybrid_shard"},
    {"strategy": "ddp"},
    {"mesh": {"dp_shard": "auto"}},
    {"mesh": "auto", "strategy": "auto"},
    {"mesh": {"dp_shard": 4, "tp": 2}, "tp_plan": "auto"},
    {"mesh": {"dp_shard": 2, "tp": 4}, "tp_plan": "auto", "sequence_parallel": True},
    {"mesh": {"pp": 2, "dp_shard": 4}, "pipeline": {"schedule": "1F1B", "microbatches": 4}},
    {"mesh": {"pp": 2, "dp_replicate": 4}},
    {"mesh": {"dp_shard": 4, "cp": 2}, "context": {"attention": "all_to_all"}},
)
_BLOCK: Final = {"gpt2": "transformer.h.3"}
"""Fqn of a block by the name of the config; "model.layers.3" of all others."""
_SHARDED: Final = (
    {"mesh": {"dp_shard": 8}, "strategy": "full_shard"},
    {"mesh": {"dp_shard": 8}, "strategy": "zero2"},
    {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "strategy": "hybrid_shard"},
)
_PIPED: Final = {"mesh": {"pp": 2, "dp_shard": 4}, "strategy": "zero2"}
GPUS: Final = ("h100-sxm-80gb", "a100-sxm-40gb", "l40s-48gb", "rtx-4090-24gb")


@dataclass(frozen=True, slots=True)
class Said:
    """What one verb says of a plan; None where it does not tell."""

    expected_bytes: int | None = None
    high_bytes: int | None = None
    step_s: float | None = None
    limit_bytes: int | None = None
    fits: bool | None = None
    lock: str | None = None


def drawn(rng: random.Random, *, is_live: bool) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """(a plan, the config beside it)."""
    config = CONFIGS[rng.choice([*CONFIGS])]
    plan: dict[str, Any] = {
        "version": 1,
        "model": {"config": "config.json"},
        "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": rng.choice(GPUS)},
        "precision": rng.choice(("32-true", "bf16-true", "bf16-mixed", "16-mixed")),
        "batch": {"micro": rng.choice((1, 2, 4)) * 4, "accumulate": rng.choice((1, 2)),
                  "seq_len": rng.choice((512, 2048))},
        **rng.choice(MESHES),
    }  # fmt: skip
    if plan.get("mesh") == "auto":  # Meshes with other numbers of data ranks are compared.
        plan["batch"] = {"global": 8 * plan["batch"].pop("micro"), **plan["batch"]}
        del plan["batch"]["accumulate"]
    if is_live:
        from tests.helpers import planned

        name = rng.choice(LIVE)
        stated = planned.INPUTS[name]
        plan["model"] = {"entry": f"tests.helpers.planned:large_{name}"}
        is_open = "global" in plan["batch"]
        plan["batch"] = (
            {"global": plan["batch"]["global"]}
            if is_open
            else {"micro": plan["batch"]["micro"], "accumulate": 1}
        )
        plan |= {key: value for key, value in stated.items() if key != "batch"}
        if "input" in plan and rng.random() < 0.5:
            plan["input"] = {"shape": plan["input"]["shape"]}  # Its dtype is the first layer's.
    more = {
        "activation_checkpointing": (None, None, "none", "full", "selective", "auto"),
        "offload": (None, None, "none", "params"),
        "optimizer": (None, "sgd"),
        "compile": (None, None, None, True),
        "allocator": (None, None, "expandable"),
    }
    for key, values in more.items():
        if not (is_live and key == "offload") and (value := rng.choice(values)) is not None:
            plan[key] = value
    if rng.random() < 0.1:
        plan["hardware"]["headroom"] = 0.1
    return plan, config


def drawn_as_stated(rng: random.Random) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """(a plan that states everything and that the search cannot vary, the config beside it)."""
    plan, _ = drawn(rng, is_live=False)
    for key in ("mesh", "strategy", "pipeline", "tp_plan", "sequence_parallel", "context",
                "activation_checkpointing", "offload", "compile"):  # fmt: skip
        plan.pop(key, None)
    name = rng.choice([*CONFIGS])
    block = _BLOCK.get(name, "model.layers.3")
    schedule = rng.choice(("ZBVZeroBubble", "DualPipeV", "LoopedBFS", "1F1B"))
    virtual = {} if schedule in ("DualPipeV", "ZBVZeroBubble", "1F1B") else {"virtual": 2}
    recompute = rng.choice(("none", "selective", "full"))
    rule = rng.choice(
        (
            {"reshard_after_forward": 2},
            {"place": "replicate"},
            {"unit": False},
            {"offload": "params"},
        )
    )
    plan["batch"] = {"micro": 8, "accumulate": rng.choice((1, 2)), "seq_len": 512}
    plan |= rng.choice((
        {**_PIPED, "pipeline": {"schedule": schedule, "microbatches": 8, **virtual},
         "activation_checkpointing": "none"},
        {**rng.choice(_SHARDED), "rules": [{"match": block, **rule}],
         "activation_checkpointing": recompute},
        {**rng.choice(_SHARDED), "activation_checkpointing": {
            "mode": "selective", "save": rng.choice((["mm"], ["sdpa"], ["mm", "sdpa"]))}},
        {"mesh": {"dp_replicate": 8}, "strategy": "ddp", "optimizer": "muon",
         "activation_checkpointing": recompute},
    ))  # fmt: skip
    return plan, CONFIGS[name]


def answer(*words: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, what `--json` printed, stderr) of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*words, "--json", "-q"])
    lines = out.getvalue().splitlines()
    return code, json.loads(lines[-1]) if lines else {}, err.getvalue()


def of_lock(notes: list[str]) -> str:
    """The line about the lock among notes; "" where there is none."""
    return next((each for each in notes if ".lock.yaml" in each), "")


def said_by_verbs(path: Path, *, pictures: bool) -> Iterator[tuple[str, Said]]:
    """(verb, what it says of the plan that is in force)."""
    file = ["-f", str(path)]
    _, got, _ = answer("check", *file)
    yield "check", Said(lock=of_lock(got["notes"]))
    code, got, err = answer("estimate", *file)
    if code > 1:
        raise AssertionError(f"check passes, and estimate does not answer: {err}")
    worst, result = got["result"]["groups"][got["result"]["worst"]], got["result"]
    yield "estimate", Said(
        expected_bytes=worst["peak"]["reserved_bytes"] + worst["peak"]["driver_bytes"],
        high_bytes=worst["band"][1], limit_bytes=result["limit_bytes"], fits=result["fits"],
        lock=of_lock(got["notes"]),
    )  # fmt: skip
    size = result["size"]
    _, got, _ = answer("explain", "memory", *file)
    memory = got["result"]["memory"]
    assert memory["size"] == size
    yield "explain", Said(
        expected_bytes=memory["total_bytes"], high_bytes=memory["band"][1],
        limit_bytes=memory["limit_bytes"], fits=memory["fits"], lock=of_lock(got["notes"]),
    )  # fmt: skip
    _, got, _ = answer("show", *file)
    yield "show", Said(lock=of_lock(got["notes"]))
    code, got, err = answer("diff", str(path), str(path))
    if code > 1:
        raise AssertionError(f"check passes, and diff does not answer: {err}")
    old = got["result"]["old"]
    yield "diff", Said(
        high_bytes=int(old["peak_bytes"]) if old["peak_bytes"] else None, step_s=old["step_s"],
        lock=of_lock([each.partition(f"{path}: ")[2] for each in got["notes"]]),
    )  # fmt: skip
    if not pictures:
        return
    picture, page = str(path.with_name("memory.svg")), str(path.with_name("report.html"))
    _, got, _ = answer("draw", *file, "--what", "memory", "-o", picture)
    assert size in got["result"]["title"], (size, got["result"]["title"])
    yield "draw", Said(lock=of_lock(got["notes"]))
    _, got, _ = answer("report", *file, "-o", page)
    assert size in got["result"]["verdict"], (size, got["result"]["verdict"])
    yield "report", Said(fits=got["result"]["fits"], lock=of_lock(got["notes"]))


def differences(said: Mapping[str, Said]) -> Iterator[str]:
    """Fields of which two verbs say different things."""
    for name in Said.__dataclass_fields__:
        values = {verb: getattr(each, name) for verb, each in said.items()}
        known = {verb: value for verb, value in values.items() if value is not None}
        first = next(iter(known.values()), None)
        if any(not _same(value, first) for value in known.values()):
            yield f"{name}: {known}"


def _same(a: Any, b: Any) -> bool:
    """Locks hold six digits of seconds."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-5 * abs(b)
    return bool(a == b)


def of_plan(result: Mapping[str, Any], limit_bytes: int) -> Said:
    """What `plan` says of its choice, or of the file as it stands."""
    return Said(
        expected_bytes=result["expected_bytes"], high_bytes=result["peak_bytes"],
        step_s=result["step_s"], limit_bytes=limit_bytes, fits=result["fits"],
    )  # fmt: skip


def examined(
    plan: Mapping[str, Any], config: Mapping[str, Any], folder: Path, *, pictures: bool
) -> tuple[str, list[str]]:
    """(what kind of plan that was, where verbs differ)."""
    path = folder / "plan.yaml"
    (folder / "config.json").write_text(json.dumps(config))
    path.write_text(json.dumps(plan))
    if answer("check", "-f", str(path))[0]:
        return "not ok", []
    found = []

    def ask(state: str, more: Mapping[str, Said] = {}) -> None:
        said = dict(said_by_verbs(path, pictures=pictures))
        found.extend(f"{state}: {each}" for each in differences({**said, **more}))

    code, got, err = answer("plan", "-f", str(path), "--dry-run")
    has_plan = code == 0
    if code > 1:
        words = err.splitlines()[1] if err.count("\n") > 1 else err
        words = re.sub(r"\d+", "N", re.sub(r"^\S+\.yaml\S*\s", "", words))
        kind = f"not planned: {words}"
    elif got["result"].get("as_written"):
        ask("no lock", {"plan": of_plan(got["result"]["as_written"], got["result"]["limit_bytes"])})
    elif has_plan:
        ask("no lock", {"plan": of_plan(got["result"], got["result"]["limit_bytes"])})
    elif not _is_open(plan):
        ask("no lock")
    if not has_plan:
        return (kind if code > 1 else "nothing fits"), found
    found.extend(typed_in(path, got["result"]))
    code, got, _ = answer("plan", "-f", str(path))
    kind = "planned"
    ask("lock", {"plan": of_plan(got["result"], got["result"]["limit_bytes"])})
    path.write_text(json.dumps({**plan, "clip_grad_norm": 1.0}))
    if not _is_open(plan):
        ask("another lock")
    lock_path(path).unlink()
    return kind, found


def typed_in(path: Path, result: Mapping[str, Any]) -> Iterator[str]:
    """What `plan` proposes and, once it is typed in, refuses or says something else of."""
    for each in (result, *result["alternatives"], *result["other_layouts"]):
        if not (chosen := each["chosen"]):
            continue
        sets = [word for line in overrides(chosen) for word in ("--set", line)]
        code, got, err = answer("plan", "-f", str(path), "--dry-run", *sets)
        again = got["result"] if code == 0 else {}
        names = "step_s", "peak_bytes"
        if any(not _same(again.get(name), each[name]) for name in names):
            said = {name: (each[name], again.get(name)) for name in names}
            yield f"typed in: {said} {err.strip()[:300]} {json.dumps(chosen)}"


def _is_open(plan: Mapping[str, Any]) -> bool:
    """Whether something is `auto`, so that every verb plans."""
    return "auto" in json.dumps({k: v for k, v in plan.items() if k != "tp_plan"}).replace(
        '{"dp_shard": "auto"}', ""
    )


def main() -> int:
    """Draw, ask, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--live", type=float, default=0.1, help="share of live modules")
    parser.add_argument(
        "--stated",
        type=float,
        default=0.2,
        help="share of configs' plans that state everything, and are priced as they stand",
    )
    parser.add_argument("--pictures", type=float, default=0.1, help="share drawn and reported")
    args = parser.parse_args()
    kinds: Counter[str] = Counter()
    num_wrong, began = 0, time.monotonic()
    for number in range(args.num):
        rng = random.Random(f"{args.seed} {number}")
        is_live, pictures = rng.random() < args.live, rng.random() < args.pictures
        is_stated = not is_live and rng.random() < args.stated
        plan, config = drawn_as_stated(rng) if is_stated else drawn(rng, is_live=is_live)
        with tempfile.TemporaryDirectory() as folder:
            try:
                kind, found = examined(plan, config, Path(folder), pictures=pictures)
            except Exception as error:  # The next ones are of interest too.
                kind, found = "failed", [f"{type(error).__name__}: {error}"]
        kinds[f"{'live' if is_live else 'stated' if is_stated else 'config'}: {kind}"] += 1
        num_wrong += bool(found)
        for each in found:
            print(f"{number}: {each}\n    {json.dumps(plan)}", flush=True)
    print(f"{args.num} plans, {num_wrong} on which verbs differ, {time.monotonic() - began:.0f} s")
    for kind, count in sorted(kinds.items()):
        print(f"  {count:4} {kind}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
