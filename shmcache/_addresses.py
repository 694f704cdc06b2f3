"""A range of addresses given out by the C allocator: no memory behind it, only the arithmetic."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from . import errors
from ._private import PrivateCache

if TYPE_CHECKING:
    from .memory import MemoryObj

__all__ = ["AddressManager"]

_EXACT_GRANULES, _BIN_BITS = 64, 6  # larger requests are rounded up to a bin, see native/core/extents.h


class AddressManager:
    """Addresses from 0 to `size`, in aligned pieces.

    Parameters
    ----------
    size
        bytes; what is left over beyond a multiple of `align_bytes` is never given out.
    align_bytes
        a power of two from 64 to 2 MiB.
    """

    ALIGN_BYTES = 4096

    def __init__(self, size: int, align_bytes: int = ALIGN_BYTES) -> None:
        self._size = size
        self._align = align_bytes
        self._lock = threading.Lock()
        _all.add(self)
        self._live: dict[int, MemoryObj] = {}  # address -> object
        self._heap = self._heap_of(size)

    def _heap_of(self, size: int) -> PrivateCache:
        return PrivateCache(size, align=self._align, name="addresses")

    def compute_aligned_size(self, raw_size: int) -> int:
        """`raw_size` rounded up to the alignment."""
        return (raw_size + self._align - 1) & ~(self._align - 1)

    def allocate(self, size: int) -> tuple[int, int]:
        """Address and reserved size of one piece.

        ValueError for a size of 0 or less. RuntimeError when there is no room.
        """
        return self.batched_allocate(size, 1)[0]

    def batched_allocate(self, size: int, batch_size: int) -> list[tuple[int, int]]:
        """As many pieces, all or none; see `allocate`."""
        if size <= 0:
            raise ValueError(f"size is {size}: it must be greater than 0")
        if batch_size < 0:
            raise RuntimeError(f"batch_size is {batch_size}: it must be non-negative")
        if not batch_size:
            return []
        with self._lock:
            try:
                objs = self._heap.default.allocate_many(size, n=batch_size, evict=False)
            except errors.CapacityError:
                objs = None
            if objs is None:
                raise RuntimeError(f"{batch_size} blocks of {size} bytes: no memory is available")
            self._live.update((obj.shm_offset, obj) for obj in objs)
        return [(obj.shm_offset, obj.get_physical_size()) for obj in objs]

    def free(self, address: int, size: int) -> None:
        """Give back what `allocate` returned; StaleHandleError, and nothing changes, for anything else."""
        with self._lock:
            obj = self._live.get(address)
            if obj is None or obj.get_physical_size() != size:
                there = "nothing" if obj is None else f"{obj.get_physical_size()} bytes"
                raise errors.StaleHandleError(f"free of {size} bytes at {address}: {there} allocated there")
            del self._live[address]
            obj.release()

    def sbrk(self, size: int) -> None:
        """Make the range longer, by `size` rounded up. Linear in the pieces given out.

        RuntimeError, and nothing changes, when there are too many of them. ValueError for a negative size.
        """
        if size < 0:
            raise ValueError(f"size is {size}: it must be at least 0")
        with self._lock:
            total = self._size + self.compute_aligned_size(size)
            heap = self._heap_of(total)
            # the same picture in a new heap: pieces and gaps side by side, then the gaps are freed
            live: dict[int, MemoryObj] = {}
            gaps: list[MemoryObj] = []
            end = 0
            for address, obj in sorted(self._live.items()):
                gaps += self._lay(heap, address - end)
                (live[address],) = self._lay(heap, obj.get_physical_size())
                end = address + obj.get_physical_size()
            for gap in gaps:
                gap.release()
            self._size, self._heap, self._live = total, heap, live

    def _lay(self, heap: PrivateCache, size: int) -> list[MemoryObj]:
        """Objects over the next `size` bytes of a heap whose only gap is its end, in sizes that are not rounded up."""
        objs = []
        while size:
            n = size // self._align
            if n >= _EXACT_GRANULES:
                n -= n % (1 << n.bit_length() - _BIN_BITS)
            obj = heap.default.allocate(n * self._align, evict=False)
            if obj is None:
                raise RuntimeError("sbrk: the tables of the new range are full")
            objs.append(obj)
            size -= n * self._align
        return objs

    def get_heap_size(self) -> int:
        """Bytes of the whole range."""
        return self._size

    def get_free_size(self) -> int:
        """Bytes not given out."""
        return self._size - self.total_allocated_size

    @property
    def total_allocated_size(self) -> int:
        """Bytes given out."""
        return self._heap.stats().bytes.used

    def check_consistency(self) -> bool:
        """Whether pieces and gaps tile the range without overlap."""
        return not self._heap.verify()


_all: weakref.WeakSet[AddressManager] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: another thread of the parent may have been inside."""
    for manager in list(_all):
        manager._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
