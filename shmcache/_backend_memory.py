"""The memory of the backend: which segment, how large, and how objects are taken from it."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, ClassVar, cast

from . import _open, _sizing, errors
from ._allocate import take_memory
from ._formats import MemoryFormat, format_of
from ._meta import Layout, layout_in_page, layout_of, layout_with_words
from ._objects import TensorMemoryObj
from ._pools import PooledAllocator, as_given
from ._sizes import parse_size
from .allocators import MixedMemoryAllocator, SegmentPages
from .policies import check_policy

if TYPE_CHECKING:
    import torch

    from .cache import SharedCache
    from .namespace import Namespace

_GIB = 1 << 30
_ALIGN = 4096
_DEFAULT_SEGMENT = "lmcache"
_MOST_LAYOUTS = 4096
_log = logging.getLogger("shmcache")


class BackendMemory:
    """Part of `SharedCPUBackend`.

    Of `extra_config` it reads, beside LMCache's keys: `shmcache.segment` (or `shm_name`; by default
    "lmcache"), `shmcache.capacity` (bytes or a str with a unit, for the whole host; instead of
    `max_local_cpu_size`), and what `shmcache.open` takes: `shmcache.lifetime`, `shmcache.prefault`,
    `shmcache.pin`, `shmcache.mode`, `shmcache.max_chunks`, `shmcache.checksum`, `shmcache.lock_timeout`.
    """

    object_class: ClassVar[type[TensorMemoryObj]] = TensorMemoryObj

    config: Any
    metadata: Any
    layerwise: bool
    enable_blending: bool
    memory_allocator: Any
    _pool: PooledAllocator
    _space: Namespace  # where objects are allocated
    _layouts: dict[Any, Layout]  # by what `allocate` was asked for
    _wait: float  # seconds of a busy loop
    _keeps_positions: bool

    if TYPE_CHECKING:

        def _goes_on(self, what: str, error: Exception) -> bool:
            """See `BackendFinding`."""

    # ---- the segment ---------------------------------------------------------------------------------

    def initialize_allocator(self, config: Any, metadata: Any = None) -> MixedMemoryAllocator:
        """Open, or make, the segment that the configuration means, and an allocator on it.

        A segment of other parameters is replaced when nobody is attached, and else used as it is; both
        are logged.

        Raises
        ------
        ConfigurationError
            settings that contradict each other.
        ValueError
            an alignment or a size that cannot be.
        ShmCacheError
            whatever `shmcache.open` says.
        """
        extra = config.extra_config or {}
        align = self._resolve_local_cpu_allocator_alignment(config)
        page, page_align = self._page(config, metadata, align)
        align = page_align or align or _ALIGN
        capacity, exact = self._capacity(config, metadata)
        capacity = capacity // (page or align) * (page or align)
        options: dict[str, Any] = {"policy": check_policy(config.cache_policy), "align": align}
        if page:
            options["region_bytes"] = capacity  # pages are counted from its start
        numa = _sizing.numa_of_segment(config)
        if numa is not None:
            options["numa"] = numa
        for key in ("lifetime", "mode", "max_chunks", "checksum"):
            if f"shmcache.{key}" in extra:
                options[key] = extra[f"shmcache.{key}"]
        here = {k: extra[f"shmcache.{k}"] for k in ("prefault", "pin", "lock_timeout") if f"shmcache.{k}" in extra}
        if metadata is not None:
            here |= {"rank": metadata.worker_id, "label": metadata.model_name[-31:]}
        cache = _connect(self._segment_name(config), capacity, exact, options, here)
        try:
            return self._allocator_on(cache, align, page, config, metadata)
        except BaseException:
            cache.close()
            raise

    def _allocator_on(
        self, cache: SharedCache, align: int, page: int, config: Any, metadata: Any
    ) -> MixedMemoryAllocator:
        if page and int(cache._attached().mapping.geometry.align) != align:
            raise errors.ConfigurationError(
                f"segment {cache.name!r} was made without pages of {page} bytes, which enable_p2p needs",
                hint="use another segment, or unlink this one when nobody uses it",
            )
        allocator = MixedMemoryAllocator(cache.capacity, align_bytes=align, cache=cache, object_class=self.object_class)
        if page:
            allocator.page_bytes = page
            pages = allocator.buffer[: cache.capacity // page * page]
            allocator.cpu_allocator = SegmentPages(*_sizing.shapes_of(config, metadata), page, pages)
        return allocator

    @staticmethod
    def _segment_name(config: Any) -> str:
        extra = config.extra_config or {}
        return str(extra.get("shmcache.segment") or extra.get("shm_name") or _DEFAULT_SEGMENT).lstrip("/")

    def _capacity(self, config: Any, metadata: Any) -> tuple[int, bool]:
        """Bytes for the host, and whether a segment of another size is wrong; 0: what is there."""
        given = (config.extra_config or {}).get("shmcache.capacity")
        if given is not None:
            return parse_size(given, "shmcache.capacity"), True
        configured = _sizing.configured_gib(config, metadata)
        if not configured:
            return 0, False
        effective = self._calculate_effective_cpu_size(configured, config, metadata)
        copies = (
            1 if metadata is None or _sizing.one_copy(config, metadata) else _sizing.ranks_of_host(config, metadata)[1]
        )
        # what depends on the moment differs from rank to rank: then the first to come decides
        return int(effective * _GIB) * copies, effective == configured

    def _page(self, config: Any, metadata: Any, align: int | None) -> tuple[int, int]:
        """Bytes of a page and its alignment for peer-to-peer transfers; 0: objects are of any size."""
        if not config.enable_p2p:
            return 0, 0
        if metadata is None:
            raise errors.ConfigurationError("enable_p2p needs metadata: pages have the size of a full chunk")
        size = layout_of(*as_given(*_sizing.shapes_of(config, metadata)), None).nbytes
        granule = max(align or 1, min(size & -size, _ALIGN), 64)
        return _sizing.extent_bytes(size, granule), granule

    def _calculate_effective_cpu_size(self, configured_cpu_size: float, config: Any, metadata: Any = None) -> float:
        """GiB; see `_sizing.effective_gib`."""
        return _sizing.effective_gib(configured_cpu_size, config, metadata)

    def _resolve_local_cpu_allocator_alignment(self, config: Any) -> int | None:
        """See `_sizing.alignment`."""
        return _sizing.alignment(config)

    @staticmethod
    def _is_power_of_two(value: int) -> bool:
        return _sizing.is_power_of_two(value)

    # ---- objects ----------------------------------------------------------------------------------------

    def _format(self, fmt: Any) -> Any:
        if fmt is not None:
            return fmt
        if self.layerwise:
            return MemoryFormat.KV_2TD if self.enable_blending else MemoryFormat.KV_T2D
        return MemoryFormat.KV_2LTD

    def _layout(self, shapes: Any, dtypes: Any, fmt: Any) -> Layout | None:
        """None: it is a plain buffer, not of the segment."""
        kind = self._format(fmt)
        if getattr(kind, "value", None) == MemoryFormat.BINARY_BUFFER.value:
            return None
        shape, dtype = as_given(shapes, dtypes)
        layout = self._layout_of(shape, dtype, kind)
        with contextlib.suppress(TypeError):  # lists are not hashable
            self._layouts[shapes, dtypes, fmt] = layout
        if len(self._layouts) > _MOST_LAYOUTS:
            self._layouts.clear()
        return layout

    def _layout_of(self, shape: Any, dtype: Any, fmt: Any) -> Layout:
        """With the page that it takes, and room for positions, where this backend has such."""
        page = self.memory_allocator.page_bytes
        if page > 1:
            return layout_in_page(shape, dtype, fmt, page)
        layout = layout_of(shape, dtype, fmt)
        if self.memory_allocator.keeps_positions and layout.single is not None:
            dims = layout.single.shape
            tokens = dims[min(format_of(layout.fmt).token_dim(), len(dims) - 1)] if dims else 0
            return layout_with_words(shape, dtype, fmt, 1 + tokens)
        return layout

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any = None, eviction: bool = True, busy_loop: bool = True) -> Any:
        """Memory for one object, evicting chunks that nobody uses where needed.

        Parameters
        ----------
        shapes, dtypes
            of one tensor, or lists of as many.
        fmt
            by default `KV_2LTD`; layerwise `KV_T2D`, with blending `KV_2TD`.
        eviction
            whether chunks may be evicted.
        busy_loop
            wait up to `blocking_timeout_secs` for memory that others use; without it, not at all.

        Returns
        -------
        TensorMemoryObj or None
            None when there is none, and at once, logged, for what could never fit; then nothing is
            evicted.

        Raises
        ------
        ValueError
            an empty or negative size.
        """
        layout: Layout | None
        try:
            layout = self._layouts[shapes, dtypes, fmt]
        except (KeyError, TypeError):
            layout = self._layout(shapes, dtypes, fmt)
        if layout is None:
            return self.memory_allocator.allocate(shapes, dtypes, fmt)
        try:
            obj: Any = self._space._allocate(layout, eviction, self._wait if eviction and busy_loop else 0.0)
            if self._keeps_positions and obj is not None:
                obj.forget_positions()
            return obj
        except errors.CapacityError as e:
            _log.warning("%s", e)
            return None
        except errors.ShmCacheError as e:
            if self._goes_on("allocate", e):
                return None
            raise

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: Any = None, eviction: bool = True,
        busy_loop: bool = True,
    ) -> list[Any] | None:  # fmt: skip
        """`batch_size` objects alike, all or none; see `allocate`. None also for a negative number."""
        layout = self._layout(shapes, dtypes, fmt)
        if layout is None:
            buffers: list[Any] = self.memory_allocator.batched_allocate(shapes, dtypes, batch_size, fmt)
            return buffers
        if batch_size <= 0:
            return [] if batch_size == 0 else None
        try:
            objs: list[Any] | None = take_memory(
                self._space, layout, batch_size, eviction, self._wait if eviction and busy_loop else 0.0
            )
        except errors.CapacityError as e:
            _log.warning("%s", e)
            return None
        if self.memory_allocator.keeps_positions:
            for obj in objs or ():
                obj.forget_positions()
        return objs

    # ---- sizes ------------------------------------------------------------------------------------------

    def get_full_chunk_size_bytes(self) -> int:
        """Bytes of one rank's object of a full chunk; layerwise, of one layer. ConfigurationError without metadata."""
        if self.metadata is None:
            raise errors.ConfigurationError("the size of a chunk is not known without metadata")
        shapes, dtypes = _sizing.shapes_of(self.config, self.metadata)
        total = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        return int(total) // sum(shape[1] for shape in shapes) if self.layerwise else int(total)

    def calculate_chunk_budget(self) -> int:
        """How many such objects of this rank the memory that exists can hold, with the other ranks' beside them."""
        extent = _sizing.extent_bytes(self.get_full_chunk_size_bytes(), self._pool.align_bytes)
        ranks = (
            1 if _sizing.one_copy(self.config, self.metadata) else _sizing.ranks_of_host(self.config, self.metadata)[1]
        )
        region = int(self._pool.cache._attached().mapping.geometry.region_bytes)
        whole, rest = divmod(self._pool.size, region)  # no object lies in two regions
        return (whole * (region // extent) + rest // extent) // ranks

    def get_memory_allocator(self) -> Any:
        """The allocator."""
        return self.memory_allocator

    def _adopted(self, obj: Any, space: Namespace) -> TensorMemoryObj | None:
        """`obj` as an unpublished object of `space`: itself, or a copy of foreign, published or narrowed bytes.

        None, logged, when there is no memory for the copy, or it is not known what its bytes are.
        """
        ours = isinstance(obj, TensorMemoryObj) and obj._namespace.cache is space.cache
        if ours and not obj.published and not obj.is_narrowed:
            if obj._namespace is not space:
                space.adopt(obj)
            return cast(TensorMemoryObj, obj)
        source, shape, dtype, fmt = _contents(obj)
        layout = self._layout_of(shape, dtype, fmt)
        if layout.nbytes > source.numel():
            _log.warning("not stored: %d bytes are said to be %s of %s", source.numel(), shape, dtype)
            return None
        found = take_memory(space, layout, 1, True, 0.0)
        if not found:
            _log.warning("not stored: no memory for a copy of %d bytes", layout.nbytes)
            return None
        copy: Any = found[0]
        copy.raw_tensor.copy_(source[: layout.nbytes])
        if self.memory_allocator.keeps_positions:
            copy.forget_positions()
            copy.metadata.cached_positions = obj.metadata.cached_positions
        return cast(TensorMemoryObj, copy)


def _contents(obj: Any) -> tuple[torch.Tensor, Any, Any, Any]:
    """Bytes, shape, dtype and format of any memory object, ours or LMCache's. StaleHandleError when it has none."""
    import torch

    source = obj.raw_data if isinstance(obj, TensorMemoryObj) and obj.is_narrowed else obj.raw_tensor
    if source is None:
        if obj.get_dtype() is not None or not len(obj.byte_array):
            raise errors.StaleHandleError(f"put: {obj!r} has no bytes (any more)")
        source = torch.frombuffer(bytearray(obj.byte_array), dtype=torch.uint8)
        return source, source.shape, source.dtype, MemoryFormat.BINARY_BUFFER
    flat = source.flatten().view(torch.uint8)
    meta = obj.metadata
    if len(obj.get_dtypes()) == 1:  # a chunk that is not full has its size in `shape` only
        return flat, meta.shape, meta.dtype, meta.fmt
    shape, dtype = as_given(obj.get_shapes(), obj.get_dtypes())
    return flat, shape, dtype, meta.fmt


def _connect(name: str, capacity: int, exact: bool, options: dict[str, Any], here: dict[str, Any]) -> SharedCache:
    if not capacity or not exact:
        try:
            return _open.attach(name, **here)
        except errors.SegmentNotFoundError:
            if not capacity:
                raise
    try:
        return _open.open(name, capacity=capacity, on_incompatible="replace", **options, **here)
    except (errors.SegmentBusyError, errors.SegmentMismatchError) as e:
        cache = _open.attach(name, **here)
        _log.warning("segment %r is in use and is taken as it is: %s", name, e)
        return cache
