"""The bytes of all parts against their checksums: no lock, no hold, nothing but reading.

Bytes do not change while their block is published, and a block that is freed is of another generation ever
after. So each part is read without keeping it: what agrees with its checksum is right. Of what does not, the
record is read again: still published in the same generation, nobody was allowed to write meanwhile, and it
is damage; else it went while it was read. (C reads a record twice with a fence between, so what is known of
it is younger than the bytes.) A hold would be as exact, but it would keep chunks from eviction, move the
hit counts, and need the lock, which somebody stopped may have.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .. import _shmfs
from .._checksum import checksum_name, checksum_of, show_checksum
from .._core import lib
from .._meta import layout_from, split
from .._names import region_name
from ..errors import ShmCacheError
from ._keytext import show
from ._memory import lost_regions
from ._reader import Reader
from ._records import PUBLISHED, Budget, block_arrays, block_at, chunk_at, raw_key


@dataclass
class Payload:
    """What was found. `skipped` says why nothing was read, if so."""

    kind: str
    checked: int = 0
    bytes: int = 0
    without: int = 0  # parts that have no checksum: put by a version that knew of none
    gone: int = 0  # freed while they were read
    mismatches: list[dict[str, Any]] = field(default_factory=list)
    skipped: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "checked": self.checked, "bytes": self.bytes, "without": self.without,
            "gone": self.gone, "mismatches": self.mismatches, "skipped": self.skipped,
        }  # fmt: skip


def check_payload(reader: Reader) -> Payload | None:
    """None: the segment keeps no checksums."""
    flags = int(reader.geometry.flags)
    out = Payload(checksum_name(flags))
    try:
        checksum = checksum_of(reader.name, flags)
        if checksum is None:
            return None
        if reader.copy:
            out.skipped = "a copy of a control file has no payload"
            return out
        lost = lost_regions(reader)
        if lost:
            out.skipped = f"{lost[0]} is not there, or not the one it was made with"
            return out
        with contextlib.closing(_Regions(reader)) as regions:
            _compare(reader, regions, checksum.digest, out)
    except (ShmCacheError, OSError) as e:
        out.skipped = str(e)
    return out


class _Regions:
    """The arena, region by region, mapped read-only where it is needed. Only what is committed: a hole would take
    memory, or be a SIGBUS."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._ready = [int(r.bytes) if r.state == lib.SHMC_R_READY else 0 for r in reader.regions()]
        self._mapped: dict[int, mmap.mmap] = {}

    @contextlib.contextmanager
    def bytes_at(self, offset: int, size: int) -> Iterator[memoryview | None]:
        """None where a damaged table points outside of all."""
        index, start = divmod(offset, int(self._reader.geometry.region_stride))
        if index >= len(self._ready) or start + size > self._ready[index]:
            yield None
            return
        with memoryview(self._map(index)) as whole, whole[start : start + size] as view:
            yield view

    def _map(self, index: int) -> mmap.mmap:
        if index not in self._mapped:
            name = region_name(self._reader.name, self._reader.control.instance, index)
            fd = _shmfs.open_shm(name, read_only=True)
            try:
                self._mapped[index] = mmap.mmap(fd, self._ready[index], prot=mmap.PROT_READ)
            finally:
                os.close(fd)
        return self._mapped[index]

    def close(self) -> None:
        for m in self._mapped.values():
            m.close()


def _compare(reader: Reader, regions: _Regions, digest: Any, out: Payload) -> None:
    import numpy as np
    from tqdm import tqdm

    total = int(reader.raw_stats().used)
    quiet = not sys.stderr.isatty()
    with tqdm(total=total, desc=f"verify {reader.name}", unit="B", unit_scale=True, disable=quiet) as bar:
        for blocks in block_arrays(reader, Budget(math.inf)):
            there = blocks[blocks["state"] == PUBLISHED]
            for b in there[np.argsort(there["offset"])]:
                _compare_one(reader, regions, digest, b, out)
                bar.update(int(b["extent"]))


def _compare_one(reader: Reader, regions: _Regions, digest: Any, b: Any, out: Payload) -> None:
    blob = b["meta"][: int(b["meta_len"])].tobytes()
    stored = split(blob)[1]
    if stored is None:
        out.without += 1
        return
    nbytes = layout_from(blob, int(b["size"])).nbytes
    with regions.bytes_at(int(b["offset"]), nbytes) as view:
        actual = None if view is None else digest(view)
    if actual != stored:
        now = block_at(reader, int(b["block"]))
        if now is None or now.state != PUBLISHED or now.gen != int(b["gen"]):
            out.gone += 1
            return
        chunk = chunk_at(reader, now.chunk)
        names = reader.namespaces()
        out.mismatches.append(
            {
                "namespace": names[now.ns].name if now.ns in names else f"#{now.ns}",
                "key": None if chunk is None else show(*raw_key(chunk)), "part": int(now.part), "bytes": nbytes,
                "offset": int(now.offset), "expected": show_checksum(stored), "actual": show_checksum(actual),
            }
        )  # fmt: skip
    out.checked += 1
    out.bytes += nbytes
