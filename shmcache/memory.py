"""Memory objects: one block of the arena, held by this process, and the views of it.

The object owns its holds (`Hold`, see `_attachment`). Views:

    tensor, get_tensor(i), raw_tensor, byte_array    keep the object, and so its hold; slices of a
                                                     tensor do not keep it
    tensor_owned()                                   its storage owns a hold of its own, and so
                                                     does everything made from it

After a release, or after the cache was closed, views stay mapped but their bytes are no longer
protected: the block may be used again.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import errors
from ._attachment import Attachment, Hold
from ._core import ffi, lib
from ._defer import EventLike
from ._dtypes import UINT8, torch_dtype
from ._formats import MemoryFormat, format_of
from ._meta import Group, Layout, layout_from
from ._pending import PendingPut

if TYPE_CHECKING:
    import torch

    from .namespace import Namespace

__all__ = ["MemoryFormat", "MemoryObj", "MemoryObjMetadata"]

_as_strided: Any = None
_extra_lock = threading.Lock()


def _renew_lock() -> None:
    global _extra_lock
    _extra_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _first_base(attachment: Attachment, code: int) -> Any:
    """The arena as a tensor of a dtype, at its first use; also the first use of torch."""
    global _as_strided
    import torch

    _as_strided = torch.as_strided
    return attachment.base_tensor(code)


def _take_all(holds: list[Hold]) -> list[Hold]:
    """Empty a list that other threads may be taking from, each hold once."""
    taken = []
    while holds:
        try:
            taken.append(holds.pop())
        except IndexError:
            break
    return taken[::-1]


@dataclass(slots=True)
class MemoryObjMetadata:
    """A snapshot of what is known about an object, under LMCache's names."""

    shape: torch.Size
    dtype: torch.dtype
    address: int  # byte offset in the arena
    phy_size: int
    ref_count: int
    pin_count: int
    fmt: MemoryFormat
    cached_positions: torch.Tensor | None = None
    shapes: list[torch.Size] | None = None
    dtypes: list[torch.dtype] | None = None

    def get_size(self) -> int:
        """Bytes of all shapes together."""
        pairs = zip(self.shapes or [self.shape], self.dtypes or [self.dtype], strict=True)
        return sum(shape.numel() * dtype.itemsize for shape, dtype in pairs)


class _More:
    """What few objects need: pins, and a put that waits for its event."""

    __slots__ = ("pending", "pins")

    def __init__(self) -> None:
        self.pins: list[Hold] = []
        self.pending: PendingPut | None = None


class _Keeper:
    """Lives as long as a buffer does, and keeps `what` alive."""

    __slots__ = ("what",)

    def __init__(self, what: object) -> None:
        self.what = what

    def __call__(self, _pointer: Any) -> None:
        """The buffer is gone; `what` goes with this object."""


class MemoryObj:
    """A hold on one block: writable until it is put, then read-only by agreement.

    Made by `Namespace.allocate`, `get` and their like. It may be released from any thread, and
    releases itself when collected. A `with` statement releases it at its end.
    """

    __slots__ = ("__weakref__", "_attachment", "_holds", "_keep", "_layout", "_more", "_namespace", "_part")

    def __init__(
        self, attachment: Attachment, namespace: Namespace, holds: list[Hold], part: Any, layout: Layout | None = None,
        keep: Any = None,
    ) -> None:  # fmt: skip
        self._attachment = attachment
        self._namespace = namespace
        self._holds = holds  # the first one is the writer's, until the block is published
        self._part = part
        self._layout = layout
        self._more: _More | None = None
        if keep is not None:
            self._keep = keep  # owns the memory of `part`

    # ---- life -----------------------------------------------------------------------------------

    def is_valid(self) -> bool:
        """Whether this object still holds its block."""
        return bool(self._holds) and not self._attachment.closed

    def release(self, after: EventLike | None = None) -> None:
        """Give back all that this object still holds, pins too. Doing it again does nothing.

        Parameters
        ----------
        after
            anything with `query()`, such as a `torch.cuda.Event`: the holds are kept until it is
            true. The object counts as released at once.

        Raises
        ------
        StaleHandleError
            in a forked child: the holds are the parent's.
        LockTimeoutError
            nothing changed; try again.
        """
        attachment = self._attachment
        holds = self._holds
        if self._more is None and after is None:
            try:
                hold = holds.pop()
            except IndexError:
                return
            rc = lib.shmc_release(attachment.handle, hold[1], 1)
            if rc < 0:
                self._not_released([hold], rc)
            elif len(attachment.holds) < 512:
                attachment.holds.append(hold)
            if not holds:
                return
        self._release_all(after)

    def _release_all(self, after: EventLike | None) -> None:
        more = self._more
        taken = _take_all(self._holds)
        if more is not None:
            taken += _take_all(more.pins)
            if more.pending is not None and more.pending.keep(taken, after):
                return
        if not taken:
            return
        attachment = self._attachment
        if after is not None:
            if attachment.closed:
                return

            try:
                attachment.release_after(taken, after)
            except BaseException:
                self._holds += taken
                raise
            return
        rc = attachment.release(taken)
        if rc < 0:
            self._not_released(taken, rc)

    def _not_released(self, holds: list[Hold], rc: int) -> None:
        attachment = self._attachment
        if attachment.closed or rc == lib.SHMC_E_CLOSED:
            return  # close() dropped them
        # a reference or a pin: either way it is given back by a later release
        self._holds += holds
        if rc == lib.SHMC_E_FORKED:
            raise attachment.error(rc, "release")
        attachment.recover(rc, "release")

    def __enter__(self) -> MemoryObj:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.release()
        except errors.ShmCacheError:
            if error is None:  # never hide what went wrong inside
                raise

    # ---- references and pins ----------------------------------------------------------------------

    def _dup(self, as_pin: int, what: str) -> tuple[Attachment, Hold]:
        self._need_valid(what)
        attachment = self._attachment
        while True:
            hold = attachment.new_hold()
            rc = lib.shmc_dup(attachment.handle, self._part, hold[0], as_pin)
            if rc == 0:
                return attachment, hold
            if rc == lib.SHMC_FULL:
                raise errors.OutOfSharedMemoryError(f"{what}: the table of holds of {attachment.name!r} is full")
            if rc != lib.SHMC_E_FORKED:
                attachment.recover(rc, what)
            # a forked child may take holds of its own while its parent still has one
            attachment = self._namespace.cache._attached()

    def ref_count_up(self) -> None:
        """One more reference, which needs one more `ref_count_down` (or `release`, which gives back all)."""
        attachment, hold = self._dup(0, "ref_count_up")
        if attachment is not self._attachment:
            raise self._attachment.error(lib.SHMC_E_FORKED, "ref_count_up")
        self._holds.append(hold)

    def ref_count_down(self) -> None:
        """Give back one reference of this object; StaleHandleError when it has none."""
        if self._attachment.closed:
            raise self._attachment.error(lib.SHMC_E_CLOSED, "ref_count_down")
        try:
            hold = self._holds.pop()
        except IndexError:
            raise errors.StaleHandleError("ref_count_down: this object holds no reference any more") from None
        more = self._more
        if more is not None and more.pending is not None and not self._holds and more.pending.keep([hold], None):
            return
        attachment = self._attachment
        rc = attachment.release([hold])
        if rc < 0:
            self._holds.append(hold)
            if rc == lib.SHMC_E_FORKED:
                raise attachment.error(rc, "ref_count_down")
            attachment.recover(rc, "ref_count_down")

    def _counts(self) -> tuple[int, int]:
        """References, the cache's own included, and pins."""
        cell = ffi.new("uint32_t[2]")
        attachment = self._attachment
        while True:
            rc = lib.shmc_ref_count(attachment.handle, self._part, cell, cell + 1)
            if rc == 0:
                return cell[0] + self._part.published, cell[1]
            if rc == lib.SHMC_E_STALE and attachment.mine():
                return 0, 0  # freed, and perhaps another's by now
            if rc != lib.SHMC_E_FORKED:
                attachment.recover(rc, "get_ref_count")
            attachment = self._namespace.cache._attached()

    def get_ref_count(self) -> int:
        """References of all processes; while it is in the cache, the cache's own counts one."""
        return self._counts()[0]

    def pin(self) -> bool:
        """Keep the block through eviction until `unpin` or `release`; pins do not count as references."""
        attachment, hold = self._dup(1, "pin")
        if attachment is not self._attachment:
            raise self._attachment.error(lib.SHMC_E_FORKED, "pin")
        self._extra().pins.append(hold)
        return True

    def unpin(self) -> bool:
        """Give back one pin of this object; False when it has none."""
        more = self._more
        if more is None:
            return False
        try:
            hold = more.pins.pop()
        except IndexError:
            return False
        rc = self._attachment.release([hold])
        if rc < 0:
            self._not_released([hold], rc)
        return True

    @property
    def is_pinned(self) -> bool:
        """Whether anybody, in any process, has pinned it."""
        return self._counts()[1] > 0

    @property
    def can_evict(self) -> bool:
        """Not pinned, and one reference, which for an object in the cache is the cache's own."""
        refs, pins = self._counts()
        return refs == 1 and pins == 0

    def _put_done(self) -> None:
        if self._more is not None:
            self._more.pending = None

    def _extra(self) -> _More:
        if self._more is None:
            with _extra_lock:
                if self._more is None:
                    self._more = _More()
        return self._more

    # ---- views ------------------------------------------------------------------------------------

    def _look(self) -> Layout:
        """The layout, read from the block's description at first use."""
        layout = self._layout
        if layout is None:
            part = self._part
            layout = self._layout = layout_from(bytes(ffi.buffer(part.meta)[0 : part.meta_len]), part.size)
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
        if not self._holds or attachment.closed:
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
        size = self._part.size
        return self._view(Group((size,), (1,), UINT8, 0, size))

    def _buffer(self, keep: object) -> Any:
        """The bytes as a buffer that keeps `keep` alive, however it is passed on."""
        attachment = self._attachment
        pointer = ffi.cast("uint8_t *", attachment.address + self._part.offset)
        return ffi.buffer(ffi.gc(pointer, _Keeper((keep, attachment.arena()))), self._part.size)

    def tensor_owned(self) -> torch.Tensor | None:
        """A tensor whose storage owns a hold of its own, which goes with the last view of it.

        Costs one more hold. None once released; ValueError for several groups.
        """
        import torch

        if not self.is_valid():
            return None
        group = self._look().single
        if group is None:
            raise ValueError(f"the object has {len(self._look().groups)} tensors: use get_tensor(i)")
        _, hold = self._dup(0, "tensor_owned")
        buffer = self._buffer(hold)
        flat = torch.frombuffer(buffer, dtype=torch_dtype(group.dtype), count=group.nbytes // group.dtype.itemsize)
        return flat.view(group.shape)

    @property
    def byte_array(self) -> memoryview:
        """The bytes; writable until put, read-only after. It keeps this object alive.

        A view taken before the put stays writable: do not write through it any more.
        """
        self._need_valid("byte_array")
        view = memoryview(self._buffer(self))
        return view.toreadonly() if self._part.published else view

    def _need_valid(self, what: str) -> None:
        if self._attachment.closed:
            raise self._attachment.error(lib.SHMC_E_CLOSED, what)
        if not self._holds:
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
        return int(self._part.size)

    # ---- description --------------------------------------------------------------------------------

    def get_size(self) -> int:
        """Bytes asked for."""
        return int(self._part.size)

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
        dim = self.get_memory_format().token_dim()
        return shape[dim] if dim < len(shape) else 1

    @property
    def metadata(self) -> MemoryObjMetadata:
        """A snapshot under LMCache's names."""
        refs, pins = self._counts()
        shapes, dtypes = self.get_shapes(), self.get_dtypes()
        return MemoryObjMetadata(
            shapes[0], dtypes[0], self.shm_offset, self.get_physical_size(), refs, pins, self.get_memory_format(),
            shapes=shapes, dtypes=dtypes,
        )  # fmt: skip

    @property
    def published(self) -> bool:
        """Whether it is, or was, in the cache."""
        return bool(self._part.published)

    def parent(self) -> Namespace:
        """The namespace it was allocated or found in."""
        return self._namespace

    def __repr__(self) -> str:
        layout = self._look()
        what = ", ".join(f"{list(g.shape)} {g.dtype.name}" for g in layout.groups)
        state = "closed" if self._attachment.closed else "released" if not self._holds else "valid"
        return f"<MemoryObj {what} at {self.shm_offset} of {self._attachment.name!r}, {state}>"
