"""How the dimensions of an object are to be read, and what it is; names and numbers are LMCache's."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    dtype: torch.dtype | None
    address: int  # byte offset in the arena
    phy_size: int
    ref_count: int
    pin_count: int = 0
    fmt: MemoryFormat = MemoryFormat.UNDEFINED
    cached_positions: torch.Tensor | None = None
    shapes: list[torch.Size] | None = None
    dtypes: list[torch.dtype] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For serializers: shapes as lists, dtypes by name. Pins and positions are this process's and stay out."""
        return {
            "__type__": "MemoryObjMetadata",
            "shape": list(self.shape),
            "dtype": str(self.dtype) if self.dtype is not None else None,
            "address": self.address,
            "phy_size": self.phy_size,
            "ref_count": self.ref_count,
            "fmt": self.fmt.value,
            "shapes": [list(shape) for shape in self.shapes] if self.shapes else None,
            "dtypes": [str(dtype) for dtype in self.dtypes] if self.dtypes else None,
        }

    @staticmethod
    def from_dict(d: dict[str, Any]) -> MemoryObjMetadata:
        """What `to_dict` was made of, without pins."""
        import torch

        def dtype(name: str) -> torch.dtype:
            found: torch.dtype = getattr(torch, name.removeprefix("torch."))
            return found

        return MemoryObjMetadata(
            shape=torch.Size(d["shape"]),
            dtype=dtype(d["dtype"]) if d["dtype"] else None,
            address=d["address"],
            phy_size=d["phy_size"],
            ref_count=d["ref_count"],
            pin_count=0,
            fmt=MemoryFormat(d["fmt"]),
            shapes=[torch.Size(s) for s in d["shapes"]] if d["shapes"] else None,
            dtypes=[dtype(name) for name in d["dtypes"]] if d["dtypes"] else None,
        )

    def get_size(self) -> int:
        """Bytes of all shapes together."""
        if self.shapes and self.dtypes:
            pairs = list(zip(self.shapes, self.dtypes, strict=True))
        else:
            pairs = [(self.shape, self.dtype)] if self.dtype is not None else []
        return sum(shape.numel() * dtype.itemsize for shape, dtype in pairs)
