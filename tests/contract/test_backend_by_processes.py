"""Backends and allocators of several processes on one segment, some of them killed (T-M11, messages)."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from contract_kits import BF16, BYTES, MIB, SHAPE, Kit, Sink, eventually

import shmcache
from shmcache import allocators
from shmcache.backend import SharedCPUBackend

Fork = Callable[[Callable[[Any], object]], Any]
FLAT = torch.uint8


def pool(name: str, size: int = 4 * MIB) -> allocators.MixedMemoryAllocator:
    return allocators.MixedMemoryAllocator(size, shm_name=name)


def stamp(obj: Any, mark: int) -> None:
    obj.tensor.fill_(mark)


def is_stamped(obj: Any, mark: int) -> bool:
    return bool((obj.tensor == mark).all())


# ---- T-M11: many take and give back -------------------------------------------------------------------


def churn(name: str, mark: int, rounds: int) -> None:
    """Allocate, write, look again, give back; single objects and batches."""
    rng = random.Random(mark)
    allocator = pool(name)
    live: list[Any] = []
    fmt = allocators.MemoryFormat.KV_2LTD
    for _ in range(rounds):
        if live and rng.random() < 0.5:
            obj = live.pop(rng.randrange(len(live)))
            assert is_stamped(obj, mark), "written by another"
            obj.ref_count_down()
            continue
        n = rng.choice((1, 1, 2, 5))
        new = allocator.batched_allocate(torch.Size((rng.randint(1, 40_000),)), FLAT, n, fmt)
        for obj in new or ():
            stamp(obj, mark)
        live += new or ()
    for obj in live:
        assert is_stamped(obj, mark)
    allocator.batched_free(live)
    allocator.close()


def test_T_M11_processes_that_take_and_give_back_do_not_overlap(name: str, fork: Fork) -> None:
    allocator = pool(name)
    children = [fork(lambda _, mark=mark: churn(name, mark, 150)) for mark in range(1, 6)]
    assert [child.wait(60) for child in children] == [0] * 5
    assert allocator.pin_allocator.total_allocated_size == 0 and allocator.memcheck()
    whole = allocator.allocate(torch.Size((4 * MIB,)), FLAT, allocators.MemoryFormat.KV_2LTD)
    assert whole is not None, "the holes have become one"
    whole.ref_count_down()
    allocator.close()
    shmcache.unlink(name)


def test_T_M11_concurrent_batches_of_processes_are_disjoint(name: str, fork: Fork) -> None:
    """20 batches of 10 objects, from 5 processes, all alive at once."""
    allocator = pool(name)

    def take(child: Any) -> None:
        mine = pool(name)
        child.await_parent()
        objs = [mine.batched_allocate(torch.Size((4096,)), FLAT, 10) for _ in range(4)]
        child.tell(json.dumps([obj.shm_offset for batch in objs for obj in batch]))
        child.await_parent()

    children = [fork(take) for _ in range(5)]
    for child in children:
        child.go()
    offsets = [offset for child in children for offset in json.loads(child.listen())]
    assert len(offsets) == 200 == len(set(offsets)) and all(offset % 4096 == 0 for offset in offsets)
    assert allocator.pin_allocator.total_allocated_size == 200 * 4096 and allocator.memcheck()
    for child in children:
        child.go()
    assert [child.wait() for child in children] == [0] * 5
    allocator.cache.reap()
    assert allocator.pin_allocator.total_allocated_size == 0
    allocator.close()
    shmcache.unlink(name)


def test_T_M11_killed_at_random_points_all_memory_comes_back(name: str, fork: Fork) -> None:
    allocator = pool(name)
    rng = random.Random(5)

    def for_ever(child: Any, mark: int) -> None:
        child.tell("begun")
        while True:
            churn(name, mark, 40)

    for turn in range(4):
        children = [fork(lambda child, mark=mark: for_ever(child, mark)) for mark in range(1, 4)]
        for child in children:
            assert child.listen() == "begun"
        for child in children:
            time.sleep(rng.uniform(0.005, 0.05))
            child.kill()
        assert [child.wait() for child in children] == [-signal.SIGKILL] * 3
        allocator.cache.reap()
        assert allocator.cache.verify() == [], turn
        stats = allocator.cache.stats()
        assert (stats.bytes.used, stats.counts.holds, stats.counts.attachments) == (0, 0, 1), turn
    whole = allocator.allocate(torch.Size((4 * MIB,)), FLAT, allocators.MemoryFormat.KV_2LTD)
    assert whole is not None
    whole.ref_count_down()
    allocator.close()
    shmcache.unlink(name)


# ---- backends -------------------------------------------------------------------------------------------


def rank(name: str, worker: int, ranks: int = 2, sink: Any = None, **settings: Any) -> SharedCPUBackend:
    kit = Kit("segment", name)
    config = kit.config(**{"max_local_cpu_size": "1MiB", "extra_config": {"shm_name": name}, **settings})
    meta = kit.metadata(world_size=ranks, local_world_size=ranks, worker_id=worker, local_worker_id=worker)
    return SharedCPUBackend(config, meta, "cpu", sink)


def key(chunk: Any, worker: int, ranks: int = 2) -> Any:
    return Kit("", "").key(chunk, worker, world_size=ranks)


def put(backend: SharedCPUBackend, worker: int, chunks: list[int], ranks: int = 2) -> int:
    stored = 0
    for chunk in chunks:
        obj = backend.allocate(SHAPE, BF16, busy_loop=False)
        if obj is None:
            continue
        obj.tensor.fill_(chunk % 100 + worker * 100)
        backend.submit_put_task(key(chunk, worker, ranks), obj)
        obj.ref_count_down()
        stored += 1
    return stored


def good(backend: SharedCPUBackend, worker: int, chunk: int) -> bool | None:
    """Whether a rank's part has the bytes that were put; None when absent."""
    obj = backend.get_blocking(key(chunk, worker))
    if obj is None:
        return None
    ok = bool((obj.tensor == chunk % 100 + worker * 100).all())
    obj.ref_count_down()
    return ok


@pytest.fixture
def kept(name: str) -> Iterator[SharedCPUBackend]:
    """Rank 0 in this process; the segment goes at the end."""
    backend = rank(name, 0)
    yield backend
    backend.close()
    shmcache.unlink(name, force=True)


def test_ranks_in_processes_share_a_segment_of_the_size_of_both(kept: SharedCPUBackend, name: str, fork: Fork) -> None:
    """`max_local_cpu_size` counts for each rank; each finds its own parts, and can read the other's."""
    assert kept.cache.capacity == 2 * MIB
    put(kept, 0, [1, 2, 3])

    def other(child: Any) -> None:
        backend = rank(name, 1)
        assert backend.cache.capacity == 2 * MIB
        assert not backend.contains(key(1, 1)) and backend.contains(key(1, 0))
        assert backend.get_keys() == []
        put(backend, 1, [1, 2])
        assert good(backend, 0, 3) and good(backend, 1, 2)
        assert [k.chunk_hash for k in backend.get_keys()] == [1, 2]
        backend.close()

    assert fork(other).wait() == 0
    assert good(kept, 1, 1) and good(kept, 0, 1) and good(kept, 1, 3) is None
    assert [(k.chunk_hash, k.worker_id) for k in kept.get_keys()] == [(1, 0), (2, 0), (3, 0)]


def test_eviction_of_one_process_takes_chunks_on_all_ranks_or_on_none(
    kept: SharedCPUBackend, name: str, fork: Fork
) -> None:
    def other(child: Any) -> None:
        backend = rank(name, 1)
        for first in range(0, 64, 4):
            child.await_parent()
            put(backend, 1, list(range(first, first + 4)))
            child.tell("put")
        backend.close()

    child = fork(other)
    for first in range(0, 64, 4):
        put(kept, 0, list(range(first, first + 4)))
        child.go()
        assert child.listen() == "put"
    assert child.wait() == 0
    there = [(kept.contains(key(chunk, 0)), kept.contains(key(chunk, 1))) for chunk in range(64)]
    assert all(a == b for a, b in there)
    assert sum(a for a, _ in there) == 2 * MIB // BYTES // 2 == 16
    assert all(good(kept, worker, chunk) for chunk in range(64) for worker in (0, 1) if there[chunk][0])


def test_killed_ranks_leave_nothing_but_whole_chunks(kept: SharedCPUBackend, name: str, fork: Fork) -> None:
    """Ranks put, look and read until they are killed; no read sees other bytes than were put."""
    rng = random.Random(9)

    def work(child: Any, worker: int) -> None:
        backend = rank(name, worker)
        mine = random.Random(os.getpid())
        child.tell("begun")
        while True:
            chunks = [mine.randrange(40) for _ in range(4)]
            put(backend, worker, chunks)
            for chunk in chunks:
                if backend.contains(key(chunk, worker), pin=True):
                    assert good(backend, worker, chunk), "pinned"
                    backend.unpin(key(chunk, worker))
                if good(backend, 1 - worker, chunk) is False:
                    os._exit(3)
            backend.touch_cache()

    for _ in range(3):
        children = [fork(lambda child, w=w: work(child, w)) for w in (0, 1, 1)]
        for child in children:
            assert child.listen() == "begun"
        time.sleep(rng.uniform(0.05, 0.25))
        for child in children:
            child.kill()
        assert [child.wait() for child in children] == [-signal.SIGKILL] * 3
        kept.cache.reap()
        assert kept.cache.verify() == []
        assert kept.cache.stats().counts.holds == 0
        for chunk in range(40):
            assert good(kept, 0, chunk) is not False and good(kept, 1, chunk) is not False
    kept.clear()
    assert kept.cache.stats().bytes.used == 0


@pytest.mark.parametrize("stale", [False, True], ids=["nothing there", "another size there"])
def test_ranks_that_start_at_once_share_one_segment(scrap: str, fork: Fork, stale: bool) -> None:
    """Six at once, where there is none, or one of other parameters that nobody uses: none is left alone."""
    for turn in range(3):
        if stale:
            shmcache.create(scrap, "512KiB", policy="fifo").close()

        def begin(child: Any, me: int) -> None:
            child.await_parent()
            backend = rank(scrap, me, ranks=6)
            put(backend, me, [1], ranks=6)
            child.tell(json.dumps([backend.cache.capacity, backend.cache._attached().mapping.instance]))
            child.await_parent()
            assert all(backend.contains(key(1, worker, 6)) for worker in range(6))
            backend.close()

        children = [fork(lambda child, me=me: begin(child, me)) for me in range(6)]
        for child in children:
            child.go()
        told = {child.listen() for child in children}
        assert len(told) == 1 and json.loads(told.pop())[0] == 6 * MIB, turn
        for child in children:
            child.go()
        assert [child.wait() for child in children] == [0] * 6
        shmcache.unlink(scrap)


def test_one_writer_for_all_ranks_under_mla(name: str, fork: Fork) -> None:
    """All ranks read one part, and its bytes are there once."""
    kit = Kit("", "")

    def mla(worker: int) -> SharedCPUBackend:
        config = kit.config(max_local_cpu_size="1MiB", extra_config={"shm_name": name})
        meta = kit.metadata(
            world_size=4, local_world_size=4, worker_id=worker, local_worker_id=worker, use_mla=True,
            kv_shape=(4, 1, 256, 1, 64),
        )  # fmt: skip
        return SharedCPUBackend(config, meta, "cpu")

    backend = mla(0)
    assert backend.cache.capacity == MIB
    put(backend, 0, [1], ranks=4)
    used = backend.cache.stats().bytes.used

    def reader(child: Any) -> None:
        other = mla(3)
        for worker in range(4):
            assert other.contains(key(1, worker, 4))
        put(other, 3, [1], ranks=4)  # a duplicate
        got = other.get_blocking(key(1, 3, 4))
        assert float(got.tensor.max()) == 1
        got.ref_count_down()
        reservation = other.reserve(key(2, 3, 4), SHAPE, BF16)
        child.tell(reservation.state.name)
        child.await_parent()
        os._exit(0)  # dies as the writer of chunk 2

    child = fork(reader)
    assert child.listen() == "WRITE"
    assert backend.cache.stats().bytes.used == used + BYTES
    second = backend.reserve(key(2, 0, 4), SHAPE, BF16)
    assert second.state.name == "PENDING"
    child.go()
    assert child.wait() == 0
    assert second.wait(20) is None
    with backend.reserve(key(2, 0, 4), SHAPE, BF16) as mine:
        assert mine.state.name == "WRITE"
    assert [k.worker_id for k in backend.get_keys()] == [0]
    backend.close()
    shmcache.unlink(name)


# ---- messages -------------------------------------------------------------------------------------------


class PipeSink:
    """Tells each message to the parent as a line."""

    def __init__(self, child: Any) -> None:
        self._child = child

    def put_msg(self, message: Any) -> None:
        ops = [[op.op_type.name, op.key] for op in message.operations]
        self._child.tell(json.dumps(["ops", message.worker_id, ops]))


def test_two_processes_send_what_happened_once(kept: SharedCPUBackend, name: str, fork: Fork) -> None:
    """Each has a sender; one of them sends, also what the other did."""

    def other(child: Any) -> None:
        backend = rank(name, 1, sink=PipeSink(child))
        child.tell(json.dumps(["ready"]))
        child.await_parent()
        put(backend, 1, [1, 2])
        backend.batched_msg_sender.flush()
        child.tell(json.dumps(["done"]))
        child.await_parent()
        backend.close()
        child.tell(json.dumps(["closed"]))

    kept.close()  # without a sender: only the other two are to talk
    sink = Sink()
    first = rank(name, 0, sink=sink)
    put(first, 0, [9])
    first.batched_msg_sender.flush()  # it is the one by now
    child = fork(other)
    assert json.loads(child.listen()) == ["ready"]
    put(first, 0, [1, 2])
    child.go()
    assert json.loads(child.listen()) == ["done"]
    assert first.remove(key(1, 0))
    first.batched_msg_sender.flush()
    assert sink.story() == [("ADMIT", 1), ("ADMIT", 2), ("EVICT", 1)]
    first.close()
    child.go()
    lines = []
    while lines[-1:] != [["closed"]]:
        lines.append(json.loads(child.listen()))
    assert child.wait() == 0
    replayed = [tuple(op) for line in lines if line[0] == "ops" for op in line[2]]
    assert replayed == sink.story()[len(sink.story()) - len(replayed) :], "at most a replay, in order"


def is_replay_of_a_suffix(story: list[Any], before: list[Any], after: list[Any]) -> bool:
    """Whether `before` is a prefix of the story, `after` a suffix, and nothing lies between."""
    return (
        story[: len(before)] == before
        and (not after or story[-len(after) :] == after)
        and len(before) + len(after) >= len(story)
    )


def test_when_the_sender_is_killed_another_goes_on(kept: SharedCPUBackend, name: str, fork: Fork) -> None:
    """The kill comes at any moment; nothing is lost and the order is kept, at least once."""
    for turn in range(3):
        one_rank = f"model-{turn}"
        story: list[tuple[str, int]] = []

        def backend_of(sink: Any, model: str = one_rank) -> SharedCPUBackend:
            kit = Kit("", "")
            config = kit.config(max_local_cpu_size="1MiB", extra_config={"shm_name": name, "kv_msg_batch_size": 3})
            meta = kit.metadata(world_size=1, local_world_size=1, model_name=model)
            return SharedCPUBackend(config, meta, "cpu", sink)

        def sender(child: Any, make: Any = backend_of) -> None:
            make(PipeSink(child))
            child.tell(json.dumps(["ready"]))
            time.sleep(60)

        child = fork(sender)
        assert json.loads(child.listen()) == ["ready"]
        sink = Sink()
        mine = backend_of(sink)
        rng = random.Random(turn)
        kill_at = rng.randrange(5, 40)
        for chunk in range(40):
            if chunk == kill_at:
                child.kill()
            obj = mine.allocate(SHAPE, BF16, busy_loop=False)
            one = Kit("", "").key(chunk, 0, world_size=1, model_name=one_rank)
            mine.submit_put_task(one, obj)
            obj.ref_count_down()
            story.append(("ADMIT", chunk))
            if rng.random() < 0.9:  # so that nothing has to be evicted
                assert mine.remove(one)
                story.append(("EVICT", chunk))
        assert child.wait() == -signal.SIGKILL
        assert eventually(lambda sink=sink, end=story[-1:]: sink.story()[-1:] == end, 20)
        heard: list[tuple[str, int]] = []
        while line := child.listen():
            try:
                message = json.loads(line)
            except ValueError:
                break  # cut off by the kill
            heard += [tuple(op) for op in message[2]] if message[0] == "ops" else []
        assert is_replay_of_a_suffix(story, heard, sink.story()), (kill_at, heard, sink.story())
        assert [op.seq_num for op in sink.operations] == list(range(len(sink.operations)))
        mine.clear()
        mine.close()


def test_what_a_killed_sender_had_not_sent_is_sent_by_one_that_came_later(
    kept: SharedCPUBackend, name: str, fork: Fork
) -> None:
    """Its sink was down all the time; the other process began after it all had happened."""

    class Down:
        def put_msg(self, message: Any) -> None:
            raise ConnectionError("down")

    def sender(child: Any) -> None:
        backend = rank(name, 0, ranks=1, sink=Down())
        put(backend, 0, [1, 2, 3], ranks=1)
        child.tell("put")
        time.sleep(60)

    child = fork(sender)
    assert child.listen() == "put"
    sink = Sink()
    later = rank(name, 0, ranks=1, sink=sink)
    later.batched_msg_sender.flush()
    assert sink.story() == [], "somebody else is to send"
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert sink.wait(3, 20)
    assert sink.story() == [("ADMIT", 1), ("ADMIT", 2), ("ADMIT", 3)]
    later.close()


def test_who_comes_first_to_a_warm_segment_tells_what_is_there(kept: SharedCPUBackend, name: str) -> None:
    """Not what was: a chunk that has gone, or is not complete, is not announced."""
    put(kept, 0, [5, 6])
    put(kept, 1, [5])
    kept.remove(next(k for k in kept.get_keys() if k.chunk_hash == 5))
    put(kept, 0, [1])
    put(kept, 1, [1])
    sink = Sink()
    first = rank(name, 0, sink=sink)
    put(first, 0, [2])
    put(first, 1, [2])
    first.batched_msg_sender.flush()
    assert sink.story() == [("ADMIT", 1), ("ADMIT", 2)]
    first.close()
