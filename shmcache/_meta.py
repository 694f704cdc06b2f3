"""The few bytes beside each block that say what its bytes are. Opaque to C, stored in segments.

    byte 0   version: 1, or 2 with a checksum
    byte 1   memory format
    byte 2   number of groups, at least 1
    then for each group: dtype code, number of dimensions, each dimension as a varint (LEB128)
    version 2 only, at the end: the checksum of the object's bytes, 8 bytes, little-endian

An object has version 1 when it is allocated, and gets version 2 when it is put, in a segment that has
checksums. A group is one shape and one dtype; groups follow one another without padding. An ordinary
object has one. Everything fits 48 bytes or is refused at allocate.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ._core import BYTES, META_MAX, ffi
from ._dtypes import TABLE, UINT8, DType, dtype_of
from ._formats import format_code
from .errors import SegmentCorruptError

VERSION = 1
VERSION_WITH_CHECKSUM = 2
CHECKSUM_BYTES = 8
_LIMIT = (1 << 63) - 1
_CACHED = 4096


class Group(NamedTuple):
    """One tensor in an object: `start` is its byte offset from the object's first byte."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, C order
    dtype: DType
    start: int
    nbytes: int


class Layout:
    """What the bytes of an object are; shared by all objects that look alike."""

    __slots__ = ("blob", "c_blob", "fmt", "groups", "nbytes", "reserve", "shift", "single")

    def __init__(self, fmt: int, groups: tuple[Group, ...]) -> None:
        self.fmt = fmt
        self.groups = groups
        self.nbytes = sum(g.nbytes for g in groups)
        self.reserve = self.nbytes  # bytes to ask for: a page, where objects come in pages
        self.single = groups[0] if len(groups) == 1 else None
        self.shift = groups[0].dtype.itemsize.bit_length() - 1
        self.blob = _encode(fmt, groups)
        self.c_blob: Any = ffi.new(BYTES, self.blob)


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _encode(fmt: int, groups: Sequence[Group]) -> bytes:
    if not 0 <= fmt <= 0xFF or len(groups) > 0xFF:
        raise ValueError(f"memory format {fmt} with {len(groups)} groups cannot be stored")
    out = bytearray((VERSION, fmt, len(groups)))
    for g in groups:
        out += bytes((g.dtype.code, min(len(g.shape), 0xFF))) + b"".join(map(_varint, g.shape))
    if len(out) > META_MAX:
        shapes = ", ".join(str(g.shape) for g in groups)
        raise ValueError(
            f"shape {shapes} takes {len(out)} bytes to describe, room is for {META_MAX}: store it with fewer dimensions"
        )
    return bytes(out)


def _group(shape: Iterable[Any], dtype: object, start: int) -> Group:
    row = dtype_of(dtype)
    try:
        dims = tuple(map(operator.index, shape))
    except TypeError:
        raise TypeError(f"a shape is a sequence of ints, not {shape!r}") from None
    strides, count = [], 1
    for dim in reversed(dims):
        if dim <= 0:
            raise ValueError(f"shape {dims} has a dimension of {dim}: every dimension must be at least 1")
        strides.append(count)
        count *= dim
    if count * row.itemsize > _LIMIT:
        raise ValueError(f"shape {dims} of {row.name} overflows 63 bits")
    if start % row.itemsize:
        raise ValueError(
            f"a group of {row.name} would begin at byte {start}, which is no multiple of {row.itemsize}: "
            "put the groups of larger items first"
        )
    return Group(dims, tuple(reversed(strides)), row, start, count * row.itemsize)


def _make(shape: Any, dtype: Any, fmt: Any) -> Layout:
    code = format_code(fmt)
    if dtype is None:
        if not hasattr(shape, "__index__"):
            raise TypeError(f"a shape needs a dtype: allocate({shape!r}, dtype); or give a number of bytes")
        dtype = UINT8.name
    if isinstance(dtype, (list, tuple)):
        if not isinstance(shape, (list, tuple)) or len(shape) != len(dtype) or not dtype:
            raise ValueError(f"{len(dtype)} dtypes need as many shapes, got {shape!r}")
        groups: list[Group] = []
        for one, kind in zip(shape, dtype, strict=True):
            groups.append(_group(one, kind, groups[-1].start + groups[-1].nbytes if groups else 0))
    else:
        groups = [_group((shape,) if hasattr(shape, "__index__") else shape, dtype, 0)]
    return Layout(code, tuple(groups))


def with_checksum(blob: bytes, checksum: int) -> bytes:
    """A description of version 1 and a checksum, as one of version 2."""
    return b"%c%b%b" % (VERSION_WITH_CHECKSUM, blob[1:], checksum.to_bytes(CHECKSUM_BYTES, "little"))


def split(blob: bytes) -> tuple[bytes, int | None]:
    """A description without its checksum, as version 1, and the checksum, if it has one."""
    if len(blob) <= CHECKSUM_BYTES or blob[0] != VERSION_WITH_CHECKSUM:
        return blob, None
    return b"%c%b" % (VERSION, blob[1:-CHECKSUM_BYTES]), int.from_bytes(blob[-CHECKSUM_BYTES:], "little")


_made: dict[Any, Layout] = {}
_read: dict[bytes, Layout] = {}


def layout_of(shape: Any, dtype: Any, fmt: Any) -> Layout:
    """The layout of a request. ValueError for empty, negative, overflowing or too long shapes."""
    try:
        return _made[shape, dtype, fmt]
    except KeyError:
        pass
    except TypeError:  # lists are not hashable
        return _make(shape, dtype, fmt)
    if len(_made) >= _CACHED:
        _made.clear()
    layout = _made[shape, dtype, fmt] = _make(shape, dtype, fmt)
    return layout


def layout_in_page(shape: Any, dtype: Any, fmt: Any, page_bytes: int) -> Layout:
    """`layout_of` an object that takes a whole page; ValueError when it does not fit one."""
    layout = _make(shape, dtype, fmt)
    if layout.nbytes > page_bytes:
        raise ValueError(f"an object of {layout.nbytes} bytes does not fit a page of {page_bytes}")
    layout.reserve = page_bytes
    return layout


def layout_with_words(shape: Any, dtype: Any, fmt: Any, n: int) -> Layout:
    """`layout_of` an object that has room for `n` int64 behind its tensors; see `words_at`."""
    layout = _make(shape, dtype, fmt)
    layout.reserve = words_at(layout) + 8 * n
    return layout


def words_at(layout: Layout) -> int:
    """Where the int64 behind the tensors begin."""
    return -(-layout.nbytes // 8) * 8


def layout_from(blob: bytes, size: int) -> Layout:
    """The layout that `blob` describes, of at most `size` bytes. Of a newer or damaged one: `size` plain bytes.

    SegmentCorruptError for a size that no object has.
    """
    if size <= 0:
        raise SegmentCorruptError(f"a block of {size} bytes was found: the segment is damaged")
    layout = _read.get(blob)
    if layout is None:
        blob = split(blob)[0]  # objects that look alike share a layout, whatever their bytes
        layout = _read.get(blob)
    if layout is None:
        if len(_read) >= _CACHED:
            _read.clear()
        try:
            layout = _decode(blob)
        except (IndexError, KeyError, ValueError):
            return _make(size, UINT8.name, 0)
        _read[blob] = layout
    return layout if layout.nbytes <= size else _make(size, UINT8.name, layout.fmt)


def _decode(blob: bytes) -> Layout:
    if blob[0] != VERSION or not blob[2]:
        raise ValueError("another version")
    at = 3
    groups: list[Group] = []
    for _ in range(blob[2]):
        row, ndim = TABLE[blob[at]], blob[at + 1]
        at += 2
        dims = []
        for _ in range(ndim):
            n = shift = 0
            while True:
                byte = blob[at]
                at += 1
                n |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            dims.append(n)
        groups.append(_group(dims, row.name, groups[-1].start + groups[-1].nbytes if groups else 0))
    return Layout(blob[1], tuple(groups))
