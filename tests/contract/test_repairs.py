"""Where LMCache's backend misbehaves and ours does not: each row of the contract's table of repairs."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_kits import BF16, BYTES, MIB, SHAPE, Kit, SegmentKit, Sink, eventually, in_threads

import shmcache
from shmcache import allocators, errors
from shmcache._core import ffi
from shmcache.backend import SharedCPUBackend

Fork = Callable[[Callable[[Any], object]], Any]
N = MIB // BYTES  # objects that fit


@pytest.fixture
def kit(name: str) -> Iterator[Kit]:
    """Ours, over private memory."""
    kit = Kit("private", name)
    yield kit
    kit.close()


@pytest.fixture
def shared(name: str) -> Iterator[SegmentKit]:
    """Ours, over a segment."""
    kit = SegmentKit("segment", name)
    yield kit
    kit.close()


def keys_there(backend: Any) -> list[int]:
    return sorted(key.chunk_hash for key in backend.get_keys())


# ---- allocate(busy_loop=True) never ends --------------------------------------------------------------


@pytest.mark.parametrize("use_hot", [True, False])
def test_a_busy_loop_ends_after_blocking_timeout_secs(kit: Kit, use_hot: bool) -> None:
    backend = kit.backend({"blocking_timeout_secs": 0.2, "local_cpu": use_hot})
    held = backend.batched_allocate(SHAPE, BF16, N)
    begun = time.monotonic()
    assert backend.allocate(SHAPE, BF16) is None
    assert backend.batched_allocate(SHAPE, BF16, 3) is None
    assert 0.39 < time.monotonic() - begun < 20
    assert backend.allocate(SHAPE, BF16, eviction=False) is None
    held.pop().ref_count_down()
    assert backend.allocate(SHAPE, BF16) is not None


def test_a_busy_loop_is_woken_by_a_free_in_another_process(shared: SegmentKit, fork: Fork) -> None:
    backend = shared.backend({"blocking_timeout_secs": 60})
    waits = backend.cache.stats().waits

    def holder(child: Any) -> None:
        with shmcache.attach(shared.name) as cache, cache.allocate(SHAPE, BF16):
            child.tell("holding")
            child.await_parent()
            assert eventually(lambda: cache.stats().waits > waits, 20)
        child.tell("free")

    child = fork(holder)
    assert child.listen() == "holding"
    held = backend.batched_allocate(SHAPE, BF16, N - 1)
    child.go()
    obj = backend.allocate(SHAPE, BF16)
    assert obj is not None
    assert child.listen() == "free" and child.wait() == 0
    for one in (*held, obj):
        one.ref_count_down()


def test_a_busy_loop_is_woken_by_the_death_of_a_holder(shared: SegmentKit, fork: Fork) -> None:
    backend = shared.backend({"blocking_timeout_secs": 60})

    def holder(child: Any) -> None:
        cache = shmcache.attach(shared.name)
        held = cache.allocate(SHAPE, BF16)
        child.tell("holding")
        time.sleep(60)
        del held

    child = fork(holder)
    assert child.listen() == "holding"
    held = backend.batched_allocate(SHAPE, BF16, N - 1)
    threading.Timer(0.2, child.kill).start()
    assert backend.allocate(SHAPE, BF16) is not None
    assert child.wait() == -signal.SIGKILL
    for one in held:
        one.ref_count_down()


# ---- a request that can never fit ---------------------------------------------------------------------


@pytest.mark.parametrize("busy_loop", [True, False])
def test_a_request_that_can_never_fit_evicts_nothing(kit: Kit, busy_loop: bool) -> None:
    backend = kit.backend({"blocking_timeout_secs": 60})
    kit.fill(backend, list(range(N)))
    begun = time.monotonic()
    assert backend.allocate(torch.Size((2 * MIB,)), torch.uint8, busy_loop=busy_loop) is None
    assert backend.batched_allocate(SHAPE, BF16, N + 1, busy_loop=busy_loop) is None
    assert time.monotonic() - begun < 30
    assert keys_there(backend) == list(range(N)) and backend.cache.stats().evictions == 0


# ---- batched_allocate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, 1, 2, 3, 7, N])
def test_a_batch_of_any_size_evicts_what_it_needs(kit: Kit, batch: int) -> None:
    """Among chunks of layers and of no layers; chunks go whole."""
    backend = kit.backend({"extra_config": {"shmcache.num_layers": 2}})
    kit.fill(backend, list(range(N // 2)), world_size=1)
    for chunk in range(100, 100 + N // 4):
        for layer in kit.key(chunk, world_size=1).split_layers(2):
            obj = kit.obj(backend)
            backend.submit_put_task(layer, obj)
            obj.ref_count_down()
    assert backend.cache.stats().bytes.free == 0
    objs = backend.batched_allocate(SHAPE, BF16, batch, busy_loop=False)
    assert objs is not None and len(objs) == batch
    for chunk in range(100, 100 + N // 4):
        there = [backend.contains(layer) for layer in kit.key(chunk, world_size=1).split_layers(2)]
        assert there[0] == there[1], "a chunk goes whole"
    for obj in objs:
        obj.ref_count_down()
    assert backend.memory_allocator.memcheck()


def test_a_negative_batch_is_none(kit: Kit) -> None:
    assert kit.backend().batched_allocate(SHAPE, BF16, -1) is None


def test_a_chunk_with_one_pinned_layer_stays_whole(kit: Kit) -> None:
    backend = kit.backend({"extra_config": {"shmcache.num_layers": 4}})
    layers = [kit.key(chunk, world_size=1).split_layers(4) for chunk in range(N // 4)]
    for key in (key for chunk in layers for key in chunk):
        obj = kit.obj(backend)
        backend.submit_put_task(key, obj)
        obj.ref_count_down()
    assert backend.pin(layers[0][2])
    held = backend.get_blocking(layers[1][3])
    objs = backend.batched_allocate(SHAPE, BF16, N - 8, busy_loop=False)
    assert objs is not None and backend.allocate(SHAPE, BF16, busy_loop=False) is None
    assert all(backend.contains(key) for chunk in layers[:2] for key in chunk)
    held.ref_count_down()


@pytest.mark.parametrize("kind", ["tensor", "host", "pages", "lazy"])
def test_any_allocator_of_one_pool_will_do(kit: Kit, kind: str) -> None:
    made: dict[str, Callable[[], Any]] = {
        "tensor": lambda: allocators.TensorMemoryAllocator(torch.empty(MIB, dtype=torch.uint8)),
        "host": lambda: allocators.HostMemoryAllocator(MIB),
        "pages": lambda: allocators.HostMemoryAllocator(
            MIB, use_paging=True, shapes=[SHAPE], dtypes=[BF16], fmt=allocators.MemoryFormat.KV_2LTD
        ),
        "lazy": lambda: allocators.LazyMemoryAllocator(0, MIB),
    }
    if kind == "pages":
        with pytest.raises(TypeError, match="private and paged"):
            kit.backend(allocator=made[kind]())
        return
    backend = kit.backend(allocator=made[kind]())
    kit.fill(backend, list(range(N)))
    objs = backend.batched_allocate(SHAPE, BF16, 5, busy_loop=False)
    assert objs is not None and len(objs) == 5
    assert keys_there(backend) == list(range(5, N))
    assert backend.memory_allocator.memcheck()


@pytest.mark.parametrize("allocator", [object(), allocators.BufferAllocator(), allocators.PagedCpuGpuMemoryAllocator()])
def test_what_has_no_one_pool_is_refused(kit: Kit, allocator: object) -> None:
    with pytest.raises(TypeError, match="memory_allocator is"):
        SharedCPUBackend(kit.config(), None, "cpu", None, allocator)


# ---- touch_cache --------------------------------------------------------------------------------------


def test_a_key_that_was_removed_after_it_was_pinned_is_skipped_by_touch(our_kit: Kit) -> None:
    backend = our_kit.backend()
    our_kit.fill(backend, [1, 2, 3])
    for chunk in (1, 2):
        assert backend.contains(our_kit.key(chunk), pin=True)
    assert backend.remove(our_kit.key(2))
    backend.touch_cache()
    assert [k.chunk_hash for k in backend.get_keys()] == [3, 1]
    backend.touch_cache()
    assert backend.keys_in_request == []


def test_interleaved_lookups_are_kept_apart_by_id(our_kit: Kit) -> None:
    """Prefixes a0 a1 and b0 b1, looked up piece by piece in turns."""
    backend = our_kit.backend()
    our_kit.fill(backend, [10, 11, 20, 21, 30])

    async def look() -> None:
        for lookup, chunk in (("a", 10), ("b", 20), ("a", 11), ("b", 21)):
            assert await backend.batched_async_contains(lookup, [our_kit.key(chunk)], pin=True) == 1

    asyncio.run(look())
    backend.touch_cache("b")
    assert [k.chunk_hash for k in backend.get_keys()] == [10, 11, 30, 21, 20]
    assert [k.chunk_hash for k in backend.keys_in_request] == [10, 11]
    backend.touch_cache("a")
    assert [k.chunk_hash for k in backend.get_keys()] == [30, 21, 20, 11, 10]
    assert backend.keys_in_request == []


def test_interleaved_lookups_are_kept_apart_by_thread(our_kit: Kit) -> None:
    backend = our_kit.backend()
    our_kit.fill(backend, [10, 11, 20, 21])
    turn = threading.Barrier(2)

    def look(chunks: list[int], first: bool) -> None:
        for chunk in chunks:
            turn.wait(20)
            assert backend.contains(our_kit.key(chunk), pin=True)
            turn.wait(20)
        if not first:
            turn.wait(20)
        backend.touch_cache()
        if first:
            turn.wait(20)

    assert in_threads(lambda: look([10, 11], True), lambda: look([20, 21], False)) == []
    assert [k.chunk_hash for k in backend.get_keys()] == [11, 10, 21, 20]


def test_a_lookup_that_was_given_up_is_forgotten(kit: Kit) -> None:
    backend = kit.backend()
    kit.fill(backend, [1, 2])
    asyncio.run(backend.batched_async_contains("gone", [kit.key(1)], pin=True))
    backend.cancel_request("gone")
    backend.touch_cache()
    assert [k.chunk_hash for k in backend.get_keys()] == [1, 2] and backend.keys_in_request == []


def test_lookups_that_nobody_ends_do_not_pile_up(kit: Kit) -> None:
    backend = kit.backend()
    kit.fill(backend, [1])

    async def look() -> None:
        for i in range(3000):
            await backend.batched_async_contains(f"lookup-{i}", [kit.key(1)], pin=True)
            backend.unpin(kit.key(1))

    asyncio.run(look())
    assert len(backend.keys_in_request) <= 1024 and len(backend._requests._threads) <= 1024


# ---- batched_get_non_blocking ---------------------------------------------------------------------------


def test_a_get_with_a_miss_leaks_no_reference(our_kit: Kit) -> None:
    backend = our_kit.backend()
    our_kit.fill(backend, [0, 1, 3])
    before = backend.cache.stats().counts.holds
    for keys in ([0, 1, 2, 3], [9], [2, 0, 1], [3, 1, 0]):
        found = asyncio.run(backend.batched_get_non_blocking("x", [our_kit.key(k) for k in keys]))
        assert len(found) == next((i for i, k in enumerate(keys) if k not in (0, 1, 3)), len(keys))
        for obj, chunk in zip(found, keys, strict=False):
            assert float(obj.tensor.max()) == chunk
            obj.ref_count_down()
        assert backend.cache.stats().counts.holds == before
    assert asyncio.run(backend.batched_get_non_blocking("x", [])) == []


# ---- LFU candidates -------------------------------------------------------------------------------------


def test_asking_lfu_for_candidates_changes_nothing(name: str) -> None:
    allocator = allocators.MixedMemoryAllocator(MIB, cache=shmcache.create(name, MIB, policy="lfu"))
    kit = Kit("segment", name)
    backend = kit.backend({"cache_policy": "LFU"}, allocator=allocator)
    kit.fill(backend, [1, 2, 3], world_size=1)
    keys = [kit.key(i, world_size=1) for i in (1, 2, 3)]
    for _ in range(3):
        assert backend.cache_policy.get_evict_candidates(backend.hot_cache, 2) == keys[:2]
    assert backend.contains(keys[0], pin=True)
    backend.touch_cache()
    backend.unpin(keys[0])
    assert backend.cache_policy.get_evict_candidates(backend.hot_cache, 3) == [keys[1], keys[2], keys[0]]
    kit.close()
    shmcache.unlink(name)


# ---- double free ----------------------------------------------------------------------------------------


def test_a_double_free_never_makes_two_owners(our_kit: Kit) -> None:
    backend = our_kit.backend()
    a = our_kit.obj(backend)
    offset = a.shm_offset
    a.ref_count_down()
    b = our_kit.obj(backend, 1)
    assert b.shm_offset == offset
    if our_kit.kind == "plugin":
        a.ref_count_down()  # logged
    else:
        with pytest.raises(errors.StaleHandleError):
            a.ref_count_down()
    backend.memory_allocator.free(a)
    backend.memory_allocator.batched_free([a, a])
    c = our_kit.obj(backend, 2)
    assert c.shm_offset != b.shm_offset and float(b.tensor.max()) == 1
    assert b.get_ref_count() == 1 and backend.memory_allocator.memcheck()


def test_freeing_twice_through_the_allocator_is_logged(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    backend = kit.backend()
    obj = kit.obj(backend)
    backend.memory_allocator.free(obj)
    with caplog.at_level(logging.WARNING, "shmcache"):
        backend.memory_allocator.free(obj)
    assert "freed before" in caplog.text


def test_memcheck_finds_an_extent_that_overlaps_another() -> None:
    """The second object's first granule is moved into the first object, in whichever word of the tables it stands."""
    allocator = allocators.MixedMemoryAllocator(MIB)
    a, b = (allocator.allocate(torch.Size((n * 4096,)), torch.uint8) for n in (61, 5))
    assert a.shm_offset == 0 and b.shm_offset == 61 * 4096 and allocator.memcheck()
    mapping = allocator.cache._attached().mapping
    words = memoryview(ffi.buffer(mapping.base, mapping.size)).cast("B").cast("I")
    found = False
    for at in [i for i, word in enumerate(words) if word == 61]:
        words[at] = 60
        found = found or not allocator.memcheck()
        words[at] = 61
        if found:
            break
    assert found


def test_an_object_of_another_allocator_is_not_freed(kit: Kit) -> None:
    one, two = kit.backend(), kit.backend()
    obj = kit.obj(one)
    with pytest.raises(ValueError, match="not of this"):
        two.memory_allocator.free(obj)
    assert obj.is_valid()


# ---- tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [("KV_2LTD", (2, 4, 16, 8)), ("KV_T2D", (16, 2, 8)), ("KV_2TD", (2, 16, 8)), ("KV_MLA_FMT", (1, 4, 16, 8)),
     ("EC_TD", (16, 8)), ("HS_TD", (16, 8))],
)  # fmt: skip
def test_tokens_are_counted_where_the_layout_has_them(kit: Kit, fmt: str, shape: tuple[int, ...]) -> None:
    backend = kit.backend()
    obj = backend.allocate(torch.Size(shape), BF16, kit.formats[fmt])
    assert obj.get_num_tokens() == 16
    backend.submit_put_task(kit.key(1), obj)
    obj.ref_count_down()
    assert backend.clear() == 16


# ---- pins ---------------------------------------------------------------------------------------------------


def test_a_pin_has_an_owner(shared: SegmentKit) -> None:
    """Two handles, as of two processes: neither can spend, or remove, the other's pin."""
    one, two = shared.backend(), shared.backend()
    (obj,) = shared.fill(one, [1], keep=True)
    key = shared.key(1)
    assert one.pin(key)
    assert two.unpin(key) is False and obj.is_pinned
    assert two.pin(key) and two.unpin(key) and obj.is_pinned
    assert two.remove(key) and obj.is_pinned, "remove takes the caller's own pins"
    assert one.unpin(key) is True and not obj.is_pinned


def test_a_pin_ends_with_its_own_lease(shared: SegmentKit) -> None:
    """`pin_timeout_sec` of one does not end the pins of another."""
    short, long = shared.backend({"pin_timeout_sec": 0.1}), shared.backend({"pin_timeout_sec": 600})
    shared.fill(short, list(range(N)))
    for chunk in range(N):
        assert short.contains(shared.key(chunk), pin=True)
    assert long.pin(shared.key(0))
    assert eventually(lambda: short.batched_allocate(SHAPE, BF16, N - 1, busy_loop=False) is not None, 20)
    assert keys_there(long) == [0]
    assert short.unpin(shared.key(0)) is False, "its lease has ended"
    assert long.unpin(shared.key(0)) is True
    assert short.cache.stats().leases_ended >= N


@pytest.mark.parametrize("seconds", [float("inf"), 1e12])
def test_a_pin_may_have_no_end(kit: Kit, seconds: float) -> None:
    backend = kit.backend({"pin_timeout_sec": seconds, "blocking_timeout_secs": float("inf")})
    kit.fill(backend, [1])
    assert backend.pin(kit.key(1)) and backend.unpin(kit.key(1))
    assert backend.allocate(SHAPE, BF16, busy_loop=True) is not None


def test_the_pins_of_a_killed_process_end_with_it(shared: SegmentKit, fork: Fork) -> None:
    backend = shared.backend()
    shared.fill(backend, [1, 2])

    def pinner(child: Any) -> None:
        other = shared.backend()
        assert other.contains(shared.key(1), pin=True)
        child.tell("pinned")
        time.sleep(60)

    child = fork(pinner)
    assert child.listen() == "pinned"
    assert backend.pin(shared.key(2))
    assert backend.clear() == 0
    child.kill()
    assert child.wait() == -signal.SIGKILL
    backend.cache.reap()
    assert backend.clear() > 0 and keys_there(backend) == [2]


# ---- clear ----------------------------------------------------------------------------------------------------


def test_clear_never_takes_what_is_pinned_meanwhile(our_kit: Kit) -> None:
    """Whoever has pinned a chunk finds it, however often others clear."""
    backend = our_kit.backend()
    key, done = our_kit.key(1), threading.Event()

    def look() -> None:
        for _ in range(150):
            our_kit.fill(backend, [1])
            if backend.contains(key, pin=True):
                got = backend.get_blocking(key)
                assert got is not None, "pinned, and gone"
                got.ref_count_down()
                backend.unpin(key)
        done.set()

    def clear() -> None:
        while not done.is_set():
            backend.clear()

    assert in_threads(look, clear, timeout=60) == []


def test_clear_returns_the_tokens_that_it_removed(our_kit: Kit) -> None:
    backend = our_kit.backend()
    shape = torch.Size((2, 4, 7, 8))
    for chunk in range(5):
        obj = our_kit.obj(backend, shape=shape, fmt="KV_2LTD")
        backend.submit_put_task(our_kit.key(chunk), obj)
        obj.ref_count_down()
    held = backend.get_blocking(our_kit.key(0))
    assert backend.clear() == 4 * 7 and keys_there(backend) == [0]
    held.ref_count_down()
    assert backend.clear() == 7 and backend.clear() == 0


# ---- sizes and names --------------------------------------------------------------------------------------------


def test_the_chunk_budget_is_that_of_the_arena(name: str) -> None:
    """The segment is there with another size than configured: the arena counts, shared by two ranks."""
    shmcache.create(name, "8MiB").close()
    kit = Kit("segment", name)
    meta = kit.metadata(world_size=2, local_world_size=2, kv_shape=(4, 2, 16, 2, 64))
    meta.chunk_size = 16
    config = kit.config(max_local_cpu_size=0, extra_config={"shm_name": name})
    backend = SharedCPUBackend(config, meta, "cpu")
    chunk = 2 * 4 * 16 * 128 * 2
    assert backend.get_full_chunk_size_bytes() == chunk == 32768
    budget = backend.calculate_chunk_budget()
    assert budget == 8 * MIB // chunk // 2
    objs = backend.batched_allocate(meta.get_shapes(), meta.get_dtypes(), 2 * budget, eviction=False)
    assert objs is not None and backend.allocate(meta.get_shapes(), meta.get_dtypes(), eviction=False) is None
    del objs
    backend.close()
    shmcache.unlink(name)


def test_the_chunk_budget_counts_regions_one_by_one(name: str) -> None:
    """No object lies in two regions: of 640 KiB one fits a region of 1 MiB."""
    shmcache.create(name, "4608KiB", region_bytes="1MiB").close()
    kit = Kit("segment", name)
    meta = kit.metadata(world_size=1, local_world_size=1, kv_shape=(5, 2, 16, 1, 2048))
    meta.chunk_size = 16
    backend = SharedCPUBackend(kit.config(max_local_cpu_size=0, extra_config={"shm_name": name}), meta, "cpu")
    assert backend.get_full_chunk_size_bytes() == 640 * 1024
    assert backend.calculate_chunk_budget() == 4
    objs = [backend.allocate(meta.get_shapes(), meta.get_dtypes(), eviction=False) for _ in range(5)]
    assert [obj is not None for obj in objs] == [True] * 4 + [False]
    del objs
    backend.close()
    shmcache.unlink(name)


@pytest.mark.parametrize("slash", ["", "/"])
def test_shm_name_is_the_segment(name: str, slash: str) -> None:
    """Who comes second finds what the first has put; the name is not stolen."""
    kit = Kit("segment", name)
    config = kit.config(extra_config={"shm_name": slash + name})
    one = allocators.MixedMemoryAllocator(MIB, config=config)
    two = allocators.MixedMemoryAllocator(MIB, shm_name=slash + name)
    first, second = kit.backend(allocator=one), kit.backend(allocator=two)
    kit.fill(first, [5])
    got = second.get_blocking(kit.key(5))
    assert float(got.tensor.min()) == 5
    got.ref_count_down()
    assert [s.name for s in shmcache.segments() if name in s.name] == [name]
    kit.close()
    shmcache.unlink(name)


def test_the_lazy_allocator_grows_as_needed(name: str) -> None:
    before = {p.name for p in Path("/dev/shm").iterdir() if f"lazy-{os.getpid()}-" in p.name}
    allocator = allocators.LazyMemoryAllocator(MIB, 16 * MIB)
    there = {p.name for p in Path("/dev/shm").iterdir() if f"lazy-{os.getpid()}-" in p.name}
    assert len(there - before) >= 1
    objs = allocator.batched_allocate(torch.Size((MIB,)), torch.uint8, 16)
    assert objs is not None and allocator.allocate(torch.Size((1,)), torch.uint8) is None
    for i, obj in enumerate(objs):
        obj.tensor.fill_(i)
    assert [int(obj.tensor[-1]) for obj in objs] == list(range(16)) and allocator.memcheck()
    for obj in objs:
        obj.ref_count_down()
    assert allocator.total_allocated_size == 0
    allocator.close()
    assert {p.name for p in Path("/dev/shm").iterdir() if f"lazy-{os.getpid()}-" in p.name} == before


def test_enable_lazy_memory_allocator_needs_nothing(name: str) -> None:
    kit = Kit("segment", name)
    config = kit.config(
        enable_lazy_memory_allocator=True, max_local_cpu_size="4MiB",
        extra_config={"shm_name": name, "shmcache.prefault": "lazy"},
    )  # fmt: skip
    backend = SharedCPUBackend(config, kit.metadata(world_size=1, local_world_size=1), "cpu")
    obj = backend.allocate(SHAPE, BF16)
    assert obj is not None
    obj.ref_count_down()
    backend.close()
    shmcache.unlink(name)


# ---- a sink that raises ---------------------------------------------------------------------------------


def test_a_sink_that_raises_is_tried_again_in_order(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    worker = Sink(fail=2)
    backend = kit.backend(
        {"extra_config": {"kv_msg_batch_size": 2}}, metadata=kit.metadata(world_size=1, local_world_size=1),
        worker=worker,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "shmcache"):
        for chunk in range(5):
            kit.fill(backend, [chunk], world_size=1)
            backend.remove(kit.key(chunk, world_size=1))
        assert backend.batched_msg_sender.flush(20) is True
    assert worker.story() == [(kind, chunk) for chunk in range(5) for kind in ("ADMIT", "EVICT")]
    assert [op.seq_num for op in worker.operations] == list(range(10))
    assert len(worker.refused) == 2 and worker.refused[0].operations == worker.messages[0].operations
    assert "tried again" in caplog.text


def test_flush_and_close_have_a_deadline(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    worker = Sink(fail=1_000_000)
    backend = kit.backend(metadata=kit.metadata(world_size=1, local_world_size=1), worker=worker)
    kit.fill(backend, [1], world_size=1)
    sender = backend.batched_msg_sender
    begun = time.monotonic()
    assert sender.flush(0.2) is False
    with caplog.at_level(logging.WARNING, "shmcache"):
        sender.close(0.2)
        sender.close(0.2)
    assert time.monotonic() - begun < 15
    assert "were not sent" in caplog.text
    backend.close()


def test_a_forked_child_leaves_the_messages_to_its_parent(shared: SegmentKit, fork: Fork) -> None:
    worker = Sink()
    backend = shared.backend(metadata=shared.metadata(world_size=1, local_world_size=1), worker=worker)

    def in_child(child: Any) -> None:
        shared.fill(backend, [2], world_size=1)
        begun = time.monotonic()
        assert backend.batched_msg_sender.flush(60) is True
        backend.close()
        assert time.monotonic() - begun < 30
        assert worker.story() in ([], [("ADMIT", 1)])

    shared.fill(backend, [1], world_size=1)
    child = fork(in_child)
    assert child.wait(60) == 0
    backend.batched_msg_sender.flush()
    assert worker.story() == [("ADMIT", 1), ("ADMIT", 2)]


# ---- views -------------------------------------------------------------------------------------------


def test_a_tensor_stays_mapped_after_close(our_kit: Kit) -> None:
    backend = our_kit.backend()
    our_kit.fill(backend, [7])
    got = backend.get_blocking(our_kit.key(7))
    tensor, plain = got.tensor, got.byte_array
    backend.close()
    backend.close()
    assert float(tensor.sum()) == 7.0 * SHAPE.numel() and len(plain) == BYTES
    with pytest.raises(errors.SegmentClosedError):
        backend.get_blocking(our_kit.key(7))
    part = tensor[0]
    del tensor, got, plain, backend
    our_kit._backends.clear()
    gc.collect()
    assert float(part.max()) == 7.0
    part.fill_(1)


def test_a_tensor_keeps_its_object(our_kit: Kit) -> None:
    """The chunk cannot be evicted while somebody has the tensor of a get."""
    backend = our_kit.backend()
    our_kit.fill(backend, list(range(N)))
    tensor = backend.get_blocking(our_kit.key(0)).tensor
    owned = backend.get_blocking(our_kit.key(1)).tensor_owned()
    slice_of_owned = owned[1]
    del owned
    gc.collect()
    objs = backend.batched_allocate(SHAPE, BF16, N - 2, busy_loop=False)
    assert objs is not None and backend.allocate(SHAPE, BF16, busy_loop=False) is None
    for obj in objs:
        obj.tensor.fill_(99)
    assert float(tensor.max()) == 0 and float(slice_of_owned.min()) == 1
    del tensor, slice_of_owned
    gc.collect()
    assert backend.batched_allocate(SHAPE, BF16, 2, busy_loop=False) is not None
