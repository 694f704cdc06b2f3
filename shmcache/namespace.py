"""A namespace: chunks by key, and everything that is done with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import _tensors, errors
from ._auto import AUTO, Auto
from ._calls import lease_ns
from ._core import U32, ffi, lib
from ._finding import Finding
from ._keys import Key
from ._meta import layout_of
from ._stats import NamespaceInfo
from ._storing import Storing
from .memory import MemoryObj
from .reservation import Reservation

if TYPE_CHECKING:
    import torch

    from .cache import SharedCache

__all__ = ["Namespace"]


class Namespace(Storing, Finding):
    """Chunks of one model, revision, dtype and layout; made by `SharedCache.namespace`.

    All of its methods may be called from any thread, and in forked children.

    Attributes
    ----------
    cache : SharedCache
    name : str
    parts : int
        how many blocks make one chunk complete, one for each rank (and layer).
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Namespace {self.name!r} of {self.cache.name!r}, {self.parts} parts>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_open_again, (self.cache, self.name, self._lease / 1e9 if self._lease else None))

    def info(self) -> NamespaceInfo:
        """What the segment says about it now."""
        found = self.cache._namespace_at(self._index)
        if found is None:
            raise errors.SegmentCorruptError(f"namespace {self.name!r} of {self.cache.name!r} has vanished")
        return found

    def reserve(self, key: Key, shape: Any, dtype: Any = None, *, part: int = 0, fmt: Any = None) -> Reservation:
        """Become the one writer of a part, or find out who is; see `Reservation`."""
        if part:
            self._part(part)
        return Reservation(self, key, layout_of(shape, dtype, fmt), part)

    def put_tensor(
        self, key: Key, t: Any, *, part: int = 0, parent: Key | None = None, fmt: Any = None, evict: bool = True,
        timeout: float | None = 0.0,
    ) -> bool:  # fmt: skip
        """Copy a tensor in (from any device, any strides; this waits for it) and publish it.

        False when that part is there already, or no memory could be had within `timeout`.
        """
        if self.contains(key, part=part):
            return False
        obj = _tensors.copy_in(self, t, fmt, evict, timeout)
        if obj is None:
            return False
        with obj:
            return self.put(key, obj, part=part, parent=parent)

    def get_tensor(self, key: Key, *, part: int = 0, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """A copy of a part as a tensor (into `out`, when given), or None when absent."""
        obj = self.get(key, part=part)
        if obj is None:
            return None
        with obj:
            return _tensors.copy_out(obj, out)


def _open_again(cache: SharedCache, name: str, lease: float | None) -> Namespace:
    return cache.namespace(name, lease=lease)


def canonical_descriptor(descriptor: object) -> bytes | None:
    """A descriptor as it is stored and compared: canonical JSON."""
    if descriptor is None:
        return None
    raw = json.dumps(descriptor, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    if len(raw) > lib.SHMC_DESC_MAX:
        raise ValueError(f"descriptor takes {len(raw)} bytes as JSON, at most {lib.SHMC_DESC_MAX}: store a hash of it")
    return raw


def open_namespace(
    cache: SharedCache, name: str, parts: int | Auto, descriptor: object, lease: float | None,
    make: type[MemoryObj] = MemoryObj,
) -> Namespace:  # fmt: skip
    """Find or make a namespace; see `SharedCache.namespace`."""
    raw_name = name.encode() if isinstance(name, str) else b""
    if not 1 <= len(raw_name) <= lib.SHMC_NAME_MAX:
        raise ValueError(f"namespace is {name!r}: a name of 1 to {lib.SHMC_NAME_MAX} bytes")
    most = lib.SHMC_PARTS_MAX
    if parts is not AUTO and (not isinstance(parts, int) or isinstance(parts, bool) or not 1 <= parts <= most):
        raise ValueError(f"parts is {parts!r}: 1 to {most}, or AUTO for what is there")
    want = 0 if isinstance(parts, Auto) else parts
    raw = canonical_descriptor(descriptor)
    lease_ns(lease)
    index = ffi.new(U32)
    while True:
        a = cache._attachment
        rc = lib.shmc_namespace(
            a.handle, raw_name, len(raw_name), want, raw or b"", len(raw or b""), raw is not None, index
        )
        if rc == 0:
            info = cache._namespace_at(index[0])
            return Namespace(cache, name, index[0], want or (info.parts if info else 1), lease, make)
        if rc == lib.SHMC_E_MISMATCH:
            there = cache._namespace_at(index[0])
            raise errors.NamespaceMismatchError(
                f"namespace {name!r} of {cache.name!r} has parts={there.parts if there else '?'}, "
                f"descriptor={there.descriptor if there else '?'!r}; "
                f"you asked parts={parts}, descriptor={descriptor!r}",
                hint="use the values that are there, or another namespace name",
            )
        a.recover(rc, "namespace")
