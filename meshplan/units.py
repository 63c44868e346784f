"""Counts, bytes, bandwidths and seconds: parsed from a user's text and formatted for a reader.

All other modules compute in bytes, seconds and plain counts. A text that cannot be parsed raises a
ValueError that names the accepted forms; callers add the place where the text was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30

_NUMBER: Final = re.compile(r"^([+-]?(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:e[+-]?\d{1,4})?)\s*(.*)$", re.I)

_COUNT_SUFFIXES: Final[Mapping[str, int]] = {
    "": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12,
}  # fmt: skip

_BYTE_UNITS: Final[Mapping[str, int]] = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
}  # fmt: skip

_BIT_UNITS: Final[Mapping[str, int]] = {
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12,
}  # fmt: skip

_MAX: Final = 10**18
"""A limit far above any real count, memory or bandwidth; a larger number is a typing error."""

_COUNT: Final = "a count such as 8, 350M or 3e9"
_SIZE: Final = "a size such as 80GiB, 80GB or 512MiB"
_BANDWIDTH: Final = "a bandwidth such as 400Gb/s (bits) or 50GB/s (bytes)"


def parse_count(text: str | int | float) -> int:
    """Parse a positive whole number such as a parameter count.

    Raises:
        ValueError: The text is not a number, not positive, not whole, or beyond 1e18.

    >>> parse_count("3e9"), parse_count("350M"), parse_count("1.5B"), parse_count(8)
    (3000000000, 350000000, 1500000000, 8)
    """
    number, suffix = _split(text, _COUNT)
    if suffix.lower() not in _COUNT_SUFFIXES:
        raise ValueError(f"{text!r} is not {_COUNT}")
    scale = 10 ** _COUNT_SUFFIXES[suffix.lower()]
    _positive(text, number, scale, _COUNT)
    return _whole(text, number, scale)


_LEAST_BANDWIDTH = 1e6
"""Bytes per second below which a number without a unit is refused: the user meant another unit."""


def parse_bytes(text: str | int | float) -> int:
    """Parse a size into bytes; GiB is 2**30, GB is 10**9, a bare number is bytes.

    Raises:
        ValueError: The text is not a size, not positive, or beyond 1e18 bytes.

    >>> parse_bytes("80GiB"), parse_bytes("80 GB"), parse_bytes(512)
    (85899345920, 80000000000, 512)
    """
    number, unit = _split(text, _SIZE)
    if unit.lower() not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is not {_SIZE}")
    return math.ceil(_positive(text, number, _BYTE_UNITS[unit.lower()], _SIZE))


def parse_memory(text: str | int | float) -> int:
    """Parse the memory of a device or a host into bytes; a bare number below 1 MiB is refused.

    Raises:
        ValueError: The text is not a size that `parse_bytes` accepts, or it has no unit and is
            smaller than any memory.

    >>> parse_memory("24GB"), parse_memory(80 * 2**30)
    (24000000000, 85899345920)
    """
    size = parse_bytes(text)
    if size < MIB and not _split(text, _SIZE)[1]:
        raise ValueError(f"{text!r} has no unit and would mean {size} bytes; write {text}GiB")
    return size


def parse_bandwidth(text: str | int | float) -> float:
    """Parse a bandwidth into bytes per second; Gb/s and Gbit/s are bits, GB/s and GiB/s are bytes.

    Raises:
        ValueError: The text is not a bandwidth, not positive, or beyond 1e18 bytes per second.

    >>> parse_bandwidth("400Gb/s"), parse_bandwidth("50GB/s"), parse_bandwidth("100Gbps")
    (50000000000.0, 50000000000.0, 12500000000.0)
    """
    number, unit = _split(text, _BANDWIDTH)
    if not unit:
        value = _positive(text, number, 1, _BANDWIDTH)
        if value < _LEAST_BANDWIDTH:
            raise ValueError(
                f"{text!r} has no unit and would mean bytes per second; write {text}GB/s"
            )
        return value
    bare = re.sub(r"(/s|ps)$", "", unit)
    # As on datasheets, only the case of the last letter distinguishes bits from bytes.
    is_bits = bare.endswith(("b", "bit"))
    units = _BIT_UNITS if is_bits else _BYTE_UNITS
    if bare == unit or bare.lower() not in units:
        raise ValueError(f"{text!r} is not {_BANDWIDTH}")
    return _positive(text, number, units[bare.lower()], _BANDWIDTH) / (8 if is_bits else 1)


def any_case(word: str) -> str:
    """Return a regular expression for a word in any case, for engines without inline flags.

    >>> any_case("bf16")
    '[bB][fF]16'
    """
    return "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else re.escape(c) for c in word)


_SIGN: Final = r"^\s*\+?"
_POSITIVE: Final = rf"{_SIGN}(?=[\d_.]*[1-9])(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][+-]?\d{{1,4}})?\s*"
_BYTE: Final = "(?:[kKmMgGtT][iI]?)?[bB]"
_RATE: Final = "(?:(?:[kKmMgGtT][iI]?)?B|[kKmMgGtT]b(?:it)?)(?:/s|ps)"
"""Bits and bytes differ in the case of the last letter only."""


def _large(digits: int) -> str:
    """Return the regular expression of a number with at least so many digits before the point."""
    least = "|".join(str(n) for n in range(digits - 1, 19))
    return (
        rf"{_SIGN}(?:[1-9]\d{{{digits - 1},}}\.?\d*|[1-9][\d_]*\.?[\d_]*[eE]\+?0*(?:{least}))\s*$"
    )


FORMS: Final[Mapping[Callable[[str], int | float], tuple[dict[str, Any], str]]] = {
    parse_count: (
        {"type": "integer", "minimum": 1, "maximum": _MAX},
        rf"{_POSITIVE}[kKmMbBgGtT]\s*$|{_SIGN}0*[1-9][\d_]*\.?0*\s*$"
        rf"|{_SIGN}[1-9][\d_]*\.?[\d_]*[eE]\+?\d{{1,2}}\s*$",
    ),
    parse_bytes: (
        {"type": "number", "exclusiveMinimum": 0, "maximum": _MAX},
        rf"{_POSITIVE}(?:{_BYTE})?\s*$",
    ),
    parse_memory: (
        {"type": "number", "minimum": MIB, "maximum": _MAX},
        rf"{_POSITIVE}{_BYTE}\s*$|{_large(8)}",
    ),
    parse_bandwidth: (
        {"type": "number", "minimum": _LEAST_BANDWIDTH, "maximum": _MAX},
        rf"{_POSITIVE}{_RATE}\s*$|{_large(7)}",
    ),
}
"""For each parser, the JSON Schema of the numbers that it accepts, and a regular expression of the
texts. It also matches texts that only arithmetic can reject, such as a count that is not whole."""


def format_bytes(num_bytes: int | float) -> str:
    """Format a size with one decimal and the largest binary unit up to GiB.

    >>> format_bytes(17287343309), format_bytes(3 * 2**20), format_bytes(2048), format_bytes(12)
    ('16.1 GiB', '3.0 MiB', '2.0 KiB', '12 B')
    """
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_gib(num_bytes: int | float) -> str:
    """Format a size in GiB with one decimal, however small, for columns.

    >>> format_gib(60_000_000_000)
    '55.9 GiB'
    """
    return f"{num_bytes / GIB:,.1f} GiB"


def format_count(count: int) -> str:
    """Format a count with three figures and a suffix; counts below a million in full.

    >>> format_count(3_000_000_000), format_count(124_439_808), format_count(512)
    ('3.00 B', '124 M', '512')
    """
    for limit, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= limit:
            value = count / limit
            places = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{places}f} {suffix}"
    return f"{count:,}"


def format_seconds(seconds: float) -> str:
    """Format a duration in us, ms, s, min or h, whichever suits its size.

    >>> format_seconds(0.0123), format_seconds(2.5), format_seconds(90), format_seconds(5e-6)
    ('12.3 ms', '2.50 s', '1 min 30 s', '5.0 us')
    """
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_step(seconds: float) -> str:
    """Format the time of a step: like `format_seconds` below one second, else always in seconds.

    >>> format_step(4.3431), format_step(3272.87), format_step(0.0926), format_step(7.3e-5)
    ('4.343 s', '3,272.9 s', '92.6 ms', '73.0 us')
    """
    if seconds < 0.9995:
        return format_seconds(seconds)
    return f"{seconds:.3f} s" if seconds < 100 else f"{seconds:,.1f} s"


def _split(text: str | int | float, what: str) -> tuple[str, str]:
    """Return (number, unit) as text; `what` describes the accepted form in the error."""
    found = None if isinstance(text, bool) else _NUMBER.match(str(text).strip())
    if not found:
        raise ValueError(f"{text!r} is not {what}")
    return found[1].replace("_", ""), found[2].strip()


def _positive(text: str | int | float, number: str, scale: int, what: str) -> float:
    value = float(number) * scale
    if value <= 0:
        raise ValueError(f"{text!r} is not positive; give {what}")
    if value > _MAX:
        raise ValueError(f"{text!r} is larger than 1e18; give {what}")
    return value


def _whole(text: str | int | float, number: str, scale: int) -> int:
    """Return `number * scale` without float rounding; raise ValueError if it is not whole."""
    mantissa, _, exponent = number.lower().partition("e")
    digits, _, decimals = mantissa.partition(".")
    shift = int(exponent or 0) - len(decimals)
    numerator = int(digits + decimals) * scale
    if shift >= 0:
        return int(numerator * 10**shift)
    whole, rest = divmod(numerator, 10**-shift)
    if rest:
        raise ValueError(f"{text!r} is not a whole number; give {_COUNT}")
    return int(whole)


def spans_of(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each run of consecutive numbers, given in increasing order.

    >>> list(spans_of([0, 1, 2, 4]))
    [(0, 2), (4, 4)]
    """
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last
