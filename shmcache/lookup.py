"""The result of a lookup: how much of a prefix is there, and a way to its bytes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from . import errors
from ._core import PART, U32, ffi, lib, owned
from ._keys import Key, PackedKeys

if TYPE_CHECKING:
    from ._calls import Calls
    from ._defer import EventLike
    from .memory import MemoryObj

__all__ = ["Lookup"]


class Lookup:
    """The leading complete chunks of a list of keys; made by `Namespace.lookup`.

    A context manager: its end releases the pins. Pins of a lookup that is only dropped go when it is
    collected, with a ResourceWarning.

    Attributes
    ----------
    n : int
        how many leading keys are complete chunks; also `len()`. Fewer than there are when the table
        of holds is full.
    """

    __slots__ = ("_attachment", "_namespace", "_owner", "_packed", "_pinned", "n")

    def __init__(self, namespace: Calls, packed: PackedKeys, pin: bool, lease_ns: int, touch: bool) -> None:
        self._namespace = namespace
        self._packed = packed
        self._pinned = False  # until it is known
        self._owner: Any = None
        self.n = 0
        flags = (lib.SHMC_F_PIN if pin else 0) | (lib.SHMC_F_TOUCH if touch else 0)
        cell = ffi.new(U32)
        while True:
            self._attachment = a = namespace.cache._attachment
            if not packed.n:
                namespace.cache._attached("lookup")
                return
            # the owner of the pins exists before the call that takes them
            self._owner = owner = owned(lib.shmc_owner_new(a.handle, packed.n), lib.shmc_owner_free)
            rc = lib.shmc_lookup(a.handle, namespace._index, packed.c, flags, lease_ns, owner, cell)
            if rc >= 0:
                break
            a.recover(rc, "lookup")
        self.n = cell[0]
        self._pinned = pin and self.n > 0

    def __len__(self) -> int:
        return self.n

    @property
    def keys(self) -> list[Key]:
        """The `n` keys that were found."""
        return list(self._packed)[: self.n]

    @property
    def pinned(self) -> bool:
        """Whether it still has its pins (they may have ended with their lease)."""
        return self._pinned

    def get(self, i: int, *, part: int = 0, verify: bool = False) -> MemoryObj | None:
        """A hold on a part of chunk `i`; `verify` as for `Namespace.get`.

        Through the pin it is always there, also after a remove or a bump. None when the lookup did
        not pin and the chunk is gone, when its lease has ended, or when the table of holds is full.

        Raises
        ------
        IndexError
            `i` is not below `n`.
        StaleHandleError
            the lookup was released, or is the parent's of a forked child.
        ChecksumError
            with `verify`: the bytes are not what was put. The lookup keeps its pins.
        """
        if verify:
            self._namespace._need_checksums("Lookup.get")
            obj = self.get(i, part=part)
            self._namespace._verify("Lookup.get", [(self._packed[i], obj)], part)
            return obj
        if not 0 <= i < self.n:
            raise IndexError(f"chunk {i} of a lookup that found {self.n}")
        namespace = self._namespace
        if part:
            namespace._part(part)
        a = self._attachment
        owner = self._owner
        if owner is None:
            if a.closed:
                raise a.error(lib.SHMC_E_CLOSED, "Lookup.get")
            raise errors.StaleHandleError("Lookup.get: the lookup was released before")
        try:
            hold = a.holds.pop()
        except IndexError:
            hold = a.new_hold()
        where = ffi.new(PART)
        rc = lib.shmc_lookup_get(a.handle, namespace._index, owner, i, part, hold[0], where)
        if rc == 0:
            return namespace._make(a, namespace, [hold], where)
        if rc == lib.SHMC_FULL or (rc == lib.SHMC_E_STALE and a.mine()):
            a.empty_holds([hold])
            return None
        if rc == lib.SHMC_E_FORKED:
            raise a.error(rc, "Lookup.get")
        a.recover(rc, "Lookup.get")
        return None

    def release(self, after: EventLike | None = None) -> None:
        """Give back the pins, last to first. Doing it again does nothing.

        Parameters
        ----------
        after
            anything with `query()`: the pins are kept until it is true.
        """
        owner, self._owner = self._owner, None
        pinned, self._pinned = self._pinned, False
        if owner is None or not pinned:
            return
        a = self._attachment
        if after is not None and not a.closed:
            try:
                a.after(after, lambda: lib.shmc_release(a.handle, (owner,), 1))
            except BaseException:
                self._owner, self._pinned = owner, True
                raise
            return
        rc = lib.shmc_release(a.handle, (owner,), 1)
        if rc < 0 and not a.closed and rc != lib.SHMC_E_CLOSED:
            self._owner, self._pinned = owner, True
            if rc == lib.SHMC_E_FORKED:
                raise a.error(rc, "Lookup.release")
            a.recover(rc, "Lookup.release")

    def __enter__(self) -> Lookup:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.release()
        except errors.ShmCacheError:
            if error is None:  # never hide what went wrong inside
                raise

    def __del__(self) -> None:
        if getattr(self, "_pinned", False) and not self._attachment.closed and self._attachment.is_own():
            warnings.warn(f"{self!r} was not released", ResourceWarning, stacklevel=2)

    def __reduce__(self) -> str:
        raise TypeError("a Lookup cannot be sent or copied: its pins are this process's; send the keys")

    def __repr__(self) -> str:
        return f"<Lookup of {self.n} chunks of {self._namespace.name!r}{', pinned' if self._pinned else ''}>"
