"""The plug-in does not break its engine: where the segment fails, it answers as an empty cache."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lmcache.v1.storage_backend.local_cpu_backend", reason="LMCache is not installed")

from contract_kits import BF16, SHAPE, Kit, PluginKit, eventually

import shmcache
from shmcache._core import lib


@pytest.fixture
def kit(tame: None, name: str) -> Iterator[Kit]:
    kit = PluginKit("plugin", name)
    yield kit
    kit.close()


def answers(backend: Any, key: Any, obj: Any) -> list[Any]:
    return [
        backend.contains(key), backend.contains(key, pin=True), backend.batched_contains([key, key]),
        asyncio.run(backend.batched_async_contains("x", [key])), backend.touch_cache(),
        backend.submit_put_task(key, obj), backend.batched_submit_put_task([key], [obj]), backend.get_blocking(key),
        backend.batched_get_blocking([key, key]), backend.batched_get_blocking(keys=[key, key]),
        asyncio.run(backend.batched_get_non_blocking("x", [key])), backend.pin(key), backend.unpin(key),
        backend.remove(key), backend.batched_remove([key]), backend.allocate(SHAPE, BF16),
        backend.batched_allocate(shapes=SHAPE, dtypes=BF16, batch_size=2), backend.get_keys(), backend.clear(),
    ]  # fmt: skip


NOTHING = [
    False, False, 0, 0, None, None, None, None, [None, None], [None, None], [], False, False, False, 0, None, None,
    [], 0,
]  # fmt: skip


def test_on_a_damaged_segment_it_answers_as_an_empty_cache(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    backend = kit.backend()
    obj = kit.obj(backend)
    kit.fill(backend, [1])
    assert backend.contains(kit.key(1), pin=True)
    lib.shmc_set_state(backend.cache._attached().mapping.base, lib.SHMC_S_POISONED)
    with caplog.at_level(logging.ERROR, "shmcache"):
        assert answers(backend, kit.key(1), obj) == NOTHING
    lines = [r for r in caplog.records if "goes on without the cache" in r.getMessage()]
    assert 10 < len(lines) <= len(NOTHING), "one line for each method, not for each call"


def test_objects_of_a_damaged_segment_can_be_used_and_given_back(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    backend = kit.backend()
    obj = kit.obj(backend, 3)
    lib.shmc_set_state(backend.cache._attached().mapping.base, lib.SHMC_S_POISONED)
    assert float(obj.tensor.max()) == 3 and obj.metadata.shape == SHAPE and obj.metadata.fmt.name == "KV_T2D"
    assert obj.get_size() > 0 and obj.get_num_tokens() == 2
    assert obj.pin() is False and obj.unpin() is False and not obj.can_evict
    obj.ref_count_down()
    assert "goes on without the cache" in caplog.text


def test_objects_can_be_given_back_after_close(kit: Kit) -> None:
    backend = kit.backend()
    (obj,) = kit.fill(backend, [1], keep=True)
    got = backend.get_blocking(kit.key(1))
    assert got.pin()
    backend.close()
    for one in (got, obj):
        one.unpin()
        one.ref_count_down()
        one.ref_count_down()


def test_after_close_it_says_so(kit: Kit) -> None:
    backend = kit.backend()
    backend.close()
    with pytest.raises(shmcache.SegmentClosedError):
        backend.contains(kit.key(1))


def test_a_layerwise_load_never_gets_a_shorter_list(kit: Kit) -> None:
    """LMCache has begun with the chunks by then: KeyError, as from its own backend, and no reference is kept."""
    backend = kit.backend({"use_layerwise": True}, metadata=kit.metadata(world_size=1, local_world_size=1))
    keys = [kit.key(chunk, world_size=1).get_first_layer() for chunk in (1, 2, 3)]
    for key in (keys[0], keys[2]):
        obj = kit.obj(backend)
        backend.submit_put_task(key, obj)
        obj.ref_count_down()
    with pytest.raises(KeyError):
        asyncio.run(backend.batched_get_non_blocking("fake_lookup_id", keys))
    assert backend.cache.stats().counts.holds == 0
    assert len(asyncio.run(backend.batched_get_non_blocking("a lookup", keys))) == 1


def test_a_load_whose_rest_cannot_be_given_back_is_a_miss(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = kit.backend()
    kit.fill(backend, [1, 3])

    def stuck(*_: object) -> None:
        raise shmcache.LockTimeoutError("the lock is held")

    with monkeypatch.context() as patch:
        patch.setattr(type(backend).object_class, "release", stuck)
        assert asyncio.run(backend.batched_get_non_blocking("x", [kit.key(1), kit.key(2), kit.key(3)])) == []
    assert eventually(lambda: backend.cache.stats().counts.holds == 0), "they go with the objects"


class Copies:
    """Stands in for what a stream has still to do."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_a_reference_is_kept_until_copies_are_done(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    from shmcache.integrations import lmcache as plugin

    backend, copies = kit.backend(), Copies()
    kit.fill(backend, [1])
    got, late = backend.get_blocking(kit.key(1)), backend.get_blocking(kit.key(1))
    holds = backend.cache.stats().counts.holds
    monkeypatch.setattr(plugin, "_pending_copies", lambda: copies)
    objects = plugin.ShmMemoryObj
    monkeypatch.setattr(objects, "ref_count_down", objects.count_down_behind_copies)  # as with a torch that has streams
    got.ref_count_down()
    assert backend.cache.stats().counts.holds == holds
    copies.done = True
    assert eventually(lambda: backend.cache.stats().counts.holds == holds - 1)
    copies.done = False
    backend.close()
    late.ref_count_down()


def test_the_first_rank_of_the_host_feeds_whatever_gpu_it_has(kit: Kit) -> None:
    """`local_worker_id` may be the number of a GPU; ranks agree by how many of them are here."""
    for rank, speaks in ((2, True), (3, False)):
        meta = kit.metadata(world_size=4, local_world_size=2, worker_id=rank, local_worker_id=5 + rank)
        backend = kit.backend(metadata=meta)
        assert backend._speaks_for_host() is speaks and backend._agree is True
    alone = kit.metadata(world_size=1, local_world_size=1, worker_id=0, local_worker_id=3)
    assert kit.backend(metadata=alone)._speaks_for_host() and not kit.backend(metadata=alone)._agree
