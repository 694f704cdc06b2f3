"""The storing half of a namespace: allocate and put."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import errors
from ._allocate import take_memory
from ._attachment import Attachment
from ._calls import Calls
from ._core import BYTES, NO_KEY, NULL, OWNERS, UNUSUAL, fast, ffi, lib
from ._defer import EventLike
from ._keys import Key, PackedKeys, pack
from ._meta import Layout, layout_of, with_checksum
from ._pending import PendingPut
from .memory import MemoryObj

_alloc = fast.alloc
_put = lib.shmc_put
_put_one = fast.put
_new = ffi.new


class Storing(Calls):
    """Part of `Namespace`."""

    __slots__ = ()

    def allocate(
        self, shape: Any = None, dtype: Any = None, *, fmt: Any = None, evict: bool = True,
        timeout: float | None = 0.0, nbytes: int | None = None,
    ) -> MemoryObj | None:  # fmt: skip
        """One extent, one hold, contents undefined.

        Parameters
        ----------
        shape
            dimensions, each at least 1, or `()`; an int without a dtype is a number of bytes. With a
            list of dtypes, a list of as many shapes: several tensors in one object.
        dtype
            of torch or numpy, or a name.
        fmt
            a `MemoryFormat`; by default undefined.
        evict
            whether chunks may be evicted to make room.
        timeout
            seconds to wait for memory, None for ever. A region that is being committed is waited
            for up to 1 s in any case, and the arena grows before anything is evicted.
        nbytes
            in place of shape and dtype: a flat object of so many bytes.

        Returns
        -------
        MemoryObj or None
            None when memory cannot be had within the timeout.

        Raises
        ------
        ValueError
            an empty, negative or overflowing size.
        CapacityError
            it could never fit; nothing was evicted.
        """
        if nbytes is not None:
            if shape is not None or dtype is not None:
                raise TypeError("allocate: a shape and a dtype, or nbytes, not both")
            shape = nbytes
        return self._allocate(layout_of(shape, dtype, fmt), evict, timeout)

    def _allocate(self, layout: Layout, evict: bool, timeout: float | None) -> MemoryObj | None:
        a = self.cache._attachment
        if a.checksum is not None:
            a.checksum.check_room(layout)
        try:
            hold = a.holds.pop()
        except IndexError:
            hold = a.new_hold()
        found = _alloc(
            a.at, self._index, layout.reserve, layout.blob, 0 if evict else 4, a.ticket_at, self._make, a, self, layout,
            hold,
        )  # fmt: skip
        if type(found) is not int:
            return found  # type: ignore[no-any-return]
        if found == lib.SHMC_FULL and timeout == 0:
            a.holds.append(hold)
            return None
        taken = take_memory(self, layout, 1, evict, timeout)
        return taken[0] if taken else None

    def allocate_many(
        self, shape: Any, dtype: Any = None, n: int = 1, *, fmt: Any = None, evict: bool = True,
        timeout: float | None = 0.0,
    ) -> list[MemoryObj] | None:  # fmt: skip
        """n objects alike, or None: all or nothing. Nothing is held while it waits. See `allocate`."""
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"n is {n!r}: how many objects, at least 0")
        layout = layout_of(shape, dtype, fmt)
        if not n:
            self.cache._attached("allocate_many")
            return []
        return take_memory(self, layout, n, evict, timeout)

    def put(
        self, key: Key, obj: MemoryObj, *, part: int = 0, parent: Key | None = None, after: EventLike | None = None
    ) -> bool:
        """Publish an object under a key.

        Parameters
        ----------
        part
            which part of the chunk it is: the rank.
        parent
            key of the chunk before it in the prompt, so that a prefix outlives its extensions.
        after
            anything with `query()`: published once that is true. Returns True at once, meaning
            accepted; the object may be released meanwhile.

        Returns
        -------
        bool
            True when newly stored. False when that part is there already (the first bytes stay and
            the caller keeps its object), or when the namespace was bumped since the allocation.

        Raises
        ------
        ValueError
            the object was published before, or is of another namespace or cache.
        StaleHandleError
            it was released.
        """
        if part:
            self._part(part)
        a = self.cache._attachment
        if after is None and a.checksum is None:
            rc: int = _put_one(a.at, self._index, key, part, parent, obj, a, self)
            if rc >= 0:
                return rc == 1
            if rc not in (NO_KEY, UNUSUAL):
                self._put_failed(a, rc, [obj])
        return self.put_many([key], [obj], part=part, parent=parent, after=after)[0]

    def adopt(self, obj: MemoryObj) -> None:
        """Take over an unpublished object that was allocated in another namespace of this cache.

        Raises
        ------
        ValueError
            it was published before, is reserved under a key, or is of another cache.
        StaleHandleError
            it was released.
        """
        a = self.cache._attached("adopt")
        if obj._attachment is not a:
            raise ValueError(f"adopt: the object is of cache {obj._namespace.cache.name!r}, not of this open handle")
        try:
            owner = obj._holds[0][0]
        except IndexError:
            raise errors.StaleHandleError("adopt: the object was released before") from None
        if obj._more is not None and obj._more.pending is not None:
            raise ValueError("adopt: the object is already being put, after its event")
        rc = lib.shmc_adopt(a.handle, self._index, owner)
        if rc == lib.SHMC_E_PUBLISHED:
            raise ValueError("adopt: the object was published before; bytes in the cache are never changed")
        if rc == lib.SHMC_E_FOREIGN:
            raise ValueError(f"adopt: the object is reserved under a key of {obj._namespace.name!r}")
        if rc < 0:
            a.recover(rc, "adopt")
            return self.adopt(obj)
        obj._namespace = self

    def put_many(
        self, keys: Iterable[Key], objs: Sequence[MemoryObj], *, part: int = 0, parent: Key | None = None,
        after: EventLike | None = None,
    ) -> list[bool]:  # fmt: skip
        """Publish several objects in one call, in this order; see `put` for each.

        With `parent` the keys form a chain: the first is its child, and each the child of the one
        before. Everything is checked before anything is done.
        """
        packed = pack(keys)
        if part:
            self._part(part)
        objs = list(objs)
        if len(objs) != packed.n:
            raise ValueError(f"put_many: {packed.n} keys and {len(objs)} objects")
        self._check_puttable(objs)
        if not objs:
            return []
        holds = [obj._holds[0] for obj in objs]
        before = None if parent is None else pack([parent])
        if after is not None:
            return self._put_later(packed, objs, holds, part, before, after)
        return self._put_now(packed, objs, holds, part, before)

    def _put_now(
        self, packed: PackedKeys, objs: list[MemoryObj], holds: list[Any], part: int, before: PackedKeys | None
    ) -> list[bool]:
        a = self.cache._attachment
        if a.checksum is not None:
            self._add_checksums(a, objs, holds)
        n = packed.n
        stored = _new(BYTES, n)
        owners = _new(OWNERS, [owner for owner, _ in holds])
        rc = _put(a.handle, self._index, packed.c, owners, part, NULL if before is None else before.c, stored)
        result = [byte == 1 for byte in bytes(ffi.buffer(stored))]
        for obj, is_stored in zip(objs, result, strict=True):
            if is_stored:
                obj._part.published = 1
        if rc < 0:
            self._put_failed(a, rc, objs)
        return result

    def _add_checksums(self, a: Attachment, objs: list[MemoryObj], holds: list[Any]) -> None:
        """Describe each object anew, with the checksum of its bytes. Nobody else looks before it is published."""
        assert a.checksum is not None
        for obj, (owner, _) in zip(objs, holds, strict=True):
            blob = with_checksum(obj._look().blob, a.checksum.digest(obj._buffer(obj)))
            rc = lib.shmc_set_meta(a.handle, owner, blob, len(blob))
            if rc < 0:
                self._put_failed(a, rc, objs)

    def _put_later(
        self, packed: PackedKeys, objs: list[MemoryObj], holds: list[Any], part: int, before: PackedKeys | None,
        after: EventLike,
    ) -> list[bool]:  # fmt: skip
        a = self.cache._attachment
        pending = PendingPut(a, objs, lambda: self._put_now(packed, objs, holds, part, before))
        for obj in objs:
            obj._extra().pending = pending
        try:
            a.deferred().add(after, pending.run)
        except BaseException:
            for obj in objs:
                obj._put_done()
            raise
        return [True] * len(objs)

    def _check_puttable(self, objs: Sequence[MemoryObj]) -> None:
        """ValueError or StaleHandleError for the first that cannot be put here."""
        a = self.cache._attached("put")
        if len(set(map(id, objs))) != len(objs):
            raise ValueError("put_many: the same object twice")
        for obj in objs:
            if not isinstance(obj, MemoryObj):
                raise TypeError(f"put: expected a MemoryObj, got {type(obj).__name__}")
            theirs = obj._namespace
            if theirs.cache is not self.cache or theirs._index != self._index:
                raise ValueError(
                    f"put: the object is of namespace {theirs.name!r} of cache {theirs.cache.name!r}"
                    f"{'' if theirs.cache is self.cache else ' (another open handle)'}, "
                    f"this is {self.name!r} of {self.cache.name!r}: allocate it here"
                )
            if not obj._holds:
                raise errors.StaleHandleError("put: the object was released before")
            if obj._attachment is not a:
                forked = obj._attachment.pid != a.pid
                raise obj._attachment.error(lib.SHMC_E_FORKED if forked else lib.SHMC_E_STALE, "put")
            if obj._part.published:
                raise ValueError("put: the object was published before; bytes in the cache are never changed")
            if obj._more is not None and obj._more.pending is not None:
                raise ValueError("put: the object is already being put, after its event")

    def _put_failed(self, a: Attachment, rc: int, objs: list[MemoryObj]) -> None:
        """Raises, always unless another try makes sense."""
        if rc == lib.SHMC_E_PUBLISHED:
            raise ValueError("put: the object was published before; bytes in the cache are never changed")
        if rc == lib.SHMC_E_FOREIGN:
            raise ValueError(f"put: the object is of another namespace than {self.name!r}")
        a.recover(rc, "put")
        self._check_puttable(objs)
