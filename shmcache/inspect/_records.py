"""The large tables of a segment: chunks, blocks and holds, in slices and within a budget of time.

A segment of a terabyte has 16 million chunks. A verb has two seconds: when they are over it shows what
it has seen and says that this is not all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .._core import NIL, U32, ffi, lib
from .._events import Event, read_events
from ._keytext import Raw
from ._reader import Reader

if TYPE_CHECKING:
    import numpy as np

LINKED, PARKED, GONE, DRAIN, SHELL = (
    lib.SHMC_C_LINKED, lib.SHMC_C_PARKED, lib.SHMC_C_GONE, lib.SHMC_C_DRAIN, lib.SHMC_C_SHELL,
)  # fmt: skip
FREE, WRITING, PUBLISHED = lib.SHMC_X_FREE, lib.SHMC_X_WRITING, lib.SHMC_X_PUBLISHED
HOLD_KINDS = {
    lib.SHMC_H_REF: "reference",
    lib.SHMC_H_WRITE: "writing",
    lib.SHMC_H_BLOCK_PIN: "pin of a part",
    lib.SHMC_H_KEY_PIN: "pin",
    lib.SHMC_H_LOOKUP_PIN: "lookup",
    lib.SHMC_H_WRITE_PIN: "writing, pinned",
}
_SLICE = 16384


class Budget:
    """Seconds for all that a verb reads. `partial` tells whether something was left out for their sake."""

    def __init__(self, seconds: float = 1.4) -> None:
        self._end = time.monotonic() + seconds
        self.partial = False

    def spent(self) -> bool:
        self.partial = self.partial or time.monotonic() > self._end
        return self.partial


def _slices(reader: Reader, call: Any, buffer: Any, cap: int, budget: Budget) -> Iterator[int]:
    cursor, n = ffi.new(U32), ffi.new(U32)
    while True:
        rc = call(reader.base, reader.size, cursor, buffer, cap, n)
        if n[0]:
            yield n[0]
        if rc != lib.SHMC_MORE or budget.spent():
            return


def _arrays(reader: Reader, call: Any, struct: str, budget: Budget) -> Iterator[np.ndarray[Any, Any]]:
    import numpy as np

    dtype = _dtype(struct)
    records = np.empty(_SLICE, dtype)
    for n in _slices(reader, call, ffi.from_buffer(f"{struct} *", records), _SLICE, budget):
        yield records[:n]  # used again for the next


def _dtype(struct: str) -> np.dtype[Any]:
    """numpy's view of a C struct, from cffi's."""
    import numpy as np

    names, formats, offsets = [], [], []
    for name, field in ffi.typeof(struct).fields:
        names.append(name)
        offsets.append(field.offset)
        size = ffi.sizeof(field.type)
        formats.append(f"u{size}" if field.type.kind == "primitive" else ("u1", (size,)))
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": ffi.sizeof(struct)})


def chunk_arrays(reader: Reader, budget: Budget) -> Iterator[np.ndarray[Any, Any]]:
    """All chunk records that are in use, also removed ones that are still held. Valid until the next."""
    return _arrays(reader, lib.shmc_peek_chunks, "shmc_chunk_info", budget)


def block_arrays(reader: Reader, budget: Budget) -> Iterator[np.ndarray[Any, Any]]:
    """All extents, free ones too, in no order. Valid until the next."""
    return _arrays(reader, lib.shmc_peek_blocks, "shmc_block_info", budget)


def holds(reader: Reader, budget: Budget) -> Iterator[Any]:
    """A shmc_hold_info for each hold. Valid until the next."""
    buffer = ffi.new("shmc_hold_info[]", _SLICE)
    for n in _slices(reader, lib.shmc_peek_holds, buffer, _SLICE, budget):
        for i in range(n):
            yield buffer[i]


def _own(record: Any) -> Any:
    """A copy: an element of an array does not keep the array."""
    return ffi.new(f"{ffi.typeof(record).cname} *", record)[0]


def _record_at(reader: Reader, call: Any, buffer: Any, index: int) -> Any | None:
    if index == NIL:
        return None
    n = ffi.new(U32)
    call(reader.base, reader.size, ffi.new(U32, index), buffer, 1, n)
    return _own(buffer[0]) if n[0] else None


def chunk_at(reader: Reader, index: int) -> Any | None:
    """One chunk record, or None."""
    found = _record_at(reader, lib.shmc_peek_chunks, ffi.new("shmc_chunk_info[1]"), index)
    return found if found is not None and found.chunk == index else None


def block_at(reader: Reader, index: int) -> Any | None:
    """One extent, or None."""
    found = _record_at(reader, lib.shmc_peek_blocks, ffi.new("shmc_block_info[1]"), index)
    return found if found is not None and found.block == index else None


def versions(reader: Reader, namespace: int, key: Raw) -> list[Any]:
    """All chunk records of a key in a namespace."""
    buffer, n = ffi.new("shmc_chunk_info[]", 64), ffi.new(U32)
    kind, raw = key
    if lib.shmc_peek_key(reader.base, reader.size, namespace, raw, len(raw), kind, buffer, 64, n) < 0:
        return []
    return [_own(buffer[i]) for i in range(n[0])]


def parts_of(reader: Reader, chunk: Any) -> list[Any]:
    """The blocks of a chunk, by part."""
    buffer, n = ffi.new("shmc_block_info[]", lib.SHMC_PARTS_MAX), ffi.new(U32)
    for _ in range(3):  # it moved while it was read
        if lib.shmc_peek_parts(reader.base, reader.size, chunk.chunk, chunk.gen, buffer, lib.SHMC_PARTS_MAX, n) == 0:
            break
    return sorted((_own(buffer[i]) for i in range(n[0])), key=lambda b: int(b.part))


def events(reader: Reader, since: int = 0) -> tuple[list[Event], int, int]:
    """Events from `since` on, the number to go on from, and how many were overwritten before they were read."""
    names = {i: ns.name for i, ns in reader.namespaces().items()}
    found = read_events(reader.base, reader.size, since, lambda i: names.get(i, f"#{i}"))
    return list(found), found.next, found.lost


def raw_key(record: Any) -> Raw:
    """Type and bytes of the key in a cffi record."""
    return int(record.ktype), bytes(ffi.buffer(record.key)[0 : record.klen])
