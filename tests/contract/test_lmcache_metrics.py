"""Metrics: LMCache's names with their meaning, sums over ranks that are right, and a scrape that takes no lock."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import prometheus_client
import pytest
from contract_kits import BF16, BYTES, MIB, SHAPE, Kit, Sink, eventually
from prometheus_client.parser import text_string_to_metric_families

import shmcache
from shmcache.backend import SharedCPUBackend

COUNTERS = ["local_cpu_evict_count", "local_cpu_evict_keys_count", "local_cpu_evict_failed_count", "forced_unpin_count"]
GAUGES = [
    "local_cache_usage", "active_memory_objs_count", "pinned_memory_objs_count", "local_cpu_hot_cache_count",
    "local_cpu_keys_in_request_count", "kv_msg_queue_size", "pin_monitor_pinned_objects_count",
]  # fmt: skip
SHARED = [*COUNTERS, "local_cache_usage", "active_memory_objs_count", "pinned_memory_objs_count"]


class Ranks:
    """Backends of the ranks of one host on one segment, and what a scrape says of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kit = Kit("", name)
        self.all: list[Any] = []

    def start(self, n: int, **settings: Any) -> list[Any]:
        for rank in range(n):
            config = self.kit.config(
                max_local_cpu_size=f"{1024 // n}KiB", extra_config={"shm_name": self.name}, **settings
            )
            meta = self.kit.metadata(
                world_size=n, local_world_size=n, worker_id=rank, local_worker_id=rank, model_name=self.name,
                role="worker",
            )  # fmt: skip
            self.all.append(SharedCPUBackend(config, meta, "cpu", Sink()))
        return self.all

    def key(self, chunk: int, worker: int = 0) -> Any:
        return self.kit.key(chunk, worker, world_size=len(self.all), model_name=self.name)

    def put(self, chunk: int, worker: int = 0) -> None:
        obj = self.all[worker].allocate(SHAPE, BF16, busy_loop=False)
        self.all[worker].submit_put_task(self.key(chunk, worker), obj)
        obj.ref_count_down()

    def scrape(self) -> dict[str, dict[str, float]]:
        """Sample name -> worker id (or segment) -> value, of these backends."""
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(prometheus_client.generate_latest().decode()):
            for sample in family.samples:
                if sample.labels.get("model_name") == self.name and "le" not in sample.labels:
                    found.setdefault(sample.name, {})[sample.labels["worker_id"]] = sample.value
                if sample.labels.get("segment") == self.name:
                    kind = sample.labels.get("kind", "")
                    assert kind not in found.get(sample.name, {}), "a segment is told once"
                    found.setdefault(sample.name, {})[kind] = sample.value
        return found

    def sums(self) -> dict[str, float]:
        return {name: sum(values.values()) for name, values in self.scrape().items()}


@pytest.fixture
def ranks(name: str) -> Iterator[Ranks]:
    ranks = Ranks(name)
    yield ranks
    for backend in ranks.all:
        backend.close()
    shmcache.unlink(name, force=True)


def test_a_scrape_has_lmcaches_names(ranks: Ranks) -> None:
    ranks.start(1)
    ranks.put(1)
    found = ranks.scrape()
    for counter in COUNTERS:
        assert f"lmcache:{counter}_total" in found
    for gauge in GAUGES:
        assert f"lmcache:{gauge}" in found
    assert {"lmcache:request_cache_lifespan_sum", "lmcache:request_cache_lifespan_count"} <= set(found)
    assert "shmcache_stores_total" in found and "shmcache_bytes" in found
    text = prometheus_client.generate_latest().decode()
    labels = f'model_name="{ranks.name}",role="worker",served_model_name="",worker_id="0"'
    line = next(row for row in text.splitlines() if row.startswith("lmcache:local_cache_usage{") and ranks.name in row)
    assert sorted(re.findall(r'\w+="[^"]*"', line)) == sorted(labels.split(","))


def test_the_names_and_kinds_are_those_that_lmcache_has() -> None:
    observability = pytest.importorskip("lmcache.observability")
    source = inspect.getsource(observability)
    for kind, names in (("counter", COUNTERS), ("gauge", GAUGES), ("histogram", ["request_cache_lifespan"])):
        for metric in names:
            at = source.index(f'"lmcache:{metric}"')
            assert kind in source[max(0, at - 200) : at].lower(), metric


def test_sums_over_ranks_are_right(ranks: Ranks) -> None:
    """What the ranks share is told once; what is a process's own by each."""
    zero, one = ranks.start(2)
    for chunk in range(3):
        ranks.put(chunk, 0)
        ranks.put(chunk, 1)
    assert zero.pin(ranks.key(0, 0)) and one.pin(ranks.key(1, 1)) and one.contains(ranks.key(2, 1), pin=True)
    sums, stats = ranks.sums(), zero.cache.stats()
    assert sums["lmcache:local_cache_usage"] == stats.bytes.used == 6 * BYTES
    assert sums["lmcache:active_memory_objs_count"] == stats.counts.parts == 6
    assert sums["lmcache:pinned_memory_objs_count"] == 3
    own = ranks.scrape()["lmcache:pin_monitor_pinned_objects_count"]
    assert own == {"0": 1, "1": 2}
    assert ranks.scrape()["lmcache:local_cpu_keys_in_request_count"] == {"0": 0, "1": 1}
    assert ranks.scrape()["lmcache:local_cpu_hot_cache_count"] == {"0": 3, "1": 3}
    assert ranks.scrape()["shmcache_bytes"]["capacity"] == MIB
    assert sums["shmcache_stores_total"] == 3


def test_the_first_rank_tells_whatever_gpu_it_has(name: str) -> None:
    """Engines put the number of the GPU into `local_worker_id`: of ranks 0 and 1 on GPUs 6 and 7 one tells."""
    kit, ranks = Kit("", name), Ranks(name)
    for rank in (0, 1):
        config = kit.config(max_local_cpu_size="512KiB", extra_config={"shm_name": name})
        meta = kit.metadata(world_size=2, local_world_size=2, worker_id=rank, local_worker_id=6 + rank, model_name=name)
        ranks.all.append(SharedCPUBackend(config, meta, "cpu"))
    ranks.put(1)
    assert ranks.sums()["lmcache:local_cache_usage"] == BYTES
    for backend in ranks.all:
        backend.close()
    shmcache.unlink(name)


def test_evictions_failures_and_leases_that_ended_are_counted(ranks: Ranks) -> None:
    zero, one = ranks.start(2, pin_timeout_sec=0.05)
    n = MIB // BYTES // 2
    for chunk in range(n + 2):
        ranks.put(chunk, 0)
        ranks.put(chunk, 1)
    sums = ranks.sums()
    assert sums["lmcache:local_cpu_evict_count_total"] == sums["lmcache:local_cpu_evict_keys_count_total"] == 2
    assert sums["shmcache_evictions_total"] == 2 == zero.cache.stats().evictions
    held = [one.get_blocking(key) for key in one.get_keys()]
    assert zero.allocate(SHAPE, BF16, busy_loop=False) is None
    assert ranks.sums()["lmcache:local_cpu_evict_failed_count_total"] == zero.cache.stats().eviction_failures > 0
    for obj in held:
        obj.ref_count_down()
    assert zero.pin(zero.get_keys()[0])

    def ended() -> bool:
        zero.batched_allocate(SHAPE, BF16, 2 * n, busy_loop=False)
        return ranks.sums()["lmcache:forced_unpin_count_total"] == 1

    assert eventually(ended)


def test_a_scrape_takes_no_lock(ranks: Ranks) -> None:
    zero, _one = ranks.start(2)
    for chunk in range(3):
        ranks.put(chunk)
    zero.contains(ranks.key(0), pin=True)
    zero.batched_msg_sender.flush()
    before = zero.cache.stats().lock.acquisitions
    for _ in range(3):
        ranks.scrape()
    assert zero.cache.stats().lock.acquisitions == before


def test_ages_of_chunks_that_are_used_again(ranks: Ranks) -> None:
    (zero,) = ranks.start(1)
    for chunk in range(4):
        ranks.put(chunk)
    assert ranks.sums()["lmcache:request_cache_lifespan_count"] == 0
    for chunk in range(3):
        zero.contains(ranks.key(chunk), pin=True)
    zero.touch_cache()
    assert ranks.sums()["lmcache:request_cache_lifespan_count"] == 3
    assert 0 <= ranks.sums()["lmcache:request_cache_lifespan_sum"] < 1


def test_operations_that_wait_are_counted(ranks: Ranks) -> None:
    (zero,) = ranks.start(1)
    zero.lmcache_worker._fail = 1_000_000
    ranks.put(1)
    assert eventually(lambda: ranks.sums()["lmcache:kv_msg_queue_size"] == 1)
    zero.lmcache_worker._fail = 0
    assert eventually(lambda: ranks.sums()["lmcache:kv_msg_queue_size"] == 0)


def test_a_closed_backend_is_not_told_and_breaks_nothing(ranks: Ranks) -> None:
    zero, one = ranks.start(2)
    ranks.put(1)
    zero.close()
    assert ranks.scrape()["lmcache:local_cpu_hot_cache_count"] == {"1": 1}
    one.close()
    assert ranks.scrape() == {}


def test_private_memory_is_told_too(name: str) -> None:
    kit = Kit("private", name)
    meta = kit.metadata(world_size=1, local_world_size=1, model_name=name)
    backend = kit.backend(metadata=meta)
    obj = backend.allocate(SHAPE, BF16)
    ranks = Ranks(name)
    assert ranks.sums()["lmcache:local_cache_usage"] == BYTES
    obj.ref_count_down()
    assert ranks.sums()["lmcache:local_cache_usage"] == 0
    kit.close()


def test_the_plug_in_feeds_lmcaches_monitor(request: pytest.FixtureRequest, name: str) -> None:
    """The first rank of the host tells what the segment has; others nothing of it."""
    pytest.importorskip("lmcache")
    request.getfixturevalue("tame")
    from contract_kits import PluginKit

    kit = PluginKit("plugin", name)
    backends = [
        kit.backend(metadata=kit.metadata(world_size=2, local_world_size=2, worker_id=r, local_worker_id=r))
        for r in (0, 1)
    ]
    for rank, backend in enumerate(backends):
        backend.stats_monitor = MagicMock()
        obj = backend.allocate(SHAPE, BF16)
        backend.batched_submit_put_task([kit.key(1, rank, world_size=2)], [obj])
        obj.ref_count_down()
    told = backends[0].stats_monitor
    told.update_local_cache_usage.assert_called_with(BYTES)
    told.update_active_memory_objs_count.assert_called_with(1)
    told.update_local_cpu_evict_metrics.assert_not_called()
    assert backends[1].stats_monitor.method_calls == []
    n = MIB // BYTES
    backends[0].batched_allocate(SHAPE, BF16, n, busy_loop=False)
    backends[0]._feed_at = 0
    backends[0].batched_submit_put_task([], [])
    told.update_local_cpu_evict_metrics.assert_called_once_with(1)
    kit.close()
