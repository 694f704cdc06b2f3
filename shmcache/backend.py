"""LMCache's local CPU backend over a shared segment: the same methods, one copy for all processes.

    config = EngineConfig.from_file("lmcache.yaml")
    backend = SharedCPUBackend(config, metadata, "cpu")
    obj = backend.allocate(shape, dtype)
    backend.submit_put_task(key, obj); obj.ref_count_down()

A chunk is one entry for all ranks of the host (see `_placement`). Where LMCache's backend misbehaves,
this one does not; the README lists what differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from . import _sizing, errors
from ._backend_memory import BackendMemory
from ._core import U64, ffi, lib
from ._objects import TensorMemoryObj
from ._order import list_chunks
from ._placement import Placement, Route
from ._pools import PagedTensorMemoryAllocator
from ._requests import RequestKeys
from .messages import SegmentMessages
from .metrics import Lifespans, register
from .policies import SegmentPolicy
from .reservation import Reservation

__all__ = ["SharedCPUBackend"]

_log = logging.getLogger("shmcache")
_LIST_BATCH = 4096


class HotCache(Mapping[Any, TensorMemoryObj]):
    """What is stored, as a mapping from keys to objects. A view: each access asks the segment."""

    def __init__(self, backend: SharedCPUBackend) -> None:
        self._backend = backend

    def __contains__(self, key: object) -> bool:
        return hasattr(key, "chunk_hash") and self._backend._has(key)

    def __getitem__(self, key: Any) -> TensorMemoryObj:
        obj = self._backend.get_blocking(key)
        if obj is None:
            raise KeyError(key)
        return obj

    def __iter__(self) -> Iterator[Any]:
        return iter(self._backend.get_keys())

    def __len__(self) -> int:
        """Chunks of this model; takes no lock."""
        return self._backend._placement.count()


class SharedCPUBackend(BackendMemory):
    """See the module.

    Parameters
    ----------
    config
        `EngineConfig`, or LMCache's.
    metadata
        `EngineMetadata`, or LMCache's: which rank this is.
    dst_device
        where objects go to; only checked.
    lmcache_worker
        has `put_msg(message)`: gets batches of what was admitted and evicted, by all processes of the
        host, from one of them (see `messages`).
    memory_allocator
        an allocator of `shmcache.allocators` to use, instead of opening the configured segment.

    `extra_config["shmcache.rank_agreement"]: true` makes `contains` and its batch forms answer for all
    ranks of the host together: a chunk counts when each has put its part, so ranks cannot disagree.

    Raises
    ------
    ConfigurationError
        neither metadata nor an allocator, or settings that contradict each other.
    RuntimeError
        `dst_device` is none of torch's.
    """

    message_classes: ClassVar[dict[str, Any]] = {}  # of messages, other than ours
    lmcache_metrics = True  # whether `lmcache:*` metrics are this class's to tell

    def __init__(
        self, config: Any, metadata: Any = None, dst_device: str = "cuda", lmcache_worker: Any = None,
        memory_allocator: Any = None,
    ) -> None:  # fmt: skip
        import torch

        device = torch.device(dst_device)
        self.dst_device = "cpu" if device.type == "cuda" and not torch.cuda.is_available() else dst_device
        if metadata is None and memory_allocator is None:
            raise errors.ConfigurationError("neither metadata nor memory_allocator: what memory is meant is not known")
        self.config = config
        self.metadata = metadata
        self.lmcache_worker = lmcache_worker
        self.instance_id = config.lmcache_instance_id
        self.use_hot = bool(config.local_cpu)
        self.layerwise = bool(config.use_layerwise)
        self.enable_blending = bool(config.enable_blending)
        self.memory_allocator = memory_allocator or self.initialize_allocator(config, metadata)
        pool = getattr(self.memory_allocator, "pin_allocator", None) or self.memory_allocator
        if getattr(pool, "cache", None) is None:
            raise TypeError(f"memory_allocator is {memory_allocator!r}: the backend needs one of one pool of shmcache's")
        self._pool = getattr(pool, "allocator", pool)
        if isinstance(self._pool, PagedTensorMemoryAllocator):
            raise TypeError("memory_allocator is of pages: the backend makes its own, of a segment, with enable_p2p")
        one_copy = _sizing.one_copy(config, metadata)
        self._placement = Placement(
            self._pool, metadata, self._num_layers(), one_copy, float(config.pin_timeout_sec) or None
        )
        self._routes = self._placement.routes
        own = self._placement.own()
        self._space = own.space if own else self._pool.namespace("lmcache", 1)
        self._agree = bool(config.get_extra_config_value("shmcache.rank_agreement", self._agree_by_default()))
        self._requests = RequestKeys()
        self.lifespans = Lifespans()
        self.hot_cache = HotCache(self)
        self.cache_policy = SegmentPolicy(config.cache_policy, self._pool.cache, self._placement.keys_of)
        self.batched_msg_sender: SegmentMessages | None = None
        if lmcache_worker is not None and metadata is not None:
            self.batched_msg_sender = SegmentMessages(
                metadata, config, str(self), lmcache_worker, self.cache, self._placement.is_mine,
                f"messages of {metadata.model_name}@{metadata.world_size}", **self.message_classes,
            )  # fmt: skip
        register(self)

    def _agree_by_default(self) -> bool:
        return False

    def _num_layers(self) -> int:
        explicit = self.config.get_extra_config_value("shmcache.num_layers", None)
        if explicit is not None:
            return int(explicit)
        if not self.layerwise or self.metadata is None:
            return 0
        return sum(int(shape[1]) for shape in self.metadata.get_shapes())

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def cache(self) -> Any:
        """The `SharedCache` beneath."""
        return self._pool.cache

    def _pins(self) -> tuple[int, int]:
        """Pins of this process, and of all; takes no lock."""
        a = self.cache._attached("pins")
        own, every = ffi.new(U64), ffi.new(U64)
        lib.shmc_pins_read(a.base, a.size, lib.shmc_slot_of(a.handle), own, every)
        return int(own[0]), int(every[0])

    # ---- where a key lies ---------------------------------------------------------------------------

    def _find(self, key: Any) -> tuple[Route | None, int]:
        """Route and part of a key; no route when nothing can be stored under it yet."""
        route = self._routes.get((type(key), key.model_name, key.world_size, key.dtype, key.tags))
        if route is None:
            route = self._placement.find(key)
            if route is None:
                return None, -1
        part = route.part(key)
        return (route, part) if part >= 0 else (None, -1)

    def _find_all(self, keys: Sequence[Any]) -> tuple[Route | None, int]:
        """The same when all keys agree in both, as those of one request of one rank (and layer) do."""
        if not keys:
            return None, -1
        first = keys[0]
        kind, worker, dtype, tags, model = type(first), first.worker_id, first.dtype, first.tags, first.model_name
        layer = getattr(first, "layer_id", None)
        for key in keys:
            if (
                type(key) is not kind
                or key.worker_id != worker
                or key.model_name != model
                or key.dtype != dtype
                or key.tags != tags
                or (layer is not None and key.layer_id != layer)
            ):
                return None, -1
        return self._find(first)

    def _which(self, part: int) -> int | None:
        """What has to be there: the part, or with rank agreement all parts."""
        return None if self._agree else part

    # ---- looking ------------------------------------------------------------------------------------

    def _has(self, key: Any) -> bool:
        route, part = self._find(key)
        return route is not None and route.space.contains(key.chunk_hash, part=part)

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether the key's part is stored. With `pin` it is pinned, and noted for `touch_cache`."""
        route, part = self._find(key)
        if route is None:
            return False
        if not pin:
            return route.space.contains(key.chunk_hash, part=None if self._agree else part)
        if route.space.leading([key.chunk_hash], part=self._which(part), pin=True):
            self._requests.add([key])
            return True
        return False

    def batched_contains(self, keys: Sequence[Any], pin: bool = False) -> int:
        """How many leading keys are stored; with `pin`, exactly these are pinned, and noted for `touch_cache`."""
        n = self._leading(keys, pin)
        if pin and n:
            self._requests.add(list(keys[:n]))
        return n

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        """`batched_contains`, noted under the lookup id."""
        n = self._leading(keys, pin)
        if pin and n:
            self._requests.add(list(keys[:n]), lookup_id)
        return n

    def _leading(self, keys: Sequence[Any], pin: bool) -> int:
        route, part = self._find_all(keys)
        if route is not None:
            return route.space.leading([key.chunk_hash for key in keys], part=self._which(part), pin=pin)
        n = 0
        for key in keys:  # of several ranks, layers or models
            route, part = self._find(key)
            if route is None or not route.space.leading([key.chunk_hash], part=self._which(part), pin=pin):
                break
            n += 1
        return n

    def touch_cache(self, lookup_id: str | None = None) -> None:
        """Count a use of the keys that were pinned since the last time, suffix before prefix.

        Of one lookup; without an id, of all lookups of the calling thread, one after the other. Keys
        that are gone are skipped.
        """
        for keys in self._requests.take(lookup_id):
            self._touch(keys)

    def _touch(self, keys: Sequence[Any]) -> None:
        route, _ = self._find_all(keys)
        self.lifespans.used([key.chunk_hash for key in keys])
        if route is not None:
            route.space.touch([key.chunk_hash for key in keys])
            return
        for key in reversed(keys):
            route, _ = self._find(key)
            if route is not None:
                route.space.touch([key.chunk_hash])

    @property
    def keys_in_request(self) -> list[Any]:
        """Keys that were pinned and not touched yet, of all lookups."""
        return self._requests.all()

    def exists_in_put_tasks(self, key: Any) -> bool:
        """False: puts are done when they return."""
        return False

    # ---- storing -------------------------------------------------------------------------------------

    def submit_put_task(
        self, key: Any, memory_obj: Any, on_complete_callback: Callable[[Any], None] | None = None
    ) -> None:
        """Store an object; what is stored already stays. The caller keeps its reference.

        Unpublished objects of this backend are stored as they are, all others are copied; without
        memory for the copy, and when all namespaces are in use, nothing is stored, which is logged.

        Parameters
        ----------
        on_complete_callback
            is called with the key when it was newly stored; what it raises is logged.

        Raises
        ------
        ValueError
            the key is of a rank of another host.
        StaleHandleError
            the object was released.
        """
        try:
            route = self._placement.find(key, create=True)
        except errors.OutOfSharedMemoryError as e:
            _log.warning("not stored: %s", e)
            return
        assert route is not None  # it was made
        part = route.part(key)
        if part < 0:
            raise ValueError(f"put: {key.to_string()} is of no rank of this host: ranks are {sorted(route.bases)}")
        space = route.space
        ours = isinstance(memory_obj, TensorMemoryObj) and memory_obj._namespace is space and not memory_obj.published
        if not ours and space.contains(key.chunk_hash, part=part):
            return
        obj = memory_obj if ours else self._adopted(memory_obj, space)
        if obj is None:
            _log.warning("not stored: no memory for a copy of %d bytes", memory_obj.get_size())
            return
        try:
            stored = space.put(key.chunk_hash, obj, part=part)
            obj._key = key.chunk_hash
        finally:
            if obj is not memory_obj:
                obj.release()
        if stored:
            self.lifespans.met((key.chunk_hash,))
        if stored and on_complete_callback is not None:
            self._call_back(on_complete_callback, key)

    @staticmethod
    def _call_back(callback: Callable[[Any], None], key: Any) -> None:
        try:
            callback(key)
        except Exception as e:
            _log.warning("on_complete_callback failed for key %s: %s", key, e)

    def batched_submit_put_task(
        self, keys: Sequence[Any], memory_objs: Sequence[Any], transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        """`submit_put_task` of each, in order; nothing when `local_cpu` is off. Surplus on either side is ignored."""
        if not self.use_hot:
            return
        pairs = list(zip(keys, memory_objs, strict=False))
        if not self._put_together(pairs, on_complete_callback):
            for key, obj in pairs:
                self.submit_put_task(key, obj, on_complete_callback)

    def _put_together(self, pairs: list[tuple[Any, Any]], callback: Callable[[Any], None] | None) -> bool:
        """One call for all, where all are this backend's own unpublished objects of one rank; False: not so."""
        route, part = self._find_all([key for key, _ in pairs])
        if route is None or len(set(map(id, (obj for _, obj in pairs)))) != len(pairs):
            return False
        space = route.space
        if not all(
            isinstance(obj, TensorMemoryObj) and obj._namespace is space and obj._holds and not obj.published
            for _, obj in pairs
        ):
            return False
        hashes = [key.chunk_hash for key, _ in pairs]
        stored = space.put_many(hashes, [obj for _, obj in pairs], part=part)
        self.lifespans.met(hashes)
        for (key, obj), is_stored in zip(pairs, stored, strict=True):
            obj._key = key.chunk_hash
            if is_stored and callback is not None:
                self._call_back(callback, key)
        return True

    def reserve(self, key: Any, shapes: Any, dtypes: Any, fmt: Any = None) -> Reservation:
        """Become the one writer of a key's part, or learn who is: see `Namespace.reserve`.

        With MLA the part is the same for all ranks, so one of them writes and all read.
        """
        route = self._placement.find(key, create=True)
        assert route is not None  # it was made
        part = route.part(key)
        if part < 0:
            raise ValueError(f"reserve: {key.to_string()} is of no rank of this host")
        layout = self._layout(shapes, dtypes, self._format(fmt))
        return Reservation(route.space, key.chunk_hash, layout, part)

    # ---- loading -------------------------------------------------------------------------------------

    def get_blocking(self, key: Any) -> TensorMemoryObj | None:
        """The object, with a reference that is the caller's to give back; None when it is absent."""
        route, part = self._find(key)
        if route is None:
            return None
        obj: Any = route.space.get(key.chunk_hash, part=part)
        if obj is not None:
            obj._key = key.chunk_hash
        return obj  # type: ignore[no-any-return]

    def batched_get_blocking(self, keys: Sequence[Any]) -> list[Any]:
        """`get_blocking` of each, in one call where the keys are of one rank; None where absent."""
        route, part = self._find_all(keys)
        if route is None:
            return [self.get_blocking(key) for key in keys]
        found: list[Any] = route.space.get_many([key.chunk_hash for key in keys], part=part)
        for key, obj in zip(keys, found, strict=True):
            if obj is not None:
                obj._key = key.chunk_hash
        return found

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """The leading objects that are there: up to the first that is not. Counts as their use."""
        found = self.batched_get_blocking(keys)
        n = next((i for i, obj in enumerate(found) if obj is None), len(found))
        for obj in found[n:]:
            if obj is not None:
                obj.release()
        self.touch_cache(lookup_id)
        return found[:n]

    def cancel_request(self, req_id: str) -> None:
        """Forget what a lookup noted for `touch_cache`."""
        self._requests.take(req_id)

    # ---- pins and removal ----------------------------------------------------------------------------

    def pin(self, key: Any) -> bool:
        """Keep the chunk from eviction, for at most `pin_timeout_sec`; False when it is absent."""
        route, part = self._find(key)
        return route is not None and route.space.pin(key.chunk_hash, part=part)

    def unpin(self, key: Any) -> bool:
        """Give back one pin of this process on the key; False when it has none. Others' pins stay."""
        route, _ = self._find(key)
        return route is not None and route.space.unpin(key.chunk_hash)

    def remove(self, key: Any, force: bool = True) -> bool:
        """Remove the chunk, all ranks' parts; False when it is absent.

        Bytes live on while they are held. With `force` this process's pins on it go too.
        """
        route, _ = self._find(key)
        if route is None or not route.space.remove(key.chunk_hash):
            return False
        while force and route.space.unpin(key.chunk_hash):
            pass
        return True

    def batched_remove(self, keys: Sequence[Any], force: bool = True) -> int:
        """`remove` of each; how many were there."""
        return sum(self.remove(key, force) for key in keys)

    # ---- listing --------------------------------------------------------------------------------------

    def get_keys(self) -> list[Any]:
        """This rank's keys (without metadata: all ranks') of this model, coldest first."""
        found: list[Any] = []
        for route in self._placement.mine():
            parts = self._placement.parts(route)
            chunks = list_chunks(self.cache, route.space._index)
            partly = [chunk for chunk, published in chunks.items() if published < route.space.parts]
            there = {part: dict(zip(partly, route.space.contains_many(partly, part=part), strict=True)) for part in parts}
            for chunk, published in chunks.items():
                mine = parts if published == route.space.parts else [part for part in parts if there[part][chunk]]
                found += route.keys(chunk, mine, self._placement.make)
        return found

    def clear(self) -> int:
        """Remove every chunk of this model that nobody holds or pins; how many tokens those were.

        Nothing, and 0, when `local_cpu` is off.
        """
        if not self.use_hot:
            return 0
        tokens = 0
        for route in self._placement.mine():
            before = self._tokens(route)
            route.space.clear()
            left = list_chunks(self.cache, route.space._index)
            tokens += sum(n for chunk, n in before.items() if chunk not in left)
        return tokens

    def _tokens(self, route: Route) -> dict[Any, int]:
        """Tokens of each chunk, by whichever part of it is there."""
        space = route.space
        missing = list(list_chunks(self.cache, space._index))
        tokens: dict[Any, int] = {}
        for part in range(space.parts):
            for start in range(0, len(missing), _LIST_BATCH):
                batch = missing[start : start + _LIST_BATCH]
                for chunk, obj in zip(batch, space.get_many(batch, part=part), strict=True):
                    if obj is not None:
                        tokens[chunk] = obj.get_num_tokens()
                        obj.release()
            missing = [chunk for chunk in missing if chunk not in tokens]
            if not missing:
                break
        return tokens

    def get_allocator_backend(self) -> SharedCPUBackend:
        """This one."""
        return self

    def close(self) -> None:
        """Send what is to be sent, and leave the segment, which stays. Doing it again does nothing."""
        if self.batched_msg_sender is not None:
            self.batched_msg_sender.close()
        self.memory_allocator.close()
