"""Keys: bytes, str or int, made canonical, and many of them joined for one C call.

A key is at most 64 bytes and carries a type code, so that b"1", "1" and 1 are three keys. The codes
and the encodings are stored in segments and never change:

    1  bytes   as they are
    2  str     UTF-8
    3  int     two's complement, big-endian: 8 bytes, or where these do not hold it, as few as do

Joining a list costs more than looking its keys up, so the usual lists (bytes of one length, ints of 64
bits) are recognised without a Python-level loop, and `pack` keeps the result for several calls.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, overload

from ._core import BYTES, KEY_MAX, KEYS, ffi

Key: TypeAlias = bytes | str | int

BYTES_TYPE = 1
STR_TYPE = 2
INT_TYPE = 3

pack_int = struct.Struct(">q").pack  # struct.error: it needs more than 8 bytes

_U32_ARRAY = ffi.typeof("uint32_t[]")


def _too_long(key: object, size: int) -> ValueError:
    shown = repr(key)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ValueError(f"key {shown} takes {size} bytes, the most is {KEY_MAX}: hash longer keys first")


def encode(key: Key) -> tuple[int, bytes]:
    """Type code and bytes of a key. ValueError when longer than 64 bytes, TypeError for other types."""
    if isinstance(key, (bytes, bytearray, memoryview)):
        kind, raw = BYTES_TYPE, bytes(key)
    elif isinstance(key, str):
        kind, raw = STR_TYPE, key.encode()
    elif hasattr(key, "__index__") and not isinstance(key, bool):
        key = operator.index(key)
        kind = INT_TYPE
        try:
            raw = pack_int(key)
        except struct.error:
            raw = key.to_bytes(key.bit_length() // 8 + 1, "big", signed=True)
    else:
        raise TypeError(f"a key is bytes, str or int, not {type(key).__name__}: {key!r}")
    if len(raw) > KEY_MAX:
        raise _too_long(key, len(raw))
    return kind, raw


def decode(kind: int, raw: bytes) -> Key:
    """The key that was put. Codes of a newer version come back as their bytes."""
    if kind == STR_TYPE:
        return raw.decode("utf-8", "replace")
    if kind == INT_TYPE:
        return int.from_bytes(raw, "big", signed=True)
    return raw


class PackedKeys(Sequence[Key]):
    """Keys joined and checked once, for any number of calls. Immutable; made by `pack`."""

    __slots__ = ("_data", "_ends", "_types", "c", "klen", "ktype", "n")

    def __init__(self, data: bytes, n: int, klen: int, ktype: int, ends: Any = None, types: Any = None) -> None:
        self.n = n
        self.klen = klen
        self.ktype = ktype
        self._data = data
        self._ends = ends
        self._types = types
        self.c = c = ffi.new(KEYS)
        # bytes never move, and this object keeps them for as long as `c`
        c.data = ffi.from_buffer(BYTES, data)
        c.n = n
        if ends is None:
            c.klen = klen
            c.ktype = ktype
        else:
            c.ends = ends
            c.types = types

    def _one(self, i: int) -> Key:
        if self._ends is None:
            return decode(self.ktype, self._data[i * self.klen : (i + 1) * self.klen])
        start = self._ends[i - 1] if i else 0
        return decode(self._types[i], self._data[start : self._ends[i]])

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Key]:
        if self._ends is None and self.klen:
            data, k = self._data, self.klen
            if self.ktype == BYTES_TYPE:
                return iter([data[i : i + k] for i in range(0, self.n * k, k)])
            if self.ktype == INT_TYPE and k == 8:
                return iter(struct.unpack(f">{self.n}q", data))
        return map(self._one, range(self.n))

    @overload
    def __getitem__(self, i: int) -> Key: ...
    @overload
    def __getitem__(self, i: slice) -> PackedKeys: ...
    def __getitem__(self, i: int | slice) -> Key | PackedKeys:
        if not isinstance(i, slice):
            if not -self.n <= i < self.n:
                raise IndexError(f"key {i} of {self.n}")
            return self._one(i % self.n)
        start, stop, step = i.indices(self.n)
        if step == 1 and self._ends is None:
            stop = max(start, stop)
            return PackedKeys(self._data[start * self.klen : stop * self.klen], stop - start, self.klen, self.ktype)
        return pack([self._one(j) for j in range(start, stop, step)])

    def __repr__(self) -> str:
        return f"<{self.n} packed keys>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (pack, (list(self),))


def _pack_mixed(keys: Sequence[Key]) -> PackedKeys:
    if set(map(type, keys)) == {int}:
        try:
            return PackedKeys(struct.pack(f">{len(keys)}q", *keys), len(keys), 8, INT_TYPE)
        except struct.error:
            pass  # some need more than 64 bits
    pairs = [encode(key) for key in keys]
    kinds = bytes([kind for kind, _ in pairs])
    data = b"".join([raw for _, raw in pairs])
    sizes = {len(raw) for _, raw in pairs}
    if len(sizes) == 1 and kinds.count(kinds[0]) == len(kinds):
        return PackedKeys(data, len(pairs), sizes.pop(), kinds[0])
    end, ends = 0, []
    for _, raw in pairs:
        end += len(raw)
        ends.append(end)
    return PackedKeys(data, len(pairs), 0, 0, ffi.new(_U32_ARRAY, ends), ffi.new(BYTES, kinds))


def pack(keys: Iterable[Key]) -> PackedKeys:
    """Join and check keys once; every batch call takes the result in place of a list.

    Parameters
    ----------
    keys
        bytes, str or int, in any mixture; at most 64 bytes each when encoded.

    Raises
    ------
    ValueError
        a key is longer than 64 bytes.
    TypeError
        a key of another type, or one key where several are expected.
    """
    if type(keys) is PackedKeys:
        return keys
    if type(keys) is not list:
        if isinstance(keys, (bytes, bytearray, memoryview, str, int)):
            raise TypeError(f"expected several keys, got one: {keys!r}; write [key]")
        keys = list(keys)
    n = len(keys)
    if not n:
        return PackedKeys(b"", 0, 0, BYTES_TYPE)
    try:
        data = b"".join(keys)  # type: ignore[arg-type]  # also the check of types: only bytes-likes join
        lengths = list(map(len, keys))
    except TypeError:
        return _pack_mixed(keys)
    klen = lengths[0]
    if lengths.count(klen) == n and len(data) == klen * n:
        if klen > KEY_MAX:
            raise _too_long(keys[0], klen)
        return PackedKeys(data, n, klen, BYTES_TYPE)
    return _pack_mixed(keys)
