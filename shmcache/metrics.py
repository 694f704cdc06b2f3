"""Prometheus metrics of backends and of the segments beneath them.

    lmcache:*      LMCache's names, with the meaning that they have there, for each backend
    shmcache_*     what only a segment has, for each segment that a backend of this process uses

Nothing is counted for it: a scrape reads the counters of the segment, which takes no lock. What the
ranks of a host share is told by the first of them, so that sums over ranks are right.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ._metric_names import BYTES, COUNTERS, COUNTS, LOCK_COUNTERS, LONGEST_HOLD
from .errors import ShmCacheError

if TYPE_CHECKING:
    from ._stats import Stats
    from .backend import SharedCPUBackend

__all__ = ["Lifespans", "collect", "register", "segment_metrics"]

_LIFESPAN_MINUTES = (0, 1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1000, 2500, 5000)
_LIFESPAN_SAMPLE = 32
_MOST_FIRST_SEEN = 1 << 17

_backends: weakref.WeakSet[SharedCPUBackend] = weakref.WeakSet()
_lock = threading.Lock()
_registered = False


class Lifespans:
    """How old chunks are when they are used again, in minutes, since this process first met them.

    Of each lookup a sample counts, spread over its keys: the rest would say the same.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[Any, float] = OrderedDict()
        self.counts = [0] * (len(_LIFESPAN_MINUTES) + 1)
        self.total = 0.0

    def met(self, chunks: Iterable[Any]) -> None:
        """Chunks were put."""
        first, now = self._first, time.monotonic()
        for chunk in chunks:
            first[chunk] = now
        if len(first) > _MOST_FIRST_SEEN:
            for _ in range(len(first) - _MOST_FIRST_SEEN):
                first.popitem(last=False)

    def used(self, keys: Sequence[Any]) -> None:
        """Keys were used."""
        now = time.monotonic()
        for key in keys[:: 1 + len(keys) // _LIFESPAN_SAMPLE]:
            minutes = (now - self._first.get(key.chunk_hash, now)) / 60
            self.total += minutes
            self.counts[bisect.bisect_left(_LIFESPAN_MINUTES, minutes)] += 1


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def segment_metrics(name: str, stats: Stats) -> Iterator[Metric]:
    """The `shmcache_*` families of one segment, under the names that `shmcache-inspect metrics` uses."""
    labels = {"segment": name}
    for field, text in COUNTERS.items():
        yield _counter(f"shmcache_{field}", text, labels, getattr(stats, field))
    for field, text in LOCK_COUNTERS.items():
        yield _counter(f"shmcache_lock_{field}", text, labels, getattr(stats.lock, field))
    yield _gauge("shmcache_lock_max_hold_seconds", LONGEST_HOLD, labels, stats.lock.max_hold_ns / 1e9)
    for family, text, row in (("bytes", BYTES, stats.bytes), ("entries", COUNTS, stats.counts)):
        kinds = GaugeMetricFamily(f"shmcache_{family}", text, labels=["segment", "kind"])
        for kind, value in dataclasses.asdict(row).items():
            if kind != "attachments":
                kinds.add_metric([name, kind], value)
        yield kinds


def _backend_metrics(backend: SharedCPUBackend, stats: Stats) -> Iterator[Metric]:
    m = backend.metadata
    labels = {
        "model_name": "" if m is None else str(m.model_name),
        "worker_id": "" if m is None else str(m.worker_id),
        "role": str(getattr(m, "role", None)),
        "served_model_name": str(getattr(m, "served_model_name", None) or ""),
    }
    shared = backend._speaks_for_host()  # else another rank tells it
    own_pins, pins = backend._pins()
    sender = backend.batched_msg_sender
    for name, text, value in (
        ("local_cpu_evict_count", "Evictions", stats.evictions if shared else 0),
        ("local_cpu_evict_keys_count", "Keys evicted", stats.evictions if shared else 0),
        ("local_cpu_evict_failed_count", "Failed evictions", stats.eviction_failures if shared else 0),
        ("forced_unpin_count", "Pins that ended with their lease", stats.leases_ended if shared else 0),
    ):
        yield _counter(f"lmcache:{name}", text, labels, value)
    for name, text, value in (
        ("local_cache_usage", "Bytes in use", stats.bytes.used if shared else 0),
        ("active_memory_objs_count", "Objects that exist", stats.counts.parts if shared else 0),
        ("pinned_memory_objs_count", "Pins that exist", pins if shared else 0),
        ("pin_monitor_pinned_objects_count", "Pins of this process", own_pins),
        ("local_cpu_hot_cache_count", "Chunks of this model", len(backend.hot_cache)),
        ("local_cpu_keys_in_request_count", "Keys looked up and not touched yet", len(backend._requests)),
        ("kv_msg_queue_size", "Operations not sent yet", sender.qsize() if sender else 0),
    ):
        yield _gauge(f"lmcache:{name}", text, labels, value)
    yield _histogram(backend.lifespans, labels)


def _histogram(spans: Lifespans, labels: dict[str, str]) -> Metric:
    family = HistogramMetricFamily(
        "lmcache:request_cache_lifespan", "Age of chunks when used again, minutes", labels=list(labels)
    )
    counts = list(spans.counts)
    below, buckets = 0, []
    for bound, n in zip((*map(str, map(float, _LIFESPAN_MINUTES)), "+Inf"), counts, strict=True):
        below += n
        buckets.append((bound, below))
    family.add_metric(list(labels.values()), buckets, spans.total)
    return family


def collect(backends: Iterable[SharedCPUBackend]) -> Iterator[Metric]:
    """Families of several backends, each name once, each segment once."""
    merged: dict[str, Metric] = {}
    segments: set[str] = set()
    for backend in backends:
        try:
            stats = backend.cache.stats()
            families = list(_backend_metrics(backend, stats)) if backend.lmcache_metrics else []
        except ShmCacheError:
            continue  # closed, or damaged: the backend itself says so
        if backend.cache.name not in segments:
            segments.add(backend.cache.name)
            families += segment_metrics(backend.cache.name, stats)
        for family in families:
            there = merged.setdefault(family.name, family)
            if there is not family:
                there.samples += family.samples
    yield from merged.values()


class _Collector:
    def collect(self) -> Iterator[Metric]:
        with _lock:  # another thread may be making one
            backends = sorted(_backends, key=id)
        return collect(backends)

    def describe(self) -> Iterable[Metric]:
        """Nothing: else the registry would scrape once to learn the names."""
        return ()


def register(backend: SharedCPUBackend) -> None:
    """Make a backend's metrics part of the default registry, for as long as it lives."""
    global _registered
    with _lock:
        _backends.add(backend)
        if not _registered:
            REGISTRY.register(_Collector())
            _registered = True


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
