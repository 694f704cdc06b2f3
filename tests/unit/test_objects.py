"""MemoryObj: views, holds, counts, and that every dtype and shape comes back bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import shmcache
from shmcache._dtypes import TABLE


@pytest.fixture
def cache(name: str) -> Iterator[shmcache.SharedCache]:
    with shmcache.create(name, "4MiB") as cache:
        yield cache
        assert cache.verify() == []
        cache.unlink()


def torch_dtypes() -> list[torch.dtype]:
    found = {getattr(torch, n) for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)}
    return sorted(
        (d for d in found if d not in {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}),
        key=str,
    )


@pytest.mark.parametrize("dtype", torch_dtypes(), ids=str)
def test_every_dtype_round_trips(cache: shmcache.SharedCache, dtype: torch.dtype) -> None:
    shape = (3, 1, 5, 2)
    obj = cache.allocate(shape, dtype)
    assert obj is not None
    raw = torch.randint(0, 256, (obj.get_size(),), dtype=torch.uint8)
    obj.byte_array[:] = memoryview(raw.numpy())
    assert cache.put("k", obj)
    obj.release()
    with cache.get("k") as got:
        assert got.get_shape() == torch.Size(shape) and got.get_dtype() == dtype
        assert got.get_size() == 30 * dtype.itemsize
        tensor = got.tensor
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert torch.equal(tensor.contiguous().view(torch.uint8).reshape(-1), raw)


def test_the_table_of_dtypes_only_grows() -> None:
    first = ["uint8", "int8", "int16", "int32", "int64"]
    names = [d.name for _, d in sorted(TABLE.items())]
    assert names[:5] == first or set(first) <= set(names)
    assert {"bfloat16", "float8_e4m3fn", "complex64"} <= set(names)


@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1, 1), (2,) * 10, (1,) * 20, (1000, 3), (5, 1, 7, 1, 9)], ids=str)
def test_every_shape_comes_back(cache: shmcache.SharedCache, shape: tuple[int, ...]) -> None:
    with cache.allocate(shape, torch.int16) as obj:
        obj.tensor.copy_(torch.arange(obj.tensor.numel(), dtype=torch.int16).reshape(shape))
        cache.put("k", obj)
    with cache.get("k") as got:
        assert got.tensor.shape == shape
        assert torch.equal(got.tensor.flatten(), torch.arange(got.tensor.numel(), dtype=torch.int16))


@pytest.mark.parametrize("dtype", ["float33", torch.qint8, object(), None], ids=str)
def test_an_unknown_dtype_is_an_error(cache: shmcache.SharedCache, dtype: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        cache.allocate((3,), dtype)


def test_a_tensor_keeps_its_object_and_slices_do_not(cache: shmcache.SharedCache) -> None:
    with cache.allocate((8,), torch.uint8) as obj:
        cache.put("k", obj)
    tensor = cache.get("k").tensor
    gc.collect()
    assert cache.stats().counts.holds == 1
    part = tensor[2:4]
    del tensor
    gc.collect()
    assert cache.stats().counts.holds == 0
    assert part.numel() == 2  # mapped, no longer protected


def test_an_owned_tensor_keeps_its_hold_in_all_made_from_it(cache: shmcache.SharedCache) -> None:
    with cache.allocate((8,), torch.float32) as obj:
        obj.tensor.fill_(4)
        cache.put("k", obj)
    with cache.get("k") as got:
        owned = got.tensor_owned()
    assert cache.stats().counts.holds == 1
    half = owned[4:].view(2, 2)
    del owned
    gc.collect()
    assert cache.stats().counts.holds == 1
    assert cache.remove("k")
    assert float(half.sum()) == 16
    del half
    gc.collect()
    assert cache.stats().counts.holds == 0 and cache.stats().bytes.used == 0


def test_a_dropped_object_releases_its_hold(cache: shmcache.SharedCache) -> None:
    with cache.allocate(10) as obj:
        cache.put("k", obj)
    got = cache.get("k")
    assert cache.stats().counts.holds == 1
    del got
    gc.collect()
    assert cache.stats().counts.holds == 0


def test_after_release_views_are_none_and_a_second_release_is_nothing(cache: shmcache.SharedCache) -> None:
    obj = cache.allocate((4,), torch.uint8)
    view = obj.tensor
    assert obj.is_valid()
    obj.release()
    obj.release()
    assert not obj.is_valid() and obj.tensor is None
    assert view.numel() == 4
    with pytest.raises(shmcache.StaleHandleError):
        obj.ref_count_down()


def test_a_double_release_never_frees_anothers_block(cache: shmcache.SharedCache) -> None:
    obj = cache.allocate(4096)
    obj.release()
    other = cache.allocate(4096)
    assert other.shm_offset == obj.shm_offset
    obj.release()
    with pytest.raises(shmcache.StaleHandleError):
        obj.ref_count_down()
    assert other.is_valid() and cache.stats().counts.holds == 1
    other.release()


def test_reference_counts_count_all_processes_and_the_cache(cache: shmcache.SharedCache, name: str) -> None:
    obj = cache.allocate(10)
    assert obj.get_ref_count() == 1
    obj.ref_count_up()
    assert obj.get_ref_count() == 2
    cache.put("k", obj)
    assert obj.get_ref_count() == 3, "the cache's own counts one"
    with shmcache.attach(name) as other, other.get("k") as got:
        assert got.get_ref_count() == obj.get_ref_count() == 4
    obj.ref_count_down()
    obj.ref_count_down()
    with pytest.raises(shmcache.StaleHandleError):
        obj.ref_count_down()
    with cache.get("k") as got:
        assert got.get_ref_count() == 2 and not got.can_evict


def test_pins_of_an_object(cache: shmcache.SharedCache) -> None:
    obj = cache.allocate(10)
    assert not obj.is_pinned and obj.unpin() is False
    assert obj.pin() and obj.is_pinned and obj.get_ref_count() == 1
    cache.put("k", obj)
    assert obj.unpin() and not obj.is_pinned and not obj.unpin()
    assert cache.pin("k") and obj.is_pinned
    cache.unpin("k")
    obj.release()


def test_facts_of_an_object(cache: shmcache.SharedCache) -> None:
    with cache.allocate((2, 4, 16, 8), torch.bfloat16, fmt=shmcache.MemoryFormat.KV_2LTD) as obj:
        assert obj.get_size() == 2048 and obj.get_physical_size() == 4096
        assert obj.shm_offset % 4096 == 0 and obj.data_ptr == obj.tensor.data_ptr()
        assert obj.get_num_tokens() == 16 and obj.get_memory_format() is shmcache.MemoryFormat.KV_2LTD
        assert obj.raw_tensor.dtype == torch.uint8 and obj.raw_tensor.numel() >= 2048
        assert obj.metadata.shape == torch.Size((2, 4, 16, 8)) and obj.metadata.ref_count == 1
        assert obj.parent().name == cache.default.name
        assert torch.equal(obj.get_tensor(0), obj.tensor)


def test_what_is_written_in_one_attachment_is_read_in_another(cache: shmcache.SharedCache, name: str) -> None:
    t = torch.randn(100, 100)
    with cache.allocate(t.shape, t.dtype) as obj:
        obj.tensor.copy_(t)
        cache.put("t", obj)
    with shmcache.attach(name) as other, other.get("t") as got:
        assert torch.equal(got.tensor, t)


def test_an_exception_inside_with_is_the_one_that_is_seen(cache: shmcache.SharedCache) -> None:
    with pytest.raises(RuntimeError, match="primary"), cache.allocate(10) as obj:
        view = obj.byte_array
        raise RuntimeError("primary")
    assert view is not None and cache.stats().bytes.used == 0
