"""The event ring: what was admitted and removed, by whom and why; read without the lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._core import U32, U64, ffi, lib
from ._keys import Key, decode

__all__ = ["Event", "Events"]

_BATCH = 1024
_EVENTS = ffi.typeof("shmc_event[]")
_KINDS = {lib.SHMC_EV_ADMIT: "admit", lib.SHMC_EV_REMOVE: "remove"}
_CAUSES = {
    lib.SHMC_BY_PUT: "put",
    lib.SHMC_BY_EVICT: "evict",
    lib.SHMC_BY_REMOVE: "remove",
    lib.SHMC_BY_CLEAR: "clear",
    lib.SHMC_BY_BUMP: "bump",
}


@dataclass(frozen=True, slots=True)
class Event:
    """A chunk became complete ("admit") or left the cache ("remove")."""

    seq: int  # gapless in the segment's life
    time_ns: int  # CLOCK_MONOTONIC
    kind: str  # "admit" or "remove"
    cause: str  # "put", "evict", "remove", "clear" or "bump"
    namespace: str
    generation: int  # of the namespace
    key: Key
    bytes: int
    pid: int  # of the process that did it
    complete: bool  # all parts were published


class Events(list[Event]):
    """A list of events with the cursor to go on from.

    Attributes
    ----------
    next : int
        pass it as `since` to read what comes after.
    lost : int
        events after `since` that were overwritten before they were read. A reader that keeps its
        own index rebuilds it from `keys()` when this is not 0.
    """

    __slots__ = ("lost", "next")

    def __init__(self, events: list[Event], next_: int, lost: int) -> None:
        super().__init__(events)
        self.next = next_
        self.lost = lost


def read_events(base: Any, size: int, since: int, namespace_name: Callable[[int], str]) -> Events:
    """All events from `since` on that the ring still has."""
    buffer = ffi.new(_EVENTS, _BATCH)
    n, cursor, gap = ffi.new(U32), ffi.new(U64), ffi.new(U64)
    found: list[Event] = []
    lost = 0
    while True:
        if lib.shmc_events_read(base, size, since, buffer, _BATCH, n, cursor, gap) != 0:
            return Events(found, since, lost)
        lost += gap[0]
        since = cursor[0]
        for i in range(n[0]):
            e = buffer[i]
            found.append(
                Event(
                    seq=e.seq,
                    time_ns=e.time_ns,
                    kind=_KINDS.get(e.kind, str(e.kind)),
                    cause=_CAUSES.get(e.cause, str(e.cause)),
                    namespace=namespace_name(e.ns),
                    generation=e.ns_gen,
                    key=decode(e.ktype, bytes(ffi.buffer(e.key)[0 : e.klen])),
                    bytes=e.bytes,
                    pid=e.pid,
                    complete=bool(e.complete),
                )
            )
        if n[0] < _BATCH and not gap[0]:
            return Events(found, since, lost)
