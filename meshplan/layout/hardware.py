"""Devices and the links between them, each figure with its source.

The table is `hardware.json` next to this file. It is JSON because JSON is read in a millisecond,
while loading YAML would take a third of the time of `meshplan estimate`.

Every command uses `Device.usable_bytes` as the size of a GPU: the memory that torch sees if that
is known (79.1 GiB of an 80 GB H100), else the datasheet's figure with GB = 1e9 bytes. `memory` in
the plan, or `--memory`, replaces it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.shown import shown
from meshplan.units import (
    any_case,
    format_gib,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_memory,
)

_FILE: Final = Path(__file__).with_name("hardware.json")
_GIGA: Final = 10**9
_TERA: Final = 10**12


SOME_GPU: Final = "cuda"
"""The device name for a plan that names no device. Memory used outside torch (CUDA context, NCCL)
is then estimated with the widest band.
"""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator as torch sees it.

    Args:
        name: The device's key in the table, or the user's name for a device that is not in it.
        memory_bytes: Datasheet memory, GB = 1e9 bytes.
        visible_bytes: Memory that torch sees, as in its out-of-memory messages; None if not known.
        peak_flops: Dense operations per second by dtype; a dtype not listed is not known. The
            figure for float32 is without TF32, because torch does not use TF32 by default.
        product_flops: Operations per second that the fastest bfloat16 matrix product reaches, as
            measured; None if not known. Source: stas00/ml-engineering, compute/accelerator
            ("Maximum Achievable Matmul FLOPS").
        memory_bytes_per_s: Bandwidth of the device's own memory; None if not known.
        intra_bytes_per_s: Bandwidth to the other devices of the node, in one direction; None if not
            known.
        inter_bytes_per_s: Bandwidth to other nodes, in one direction, that nodes of this device
            usually have; None if they differ too much.
        inter_source: Reference for `inter_bytes_per_s`.
        note: Remarks on what the figures leave out.
        sources: References for the figures.
    """

    name: str
    memory_bytes: int
    visible_bytes: int | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    product_flops: float | None = None
    memory_bytes_per_s: float | None = None
    intra_bytes_per_s: float | None = None
    inter_bytes_per_s: float | None = None
    inter_source: str = ""
    note: str = ""
    sources: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """Bytes of memory that every command counts on: what torch sees, else the datasheet."""
        return self.memory_bytes if self.visible_bytes is None else self.visible_bytes

    @property
    def all_sources(self) -> tuple[str, ...]:
        """`sources`, and the one of `inter_bytes_per_s`."""
        return (*self.sources, *((self.inter_source,) if self.inter_source else ()))

    @property
    def size(self) -> str:
        """`usable_bytes` in words, with the source of the figure."""
        size = format_gib(self.usable_bytes)
        if "=" in self.name:
            return f"{size}, as stated"
        if self.visible_bytes is not None:
            return f"{self.name} has {size}, as torch sees it"
        return f"{self.name} has {size}, its datasheet's {self.memory_bytes // _GIGA} GB"


@shown
@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices: bytes per second in one direction, per device.

    Args:
        name: "intra" or "inter".
        bytes_per_s: Bytes per second.
        source: Reference for the figure if it is assumed; "" if the plan states it.
    """

    name: str
    bytes_per_s: float
    source: str = ""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices.

    Args:
        intra: Link between devices of one node; None if not known.
        inter: Link between nodes, as the plan states it or as `usual_link` assumes it; None if not
            known.
    """

    device: Device
    nodes: int
    gpus_per_node: int
    intra: Link | None = None
    inter: Link | None = None

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def usual_link(device: Device) -> Link | None:
    """Return the link that nodes of a device usually have between them; None if not known."""
    if device.inter_bytes_per_s is None:
        return None
    return Link("inter", device.inter_bytes_per_s, device.inter_source)


OWN_FACTS: Final[Mapping[str, Callable[[str], float]]] = MappingProxyType(
    {"memory": parse_memory, "bf16": parse_count, "fp16": parse_count, "fp32": parse_count,
     "hbm": parse_bandwidth}
)  # fmt: skip
"""The function that reads each fact of a GPU which the table lacks: its memory, operations per
second by dtype, and the bandwidth of its memory."""
_OWN_EXAMPLE: Final = "memory=48GB,bf16=181e12,hbm=960GB/s"
_OWN_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def own_fact(device: Device, figure: str) -> str:
    """Return the key that states a figure of a device which the table lacks; "" for a listed one.

    Args:
        device: The device.
        figure: A dtype of `Device.peak_flops`, or "memory_bytes_per_s".
    """
    if "=" not in device.name:
        return ""
    keys = {dtype: key for key, dtype in _OWN_DTYPES.items()} | {"memory_bytes_per_s": "hbm"}
    return keys.get(figure, "")


def with_own_fact(device: Device, dtype: str) -> str:
    """Return the key `gpu` with a listed device's facts and the missing speed of a dtype.

    It is "" if the speed of this dtype cannot be stated.
    """
    keys = [key for key, known in _OWN_DTYPES.items() if known == dtype]
    if not keys:
        return ""
    facts = [f"memory: {device.memory_bytes / _GIGA:g}GB", f"{keys[0]}: 181e12"]
    if device.memory_bytes_per_s is not None:
        facts.append(f"hbm: {device.memory_bytes_per_s / _GIGA:g}GB/s")
    return f"gpu: {{{', '.join(facts)}}} with its {keys[0]} operations per second"


def own_device(text: str, origin: Origin | None = None) -> Device:
    """Return a device that the table lacks, by its facts in one line.

    Args:
        text: Such as "memory=48GB,bf16=181e12,hbm=960GB/s". `memory` is required.
        origin: The place where the user wrote it.

    Raises:
        SpecError: A fact is unknown, cannot be read or is missing.

    >>> own_device("memory=48GB, bf16=181T").peak_flops["bfloat16"]
    181000000000000.0
    """
    given: dict[str, str] = {}
    values: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in OWN_FACTS or key in given:
            what = f"gpu '{text}' has {'twice' if key in given else 'an unknown'} '{key}'"
            fix = f"write {_OWN_EXAMPLE}, with any of {', '.join(OWN_FACTS)}"
            raise SpecError(Problem(what, origin, fix))
        given[key] = value
        try:
            values[key] = OWN_FACTS[key](value)
        except ValueError as error:
            what = f"gpu '{text}': {key}: {error}"
            raise SpecError(Problem(what, origin, f"write {_OWN_EXAMPLE}")) from None
    if "memory" not in given:
        what = f"gpu '{text}' does not state its memory"
        raise SpecError(Problem(what, origin, f"write {_OWN_EXAMPLE}"))
    memory, rates = int(values["memory"]), _OWN_DTYPES.items()
    return Device(
        name=",".join(f"{key}={given[key]}" for key in OWN_FACTS if key in given),
        memory_bytes=memory,
        visible_bytes=memory,
        peak_flops=MappingProxyType({d: float(values[k]) for k, d in rates if k in values}),
        memory_bytes_per_s=values.get("hbm"),
        sources=("the plan, or --gpu",),
    )


@cache
def devices() -> Mapping[str, Device]:
    """Return all devices of the hardware table by name."""
    table = json.loads(_FILE.read_text(encoding="utf-8"))["devices"]
    return MappingProxyType({name: _device(name, facts) for name, facts in table.items()})


def find_device(name: str, origin: Origin | None = None) -> Device:
    """Return the device of that name, or the only device whose name contains all its words.

    Args:
        name: A key such as "h100-sxm-80gb", or enough of it to be unambiguous ("a100-40g"), or the
            facts of a device that the table lacks (see `own_device`).
        origin: The place where the user wrote it.

    Raises:
        SpecError: No device, or more than one, matches the name.

    >>> find_device("A100 40G").name, find_device("h200").name
    ('a100-sxm-40gb', 'h200-sxm-141gb')
    """
    if "=" in name:
        return own_device(name, origin)
    table = devices()
    key = "-".join(_words(name))
    if key in table:
        return table[key]
    wanted = set(_words(name))
    found = [k for k in table if wanted and wanted <= set(k.split("-"))]
    if len(found) == 1:
        return table[found[0]]
    if found:
        what, fix = f"gpu '{name}' is ambiguous", f"write one of {', '.join(found)}"
    elif name.isdecimal():
        what = f"gpu '{name}' is a number, not the name of a GPU"
        fix = f"write --gpus {name} for {name} GPUs; --gpu takes a name that `meshplan gpus` lists"
    else:
        close = difflib.get_close_matches(key, table, n=1, cutoff=0.5)
        what = f"gpu '{name}' is not in the hardware table"
        fix = (
            f"did you mean '{close[0]}'? If not,"
            if close
            else "write a name that `meshplan gpus` lists, or"
        )
        fix += f" state its facts: {_OWN_EXAMPLE}"
    raise SpecError(Problem(what, origin, fix))


@cache
def names_pattern() -> str:
    """Return a regular expression for the names that `find_device` accepts.

    A name may have any of the words of one device in any order, unless another device has them too.
    """
    table = {key: frozenset(key.split("-")) for key in devices()}
    forms = []
    for key, words in table.items():
        shared = {words & others for other, others in table.items() if other != key}
        most = [each for each in shared if each and not any(each < other for other in shared)]
        unless = "".join(f"(?!{_of_words(each)})" for each in sorted(most, key=sorted))
        forms.append(f"{unless}{_of_words(words)}")
    exact = "|".join(re.escape(key) for key in table)
    own = "|".join(OWN_FACTS)
    facts = rf"(?=.*\bmemory\s*=)\s*(?:(?:{own})\s*=[^,=]*[\d.][^,=]*(?:,\s*(?!$)|$))+$"
    return f"^(?:{exact}|{'|'.join(forms)}|{facts})"


def _of_words(words: frozenset[str]) -> str:
    """Return a regular expression for texts of only these words, in any case and order."""
    cased = [any_case(word) for word in sorted(words)]
    # "80g" stands for "80gb".
    each = "|".join(re.sub(r"^(\d+\[gG\])\[bB\]$", r"\1(?:[bB])?", word) for word in cased)
    return rf"[\s_-]*(?:(?:{each})(?:[\s_-]+|$))+$"


def _words(name: str) -> list[str]:
    """Return the lower-case words of a name; `80g` becomes `80gb`."""
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word]
    return [re.sub(r"^(\d+)g$", r"\1gb", word) for word in words]


def _device(name: str, facts: Mapping[str, object]) -> Device:
    def number(key: str, unit: int = _GIGA) -> float | None:
        value = facts.get(key)
        return float(value) * unit if isinstance(value, (int, float)) else None

    memory, peak, sources = facts["memory_gb"], facts["peak_tflops"], facts["sources"]
    visible = facts.get("visible_gib")
    assert isinstance(memory, int)
    assert visible is None or isinstance(visible, float)
    assert isinstance(peak, dict)
    assert isinstance(sources, list)
    return Device(
        name=name,
        memory_bytes=memory * _GIGA,
        visible_bytes=None if visible is None else parse_bytes(f"{visible}GiB"),
        peak_flops=MappingProxyType({dtype: t * _TERA for dtype, t in peak.items()}),
        product_flops=number("product_tflops", _TERA),
        memory_bytes_per_s=number("memory_gb_per_s"),
        intra_bytes_per_s=number("intra_gb_per_s"),
        inter_bytes_per_s=number("inter_gb_per_s"),
        inter_source=str(facts.get("inter_source", "")),
        note=str(facts["note"]),
        sources=tuple(sources),
    )
