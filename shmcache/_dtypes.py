"""Element types: torch's name, the code stored in segments, and the size of one element.

The table may grow at its end only: codes are stored. Importing it does not import torch; a dtype is
recognised by its name, whether it is torch's, numpy's or a str.

Quantized types (qint8 and so on) are not in it: their bytes mean nothing without the quantizer, and
a plain view of one crashes torch. Their `int_repr()` is an ordinary tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class DType(NamedTuple):
    """One row of the table."""

    code: int
    name: str
    itemsize: int


_ROWS = (
    ("uint8", 1), ("int8", 1), ("int16", 2), ("int32", 4), ("int64", 8), ("float16", 2), ("float32", 4),
    ("float64", 8), ("complex32", 4), ("complex64", 8), ("complex128", 16), ("bool", 1), ("bfloat16", 2),
    ("float8_e4m3fn", 1), ("float8_e5m2", 1), ("float8_e4m3fnuz", 1), ("float8_e5m2fnuz", 1), ("float8_e8m0fnu", 1),
    ("float4_e2m1fn_x2", 1), ("uint16", 2), ("uint32", 4), ("uint64", 8),
    ("bits8", 1), ("bits16", 2), ("bits1x8", 1), ("bits2x4", 1), ("bits4x2", 1),
    ("uint1", 1), ("uint2", 1), ("uint3", 1), ("uint4", 1), ("uint5", 1), ("uint6", 1), ("uint7", 1),
    ("int1", 1), ("int2", 1), ("int3", 1), ("int4", 1), ("int5", 1), ("int6", 1), ("int7", 1),
)  # fmt: skip

TABLE: dict[int, DType] = {i: DType(i, name, size) for i, (name, size) in enumerate(_ROWS, start=1)}
_BY_NAME: dict[str, DType] = {row.name: row for row in TABLE.values()}
_ALIASES = {
    "byte": "uint8", "char": "int8", "short": "int16", "int": "int32", "long": "int64", "half": "float16",
    "float": "float32", "double": "float64", "chalf": "complex32", "cfloat": "complex64", "cdouble": "complex128",
    "bool_": "bool",
}  # fmt: skip
_QUANTIZED = frozenset(("qint8", "quint8", "qint32", "quint4x2", "quint2x4"))

UINT8 = TABLE[1]


def _resolve(dtype: object) -> DType:
    if isinstance(dtype, type):  # numpy's scalar types, and Python's bool
        name = dtype.__name__
        if dtype in (int, float, complex):
            raise ValueError(f"dtype is {name}, whose size is ambiguous: say which, for instance torch.float32")
    else:
        name = str(dtype)
        order = getattr(dtype, "byteorder", "=")
        if order not in "=|" and not getattr(dtype, "isnative", True):
            raise ValueError(f"dtype is {dtype!r}: only the machine's own byte order can be stored")
    name = name.removeprefix("torch.")
    row = _BY_NAME.get(_ALIASES.get(name, name))
    if row is not None:
        return row
    if name in _QUANTIZED:
        raise ValueError(f"dtype is {name}: store t.int_repr() and keep its scale and zero point beside it")
    raise ValueError(f"dtype is {dtype!r}: expected one of torch's with a fixed item size, such as torch.bfloat16")


_known: dict[Any, DType] = {}


def dtype_of(dtype: object) -> DType:
    """The row of a torch dtype, a numpy dtype or a name; ValueError for anything else."""
    try:
        return _known[dtype]
    except KeyError:
        row = _known[dtype] = _resolve(dtype)
        return row
    except TypeError:  # not hashable
        return _resolve(dtype)


def torch_dtype(row: DType) -> torch.dtype:
    """torch's object for it; ValueError when this torch is too old to have it."""
    import torch

    found = getattr(torch, row.name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {row.name}, which this object was stored with")
    return found
