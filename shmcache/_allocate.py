"""Getting memory: try, grow, wait, try again.

C says FULL when nothing more can be had now, and GROW when a region that is not yet committed
would help; it never waits. Waiting is done here, in slices of at most 100 ms, so that Ctrl-C works
and whoever died meanwhile is reaped.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from . import errors
from ._core import PARTS, SLICE_NS, address_of, fast, ffi, lib
from ._meta import Layout
from ._sizes import format_size

if TYPE_CHECKING:
    from ._calls import Calls
    from .memory import MemoryObj

_LOOK_SECONDS = 1.0  # more than a slice
_GROW_SECONDS = 1.0  # a region's commit is waited for so long, whatever the timeout


class Deadline:
    """A timeout in seconds; None waits for ever."""

    __slots__ = ("end",)

    def __init__(self, timeout: float | None) -> None:
        if timeout is None:
            self.end = math.inf
            return
        if not timeout >= 0:
            raise ValueError(f"timeout is {timeout!r}: seconds, at least 0, or None to wait for ever")
        self.end = time.monotonic() + timeout if timeout else 0.0

    def slice_ns(self) -> int:
        """How long to wait in C before looking around again; 0: time is up."""
        if not self.end:
            return 0
        left = min(self.end - time.monotonic(), _LOOK_SECONDS)  # no end is no int
        return min(SLICE_NS, math.ceil(left * 1e9)) if left > 0 else 0


def too_large(namespace: Calls, layout: Layout, n: int = 1) -> errors.CapacityError:
    """The error for a request that could never fit."""
    geometry = namespace.cache._attached().mapping.geometry
    largest = min(geometry.region_bytes, geometry.capacity)
    what = format_size(layout.reserve) if n == 1 else f"{n} objects of {format_size(layout.reserve)}"
    return errors.CapacityError(
        f"allocate: {what} never fit segment {namespace.cache.name!r}, whose capacity is "
        f"{format_size(geometry.capacity)}, and whose largest object {format_size(largest)}",
        hint="store smaller objects, or make the segment with a larger capacity and region_bytes",
    )


class Growth:
    """Commits regions for one request, as often as that helps."""

    __slots__ = ("_end", "_failed")

    def __init__(self) -> None:
        self._end = 0.0
        self._failed = False

    def grow(self, committer: Any) -> bool:
        """One more region, or the knowledge that there is none to be had: then False."""
        if self._failed:
            return False
        now = time.monotonic()
        self._end = self._end or now + _GROW_SECONDS
        if now >= self._end or not committer.ensure_one(self._end - now):
            self._failed = True
            return False
        return True


def take_memory(namespace: Calls, layout: Layout, n: int, evict: bool, timeout: float | None) -> list[MemoryObj] | None:
    """n blocks or none, after growing and, within `timeout`, waiting."""
    cache = namespace.cache
    deadline = Deadline(timeout)
    growth = Growth()
    ticket = ffi.new("uint32_t *")
    parts = ffi.new(PARTS, n)
    flags = 0 if evict else lib.SHMC_F_NO_EVICT
    reaped = False
    while True:
        a = cache._attachment
        if a.checksum is not None:
            a.checksum.check_room(layout)
        pairs, owners = a.new_holds(n)
        rc = lib.shmc_alloc(
            a.handle, namespace._index, layout.reserve, layout.c_blob, len(layout.blob), n, flags, owners, parts, ticket
        )
        if rc == 0:
            made: list[MemoryObj] = fast.objects(a.at, address_of(parts), pairs, namespace._make, a, namespace, layout)
            return made
        if rc >= 0:  # after an error some may be full: those go with their owners
            a.empty_holds(pairs)
        if rc == lib.SHMC_GROW:
            if not growth.grow(a.committer()):
                flags |= lib.SHMC_F_NO_GROW
        elif rc == lib.SHMC_FULL:
            ns = deadline.slice_ns()
            if not ns:
                return None
            # before the first wait, and after each slice of it: the dead may have left room behind
            if reaped:
                rc = lib.shmc_wait(a.handle, 0, ticket[0], ns)
                if rc < 0:
                    a.recover(rc, "allocate")
            reaped = True
            cache._reap()
        elif rc == lib.SHMC_E_CAPACITY:
            raise too_large(namespace, layout, n)
        else:
            a.recover(rc, "allocate")
