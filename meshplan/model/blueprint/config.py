"""Read a config.json: the file, then each value or its default, collecting all problems."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import read_bytes
from meshplan.model.blueprint.keys import KEYS, MAX_SIZE, misfits, unknown
from meshplan.spec.match import near
from meshplan.spec.values import quote

_MAX_FILE_BYTES: Final = 16 * 10**6
_MOST_NOTED: Final = 8
"""Maximum number of unknown keys that a note lists."""

_ALIASES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "num_experts": ("num_local_experts", "n_routed_experts"),
        "hidden_size": ("n_embd",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "max_position_embeddings": ("n_positions",),
    }
)
"""Other keys under which configs state the size of a key."""


class Facts:
    """A reader of a config's values.

    It collects the sizes that it has read in `sizes`, and the mistakes in the config in `problems`.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, int], file: str) -> None:
        self.config, self.defaults, self.file = config, defaults, file
        self.sizes: dict[str, int] = {}
        self.problems: list[Problem] = []

    def problem(self, key: str, what: str, fix: str) -> None:
        self.problems.append(Problem(what, Origin(self.file, key), fix))

    def size(
        self, key: str, default: int | None = None, *, most: int = MAX_SIZE, least: int = 1
    ) -> int:
        """Return an int of the config, also under another name of the key (`_ALIASES`).

        If the key is missing or null, return the family's default, or else `default`. The result is
        stored in `sizes`, and later calls for the key return it. An invalid value is recorded as a
        problem and read as 1.
        """
        if key in self.sizes:
            return self.sizes[key]
        key_stated, value = key, None
        for name in (key, *_ALIASES.get(key, ())):
            if self.config.get(name) is not None:
                key_stated, value = name, self.config[name]
                break
        if value is None:
            value = self.defaults.get(key, default)
        if type(value) is not int or not least <= value <= most:
            fix = f"write an int from {least} to {most}"
            self.problem(key_stated, f"{_shown(value)} is not a size", fix)
            value = 1
        self.sizes[key] = value
        return value

    def size_or_none(self, key: str) -> int | None:
        """Return a positive int, None if the config has null, the default if the key is missing."""
        return None if self.config.get(key, key) is None else self.size(key)

    def flag(self, key: bool | str, default: bool = False) -> bool:
        """Return the bool at a key of the config; if `key` is a bool, return it unchanged."""
        if isinstance(key, bool):
            return key
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(key, f"{_shown(value)} is not true or false", "write true or false")
        return bool(value)

    def layers(self, key: str) -> frozenset[int]:
        """Return a list of layer indices of the config; empty if the key is missing or null."""
        value = self.config.get(key) or []
        if not isinstance(value, list) or any(type(i) is not int for i in value):
            self.problem(
                key, f"{_shown(value)} is not a list of layer indices", "write a list of ints"
            )
            return frozenset()
        return frozenset(value)

    def window(self, key: bool | str) -> None:
        """Add `sliding_window` to `sizes`, in tokens, if attention uses a window.

        Args:
            key: True or False if the family decides whether a window is used; else the config's key
                that decides it, which is "sliding_window" if stating a size is enough.
        """
        stated = self.config.get("sliding_window")
        if key == "sliding_window":
            is_used = stated is not None
        else:
            is_used = self.flag(key) and ("sliding_window" not in self.config or stated is not None)
        if is_used:
            self.size("sliding_window", 4096)

    def experts(self, *, scales_weights: bool) -> None:
        """Read the number of experts per token, and the keys that change what a router saves.

        A key of the second kind is added to `sizes`, with the value 1, only if it is on.
        """
        chosen, count = self.size("num_experts_per_tok"), self.size("num_experts")
        if chosen > count and self.config.get("num_experts_per_tok") is not None:
            what = f"a token cannot use {chosen} of {count} experts"
            self.problem("num_experts_per_tok", what, f"write at most {count}")
        if scales_weights:
            self.sizes["norm_topk_prob"] = 1
        if self.config.get("experts_implementation") not in (None, "grouped_mm"):
            self.sizes["experts_implementation"] = 1
        for key in ("output_router_logits", "router_jitter_noise"):
            if self.config.get(key):
                self.sizes[key] = 1

    def dropout(self, key: str, default: float) -> None:
        """Add to `sizes`, under this key, 1 if its dropout probability is above 0, else 0."""
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.problem(key, f"{_shown(value)} is not a probability", "write a number from 0 to 1")
            value = 0
        self.sizes[key] = int(value > 0)

    def notes(self) -> tuple[str, ...]:
        """Return a note that lists the unknown keys, with similar known keys; () without any."""
        keys = unknown(self.config)
        words = []
        for key in keys[:_MOST_NOTED]:
            meant = near(key, KEYS)
            guess = f" (did you mean {meant}?)" if meant and meant not in self.config else ""
            words.append(f"{quote(key)}{guess}")
        if len(keys) > _MOST_NOTED:
            words.append(f"{len(keys) - _MOST_NOTED} more")
        return (f"{self.file}: ignored keys: {', '.join(words)}",) if words else ()

    def finish(self) -> None:
        """Check the remaining keys, and raise all problems found.

        Raises:
            SpecError: The config has problems.
        """
        reported = {problem.origin.path for problem in self.problems if problem.origin}
        for key, kind in misfits(self.config):
            if key not in reported:
                self.problem(key, f"{_shown(self.config[key])} is not {kind.what}", kind.fix)
        if self.problems:
            raise SpecError(self.problems)


def attention_sizes(facts: Facts) -> tuple[int, int, int]:
    """Return (query heads, kv heads, features of one head)."""
    hidden, heads = facts.size("hidden_size"), facts.size("num_attention_heads")
    kv_heads = facts.size("num_key_value_heads", heads)
    head_dim = facts.size("head_dim", max(1, hidden // heads))
    if facts.problems:  # The checks below would report the consequences of these problems.
        return heads, kv_heads, head_dim
    is_stated = facts.config.get("head_dim") is not None or "head_dim" in facts.defaults
    if not is_stated and hidden % heads:
        facts.problem(
            "num_attention_heads",
            f"{heads} heads do not divide hidden_size {hidden}",
            "change num_attention_heads or hidden_size, or add head_dim",
        )
    if heads % kv_heads:
        facts.problem(
            "num_key_value_heads",
            f"{kv_heads} key-value heads do not divide {heads} attention heads",
            "write a divisor of num_attention_heads",
        )
    return heads, kv_heads, head_dim


_REPOSITORY: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""The form of a model's name on the Hugging Face Hub: organisation/model."""


def config_file(path: str | Path, folder: str | Path = "") -> Path:
    """Return the file that a user's name of a config stands for; it may not exist.

    Args:
        path: A config.json, its directory, or the name of a model on the Hugging Face Hub, whose
            config is looked up in the Hub's local cache.
        folder: The directory that a relative path starts from.
    """
    file = Path(folder) / path
    if file.is_dir():
        return file / "config.json"
    if not file.exists() and _REPOSITORY.fullmatch(str(path)):
        return _in_hub_cache(str(path)) or file
    return file


def _in_hub_cache(repository: str) -> Path | None:
    """Return the config of a model in the local cache of huggingface_hub; None if it is not there.

    Source: huggingface_hub's documentation, "Understand caching" and "Environment variables".
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    hub = Path(os.environ.get("HF_HOME") or home) / "hub"
    hub = Path(os.environ.get("HF_HUB_CACHE") or hub)
    model = hub / f"models--{repository.replace('/', '--')}"
    snapshots = sorted((model / "snapshots").glob("*/config.json"), key=os.path.getmtime)
    try:
        main = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):  # Only some other revision was downloaded.
        main = ""
    for file in reversed(snapshots):
        if file.parent.name == main:
            return file
    return snapshots[-1] if snapshots else None


def read_json(file: Path, origin: Origin | None) -> Mapping[str, Any]:
    """Return the JSON object in a config file.

    Raises:
        SpecError: The file cannot be read, or is not a JSON object.
    """
    here = Origin(str(file))
    ask = "give a Hugging Face config.json, or the directory that holds one"
    try:
        data = read_bytes(file, _MAX_FILE_BYTES, "a config.json")
    except FileNotFoundError as error:
        what = f"cannot read {str(file)!r}: {error.strerror}"
        name = "/".join(file.parts[-2:])
        if _REPOSITORY.fullmatch(name) and file.suffix != ".json":
            ask += f"; a model of the Hugging Face Hub: hf download {name} config.json"
        raise SpecError(Problem(what, origin, ask)) from None
    except SpecError as error:
        what = f"cannot read {str(file)!r}: {error.problems[0].what}"
        raise SpecError(Problem(what, origin, ask)) from None
    try:
        config = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise SpecError(Problem("the file is not UTF-8 text", here, ask)) from None
    except json.JSONDecodeError as error:
        where = Origin(str(file), "", error.lineno, error.colno)
        raise SpecError(Problem(f"not JSON: {error.msg}", where, ask)) from None
    except (ValueError, RecursionError):
        raise SpecError(
            Problem("not readable JSON: a number is too long, or the nesting too deep", here, ask)
        ) from None
    if not isinstance(config, dict):
        what = f"the file holds a {type(config).__name__}, not an object of keys and values"
        raise SpecError(Problem(what, here, ask))
    return config


def _shown(value: object) -> str:
    """Return a value for a message: on one line, shortened if long."""
    return quote(value) if isinstance(value, str) else quote(repr(value))[1:-1]


_KERNEL_KEYS: Final = ("attn_implementation", "experts_implementation")
_KERNELS: Final = frozenset(
    {
        "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention",
        "grouped_mm", "batched_mm",
    }
)  # fmt: skip
_COUNT_KEY: Final = re.compile(
    r"(num|n)_.*(layer|block|expert|stage).*|.*(layers|blocks|depths?)(\[[0-9]+\])?"
)
_MOST_MODULES: Final = 2048
_FETCHES: Final = ("pretrained", "use_pretrained_backbone")


def foreign_problem(config: Mapping[str, Any], file: str) -> Problem | None:
    """Return why it is unsafe to let transformers build this config; None if it is safe.

    transformers treats a kernel name such as "org/kernel" as code to download and run, downloads
    weights of backbones, and creates any number of modules that a config states.
    """
    todo: list[tuple[str, Any]] = [("", config)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, Mapping):
            todo += [(f"{path}.{key}".lstrip("."), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            todo += [(f"{path}[{number}]", inner) for number, inner in enumerate(value)]
        is_asked = any(name in path for name in _KERNEL_KEYS)
        if is_asked and isinstance(value, str) and value not in _KERNELS:
            what = f"{value!r} is not a kernel built into transformers"
            return Problem(what, Origin(file, path), f"write one of {', '.join(sorted(_KERNELS))}")
        if path.rpartition(".")[2] in _FETCHES and value is True:
            what = "this key makes transformers download weights"
            return Problem(what, Origin(file, path), "write false: only sizes are needed here")
        is_count = _COUNT_KEY.fullmatch(path.rpartition(".")[2]) is not None
        if is_count and isinstance(value, int | float) and value > _MOST_MODULES:
            what = f"{value!r} is more modules than any model has"
            return Problem(what, Origin(file, path), f"write {_MOST_MODULES:,} or less")
    return None
