"""A dump on disk: one safetensors file, so that other tools can read it too.

    8 bytes   length of the header
    header    JSON: each part as a tensor with dtype, shape and place; padded with blanks
    data      the bytes of all parts, coldest chunk first

A part's name is NAMESPACE/PART/LAYOUT/TYPE:HEXKEY (namespace and layout by number). What these numbers
mean, and a CRC-32 of each part, is JSON in `__metadata__`. The header's length is reserved before the
first byte is written and filled in last; the file gets its name when it is whole, so a dump that was
interrupted is never taken for one.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, BinaryIO

from .._meta import Layout, layout_from
from ._stop import Exit, Stop

FORMAT = "shmcache-dump/1"
_HEADER_MAX = 100_000_000  # safetensors' own limit
_PER_PART = 220  # bytes of JSON, without the key's and the shape's
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass
class Entry:
    """One part."""

    namespace: int
    part: int
    layout: int
    kind: int
    raw: bytes
    start: int
    end: int
    crc: int

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.part}/{self.layout}/{self.kind}:{self.raw.hex()}"


@dataclass
class Contents:
    """What a dump says of itself."""

    segment: str
    capacity: int
    policy: str
    created: float
    namespaces: list[dict[str, Any]] = field(default_factory=list)  # name, parts, descriptor
    layouts: list[bytes] = field(default_factory=list)
    checksum: str = "none"  # what the segment keeps; dumps of earlier versions do not say


def header_room(keys: int, key_bytes: int) -> int:
    """Bytes to reserve for the header of so many parts; Stop when no safetensors file can hold it."""
    room = 65536 + keys * (_PER_PART + 2 * key_bytes)
    if room > _HEADER_MAX:
        raise Stop(
            Exit.USAGE,
            f"{keys} parts are too many for one safetensors file: dump one namespace at a time (--namespace)",
        )
    return -(-room // 4096) * 4096 - 8


def _for_the_owner(path: str, flags: int) -> int:
    """A prompt can be told from its KV: mode 0600 whatever the umask, and whatever a dump that died has left."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    return fd


class Writer:
    """A context manager. Leaving it without `finish` removes what was written."""

    def __init__(self, path: str, contents: Contents, room: int) -> None:
        self.path = path
        self.contents = contents
        self.entries: list[Entry] = []
        self._partial = f"{path}.partial"
        self._layouts: dict[bytes, int] = {}
        self._room = room
        self._at = 0
        self._file: BinaryIO = open(self._partial, "wb", opener=_for_the_owner)  # noqa: SIM115
        self._file.seek(8 + room)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if os.path.exists(self._partial):
            os.unlink(self._partial)

    def add(self, namespace: int, part: int, blob: bytes, key: tuple[int, bytes], data: memoryview) -> None:
        layout = self._layouts.setdefault(blob, len(self._layouts))
        self._file.write(data)
        end = self._at + len(data)
        self.entries.append(Entry(namespace, part, layout, *key, self._at, end, zlib.crc32(data)))
        self._at = end

    def finish(self) -> None:
        """Header, disk, name: in this order."""
        self.contents.layouts = list(self._layouts)
        raw = json.dumps(_header(self.contents, self.entries), separators=(",", ":")).encode()
        if len(raw) > self._room:
            raise Stop(
                Exit.USAGE,
                f"the header takes {len(raw)} bytes, {self._room} were reserved for it",
            )
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + raw.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._partial, self.path)


def _header(c: Contents, entries: list[Entry]) -> dict[str, Any]:
    about = {
        "format": FORMAT, "segment": c.segment, "capacity": c.capacity, "policy": c.policy, "created": c.created,
        "checksum": c.checksum,
        "namespaces": c.namespaces, "layouts": [blob.hex() for blob in c.layouts], "crc32": [e.crc for e in entries],
    }  # fmt: skip
    header: dict[str, Any] = {"__metadata__": {"shmcache": json.dumps(about, separators=(",", ":"))}}
    for e in entries:
        dtype, shape = _as_tensor(layout_from(c.layouts[e.layout], e.end - e.start))
        header[e.name] = {"dtype": dtype, "shape": shape, "data_offsets": [e.start, e.end]}
    return header


def _as_tensor(layout: Layout) -> tuple[str, list[int]]:
    """Under a dtype that safetensors has, else as plain bytes."""
    single = layout.single
    if single is None or single.dtype.name not in _DTYPES:
        return "U8", [layout.nbytes]
    return _DTYPES[single.dtype.name], list(single.shape)


class DumpFile:
    """A dump opened for reading; Stop when it is none, or not whole."""

    def __init__(self, path: str) -> None:
        try:
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115  # closed with the object
        except FileNotFoundError:
            raise Stop(Exit.NOT_FOUND, f"there is no file {path}") from None
        except OSError as e:
            raise Stop(Exit.REFUSED, f"{path}: {e.strerror}") from None
        try:
            self._read(path)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
            raise Stop(Exit.USAGE, f"{path} is no whole dump of `shmcache-inspect dump`: {e}") from None

    def _read(self, path: str) -> None:
        room = int.from_bytes(self._file.read(8), "little")
        if not 0 < room <= _HEADER_MAX:
            raise ValueError("it has no safetensors header")
        header = json.loads(self._file.read(room))
        about = json.loads(header.pop("__metadata__")["shmcache"])
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}, this reads {FORMAT!r}")
        self.contents = Contents(
            str(about["segment"]), int(about["capacity"]), str(about["policy"]), float(about["created"]),
            about["namespaces"], [bytes.fromhex(blob) for blob in about["layouts"]],
            str(about.get("checksum", "none")),
        )  # fmt: skip
        self._data = 8 + room
        self.entries = [_entry(name, t["data_offsets"], 0) for name, t in header.items()]
        self.entries.sort(key=lambda e: e.start)
        end = 0
        for e, crc in zip(self.entries, about["crc32"], strict=True):
            if e.start != end or e.end < e.start or e.namespace >= len(self.contents.namespaces):
                raise ValueError(f"tensor {e.name} is out of place")
            e.crc, end = int(crc), e.end
        if os.fstat(self._file.fileno()).st_size != self._data + end:
            raise ValueError("its size is not what its header says: it was cut short")
        self.bytes = end

    def read(self, e: Entry, into: memoryview) -> bool:
        """The bytes of a part; whether their checksum is right."""
        self._file.seek(self._data + e.start)
        done = 0
        while done < len(into):
            n = self._file.readinto(into[done:])  # type: ignore[attr-defined]  # BinaryIO does not say so
            if not n:
                return False
            done += n
        return zlib.crc32(into) == e.crc

    def chunks(self) -> Iterator[list[Entry]]:
        """Parts of one chunk together, in the order of the file."""
        group: list[Entry] = []
        for e in self.entries:
            if group and (group[0].namespace, group[0].kind, group[0].raw) != (e.namespace, e.kind, e.raw):
                yield group
                group = []
            group.append(e)
        if group:
            yield group

    def close(self) -> None:
        self._file.close()


def _entry(name: str, place: list[int], crc: int) -> Entry:
    namespace, part, layout, key = name.split("/")
    kind, raw = key.split(":")
    return Entry(
        int(namespace), int(part), int(layout), int(kind), bytes.fromhex(raw), int(place[0]), int(place[1]), crc
    )
