"""What engines really pass: ranks, shapes, tags, partial chunks, positions, streams. Each was wrong once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import shmcache
from shmcache._election import Election
from shmcache._requests import Found, RequestKeys
from shmcache.allocators import MemoryFormat, MixedMemoryAllocator
from shmcache.backend import SharedCPUBackend
from shmcache.config import EngineConfig, EngineMetadata
from shmcache.errors import ConfigurationError
from shmcache.keys import CacheEngineKey, LayerCacheEngineKey

KV = (2, 2, 16, 2, 8)  # layers, K and V, tokens, heads, head size
DTYPE = torch.bfloat16


@pytest.fixture
def start(name: str) -> Iterator[Callable[..., SharedCPUBackend]]:
    """start(world, local, worker, ...) -> a backend of that rank on the test's segment."""
    open_: list[SharedCPUBackend] = []

    def begin(
        world: int = 1, local: int = 1, worker: int = 0, gpu: int | None = None, kv: tuple[int, ...] = KV,
        extra: dict[str, Any] | None = None, cls: type = SharedCPUBackend, **settings: Any,
    ) -> SharedCPUBackend:  # fmt: skip
        config = EngineConfig(
            extra_config={"shmcache.segment": name, "shmcache.capacity": "4MiB", **(extra or {})}, **settings
        )
        metadata = EngineMetadata("m", world, local, worker, worker % local if gpu is None else gpu, DTYPE, kv)  # type: ignore[arg-type]
        metadata.chunk_size = kv[2]
        backend = cls(config, metadata, "cpu")
        open_.append(backend)
        return backend  # type: ignore[no-any-return]

    yield begin
    for backend in open_:
        backend.close()
    if any(s.name == name for s in shmcache.segments()):
        shmcache.unlink(name, force=True)


def key(chunk: Any, worker: int = 0, world: int = 1, **tags: Any) -> CacheEngineKey:
    return CacheEngineKey("m", world, worker, chunk, DTYPE, {f"lmcache.tag.{k}": v for k, v in tags.items()})


def put(backend: SharedCPUBackend, k: Any, fill: float = 1.0, fmt: Any = None) -> None:
    obj = backend.allocate(backend.metadata.get_shapes()[0], DTYPE, fmt)
    obj.tensor.fill_(fill)
    backend.batched_submit_put_task([k], [obj])
    obj.ref_count_down()


# ---- ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [0, 2, 4, 7])
def test_the_number_of_the_gpu_does_not_move_the_ranks_of_a_host(start: Callable[..., Any], gpu: int) -> None:
    """Data-parallel engines, and a second engine of a host, do not begin at GPU 0."""
    pair = [start(2, 2, worker, gpu + worker, extra={"shmcache.rank_agreement": True}) for worker in range(2)]
    for worker, backend in enumerate(pair):
        put(backend, key(1, worker, 2))
    assert [b.contains(key(1, worker, 2)) for worker, b in enumerate(pair)] == [True, True]


def test_each_host_of_a_world_keeps_its_own_ranks(start: Callable[..., Any]) -> None:
    second = [start(4, 2, worker) for worker in (2, 3)]
    for worker, backend in zip((2, 3), second, strict=True):
        put(backend, key(1, worker, 4))
    assert second[0].cache.stats().counts.complete == 1
    assert second[0].contains(key(1, 0, 4)) is False, "of the other host"
    with pytest.raises(ValueError, match="no rank of this host"):
        put(second[0], key(1, 0, 4))


def test_who_knows_the_ranks_better_may_say_so(start: Callable[..., Any]) -> None:
    """An engine that gives the world's size as that of each host."""
    extra = {"shmcache.local_ranks": 2, "shmcache.first_rank": 2}
    pair = [start(4, 4, worker, worker - 2, extra=extra) for worker in (2, 3)]
    for worker, backend in zip((2, 3), pair, strict=True):
        put(backend, key(1, worker, 4))
    assert pair[0].cache.stats().counts.complete == 1
    with pytest.raises(ConfigurationError, match="first_rank is 9"):
        start(4, 2, 0, extra={"shmcache.first_rank": 9})


# ---- what the bytes are -------------------------------------------------------------------------------------


def test_other_shapes_formats_and_revisions_of_a_name_do_not_meet(start: Callable[..., Any]) -> None:
    """The segment outlives the engine: the next one may have other weights under the same name."""
    put(start(), key(1))
    for other in (
        start(kv=(2, 2, 16, 4, 8)), start(extra={"shmcache.revision": "2"}), start(enable_blending=True),
    ):  # fmt: skip
        assert not other.contains(key(1)) and other.get_keys() == [] and len(other.hot_cache) == 0
    assert start().get_keys() == [key(1)]


@pytest.mark.parametrize("value", ["x" * 2000, "alice@z%1", "\ud800", "ü", 7, 1.5])
def test_tags_of_any_kind_are_told_apart(start: Callable[..., Any], value: Any) -> None:
    a, b = start(), start()
    put(a, key(1, tenant=value))
    assert b.contains(key(1, tenant=value)) and not b.contains(key(1)) and not b.contains(key(1, tenant="other"))
    assert not b.contains(key(1, tenant="alice", z=1)), "another pair of tags of the same letters"
    assert len(b.hot_cache) == 0 or b.get_keys() == [key(1, tenant=value)]


def test_more_tags_than_namespaces_are_misses_and_said(start: Callable[..., Any], caplog: Any) -> None:
    backend = start()
    for i in range(300):
        put(backend, key(i, tenant=i))
    stored = [i for i in range(300) if backend.contains(key(i, tenant=i))]
    assert stored == list(range(len(stored))) and 200 < len(stored) < 256
    assert any("not stored" in r.getMessage() for r in caplog.records)
    assert backend.cache.verify() == []


def test_a_namespace_that_another_process_makes_is_found_soon(start: Callable[..., Any]) -> None:
    a, b = start(), start()
    assert not b.contains(key(1, tenant="new"))
    put(a, key(1, tenant="new"))
    deadline = threading.Event()
    for _ in range(100):
        if b.contains(key(1, tenant="new")):
            break
        deadline.wait(0.05)
    else:
        pytest.fail("not found within 5 s")


# ---- objects that are not what they were allocated for ---------------------------------------------------------


def test_positions_for_blending_come_back_in_another_process_s_handle(start: Callable[..., Any]) -> None:
    settings = {"use_layerwise": True, "enable_blending": True}
    a, b = start(**settings), start(**settings)
    layers = key(1).split_layers(2)
    shape = torch.Size([2, 16, 16])
    objs = a.batched_allocate(shape, DTYPE, 2)
    assert objs[0].get_memory_format() is MemoryFormat.KV_2TD and objs[0].metadata.cached_positions is None
    objs[0].metadata.cached_positions = torch.arange(100, 116)
    a.batched_submit_put_task(layers[:1], objs[:1])
    a.submit_put_task(layers[1], objs[1])
    first, second = b.batched_get_blocking(layers)
    assert first.metadata.cached_positions.tolist() == list(range(100, 116))
    assert second.metadata.cached_positions is None
    assert first.tensor.shape == shape and first.get_size() == 2 * 16 * 16 * 2 == len(first.byte_array)


def test_a_chunk_that_was_made_shorter_is_stored_as_what_is_left(start: Callable[..., Any]) -> None:
    """As LMCache's remote connectors do with a chunk that was not full."""
    backend = start()
    obj = backend.allocate(torch.Size([2, 2, 16, 16]), DTYPE)
    obj.tensor.fill_(3)
    obj.raw_data = obj.raw_data[: obj.get_size() // 2]
    obj.metadata.shape = torch.Size([2, 2, 8, 16])
    backend.submit_put_task(key(1), obj)
    obj.ref_count_down()
    got = backend.get_blocking(key(1))
    assert got.tensor.shape == (2, 2, 8, 16) and float(got.tensor.float().mean()) == 3


def test_bytes_that_are_not_what_is_said_of_them_are_not_stored(start: Callable[..., Any], caplog: Any) -> None:
    backend = start()
    obj = backend.allocate(torch.Size([2, 2, 16, 16]), DTYPE)
    obj.raw_data = obj.raw_data[:100]
    backend.submit_put_task(key(1), obj)
    assert not backend.contains(key(1)) and "100 bytes are said to be" in caplog.text


def test_an_adopted_object_takes_a_page_too(start: Callable[..., Any]) -> None:
    backend = start(enable_p2p=True)
    page = backend.memory_allocator.page_bytes
    foreign = MixedMemoryAllocator(1 << 20).allocate(torch.Size([2, 2, 8, 16]), DTYPE)
    backend.submit_put_task(key(1), foreign)
    put(backend, key(2))
    found = [backend.get_blocking(key(i)) for i in (1, 2)]
    assert sorted(o.metadata.address for o in found) == [0, 1] and found[0].get_physical_size() == page


def test_layers_of_a_chunk_are_counted_one_by_one_when_removed(start: Callable[..., Any]) -> None:
    backend = start(use_layerwise=True)
    layers = key(1).split_layers(2)
    backend.batched_submit_put_task(layers, backend.batched_allocate(torch.Size([16, 2, 16]), DTYPE, 2))
    assert backend.batched_remove([*layers, LayerCacheEngineKey("m", 1, 0, 2, DTYPE, None, 0)]) == 2


def test_a_hash_of_numpy_is_an_int(start: Callable[..., Any]) -> None:
    import numpy as np

    backend = start()
    put(backend, key(np.int64(5)))
    assert backend.contains(key(5)) and backend.contains(key(np.int64(5)))


def test_a_pin_is_given_back_by_an_equal_key_of_another_class(start: Callable[..., Any]) -> None:
    class OtherKey(CacheEngineKey):
        pass

    backend = start()
    put(backend, key(1))
    assert backend.contains(key(1), pin=True)
    assert backend.unpin(OtherKey("m", 1, 0, 1, DTYPE)) is True and backend.cache.stats().counts.holds == 0


# ---- threads and forks -------------------------------------------------------------------------------------------


def test_a_child_forked_amid_a_lookup_does_not_wait_for_it(fork: Callable[..., Any]) -> None:
    requests = RequestKeys()

    def in_child(_: Any) -> None:
        requests.add(Found((1,), None))
        assert [found.keys for found in requests.take()[0]] == [(1,)]

    with requests._lock:
        assert fork(in_child).wait(20) == 0


def test_a_forked_child_is_not_elected(start: Callable[..., Any], fork: Callable[..., Any]) -> None:
    election = Election(start().cache._attached().mapping, "topic")

    def in_child(_: Any) -> None:
        assert election.won() is False

    assert fork(in_child).wait(20) == 0
    assert election.won() is True
    election.close()


def test_lookups_that_nobody_finishes_are_forgotten_at_last() -> None:
    requests = RequestKeys()
    for i in range(70_000):
        requests.add(Found((i,), None))
    assert len(requests) == 65536
    for i in range(2000):
        requests.add(Found((i,), None), f"lookup {i}")
    assert len(requests.take("lookup 0")) == 0 and len(requests.take("lookup 1999")) == 1


# ---- the plug-in ----------------------------------------------------------------------------------------------------


@pytest.fixture
def plugin() -> Any:
    return pytest.importorskip("shmcache.integrations.lmcache", reason="LMCache is not installed")


def test_a_layer_that_misses_a_chunk_is_an_error_and_keeps_nothing(start: Callable[..., Any], plugin: Any) -> None:
    """LMCache's connectors would take a shorter list for a complete one."""
    backend = start(use_layerwise=True, cls=plugin.ShmLocalCPUBackend)
    for chunk in (1, 2):
        layers = key(chunk).split_layers(2)
        objs = backend.batched_allocate(torch.Size([16, 2, 16]), DTYPE, 2)
        backend.batched_submit_put_task(layers, objs)
        for obj in objs:
            obj.ref_count_down()
    first, second = (list(layer) for layer in zip(*(key(c).split_layers(2) for c in (1, 2)), strict=True))
    got = asyncio.run(backend.batched_get_non_blocking("fake_lookup_id", first))
    assert len(got) == 2
    for obj in got:
        obj.ref_count_down()
    backend.remove(first[1])
    with pytest.raises(KeyError, match="1 chunks went"):
        asyncio.run(backend.batched_get_non_blocking("fake_lookup_id", second))
    (left,) = asyncio.run(backend.batched_get_non_blocking("a real lookup", second))
    left.ref_count_down()
    assert backend.cache.stats().counts.holds == 0


def test_copies_are_finished_before_a_put_and_before_a_release(
    start: Callable[..., Any], plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the stream: another process sees neither unfinished bytes nor a chunk that is still read."""
    done: list[str] = []
    running = {"copy": True}

    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            return not running["copy"]

        def synchronize(self) -> None:
            running["copy"] = False
            done.append("synchronised")

    backend = start(cls=plugin.ShmLocalCPUBackend)
    other = start()
    monkeypatch.setattr(plugin, "_HAS_STREAMS", True)
    objects, backends = plugin.ShmMemoryObj, plugin.ShmLocalCPUBackend
    monkeypatch.setattr(objects, "ref_count_down", objects.count_down_behind_copies)  # as with a torch that has streams
    monkeypatch.setattr(backends, "submit_put_task", backends.put_behind_copies)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    put(backend, key(1))
    assert done == ["synchronised"] and other.contains(key(1))
    obj = backend.get_blocking(key(1))
    running["copy"] = True
    obj.ref_count_down()
    assert not obj.is_valid() and backend.cache.stats().counts.holds == 1, "the device is still reading"
    assert backend.cache.default is not None and other.clear() == 0
    running["copy"] = False
    for _ in range(200):
        if backend.cache.stats().counts.holds == 0:
            break
        threading.Event().wait(0.02)
    assert backend.cache.stats().counts.holds == 0 and other.clear() == 16


@pytest.mark.parametrize("tags", [{"a": float("nan")}, {"a": "x" * 5000}, {"a": "\ud800"}])
def test_no_tag_of_a_user_reaches_the_engine_as_an_error(start: Callable[..., Any], plugin: Any, tags: Any) -> None:
    backend = start(cls=plugin.ShmLocalCPUBackend)
    put(backend, key(1, **tags))
    backend.contains(key(1, **tags))
    assert backend.batched_contains([key(1, **tags)], pin=True) in (0, 1)
    put(backend, key(1, worker=5))  # of no rank of this host
    assert not backend.contains(key(1, worker=5))
    with pytest.raises(ValueError):
        backend.allocate(torch.Size([0]), DTYPE)


def test_a_scrape_after_the_end_of_a_backend_is_a_scrape(start: Callable[..., Any], plugin: Any) -> None:
    from prometheus_client import generate_latest

    backend = start(cls=plugin.ShmLocalCPUBackend)
    assert b"lmcache:local_cpu_hot_cache_count" in generate_latest()
    backend.close()
    assert b"lmcache:local_cpu_hot_cache_count" in generate_latest()


def test_lmcache_s_own_bytes_are_stored(start: Callable[..., Any], plugin: Any) -> None:
    from lmcache.v1.memory_management import BytesBufferMemoryObj

    backend = start(cls=plugin.ShmLocalCPUBackend)
    backend.submit_put_task(key(1), BytesBufferMemoryObj(b"compressed"))
    got = backend.get_blocking(key(1))
    assert bytes(got.byte_array) == b"compressed" and got.metadata.fmt.name == "BINARY_BUFFER"
