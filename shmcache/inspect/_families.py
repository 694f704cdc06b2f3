"""The one table of Prometheus metrics that `metrics` serves: names, help texts, and where the numbers come from.

Counters are of the segment's life and outlive the processes that raised them. Every metric has the
label `segment`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .._metric_names import BYTES, COUNTERS, COUNTS, LOCK_COUNTERS, LONGEST_HOLD
from .._space import room
from ._keytext import printable
from ._reader import Reader

if TYPE_CHECKING:
    from prometheus_client.core import Metric

NAMESPACE_COUNTERS = {
    "hits": "Hits of a namespace.",
    "misses": "Misses of a namespace.",
    "stores": "Chunks of a namespace that became complete.",
    "evictions": "Chunks of a namespace that were evicted.",
}


def families(readers: dict[str, Reader | None]) -> Iterator[Metric]:
    """All metrics of these segments; None stands for one that cannot be read."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    there = {name: reader for name, reader in readers.items() if reader is not None}
    stats = {name: reader.stats() for name, reader in there.items()}

    def counter(name: str, text: str, values: Mapping[Any, Any], labels: tuple[str, ...]) -> Metric:
        family = CounterMetricFamily(f"shmcache_{name}", text, labels=("segment", *labels))
        for key, value in values.items():
            family.add_metric(key, value)
        return family

    def gauge(name: str, text: str, values: Mapping[Any, Any], labels: tuple[str, ...] = ()) -> Metric:
        family = GaugeMetricFamily(f"shmcache_{name}", text, labels=("segment", *labels))
        for key, value in values.items():
            family.add_metric(key, value)
        return family

    states = {(n, r.state if r is not None else "unreadable"): 1 for n, r in readers.items()}
    yield gauge("state", "1 for the state it is in.", states, ("state",))
    for name, text in COUNTERS.items():
        yield counter(name, text, {(n,): s[name] for n, s in stats.items()}, ())
    for name, text in LOCK_COUNTERS.items():
        yield counter(f"lock_{name}", text, {(n,): s["lock"][name] for n, s in stats.items()}, ())
    longest = {(n,): s["lock"]["max_hold_ns"] / 1e9 for n, s in stats.items()}
    yield gauge("lock_max_hold_seconds", LONGEST_HOLD, longest)
    yield gauge("lock_holder_pid", "Who is inside the lock; 0: nobody.", {(n,): r.lock().pid for n, r in there.items()})
    yield gauge("bytes", BYTES, {(n, what): v for n, s in stats.items() for what, v in s["bytes"].items()}, ("kind",))
    counts = {(n, w): v for n, s in stats.items() for w, v in s["counts"].items() if w != "attachments"}
    yield gauge("entries", COUNTS, counts, ("kind",))
    free = {(n,): room().free for n in there}
    yield gauge("room_bytes", "What /dev/shm, or the memory cgroup, still has for anybody.", free)
    yield gauge("attachments", "Attachments: live, dead.", _attachments(there), ("life",))
    yield gauge("pinning", "Living processes by what they got of pinned memory.", _pinning(there), ("pinning",))
    yield from _namespaces(there, counter, gauge)


def _attachments(readers: dict[str, Reader]) -> dict[tuple[str, str], int]:
    out = {}
    for name, reader in readers.items():
        slots = reader.slots()
        dead = sum(s.dead for s in slots)
        out[name, "live"], out[name, "dead"] = len(slots) - dead, dead
    return out


def _pinning(readers: dict[str, Reader]) -> dict[tuple[str, str], int]:
    out = {}
    for name, reader in readers.items():
        states = {s.pid: s.pin_state for s in reader.slots() if not s.dead}  # handles of a process share it
        for state in ("off", "running", "done", "failed"):
            out[name, state] = sum(s == state for s in states.values())
    return out


def _namespaces(readers: dict[str, Reader], counter: Any, gauge: Any) -> Iterator[Metric]:
    spaces = {(name, printable(n.name)): n for name, r in readers.items() for n in r.namespaces().values()}
    for what, text in NAMESPACE_COUNTERS.items():
        yield counter(f"namespace_{what}", text, {k: getattr(n, what) for k, n in spaces.items()}, ("namespace",))
    size = {k: n.bytes for k, n in spaces.items()}
    yield gauge("namespace_bytes", "Bytes of a namespace's chunks.", size, ("namespace",))
    complete = {k: n.complete for k, n in spaces.items()}
    yield gauge("namespace_complete_chunks", "Complete chunks of a namespace.", complete, ("namespace",))
