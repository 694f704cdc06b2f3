"""A namespace: chunks by key, and everything that is done with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import _tensors, errors
from ._allocate import take_memory
from ._attachment import Attachment
from ._auto import AUTO, Auto
from ._core import BYTES, NULL, OWNERS, PART, PARTS, U32, U64, ffi, lib
from ._defer import EventLike
from ._keys import Key, KeyCell, PackedKeys, pack
from ._meta import layout_of
from ._order import list_keys
from ._pending import PendingPut
from .lookup import Lookup
from .memory import MemoryObj
from .reservation import Reservation

if TYPE_CHECKING:
    import torch

    from .cache import SharedCache

__all__ = ["Namespace"]

_contains = lib.shmc_contains
_get = lib.shmc_get
_put = lib.shmc_put
_alloc = lib.shmc_alloc
_new = ffi.new


def lease_ns(lease: float | None) -> int:
    """A lease in seconds as C takes it; None: no lease."""
    if lease is None:
        return 0
    if not 0 < lease < 1e9:
        raise ValueError(f"lease is {lease!r}: seconds, more than 0, or None for no end")
    return int(lease * 1e9)


def canonical_descriptor(descriptor: object) -> bytes | None:
    """A descriptor as it is stored and compared: canonical JSON."""
    if descriptor is None:
        return None
    raw = json.dumps(descriptor, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    if len(raw) > lib.SHMC_DESC_MAX:
        raise ValueError(f"descriptor takes {len(raw)} bytes as JSON, at most {lib.SHMC_DESC_MAX}: store a hash of it")
    return raw


class Namespace:
    """Chunks of one model, revision, dtype and layout; made by `SharedCache.namespace`.

    All of its methods may be called from any thread, and in forked children.

    Attributes
    ----------
    cache : SharedCache
    name : str
    parts : int
        how many blocks make one chunk complete, one for each rank (and layer).
    """

    __slots__ = ("_index", "_lease", "cache", "name", "parts")

    def __init__(self, cache: SharedCache, name: str, index: int, parts: int, lease: float | None) -> None:
        self.cache = cache
        self.name = name
        self.parts = parts
        self._index = index
        self._lease = lease_ns(lease)

    def __repr__(self) -> str:
        return f"<Namespace {self.name!r} of {self.cache.name!r}, {self.parts} parts>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_open_namespace, (self.cache, self.name, self._lease / 1e9 if self._lease else None))

    def _part(self, part: int) -> int:
        if not isinstance(part, int) or not 0 <= part < self.parts:
            raise ValueError(f"part is {part!r}: namespace {self.name!r} has parts 0 to {self.parts - 1}")
        return part

    # ---- memory -----------------------------------------------------------------------------------

    def allocate(
        self, shape: Any, dtype: Any = None, *, fmt: Any = None, evict: bool = True, timeout: float | None = 0.0
    ) -> MemoryObj | None:
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
        layout = layout_of(shape, dtype, fmt)
        a = self.cache._attachment
        try:
            hold = a.holds.pop()
        except IndexError:
            hold = a.new_hold()
        part = _new(PART)
        blob = layout.blob
        rc = _alloc(
            a.handle, self._index, layout.nbytes, blob, len(blob), 1, 0 if evict else 4, hold[1], part, a.ticket
        )
        if rc == 0:
            return MemoryObj(a, self, [hold], part, layout)
        a.empty_holds([hold])
        if rc == lib.SHMC_FULL and timeout == 0:
            return None
        found = take_memory(self, layout, 1, evict, timeout)
        return found[0] if found else None

    def allocate_many(
        self, shape: Any, dtype: Any = None, n: int = 1, *, fmt: Any = None, evict: bool = True,
        timeout: float | None = 0.0,
    ) -> list[MemoryObj] | None:  # fmt: skip
        """n objects alike, or None: all or nothing. Nothing is held while it waits. See `allocate`."""
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"n is {n!r}: how many objects, at least 0")
        layout = layout_of(shape, dtype, fmt)
        return take_memory(self, layout, n, evict, timeout) if n else []

    # ---- storing ----------------------------------------------------------------------------------

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
        if (
            after is not None
            or type(obj) is not MemoryObj
            or obj._namespace is not self
            or obj._attachment is not a
            or obj._more is not None
        ):
            return self._put_unusual(key, obj, part, parent, after)
        try:
            hold = obj._holds[0]
        except IndexError:
            self._check_puttable([obj])
            raise
        try:
            cell = a.cells.pop()
        except IndexError:
            cell = KeyCell()
        if type(key) is bytes and len(key) == cell.size:
            cell.memory[0 : cell.size] = key
        else:
            cell.set(key)
        before = NULL if parent is None else pack([parent]).c
        rc = _put(a.handle, self._index, cell.keys, hold[1], part, before, cell.flag)
        if rc < 0:
            self._put_failed(a, rc, [obj])
            return self.put(key, obj, part=part, parent=parent)
        stored: bool = cell.flag[0] == 1
        a.cells.append(cell)
        if stored:
            obj._part.published = 1
        return stored

    def _put_unusual(self, key: Key, obj: MemoryObj, part: int, parent: Key | None, after: EventLike | None) -> bool:
        return self.put_many([key], [obj], part=part, parent=parent, after=after)[0]

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
        if not objs:
            return []
        self._check_puttable(objs)
        holds = [obj._holds[0] for obj in objs]
        before = None if parent is None else pack([parent])
        if after is not None:
            return self._put_later(packed, objs, holds, part, before, after)
        return self._put_now(packed, objs, holds, part, before)

    def _put_now(
        self, packed: PackedKeys, objs: list[MemoryObj], holds: list[Any], part: int, before: PackedKeys | None
    ) -> list[bool]:
        a = self.cache._attachment
        n = packed.n
        stored = _new(BYTES, n)
        owners = _new(OWNERS, [owner for owner, _ in holds])
        rc = _put(a.handle, self._index, packed.c, owners, part, NULL if before is None else before.c, stored)
        if rc < 0:
            self._put_failed(a, rc, objs)
        result = [byte == 1 for byte in bytes(ffi.buffer(stored))]
        for obj, is_stored in zip(objs, result, strict=True):
            if is_stored:
                obj._part.published = 1
        return result

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
        a = self.cache._attached()
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

    # ---- finding ----------------------------------------------------------------------------------

    def contains(self, key: Key, *, part: int | None = None) -> bool:
        """Whether the chunk is complete; with `part`, whether that part of it is published."""
        a = self.cache._attachment
        try:
            cell = a.cells.pop()
        except IndexError:
            cell = KeyCell()
        if type(key) is bytes and len(key) == cell.size:
            cell.memory[0 : cell.size] = key
        else:
            cell.set(key)
        rc = _contains(a.handle, self._index, cell.keys, -1 if part is None else self._part(part), cell.flag)
        if rc < 0:
            a.recover(rc, "contains")
            return self.contains(key, part=part)
        found: bool = cell.flag[0] == 1
        a.cells.append(cell)
        return found

    def contains_many(self, keys: Iterable[Key], *, part: int | None = None) -> list[bool]:
        """`contains` of each key, in one call."""
        packed = pack(keys)
        return self._flags("contains_many", _contains, packed, (-1 if part is None else self._part(part),))

    def get(self, key: Key, *, part: int = 0) -> MemoryObj | None:
        """A hold on published bytes, or None. It does not count as a use for eviction; see `touch`."""
        if part:
            self._part(part)
        a = self.cache._attachment
        try:
            cell = a.cells.pop()
        except IndexError:
            cell = KeyCell()
        if type(key) is bytes and len(key) == cell.size:
            cell.memory[0 : cell.size] = key
        else:
            cell.set(key)
        try:
            hold = a.holds.pop()
        except IndexError:
            hold = a.new_hold()
        where = _new(PART)
        rc = _get(a.handle, self._index, cell.keys, part, hold[1], where)
        if rc < 0:
            a.recover(rc, "get")
            return self.get(key, part=part)
        a.cells.append(cell)
        if where.published:
            return MemoryObj(a, self, [hold], where)
        a.holds.append(hold)
        return None

    def get_many(self, keys: Iterable[Key], *, part: int = 0) -> list[MemoryObj | None]:
        """`get` of each key in one call (one lock round per 64); None where absent."""
        packed = pack(keys)
        if part:
            self._part(part)
        n = packed.n
        if not n:
            return []
        while True:
            a = self.cache._attachment
            pairs, owners = a.new_holds(n)
            parts = _new(PARTS, n)
            rc = _get(a.handle, self._index, packed.c, part, owners, parts)
            if rc >= 0:
                break
            a.recover(rc, "get_many")
        found: list[MemoryObj | None] = []
        unused = []
        for i, pair in enumerate(pairs):
            if parts[i].published:
                found.append(MemoryObj(a, self, [pair], parts + i, keep=parts))
            else:
                found.append(None)
                unused.append(pair)
        a.empty_holds(unused)
        return found

    def lookup(
        self, keys: Iterable[Key], *, pin: bool = False, lease: float | None = None, touch: bool = True
    ) -> Lookup:
        """The leading complete chunks of `keys`.

        Parameters
        ----------
        pin
            keep each chunk from eviction until the lookup is released: it is pinned in the critical
            section in which it is found, so that on return all `n` are there.
        lease
            seconds after which its pins end by themselves; by default the namespace's.
        touch
            count as a use: keys are touched from last to first, so that the first is hottest.
        """
        if lease is not None and not pin:
            raise ValueError("lookup: a lease is for pins, say pin=True")
        return Lookup(self, pack(keys), pin, self._lease if lease is None else lease_ns(lease), touch)

    # ---- by key -----------------------------------------------------------------------------------

    def _flags(self, what: str, call: Any, packed: PackedKeys, args: tuple[Any, ...] = ()) -> list[bool]:
        if not packed.n:
            return []
        out = _new(BYTES, packed.n)
        while True:
            a = self.cache._attachment
            rc = call(a.handle, self._index, packed.c, *args, out)
            if rc >= 0:
                return [byte == 1 for byte in bytes(ffi.buffer(out))]
            a.recover(rc, what)

    def pin(self, key: Key) -> bool:
        """Keep the chunk from eviction until `unpin`, the namespace's lease, or this attachment's end.

        False when it is absent. A pin is this attachment's own: nobody else can spend it.
        """
        return self._flags("pin", lib.shmc_pin, pack([key]), (self._lease,))[0]

    def pin_many(self, keys: Iterable[Key]) -> list[bool]:
        """`pin` of each key, in one call."""
        return self._flags("pin_many", lib.shmc_pin, pack(keys), (self._lease,))

    def unpin(self, key: Key) -> bool:
        """Spend the oldest of this attachment's pins on any version of the key, also after a remove.

        False, and nothing changes, when this attachment has none.
        """
        return self._flags("unpin", lib.shmc_unpin, pack([key]))[0]

    def unpin_many(self, keys: Iterable[Key]) -> list[bool]:
        """`unpin` of each key, in one call."""
        return self._flags("unpin_many", lib.shmc_unpin, pack(keys))

    def touch(self, keys: Iterable[Key]) -> None:
        """Count a use of each key, last first, so that the first is hottest. Absent keys are skipped."""
        packed = pack(keys)
        while packed.n:
            a = self.cache._attachment
            rc = lib.shmc_touch(a.handle, self._index, packed.c)
            if rc >= 0:
                return
            a.recover(rc, "touch")

    def remove(self, key: Key) -> bool:
        """Unlink the chunk, all parts, also when held or pinned; False when absent.

        Bytes live on while they are held.
        """
        return self._flags("remove", lib.shmc_remove, pack([key]))[0]

    def remove_many(self, keys: Iterable[Key]) -> list[bool]:
        """`remove` of each key, in one call."""
        return self._flags("remove_many", lib.shmc_remove, pack(keys))

    def clear(self) -> int:
        """Remove every chunk that nobody holds or pins; how many those were."""
        cursor, removed = _new(U32), _new(U64)
        total: int = 0
        while True:
            a = self.cache._attachment
            removed[0] = 0
            rc = lib.shmc_clear(a.handle, self._index, cursor, removed)
            total += removed[0]
            if rc == 0:
                return total
            if rc < 0:
                a.recover(rc, "clear")

    def keys(self, part: int | None = None) -> list[Key]:
        """Keys of complete chunks, coldest to hottest; with `part`, of those whose part is published."""
        if part is None:
            return list_keys(self.cache, self._index, self.parts)
        self._part(part)
        known = pack(list_keys(self.cache, self._index, 1))
        if self.parts == 1:
            return list(known)
        there = self._flags("keys", _contains, known, (part,))
        return [key for key, is_there in zip(known, there, strict=True) if is_there]

    def bump(self) -> int:
        """Invalidate all chunks of the namespace at once, whatever their number; the new generation."""
        generation = _new(U32)
        while True:
            a = self.cache._attachment
            rc = lib.shmc_bump(a.handle, self._index, generation)
            if rc >= 0:
                return int(generation[0])
            a.recover(rc, "bump")

    # ---- single flight, and copies ------------------------------------------------------------------

    def reserve(self, key: Key, shape: Any, dtype: Any = None, *, part: int = 0, fmt: Any = None) -> Reservation:
        """Become the one writer of a part, or find out who is; see `Reservation`."""
        if part:
            self._part(part)
        return Reservation(self, key, layout_of(shape, dtype, fmt), part)

    def put_tensor(
        self, key: Key, t: Any, *, part: int = 0, parent: Key | None = None, fmt: Any = None, evict: bool = True,
        timeout: float | None = 0.0,
    ) -> bool:  # fmt: skip
        """Copy a tensor in (from any device, any strides; this waits for it) and publish it.

        False when that part is there already, or no memory could be had within `timeout`.
        """
        if self.contains(key, part=part):
            return False
        obj = _tensors.copy_in(self, t, fmt, evict, timeout)
        if obj is None:
            return False
        with obj:
            return self.put(key, obj, part=part, parent=parent)

    def get_tensor(self, key: Key, *, part: int = 0, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """A copy of a part as a tensor (into `out`, when given), or None when absent."""
        obj = self.get(key, part=part)
        if obj is None:
            return None
        with obj:
            return _tensors.copy_out(obj, out)


def _open_namespace(cache: SharedCache, name: str, lease: float | None) -> Namespace:
    return cache.namespace(name, lease=lease)


def open_namespace(
    cache: SharedCache, name: str, parts: int | Auto, descriptor: object, lease: float | None
) -> Namespace:
    """Find or make a namespace; see `SharedCache.namespace`."""
    raw_name = name.encode() if isinstance(name, str) else b""
    if not 1 <= len(raw_name) <= lib.SHMC_NAME_MAX:
        raise ValueError(f"namespace is {name!r}: a name of 1 to {lib.SHMC_NAME_MAX} bytes")
    most = lib.SHMC_PARTS_MAX
    if parts is not AUTO and (not isinstance(parts, int) or isinstance(parts, bool) or not 1 <= parts <= most):
        raise ValueError(f"parts is {parts!r}: 1 to {most}, or AUTO for what is there")
    want = 0 if isinstance(parts, Auto) else parts
    raw = canonical_descriptor(descriptor)
    lease_ns(lease)
    index = _new(U32)
    while True:
        a = cache._attachment
        rc = lib.shmc_namespace(
            a.handle, raw_name, len(raw_name), want, raw or b"", len(raw or b""), raw is not None, index
        )
        if rc == 0:
            info = cache._namespace_at(index[0])
            return Namespace(cache, name, index[0], want or (info.parts if info else 1), lease)
        if rc == lib.SHMC_E_MISMATCH:
            there = cache._namespace_at(index[0])
            raise errors.NamespaceMismatchError(
                f"namespace {name!r} of {cache.name!r} has parts={there.parts if there else '?'}, "
                f"descriptor={there.descriptor if there else '?'!r}; "
                f"you asked parts={parts}, descriptor={descriptor!r}",
                hint="use the values that are there, or another namespace name",
            )
        a.recover(rc, "namespace")
