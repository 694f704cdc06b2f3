"""What all calls of a namespace share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._core import BYTES, ffi
from ._keys import BYTES_TYPE, Key, PackedKeys, encode

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

    def _one(self, what: str, call: Any, key: Key, args: tuple[Any, ...] = ()) -> bool:
        """A call for one key that answers 0 or 1."""
        if type(key) is bytes:
            kind, raw = BYTES_TYPE, key
        else:
            kind, raw = encode(key)
        while True:
            a = self.cache._attachment
            rc = call(a.handle, self._index, raw, len(raw), kind, *args)
            if rc >= 0:
                return bool(rc)
            encode(key)
            a.recover(rc, what)

    def _flags(self, what: str, call: Any, packed: PackedKeys, args: tuple[Any, ...] = ()) -> list[bool]:
        """A call that answers with one byte for each key."""
        if not packed.n:
            return []
        out = ffi.new(BYTES, packed.n)
        while True:
            a = self.cache._attachment
            rc = call(a.handle, self._index, packed.c, *args, out)
            if rc >= 0:
                return [byte == 1 for byte in bytes(ffi.buffer(out))]
            a.recover(rc, what)
