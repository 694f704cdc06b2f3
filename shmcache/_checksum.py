"""Checksums of parts: what there is to choose, and how one is kept.

Whether a segment has them is decided when it is made: bits of shmc_geometry.flags, which C only keeps, say
which. The writer computes one over the object's bytes at put and stores it in the block's description
(`_meta`, version 2) before the block is published, so that whoever reads the one can read the other.

XXH3 of 64 bits is the one to take: it runs at the speed of memory (ten times that of zlib's crc32),
and misses a damage once in 2**64. CRC-32C, of 32 bits, is for those who compare with sums made elsewhere (storage,
networks). Both let other threads run. They find what failing memory and stray writes do; against forgery
they are nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._core import META_MAX
from ._meta import CHECKSUM_BYTES, Layout
from .errors import SegmentMismatchError

CHECKSUMS = ("none", "xxh3", "crc32c")  # the place is the number in the flags

_SHIFT, _MASK = 4, 0xF


def checksum_flags(name: str) -> int:
    """What stands in the geometry for a name of CHECKSUMS."""
    return CHECKSUMS.index(name) << _SHIFT


def checksum_name(flags: int) -> str:
    """The name that a geometry's flags stand for; one of a newer version as "#9"."""
    number = flags >> _SHIFT & _MASK
    return CHECKSUMS[number] if number < len(CHECKSUMS) else f"#{number}"


class Checksum:
    """The algorithm of a segment that has checksums; `digest` takes a buffer."""

    __slots__ = ("digest", "name")

    digest: Callable[[Any], int]

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "crc32c":
            import crc32c

            self.digest = crc32c.crc32c
        else:
            import xxhash

            self.digest = xxhash.xxh3_64_intdigest

    @staticmethod
    def check_room(layout: Layout) -> None:
        """ValueError when the description of an object leaves no room for its checksum."""
        most = META_MAX - CHECKSUM_BYTES
        if len(layout.blob) > most:
            shapes = ", ".join(str(g.shape) for g in layout.groups)
            raise ValueError(
                f"shape {shapes} takes {len(layout.blob)} bytes to describe, beside a checksum room is for {most}: "
                'store it with fewer dimensions, or in a segment with checksum="none"'
            )


def checksum_of(name: str, flags: int) -> Checksum | None:
    """What segment `name` with these flags has beside each part; SegmentMismatchError for one that is not known."""
    kind = checksum_name(flags)
    if kind == CHECKSUMS[0]:
        return None
    if kind not in CHECKSUMS:
        raise SegmentMismatchError(
            f"segment {name!r} keeps checksums of kind {kind}, which this version of shmcache does not know",
            hint="use the version that made it",
        )
    return Checksum(kind)


def show_checksum(value: int | None) -> str:
    """As messages and tools write it."""
    return "none" if value is None else f"{value:#018x}"
