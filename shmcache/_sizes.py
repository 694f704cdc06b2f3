"""Sizes as people write them: bytes as an int, or a number with a binary unit."""

from __future__ import annotations

import operator
import re
from fractions import Fraction

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DECIMAL = ("kb", "mb", "gb", "tb", "k", "m", "g", "t")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)
_LIMIT = 1 << 62


def parse_size(value: int | str, what: str = "size") -> int:
    """Number of bytes; ValueError says what to write instead."""
    remedy = 'write bytes as an int, or a string such as "512MiB" or "1.5GiB"'
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        unit = found.group(2).lower() if found else ""
        if found is None or unit not in _UNITS:
            if unit in _DECIMAL:
                remedy = f"{found.group(2) if found else ''} is ambiguous, write {unit[0].upper()}iB (1024-based)"
            raise ValueError(f"{what} is {value!r}: {remedy}")
        exact = Fraction(found.group(1)) * _UNITS[unit]
        if exact.denominator != 1:
            raise ValueError(f"{what} is {value!r}, which is no whole number of bytes: {remedy}")
        size = exact.numerator
    elif isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{what} is {value!r} of type {type(value).__name__}: {remedy}")
    else:
        size = operator.index(value)
    if size <= 0 or size > _LIMIT:
        raise ValueError(f"{what} is {value!r}: it must be positive and below 4 EiB")
    return size


def format_size(size: int) -> str:
    """The shortest exact form with a binary unit, else bytes: what parse_size takes back."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % (factor // 4) == 0:
            return f"{size / factor:g}{unit}"
    return f"{size} bytes" if size != 1 else "1 byte"
