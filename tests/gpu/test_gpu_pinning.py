"""What pinning is for, on a real GPU: fast copies, from and to every process's own mapping."""

from __future__ import annotations

import gpu_workers
import pytest

import shmcache

MIB = 1 << 20


@pytest.fixture
def segment(name):
    """segment(capacity, region): a segment whose memory exists; removed at the end."""
    caches = []

    def make(capacity: int, region: int) -> str:
        caches.append(
            shmcache.open(name, capacity=capacity, region_bytes=region, pin=False, prefault="wait", hugepages=False)
        )
        return name

    yield make
    for cache in caches:
        cache.close()
        shmcache.unlink(name, force=True)


def test_pinned_copies_are_faster_than_pageable_ones(worker, segment):
    size = 256 * MIB
    one = worker(gpu_workers.measure, segment(size, size), size)
    pageable, pinned = one.listen()
    for way, before, after in zip(("to host", "to device"), pageable, pinned, strict=True):
        assert after > 1.2 * before, f"{way}: {before:.1f} GiB/s pageable, {after:.1f} GiB/s pinned"


def test_every_rank_stores_and_loads_through_its_own_mapping(worker, segment):
    ranks, n = 2, 4 * MIB
    name = segment(128 * MIB, 32 * MIB)
    workers = [worker(gpu_workers.exchange, name, rank, ranks, n) for rank in range(ranks)]
    for one in workers:
        assert one.listen() == "stored"
    for one in workers:
        one.tell("all have")
    for one in workers:
        assert one.listen() == "right"
        assert one.listen() is True
    with shmcache.attach(name, pin=False) as cache:
        assert cache.verify() == []


def test_no_other_device_gets_a_context(worker, segment, gpus):
    if gpus < 2:
        pytest.skip("one GPU only: there is no other device")
    one = worker(gpu_workers.contexts, segment(64 * MIB, 16 * MIB), 1)
    assert one.listen() == [1]


def test_graphs_can_be_captured_meanwhile(worker, segment):
    one = worker(gpu_workers.capture, segment(2048 * MIB, 32 * MIB))
    captured, pinning = one.listen()
    assert captured > 0
    assert pinning == "done: 2GiB"
