"""How every process of the demo attaches: each by itself, to the one segment of this run."""

from __future__ import annotations

from dataclasses import dataclass

from layout import descriptor, namespace_name

import shmcache


@dataclass(frozen=True)
class Run:
    """What all processes of one run share."""

    segment: str  # unique per run
    capacity: int
    ranks: int


def attach(run: Run, label: str, rank: int | None = None) -> tuple[shmcache.SharedCache, shmcache.Namespace]:
    """Open the segment, whoever comes first creates it, and the model's namespace in it."""
    cache = shmcache.open(run.segment, capacity=run.capacity, label=label, rank=rank)
    kv = cache.namespace(namespace_name(run.ranks), parts=run.ranks, descriptor=descriptor(run.ranks))
    return cache, kv
