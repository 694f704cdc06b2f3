"""How the dimensions of an object are to be read, and what it is; names and numbers are LMCache's."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class MemoryFormat(enum.Enum):
    """Memory format of an object. L: layers, T: tokens, D: hidden size."""

    UNDEFINED = 0
    KV_2LTD = 1  # [2, L, T, D]
    KV_T2D = 2  # [T, 2, D]
    KV_2TD = 3  # [2, T, D]
    BINARY = 4
    BINARY_BUFFER = 5
    KV_MLA_FMT = 6  # [1, L, T, D]
    EC_TD = 7  # [T, D], encoder cache
    HS_TD = 8  # [T, D], hidden states
    KV_BLOB = 1  # older name of KV_2LTD  # noqa: PIE796

    def token_dim(self) -> int:
        """Which dimension counts tokens (0 where there is no such thing)."""
        return _TOKEN_DIM.get(self, 0)


_TOKEN_DIM = {
    MemoryFormat.KV_2LTD: 2,
    MemoryFormat.KV_T2D: 0,
    MemoryFormat.KV_2TD: 1,
    MemoryFormat.KV_MLA_FMT: 2,
}


def format_code(fmt: object) -> int:
    """The stored number of a format: ours, LMCache's enum, a name, a number, or None (undefined)."""
    if fmt is None:
        return 0
    if isinstance(fmt, str):
        try:
            return MemoryFormat[fmt].value
        except KeyError:
            raise ValueError(f"memory format {fmt!r}: expected one of {', '.join(MemoryFormat.__members__)}") from None
    code = getattr(fmt, "value", fmt)
    if not isinstance(code, int) or isinstance(code, bool) or not 0 <= code <= 0xFF:
        raise ValueError(f"memory format {fmt!r}: expected a shmcache.MemoryFormat")
    return code


def format_of(code: int) -> MemoryFormat:
    """The format of a stored number; one of a newer version reads as UNDEFINED."""
    try:
        return MemoryFormat(code)
    except ValueError:
        return MemoryFormat.UNDEFINED


@dataclass(slots=True)
class MemoryObjMetadata:
    """A snapshot of what is known about an object, under LMCache's names."""

    shape: torch.Size
    dtype: torch.dtype
    address: int  # byte offset in the arena
    phy_size: int
    ref_count: int
    pin_count: int
    fmt: MemoryFormat
    cached_positions: torch.Tensor | None = None
    shapes: list[torch.Size] | None = None
    dtypes: list[torch.dtype] | None = None

    def get_size(self) -> int:
        """Bytes of all shapes together."""
        pairs = zip(self.shapes or [self.shape], self.dtypes or [self.dtype], strict=True)
        return sum(shape.numel() * dtype.itemsize for shape, dtype in pairs)
