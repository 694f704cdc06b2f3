"""Checksums of parts: every way to put computes one, every way to get may verify it, in any process."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import xxhash

import shmcache
from shmcache import _meta
from shmcache._checksum import Checksum, checksum_of
from shmcache._core import lib

MIB = 1 << 20
SIZES = (1, 7, 4096, 100_001, 3 * MIB + 5)
pytestmark = pytest.mark.timeout(60)


def make(name: str, checksum: str | None = "xxh3", capacity: int = 32 * MIB) -> shmcache.SharedCache:
    more: dict[str, Any] = {} if checksum is None else {"checksum": checksum}
    return shmcache.create(name, capacity, prefault="lazy", hugepages=False, **more)


@pytest.fixture
def cache(name: str) -> Iterator[shmcache.SharedCache]:
    with make(name) as cache:
        yield cache
        assert cache.verify() == []
        cache.unlink()


def filled(ns: Any, nbytes: int) -> shmcache.MemoryObj:
    obj = ns.allocate(nbytes)
    assert obj is not None
    obj.byte_array[:] = os.urandom(nbytes)
    return obj


def store(ns: Any, key: object, nbytes: int = 4096, **more: Any) -> None:
    with filled(ns, nbytes) as obj:
        assert ns.put(key, obj, **more)


def flip(cache: shmcache.SharedCache, obj: shmcache.MemoryObj, at: int = 0) -> None:
    """A bit in the arena, as failing memory or a stray write would."""
    arena = cache._attachment.arena().buffer
    byte = obj.shm_offset + at
    arena[byte] = bytes([arena[byte][0] ^ 0x10])


def stored_sum(obj: shmcache.MemoryObj) -> int | None:
    return _meta.split(bytes(obj._part.meta)[: obj._part.meta_len])[1]


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def until(what: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


# ---- round trips -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
def test_another_process_verifies_what_was_put(cache: shmcache.SharedCache, fork: Any, nbytes: int) -> None:
    store(cache, "k", nbytes)
    with cache.get("k", verify=True) as obj:  # type: ignore[union-attr]
        assert stored_sum(obj) == xxhash.xxh3_64_intdigest(obj.byte_array)

    def reader(child: Any) -> None:
        with shmcache.attach(cache.name, prefault="lazy") as other:
            assert other.checksum == "xxh3"
            with other.get("k", verify=True) as obj:  # type: ignore[union-attr]
                assert obj.get_size() == nbytes

    assert fork(reader).wait() == 0


def test_crc32c_is_that_of_everybody_else() -> None:
    """The check value of the catalogues, and RFC 3720's examples."""
    crc32c = Checksum("crc32c").digest
    assert crc32c(b"") == 0 and crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E and crc32c(bytes(range(31, -1, -1))) == 0x113FDB5C


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_segment_with_crc32c(name: str, nbytes: int) -> None:
    crc32c = Checksum("crc32c").digest
    with make(name, "crc32c") as cache:
        store(cache, "k", nbytes)
        with shmcache.attach(name) as other:
            assert other.checksum == "crc32c"
            with other.get("k", verify=True) as obj:  # type: ignore[union-attr]
                assert stored_sum(obj) == crc32c(obj.byte_array)
                flip(cache, obj, nbytes - 1)
            with pytest.raises(shmcache.ChecksumError):
                other.get("k", verify=True)
        cache.unlink()


@pytest.mark.parametrize("nbytes", SIZES)
def test_one_bit_anywhere_is_found_and_nothing_stays_held(cache: shmcache.SharedCache, nbytes: int) -> None:
    ns = cache.namespace("model", parts=2)
    for part in range(2):
        store(ns, b"key", nbytes, part=part)
    with ns.get(b"key", part=1) as obj:  # type: ignore[union-attr]
        flip(cache, obj, nbytes - 1)
    with pytest.raises(shmcache.ChecksumError, match=r"part 1 of b'key' in namespace 'model'.*remove\(key\)") as info:
        ns.get(b"key", part=1, verify=True)
    assert type(pickle.loads(pickle.dumps(info.value))) is shmcache.ChecksumError
    assert cache.stats().counts.holds == 0
    ns.get(b"key", part=0, verify=True).release()  # type: ignore[union-attr]
    ns.get(b"key", part=1).release()  # type: ignore[union-attr] # it is not taken away, and get does not look
    assert ns.remove(b"key")
    for part in range(2):
        store(ns, b"key", nbytes, part=part)
    ns.get(b"key", part=1, verify=True).release()  # type: ignore[union-attr]


def test_a_batch_is_verified_as_a_whole(cache: shmcache.SharedCache) -> None:
    for i in range(100):
        store(cache, i)
    found = cache.get_many([*range(100), "absent"], verify=True)
    assert found[-1] is None and sum(obj is not None for obj in found) == 100
    for i in (17, 60):
        flip(cache, found[i], 99)  # type: ignore[arg-type]
    shmcache.release_many(obj for obj in found if obj is not None)
    with pytest.raises(shmcache.ChecksumError, match=r"part 0 of 17 .*1 more of these keys"):
        cache.get_many(range(100), verify=True)
    assert cache.stats().counts.holds == 0
    shmcache.release_many(cache.get_many(range(20, 60), verify=True))  # type: ignore[arg-type]
    assert cache.get_many([], verify=True) == []


def test_a_lookup_verifies_and_keeps_its_pins(cache: shmcache.SharedCache) -> None:
    store(cache, "a")
    store(cache, "b")
    with cache.lookup(["a", "b"], pin=True) as hit:
        with hit.get(1, verify=True) as obj:  # type: ignore[union-attr]
            flip(cache, obj)
        hit.get(0, verify=True).release()  # type: ignore[union-attr]
        with pytest.raises(shmcache.ChecksumError, match=r"Lookup\.get: part 0 of 'b'"):
            hit.get(1, verify=True)
        assert hit.pinned and cache.stats().counts.holds == 2
    with cache.lookup(["a"]) as hit:
        cache.remove("a")
        assert hit.get(0, verify=True) is None
    assert cache.get("absent", verify=True) is None


# ---- every way to put --------------------------------------------------------------------------------


def test_every_way_to_put_computes_it(cache: shmcache.SharedCache) -> None:
    ns = cache.default
    store(ns, "put")
    store(ns, "with a parent", parent="put")
    pinned = filled(ns, 5000)
    pinned.pin()
    assert ns.put("pinned", pinned)
    pinned.release()
    several = ns.allocate_many(5000, None, 3)
    assert several is not None
    for i, obj in enumerate(several):
        obj.byte_array[:] = bytes([i]) * 5000
    assert ns.put_many(["m0", "m1", "m2"], several, parent="put") == [True] * 3
    shmcache.release_many(several)
    assert ns.put_tensor("tensor", torch.arange(1000).reshape(10, 100).t())
    with ns.reserve("reserved", 3000) as r:
        assert r.obj is not None
        r.obj.byte_array[:] = b"r" * 3000
        assert r.put()
    adopted = filled(cache.namespace("other"), 100)
    ns.adopt(adopted)
    assert ns.put("adopted", adopted)
    adopted.release()
    for key in ns.keys():
        with ns.get(key, verify=True) as obj:  # type: ignore[union-attr]
            assert stored_sum(obj) is not None
    assert len(ns.keys()) == 9


def test_a_deferred_put_sums_what_is_there_when_the_event_has_happened(cache: shmcache.SharedCache) -> None:
    events = Event(), Event()
    with filled(cache, MIB) as obj:
        view = obj.byte_array
        assert cache.put("k", obj, after=events[0])
    with cache.reserve("r", 100) as r:
        assert r.put(after=events[1])
    view[:] = b"\7" * MIB  # the copy that the event stands for
    view.release()
    for event in events:
        event.done = True
    until(lambda: cache.contains("k") and cache.contains("r"))
    with cache.get("k", verify=True) as obj:  # type: ignore[union-attr]
        assert bytes(obj.byte_array[:3]) == b"\7\7\7"
    cache.get("r", verify=True).release()  # type: ignore[union-attr]
    until(lambda: cache.stats().counts.holds == 0)


def test_an_object_of_several_tensors(cache: shmcache.SharedCache) -> None:
    shapes, dtypes = [(2, 3, 5), (7,), (11, 13)], [torch.float32, torch.bfloat16, torch.uint8]
    with cache.allocate(shapes, dtypes, fmt=shmcache.MemoryFormat.KV_2LTD) as obj:  # type: ignore[union-attr]
        for i in range(3):
            obj.get_tensor(i).fill_(i + 1)  # type: ignore[union-attr]
        assert cache.put("k", obj)
    with cache.get("k", verify=True) as got:  # type: ignore[union-attr]
        assert [tuple(s) for s in got.get_shapes()] == shapes and got.get_dtypes() == dtypes
        assert got.get_memory_format() is shmcache.MemoryFormat.KV_2LTD
        assert float(got.get_tensor(2).sum()) == 3 * 143  # type: ignore[union-attr]
        flip(cache, got, got.get_size() - 1)
    with pytest.raises(shmcache.ChecksumError):
        cache.get("k", verify=True)


def test_an_object_in_a_page_is_summed_without_the_rest_of_the_page(cache: shmcache.SharedCache) -> None:
    with cache.default._allocate(_meta.layout_in_page((100,), "uint8", None, 8192), True, 0.0) as obj:  # type: ignore[union-attr]
        obj.byte_array[:] = b"p" * 100
        assert cache.put("k", obj)
    with cache.get("k") as obj:  # type: ignore[union-attr]
        flip(cache, obj, 100)
    with cache.get("k", verify=True) as obj:  # type: ignore[union-attr]
        assert stored_sum(obj) == xxhash.xxh3_64_intdigest(b"p" * 100)


def test_a_put_that_stored_nothing_may_be_followed_by_another(cache: shmcache.SharedCache) -> None:
    store(cache, "k")
    obj = filled(cache, 4096)
    assert cache.put("k", obj) is False
    obj.byte_array[:] = b"\2" * 4096
    assert cache.put("other", obj) is True
    with pytest.raises(ValueError, match="published before"):
        cache.put("third", obj)
    obj.release()
    with pytest.raises(shmcache.StaleHandleError):
        cache.put("third", obj)
    for key in ("k", "other"):
        cache.get(key, verify=True).release()  # type: ignore[union-attr]


def test_the_description_of_what_is_published_is_never_changed(cache: shmcache.SharedCache) -> None:
    store(cache, "k")
    h = cache._attachment.handle
    with cache.get("k") as obj:  # type: ignore[union-attr]
        assert lib.shmc_set_meta(h, obj._holds[0][0], b"xxx", 3) == lib.SHMC_E_PUBLISHED
    assert lib.shmc_set_meta(h, lib.shmc_owner_new(h, 1), b"xxx", 3) == lib.SHMC_E_STALE
    with filled(cache, 10) as obj:
        for wrong in (0, 49):
            assert lib.shmc_set_meta(h, obj._holds[0][0], b"x" * 49, wrong) == lib.SHMC_E_INVAL
    cache.get("k", verify=True).release()  # type: ignore[union-attr]


def test_a_child_puts_its_own_and_not_its_parents(cache: shmcache.SharedCache, fork: Any) -> None:
    parents = filled(cache, 100)

    def child(_: Any) -> None:
        with pytest.raises(shmcache.StaleHandleError):
            cache.put("parents", parents)
        store(cache, "childs")
        cache.get("childs", verify=True).release()  # type: ignore[union-attr]

    assert fork(child).wait() == 0
    cache.get("childs", verify=True).release()  # type: ignore[union-attr]
    assert cache.put("parents", parents)
    parents.release()
    cache.get("parents", verify=True).release()  # type: ignore[union-attr]


# ---- the option ----------------------------------------------------------------------------------------


def test_it_is_the_segments_for_life(name: str) -> None:
    with make(name) as cache:
        with shmcache.open(name) as other, shmcache.open(name, checksum="xxh3"):
            assert other.checksum == "xxh3"
        with pytest.raises(shmcache.SegmentMismatchError, match="checksum: it has 'xxh3', you asked 'none'"):
            shmcache.open(name, checksum="none")
        cache.unlink()
    with make(name, None) as cache:
        assert cache.checksum == "none"
        with pytest.raises(shmcache.SegmentMismatchError, match="checksum: it has 'none', you asked 'xxh3'"):
            shmcache.open(name, checksum="xxh3")
    with shmcache.open(name, capacity=MIB, checksum="xxh3", on_incompatible="replace") as cache:
        assert cache.checksum == "xxh3"
        cache.unlink()
    for wrong in ("md5", "", None, True):
        with pytest.raises(ValueError, match=r"checksum is .*'none', 'xxh3', 'crc32c'"):
            shmcache.open(name, capacity=MIB, checksum=wrong)  # type: ignore[arg-type]


def test_verifying_without_checksums_is_a_mistake_that_is_said(name: str) -> None:
    with make(name, None) as cache:
        store(cache, "k")
        with cache.lookup(["k"]) as hit, pytest.raises(ValueError, match=r'no checksums; make it with checksum="xxh3"'):
            hit.get(0, verify=True)
        for call in (lambda: cache.get("k", verify=True), lambda: cache.get_many(["k"], verify=True)):
            with pytest.raises(ValueError, match="no checksums"):
                call()
        with cache.get("k") as obj:  # type: ignore[union-attr]
            assert stored_sum(obj) is None
        assert cache.stats().counts.holds == 0
        cache.unlink()


def test_a_part_that_an_older_version_put_is_not_vouched_for(cache: shmcache.SharedCache) -> None:
    with shmcache.attach(cache.name, prefault="lazy") as old:
        old._attachment.checksum = None
        store(old, "k", 1000)
    with cache.get("k") as obj:  # type: ignore[union-attr]
        assert obj.get_size() == 1000
    with pytest.raises(shmcache.ChecksumError, match="put is none"):
        cache.get("k", verify=True)


def test_a_newer_kind_is_refused_by_name() -> None:
    assert checksum_of("seg", 1) is None
    with pytest.raises(shmcache.SegmentMismatchError, match="'seg' keeps checksums of kind #9"):
        checksum_of("seg", 9 << 4)


def test_a_description_without_room_for_it_is_refused_at_allocation(cache: shmcache.SharedCache, name: str) -> None:
    shapes = [(1000, 1000, 1)] * 6  # 45 bytes to describe
    dtypes = [torch.uint8] * 6
    for call in (
        lambda: cache.allocate(shapes, dtypes),
        lambda: cache.allocate_many(shapes, dtypes, 2),
        lambda: cache.reserve("k", shapes, dtypes),
    ):
        with pytest.raises(ValueError, match="beside a checksum room is for 40"):
            call()
    assert cache.stats().counts.holds == 0
    most = [(1000, 1000)] * 5  # 33 and 7
    with cache.allocate([*most, (1, 1, 1, 1, 1)], [*[torch.uint8] * 5, torch.uint8]) as obj:  # type: ignore[union-attr]
        assert len(obj._look().blob) == 40
        assert cache.put("k", obj)
    cache.get("k", verify=True).release()  # type: ignore[union-attr]


def test_objects_that_look_alike_share_a_layout_whatever_their_bytes(cache: shmcache.SharedCache) -> None:
    store(cache, "a")
    store(cache, "b")
    with cache.get("a") as a, cache.get("b") as b:  # type: ignore[union-attr]
        assert stored_sum(a) != stored_sum(b)
        known = len(_meta._read)
        assert a._look() is b._look() and len(_meta._read) <= known + 1
        assert a._look().blob[0] == 1


@pytest.mark.parametrize("blob", [b"", b"\2", b"\2" * 8, b"\2" * 9, b"\2\0\1" + b"\xff" * 45, b"\3" + b"\0" * 20])
def test_any_description_can_be_read(blob: bytes) -> None:
    assert _meta.layout_from(blob, 100).nbytes <= 100


def test_private_memory_has_none() -> None:
    from shmcache._private import PrivateCache

    private = PrivateCache(torch.zeros(MIB, dtype=torch.uint8))
    assert private.checksum == "none"
    store(private, "k")
    with pytest.raises(ValueError, match="no checksums"):
        private.get("k", verify=True)
    private.close()


def test_the_backend_passes_it_on(name: str) -> None:
    from shmcache.backend import SharedCPUBackend
    from shmcache.config import EngineConfig, EngineMetadata
    from shmcache.keys import CacheEngineKey

    extra = {"shmcache.segment": name, "shmcache.capacity": MIB, "shmcache.checksum": "xxh3"}
    metadata = EngineMetadata("model", 1, 1, 0, 0, torch.bfloat16, (2, 2, 16, 2, 4), chunk_size=16)
    backend = SharedCPUBackend(EngineConfig(max_local_cpu_size=0, extra_config=extra), metadata, "cpu")
    obj = backend.allocate(metadata.get_shapes(), metadata.get_dtypes())
    obj.raw_tensor.fill_(3)
    backend.submit_put_task(CacheEngineKey("model", 1, 0, 77, torch.bfloat16), obj)
    with shmcache.attach(name, prefault="lazy") as cache:
        assert cache.checksum == "xxh3"
        (space,) = (cache.namespace(n.name) for n in cache.namespaces() if n.chunks)
        with space.get(77, verify=True) as got:  # type: ignore[union-attr]
            assert set(bytes(got.byte_array)) == {3}
    obj.ref_count_down()
    backend.close()
    shmcache.unlink(name)
