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

from ._auto import AUTO
from ._directory import SegmentInfo, segments
from ._events import Event, Events
from ._keys import PackedKeys, pack
from ._open import attach, create, open, unlink
from ._stats import ByteStats, CountStats, LockStats, NamespaceInfo, ReapReport, Stats
from ._version import __version__
from .cache import SharedCache
from .errors import (
    CapacityError,
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


def __dir__() -> list[str]:
    return __all__
