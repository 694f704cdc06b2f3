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
from ._backend_finding import BackendFinding
from ._backend_memory import BackendMemory
from ._core import U64, fast, ffi, lib
from ._objects import TensorMemoryObj
from ._order import list_chunks
from ._placement import Placement, Route
from ._requests import RequestKeys
from .messages import SegmentMessages
from .metrics import Lifespans, register
from .policies import SegmentPolicy
from .reservation import Reservation

__all__ = ["SharedCPUBackend"]

_log = logging.getLogger("shmcache")
_WAIT, _LEASE = 10, 300  # seconds, where the config has none
_ENDLESS = 1e9
_put = fast.put
_LIST_BATCH = 64  # holds taken at a time: others must find something to evict


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
        """Chunks of what `get_keys` lists; takes no lock."""
        return self._backend._placement.count()


class SharedCPUBackend(BackendMemory, BackendFinding):
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
        self._layouts = {}
        self._wait = float(getattr(config, "blocking_timeout_secs", _WAIT))  # not all of LMCache's versions have it
        self.batched_msg_sender: SegmentMessages | None = None
        self.memory_allocator = memory_allocator
        if memory_allocator is None:
            self.memory_allocator = self.initialize_allocator(config, metadata)
        try:
            self._set_up(config, metadata, lmcache_worker)
        except BaseException:  # nobody will be given what could be closed
            if memory_allocator is None:
                self.close()
            raise

    def _set_up(self, config: Any, metadata: Any, lmcache_worker: Any) -> None:
        """What lies on the allocator."""
        given = self.memory_allocator
        pool = getattr(given, "pool", None)
        if pool is None:
            raise TypeError(f"memory_allocator is {given!r}: it is one of shmcache's, not private and paged")
        self._pool = pool
        self._keeps_positions = self.memory_allocator.keeps_positions = self.layerwise and self.enable_blending
        one_copy = _sizing.one_copy(config, metadata)
        self._ranks = ranks = (0, 0) if metadata is None else _sizing.ranks_of_host(config, metadata)
        digest = "" if metadata is None else _sizing.kv_digest(config, metadata)
        seconds = float(getattr(config, "pin_timeout_sec", _LEASE))
        lease = None if seconds == 0 or seconds >= _ENDLESS else seconds
        self._placement = Placement(self._pool, metadata, self._num_layers(), one_copy, lease, ranks, digest)
        self._routes = self._placement.routes
        own = self._placement.own()
        self._space = own.space if own else self._pool.namespace("lmcache", 1)
        self._agree = bool(_sizing.extra_value(config, "shmcache.rank_agreement", self._agree_by_default()))
        self._requests = RequestKeys()
        self.lifespans = Lifespans()
        self.hot_cache = HotCache(self)
        self.cache_policy = SegmentPolicy(config.cache_policy, self._pool.cache, self._placement.keys_of)
        if lmcache_worker is not None and metadata is not None:
            self.batched_msg_sender = SegmentMessages(
                metadata, config, str(self), lmcache_worker, self.cache, self._placement.is_mine, self._whole_chunks,
                f"messages of {metadata.model_name}@{metadata.world_size}", **self.message_classes,
            )  # fmt: skip
        register(self)

    def _agree_by_default(self) -> bool:
        return False

    def _speaks_for_host(self) -> bool:
        """Whether this is the first rank of its host, which tells what all of them share."""
        return self.metadata is None or bool(self.metadata.worker_id == self._ranks[0])

    def _num_layers(self) -> int:
        explicit = _sizing.extra_value(self.config, "shmcache.num_layers", None)
        if explicit is not None:
            return int(explicit)
        if not self.layerwise or self.metadata is None:
            return 0
        return sum(int(shape[1]) for shape in _sizing.shapes_of(self.config, self.metadata)[0])

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

    # ---- storing -------------------------------------------------------------------------------------

    def exists_in_put_tasks(self, key: Any) -> bool:
        """False: puts are done when they return."""
        return False

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
            route = self._routes.get((type(key), key.model_name, key.world_size, key.dtype, key.tags))
            if route is None:
                try:
                    route = self._placement.make_way(key)
                except errors.OutOfSharedMemoryError as e:
                    _log.warning("not stored: %s", e)
                    return
            part = route.part(key) if route.layers else route.bases.get(key.worker_id, -1)
            if part < 0:
                raise ValueError(f"put: {key.to_string()} is of no rank of this host: ranks are {sorted(route.bases)}")
            chunk = key.chunk_hash
            a = route.cache._attachment
            rc = -1
            if a.checksum is None and not self._keeps_positions:
                rc = _put(a.at, route.index, chunk, part, None, memory_obj, a, route.space)
            if rc < 0:  # among others, for what was published before
                stored = self._put_unusual(route.space, chunk, memory_obj, part)
            else:
                stored = rc == 1
                if stored:
                    memory_obj._key = chunk
            if stored:
                if self.lmcache_metrics:
                    self.lifespans.met((chunk,))
                if on_complete_callback is not None:
                    self._call_back(on_complete_callback, key)
        except Exception as e:
            if not self._goes_on("submit_put_task", e):
                raise

    def _put_unusual(self, space: Any, chunk: Any, memory_obj: Any, part: int) -> bool:
        """What has to be looked at more closely, or copied first; whether it was newly stored."""
        ours = isinstance(memory_obj, TensorMemoryObj) and memory_obj._namespace is space and not memory_obj.published
        ours = ours and not memory_obj.is_narrowed
        if not ours and space.contains(chunk, part=part):
            return False
        obj = memory_obj if ours else self._adopted(memory_obj, space)
        if obj is None:
            return False
        try:
            if self._keeps_positions:
                obj.store_positions()
            stored: bool = space.put(chunk, obj, part=part)
            if stored:
                obj._key = chunk
        finally:
            if obj is not memory_obj:
                obj.release()
        return stored

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
            isinstance(obj, TensorMemoryObj)
            and obj._namespace is space
            and obj._holds
            and not obj.published
            and not obj.is_narrowed
            for _, obj in pairs
        ):
            return False
        if self._keeps_positions:
            for _, obj in pairs:
                obj.store_positions()
        hashes = [key.chunk_hash for key, _ in pairs]
        stored = space.put_many(hashes, [obj for _, obj in pairs], part=part)
        self.lifespans.met(hashes)
        for (key, obj), is_stored in zip(pairs, stored, strict=True):
            if is_stored:
                obj._key = key.chunk_hash
                if callback is not None:
                    self._call_back(callback, key)
        return True

    def reserve(self, key: Any, shapes: Any, dtypes: Any, fmt: Any = None) -> Reservation:
        """Become the one writer of a key's part, or learn who is: see `Namespace.reserve`.

        With MLA the part is the same for all ranks, so one of them writes and all read.
        """
        route = self._placement.make_way(key)
        part = route.part(key)
        if part < 0:
            raise ValueError(f"reserve: {key.to_string()} is of no rank of this host")
        layout = self._layout(shapes, dtypes, fmt)
        if layout is None:
            raise ValueError("reserve: a plain buffer cannot be stored under a key")
        return Reservation(route.space, key.chunk_hash, layout, part)

    # ---- listing --------------------------------------------------------------------------------------

    def get_keys(self) -> list[Any]:
        """This rank's keys (without metadata: all ranks') of this model, coldest first; of others, those met here."""
        found: list[Any] = []
        make = self._placement.make
        for route in self._placement.mine():
            parts = self._placement.parts(route)
            chunks = list_chunks(self.cache, route.space._index)
            whole = route.space.parts
            partly = [chunk for chunk, published in chunks.items() if published < whole]
            if not partly:
                found += route.keys(chunks, parts, make)
                continue
            there = {
                part: dict(zip(partly, route.space.contains_many(partly, part=part), strict=True)) for part in parts
            }
            for chunk, published in chunks.items():
                mine = parts if published == whole else [part for part in parts if there[part][chunk]]
                found += route.keys((chunk,), mine, make)
        return found

    def _whole_chunks(self) -> list[Any]:
        """Hashes of this model's complete chunks."""
        return [chunk for route in self._placement.mine() for chunk in route.space.keys()]

    def clear(self) -> int:
        """Remove every chunk that nobody holds or pins, of what `get_keys` lists; how many tokens those were.

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
        try:
            if self.batched_msg_sender is not None:
                self.batched_msg_sender.close()
        finally:
            self.memory_allocator.close()
