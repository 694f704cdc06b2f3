"""LMCache's in-process CPU backend on a shared segment, by configuration alone.

Written for and tested with LMCache 0.5.6:

    chunk_size: 256
    local_cpu: true
    max_local_cpu_size: 0
    storage_plugins: ["LocalCPUBackend"]
    extra_config:
      storage_plugin.LocalCPUBackend.module_path: shmcache.integrations.lmcache
      storage_plugin.LocalCPUBackend.class_name: ShmLocalCPUBackend
      shmcache.segment: prod
      shmcache.capacity: 20GiB

The name LocalCPUBackend makes it the backend that LMCache allocates from. A cache must not break its
engine: where the segment fails (a stopped process holds its lock, it is damaged), calls here answer as
a cache that has nothing, and say so in the log.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch

try:
    from lmcache.observability import LMCStatsMonitor, PrometheusLogger
    from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
    from lmcache.v1.cache_controller.message import BatchedKVOperationMsg, KVOpEvent, OpType
    from lmcache.v1.memory_management import (
        MemoryAllocatorInterface,
        MemoryFormat,
        MemoryObj,
        MemoryObjMetadata,
    )
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
except ImportError as e:
    raise ImportError(f"shmcache.integrations.lmcache is a plug-in of LMCache, tested with 0.5.6: {e}") from e

from ..allocators import MixedMemoryAllocator, TensorMemoryObj
from ..backend import SharedCPUBackend
from ..errors import SegmentClosedError, ShmCacheError
from ..memory import release_many

__all__ = ["ShmLocalCPUBackend"]

_log = logging.getLogger("shmcache")
_LOG_EVERY = 10.0  # seconds between two lines about the same failing method
_LAYERWISE_ID = "fake_lookup_id"  # what LMCache's StorageManager passes for layerwise loads
_FEED_EVERY = 1.0  # seconds between two updates of LMCache's gauges

_SOFT = (ShmCacheError, ValueError, TypeError)  # the last two: keys that cannot be stored, such as of endless tags

_HAS_STREAMS = torch.version.cuda is not None or torch.version.hip is not None  # of this build of torch

F = TypeVar("F", bound=Callable[..., Any])


class ShmMemoryObj(TensorMemoryObj):
    """A memory object as LMCache's engine wants it: its enums, its metadata, and a double free only logged."""

    __slots__ = ()

    metadata_class = MemoryObjMetadata
    format_class = MemoryFormat

    def count_down_behind_copies(self) -> None:
        """One reference less, once the device has done what it was asked to do with the bytes.

        LMCache counts down when a copy is only queued: in one process the stream keeps the order, here
        another process could evict the chunk and write over what is being read.
        """
        event = None if self._attachment.closed else _pending_copies()
        if event is None:
            super().ref_count_down()
            return
        try:
            hold = self._holds.pop()
        except IndexError:
            self._no_reference()
            return
        try:
            self._attachment.release_after([hold], event)
        except BaseException:
            self._holds.append(hold)
            raise

    if _HAS_STREAMS:
        ref_count_down = count_down_behind_copies

    def _no_reference(self) -> None:
        """Logged, as LMCache does, and nothing changes."""
        _log.error("double free of %r", self, stack_info=True)

    def _not_counted_down(self, rc: int) -> None:
        """Logged: the reference stays until the object is collected. After a close there is none."""
        try:
            super()._not_counted_down(rc)
        except SegmentClosedError:
            return
        except ShmCacheError as e:
            _say("ref_count_down", e)

    def pin(self) -> bool:
        """False where the segment fails, which is logged."""
        try:
            return super().pin()
        except SegmentClosedError:
            return False
        except ShmCacheError as e:
            _say("pin", e)
            return False

    def unpin(self) -> bool:
        """False where the segment fails, which is logged."""
        try:
            return super().unpin()
        except SegmentClosedError:
            return False
        except ShmCacheError as e:
            _say("unpin", e)
            return False

    def _counts(self) -> tuple[int, int]:
        """Zeros where the segment fails: a description must be readable."""
        try:
            return super()._counts()
        except ShmCacheError:
            return 0, 0


def _pending_copies() -> Any:
    """An event behind all that the current stream has been given; None when all is done, or there is no GPU."""
    cuda: Any = torch.cuda
    if not _HAS_STREAMS or not cuda.is_initialized():
        return None
    event = cuda.Event()
    event.record()
    return None if event.query() else event


def _finish_copies() -> None:
    """Bytes are complete before they are published: another process does not see this one's stream."""
    event = _pending_copies()
    if event is not None:
        event.synchronize()


MemoryObj.register(ShmMemoryObj)
MemoryAllocatorInterface.register(MixedMemoryAllocator)


_logged_at: dict[str, float] = {}


def _goes_on(what: str, e: Exception) -> bool:
    """The engine goes on without the cache, which is said; with a closed one it does not.

    Whoever asks raises the error itself: raised from here, `e` and this frame would keep each other, and with
    them the objects of every caller, until a collection.
    """
    if isinstance(e, SegmentClosedError):
        return False
    _say(what, e)
    return True


def _say(what: str, e: Exception) -> None:
    """Now and then, not each time."""
    now = time.monotonic()
    if now - _logged_at.get(what, -_LOG_EVERY) >= _LOG_EVERY:
        _logged_at[what] = now
        _log.error("%s: goes on without the cache: %s", what, str(e))  # a record with `e` keeps frames, and their holds


def _soft(method: F, answer: Callable[..., Any]) -> F:
    """`method`, which where the segment fails answers as an empty cache would."""
    # sizes that make no sense are the engine's to know
    soft = (ShmCacheError,) if method.__name__ == "batched_allocate" else _SOFT
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return await method(self, *args, **kwargs)
            except _SOFT as e:
                if not _goes_on(method.__name__, e):
                    raise
                return answer(*args, *kwargs.values())

        return cast(F, waiting)

    @functools.wraps(method)
    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except soft as e:
            if not _goes_on(method.__name__, e):
                raise
            return answer(*args, *kwargs.values())

    return cast(F, calling)


class ShmLocalCPUBackend(SharedCPUBackend, LocalCPUBackend):  # type: ignore[misc]
    """See the module; made by LMCache's plug-in loader.

    Ranks of one host agree (`shmcache.rank_agreement` is on) when there is more than one.
    """

    object_class = ShmMemoryObj
    message_classes: ClassVar[dict[str, Any]] = {
        "make_op": KVOpEvent,
        "make_message": BatchedKVOperationMsg,
        "op_types": OpType,
    }
    lmcache_metrics = False  # LMCache's own logger tells them

    def __init__(
        self, config: Any, metadata: Any = None, dst_device: str = "cuda", lmcache_worker: Any = None,
        memory_allocator: Any = None, *, local_cpu_backend: Any = None, loop: Any = None,
    ) -> None:  # fmt: skip
        SharedCPUBackend.__init__(self, config, metadata, dst_device, lmcache_worker, memory_allocator)
        self._placement.make = [CacheEngineKey, LayerCacheEngineKey]
        self._feed_at = 0.0
        self._told = {"evictions": 0, "eviction_failures": 0, "leases_ended": 0}
        try:
            self.stats_monitor = LMCStatsMonitor.GetOrCreate()
            self._setup_metrics()
        except BaseException:  # LMCache logs it and goes on without
            if memory_allocator is None:
                self.close()
            raise

    def _goes_on(self, what: str, error: Exception) -> bool:
        """So do the calls of one chunk where the segment fails; for all others see `_soft`."""
        return isinstance(error, _SOFT) and _goes_on(what, error)

    def put_behind_copies(self, key: Any, memory_obj: Any, on_complete_callback: Any = None) -> None:
        """See `submit_put_task`; the bytes are complete first."""
        _finish_copies()
        SharedCPUBackend.submit_put_task(self, key, memory_obj, on_complete_callback)

    if _HAS_STREAMS:
        submit_put_task = put_behind_copies

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """See `SharedCPUBackend`; KeyError when a layer misses chunks that the layers before had.

        Then a shorter list is no answer: the engine has begun to load the chunks, and its connectors would
        take the missing bytes from wherever they copy.
        """
        found: list[Any] = []
        try:
            found = await SharedCPUBackend.batched_get_non_blocking(self, lookup_id, keys, transfer_spec)
        except _SOFT as e:
            if not _goes_on("batched_get_non_blocking", e):
                raise
        if len(found) < len(keys) and lookup_id == _LAYERWISE_ID:
            release_many(found)
            raise KeyError(f"layer {getattr(keys[0], 'layer_id', '?')}: {len(keys) - len(found)} chunks went meanwhile")
        return found

    def _agree_by_default(self) -> bool:
        return self._ranks[1] > 1

    def __str__(self) -> str:
        return "LocalCPUBackend"

    def _setup_metrics(self) -> None:
        if self.metadata is None:
            return
        gauges = PrometheusLogger.GetOrCreate(self.metadata, config=self.config)
        me = weakref.ref(self)  # the gauges outlive the backend

        def told(figure: Callable[[ShmLocalCPUBackend], float]) -> Callable[[], float]:
            def tell() -> float:
                backend = me()
                try:
                    return 0.0 if backend is None else figure(backend)
                except ShmCacheError:
                    return 0.0  # closed, or damaged

            return tell

        gauges.local_cpu_hot_cache_count.set_function(told(lambda b: len(b.hot_cache)))
        gauges.local_cpu_keys_in_request_count.set_function(told(lambda b: len(b._requests)))
        gauges.pin_monitor_pinned_objects_count.set_function(told(lambda b: b._pins()[0]))
        gauges.kv_msg_queue_size.set_function(
            told(lambda b: b.batched_msg_sender.qsize() if b.batched_msg_sender else 0)
        )
        stats = self.cache.stats()  # what happened before is not ours to tell
        self._told = {field: getattr(stats, field) for field in self._told}

    def _feed(self) -> None:
        """LMCache's monitor is told what it would have counted; the segment's figures by the first rank of the host."""
        now = time.monotonic()
        if now < self._feed_at or not self._speaks_for_host():
            return
        self._feed_at = now + _FEED_EVERY
        stats = self.cache.stats()
        new = {field: getattr(stats, field) - before for field, before in self._told.items()}
        self._told = {field: getattr(stats, field) for field in self._told}
        monitor = self.stats_monitor
        monitor.update_local_cache_usage(stats.bytes.used)
        monitor.update_active_memory_objs_count(stats.counts.parts)
        if new["evictions"]:
            monitor.update_local_cpu_evict_metrics(new["evictions"])
        if new["eviction_failures"]:
            monitor.update_local_cpu_evict_failed_count(new["eviction_failures"])
        if new["leases_ended"]:
            monitor.update_forced_unpin_count(new["leases_ended"])

    def batched_submit_put_task(
        self, keys: Sequence[Any], memory_objs: Sequence[Any], transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        """See `SharedCPUBackend`."""
        _finish_copies()
        SharedCPUBackend.batched_submit_put_task(self, keys, memory_objs, transfer_spec, on_complete_callback)
        self._feed()


def _keys(*args: Any) -> list[Any]:
    """One None for each key."""
    return [None] * len(args[0])


for _name, _answer in {
    "batched_contains": lambda *_: 0, "batched_async_contains": lambda *_: 0, "touch_cache": lambda *_: None,
    "batched_submit_put_task": lambda *_: None, "batched_get_blocking": _keys,
    "pin": lambda *_: False, "batched_unpin": lambda *_: 0,
    "remove": lambda *_: False,
    "batched_remove": lambda *_: 0, "batched_allocate": lambda *_: None, "get_keys": lambda *_: [],
    "clear": lambda *_: 0,
}.items():  # fmt: skip
    setattr(ShmLocalCPUBackend, _name, _soft(getattr(ShmLocalCPUBackend, _name), _answer))
