"""What a caller asks of a segment: checked, planned when creating, compared when attaching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._auto import AUTO, Auto
from ._checksum import CHECKSUMS, checksum_flags, checksum_name
from ._core import ffi, lib
from ._names import check_name
from ._numa import NumaArgument, check_numa, node_mask
from ._sizes import format_size, parse_size
from ._space import check_room
from .errors import SegmentMismatchError

POLICIES: dict[str, int] = {
    name[len("SHMC_") :].lower(): getattr(lib, name) for name in ("SHMC_LRU", "SHMC_FIFO", "SHMC_MRU", "SHMC_LFU")
}
LIFETIMES = {"persistent": 0, "ephemeral": 1}
PREFAULTS = ("background", "wait", "lazy")

DEFAULT_MODE = 0o600
FLAG_NO_HUGEPAGES = 1  # in shmc_geometry.flags, which C only keeps; bits 4 to 7 are _checksum's

_ALIGN_MIN, _ALIGN_MAX, _REGION_MIN = 64, 2 << 20, 64 << 10
_DEFAULT_REGION = 1 << 30
_MAX_REGIONS = 16384  # each is a mapping of its own, and the kernel allows 65,530 in a process
_MAX_ATTACHMENTS = 4096


@dataclass(frozen=True)
class Request:
    """Arguments of open, attach and create. Each may be AUTO: what exists wins, else the default.

    The first group belongs to the segment: what is given and disagrees with what exists is an error.
    `pin` and `prefault` belong to this process.
    """

    name: str
    capacity: int | str | Auto = AUTO
    region_bytes: int | str | Auto = AUTO  # at most 1 GiB: pieces that pin, place and prefault well
    align: int | str | Auto = AUTO  # 4096: a page, so that no two objects share one
    policy: str | Auto = AUTO  # "lru"
    max_chunks: int | Auto = AUTO  # one per 64 KiB of capacity
    max_attachments: int | Auto = AUTO  # 64
    lifetime: str | Auto = AUTO  # "persistent"
    mode: int | Auto = AUTO  # 0o600: payload is somebody's conversation
    numa: NumaArgument | Auto = AUTO
    hugepages: bool | Auto = AUTO  # tried
    checksum: str | Auto = AUTO  # "none": reading and hashing every byte at put is not for everybody

    pin: bool | Auto = AUTO  # where CUDA is in use
    prefault: str | Auto = AUTO  # "background"

    def __post_init__(self) -> None:
        """Brings every value given into its one form; ValueError says what it may be."""

        def put(field: str, value: object) -> None:
            object.__setattr__(self, field, value)

        check_name(self.name)
        for field in ("capacity", "region_bytes", "align"):
            value = getattr(self, field)
            if value is not AUTO:
                put(field, parse_size(value, field))
        for field, most in (("max_chunks", 1 << 30), ("max_attachments", _MAX_ATTACHMENTS)):
            value = getattr(self, field)
            if value is not AUTO and not (type(value) is int and 1 <= value <= most):
                raise ValueError(f"{field} is {value!r}: it is an int from 1 to {most}")
        if isinstance(self.policy, str):
            put("policy", self.policy.lower())  # LMCache writes them in capitals
        choices = {"policy": POLICIES, "lifetime": LIFETIMES, "prefault": PREFAULTS, "checksum": CHECKSUMS}
        for field, known in choices.items():
            value = getattr(self, field)
            if value is not AUTO and value not in known:
                raise ValueError(f"{field} is {value!r}: it is one of {', '.join(map(repr, known))}")
        for field in ("hugepages", "pin"):
            value = getattr(self, field)
            if value is not AUTO and not isinstance(value, bool):
                raise ValueError(f"{field} is {value!r}: it is True or False")
        if self.mode is not AUTO and not (
            type(self.mode) is int and self.mode & ~0o777 == 0 and self.mode & 0o600 == 0o600
        ):
            raise ValueError(f"mode is {self.mode!r}: it is an int such as 0o600, readable and writable for the owner")
        put("numa", check_numa(self.numa))
        self._check_sizes()

    def _check_sizes(self) -> None:
        align, region_bytes, capacity = self.align, self.region_bytes, self.capacity
        if isinstance(align, int) and not (_ALIGN_MIN <= align <= _ALIGN_MAX and align & (align - 1) == 0):
            raise ValueError(f"align is {align}: it is a power of two from 64 to 2 MiB")
        if isinstance(region_bytes, int):
            if region_bytes < _REGION_MIN and region_bytes != capacity:
                raise ValueError(f"region_bytes is {region_bytes}: it is at least 64 KiB")
            if isinstance(align, int) and region_bytes < align:
                raise ValueError(f"region_bytes is {region_bytes}: it is at least align, which is {align}")
        if isinstance(align, int) and isinstance(capacity, int) and capacity % align:
            raise ValueError(f"capacity is {capacity}: it is a multiple of align, which is {align}")

    @property
    def file_mode(self) -> int:
        return DEFAULT_MODE if self.mode is AUTO else int(self.mode)

    def plan(self) -> Any:
        """The geometry (cffi) of a segment to be created. ValueError, or OutOfSharedMemoryError."""
        if self.capacity is AUTO:
            raise ValueError(f"segment {self.name!r} does not exist, and creating it needs a capacity")
        capacity = int(self.capacity)
        align = 4096 if self.align is AUTO else int(self.align)
        if capacity % align:
            raise ValueError(f"capacity is {capacity}: it is a multiple of align, which is {align}")
        region = _DEFAULT_REGION if self.region_bytes is AUTO else _whole(int(self.region_bytes), align)
        region = min(region, capacity)
        check_room(self.name, capacity)  # what no host has is out of memory, not out of range
        if -(-capacity // region) > _MAX_REGIONS:
            raise ValueError(
                f"capacity {format_size(capacity)} in regions of {format_size(region)} would be more than "
                f"{_MAX_REGIONS} regions: use a larger region_bytes"
            )
        g = ffi.new("shmc_geometry *")
        g.capacity, g.region_bytes, g.align = capacity, region, align
        g.policy = POLICIES["lru" if self.policy is AUTO else str(self.policy)]
        g.max_chunks = 0 if self.max_chunks is AUTO else int(self.max_chunks)
        g.max_attachments = 64 if self.max_attachments is AUTO else int(self.max_attachments)
        g.lifetime = LIFETIMES["persistent" if self.lifetime is AUTO else str(self.lifetime)]
        g.mode = self.file_mode
        g.flags = FLAG_NO_HUGEPAGES if self.hugepages is False else 0
        g.flags |= checksum_flags("none" if self.checksum is AUTO else str(self.checksum))
        g.numa_node_mask = node_mask(check_numa(self.numa))
        if lib.shmc_plan(g) < 0:
            raise ValueError(
                f"a segment of capacity {format_size(capacity)}, region_bytes {format_size(region)}, align {align} and "
                f"max_chunks {self.max_chunks} cannot be made: use a larger align or fewer chunks"
            )
        return g

    def differences(self, g: Any) -> list[str]:
        """What was given and differs from the geometry that exists, as "field: it has ..., you asked ..."."""
        policies = {value: name for name, value in POLICIES.items()}
        lifetimes = {value: name for name, value in LIFETIMES.items()}
        there: dict[str, object] = {
            "capacity": int(g.capacity),
            "region_bytes": int(g.region_bytes),
            "align": int(g.align),
            "policy": policies.get(g.policy, g.policy),
            "max_chunks": int(g.max_chunks),
            "max_attachments": int(g.max_attachments),
            "lifetime": lifetimes.get(g.lifetime, g.lifetime),
            "mode": int(g.mode),
            "hugepages": not g.flags & FLAG_NO_HUGEPAGES,
            "checksum": checksum_name(int(g.flags)),
        }
        asked = {field: getattr(self, field) for field in there}
        if self.region_bytes is not AUTO:  # a region is never larger than the capacity
            asked["region_bytes"] = min(_whole(int(self.region_bytes), int(g.align)), int(g.capacity))
        out = [
            f"{field}: it has {_show(field, value)}, you asked {_show(field, asked[field])}"
            for field, value in there.items()
            if asked[field] is not AUTO and asked[field] != value
        ]
        if self.numa is not AUTO and node_mask(check_numa(self.numa)) != g.numa_node_mask:
            nodes = [node for node in range(32) if g.numa_node_mask >> node & 1]
            out.append(f"numa: it has {nodes or 'none'}, you asked {self.numa!r}")
        return out

    def check_agrees(self, g: Any) -> None:
        """SegmentMismatchError that shows both values of everything that differs."""
        differences = self.differences(g)
        if differences:
            raise SegmentMismatchError(
                f"segment {self.name!r} exists with other parameters: {'; '.join(differences)}",
                hint="leave them out to take what exists, or use another name",
            )


def _whole(region_bytes: int, align: int) -> int:
    """A region of so many bytes has this many whole granules."""
    return region_bytes // align * align


def _show(field: str, value: object) -> str:
    if field == "mode" and isinstance(value, int):
        return f"{value:#o}"
    if field in ("capacity", "region_bytes") and isinstance(value, int):
        return f"{value} ({format_size(value)})"
    return repr(value)
