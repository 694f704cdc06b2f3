"""shmcache: a crash-safe KV cache in POSIX shared memory, shared by all inference processes of a host.

    import shmcache, torch

    cache = shmcache.open("prod", capacity="8GiB")
    kv = cache.namespace("llama-3-8b:bf16", parts=1)
    with kv.allocate((2, 32, 256, 512), torch.bfloat16) as obj:
        obj.tensor.copy_(rows)
        kv.put(chunk_hash, obj)
    with kv.lookup(chunk_hashes, pin=True) as hit:
        for i in range(hit.n):
            with hit.get(i) as obj:
                dst[i].copy_(obj.tensor)

Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _core as _core  # refuses a compiled module of another version, now
from ._version import __version__

if TYPE_CHECKING:
    from ._auto import AUTO
    from ._directory import SegmentInfo, segments
    from ._events import Event, Events
    from ._keys import PackedKeys, pack
    from ._open import attach, create, open, unlink
    from ._stats import ByteStats, CountStats, LockStats, NamespaceInfo, ReapReport, Stats
    from .cache import SharedCache
    from .errors import (
        CapacityError,
        ChecksumError,
        ConfigurationError,
        LockTimeoutError,
        NamespaceMismatchError,
        OutOfSharedMemoryError,
        RawCloneError,
        SegmentBusyError,
        SegmentClosedError,
        SegmentCorruptError,
        SegmentExistsError,
        SegmentMismatchError,
        SegmentNotFoundError,
        SegmentPermissionError,
        ShmCacheError,
        StaleHandleError,
    )
    from .lookup import Lookup
    from .memory import MemoryFormat, MemoryObj, MemoryObjMetadata, release_many
    from .namespace import Namespace
    from .reservation import Reservation, ReservationState

__all__ = [
    "AUTO",
    "ByteStats",
    "CapacityError",
    "ChecksumError",
    "ConfigurationError",
    "CountStats",
    "Event",
    "Events",
    "LockStats",
    "LockTimeoutError",
    "Lookup",
    "MemoryFormat",
    "MemoryObj",
    "MemoryObjMetadata",
    "Namespace",
    "NamespaceInfo",
    "NamespaceMismatchError",
    "OutOfSharedMemoryError",
    "PackedKeys",
    "RawCloneError",
    "ReapReport",
    "Reservation",
    "ReservationState",
    "SegmentBusyError",
    "SegmentClosedError",
    "SegmentCorruptError",
    "SegmentExistsError",
    "SegmentInfo",
    "SegmentMismatchError",
    "SegmentNotFoundError",
    "SegmentPermissionError",
    "SharedCache",
    "ShmCacheError",
    "StaleHandleError",
    "Stats",
    "__version__",
    "attach",
    "create",
    "open",
    "pack",
    "release_many",
    "segments",
    "unlink",
]


# The whole package takes longer to import than `shmcache-inspect` may take to start.
_HOMES = {
    "_auto": "AUTO",
    "_directory": "SegmentInfo segments",
    "_events": "Event Events",
    "_keys": "PackedKeys pack",
    "_open": "attach create open unlink",
    "_stats": "ByteStats CountStats LockStats NamespaceInfo ReapReport Stats",
    "cache": "SharedCache",
    "lookup": "Lookup",
    "memory": "MemoryFormat MemoryObj MemoryObjMetadata release_many",
    "namespace": "Namespace",
    "reservation": "Reservation ReservationState",
}  # module: its public names, imported at first use
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
_HOME_OF |= {name: "errors" for name in __all__ if name.endswith("Error")}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
