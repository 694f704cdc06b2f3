"""What all calls of a namespace share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._checksum import show_checksum
from ._core import BYTES, NO_KEY, ffi
from ._keys import Key, PackedKeys, encode
from ._meta import split
from .errors import ChecksumError

if TYPE_CHECKING:
    from .cache import SharedCache
    from .memory import MemoryObj


def lease_ns(lease: float | None) -> int:
    """A lease in seconds as C takes it; None: no lease."""
    if lease is None:
        return 0
    if not 0 < lease < 1e9:
        raise ValueError(f"lease is {lease!r}: seconds, more than 0, or None for no end")
    return int(lease * 1e9)


class Calls:
    """The state of a `Namespace`, under its two halves: storing and finding."""

    __slots__ = ("_index", "_lease", "_make", "cache", "name", "owner", "parts")

    def __init__(
        self, cache: SharedCache, name: str, index: int, parts: int, lease: float | None, make: type[MemoryObj]
    ) -> None:
        self.cache = cache
        self.name = name
        self.parts = parts
        self.owner: Any = None  # whoever made the namespace may note itself here
        self._index = index
        self._lease = lease_ns(lease)
        self._make = make  # class of its objects

    def _part(self, part: int) -> int:
        if not isinstance(part, int) or not 0 <= part < self.parts:
            raise ValueError(f"part is {part!r}: namespace {self.name!r} has parts 0 to {self.parts - 1}")
        return part

    def _need_checksums(self, what: str) -> None:
        """ValueError when the segment has none to compare with."""
        if self.cache._attached(what).checksum is None:
            raise ValueError(
                f'{what}: segment {self.cache.name!r} has no checksums; make it with checksum="xxh3" to verify'
            )

    def _verify(self, what: str, found: Sequence[tuple[Key, MemoryObj | None]], part: int) -> None:
        """ChecksumError, and nothing is held any more, when the bytes of one are not what was put."""
        wrong = []
        for key, obj in found:
            checksum = None if obj is None else obj._attachment.checksum
            if obj is None or checksum is None:
                continue
            stored = split(bytes(obj._part.meta)[: obj._part.meta_len])[1]
            actual = checksum.digest(obj._buffer(obj))
            if actual != stored:  # also when there is none: nothing vouches for these bytes
                wrong.append((key, stored, actual))
        if not wrong:
            return
        for _, obj in reversed(found):
            if obj is not None:
                obj.release()
        key, stored, actual = wrong[0]
        others = f", and {len(wrong) - 1} more of these keys are wrong" if len(wrong) > 1 else ""
        raise ChecksumError(
            f"{what}: part {part} of {key!r} in namespace {self.name!r} of {self.cache.name!r}: the checksum of the "
            f"put is {show_checksum(stored)}, that of the bytes {show_checksum(actual)}{others}"
        )

    def _one(self, what: str, call: Any, key: Key, *args: Any) -> bool:
        """A call of `fast` for one key, which answers 0 or 1."""
        while True:
            a = self.cache._attachment
            rc = call(a.at, self._index, key, *args)
            if rc == NO_KEY:
                kind, raw = encode(key)
                rc = call(a.at, self._index, raw, *args, kind)
            if rc >= 0:
                return bool(rc)
            a.recover(rc, what)

    def _flags(self, what: str, call: Any, packed: PackedKeys, args: tuple[Any, ...] = ()) -> list[bool]:
        """A call that answers with one byte for each key."""
        if not packed.n:
            self.cache._attached(what)
            return []
        out = ffi.new(BYTES, packed.n)
        while True:
            a = self.cache._attachment
            rc = call(a.handle, self._index, packed.c, *args, out)
            if rc >= 0:
                return list(map(bool, bytes(ffi.buffer(out))))
            a.recover(rc, what)
