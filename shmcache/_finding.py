"""The finding half of a namespace: by key, and whatever changes nothing but what is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ._calls import Calls, lease_ns
from ._core import BYTES, NO_KEY, PARTS, U32, U64, address_of, fast, ffi, lib
from ._keys import Key, encode, pack
from ._order import list_keys
from .errors import LockTimeoutError, ShmCacheError
from .lookup import Lookup

if TYPE_CHECKING:
    from .memory import MemoryObj

_contains = lib.shmc_contains
_get = lib.shmc_get
_contains_one = fast.contains
_get_one = fast.get
_new = ffi.new


class _Unpinning:
    """An event that has happened when all pins are given back, which it does itself."""

    def __init__(self, space: Finding, keys: list[Key]) -> None:
        self._space = space
        self._keys = keys

    def query(self) -> bool:
        while self._keys:
            try:
                self._space.unpin(self._keys[-1])
            except LockTimeoutError:
                return False
            except ShmCacheError:
                return True  # there are no pins any more
            self._keys.pop()
        return True


class Finding(Calls):
    """Part of `Namespace`."""

    __slots__ = ()

    def contains(self, key: Key, *, part: int | None = None) -> bool:
        """Whether the chunk is complete; with `part`, whether that part of it is published."""
        which = -1 if part is None else self._part(part)
        a = self.cache._attachment  # kept: another thread may attach again meanwhile, and this one would go
        rc: int = _contains_one(a.at, self._index, key, which)
        return rc == 1 if rc >= 0 else self._one("contains", _contains_one, key, which)

    def contains_many(self, keys: Iterable[Key], *, part: int | None = None) -> list[bool]:
        """`contains` of each key, in one call."""
        packed = pack(keys)
        return self._flags("contains_many", _contains, packed, (-1 if part is None else self._part(part),))

    def get(self, key: Key, *, part: int = 0, verify: bool = False) -> MemoryObj | None:
        """A hold on published bytes, or None. It does not count as a use for eviction; see `touch`.

        Parameters
        ----------
        verify
            compare the bytes with their checksum, which takes reading them once; ValueError when the segment
            was made without checksums.

        Raises
        ------
        ChecksumError
            with `verify`: they are not what was put. Nothing is held then, and the chunk stays where it is.
        """
        if verify:
            self._need_checksums("get")
            obj = self.get(key, part=part)
            self._verify("get", [(key, obj)], part)
            return obj
        if part:
            self._part(part)
        a = self.cache._attachment
        try:
            hold = a.holds.pop()
        except IndexError:
            hold = a.new_hold()
        found = _get_one(a.at, self._index, key, part, self._make, a, self, None, hold)
        if type(found) is int and found == NO_KEY:
            kind, raw = encode(key)
            found = _get_one(a.at, self._index, raw, part, self._make, a, self, None, hold, kind)
        if type(found) is not int:
            return found  # type: ignore[no-any-return]
        if found >= 0:
            a.holds.append(hold)
            return None
        a.recover(found, "get")
        return self.get(key, part=part)

    def get_many(self, keys: Iterable[Key], *, part: int = 0, verify: bool = False) -> list[MemoryObj | None]:
        """`get` of each key in one call (one lock round per 64); None where absent."""
        packed = pack(keys)
        if verify:
            self._need_checksums("get_many")
            objs = self.get_many(packed, part=part)
            self._verify("get_many", list(zip(packed, objs, strict=True)), part)
            return objs
        if part:
            self._part(part)
        n = packed.n
        if not n:
            self.cache._attached("get_many")
            return []
        while True:
            a = self.cache._attachment
            pairs, owners = a.new_holds(n)
            parts = _new(PARTS, n)
            rc = _get(a.handle, self._index, packed.c, part, owners, parts)
            if rc >= 0:
                break
            a.recover(rc, "get_many")
        found: list[MemoryObj | None] = fast.objects(a.at, address_of(parts), pairs, self._make, a, self, None)
        a.empty_holds([pair for pair, obj in zip(pairs, found, strict=True) if obj is None])
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

    def leading(
        self, keys: Iterable[Key], *, part: int | None = None, pin: bool = False, lease: float | None = None
    ) -> int:
        """How many leading keys are complete chunks; with `part`, have that part.

        Parameters
        ----------
        pin
            pin each by its key, as `pin` does, in the critical section in which it is found.
        lease
            seconds after which these pins end by themselves; by default the namespace's.
        """
        if lease is not None and not pin:
            raise ValueError("leading: a lease is for pins, say pin=True")
        packed = pack(keys)
        n = _new(U32)
        which = -1 if part is None else self._part(part)
        ns = self._lease if lease is None else lease_ns(lease)
        if not packed.n:
            self.cache._attached("leading")
        while packed.n:
            a = self.cache._attachment
            rc = lib.shmc_leading(a.handle, self._index, packed.c, which, lib.SHMC_F_PIN if pin else 0, ns, n)
            if rc >= 0:
                break
            if pin and n[0] and rc == lib.SHMC_E_LOCK_TIMEOUT:
                self.unpin_later(packed[: n[0]])  # the caller is told of none
            a.recover(rc, "leading")
        return int(n[0])

    # ---- by key -----------------------------------------------------------------------------------

    def pin(self, key: Key, *, part: int | None = None) -> bool:
        """Keep the chunk from eviction until `unpin`, the namespace's lease, or this attachment's end.

        False when it is not complete; with `part`, when that part is absent. A pin is this
        attachment's own: nobody else can spend it.
        """
        which = -1 if part is None else self._part(part)
        return self._one("pin", fast.pin, key, which, self._lease)

    def pin_many(self, keys: Iterable[Key]) -> list[bool]:
        """`pin` of each key, in one call."""
        packed = pack(keys)
        out = _new(BYTES, packed.n)
        while True:
            a = self.cache._attached("pin_many")
            if not packed.n:
                return []
            rc = lib.shmc_pin(a.handle, self._index, packed.c, self._lease, out)
            pinned = [byte == 1 for byte in bytes(ffi.buffer(out))]
            if rc >= 0:
                return pinned
            if rc == lib.SHMC_E_LOCK_TIMEOUT and any(pinned):
                self.unpin_later(key for key, is_pinned in zip(packed, pinned, strict=True) if is_pinned)
            a.recover(rc, "pin_many")

    def unpin(self, key: Key) -> bool:
        """Spend the oldest of this attachment's pins on any version of the key, also after a remove.

        False, and nothing changes, when this attachment has none.
        """
        return self._one("unpin", fast.unpin, key)

    def unpin_many(self, keys: Iterable[Key]) -> list[bool]:
        """`unpin` of each key, in one call."""
        return self._flags("unpin_many", lib.shmc_unpin, pack(keys))

    def unpin_later(self, keys: Iterable[Key]) -> None:
        """`unpin` each key once, as soon as the lock is to be had."""
        self.cache._attached("unpin_later").deferred().add(_Unpinning(self, list(keys)), lambda _known: None)

    def touch(self, keys: Iterable[Key]) -> None:
        """Count a use of each key, last first, so that the first is hottest. Absent keys are skipped."""
        packed = pack(keys)
        if not packed.n:
            self.cache._attached("touch")
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
        return self._one("remove", fast.remove, key)

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
