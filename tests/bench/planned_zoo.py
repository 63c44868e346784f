"""Plan models that are of no transcribed family, run each chosen plan, and price plans by hand.

    python -m tests.bench.planned_zoo [--only 'bert*'] [--ranks 4] [--json FILE] [--write]

Each model has the width of its config's default, some have more blocks; it is built on meta, and
planned for 2 nodes of 4 GPUs. Plans that an engineer would write by hand are priced: none that fits
may be faster than the chosen one by more than the planner gives up for a simpler plan. The chosen
plan is then trained on gloo ranks as `meshplan verify` does (fewer blocks, float32): losses, norms
and every parameter against one process, and the bytes of every rank and its collectives against
those predicted. `verify` makes every axis 2; here data axes are as long as they are planned, up to
--ranks ranks.

With --json, results are appended to a file, and models that stand in it are not run again. --write
makes planned_zoo.md of all results. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshplan
from meshplan.api.source import source_of
from meshplan.errors import MeshplanError
from meshplan.plan.verdict import Verdict
from meshplan.planner.lock.lock import overrides
from meshplan.planner.objectives.simplify import SLACK
from meshplan.planner.solve.search import TOLERANCE
from meshplan.render.base.text import columns
from meshplan.runtime.estimate.scale_down import model_source_of, shrink
from meshplan.runtime.verify.verify import verify
from meshplan.spec.strategies import resolve_mesh
from tests.bench.planned_live import UNet

PAGE: Final = Path(__file__).with_suffix(".md")
LIMIT: Final = SLACK + TOLERANCE
"""Share by which a plan by hand may be faster: what the planner gives up for a simpler plan."""

HF: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "bert": ("BertForMaskedLM", {}),
    "roberta": ("RobertaForMaskedLM", {}),
    "distilbert": ("DistilBertForMaskedLM", {}),
    "albert": ("AlbertForMaskedLM", {"hidden_size": 1024, "num_attention_heads": 16}),
    "electra": ("ElectraForMaskedLM", {}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {"hidden_size": 768, "num_attention_heads": 12,
                                            "intermediate_size": 3072, "vocab_size": 32000}),
    "modernbert": ("ModernBertForMaskedLM", {}),
    "mpnet": ("MPNetForMaskedLM", {}),
    "t5": ("T5ForConditionalGeneration", {}),
    "mt5": ("MT5ForConditionalGeneration", {"vocab_size": 32000}),
    "bart": ("BartForConditionalGeneration", {}),
    "pegasus": ("PegasusForConditionalGeneration", {}),
    "opt": ("OPTForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 1024, "n_layer": 24, "n_head": 16,
                                   "vocab_size": 32000}),
    "gpt_neo": ("GPTNeoForCausalLM", {"hidden_size": 1024, "num_layers": 12,
                                      "attention_types": [[["global", "local"], 6]],
                                      "num_heads": 16}),
    "gpt_neox": ("GPTNeoXForCausalLM", {"hidden_size": 1024, "intermediate_size": 4096,
                                        "num_hidden_layers": 16, "num_attention_heads": 16}),
    "gptj": ("GPTJForCausalLM", {"n_embd": 1024, "n_layer": 16, "n_head": 16, "rotary_dim": 32}),
    "codegen": ("CodeGenForCausalLM", {"n_embd": 1024, "n_layer": 20, "n_head": 16,
                                       "rotary_dim": 32}),
    "falcon": ("FalconForCausalLM", {"hidden_size": 1024, "num_hidden_layers": 16,
                                     "num_attention_heads": 16}),
    "mpt": ("MptForCausalLM", {"d_model": 1024, "n_layers": 16, "n_heads": 16}),
    "stablelm": ("StableLmForCausalLM", {"hidden_size": 1024, "intermediate_size": 2752,
                                         "num_hidden_layers": 16, "num_attention_heads": 16,
                                         "num_key_value_heads": 16}),
    "starcoder2": ("Starcoder2ForCausalLM", {"hidden_size": 1024, "intermediate_size": 4096,
                                             "num_hidden_layers": 16, "num_attention_heads": 16}),
    "phi": ("PhiForCausalLM", {"hidden_size": 1024, "intermediate_size": 4096,
                               "num_attention_heads": 16, "num_hidden_layers": 16}),
    "olmo2": ("Olmo2ForCausalLM", {"hidden_size": 1024, "intermediate_size": 2752,
                                   "num_attention_heads": 16, "num_hidden_layers": 16}),
    "cohere": ("CohereForCausalLM", {"hidden_size": 1024, "intermediate_size": 2752,
                                     "num_attention_heads": 16, "num_hidden_layers": 16,
                                     "vocab_size": 32000}),
    "granite": ("GraniteForCausalLM", {"hidden_size": 1024, "intermediate_size": 2752,
                                       "num_attention_heads": 16, "num_hidden_layers": 16}),
    "glm": ("GlmForCausalLM", {"hidden_size": 1024, "intermediate_size": 2752, "head_dim": 64,
                               "num_attention_heads": 16, "num_hidden_layers": 16,
                               "vocab_size": 32000, "pad_token_id": 0}),
    "xglm": ("XGLMForCausalLM", {"vocab_size": 32000, "num_layers": 12}),
    "biogpt": ("BioGptForCausalLM", {"num_hidden_layers": 12}),
    "mamba": ("MambaForCausalLM", {"num_hidden_layers": 16}),
    "rwkv": ("RwkvForCausalLM", {"hidden_size": 1024, "num_hidden_layers": 12}),
    "vit": ("ViTForImageClassification", {}),
    "beit": ("BeitForImageClassification", {}),
    "swin": ("SwinForImageClassification", {}),
    "convnext": ("ConvNextForImageClassification", {}),
    "resnet": ("ResNetForImageClassification", {}),
    "segformer": ("SegformerForImageClassification", {}),
    "dinov2": ("Dinov2ForImageClassification", {}),
    "wav2vec2": ("Wav2Vec2ForCTC", {}),
}  # fmt: skip
"""Classes of transformers, by model type, and what differs from the defaults of their configs."""


_IMAGES: Final = {"input": {"shape": [1, 3, 224, 224], "dtype": "fp32"}}
INPUTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "resnet": _IMAGES, "segformer": _IMAGES,
    "wav2vec2": {"input": {"shape": [1, 16000], "dtype": "fp32"}},
}  # fmt: skip
"""What plans state of inputs that do not follow from a config."""
DEEPER: Final[Mapping[str, int]] = {
    "opt": 2, "roberta": 2, "electra": 2, "mpnet": 2, "deberta-v2": 2, "t5": 4, "distilbert": 4,
    "resnet": 2, "swin": 2, "convnext": 2,
}  # fmt: skip
"""Times as many blocks as the config has; 1 where it is not stated here."""
TOKENS: Final[Mapping[str, int]] = {"mamba": 64, "rwkv": 64}
"""Length of a sequence; 512 where it is not stated here. Without their kernels, these models run a
Python loop over the tokens."""
_DEPTHS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers",
                  "encoder_layers", "decoder_layers", "depths")  # fmt: skip


def _deepened(config: Any, times: int) -> Any:
    """Multiply the number of blocks of a config of transformers, in stages that of the third."""
    for key in _DEPTHS:
        value = getattr(config, key, None) if key in config.to_dict() else None
        if isinstance(value, int):
            setattr(config, key, value * times)
        elif isinstance(value, list | tuple):
            setattr(config, key, [*value[:2], value[2] * times, *value[3:]])
    return config


class HybridBlock(nn.Module):
    """Convolution along the sequence, attention, and a gated product, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.conv = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[1](x)).chunk(3, dim=-1)
        q, k, v = (each.view(batch, tokens, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        y = self.norms[2](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class HybridModel(nn.Module):
    """Tokens through hybrid blocks; every third one is wider inside, so that not all are alike."""

    def __init__(self, width: int = 768, blocks: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, width)
        self.blocks = nn.ModuleList([HybridBlock(width, 12) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32000)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MlpMixer(nn.Module):
    """Patches mixed by two products per block, along the patches and along the channels."""

    def __init__(self, width: int = 768, patches: int = 196, blocks: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 16, stride=16)
        self.tokens = nn.ModuleList(
            [nn.Sequential(nn.Linear(patches, 384), nn.GELU(), nn.Linear(384, patches))
             for _ in range(blocks)]
        )  # fmt: skip
        self.channels = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                           nn.Linear(4 * width, width)) for _ in range(blocks)]
        )  # fmt: skip
        self.head = nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).flatten(2)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(x)
            x = x + channels(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x.mean(dim=2))


OWN: Final[Mapping[str, tuple[Callable[[], nn.Module], Mapping[str, Any]]]] = {
    "hybrid blocks": (HybridModel, {}),
    "mlp mixer": (MlpMixer, {"input": {"shape": [1, 3, 224, 224], "dtype": "fp32"}}),
    "unet": (lambda: UNet(12), {"input": {"shape": [1, 4, 16, 16], "dtype": "fp32"}}),
}
"""Modules of no package, and what their plans state of the input."""

MODELS: Final = (*HF, *OWN)

_GPU: Final = "rtx-4090-24gb"
_BY_HAND: Final[Mapping[str, Mapping[str, Any]]] = {
    "ddp": {"mesh": {"dp_replicate": 8}, "strategy": "ddp"},
    "full_shard": {"mesh": {"dp_shard": 8}, "strategy": "full_shard"},
    "full_shard, recomputed": {"mesh": {"dp_shard": 8}, "strategy": "full_shard",
                               "activation_checkpointing": "full"},
    "zero2": {"mesh": {"dp_shard": 8}, "strategy": "zero2"},
    "hybrid_shard": {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "strategy": "hybrid_shard"},
    "hybrid_shard, recomputed": {"mesh": {"dp_replicate": 2, "dp_shard": 4},
                                 "strategy": "hybrid_shard", "activation_checkpointing": "full"},
    "tp 2": {"mesh": {"dp_shard": 4, "tp": 2}, "tp_plan": "auto", "strategy": "full_shard"},
    "tp 4": {"mesh": {"dp_shard": 2, "tp": 4}, "tp_plan": "auto", "strategy": "full_shard"},
    "pp 2": {"mesh": {"pp": 2, "dp_shard": 4}, "strategy": "full_shard",
             "pipeline": {"schedule": "1F1B", "microbatches": 4}},
}  # fmt: skip
"""Plans that engineers write, for 4 samples at a time, or 16 where blocks are recomputed."""


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """Return the function that builds a model, for `entry: tests.bench.planned_zoo:NAME`."""
    key = next((each for each in MODELS if _attribute(each) == name), None)
    if key is None:
        raise AttributeError(name)
    return OWN[key][0] if key in OWN else partial(_of_transformers, key)


def _attribute(name: str) -> str:
    return name.replace(" ", "_").replace("-", "_")


def _of_transformers(name: str) -> nn.Module:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls, more = HF[name]
    config = _deepened(CONFIG_MAPPING[name](**more), DEEPER.get(name, 1))
    for key in ("dropout", "attention_dropout", "hidden_dropout_prob", "layerdrop",
                "attention_probs_dropout_prob", "drop_path_rate"):  # fmt: skip
        if hasattr(config, key):
            setattr(config, key, 0.0)
    config.use_cache = False
    return getattr(transformers, cls)(config)


@dataclass(frozen=True, slots=True)
class Planned:
    """What became of one model.

    Args:
        outcome: "ok", "refused" (no plan was found), "not run", "wrong", "beaten" or "error"; `why`
            says why.
        chosen: The chosen mesh and strategy.
        seconds: Seconds of a step under the chosen plan.
        search_s: Seconds that the search took.
        gap: Share by which some plan may be faster.
        ranks: Number of gloo ranks that the chosen plan was trained on.
        apart: Largest difference between the run and one process, as a share of what is allowed.
        loss_apart: Largest difference between losses of the run and of one process, relative to the
            loss.
        held_bytes: Bytes of parameters, gradients and optimizer states that all ranks held.
        sent_bytes: Bytes of the collectives that all ranks issued in a step.
        by_hand: Seconds of each plan by hand, or why it has none.
    """

    name: str
    outcome: str
    chosen: str = ""
    seconds: float = 0.0
    search_s: float = 0.0
    gap: float = 0.0
    ranks: int = 0
    apart: float = 0.0
    loss_apart: float = 0.0
    held_bytes: int = 0
    sent_bytes: int = 0
    by_hand: Mapping[str, float | str] = field(default_factory=dict)
    why: str = ""

    @property
    def fitting(self) -> list[float]:
        """Seconds of the plans by hand that fit."""
        return [each for each in self.by_hand.values() if not isinstance(each, str)]


def words_of(name: str) -> dict[str, Any]:
    """Return a plan that leaves everything open."""
    with torch.device("meta"):
        model = __getattr__(_attribute(name))()
    more = OWN[name][1] if name in OWN else INPUTS.get(name, {})
    batch: dict[str, Any] = {"global": 256}
    if "input" not in more and getattr(model, "main_input_name", "input_ids") == "input_ids":
        batch["seq_len"] = TOKENS.get(name, 512)
    return {
        "version": 1, "mesh": "auto", "strategy": "auto", "activation_checkpointing": "auto",
        "precision": "bf16-mixed", "batch": batch, **more,
        "model": {"entry": f"tests.bench.planned_zoo:{_attribute(name)}"},
        "solve": {"time_limit": "120s"},
        "hardware": {"nodes": 2, "gpus_per_node": 4, "inter": "10GB/s", "gpu": _GPU},
    }  # fmt: skip


def run(name: str, ranks: int) -> Planned:
    """Plan a model, price plans by hand, and train the chosen plan on at most `ranks` ranks."""
    words = words_of(name)
    began = time.monotonic()
    try:
        decision = meshplan.search_plan(words)
    except MeshplanError as error:
        return Planned(name, "refused", why="; ".join(each.what for each in error.problems))
    search_s = time.monotonic() - began
    if decision.chosen is None:
        return Planned(name, "refused", search_s=search_s, why="nothing fits")
    stated, chosen = overrides(decision.chosen.stated), decision.chosen
    mesh = " x ".join(f"{a.name} {a.size}" for a in chosen.plan.mesh.axes if a.size > 1)
    known = {
        "chosen": f"{mesh}, {chosen.plan.assignment.strategy.name}", "search_s": search_s,
        "seconds": chosen.seconds, "gap": decision.gap,
    }  # fmt: skip
    by_hand: dict[str, float | str] = {}
    for plan, more in _BY_HAND.items():
        by_hand[plan] = _price(words, more)
    known["by_hand"] = by_hand
    try:
        verdict = _trained(words, stated, ranks)
    except MeshplanError as error:
        return Planned(name, "not run", **known, why="; ".join(e.what for e in error.problems))
    if verdict.together is None or verdict.alone is None:
        return Planned(name, "not run", **known, why=str(verdict)[:500])
    compared = verdict.comparisons()
    known |= {
        "ranks": verdict.world,
        "apart": max(c.difference / c.allowed for c in compared if c.allowed),
        "loss_apart": max(
            c.difference / abs(c.alone) for c in compared if c.what == "loss" and c.alone
        ),
        "held_bytes": sum(sum(astuple(rank.measured)) for rank in verdict.ranks),
        "sent_bytes": sum(rank.collective_bytes for rank in verdict.ranks),
    }
    if not verdict.is_ok:
        return Planned(name, "wrong", **known, why=str(verdict)[:500])
    found = Planned(name, "ok", **known)
    if min(found.fitting, default=math.inf) < chosen.seconds * (1 - LIMIT):
        return replace(found, outcome="beaten")
    return found


def _trained(words: Mapping[str, Any], stated: Sequence[str], ranks: int) -> Verdict:
    """Train a plan on ranks as `meshplan verify` does, with longer data axes."""
    source = source_of(words, [*stated, "precision=32-true"])
    spec = source.spec
    small = shrink(spec, model_source_of(spec, None, None))
    planned, _ = resolve_mesh(spec)
    assert isinstance(small.spec.mesh, Mapping)
    sizes = dict(small.spec.mesh)
    for axis in ("dp_shard", "dp_replicate"):
        while (
            math.prod(sizes.values()) * 2 <= ranks
            and sizes.get(axis, 1) > 1
            and planned.size(axis) % (sizes[axis] * 2) == 0
        ):
            sizes[axis] *= 2
    return verify(replace(small, spec=replace(small.spec, mesh=sizes)), lambda line: None)


def _price(words: Mapping[str, Any], more: Mapping[str, Any]) -> float | str:
    """Return the seconds of a plan by hand, or why it has none."""
    data = 8 // (more["mesh"].get("tp", 1) * more["mesh"].get("pp", 1))
    micro = 4 if more.get("activation_checkpointing") != "full" else 16
    batch = dict(words["batch"], micro=micro, accumulate=256 // data // micro)
    del batch["global"]
    plan = {**words, "activation_checkpointing": "none", **more, "batch": batch}
    try:
        decision = meshplan.search_plan(plan)
    except MeshplanError as error:
        return error.problems[0].what
    return decision.chosen.seconds if decision.chosen is not None else "does not fit"


def page(results: Sequence[Planned]) -> str:
    """Return planned_zoo.md."""
    rows = [(
        "model", "chosen for 2 x 4 GPUs", "step", "search", "gap",
        "ranks", "loss apart", "of limit", "by hand", "best", "",
    )]  # fmt: skip
    for each in results:
        best = min(each.fitting, default=0.0)
        rows.append((
            each.name, each.chosen, f"{each.seconds * 1e3:.0f} ms", f"{each.search_s:.0f} s",
            f"{each.gap:.2%}", str(each.ranks), f"{each.loss_apart:.0e}", f"{each.apart:.2f}",
            f"{len(each.fitting)} of {len(each.by_hand)}",
            f"{best / each.seconds:.2f}" if best else "",
            each.outcome if each.outcome != "ok" else "",
        ))  # fmt: skip
    table = "\n".join(columns(rows, "<<>>>>>>>><"))
    counts = Counter(each.outcome for each in results)
    return f"""# Plans for models of no known family

`python -m tests.bench.planned_zoo --json FILE --write`: {len(results)} of {len(MODELS)} models
were run, {counts["ok"]} are ok. Steps are those that the planner predicts for two nodes of four
{_GPU}. The chosen plan then trained for three steps on as many gloo "ranks".
"loss apart": the largest difference of a loss from that of one process, relative to the loss; "of
limit": the largest difference of a loss, a gradient norm or a parameter, as a share of what
`meshplan verify` allows. Bytes that ranks held and sent are equal to those predicted. "by hand":
how many of {len(_BY_HAND)} plans written by hand fit; "best": the seconds of the fastest of them,
as a multiple of those of the chosen plan.

```
{table}
```
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="*")
    parser.add_argument("--ranks", type=int, default=4, help="most gloo ranks (default 4)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args(arguments)
    done: dict[str, Planned] = {}
    if args.json is not None and args.json.exists():
        for line in args.json.read_text().splitlines():
            done[json.loads(line)["name"]] = Planned(**json.loads(line))
    names = [name for name in MODELS if fnmatch.fnmatch(name, args.only)]
    for name in names:
        if name in done:
            continue
        try:
            found = run(name, args.ranks)
        except Exception:
            found = Planned(name, "error", why=traceback.format_exc()[-1500:])
        done[name] = found
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        print(name, found.outcome, found.chosen, found.why, file=sys.stderr, flush=True)
    results = [done[name] for name in MODELS if name in done]
    print(page(results))
    if args.write:
        PAGE.write_text(page(results))
    return int(any(each.outcome not in ("ok", "refused") for each in results))


if __name__ == "__main__":
    sys.exit(main())
