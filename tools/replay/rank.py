"""One process of the replay: LMCache's StorageManager on the CPU, with a shared or a private cache."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

MODEL = "SmolLM2-135M"
LAYERS, HEADS, HEAD_SIZE = 30, 3, 64  # of the demo's model
MLA_HIDDEN = 320  # a latent of the same proportion


@dataclass(frozen=True)
class Plan:
    """What all processes of a run share."""

    kind: str  # "tp": two ranks of one engine, "mla": the same with one copy of the KV, "replicas": two engines
    shared: bool
    segment: str
    capacity: int  # bytes of the host
    tokens: int  # of a chunk


def run(plan: Plan, rank: int, pipe: Connection) -> None:
    """Serve (verb, arguments) until "end"; answers, or the text of an error."""
    os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    logging.disable(logging.WARNING)
    try:
        one = Rank(plan, rank)
        pipe.send(("ready", None))
        while True:
            verb, *args = pipe.recv()
            pipe.send(("ok", getattr(one, verb)(*args)))
            if verb == "end":
                os._exit(0)
    except EOFError:
        os._exit(1)
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        os._exit(1)


class Rank:
    """The calls that an engine makes for one request."""

    def __init__(self, plan: Plan, rank: int) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.pin_monitor import PinMonitor
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        self._torch = torch
        self._key_class = CacheEngineKey
        self._dtype = torch.bfloat16
        self._world = 1 if plan.kind == "replicas" else 2
        self._worker = 0 if plan.kind == "replicas" else rank
        mla = plan.kind == "mla"
        self._key_worker = 0 if mla else self._worker
        heads = HEADS if plan.kind == "replicas" else -(-HEADS // 2)
        shape = (LAYERS, 1, plan.tokens, 1, MLA_HIDDEN) if mla else (LAYERS, 2, plan.tokens, heads, HEAD_SIZE)
        self.metadata = LMCacheMetadata(
            MODEL, self._world, self._world, self._worker, self._worker, self._dtype, shape, use_mla=mla,
            role="worker", chunk_size=plan.tokens,
        )  # fmt: skip
        settings: dict[str, Any] = {"chunk_size": plan.tokens, "local_cpu": True, "extra_config": {}}
        if plan.shared:
            settings |= {"max_local_cpu_size": 0, "storage_plugins": ["LocalCPUBackend"]}
            settings["extra_config"] = {
                "storage_plugin.LocalCPUBackend.module_path": "shmcache.integrations.lmcache",
                "storage_plugin.LocalCPUBackend.class_name": "ShmLocalCPUBackend",
                "shmcache.segment": plan.segment,
                "shmcache.capacity": plan.capacity,
            }
        else:
            settings |= {"max_local_cpu_size": plan.capacity / 2 / 2**30}
            settings["extra_config"] = {"save_only_first_rank": False}
        config = LMCacheEngineConfig.from_defaults(**settings)
        PinMonitor.GetOrCreate(config, self.metadata)
        self.manager = StorageManager(config, self.metadata, EventManager())
        self.backend = self.manager.storage_backends["LocalCPUBackend"]
        self._stamp = 0 if mla or plan.kind == "replicas" else rank
        self._shared = plan.shared

    def _keys(self, chunks: list[int]) -> list[Any]:
        return [self._key_class(MODEL, self._world, self._key_worker, chunk, self._dtype) for chunk in chunks]

    def lookup(self, chunks: list[int]) -> int:
        """How many leading chunks are there; they are pinned."""
        self._found = 0
        hits, mapping = self.manager.batched_contains(self._keys(chunks), pin=True)
        self.manager.touch_cache()
        self._pins = mapping
        return int(hits)

    def serve(self, chunks: list[int], hits: int) -> int:
        """Load the hits, checking head and tail of each; store the rest. How many were stored."""
        if hits:
            for chunk, obj in zip(chunks, self.manager.batched_get(self._keys(chunks[:hits])), strict=False):
                flat = obj.raw_tensor.view(self._torch.int64)
                if int(flat[0]) != chunk or int(flat[-1]) != self._stamp:
                    raise RuntimeError(f"chunk {chunk} has the bytes of {int(flat[0])}, {int(flat[-1])}")
                obj.ref_count_down()
        for location, keys in self._pins.items():
            self.manager.batched_unpin(keys, [location])
        stored = 0
        for chunk in chunks[hits:]:
            shapes, dtypes = self.metadata.get_shapes(), self.metadata.get_dtypes()
            obj = self.manager.allocate(shapes, dtypes, busy_loop=False)  # as LMCache's engine: one by one
            if obj is None:
                break
            flat = obj.raw_tensor.view(self._torch.int64)
            flat[0], flat[-1] = chunk, self._stamp
            self.manager.batched_put(self._keys([chunk]), [obj])
            stored += 1
        return stored

    def held(self) -> tuple[int, int]:
        """Chunks that this process can read, and bytes that its cache has in use."""
        if self._shared:
            stats = self.backend.cache.stats()
            return stats.counts.complete, stats.bytes.used
        pool = self.backend.memory_allocator.pin_allocator
        return len(self.backend.hot_cache), pool.total_allocated_size

    def sound(self) -> bool:
        """LMCache's own check of its memory."""
        return bool(self.manager.memcheck())

    def end(self) -> None:
        """Leave."""
        self.manager.close()
