"""What LMCache promises of its allocators (T-A), of object pins (T-K), and of formats, for both makers."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from contract_differences import expected
from contract_kits import BF16, HAS_LMCACHE, MIB, modules

import shmcache
from shmcache import allocators, errors

ARENA = 128 * MIB
PAGE = torch.Size((2, 32, 16, 64))


def size_of(shape: torch.Size) -> int:
    return shape.numel() * 2


def made(maker: Any, kind: str, size: int = ARENA, **options: Any) -> Any:
    if kind == "Tensor":
        return maker.Tensor(torch.empty(size, dtype=torch.uint8), **options)
    return getattr(maker, kind)(size, **options)


KINDS = ["Tensor", "Host", "Pin", "GPU", "Mixed"]


_without = pytest.mark.skipif(not HAS_LMCACHE, reason="LMCache is not installed")
POOLS = [
    *(pytest.param(("ours", kind), id=f"ours-{kind}") for kind in [*KINDS, "segment", "lazy"]),
    *(pytest.param(("lmcache", kind), id=f"lmcache-{kind}", marks=_without) for kind in KINDS),
]  # LMCache's shared memory shares nothing, and its lazy allocator needs a GPU


@pytest.fixture(params=POOLS)
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """A maker, and one of its allocators."""
    side, kind = request.param
    if side == "lmcache":
        request.getfixturevalue("tame")
    maker = modules(side)
    if kind == "segment":
        name = request.getfixturevalue("name")
        found = allocators.MixedMemoryAllocator(32 * MIB, shm_name=name)
    elif kind == "lazy":
        found = allocators.LazyMemoryAllocator(MIB, 32 * MIB)
    else:
        found = made(maker, kind)
    yield maker, found
    found.close()
    found.close()
    if kind == "segment":
        shmcache.unlink(request.getfixturevalue("name"), force=True)


def bytes_in_use(allocator: Any) -> int:
    for at in ("pin_allocator", "allocator"):
        allocator = getattr(allocator, at, allocator)
    return int(allocator.total_allocated_size)


def test_T_A1_objects_have_what_was_asked_and_are_free_once(both: tuple[Any, Any]) -> None:
    """1 MiB, 2 MiB and 4 MiB; freed twice without harm, and then without a tensor."""
    maker, allocator = both
    fmt = maker.MemoryFormat.KV_2LTD
    asked = [
        (torch.Size((2, 1, 512, 256)), torch.float32), (torch.Size((2, 2, 1024, 256)), BF16),
        (torch.Size((2, 4, 2048, 256)), torch.int8),
    ]  # fmt: skip
    objs = [allocator.allocate(shape, dtype, fmt) for shape, dtype in asked]
    for obj, (shape, dtype) in zip(objs, asked, strict=True):
        assert obj.tensor.shape == obj.metadata.shape == shape and obj.tensor.dtype == obj.metadata.dtype == dtype
        assert obj.get_size() == shape.numel() * dtype.itemsize == obj.shm_byte_length
        assert obj.get_physical_size() == obj.metadata.phy_size >= obj.get_size()
    assert allocator.memcheck()
    for obj in (objs[1], objs[0], objs[1], objs[1]):
        allocator.free(obj)
        assert obj.tensor is None and obj.raw_tensor is None and not obj.is_valid() and allocator.memcheck()
    assert objs[2].is_valid() and bytes_in_use(allocator) == objs[2].get_physical_size()


def test_T_A2_small_and_impossible_requests_and_frees_in_any_order(both: tuple[Any, Any]) -> None:
    maker, allocator = both
    fmt = maker.MemoryFormat.KV_2LTD
    objs = [allocator.allocate(torch.Size((3, 5, 7)), torch.half, fmt) for _ in range(20)]
    assert objs[0].tensor.shape == (3, 5, 7)
    assert allocator.allocate(torch.Size((ARENA,)), torch.float32, fmt) is None, "four times the arena"
    assert allocator.batched_allocate(torch.Size((ARENA // 8,)), torch.float32, 3, fmt) is None
    assert allocator.memcheck()
    order = objs * 2
    random.Random(3).shuffle(order)
    for obj in order:
        allocator.free(obj)
        assert allocator.memcheck()
    assert bytes_in_use(allocator) == 0
    objs = allocator.batched_allocate(torch.Size((3, 5, 7)), torch.half, 8, fmt)
    allocator.batched_free(list(objs))
    allocator.batched_free(list(objs))
    assert allocator.memcheck() and bytes_in_use(allocator) == 0


def test_T_A4_a_tensor_is_the_memory_itself(both: tuple[Any, Any]) -> None:
    maker, allocator = both
    obj = allocator.allocate(torch.Size((2, 3)), torch.float32, maker.MemoryFormat.KV_2LTD)
    obj.tensor.fill_(1.0)
    obj.tensor[1] = 2.0
    assert obj.tensor.tolist() == [[1.0] * 3, [2.0] * 3]
    assert obj.tensor.data_ptr() == obj.data_ptr
    plain = torch.frombuffer(obj.byte_array, dtype=torch.uint8)
    assert plain[:4].tolist() == [0, 0, 0x80, 0x3F]
    plain[:4] = 0
    assert float(obj.tensor[0][0]) == 0.0
    assert obj.raw_tensor[: obj.get_size()].view(torch.float32).reshape(2, 3).equal(obj.tensor)
    obj.ref_count_down()


def test_T_A5_a_hole_is_used_again_without_a_rest(both: tuple[Any, Any]) -> None:
    maker, allocator = both
    fmt = maker.MemoryFormat.KV_2LTD
    shape = torch.Size((2, 1, 512, 512))
    a, b = (allocator.allocate(shape, BF16, fmt) for _ in range(2))
    address, used = a.metadata.address, bytes_in_use(allocator)
    a.ref_count_down()
    again = allocator.allocate(shape, BF16, fmt)
    assert again.metadata.address == address and bytes_in_use(allocator) == used
    for obj in (again, b):
        obj.ref_count_down()
    assert allocator.memcheck() and bytes_in_use(allocator) == 0
    whole = allocator.allocate(torch.Size((16 * MIB,)), torch.uint8, fmt)
    assert whole is not None, "the holes have become one"
    whole.ref_count_down()


@pytest.mark.parametrize("kind", KINDS)
def test_T_A6_a_batch_fits_exactly(maker: Any, kind: str) -> None:
    """32 objects fill the arena; freed as a batch they leave one hole."""
    shape = torch.Size((100, 2, 1024))
    allocator = made(maker, kind, 32 * size_of(shape), **({"align_bytes": 4096} if kind in ("Tensor", "GPU") else {}))
    fmt = maker.MemoryFormat.KV_T2D
    objs = allocator.batched_allocate(shape, BF16, 32, fmt)
    assert len(objs) == 32 and all(obj.is_valid() and obj.tensor.shape == shape for obj in objs)
    assert allocator.allocate(shape, BF16, fmt) is None
    starts = sorted(obj.metadata.address for obj in objs)
    assert starts == list(range(0, 32 * size_of(shape), size_of(shape)))
    allocator.batched_free(objs)
    assert bytes_in_use(allocator) == 0 and allocator.memcheck()
    assert allocator.allocate(torch.Size((32 * 100, 2, 1024)), BF16, fmt) is not None
    allocator.close()


@pytest.mark.parametrize("kind", ["PagedTensor", "Host", "Pin", "Mixed", "PagedCpuGpu"])
def test_T_A3_pages(maker: Any, kind: str) -> None:
    """64 pages; one, a batch of two, and a smaller object; frees keep the books; 65 at once are refused."""
    fmt, page = maker.MemoryFormat.KV_2LTD, size_of(PAGE)
    pages = {"shapes": [PAGE], "dtypes": [BF16], "fmt": fmt}
    if kind == "PagedTensor":
        allocator = maker.PagedTensor(torch.empty(64 * page, dtype=torch.uint8), [PAGE], [BF16], fmt)
    elif kind == "PagedCpuGpu":
        allocator = maker.PagedCpuGpu()
        allocator.init_cpu_memory_allocator(64 * page, [PAGE], [BF16], fmt)
    else:
        allocator = getattr(maker, kind)(64 * page, use_paging=True, **pages)
    where = {"allocator_type": "cpu"} if kind == "PagedCpuGpu" else {}
    smaller = torch.Size((2, 32, 8, 64))
    one = allocator.allocate(PAGE, BF16, fmt, **where)
    two = allocator.batched_allocate(PAGE, BF16, 2, fmt, **where)
    small = allocator.allocate(smaller, BF16, fmt, **where)
    objs = [one, *two, small]
    assert [obj.tensor.shape for obj in objs] == [PAGE, PAGE, PAGE, smaller]
    assert all(obj.tensor.dtype == BF16 for obj in objs)
    assert sorted(obj.metadata.address for obj in objs) == [0, 1, 2, 3], "an address is a page's number"
    assert small.get_physical_size() == page
    assert small.get_size() == expected(maker, "rules of pages", ours=page // 2, lmcache=page)
    for i, obj in enumerate(objs):
        obj.tensor.fill_(i + 1)
    assert [float(obj.tensor.max()) for obj in objs] == [1, 2, 3, 4] == [float(obj.tensor.min()) for obj in objs]
    assert allocator.batched_allocate(PAGE, BF16, 65, fmt, **where) is None and allocator.memcheck()
    assert allocator.batched_allocate(PAGE, BF16, 61, fmt, **where) is None and allocator.memcheck()
    rest = allocator.batched_allocate(PAGE, BF16, 60, fmt, **where)
    assert len(rest) == 60 and allocator.allocate(PAGE, BF16, fmt, **where) is None
    for obj in (*rest, two[1], one, small, two[0]):
        obj.ref_count_down()
        assert allocator.memcheck()
    again = allocator.batched_allocate(PAGE, BF16, 64, fmt, **where)
    assert sorted(obj.metadata.address for obj in again) == list(range(64))
    allocator.close()


def test_T_A3_a_buffer_is_a_multiple_of_a_page(maker: Any) -> None:
    wrong = expected(maker, "rules of pages", ours=ValueError, lmcache=AssertionError)
    buffer = torch.empty(size_of(PAGE) + 64, dtype=torch.uint8)
    with pytest.raises(wrong):
        maker.PagedTensor(buffer, [PAGE], [BF16], maker.MemoryFormat.KV_2LTD)


def test_T_A7_byte_buffers_lie_beside_the_arena(maker: Any) -> None:
    allocator = made(maker, "Mixed", MIB)
    obj = allocator.allocate(torch.Size((512, 0, 0, 0)), None, maker.MemoryFormat.BINARY_BUFFER)
    assert isinstance(obj, maker.BytesObj)
    assert len(obj.byte_array) == 512 == obj.get_size() and obj.tensor is None and obj.raw_tensor is None
    assert bytes_in_use(allocator) == 0 and obj.get_ref_count() == 1 and obj.get_num_tokens() == 1
    assert obj.get_memory_format() is maker.MemoryFormat.BINARY_BUFFER and obj.parent() is None
    obj.ref_count_up()
    assert obj.get_ref_count() == 1 and obj.can_evict
    obj.pin()
    assert obj.is_pinned and not obj.can_evict
    obj.unpin()
    assert not obj.is_pinned
    allocator.free(obj)
    objs = allocator.batched_allocate(torch.Size((16, 0, 0, 0)), None, 3, maker.MemoryFormat.BINARY_BUFFER)
    assert [len(o.byte_array) for o in objs] == [16] * 3
    allocator.batched_free(objs)
    assert allocator.memcheck()
    allocator.close()


def test_T_A_formats_that_are_no_tensors_are_refused_by_mixed(maker: Any) -> None:
    allocator = made(maker, "Mixed", MIB)
    for fmt in (maker.MemoryFormat.UNDEFINED, maker.MemoryFormat.BINARY):
        with pytest.raises(ValueError):
            allocator.allocate(torch.Size((4,)), BF16, fmt)
        with pytest.raises(ValueError):
            allocator.batched_allocate(torch.Size((4,)), BF16, 2, fmt)
    with pytest.raises(ValueError):
        made(maker, "Mixed", MIB, align_bytes=3000)
    allocator.close()


def test_T_A_several_shapes_in_one_object(maker: Any) -> None:
    """Models with groups of layers that differ: one object, a tensor for each group."""
    allocator = made(maker, "Mixed", MIB)
    shapes, dtypes = [torch.Size((2, 4, 16, 64)), torch.Size((1, 3, 16, 32))], [torch.float32, BF16]
    obj = allocator.allocate(shapes, dtypes, maker.MemoryFormat.KV_2LTD)
    total = 2 * 4 * 16 * 64 * 4 + 3 * 16 * 32 * 2
    assert obj.get_size() == total == obj.metadata.get_size()
    assert obj.get_shapes() == shapes and obj.get_dtypes() == dtypes
    obj.get_tensor(0).fill_(1)
    obj.get_tensor(1).fill_(2)
    assert obj.get_tensor(0).shape == shapes[0] and obj.get_tensor(1).dtype == BF16
    assert float(obj.get_tensor(0).min()) == 1 and float(obj.get_tensor(1).max()) == 2
    with pytest.raises(IndexError):
        obj.get_tensor(2)
    with pytest.raises((ValueError, AssertionError)):
        allocator.allocate(shapes, [BF16], maker.MemoryFormat.KV_2LTD)
    obj.ref_count_down()
    allocator.close()


def test_T_A_objects_of_one_and_of_a_batch_have_the_same_bytes(maker: Any) -> None:
    allocator = made(maker, "Tensor", MIB, align_bytes=4096)
    one = allocator.allocate(torch.Size((5,)), torch.uint8)
    (batched,) = allocator.batched_allocate(torch.Size((5,)), torch.uint8, 1)
    sizes = (one.raw_tensor.numel(), batched.raw_tensor.numel())
    assert sizes == expected(maker, "size of raw data", ours=(5, 5), lmcache=(5, 4096))
    assert one.get_size() == batched.get_size() == 5 == len(one.byte_array) == len(batched.byte_array)
    assert one.metadata.phy_size == batched.metadata.phy_size == 4096


def test_T_A_a_dropped_object_gives_its_memory_back(maker: Any) -> None:
    allocator = made(maker, "Mixed", MIB)
    obj = allocator.allocate(torch.Size((5,)), torch.uint8, maker.MemoryFormat.KV_2LTD)
    assert bytes_in_use(allocator) == 4096
    del obj
    gc.collect()
    assert bytes_in_use(allocator) == 0
    allocator.close()


def test_T_A_metadata_survives_a_serializer(maker: Any) -> None:
    """Pins and positions are a process's own, and stay out."""
    meta = maker.Metadata(
        shape=torch.Size((2, 3)), dtype=BF16, address=4096, phy_size=8192, ref_count=2, pin_count=3,
        fmt=maker.MemoryFormat.KV_2LTD, shapes=[torch.Size((2, 3))], dtypes=[BF16],
    )  # fmt: skip
    back = maker.Metadata.from_dict(meta.to_dict())
    assert (back.shape, back.dtype, back.address, back.phy_size, back.ref_count, back.pin_count, back.fmt) == (
        meta.shape, BF16, 4096, 8192, 2, 0, meta.fmt
    )  # fmt: skip
    assert back.shapes == meta.shapes and back.dtypes == meta.dtypes and back.get_size() == 12


def test_the_metadata_of_both_makers_is_the_same_on_the_wire() -> None:
    pytest.importorskip("lmcache")
    from contract_kits import modules

    one, two = (
        m.Metadata(torch.Size((2, 3)), BF16, 0, 4096, 1, 0, m.MemoryFormat.KV_2TD).to_dict()
        for m in (modules("ours"), modules("lmcache"))
    )
    assert {k: v for k, v in one.items() if k in two} == {k: v for k, v in two.items() if k in one}
    assert set(two) <= set(one)


def test_T_A_formats_have_the_same_names_and_numbers(maker: Any) -> None:
    assert {f.name: f.value for f in maker.MemoryFormat} == {
        "UNDEFINED": 0, "KV_2LTD": 1, "KV_T2D": 2, "KV_2TD": 3, "BINARY": 4, "BINARY_BUFFER": 5, "KV_MLA_FMT": 6,
        "EC_TD": 7, "HS_TD": 8,
    }  # fmt: skip
    dims = {f.name: f.token_dim() for f in maker.MemoryFormat}
    same = {"UNDEFINED": 0, "KV_2LTD": 2, "BINARY": 0, "BINARY_BUFFER": 0, "KV_MLA_FMT": 2, "EC_TD": 0, "HS_TD": 0}
    layer = expected(maker, "tokens of a layer", ours={"KV_T2D": 0, "KV_2TD": 1}, lmcache={"KV_T2D": 1, "KV_2TD": 0})
    assert dims == {**same, **layer}
    if maker.ours:
        assert maker.MemoryFormat["KV_BLOB"] is maker.MemoryFormat.KV_2LTD


# ---- references and pins of one object --------------------------------------------------------------


@pytest.fixture
def one(maker: Any) -> Iterator[tuple[Any, Callable[[], int]]]:
    """A fresh object, and the bytes in use of its allocator."""
    allocator = made(maker, "Mixed", MIB)
    yield allocator.allocate(torch.Size((4,)), BF16, maker.MemoryFormat.KV_2LTD), lambda: bytes_in_use(allocator)
    allocator.close()


def test_T_K_a_pin_keeps_the_memory_without_references(one: tuple[Any, Callable[[], int]]) -> None:
    obj, used = one
    assert obj.pin() is True and obj.metadata.pin_count == 1 and obj.is_pinned
    obj.ref_count_up()
    assert obj.get_ref_count() == 2
    obj.ref_count_down()
    obj.ref_count_down()
    assert obj.get_ref_count() == 0 and used() == 4096
    assert obj.unpin() is True
    assert used() == 0 and not obj.is_valid()


def test_T_K_one_unpin_is_silent_and_a_second_warns(
    maker: Any, one: tuple[Any, Callable[[], int]], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("shmcache" if maker.ours else "lmcache.v1.memory_management")
    logger.addHandler(caplog.handler)
    try:
        obj, _ = one
        obj.pin()
        assert obj.unpin() is True and obj.metadata.pin_count == 0
        assert not caplog.records
        assert obj.unpin() is expected(maker, "double unpin", ours=False, lmcache=True)
        assert any("Double unpin" in r.getMessage() for r in caplog.records)
        assert obj.metadata.pin_count == 0 and not obj.is_pinned and obj.is_valid()
    finally:
        logger.removeHandler(caplog.handler)


def test_T_K_what_can_be_evicted(one: tuple[Any, Callable[[], int]]) -> None:
    """One reference and no pin."""
    obj, _ = one
    assert obj.can_evict
    obj.pin()
    assert not obj.can_evict
    obj.unpin()
    obj.ref_count_up()
    assert not obj.can_evict
    obj.ref_count_down()
    assert obj.can_evict and obj.get_ref_count() == 1


def test_T_K_one_reference_too_few(maker: Any, one: tuple[Any, Callable[[], int]]) -> None:
    obj, used = one
    obj.ref_count_down()
    assert used() == 0
    with expected(maker, "double free", ours=pytest.raises(errors.StaleHandleError), lmcache=nullcontext()):
        obj.ref_count_down()
    assert obj.get_ref_count() == 0 and used() == 0
    obj.parent().free(obj)
    assert obj.parent().memcheck()


def test_T_A_the_parent_is_the_allocator_that_was_asked(maker: Any) -> None:
    allocator = made(maker, "Mixed", MIB)
    obj = allocator.allocate(torch.Size((4,)), BF16, maker.MemoryFormat.KV_2LTD)
    assert obj.parent() is allocator
    assert obj.shm_offset == obj.metadata.address == 0 and allocator.align_bytes == 4096 and allocator.size == MIB
    assert allocator.buffer.numel() == MIB and allocator.buffer.data_ptr() == obj.data_ptr
    allocator.close()


def test_the_default_alignments_are_those_of_the_document() -> None:
    """512 for a tensor of the caller's, 4096 for the pooled ones."""
    tensor = allocators.TensorMemoryAllocator(torch.empty(MIB, dtype=torch.uint8))
    assert tensor.align_bytes == tensor.ALIGN_BYTES == 512
    assert allocators.MixedMemoryAllocator(MIB).align_bytes == 4096
    assert allocators.HostMemoryAllocator(MIB).align_bytes == 4096


def test_the_interface_of_the_document() -> None:
    """References through the allocator, as older versions have them."""
    allocator = allocators.TensorMemoryAllocator(torch.empty(MIB, dtype=torch.uint8))
    obj = allocator.allocate(torch.Size((4,)), BF16)
    allocator.ref_count_up(obj)
    assert allocator.get_ref_count(obj) == 2
    allocator.ref_count_down(obj)
    allocator.ref_count_down(obj)
    assert allocator.get_ref_count(obj) == 0 and allocator.memcheck()
    with pytest.raises(errors.StaleHandleError):
        allocator.ref_count_down(obj)
    buffer = allocators.BufferAllocator("cpu")
    obj = buffer.allocate(torch.Size((8,)))
    assert len(obj.byte_array) == 8 and buffer.memcheck()
    buffer.free(obj)


@pytest.mark.parametrize("kind", ["Tensor", "Host", "Pin", "GPU", "Mixed", "Buffer", "Lazy", "Paged", "PagedCpuGpu"])
def test_the_names_of_the_document_and_those_of_lmcache(kind: str) -> None:
    """`shape=` and `dtype=` are the older names of `shapes=` and `dtypes=`."""
    shape = torch.Size((64, 64))
    allocator: Any
    if kind == "Tensor":
        allocator = allocators.TensorMemoryAllocator(tensor=torch.empty(MIB, dtype=torch.uint8))
    elif kind == "Buffer":
        allocator = allocators.BufferAllocator(device="cpu")
    elif kind == "Lazy":
        allocator = allocators.LazyMemoryAllocator(init_size=MIB, final_size=MIB)
    elif kind == "Paged":
        allocator = allocators.PagedTensorMemoryAllocator(torch.empty(MIB, dtype=torch.uint8), [shape], [BF16])
    elif kind == "PagedCpuGpu":
        allocator = allocators.PagedCpuGpuMemoryAllocator()
        allocator.init_cpu_memory_allocator(MIB, [shape], [BF16])
    else:
        allocator = getattr(allocators, f"{kind}MemoryAllocator")(size=MIB)
    for names in ({"shape": shape, "dtype": BF16}, {"shapes": shape, "dtypes": BF16}, {"shape": shape, "dtypes": BF16}):
        obj = allocator.allocate(**names)
        assert kind == "Buffer" or (obj.get_shape(), obj.get_dtype()) == (shape, BF16)
        allocator.free(memory_obj=obj)
    with pytest.raises(TypeError):
        allocator.allocate(shape, BF16, shape=shape)
    assert allocator.memcheck() is True
    allocator.close()


def test_an_allocator_of_ones_own_needs_what_the_document_has() -> None:
    class Three(allocators.MemoryAllocatorInterface):
        """Three objects and no more."""

        def __init__(self) -> None:
            self.left = 3
            self.buffers = allocators.BufferAllocator()

        def allocate(self, shape: Any, dtype: Any, fmt: Any = None) -> Any:  # type: ignore[override]
            if not self.left:
                return None
            self.left -= 1
            return self.buffers.allocate(shape, dtype)

        def free(self, memory_obj: Any) -> None:  # type: ignore[override]
            self.left += 1

    three = Three()
    assert three.batched_allocate(torch.Size((8,)), None, 4) is None and three.left == 3
    objs = three.batched_allocate(torch.Size((8,)), None, 3)
    assert objs is not None and len(objs) == 3 and three.left == 0
    three.batched_free(objs)
    assert three.left == 3 and three.batched_allocate(torch.Size((8,)), None, 0) == []
