"""Allocators over one pool of memory: LMCache's memory interface on the one C allocator.

MemoryAllocatorInterface
PooledAllocator            whatever a cache (a segment, or private memory) can allocate
TensorMemoryAllocator      a tensor that the caller gives
PagedTensorMemoryAllocator the same in pages of one size
BufferAllocator            plain bytes beside any pool
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from . import errors
from ._core import log
from ._formats import MemoryFormat
from ._meta import Layout, layout_of
from ._objects import BytesBufferMemoryObj, TensorMemoryObj
from ._private import PrivateCache
from .memory import release_many
from .namespace import Namespace, open_namespace

if TYPE_CHECKING:
    import torch

    from .cache import SharedCache

    Shapes: TypeAlias = torch.Size | Sequence[int] | Sequence[torch.Size]
    DTypes: TypeAlias = torch.dtype | Sequence[torch.dtype]

Obj: TypeAlias = TensorMemoryObj | BytesBufferMemoryObj

_SCRATCH = "scratch"  # namespace of objects whose key is not known yet
_PAGE_UNIT = 64  # the C allocator counts a page as so many bytes


F = TypeVar("F", bound=Callable[..., Any])


def by_either_name(allocate: F) -> F:
    """Also `shape=` and `dtype=`, as LMCache's published document calls them."""

    @functools.wraps(allocate)
    def either(self: Any, *args: Any, **names: Any) -> Any:
        for older, name in (("shape", "shapes"), ("dtype", "dtypes")):
            if older in names:
                names[name] = names.pop(older)
        return allocate(self, *args, **names)

    return cast(F, either)


class MemoryAllocatorInterface(abc.ABC):
    """What every allocator offers; the names are LMCache's, of all its versions."""

    pool: PooledAllocator | None = None  # where a backend can keep chunks
    keeps_positions = False  # whether objects have room for the positions of their tokens
    page_bytes = 1  # `metadata.address` counts in these: bytes, or pages

    @abc.abstractmethod
    def allocate(
        self, shapes: Shapes, dtypes: DTypes | None, fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        allocator_type: str | None = None,
    ) -> Obj | None:  # fmt: skip
        """Memory for one object of a shape (or of several), or None when there is none."""

    def batched_allocate(
        self, shapes: Shapes, dtypes: DTypes | None, batch_size: int, fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        allocator_type: str | None = None,
    ) -> list[Any] | None:  # fmt: skip
        """`batch_size` objects alike: all, or None."""
        objs: list[Any] = []
        while len(objs) < batch_size:
            obj = self.allocate(shapes, dtypes, fmt)
            if obj is None:
                self.batched_free(objs)
                return None
            objs.append(obj)
        return objs

    @abc.abstractmethod
    def free(self, memory_obj: Any, allocator_type: str | None = None) -> None:
        """Give back all that the object holds. Doing it again is logged, and does nothing."""

    def batched_free(
        self, memory_objs: Sequence[Any], allocator_type: str | None = None, update_stats: bool = True
    ) -> None:
        """`free` of each."""
        for obj in memory_objs:
            self.free(obj)

    def get_ref_count(self, memory_obj: Any) -> int:
        """References of all processes on the object's memory."""
        return int(memory_obj.get_ref_count())

    def ref_count_up(self, memory_obj: Any) -> None:
        """One more reference."""
        memory_obj.ref_count_up()

    def ref_count_down(self, memory_obj: Any) -> None:
        """One reference less; with the last the memory is free. StaleHandleError when the object has none."""
        memory_obj.ref_count_down()

    def memcheck(self) -> bool:
        """Whether the books are sound: extents and gaps tile the memory, nothing is owned twice."""
        return True

    def close(self) -> None:  # noqa: B027
        """Nothing more is allocated. Views stay mapped until the last one is gone."""

    def __str__(self) -> str:
        return type(self).__name__


class BufferAllocator(MemoryAllocatorInterface):
    """Bytes from the Python heap, as many as asked for."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    @by_either_name
    def allocate(
        self, shapes: Any, dtypes: Any = None, fmt: MemoryFormat = MemoryFormat.BINARY_BUFFER,
        allocator_type: str | None = None,
    ) -> BytesBufferMemoryObj:  # fmt: skip
        first = shapes if hasattr(shapes, "__index__") else shapes[0]
        size = int(first if hasattr(first, "__index__") else first[0])
        if size <= 0:
            raise ValueError(f"a buffer of {size} bytes: it takes at least 1")
        return BytesBufferMemoryObj(bytearray(size))

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: MemoryFormat = MemoryFormat.BINARY_BUFFER,
        allocator_type: str | None = None,
    ) -> list[BytesBufferMemoryObj]:  # fmt: skip
        return [self.allocate(shapes, dtypes, fmt) for _ in range(batch_size)]

    def free(self, memory_obj: Any, allocator_type: str | None = None) -> None:
        """Nothing to do: the Python heap frees it."""


def as_given(shapes: Any, dtypes: Any) -> tuple[Any, Any]:
    """Shapes and dtypes for `layout_of`: of one tensor, or of several."""
    if not isinstance(dtypes, (list, tuple)):
        several = isinstance(shapes, (list, tuple)) and shapes and not hasattr(shapes[0], "__index__")
        return (shapes, [dtypes] * len(shapes)) if several else (shapes, dtypes)
    if not isinstance(shapes, (list, tuple)) or (shapes and hasattr(shapes[0], "__index__")):
        shapes = [shapes]
    return (shapes[0], dtypes[0]) if len(shapes) == len(dtypes) == 1 else (shapes, dtypes)


class PooledAllocator(MemoryAllocatorInterface):
    """Allocates from one cache, shared or private, without evicting.

    Attributes
    ----------
    cache : SharedCache
    align_bytes : int
        granule: offsets and reserved sizes are multiples of it.
    """

    def __init__(
        self, cache: SharedCache, owner: MemoryAllocatorInterface | None = None,
        object_class: type[TensorMemoryObj] = TensorMemoryObj,
    ) -> None:  # fmt: skip
        self.cache = cache
        self._object_class = object_class
        self.align_bytes = int(cache._attached().mapping.geometry.align)
        self.owner = owner or self  # what objects name as their parent
        self.pool = self
        self._scratch = self.namespace(_SCRATCH, 1)

    def namespace(self, name: str, parts: int, descriptor: object = None, lease: float | None = None) -> Namespace:
        """A namespace of the cache whose objects are this allocator's."""
        space = open_namespace(self.cache, name, parts, descriptor, lease, self._object_class)
        space.owner = self.owner
        return space

    def _take_over(self, owner: MemoryAllocatorInterface) -> None:
        """Objects name another parent from here on."""
        self.owner = self._scratch.owner = owner
        owner.page_bytes = self.page_bytes

    def _layout(self, shapes: Any, dtypes: Any, fmt: Any) -> tuple[Any, Any]:
        if dtypes is None:
            raise ValueError("a tensor needs a dtype")
        return as_given(shapes, dtypes)

    @by_either_name
    def allocate(
        self, shapes: Any, dtypes: Any, fmt: MemoryFormat = MemoryFormat.KV_2LTD, allocator_type: str | None = None
    ) -> TensorMemoryObj | None:
        """See the interface. ValueError for an empty or negative size."""
        shape, dtype = self._layout(shapes, dtypes, fmt)
        try:
            return cast("TensorMemoryObj | None", self._scratch.allocate(shape, dtype, fmt=fmt, evict=False))
        except errors.CapacityError:
            return None  # it can never fit; who evicts asks `Namespace.allocate`

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> list[Any] | None:  # fmt: skip
        """See the interface; None also for a negative number."""
        if batch_size < 0:
            return None
        shape, dtype = self._layout(shapes, dtypes, fmt)
        try:
            return self._scratch.allocate_many(shape, dtype, batch_size, fmt=fmt, evict=False)
        except errors.CapacityError:
            return None

    def free(self, memory_obj: Any, allocator_type: str | None = None) -> None:
        """Give back all that the object holds. Doing it again is logged, and does nothing."""
        if not self._can_free(memory_obj):
            return
        memory_obj.release()

    def batched_free(
        self, memory_objs: Sequence[Any], allocator_type: str | None = None, update_stats: bool = True
    ) -> None:
        """`free` of each, in one call."""
        release_many([obj for obj in memory_objs if self._can_free(obj)])

    def _can_free(self, obj: Any) -> bool:
        if not isinstance(obj, TensorMemoryObj) or obj._namespace.cache is not self.cache:
            raise ValueError(f"free: {obj!r} is not of this {self}")
        if not obj.is_valid():
            log.warning("%s: %r was freed before", self, obj)
            return False
        return True

    def memcheck(self) -> bool:
        """Whether all invariants of the cache hold; what does not is logged."""
        problems = self.cache.verify()
        for line in problems[:8]:
            log.error("%s: %s", self, line)
        return not problems

    @property
    def size(self) -> int:
        """Bytes of the pool."""
        return self.cache.capacity

    @property
    def total_allocated_size(self) -> int:
        """Bytes reserved, by all processes."""
        return self.cache.stats().bytes.used

    @property
    def num_active_allocations(self) -> int:
        """References and pins that exist, of all processes."""
        return self.cache.stats().counts.holds


class TensorMemoryAllocator(PooledAllocator):
    """The C allocator over a tensor that the caller gives, on any device.

    Parameters
    ----------
    tensor
        contiguous; kept, and viewed as bytes.
    align_bytes
        a power of two from 64 to 2 MiB.
    """

    ALIGN_BYTES = 512

    def __init__(
        self, tensor: torch.Tensor, align_bytes: int = ALIGN_BYTES, *, owner: MemoryAllocatorInterface | None = None
    ) -> None:
        heap = PrivateCache(tensor, align=align_bytes, name="tensor")
        super().__init__(heap, owner)
        flat = heap._attached().arena().flat
        self.buffer: torch.Tensor = flat

    def close(self) -> None:
        """Give the tensor back; views of it stay."""
        self.cache.close()
        self.buffer = self.buffer[:0]


class PagedTensorMemoryAllocator(PooledAllocator):
    """A tensor in pages, each the size of one full object; every object takes a page, smaller ones too.

    An object's `metadata.address` is its page number, as peer-to-peer transfers want it.

    Parameters
    ----------
    tensor
        contiguous; its bytes are a multiple of a page.
    shapes, dtypes
        of one full page.
    """

    def __init__(
        self, tensor: torch.Tensor, shapes: Any, dtypes: Any, fmt: MemoryFormat = MemoryFormat.KV_2LTD, *,
        owner: MemoryAllocatorInterface | None = None,
    ) -> None:  # fmt: skip
        page = layout_of(*as_given(shapes, dtypes), fmt).nbytes
        if tensor.nbytes % page or not tensor.nbytes:
            raise ValueError(f"a buffer of {tensor.nbytes} bytes is not a multiple of pages of {page} bytes")
        heap = PrivateCache(tensor, align=_PAGE_UNIT, name="pages", page_bytes=page)
        super().__init__(heap, owner)
        self.pool = None  # what the tables say of a page is not its size
        self.shapes, self.dtypes, self.fmt = shapes, dtypes, fmt
        self.align_bytes = self.page_bytes = self.owner.page_bytes = page
        self.buffer: torch.Tensor = heap._attached().arena().flat
        self.buffer_ptr = self.buffer.data_ptr()
        self.buffer_size = self.buffer.nbytes

    @by_either_name
    def allocate(
        self, shapes: Any, dtypes: Any, fmt: MemoryFormat | None = None, allocator_type: str | None = None
    ) -> TensorMemoryObj | None:
        """One page, or None. ValueError for what is larger than a page."""
        objs = self.batched_allocate(shapes, dtypes, 1, fmt)
        return objs[0] if objs else None

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: MemoryFormat | None = None,
        allocator_type: str | None = None,
    ) -> list[Any] | None:  # fmt: skip
        """As many pages, or None."""
        layout = layout_of(*self._layout(shapes, dtypes, fmt), self.fmt if fmt is None else fmt)
        if layout.nbytes > self.align_bytes:
            raise ValueError(f"an object of {layout.nbytes} bytes does not fit a page of {self.align_bytes}")
        objs = super().batched_allocate(_PAGE_UNIT, "uint8", batch_size, MemoryFormat.BINARY)
        for obj in objs or ():
            self._make_page(obj, layout)
        return objs

    def _make_page(self, obj: Any, layout: Layout) -> None:
        part = obj._part
        part.offset = part.offset // _PAGE_UNIT * self.align_bytes
        part.size, part.extent = layout.nbytes, self.align_bytes
        obj._layout = layout

    def get_paged_buffers(self) -> tuple[torch.Tensor, ...]:
        """All pages as flat uint8 tensors."""
        import torch

        return torch.split(self.buffer, self.align_bytes)

    @property
    def size(self) -> int:
        """Bytes of all pages."""
        return int(self.buffer_size)

    @property
    def total_allocated_size(self) -> int:
        """Bytes of pages in use."""
        pages: int = self.cache.stats().bytes.used // _PAGE_UNIT
        return pages * self.align_bytes

    def close(self) -> None:
        """Give the tensor back; views of it stay."""
        self.cache.close()
