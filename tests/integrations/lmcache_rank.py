"""One rank with LMCache's real StorageManager, told what to do by lines of JSON on stdin.

python lmcache_rank.py SEGMENT RANK RANKS MLA   ->   {"ready": ...}, then one answer to each line
"""

from __future__ import annotations

import json
import os
import sys

SHAPE = (4, 2, 256, 2, 16)  # layers, K and V, tokens, heads, head size

out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # LMCache prints; answers must stay alone


def main() -> None:
    segment, rank, ranks, mla = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "mla"
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.event_manager import EventManager
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=256, local_cpu=True, max_local_cpu_size=0, storage_plugins=["LocalCPUBackend"],
        extra_config={
            "storage_plugin.LocalCPUBackend.module_path": "shmcache.integrations.lmcache",
            "storage_plugin.LocalCPUBackend.class_name": "ShmLocalCPUBackend",
            "shmcache.segment": segment,
            "shmcache.capacity": "32MiB",
        },
    )  # fmt: skip
    shape = (SHAPE[0], 1, *SHAPE[2:]) if mla else SHAPE
    metadata = LMCacheMetadata(
        "model", ranks, ranks, rank, rank, torch.bfloat16, shape, use_mla=mla, role="worker", chunk_size=256
    )
    manager = StorageManager(config, metadata, EventManager())
    backend = manager.storage_backends["LocalCPUBackend"]

    def key(chunk: int) -> CacheEngineKey:
        return CacheEngineKey("model", ranks, 0 if mla else rank, chunk, torch.bfloat16)

    def put(chunks: list[int], values: list[int]) -> int:
        objs = manager.batched_allocate(metadata.get_shapes(), metadata.get_dtypes(), len(chunks), busy_loop=False)
        if objs is None:
            return 0
        for obj, value in zip(objs, values, strict=True):
            obj.tensor.fill_(value)
        manager.batched_put([key(c) for c in chunks], objs)
        return len(objs)

    def get(chunks: list[int]) -> list[object]:
        found = []
        for obj in manager.batched_get([key(c) for c in chunks], location="LocalCPUBackend"):
            if obj is None:
                found.append(None)
                continue
            flat = obj.tensor.flatten()
            assert obj.metadata.fmt.name == "KV_2LTD" and type(obj.metadata.fmt).__module__.startswith("lmcache")
            found.append([int(flat[0]), int(flat[-1]), list(obj.tensor.shape)])
            obj.ref_count_down()
        return found

    def lookup(chunks: list[int]) -> int:
        hits, mapping = manager.batched_contains([key(c) for c in chunks], pin=True)
        manager.touch_cache()
        for location, keys in mapping.items():
            manager.batched_unpin(keys, [location])
        return hits

    def wait_inside_a_put(chunks: list[int]) -> None:
        (obj,) = manager.batched_allocate(metadata.get_shapes(), metadata.get_dtypes(), 1)
        obj.tensor.fill_(9)
        backend.contains(key(chunks[0]), pin=True)
        tell("holding")
        sys.stdin.readline()

    def tell(answer: object) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    verbs = {
        "put": put, "get": get, "lookup": lookup, "hold": wait_inside_a_put,
        "keys": lambda: [k.chunk_hash for k in backend.get_keys()],
        "key_types": lambda: sorted({type(k).__module__ for k in backend.get_keys()}),
        "memcheck": manager.memcheck,
        "stats": lambda: {"used": backend.cache.stats().bytes.used, "holds": backend.cache.stats().counts.holds},
        "clear": lambda: backend.clear(),
        "remove": lambda chunk: manager.remove(key(chunk)),
        "budget": backend.calculate_chunk_budget,
    }  # fmt: skip
    tell({"class": type(backend).__name__, "name": str(backend), "ranks_agree": backend._agree})
    for line in sys.stdin:
        verb, *args = json.loads(line)
        if verb == "end":
            break
        tell(verbs[verb](*args))
    manager.close()
    tell("closed")
    out.flush()
    os._exit(0)


main()
