"""A block of the arena as an object of this process: its views and its description.

    tensor, get_tensor(i), raw_tensor, byte_array    keep the object, and so its hold; slices of a
                                                     tensor do not keep it

After a release, or after the cache was closed, views stay mapped but their bytes are no longer
protected: the block may be used again.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from . import errors
from ._attachment import Attachment, Hold
from ._core import Held, Part, lib
from ._dtypes import UINT8, torch_dtype
from ._formats import MemoryFormat, format_of
from ._meta import Group, Layout, layout_from

if TYPE_CHECKING:
    import torch

    from ._calls import Calls

_as_strided: Any = None


def _first_base(attachment: Attachment, code: int) -> Any:
    """The arena as a tensor of a dtype, at its first use; also the first use of torch."""
    global _as_strided
    import torch

    _as_strided = torch.as_strided
    return attachment.base_tensor(code)


class Block(Held):
    """Part of `MemoryObj`."""

    __slots__ = ("__weakref__",)  # the fields below are those of Held

    _attachment: Attachment
    _namespace: Calls
    _holds: list[Hold]  # the first one is the writer's, until the block is published
    _part: Any  # shmc_part, or a `Part`: where it is
    _layout: Layout | None
    _more: Any

    def is_valid(self) -> bool:
        """Whether this object still holds its block, by a reference or a pin."""
        return (bool(self._holds) or self._only_pinned()) and not self._attachment.closed

    def _only_pinned(self) -> bool:
        return self._more is not None and bool(self._more.pins)

    # ---- views ------------------------------------------------------------------------------------

    def _look(self) -> Layout:
        """The layout, read from the block's description at first use."""
        layout = self._layout
        if layout is None:
            part = self._part
            meta = part.meta if type(part) is Part else bytes(part.meta)[: part.meta_len]
            layout = self._layout = layout_from(meta, part.size)
        return layout

    def _view(self, group: Group) -> torch.Tensor:
        attachment = self._attachment
        code = group.dtype.code
        base = attachment.bases.get(code)
        if base is None:
            base = _first_base(attachment, code)
        t: torch.Tensor = _as_strided(
            base, group.shape, group.strides, (self._part.offset + group.start) // group.dtype.itemsize
        )
        t._shmcache_object = self  # type: ignore[attr-defined]
        return t

    @property
    def tensor(self) -> torch.Tensor | None:
        """A view of the bytes, shaped; it keeps this object. None once released.

        Slices of it do not keep the object: hold the tensor itself, or use `tensor_owned()`.
        ValueError for an object of several groups: use `get_tensor(i)`.
        """
        attachment = self._attachment
        if attachment.closed or not (self._holds or self._only_pinned()):
            return None
        layout = self._layout or self._look()
        group = layout.single
        if group is None:
            raise ValueError(f"the object has {len(layout.groups)} tensors: use get_tensor(i)")
        try:
            t: torch.Tensor = _as_strided(
                attachment.bases[group.dtype.code], group.shape, group.strides, self._part.offset >> layout.shift
            )
        except KeyError:
            return self._view(group)
        t._shmcache_object = self  # type: ignore[attr-defined]
        return t

    def get_tensor(self, index: int) -> torch.Tensor | None:
        """Tensor `index` of an object of several; IndexError past the last. None once released."""
        group = self._look().groups[index]
        return self._view(group) if self.is_valid() else None

    @property
    def raw_tensor(self) -> torch.Tensor | None:
        """All bytes as a flat uint8 tensor; None once released."""
        if not self.is_valid():
            return None
        size = self._look().nbytes
        return self._view(Group((size,), (1,), UINT8, 0, size))

    def _buffer(self, keep: object) -> Any:
        """The bytes as a buffer that keeps `keep` alive, however it is passed on."""
        attachment = self._attachment
        arena = attachment.arena()
        # not by ffi.gc: of garbage with cycles the collector would let go of `keep` before a `__del__` that reads
        buffer: Any = (ctypes.c_uint8 * self._look().nbytes).from_address(attachment.address + self._part.offset)
        buffer.keep = keep, arena
        return buffer

    @property
    def byte_array(self) -> memoryview:
        """The bytes; writable until put, read-only after. It keeps this object alive.

        A view taken before the put stays writable: do not write through it any more.
        """
        self._need_valid("byte_array")
        view = memoryview(self._buffer(self)).cast("B")
        return view.toreadonly() if self._part.published else view

    def _need_valid(self, what: str) -> None:
        if self._attachment.closed:
            raise self._attachment.error(lib.SHMC_E_CLOSED, what)
        if not self.is_valid():
            raise errors.StaleHandleError(f"{what}: the object was released before")

    @property
    def data_ptr(self) -> int:
        """Address of the first byte in this process; StaleHandleError once released."""
        self._need_valid("data_ptr")
        return int(self._attachment.address + self._part.offset)

    @property
    def shm_offset(self) -> int:
        """Byte offset in the arena, the same in all processes."""
        return int(self._part.offset)

    @property
    def shm_byte_length(self) -> int:
        """The same as `get_size()`, under LMCache's name."""
        return self._look().nbytes

    # ---- description --------------------------------------------------------------------------------

    def get_size(self) -> int:
        """Bytes asked for."""
        return self._look().nbytes

    def get_physical_size(self) -> int:
        """Bytes of the extent, at least `get_size()`."""
        return int(self._part.extent)

    def get_shapes(self) -> list[torch.Size]:
        """Shape of each tensor."""
        import torch

        return [torch.Size(g.shape) for g in self._look().groups]

    def get_shape(self) -> torch.Size:
        """Shape of the (first) tensor."""
        return self.get_shapes()[0]

    def get_dtypes(self) -> list[torch.dtype]:
        """Element type of each tensor."""
        return [torch_dtype(g.dtype) for g in self._look().groups]

    def get_dtype(self) -> torch.dtype:
        """Element type of the (first) tensor."""
        return self.get_dtypes()[0]

    def get_memory_format(self) -> MemoryFormat:
        """How the dimensions are to be read."""
        return format_of(self._look().fmt)

    def get_num_tokens(self) -> int:
        """The dimension of the (first) shape that counts tokens under the memory format."""
        shape = self._look().groups[0].shape
        dim = format_of(self._look().fmt).token_dim()
        return shape[dim] if dim < len(shape) else 1

    @property
    def published(self) -> bool:
        """Whether it is, or was, in the cache."""
        return bool(self._part.published)

    def __reduce__(self) -> str:
        raise TypeError("a MemoryObj cannot be sent or copied: send its key, and get() it there")

    def __repr__(self) -> str:
        layout = self._look()
        what = ", ".join(f"{list(g.shape)} {g.dtype.name}" for g in layout.groups)
        state = "closed" if self._attachment.closed else "valid" if self.is_valid() else "released"
        return f"<{type(self).__name__} {what} at {self.shm_offset} of {self._attachment.name!r}, {state}>"
