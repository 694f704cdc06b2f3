"""What fails half way leaves nothing behind: no attachment, no pin, no thread, no lock that a child waits for."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contract_kits import BF16, MIB, SHAPE, Kit, SegmentKit, Sink, eventually

import shmcache
from shmcache import allocators, errors, metrics
from shmcache.backend import SharedCPUBackend
from shmcache.keys import CacheEngineKey
from shmcache.namespace import Namespace

Fork = Callable[[Callable[[Any], object]], Any]


@pytest.fixture
def shared(name: str) -> Iterator[SegmentKit]:
    kit = SegmentKit("segment", name)
    yield kit
    kit.close()


@pytest.fixture
def cache(name: str) -> Iterator[shmcache.SharedCache]:
    with shmcache.create(name, MIB) as cache:
        yield cache
        assert cache.verify() == []
        cache.unlink(force=True)


def threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name in ("shmcache-messages", "shmcache-events"))


@pytest.mark.parametrize(
    ("settings", "extra", "fields"),
    [
        ({}, {"kv_msg_batch_size": 0}, {}),
        ({"use_layerwise": True}, {"shmcache.num_layers": 5000}, {}),
        ({}, {"shmcache.first_rank": 7}, {}),
        ({}, {}, {"kv_dtype": "complex64"}),
    ],
    ids=["sender", "parts", "ranks", "key"],
)
def test_a_backend_that_cannot_be_made_leaves_no_attachment(
    shared: SegmentKit, cache: shmcache.SharedCache, settings: dict[str, Any], extra: dict[str, Any],
    fields: dict[str, Any],
) -> None:  # fmt: skip
    before = threads()
    config = shared.config(**settings, extra_config={"shm_name": shared.name, "shmcache.capacity": MIB, **extra})
    if "kv_dtype" in fields:
        import torch

        fields = {"kv_dtype": torch.complex64}
    with pytest.raises(ValueError) as caught:  # which keeps all frames, and what they know
        SharedCPUBackend(config, shared.metadata(**fields), "cpu", Sink())
    assert caught.value is not None
    assert cache.stats().counts.attachments == 1 and threads() == before


@pytest.mark.parametrize("kind", ["mixed", "lazy"])
def test_an_allocator_that_cannot_be_made_leaves_no_attachment(
    name: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def full(*_: object) -> None:
        raise errors.OutOfSharedMemoryError("all namespaces are in use")

    before = {s.name for s in shmcache.segments()}
    monkeypatch.setattr("shmcache._pools.open_namespace", full)
    with pytest.raises(errors.OutOfSharedMemoryError) as caught:
        if kind == "mixed":
            allocators.MixedMemoryAllocator(MIB, shm_name=name)
        else:
            allocators.LazyMemoryAllocator(MIB, MIB)
    assert caught.value is not None
    if kind == "mixed":
        assert [s.alive for s in shmcache.segments() if s.name == name] == [0]
        shmcache.unlink(name)
    assert {s.name for s in shmcache.segments() if s.name.startswith("lazy-")} <= before


def test_a_lookup_over_several_ranks_that_fails_half_way_keeps_no_pin(
    shared: SegmentKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = shared.backend(metadata=shared.metadata())
    for worker in range(3):
        shared.fill(backend, [1], worker=worker)
    real, calls = Namespace.leading, []

    def third_time_out(self: Namespace, *args: Any, **kwargs: Any) -> int:
        calls.append(args)
        if len(calls) == 3:
            raise errors.LockTimeoutError("the lock is held")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Namespace, "leading", third_time_out)
    keys = [shared.key(1, worker) for worker in range(3)]
    with pytest.raises(errors.LockTimeoutError):
        backend.batched_contains(keys, pin=True)
    assert eventually(lambda: backend.cache.stats().counts.holds == 0) and backend.keys_in_request == []
    assert backend.batched_contains(keys, pin=True) == 3
    assert backend.cache.stats().counts.holds == 3
    assert backend.batched_unpin(keys) == 3


def test_a_key_removed_twice_in_one_batch_was_there_once(kit: Kit) -> None:
    backend = kit.backend()
    kit.fill(backend, [1, 2])
    assert backend.batched_remove([kit.key(1), kit.key(1), kit.key(2), kit.key(3)]) == 2


def test_an_object_that_was_not_stored_spends_no_pin_of_the_one_that_is(kit: Kit) -> None:
    backend = kit.backend(metadata=kit.metadata())
    (stored,) = kit.fill(backend, [1], keep=True)
    others = [kit.obj(backend) for _ in range(2)]
    backend.submit_put_task(kit.key(1), others[0])
    backend.batched_submit_put_task([kit.key(1)], others[1:])
    assert backend.pin(kit.key(1))
    for other in others:
        other.unpin()
    assert stored.is_pinned
    assert backend.unpin(kit.key(1)) and not stored.is_pinned
    for obj in (stored, *others):
        obj.ref_count_down()


def test_close_leaves_the_segment_also_when_it_cannot_be_read(
    shared: SegmentKit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged(*_: object) -> None:
        raise errors.SegmentCorruptError("the ring of events is damaged")

    worker = Sink()
    backend = shared.backend(metadata=shared.metadata(world_size=1, local_world_size=1), worker=worker)
    shared.fill(backend, [1], world_size=1)
    assert backend.batched_msg_sender.flush()
    monkeypatch.setattr(shmcache.SharedCache, "events", damaged)
    backend.batched_msg_sender.add_kv_op(backend.batched_msg_sender.op_types.ADMIT, 7)
    backend.close()
    assert backend.cache.closed and worker.story() == [("ADMIT", 1), ("ADMIT", 7)]
    assert "is damaged" in caplog.text


def test_a_backend_of_a_segment_without_a_name_sends_its_own_messages(
    shared: SegmentKit, cache: shmcache.SharedCache
) -> None:
    mine = shmcache.attach(shared.name)
    shmcache.unlink(shared.name)
    worker = Sink()
    allocator = allocators.MixedMemoryAllocator(MIB, cache=mine)
    meta = shared.metadata(world_size=1, local_world_size=1)
    backend = shared.backend(metadata=meta, worker=worker, allocator=allocator)
    shared.fill(backend, [1], world_size=1)
    assert backend.batched_msg_sender.flush() and worker.story() == [("ADMIT", 1)]
    shmcache.create(shared.name, MIB).close()  # what the fixture removes


def test_whatever_happens_the_thread_that_reads_events_goes_on(
    shared: SegmentKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, failed = Sink(), threading.Event()

    def odd(*_: object) -> None:
        failed.set()
        raise ZeroDivisionError

    monkeypatch.setattr("shmcache.messages._RETRY_LAST", 0.01)
    backend = shared.backend(metadata=shared.metadata(world_size=1, local_world_size=1), worker=worker)
    with monkeypatch.context() as patch:
        patch.setattr(shmcache.SharedCache, "events", odd)
        assert failed.wait(30)
    shared.fill(backend, [1], world_size=1)
    assert worker.wait(1, 30) and worker.story() == [("ADMIT", 1)]


def test_flush_does_not_wait_for_a_thread_that_polls(shared: SegmentKit) -> None:
    backend = shared.backend(metadata=shared.metadata(world_size=1, local_world_size=1), worker=Sink())
    sender = backend.batched_msg_sender
    with sender._polling:
        assert sender.flush(0.05) is True


def test_a_forked_child_never_waits_for_the_senders_lock(shared: SegmentKit, fork: Fork) -> None:
    backend = shared.backend(metadata=shared.metadata(world_size=1, local_world_size=1), worker=Sink())
    sender = backend.batched_msg_sender
    inside, leave = threading.Event(), threading.Event()

    def stay_inside() -> None:
        with sender._changed:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay_inside)
    thread.start()
    assert inside.wait(30)
    child = fork(lambda _: sender.add_kv_op(sender.op_types.ADMIT, 1))
    leave.set()
    thread.join()
    assert child.wait(30) == 0
    assert sender.qsize() == 0


def test_a_scrape_and_a_new_backend_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(set[Any]):
        def __iter__(self) -> Iterator[Any]:
            assert metrics._lock.locked()
            return super().__iter__()

    monkeypatch.setattr(metrics, "_backends", Watched())
    assert list(metrics._Collector().collect()) == []


def test_the_key_of_a_tag_that_is_no_str_is_stored_or_refused_but_breaks_nothing(shared: SegmentKit) -> None:
    backend = shared.backend(metadata=shared.metadata())
    key = CacheEngineKey("test_model", 3, 0, 5, BF16, {"lmcache.tag.n": 7})
    backend.submit_put_task(key, backend.allocate(SHAPE, BF16))
    assert backend.contains(key) and backend.get_keys() == [key]


def test_a_call_that_fails_keeps_nothing_of_its_caller(shared: SegmentKit) -> None:
    """Holds go with their object: an error that keeps itself would keep the caller's frame, and all in it."""
    backend = shared.backend()
    space = backend._space
    key = shared.key(1, 7)  # a rank of another host

    def caller() -> None:
        obj = shared.obj(backend)
        assert space.cache.stats().counts.holds == 1
        backend.submit_put_task(key, obj)

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            caller()
            pytest.fail("it was stored")
        assert space.cache.stats().counts.holds == 0
    finally:
        gc.enable()


def test_a_call_keeps_the_attachment_that_it_asks(shared: SegmentKit) -> None:
    """Another thread may attach again at any time: the handle would be freed under the call."""

    class Key:
        """A key whose hash takes long: meanwhile the process attaches again."""

        def __init__(self, key: Any) -> None:
            self.key = key

        def __getattr__(self, name: str) -> Any:
            if name == "chunk_hash":
                cache = backend.cache
                old.append(weakref.ref(cache._attachment))
                cache._reattach(cache._attachment)
                gc.collect()
                alive.append(old[-1]() is not None)
            return getattr(self.key, name)

    old: list[Any] = []
    alive: list[bool] = []
    backend = shared.backend()
    shared.fill(backend, [1])
    with contextlib.suppress(errors.ShmCacheError):
        backend.contains(Key(shared.key(1)))
    with contextlib.suppress(errors.ShmCacheError):
        backend.unpin(Key(shared.key(1)))
    assert alive and all(alive)
