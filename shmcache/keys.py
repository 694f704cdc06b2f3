"""LMCache's keys: which chunk of which model, of which rank, and of which layer.

    model@world_size@worker_id@hash@dtype[@tag%value...]
    model@world_size@worker_id@hash@dtype@layer[@tag%value...]

A hash is an int of any size or bytes. LMCache's own key objects work wherever these do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._dtypes import dtype_of as _row
from ._dtypes import torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["CacheEngineKey", "LayerCacheEngineKey", "dtype_from_name", "dtype_name", "parse_cache_key"]

_TAG = "lmcache.tag."
_NAMES = {
    "float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double", "int8": "int8",
    "uint8": "uint8", "int16": "int16", "int32": "int32", "int64": "int64", "bool": "bool",
    "float8_e4m3fn": "fp8_e4m3fn", "float8_e4m3fnuz": "fp8_e4m3fnuz", "float8_e5m2": "fp8_e5m2",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
}  # fmt: skip
_ROWS = {short: name for name, short in _NAMES.items()}
_known: dict[Any, str] = {}


def dtype_name(dtype: object) -> str:
    """LMCache's name of a dtype; ValueError for one that keys cannot have."""
    try:
        return _known[dtype]
    except KeyError:
        short = _NAMES.get(_row(dtype).name)
    if short is None:
        raise ValueError(f"a key's dtype is {dtype}: expected one of {', '.join(_NAMES)}")
    _known[dtype] = short
    return short


def dtype_from_name(name: str) -> torch.dtype:
    """torch's dtype of LMCache's name; ValueError for anything else."""
    if name not in _ROWS:
        raise ValueError(f"dtype {name!r} in a key: expected one of {', '.join(_ROWS)}")
    return torch_dtype(_row(_ROWS[name]))


def _tags_of(request_configs: dict[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    if not request_configs:
        return None
    found = tuple((k.removeprefix(_TAG), v) for k, v in request_configs.items() if k.startswith(_TAG))
    return found or None


@dataclass(slots=True, eq=False)
class CacheEngineKey:
    """One rank's part of one chunk.

    Parameters
    ----------
    chunk_hash
        of all tokens up to the end of the chunk; an int of any size, or bytes.
    request_configs
        of these, the ones named `lmcache.tag.*` belong to the key, in their order.

    Raises
    ------
    ValueError
        a dtype that keys cannot have.
    """

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: int | bytes
    dtype: torch.dtype
    request_configs: dict[str, Any] | None = field(default_factory=dict)
    tags: tuple[tuple[str, Any], ...] | None = field(init=False, default=None)
    _dtype_str: str = field(init=False, default="", repr=False)

    def __post_init__(self) -> None:
        self._dtype_str = dtype_name(self.dtype)
        if self.request_configs:
            self.tags = _tags_of(self.request_configs)

    def _identity(self) -> tuple[Any, ...]:
        return (self.model_name, self.world_size, self.worker_id, self.chunk_hash, self._dtype_str, self.tags)

    def __hash__(self) -> int:
        return hash(self._identity())

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        return self._identity() == other._identity()

    @property
    def chunk_hash_hex(self) -> str:
        """The hash as it stands in strings."""
        return self.chunk_hash.hex() if isinstance(self.chunk_hash, bytes) else f"{self.chunk_hash:x}"

    def _head(self) -> str:
        return f"{self.model_name}@{self.world_size}@{self.worker_id}@{self.chunk_hash_hex}@{self._dtype_str}"

    def _tail(self) -> str:
        return "".join(f"@{k}%{v}" for k, v in self.tags or ())

    def to_string(self) -> str:
        """See the module. A bytes hash reads back as an int, and a tag's value as a str."""
        return self._head() + self._tail()

    @staticmethod
    def from_string(s: str) -> CacheEngineKey:
        """The key of a string; ValueError for anything else."""
        return CacheEngineKey(**_parse(s, 5))

    def to_dict(self) -> dict[str, Any]:
        """For serializers, with all request configs."""
        out: dict[str, Any] = {
            "__type__": "CacheEngineKey",
            "model_name": self.model_name,
            "world_size": self.world_size,
            "worker_id": self.worker_id,
            "chunk_hash": self.chunk_hash,
            "dtype": self._dtype_str,
        }
        if self.request_configs:
            out["request_configs"] = [f"{k}%{v}" for k, v in self.request_configs.items()]
        return out

    @staticmethod
    def from_dict(d: dict[str, Any]) -> CacheEngineKey:
        """What `to_dict` was made of; ValueError for a config without '%'."""
        configs = None
        if d.get("request_configs"):
            configs = dict(_split_tag(kv, d) for kv in d["request_configs"])
        return CacheEngineKey(
            d["model_name"], d["world_size"], d["worker_id"], d["chunk_hash"], dtype_from_name(d["dtype"]), configs
        )

    def split_layers(self, num_layers: int) -> list[LayerCacheEngineKey]:
        """The keys of layers 0 to `num_layers - 1`."""
        return [self._layer(i) for i in range(num_layers)]

    def get_first_layer(self) -> LayerCacheEngineKey:
        """The key of layer 0."""
        return self._layer(0)

    def _layer(self, layer: int) -> LayerCacheEngineKey:
        return LayerCacheEngineKey(
            self.model_name, self.world_size, self.worker_id, self.chunk_hash, self.dtype, self.request_configs, layer
        )

    def with_new_worker_id(self, new_worker_id: int) -> CacheEngineKey:
        """The same chunk of another rank, all layers."""
        return CacheEngineKey(
            self.model_name, self.world_size, new_worker_id, self.chunk_hash, self.dtype, self.request_configs
        )


@dataclass(slots=True, eq=False)
class LayerCacheEngineKey(CacheEngineKey):
    """One layer of one rank's part of one chunk; never equal to a `CacheEngineKey`."""

    layer_id: int = 0

    def _identity(self) -> tuple[Any, ...]:
        return (*CacheEngineKey._identity(self), self.layer_id)

    def to_string(self) -> str:
        """See the module."""
        return f"{self._head()}@{self.layer_id}{self._tail()}"

    @staticmethod
    def from_string(s: str) -> LayerCacheEngineKey:
        """The key of a string; ValueError for anything else."""
        return LayerCacheEngineKey(**_parse(s, 6))


def _split_tag(kv: str, of: object) -> tuple[str, str]:
    name, percent, value = kv.partition("%")
    if not percent:
        raise ValueError(f"{of!r} is no key: {kv!r} has no '%'")
    return name, value


def _parse(s: str, fixed: int) -> dict[str, Any]:
    parts = s.split("@")
    if len(parts) < fixed:
        raise ValueError(f"{s!r} is no key: it has {len(parts)} of at least {fixed} parts between '@'")
    try:
        out: dict[str, Any] = {
            "model_name": parts[0],
            "world_size": int(parts[1]),
            "worker_id": int(parts[2]),
            "chunk_hash": int(parts[3], 16),
        }
        if fixed == 6:
            out["layer_id"] = int(parts[5])
    except ValueError:
        raise ValueError(f"{s!r} is no key: a number is expected where {parts[1:4]} stand") from None
    out["dtype"] = dtype_from_name(parts[4])
    tags = [_split_tag(kv, s) for kv in parts[fixed:]]
    out["request_configs"] = {_TAG + name: value for name, value in tags} if tags else None
    return out


def parse_cache_key(key_str: str) -> CacheEngineKey:
    """A key of either kind: a number in the sixth place is a layer."""
    parts = key_str.strip().split("@")
    layered = len(parts) >= 6 and parts[5].isdigit()
    return LayerCacheEngineKey.from_string(key_str.strip()) if layered else CacheEngineKey.from_string(key_str.strip())
