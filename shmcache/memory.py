"""Memory objects: one block of the arena, held by this process.

The object owns its holds (`Hold`, see `_attachment`); its views are in `_block`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from . import errors
from ._attachment import Attachment, Hold
from ._block import Block
from ._core import ffi, lib, part_pointer
from ._defer import EventLike
from ._dtypes import torch_dtype
from ._formats import MemoryFormat, MemoryObjMetadata
from ._meta import Layout
from ._pending import PendingPut

if TYPE_CHECKING:
    import torch

    from ._calls import Calls
    from .namespace import Namespace

__all__ = ["MemoryFormat", "MemoryObj", "MemoryObjMetadata", "release_many"]

_extra_lock = threading.Lock()


def _renew_lock() -> None:
    global _extra_lock
    _extra_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _take_all(holds: list[Hold]) -> list[Hold]:
    """Empty a list that other threads may be taking from, each hold once."""
    taken = []
    while holds:
        try:
            taken.append(holds.pop())
        except IndexError:
            break
    return taken[::-1]


class _More:
    """What few objects need: pins, a put that waits for its event, and what is left of bytes cut short."""

    __slots__ = ("narrowed", "pending", "pins")

    def __init__(self) -> None:
        self.narrowed: torch.Tensor | None = None
        self.pins: list[Hold] = []
        self.pending: PendingPut | None = None


class MemoryObj(Block):
    """A hold on one block: writable until it is put, then read-only by agreement.

    Made by `Namespace.allocate`, `get` and their like. It may be released from any thread, and
    releases itself when collected. A `with` statement releases it at its end.
    """

    __slots__ = ()

    def __init__(
        self, attachment: Attachment, namespace: Calls, holds: list[Hold], part: Any, layout: Layout | None = None
    ) -> None:
        # `fast` makes most objects, and sets the same fields
        self._attachment = attachment
        self._namespace = namespace
        self._holds = holds
        self._part = part
        self._layout = layout
        self._more: _More | None = None

    # ---- life: release() and ref_count_down() are those of Held, what is unusual is done here ----

    def _release(self, after: EventLike | None = None) -> None:
        if not self._holds and self._more is None:
            return
        attachment = self._attachment
        if attachment.closed:
            self._not_released(lib.SHMC_E_CLOSED)
            return
        if not attachment.is_own():
            raise attachment.error(lib.SHMC_E_FORKED, "release")
        more = self._more
        refs = _take_all(self._holds)
        pins = [] if more is None else _take_all(more.pins)
        if not refs and not pins:
            return
        if more is not None and more.pending is not None and more.pending.keep(refs + pins, after):
            return
        rc = lib.SHMC_E_OS
        try:
            if after is not None:
                attachment.release_after(refs + pins, after)
                rc = 0
            else:
                rc = attachment.release(refs + pins)
        finally:
            if rc < 0:
                self._holds[:0] = refs
                if pins:
                    self._extra().pins[:0] = pins
        if rc < 0:
            self._not_released(rc)

    def _not_released(self, rc: int) -> None:
        attachment = self._attachment
        if attachment.closed or rc == lib.SHMC_E_CLOSED:
            self._holds.clear()  # close() dropped them
            return
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

    def _dup(self, as_pin: int, what: str, in_child: bool = False) -> Hold | None:
        """One more hold, or None when the table of holds is full."""
        self._need_valid(what)
        attachment = self._attachment
        while True:
            hold = attachment.new_hold()
            rc = lib.shmc_dup(attachment.handle, part_pointer(self._part), hold[0], as_pin)
            if rc == 0:
                return hold
            if rc == lib.SHMC_FULL:
                attachment.empty_holds([hold])
                return None
            if rc != lib.SHMC_E_FORKED:
                attachment.recover(rc, what)
            if not in_child:
                raise attachment.error(rc, what)
            # while the parent has its hold, a forked child may take one of its own
            attachment = self._namespace.cache._attached(what)

    def _table_full(self, what: str) -> errors.OutOfSharedMemoryError:
        return errors.OutOfSharedMemoryError(
            f"{what}: all holds of segment {self._attachment.name!r} are in use",
            hint="release objects, or make the segment again with a larger max_chunks",
        )

    def ref_count_up(self) -> None:
        """One more reference, which needs one more `ref_count_down` (or `release`, which gives back all)."""
        hold = self._dup(0, "ref_count_up")
        if hold is None:
            raise self._table_full("ref_count_up")
        self._holds.append(hold)

    def _count_down(self) -> None:
        attachment = self._attachment
        if attachment.closed:
            self._not_counted_down(lib.SHMC_E_CLOSED)
            return
        try:
            hold = self._holds.pop()
        except IndexError:
            self._no_reference()
            return
        more = self._more
        pending = None if more is None else more.pending
        if pending is not None and not self._holds and attachment.is_own() and pending.keep([hold], None):
            return
        rc = attachment.release([hold])
        if rc < 0:
            self._holds.append(hold)
            self._not_counted_down(rc)

    def _not_counted_down(self, rc: int) -> None:
        attachment = self._attachment
        if rc in (lib.SHMC_E_CLOSED, lib.SHMC_E_FORKED):
            raise attachment.error(rc, "ref_count_down")
        attachment.recover(rc, "ref_count_down")

    def _no_reference(self) -> None:
        raise errors.StaleHandleError("ref_count_down: this object holds no reference any more")

    def _counts(self) -> tuple[int, int]:
        """References, the cache's own included, and pins."""
        cell = ffi.new("uint32_t[2]")
        attachment = self._attachment
        while True:
            rc = lib.shmc_ref_count(attachment.handle, part_pointer(self._part), cell, cell + 1)
            if rc == 0:
                return cell[0], cell[1]
            if rc == lib.SHMC_E_STALE and attachment.mine():
                return 0, 0  # freed, and perhaps another's by now
            if rc != lib.SHMC_E_FORKED:
                attachment.recover(rc, "get_ref_count")
            attachment = self._namespace.cache._attached()

    def get_ref_count(self) -> int:
        """References of all processes; while it is in the cache, the cache's own counts one."""
        return self._counts()[0]

    def pin(self) -> bool:
        """Keep the block through eviction until `unpin` or `release`; pins do not count as references.

        False when the table of holds is full.
        """
        hold = self._dup(1, "pin")
        if hold is None:
            return False
        self._extra().pins.append(hold)
        return True

    def unpin(self) -> bool:
        """Give back one pin of this object; False when it has none."""
        pins = [] if self._more is None else self._more.pins
        try:
            hold = pins.pop()
        except IndexError:
            return False
        rc = self._attachment.release([hold])
        if rc < 0:
            pins.append(hold)
            self._not_released(rc)
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
        hold = self._dup(0, "tensor_owned", in_child=True)
        if hold is None:
            raise self._table_full("tensor_owned")
        buffer = self._buffer(hold)
        flat = torch.frombuffer(buffer, dtype=torch_dtype(group.dtype), count=group.nbytes // group.dtype.itemsize)
        return flat.view(group.shape)

    @property
    def metadata(self) -> MemoryObjMetadata:
        """A snapshot under LMCache's names."""
        refs, pins = self._counts()
        shapes, dtypes = self.get_shapes(), self.get_dtypes()
        return MemoryObjMetadata(
            shapes[0], dtypes[0], self.shm_offset, self.get_physical_size(), refs, pins, self.get_memory_format(),
            shapes=shapes, dtypes=dtypes,
        )  # fmt: skip

    def parent(self) -> Namespace:
        """The namespace it was allocated or found in."""
        return cast("Namespace", self._namespace)


def release_many(objs: Iterable[MemoryObj], after: EventLike | None = None) -> None:
    """Release several objects, last to first, where possible in one call. See `MemoryObj.release`."""
    batch: list[tuple[MemoryObj, list[Hold]]] = []
    attachment: Attachment | None = None
    for obj in objs:
        if after is not None or obj._more is not None or obj._attachment is not (attachment or obj._attachment):
            obj.release(after)
            continue
        attachment = obj._attachment
        batch.append((obj, _take_all(obj._holds)))
    if attachment is None:
        return
    rc = attachment.release([hold for _, holds in batch for hold in holds])
    if rc < 0:
        for obj, holds in batch:
            obj._holds[:0] = holds
        for obj, _ in batch:
            obj.release()
