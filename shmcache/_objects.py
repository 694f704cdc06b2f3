"""Memory objects under LMCache's names: blocks of the arena, and plain bytes beside it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

from ._core import log
from ._dtypes import dtype_of
from ._formats import MemoryFormat, MemoryObjMetadata
from ._keys import Key
from ._meta import Group, words_at
from .errors import ConfigurationError
from .memory import MemoryObj

if TYPE_CHECKING:
    import torch

__all__ = ["BytesBufferMemoryObj", "TensorMemoryObj"]


class _Optional:
    """What LMCache asks of objects in its multiprocess mode only."""

    __slots__ = ()

    _l1_manager: int | None

    def get_physical_size(self) -> int:
        raise NotImplementedError

    def set_used_size(self, n: int) -> None:
        """Nothing: an object's size is what was allocated, for all processes. ValueError for more than it has."""
        if not 0 <= n <= self.get_physical_size():
            raise ValueError(f"set_used_size: {n} bytes of {self.get_physical_size()}")

    def set_l1_manager(self, owner_tag: int) -> None:
        """Note which manager it belongs to; ValueError when it is another's."""
        if self.get_l1_manager() not in (None, owner_tag):
            raise ValueError(f"set_l1_manager: the object belongs to manager {self.get_l1_manager()}, not {owner_tag}")
        self._l1_manager = owner_tag  # type: ignore[misc]

    def get_l1_manager(self) -> int | None:
        """Which manager was noted."""
        return getattr(self, "_l1_manager", None)

    def reset_l1_manager(self) -> None:
        """It belongs to none."""
        self._l1_manager = None  # type: ignore[misc]


class TensorMemoryObj(MemoryObj, _Optional):
    """A `MemoryObj` made by an allocator or a backend.

    Its pins are those that were taken through it, and those that this process took by its key: LMCache
    pins by key and unpins through the object.
    """

    __slots__ = ("_key", "_l1_manager", "_meta")

    metadata_class: ClassVar[Any] = MemoryObjMetadata  # LMCache's own where LMCache reads it
    format_class: ClassVar[Any] = MemoryFormat

    _key: Key  # under which it was put or found; absent before
    _meta: Any

    def unpin(self) -> bool:
        """Give back one pin of this object, or else of this process on its key; False, logged, when there is none."""
        if super().unpin():
            return True
        key = getattr(self, "_key", None)
        if key is not None and self._namespace.unpin(key):  # type: ignore[attr-defined]
            return True
        log.warning("Double unpin of %r", self)
        return False

    @property
    def metadata(self) -> Any:
        """A `MemoryObjMetadata` whose counts are of now; what the caller sets on it stays with this object.

        ConfigurationError for an object outside of the pages in which this handle counts addresses.
        """
        refs, pins = self._counts()
        try:
            meta = self._meta
        except AttributeError:
            shapes, dtypes = self.get_shapes(), self.get_dtypes()
            address, within = divmod(self.shm_offset, self._namespace.owner.page_bytes)
            if within:
                raise ConfigurationError(
                    f"{self!r} lies in no page of {self._namespace.owner.page_bytes} bytes",
                    hint="give all processes of a segment the same enable_p2p, model and chunk_size",
                ) from None
            meta = self._meta = self.metadata_class(
                shape=shapes[0], dtype=dtypes[0], address=address,
                phy_size=self.get_physical_size(), ref_count=refs, pin_count=pins, fmt=self.get_memory_format(),
                shapes=shapes, dtypes=dtypes,
            )  # fmt: skip
            if self._namespace.owner.keeps_positions:
                meta.cached_positions = self._positions()
        meta.ref_count, meta.pin_count = refs, pins
        return meta

    # Positions of the tokens, which blending needs: behind the tensors, a count and so many int64.

    def _words(self) -> torch.Tensor:
        layout = self._look()
        start = words_at(layout)
        n = max(0, (int(self._part.size) - start) // 8)
        return self._view(Group((n,), (1,), dtype_of("int64"), start, 8 * n))

    def _positions(self) -> torch.Tensor | None:
        words = self._words()
        n = int(words[0]) if words.numel() else 0
        return words[1 : 1 + n].clone() if 0 < n < words.numel() else None

    def forget_positions(self) -> None:
        """There are none (yet): memory comes as it was left."""
        self._words()[:1] = 0

    def store_positions(self) -> None:
        """Put what was set as `metadata.cached_positions` beside the bytes, before they are published."""
        positions = getattr(getattr(self, "_meta", None), "cached_positions", None)
        words = self._words()
        if positions is None or self.published or len(positions) >= words.numel():
            return
        words[1 : 1 + len(positions)] = positions
        words[0] = len(positions)

    def get_memory_format(self) -> Any:
        """How the dimensions are to be read."""
        return self.format_class(super().get_memory_format().value)

    @property
    def meta(self) -> Any:
        """The same as `metadata`."""
        return self.metadata

    @property
    def raw_data(self) -> torch.Tensor | None:
        """The same as `raw_tensor`; or its beginning, once it was set to that, as for a chunk that was not full."""
        more = self._more
        return self.raw_tensor if more is None or more.narrowed is None else more.narrowed

    @raw_data.setter
    def raw_data(self, beginning: torch.Tensor) -> None:
        self._extra().narrowed = beginning

    @property
    def is_narrowed(self) -> bool:
        """Whether `raw_data` was cut short; then a put stores a copy of what is left."""
        return self._more is not None and self._more.narrowed is not None

    def invalidate(self) -> None:
        """Give back all that this object holds."""
        self.release()

    def parent(self) -> Any:
        """The allocator it came from."""
        return self._namespace.owner

    @property
    def parent_allocator(self) -> Any:
        """The same as `parent()`."""
        return self._namespace.owner


class BytesBufferMemoryObj(_Optional):
    """Bytes of this process, which no other sees: what `BINARY_BUFFER` allocates. It is never freed by hand."""

    def __init__(self, raw_bytes: Any, metadata: MemoryObjMetadata | None = None) -> None:
        import torch

        self.raw_data = raw_bytes
        size = len(raw_bytes)
        self.meta = metadata or MemoryObjMetadata(
            torch.Size([size, 0, 0, 0]), None, 0, 0, 1, 0, MemoryFormat.BINARY_BUFFER
        )
        self._valid = True

    @property
    def metadata(self) -> MemoryObjMetadata:
        return self.meta

    tensor = raw_tensor = None

    def get_tensor(self, index: int) -> None:
        """There is none."""

    @property
    def byte_array(self) -> Any:
        """The bytes as they were given."""
        return self.raw_data

    @property
    def data_ptr(self) -> int:
        """Address of the first byte; TypeError for bytes that cannot be written."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.raw_data))

    def set_used_size(self, n: int) -> None:
        """Nothing: the bytes are as many as there are."""

    def get_size(self) -> int:
        return len(self.raw_data)

    @property
    def shm_byte_length(self) -> int:
        return len(self.raw_data)

    @property
    def shm_offset(self) -> int:
        return self.meta.address

    def get_physical_size(self) -> int:
        return self.meta.phy_size

    def get_shape(self) -> torch.Size:
        return self.meta.shape

    def get_shapes(self) -> list[torch.Size]:
        return [self.meta.shape]

    def get_dtype(self) -> None:
        """Bytes have none."""

    def get_dtypes(self) -> list[torch.dtype]:
        return []

    def get_memory_format(self) -> MemoryFormat:
        return self.meta.fmt

    def get_num_tokens(self) -> int:
        return 1

    def ref_count_up(self) -> None:
        """Nothing to count."""

    def ref_count_down(self) -> None:
        """Nothing to count."""

    def get_ref_count(self) -> int:
        return 1

    def pin(self) -> bool:
        self.meta.pin_count += 1
        return True

    def unpin(self) -> bool:
        """False, logged, when it was not pinned."""
        if self.meta.pin_count == 0:
            log.warning("Double unpin of %r", self)
            return False
        self.meta.pin_count -= 1
        return True

    @property
    def is_pinned(self) -> bool:
        return self.meta.pin_count > 0

    @property
    def can_evict(self) -> bool:
        return not self.is_pinned

    def is_valid(self) -> bool:
        return self._valid

    def invalidate(self) -> None:
        self._valid = False

    def parent(self) -> None:
        """Nobody's memory."""
