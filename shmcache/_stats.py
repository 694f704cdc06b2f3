"""What a segment tells about itself: plain frozen dataclasses, made from the structs of C."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ._core import text

__all__ = [
    "ByteStats",
    "CountStats",
    "LockStats",
    "NamespaceInfo",
    "ReapReport",
    "Stats",
]


@dataclass(frozen=True, slots=True)
class ByteStats:
    """Bytes of the arena. `ready` of `capacity` are committed; ready = used + free."""

    capacity: int
    ready: int
    used: int  # allocated extents
    free: int
    largest_free: int  # the largest request that needs no eviction
    evictable: int  # of chunks that nobody holds or pins
    pinned: int  # of chunks in the cache that are held or pinned, each counted once


@dataclass(frozen=True, slots=True)
class CountStats:
    """How many of each exist now."""

    chunks: int  # with at least one published part
    parts: int
    blocks: int  # descriptors in use: of what is allocated, and of each gap between
    holds: int  # references and pins of all attachments
    attachments: int
    namespaces: int
    complete: int  # chunks with all parts: what lookup finds


@dataclass(frozen=True, slots=True)
class LockStats:
    """The one lock, since the segment was made."""

    acquisitions: int
    contended: int
    recoveries: int  # its holder died inside
    max_hold_ns: int  # longest of the holds that were timed (1 in 64)


@dataclass(frozen=True, slots=True)
class Stats:
    """One consistent snapshot. Counters never fall and outlive the processes that raised them."""

    hits: int  # keys found by lookup and get
    misses: int
    stores: int  # chunks that became complete
    duplicates: int  # puts that found their part there
    evictions: int
    eviction_failures: int  # allocations that found nothing to evict
    aborts: int  # blocks given up before they were published
    reaps: int  # dead attachments cleared away
    waits: int
    stale_puts: int  # puts whose namespace was bumped after the allocation
    holds_full: int  # holds refused because the table of holds was full
    leases_ended: int
    bytes: ByteStats
    counts: CountStats
    lock: LockStats
    pinning: str  # as obtained in this process, as are the next three
    hugepages: str
    numa: str
    prefault: str


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace of a segment."""

    name: str
    parts: int
    descriptor: Any  # as given: a str or what JSON made of a dict; None when it has none
    generation: int
    chunks: int
    complete: int
    bytes: int
    hits: int
    misses: int
    stores: int
    evictions: int


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What dead attachments had left behind and a reap gave back."""

    slots: int  # attachments cleared away
    holds: int
    blocks: int  # unpublished blocks of dead writers
    quarantined: int  # attachments that are dying or exec'ed: their unpublished blocks wait for proof


_COUNTERS = (
    "hits", "misses", "stores", "duplicates", "evictions", "eviction_failures", "aborts", "reaps", "waits",
    "stale_puts", "holds_full", "leases_ended",
)  # fmt: skip


def stats_from(s: Any, pinning: str, hugepages: str, numa: str, prefault: str) -> Stats:
    """Stats from a shmc_stats and what this process obtained."""
    return Stats(
        **{name: s.stat[i] for i, name in enumerate(_COUNTERS)},
        bytes=ByteStats(s.capacity, s.ready, s.used, s.free, s.largest_free, s.evictable, s.pinned),
        counts=CountStats(s.chunks, s.parts, s.blocks, s.holds, s.attachments, s.namespaces, s.complete),
        lock=LockStats(s.acquisitions, s.contended, s.recoveries, s.max_hold_ns),
        pinning=pinning,
        hugepages=hugepages,
        numa=numa,
        prefault=prefault,
    )


def namespace_info(n: Any) -> NamespaceInfo:
    """NamespaceInfo from a shmc_namespace_info."""
    raw = text(n.desc, n.desc_len)
    try:
        descriptor = json.loads(raw) if raw else None
    except ValueError:
        descriptor = raw
    return NamespaceInfo(
        name=text(n.name, n.name_len),
        parts=n.parts,
        descriptor=descriptor,
        generation=n.generation,
        chunks=n.chunks,
        complete=n.complete,
        bytes=n.bytes,
        hits=n.hits,
        misses=n.misses,
        stores=n.stores,
        evictions=n.evictions,
    )
