"""Single flight: of all who want to write a part, one does and the others wait for it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from . import errors
from ._allocate import Deadline, Growth, too_large
from ._core import PART, ffi, lib
from ._keys import Key, PackedKeys, pack
from ._meta import Layout

if TYPE_CHECKING:
    from ._defer import EventLike
    from .memory import MemoryObj
    from .namespace import Namespace

__all__ = ["Reservation", "ReservationState"]

_NEVER = 1 << 62  # no segment has so much: a reserve that only looks


class ReservationState(str, enum.Enum):
    """What `Namespace.reserve` found. Each equals its name as a str."""

    WRITE = "WRITE"
    PUBLISHED = "PUBLISHED"
    PENDING = "PENDING"
    FULL = "FULL"

    __str__ = str.__str__


class Reservation:
    """One attempt to become the writer of a part.

    Attributes
    ----------
    state : ReservationState
        WRITE: `obj` is yours to fill; `put` publishes it, a release without put gives up.
        PUBLISHED: it is there, `obj` is a hold on it.
        PENDING: another writer is at it; `wait`.
        FULL: no memory; nothing is reserved.
    obj : MemoryObj or None

    A context manager: its end releases `obj`. The death of a writer gives up for it and wakes those
    who wait. A put by anybody, reserved or not, publishes first; the reserver's then returns False.
    """

    WRITE = ReservationState.WRITE
    PUBLISHED = ReservationState.PUBLISHED
    PENDING = ReservationState.PENDING
    FULL = ReservationState.FULL

    __slots__ = ("_key", "_namespace", "_packed", "_part", "_ticket", "obj", "state")

    def __init__(self, namespace: Namespace, key: Key, layout: Layout, part: int) -> None:
        self._namespace = namespace
        self._key = key
        self._packed: PackedKeys = pack([key])
        self._part = part
        self._ticket: Any = ffi.new("uint32_t *")
        self.obj: MemoryObj | None = None
        self.state: ReservationState
        growth = Growth()
        flags = 0
        while True:
            rc, obj = self._try(layout.reserve, layout, flags)
            self.obj = obj
            if rc == lib.SHMC_OK:
                self.state = ReservationState.WRITE
            elif rc == lib.SHMC_FOUND:
                self.state = ReservationState.PUBLISHED
            elif rc == lib.SHMC_PENDING:
                self.state = ReservationState.PENDING
            elif rc == lib.SHMC_E_CAPACITY:
                raise too_large(namespace, layout)
            else:
                if rc == lib.SHMC_GROW:
                    if not growth.grow(namespace.cache._attachment.committer()):
                        flags = lib.SHMC_F_NO_GROW  # make do with what is there
                    continue
                self.state = ReservationState.FULL
            return

    def _try(self, size: int, layout: Layout | None, flags: int = 0) -> tuple[int, MemoryObj | None]:
        """One call: status, and the object when the owner got a hold. Negative: E_CAPACITY only."""
        namespace = self._namespace
        blob = b"" if layout is None else layout.blob
        while True:
            a = namespace.cache._attachment
            if a.checksum is not None and layout is not None:
                a.checksum.check_room(layout)
            hold = a.new_hold()
            where = ffi.new(PART)
            rc = lib.shmc_reserve(
                a.handle, namespace._index, self._packed.c, self._part, size, blob, len(blob), flags, hold[0], where,
                self._ticket,
            )  # fmt: skip
            if rc in (lib.SHMC_OK, lib.SHMC_FOUND):
                return rc, namespace._make(a, namespace, [hold], where, layout if rc == lib.SHMC_OK else None)
            if rc >= 0 or rc == lib.SHMC_E_CAPACITY:
                a.empty_holds([hold])
                return rc, None
            a.recover(rc, "reserve")

    def wait(self, timeout: float | None = None) -> MemoryObj | None:
        """Wait until the other writer has published; the object is the caller's to release.

        None when it gave up or died, or `timeout` seconds (None: no limit) are over: reserve again.
        For a reservation that is PUBLISHED already: its `obj`. ValueError in any other state.
        """
        if self.state is ReservationState.PUBLISHED:
            return self.obj
        if self.state is not ReservationState.PENDING:
            raise ValueError(f"wait: the reservation is {self.state}, there is nobody to wait for")
        deadline = Deadline(timeout)
        cache = self._namespace.cache
        while True:
            rc, obj = self._try(_NEVER, None)
            if rc != lib.SHMC_PENDING:
                return obj
            ns = deadline.slice_ns()
            if not ns:
                return None
            a = cache._attachment
            rc = lib.shmc_wait(a.handle, 1, self._ticket[0], ns)
            if rc < 0:
                a.recover(rc, "wait")
            cache._reap()

    def put(self, *, parent: Key | None = None, after: EventLike | None = None) -> bool:
        """Publish what was written; False when somebody else was first."""
        if self.state is not ReservationState.WRITE or self.obj is None:
            raise ValueError(f"put: the reservation is {self.state}, there is nothing of yours to publish")
        return self._namespace.put(self._key, self.obj, part=self._part, parent=parent, after=after)

    def release(self, after: EventLike | None = None) -> None:
        """Release `obj`: gives up a reservation that was not put. Doing it again does nothing."""
        if self.obj is not None:
            self.obj.release(after)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.release()
        except errors.ShmCacheError:
            if error is None:  # never hide what went wrong inside
                raise

    def __repr__(self) -> str:
        return f"<Reservation of {self._key!r} part {self._part}: {self.state}>"
