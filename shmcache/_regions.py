"""The regions of a segment, side by side in one reservation of address space: the arena.

    address      + region_stride   + 2 * region_stride
    | region 0   | region 1        | region 2 ...            offsets are those of the C core
    file .0000     file .0001        file .0002

All regions are created sparse with the segment and mapped by everyone at attach; none is opened by
a name that another generation could have taken: names carry the instance, and inodes are compared.
The reservation ends with the last view of it, and never at interpreter exit.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from . import _shmfs
from ._control import Control, unmap
from ._core import ffi, lib, owned
from ._names import path_of, region_name
from ._numa import node_of
from ._request import FLAG_NO_HUGEPAGES
from ._sizes import format_size
from .errors import SegmentCorruptError

HUGE_PAGE = 2 << 20
FLAG_HUGE, FLAG_PARTLY_HUGE = 1, 2  # of a region, as obtained


@dataclass(frozen=True)
class Region:
    """One region as the segment describes it."""

    index: int
    address: int  # in this process
    bytes: int
    ready: bool
    flags: int
    node: int


class Arena:
    """The regions of one segment instance, mapped into this process."""

    def __init__(self, name: str, control: Control) -> None:
        g = control.geometry
        self.name = name
        self.instance = control.instance
        self.capacity = int(g.capacity)
        self.stride = int(g.region_stride)
        self.n_regions = int(g.n_regions)
        self.region_bytes = int(g.region_bytes)
        self.bytes = self.n_regions * self.stride
        self.want_hugepages = not g.flags & FLAG_NO_HUGEPAGES
        self.numa_mask = int(g.numa_node_mask)
        self.before_unmap: list[Callable[[], None]] = []  # called just before the reservation ends
        self._control = control
        self._reader: Any = None
        self._inodes = [0] * self.n_regions

        page = HUGE_PAGE if self.stride % HUGE_PAGE == 0 else 4096
        space = lib.shmc_reserve_space(self.bytes, max(page, int(g.align)))  # so that addresses are aligned too
        if space == ffi.NULL:
            raise OSError(
                ffi.errno, f"cannot reserve {format_size(self.bytes)} of address space: {os.strerror(ffi.errno)}"
            )
        self.address = int(ffi.cast("uintptr_t", space))
        # Whatever holds the buffer holds the mapping: the buffer refers to `space`.
        self.buffer: Any = ffi.buffer(space, self.bytes)
        weakref.finalize(space, _end, self.before_unmap, self.address, self.bytes).atexit = False

        # What this process has done to its own mapping, shared by all its handles on this segment.
        self._lock = threading.Lock()
        self._mapped = bytearray(self.n_regions)  # 0: no, 1: being populated, 2: done
        self.mapped_bytes = 0
        self.hugepages_refused = ""  # why, once a collapse failed: it is not tried again
        _arenas.add(self)

    # ---- making and opening the files -----------------------------------------------------------

    def create_regions(self, mode: int) -> None:
        """Creates every region sparse, records its inode in the segment and maps it."""
        for i in range(self.n_regions):
            fd = _shmfs.create_shm(self.region_name(i), mode)
            try:
                os.ftruncate(fd, self.region_length(i))
                self._inodes[i] = os.fstat(fd).st_ino
                lib.shmc_format_region(self._control.base, i, self._inodes[i])
                self._map(i, fd)
            finally:
                os.close(fd)

    def open_regions(self) -> None:
        """Maps the regions of an existing segment. SegmentCorruptError when one is not what it was."""
        info = ffi.new("shmc_region_info *")
        for i in range(self.n_regions):
            self._read(i, info)
            self._inodes[i] = int(info.inode)
            fd = self.open_region(i)
            if fd is None:
                raise SegmentCorruptError(
                    f"segment {self.name!r} has lost its memory: {path_of(self.region_name(i))} is not the file it was",
                    hint="remove the segment with shmcache.unlink(name, force=True)",
                )
            try:
                self._map(i, fd)
            finally:
                os.close(fd)

    def open_region(self, i: int) -> int | None:
        """A descriptor of region i, or None when its name no longer leads to the file that we map."""
        try:
            fd = _shmfs.open_shm(self.region_name(i))
        except FileNotFoundError:
            return None
        st = os.fstat(fd)
        if st.st_ino != self._inodes[i] or st.st_size != self.region_length(i) or st.st_uid != os.geteuid():
            os.close(fd)
            return None
        return fd

    def _map(self, i: int, fd: int) -> None:
        error = lib.shmc_map_at(ffi.cast("void *", self.region_address(i)), fd, self.region_length(i))
        if error:
            raise OSError(-error, f"cannot map {path_of(self.region_name(i))}: {os.strerror(-error)}")

    # ---- looking ------------------------------------------------------------------------------------

    def region_name(self, i: int) -> str:
        return region_name(self.name, self.instance, i)

    def region_address(self, i: int) -> int:
        return self.address + i * self.stride

    def region_length(self, i: int) -> int:
        return min(self.region_bytes, self.capacity - i * self.region_bytes)

    def region_node(self, i: int) -> int:
        return node_of(i, self.numa_mask)

    def regions(self, only: Iterable[int] | None = None) -> list[Region]:
        """Regions as they are now. Takes no lock."""
        info = ffi.new("shmc_region_info *")
        out = []
        for i in range(self.n_regions) if only is None else only:
            self._read(i, info)
            out.append(
                Region(
                    index=i,
                    address=self.region_address(i),
                    bytes=self.region_length(i),
                    ready=info.state == lib.SHMC_R_READY,
                    flags=int(info.flags),
                    node=int(info.node),
                )
            )
        return out

    def _read(self, i: int, info: Any) -> None:
        if self._reader is None:  # a handle that never attaches: reading needs none of its rights
            reader = lib.shmc_new(self._control.base, self._control.size, 0)
            if reader == ffi.NULL:
                raise SegmentCorruptError(f"segment {self.name!r} cannot be read")
            self._reader = owned(reader, lib.shmc_free)
        if lib.shmc_region(self._reader, i, info):
            raise SegmentCorruptError(f"segment {self.name!r} has no region {i}")

    def ready_bytes(self) -> int:
        """Committed bytes. Takes no lock."""
        stats = ffi.new("shmc_stats *")
        lib.shmc_stats_read(self._control.base, self._control.size, stats)
        return int(stats.ready)

    # ---- this process's own page tables -----------------------------------------------------------

    def take_unmapped(self) -> int | None:
        """A READY region that nobody in this process has populated yet; then finish with mapped()."""
        for region in self.regions(i for i, state in enumerate(bytes(self._mapped)) if state == 0):
            if region.ready and self.take(region.index):
                return region.index
        return None

    def take(self, i: int) -> bool:
        """Claims populating region i for the caller, who then finishes with mapped()."""
        with self._lock:
            free = self._mapped[i] == 0
            if free:
                self._mapped[i] = 1
            return free

    def is_mapped(self, i: int) -> bool:
        return self._mapped[i] == 2

    def mapped(self, i: int, done: bool) -> None:
        """Region i is now populated in this process, or was given up."""
        with self._lock:
            if done and self._mapped[i] != 2:
                self.mapped_bytes += self.region_length(i)
            self._mapped[i] = 2 if done else 0

    def hugepages(self) -> str:
        """What was obtained, for people."""
        ready = [r for r in self.regions() if r.ready]
        huge = sum(r.bytes for r in ready if r.flags & FLAG_HUGE)
        partly = sum(r.bytes for r in ready if r.flags & FLAG_PARTLY_HUGE)
        if not self.want_hugepages:
            return "off"
        if not huge and not partly:
            why = f": {self.hugepages_refused}" if self.hugepages_refused else ""
            return f"none{why}"
        out = f"{format_size(huge)} of {format_size(sum(r.bytes for r in ready))}"
        return f"{out}, {format_size(partly)} partly" if partly else out

    def numa(self) -> str:
        """What was obtained, for people."""
        if not self.numa_mask:
            return "none"
        nodes = sorted({r.node for r in self.regions() if r.ready})
        return f"node {', '.join(map(str, nodes))}"

    def _forget_page_tables(self) -> None:
        """In a forked child: it inherits the mapping, but neither the page tables nor the threads."""
        self._lock = threading.Lock()
        self._mapped = bytearray(self.n_regions)
        self.mapped_bytes = 0


def _end(before: list[Callable[[], None]], address: int, size: int) -> None:
    for callback in before:
        callback()
    unmap(address, size)


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for arena in list(_arenas):
        arena._forget_page_tables()


os.register_at_fork(after_in_child=_after_fork_in_child)
