"""The C allocator over private memory: a tensor, on any device, that only this process has.

The same core, tables and objects as in a segment; only the control tables lie in anonymous memory and
the arena is what the caller gave. Nothing of it outlives the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any

from . import cache as _cache
from ._attachment import Attachment
from ._control import own_namespaces
from ._core import U32, ffi, lib
from ._dtypes import TABLE, torch_dtype
from ._request import POLICIES
from ._sizes import format_size

if TYPE_CHECKING:
    import torch

_MOST_OBJECTS = 65536  # tables are made for so many, or for one to a granule if that is less
_ATTACHMENTS = 8  # forked children take one each


class TensorArena:
    """The memory of a private heap: stands in for `_regions.Arena`."""

    def __init__(self, flat: torch.Tensor | None, capacity: int) -> None:
        self.flat = flat
        self.address = flat.data_ptr() if flat is not None else 0
        self.bytes = self.capacity = capacity

    @property
    def buffer(self) -> Any:
        if self.flat is None or self.flat.device.type != "cpu":
            raise ValueError("this memory is not the host's: its bytes cannot be read here, only through tensors")
        return ffi.buffer(ffi.cast("uint8_t *", self.address), self.bytes)

    def hugepages(self) -> str:
        return "none"

    def numa(self) -> str:
        return "none"


class _Unpinned:
    """Stands in for `pinning.Pinner`: the memory is registered, or not, by whoever gave it."""

    def poke(self) -> None:
        """Nothing was asked for."""

    def serve(self, _attachment: Attachment) -> None:
        """Nobody else can look."""

    def wait(self, _timeout: float) -> bool:
        return False

    def __str__(self) -> str:
        return "off (private memory)"


class _Mapping:
    """Stands in for `_mapping.Mapping`."""

    pinner = _Unpinned()

    def __init__(self, name: str, base: Any, geometry: Any, arena: TensorArena) -> None:
        self.name = name
        self.base = base
        self.size = int(geometry.control_bytes)
        self.geometry = geometry
        self.arena = arena
        self.instance = 0


class _TensorAttachment(Attachment):
    __slots__ = ()

    def base_tensor(self, code: int) -> Any:
        import torch

        row = TABLE[code]
        flat = self.arena().flat
        if flat is None:
            raise ValueError("addresses without memory have no tensors")
        with torch.inference_mode(False):
            base = flat[: flat.numel() // row.itemsize * row.itemsize].view(torch_dtype(row))
        self.bases[code] = base
        return base


def _geometry(size: int, align: int, policy: str) -> Any:
    g = ffi.new("shmc_geometry *")
    g.capacity = g.region_bytes = size // align * align
    g.align = align
    g.policy = POLICIES[policy]
    g.max_chunks = 2 * min(_MOST_OBJECTS, max(64, size // align))  # holds are half as many
    g.max_attachments = _ATTACHMENTS
    if lib.shmc_plan(g) < 0:
        raise ValueError(
            f"{size} bytes in granules of {align}: it takes at least one granule, of a power of two from 64 to "
            "2 MiB, and less than 2**31 of them"
        )
    return g


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous: its bytes cannot be given out in place")
    return tensor.detach().flatten().view(torch.uint8)


class PrivateCache(_cache.SharedCache):
    """A `SharedCache` over a tensor of this process. A forked child shares the tables, not the bytes.

    Parameters
    ----------
    tensor
        contiguous, of any dtype and device; it is viewed as bytes, and kept. Or a number of bytes:
        addresses without memory behind them.
    align
        granule in bytes.
    page_bytes
        the tables count a page of so many bytes as one granule; whoever allocates turns offsets and
        sizes into those of pages (`PagedTensorMemoryAllocator`).
    """

    def __init__(
        self, tensor: torch.Tensor | int, *, align: int = 4096, policy: str = "lru", name: str = "private",
        page_bytes: int = 0,
    ) -> None:  # fmt: skip
        flat = None if isinstance(tensor, int) else _flat(tensor)
        size = tensor if isinstance(tensor, int) else tensor.nbytes
        if page_bytes:
            size = size // page_bytes * align
        geometry = _geometry(size, align, policy)
        table = ffi.from_buffer(mmap.mmap(-1, int(geometry.control_bytes)))
        seed = ffi.new("uint64_t[2]", [int.from_bytes(os.urandom(8), "little") for _ in range(2)])
        lib.shmc_format(table, geometry.control_bytes, geometry, 1, *own_namespaces(), seed)
        lib.shmc_format_region(table, 0, 1)
        lib.shmc_set_state(table, lib.SHMC_S_READY)
        self.name = name
        self.capacity = int(geometry.capacity)
        self._lock = threading.RLock()
        self._default = None
        self._namespace_names = {}
        self._lock_timeout = 1.0
        self._label = self._rank = None
        self._pin = False
        self._prefault = "lazy"
        mapping = _Mapping(name, table, geometry, TensorArena(flat, self.capacity if flat is None else flat.nbytes))
        self._attachment = self._claim(mapping)
        self._attachment.presence = None
        region = ffi.new(U32)
        lib.shmc_region_claim(self._attachment.handle, region)
        lib.shmc_region_done(self._attachment.handle, region[0], 1, 0, 0)
        _cache._open_caches.add(self)

    def _claim(self, mapping: Any) -> Attachment:
        return _TensorAttachment.claim(self, mapping, self._lock_timeout, self._rank, self._label)

    def _claim_again(self, old: Attachment) -> Attachment:
        return self._claim(old.mapping)

    def _disconnect(self, mapping: Any, a: Attachment) -> None:
        """The tables go with their last reference."""

    def __del__(self) -> None:
        a = getattr(self, "_attachment", None)
        if a is not None and not a.closed and a.is_own():
            with contextlib.suppress(Exception):
                self._close(0.0, at_exit=True)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("private memory cannot be sent to another process: use a segment")

    def __repr__(self) -> str:
        return f"<PrivateCache of {format_size(self.capacity)}{', closed' if self.closed else ''}>"

    def unlink(self, *, force: bool = False) -> None:
        """There is no name to remove."""
        raise ValueError("private memory has no name to remove")
