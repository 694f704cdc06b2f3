"""LMCache's memory allocators, all on the one C allocator: over a segment, or over private memory.

    TensorMemoryAllocator(tensor)                    a tensor of yours, on any device
    PagedTensorMemoryAllocator(tensor, shapes, ...)  the same in pages
    HostMemoryAllocator, PinMemoryAllocator, GPUMemoryAllocator(size)    bring their own tensor
    MixedMemoryAllocator(size)                       pinned tensors and plain byte buffers; `shm_name=` is a segment
    PagedCpuGpuMemoryAllocator()                     pages on the host and the device, for peer-to-peer
    LazyMemoryAllocator(init_size, final_size)       grows
    BufferAllocator()                                plain bytes

An allocator never evicts; a backend does.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _open
from ._addresses import AddressManager
from ._auto import AUTO
from ._dtypes import UINT8
from ._formats import MemoryFormat, MemoryObjMetadata
from ._host_memory import host_memory
from ._objects import BytesBufferMemoryObj, TensorMemoryObj
from ._pools import (
    BufferAllocator,
    MemoryAllocatorInterface,
    PagedTensorMemoryAllocator,
    PooledAllocator,
    TensorMemoryAllocator,
    by_either_name,
)
from .memory import MemoryObj

if TYPE_CHECKING:
    import torch

    from .cache import SharedCache

__all__ = [
    "AddressManager",
    "BufferAllocator",
    "BytesBufferMemoryObj",
    "GPUMemoryAllocator",
    "HostMemoryAllocator",
    "LazyMemoryAllocator",
    "MemoryAllocatorInterface",
    "MemoryFormat",
    "MemoryObj",
    "MemoryObjMetadata",
    "MixedMemoryAllocator",
    "PagedCpuGpuMemoryAllocator",
    "PagedTensorMemoryAllocator",
    "PinMemoryAllocator",
    "PooledAllocator",
    "TensorMemoryAllocator",
    "TensorMemoryObj",
]

_ALIGN = 4096
_TENSOR_FORMATS = frozenset(
    (MemoryFormat.KV_2LTD, MemoryFormat.KV_2TD, MemoryFormat.KV_T2D, MemoryFormat.KV_MLA_FMT, MemoryFormat.EC_TD,
     MemoryFormat.HS_TD)
)  # fmt: skip


def _known_format(fmt: Any) -> MemoryFormat:
    """Ours, of ours or of LMCache's own enum."""
    return fmt if isinstance(fmt, MemoryFormat) else MemoryFormat(getattr(fmt, "value", fmt))


def node_of_mapping(numa_mapping: Any) -> int | None:
    """The NUMA node that a mapping of GPUs to nodes gives for this process; None without one."""
    if numa_mapping is None:
        return None
    mapping = numa_mapping.gpu_to_numa_mapping
    import torch

    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    if device not in mapping:
        raise ValueError(f"gpu_to_numa_mapping has no entry for GPU {device}: {mapping}")
    return int(mapping[device])


class _Wrapped(MemoryAllocatorInterface):
    """One pool of memory that the allocator brings itself."""

    def __init__(
        self, memory: torch.Tensor, align_bytes: int, use_paging: bool, shapes: Any, dtypes: Any, fmt: Any
    ) -> None:
        self.allocator: PooledAllocator
        if use_paging:
            if shapes is None or dtypes is None or fmt is None:
                raise ValueError("paging needs shapes, dtypes and fmt of a page")
            self.allocator = PagedTensorMemoryAllocator(memory, shapes, dtypes, fmt, owner=self)
        else:
            self.allocator = TensorMemoryAllocator(memory, align_bytes, owner=self)
        self.pool = self.allocator.pool
        self.tensor = self.buffer = memory
        self.align_bytes = self.allocator.align_bytes
        self.size = memory.nbytes
        self.cache = self.allocator.cache

    @by_either_name
    def allocate(
        self, shapes: Any, dtypes: Any, fmt: Any = MemoryFormat.KV_2LTD, allocator_type: str | None = None
    ) -> Any:
        return self.allocator.allocate(shapes, dtypes, fmt)

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: Any = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> list[Any] | None:  # fmt: skip
        return self.allocator.batched_allocate(shapes, dtypes, batch_size, fmt)

    def free(self, memory_obj: Any, allocator_type: str | None = None) -> None:
        self.allocator.free(memory_obj)

    def batched_free(
        self, memory_objs: Sequence[Any], allocator_type: str | None = None, update_stats: bool = True
    ) -> None:
        self.allocator.batched_free(memory_objs)

    def memcheck(self) -> bool:
        return self.allocator.memcheck()

    def close(self) -> None:
        self.allocator.close()


class HostMemoryAllocator(_Wrapped):
    """Pageable memory of the host.

    Parameters
    ----------
    size
        bytes.
    use_paging
        in pages of one object of `shapes`, `dtypes`, `fmt`, of which `size` is a multiple.
    """

    def __init__(
        self, size: int, use_paging: bool = False, *, shapes: Any = None, dtypes: Any = None, fmt: Any = None,
        align_bytes: int = _ALIGN,
    ) -> None:  # fmt: skip
        super().__init__(host_memory(size), align_bytes, use_paging, shapes, dtypes, fmt)


class PinMemoryAllocator(_Wrapped):
    """Memory of the host that is registered with CUDA where there is a device; else pageable, which is logged."""

    def __init__(
        self, size: int, use_paging: bool = False, *, shapes: Any = None, dtypes: Any = None, fmt: Any = None,
        align_bytes: int = _ALIGN, numa_mapping: Any = None,
    ) -> None:  # fmt: skip
        memory = host_memory(size, node=node_of_mapping(numa_mapping), pin=True)
        super().__init__(memory, align_bytes, use_paging, shapes, dtypes, fmt)


class GPUMemoryAllocator(_Wrapped):
    """Memory of a device; of the host where there is no such device.

    Objects have tensors, but no `byte_array`.
    """

    def __init__(
        self, size: int, device: str = "cuda", align_bytes: int | None = None, use_paging: bool = False, *,
        shapes: Any = None, dtypes: Any = None, fmt: Any = None,
    ) -> None:  # fmt: skip
        import torch

        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            device = "cpu"
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        super().__init__(memory, align_bytes or TensorMemoryAllocator.ALIGN_BYTES, use_paging, shapes, dtypes, fmt)


@dataclass
class SegmentPages:
    """What a transfer engine asks of a pool of pages, where that is a segment."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    align_bytes: int  # of a page; `metadata.address` counts these
    buffer: torch.Tensor

    @property
    def buffer_ptr(self) -> int:
        return self.buffer.data_ptr()

    @property
    def buffer_size(self) -> int:
        return self.buffer.nbytes


class MixedMemoryAllocator(MemoryAllocatorInterface):
    """Tensors in pinned host memory, and byte buffers beside it.

    Parameters
    ----------
    size
        bytes of the pool.
    use_paging
        in pages of one object of `shapes`, `dtypes`, `fmt`.
    align_bytes
        a power of two from 64 to 2 MiB.
    shm_name
        name of a segment: it is opened, or made with capacity `size`, and its memory is shared with
        all who open it. Also `config.extra_config["shm_name"]`.
    cache
        an open cache to allocate from, instead of opening one.

    Attributes
    ----------
    pin_allocator, buffer_allocator
        for tensors, and for `BINARY_BUFFER`.
    cpu_allocator : SegmentPages or None
        where the backend takes objects in pages from a segment.
    """

    cpu_allocator: SegmentPages | None = None

    def __init__(
        self, size: int, use_paging: bool = False, use_hugepages: bool = False, *, numa_mapping: Any = None,
        align_bytes: int = _ALIGN, shm_name: str | None = None, config: Any = None, shapes: Any = None,
        dtypes: Any = None, fmt: Any = None, cache: SharedCache | None = None,
        object_class: type[TensorMemoryObj] = TensorMemoryObj,
    ) -> None:  # fmt: skip
        if align_bytes <= 0 or align_bytes & (align_bytes - 1):
            raise ValueError(f"align_bytes is {align_bytes}: it is a power of two")
        if config is not None and shm_name is None:
            shm_name = config.get_extra_config_value("shm_name", None)
        self.numa_mapping = numa_mapping
        self.use_hugepages = use_hugepages
        self.shm_name = shm_name
        self.size = size
        self.buffer_allocator = BufferAllocator("cpu")
        self.pin_allocator: PooledAllocator
        if (cache is not None or shm_name) and use_paging:
            raise ValueError("pages in a segment: use PagedCpuGpuMemoryAllocator")
        if cache is not None:
            self.pin_allocator = PooledAllocator(cache, self, object_class)
        elif shm_name:
            capacity = size // align_bytes * align_bytes
            cache = _open.open(shm_name.lstrip("/"), capacity=capacity, align=align_bytes)
            try:
                self.pin_allocator = PooledAllocator(cache, self, object_class)
            except BaseException:
                cache.close()
                raise
        else:
            node = node_of_mapping(numa_mapping)
            memory = host_memory(size, node=node, hugepages=use_hugepages, pin=True)
            wrapped = _Wrapped(memory, align_bytes, use_paging, shapes, dtypes, fmt)
            self.pin_allocator = wrapped.allocator
            self.pin_allocator._take_over(self)
        self.pool = self.pin_allocator.pool
        self.cache = self.pin_allocator.cache
        self.align_bytes = self.pin_allocator.align_bytes

    @property
    def buffer(self) -> Any:
        """The pool as a flat uint8 tensor."""
        return self.cache._attached().base_tensor(UINT8.code)

    @by_either_name
    def allocate(
        self, shapes: Any, dtypes: Any, fmt: Any = MemoryFormat.KV_2LTD, allocator_type: str | None = None
    ) -> Any:
        """See the interface. ValueError for a format that is neither a tensor's nor `BINARY_BUFFER`."""
        kind = _known_format(fmt)
        if kind is MemoryFormat.BINARY_BUFFER:
            return self.buffer_allocator.allocate(shapes, dtypes, kind)
        self._check(kind)
        return self.pin_allocator.allocate(shapes, dtypes, kind)

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: Any = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> list[Any] | None:  # fmt: skip
        """See `allocate`."""
        kind = _known_format(fmt)
        if kind is MemoryFormat.BINARY_BUFFER:
            return self.buffer_allocator.batched_allocate(shapes, dtypes, batch_size, kind)
        self._check(kind)
        return self.pin_allocator.batched_allocate(shapes, dtypes, batch_size, kind)

    def _check(self, fmt: MemoryFormat) -> None:
        if fmt not in _TENSOR_FORMATS:
            raise ValueError(f"memory format {fmt}: expected one of a tensor, or BINARY_BUFFER")

    def free(self, memory_obj: Any, allocator_type: str | None = None) -> None:
        """By what the object is, not by its format."""
        if isinstance(memory_obj, BytesBufferMemoryObj):
            self.buffer_allocator.free(memory_obj)
        else:
            self.pin_allocator.free(memory_obj)

    def batched_free(
        self, memory_objs: Sequence[Any], allocator_type: str | None = None, update_stats: bool = True
    ) -> None:
        """`free` of each; both kinds may be mixed."""
        self.pin_allocator.batched_free([obj for obj in memory_objs if not isinstance(obj, BytesBufferMemoryObj)])

    def memcheck(self) -> bool:
        return self.pin_allocator.memcheck()

    def close(self) -> None:
        """Leave the segment, or give the memory back. Views stay mapped until the last is gone."""
        self.cache.close()

    def get_paged_buffers(self) -> tuple[torch.Tensor, ...] | None:
        """The pages, where there are any."""
        pool = self.pin_allocator
        return pool.get_paged_buffers() if isinstance(pool, PagedTensorMemoryAllocator) else None


class PagedCpuGpuMemoryAllocator(MemoryAllocatorInterface):
    """Pages on the host, on the device, or both, for peer-to-peer transfers.

    `allocator_type` says which; without it, the host's where there is one.
    """

    def __init__(self) -> None:
        self.cpu_allocator: PagedTensorMemoryAllocator | None = None
        self.gpu_allocator: PagedTensorMemoryAllocator | None = None
        self.align_bytes = 0

    def init_cpu_memory_allocator(
        self, size: int, shapes: Any, dtypes: Any, fmt: Any = MemoryFormat.KV_2LTD, numa_mapping: Any = None
    ) -> None:
        """Make the host's pool of `size` bytes, a multiple of a page."""
        memory = host_memory(size, node=node_of_mapping(numa_mapping), pin=True)
        self.cpu_allocator = PagedTensorMemoryAllocator(memory, shapes, dtypes, fmt, owner=self)
        self.align_bytes = self.cpu_allocator.align_bytes

    def init_gpu_memory_allocator(
        self, size: int, shapes: Any, dtypes: Any, fmt: Any = MemoryFormat.KV_2LTD, device: str = "cuda"
    ) -> None:
        """Make the device's pool."""
        import torch

        memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.gpu_allocator = PagedTensorMemoryAllocator(memory, shapes, dtypes, fmt, owner=self)

    def _pool(self, allocator_type: str | None) -> PagedTensorMemoryAllocator:
        pools = {"cpu": self.cpu_allocator, "gpu": self.gpu_allocator, None: self.cpu_allocator or self.gpu_allocator}
        if allocator_type not in pools:
            raise ValueError(f"allocator_type is {allocator_type!r}: 'cpu', 'gpu' or None")
        pool = pools[allocator_type]
        if pool is None:
            raise ValueError(f"there is no pool {allocator_type or ''!r}: call init_cpu_memory_allocator first")
        return pool

    @by_either_name
    def allocate(
        self, shapes: Any, dtypes: Any, fmt: Any = MemoryFormat.KV_2LTD, allocator_type: str | None = None
    ) -> Any:
        return self._pool(allocator_type).allocate(shapes, dtypes, fmt)

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: Any = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> list[Any] | None:  # fmt: skip
        return self._pool(allocator_type).batched_allocate(shapes, dtypes, batch_size, fmt)

    def free(self, memory_obj: Any, allocator_type: str | None = None) -> None:
        """By the pool that the object is of."""
        for pool in (self.cpu_allocator, self.gpu_allocator):
            if pool is not None and memory_obj._namespace.cache is pool.cache:
                pool.free(memory_obj)
                return
        raise ValueError(f"free: {memory_obj!r} is not of this {self}")

    def memcheck(self) -> bool:
        return all(pool.memcheck() for pool in (self.cpu_allocator, self.gpu_allocator) if pool is not None)

    def close(self) -> None:
        for pool in (self.cpu_allocator, self.gpu_allocator):
            if pool is not None:
                pool.close()

    def __str__(self) -> str:
        return "PDMemoryAllocator"


class LazyMemoryAllocator(PooledAllocator):
    """Memory of this process that is committed, and pinned, as it is needed.

    It is an ephemeral segment that nobody else knows: regions are what it grows by.

    Parameters
    ----------
    init_size, final_size
        bytes committed before return, and at most.
    """

    def __init__(self, init_size: int, final_size: int, align_bytes: int = _ALIGN, numa_mapping: Any = None) -> None:
        node = node_of_mapping(numa_mapping)
        capacity = final_size // align_bytes * align_bytes
        cache = _open.open(
            f"lazy-{os.getpid()}-{uuid.uuid4().hex[:8]}", capacity=capacity, align=align_bytes, lifetime="ephemeral",
            prefault="lazy", numa=AUTO if node is None else node,
        )  # fmt: skip
        try:
            super().__init__(cache)
            while cache.stats().bytes.ready < min(init_size, capacity):
                if not cache._attachment.committer().ensure_one(whole=True):
                    break  # it was logged why; the rest comes, or fails, when it is needed
        except BaseException:
            cache.close()
            raise

    def close(self) -> None:
        """Give the memory back."""
        self.cache.close()
