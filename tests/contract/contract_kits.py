"""The same objects by two makers: ours and LMCache's. A promise is asserted once, for all kits.

private    our backend over private memory
segment    our backend over a segment
borrowed   our backend with LMCache's config, metadata and keys
plugin     the plug-in, as LMCache's loader makes it
lmcache    LMCache's own backend
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import shmcache
from shmcache import allocators, config, keys
from shmcache.backend import SharedCPUBackend

HAS_LMCACHE = importlib.util.find_spec("lmcache") is not None
MIB = 1 << 20
SHAPE = torch.Size((2, 16, 8, 128))
BF16 = torch.bfloat16
BYTES = SHAPE.numel() * 2  # of an object: 64 KiB


class Sink:
    """A worker that keeps what it is sent. `fail`: so many messages are refused first."""

    def __init__(self, fail: int = 0) -> None:
        self.messages: list[Any] = []
        self.refused: list[Any] = []
        self._fail = fail
        self._changed = threading.Condition()

    def put_msg(self, message: Any) -> None:
        with self._changed:
            if self._fail:
                self._fail -= 1
                self.refused.append(message)
                raise ConnectionError("the sink is down")
            self.messages.append(message)
            self._changed.notify_all()

    @property
    def operations(self) -> list[Any]:
        return [op for message in self.messages for op in message.operations]

    def story(self) -> list[tuple[str, Any]]:
        return [(op.op_type.name, op.key) for op in self.operations]

    def wait(self, operations: int, timeout: float = 10.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.operations) >= operations, timeout)


class Kit:
    """Makes configs, metadata, keys and backends of one kind, and closes what it made."""

    ours = True

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self._backends: list[Any] = []

    def config(self, **settings: Any) -> Any:
        return config.EngineConfig(**{"lmcache_instance_id": "test_instance", **settings})

    def metadata(self, **fields: Any) -> Any:
        return config.EngineMetadata(**{**_METADATA, **fields})

    def key(self, chunk: Any, worker: int = 0, **fields: Any) -> Any:
        return self.key_class(**{**_KEY, "chunk_hash": chunk, "worker_id": worker, **fields})

    @property
    def key_class(self) -> Any:
        return keys.CacheEngineKey

    @property
    def formats(self) -> Any:
        return allocators.MemoryFormat

    def allocator(self, size: int, **options: Any) -> Any:
        return allocators.MixedMemoryAllocator(size, **options)

    def backend(
        self, settings: dict[str, Any] | None = None, *, metadata: Any = None, worker: Any = None, size: int = MIB,
        allocator: Any = None,
    ) -> Any:  # fmt: skip
        """A backend over `size` bytes."""
        cfg = self.config(**(settings or {}))
        made = self._make(cfg, metadata, worker, allocator or self.allocator(size))
        self._backends.append(made)
        return made

    def _make(self, cfg: Any, metadata: Any, worker: Any, allocator: Any) -> Any:
        return SharedCPUBackend(cfg, metadata, "cpu", worker, allocator)

    def obj(self, backend: Any, value: float = 0.0, shape: torch.Size = SHAPE, fmt: str = "KV_T2D") -> Any:
        """A new object full of `value`."""
        found = backend.allocate(shape, BF16, self.formats[fmt], busy_loop=False)
        assert found is not None
        found.tensor.fill_(value)
        return found

    def fill(self, backend: Any, chunks: list[Any], *, keep: bool = False, **fields: Any) -> list[Any]:
        """Puts chunks; the cache's reference is the only one unless `keep`."""
        objs = []
        for chunk in chunks:
            objs.append(self.obj(backend, float(chunk)))
            backend.submit_put_task(self.key(chunk, **fields), objs[-1])
        if not keep:
            for obj in objs:
                obj.ref_count_down()
        return objs

    def close_now(self, backend: Any) -> None:
        """Not again at the end: LMCache's sender waits for ever when it is closed twice."""
        self._backends.remove(backend)
        backend.close()

    def close(self) -> None:
        for backend in self._backends:
            backend.close()


class SegmentKit(Kit):
    """Over a segment of the kit's name."""

    def allocator(self, size: int, **options: Any) -> Any:
        if any(s.name == self.name for s in shmcache.segments()):
            return super().allocator(size, cache=shmcache.attach(self.name), **options)
        return super().allocator(size, shm_name=self.name, **options)

    def close(self) -> None:
        super().close()
        if any(s.name == self.name for s in shmcache.segments()):
            shmcache.unlink(self.name, force=True)


class BorrowedKit(Kit):
    """LMCache's config, metadata and keys."""

    def config(self, **settings: Any) -> Any:
        from lmcache.v1.config import LMCacheEngineConfig

        return LMCacheEngineConfig.from_defaults(**{"lmcache_instance_id": "test_instance", **settings})

    def metadata(self, **fields: Any) -> Any:
        from lmcache.v1.metadata import LMCacheMetadata

        return LMCacheMetadata(**{**_METADATA, **fields})

    @property
    def key_class(self) -> Any:
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey

    @property
    def formats(self) -> Any:
        from lmcache.v1.memory_management import MemoryFormat

        return MemoryFormat


class PluginKit(BorrowedKit, SegmentKit):
    """The class that LMCache loads."""

    def allocator(self, size: int, **options: Any) -> Any:
        from shmcache.integrations.lmcache import ShmLocalCPUBackend

        return SegmentKit.allocator(self, size, object_class=ShmLocalCPUBackend.object_class, **options)

    def _make(self, cfg: Any, metadata: Any, worker: Any, allocator: Any) -> Any:
        from shmcache.integrations.lmcache import ShmLocalCPUBackend

        return ShmLocalCPUBackend(cfg, metadata, "cpu", worker, allocator)


class LMCacheKit(BorrowedKit):
    """Everything LMCache's."""

    ours = False

    def allocator(self, size: int, **options: Any) -> Any:
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator

        return MixedMemoryAllocator(size, **options)

    def _make(self, cfg: Any, metadata: Any, worker: Any, allocator: Any) -> Any:
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        return LocalCPUBackend(cfg, metadata, "cpu", worker, allocator)


KITS: dict[str, type[Kit]] = {
    "private": Kit, "segment": SegmentKit, "borrowed": BorrowedKit, "plugin": PluginKit, "lmcache": LMCacheKit,
}  # fmt: skip
NEED_LMCACHE = frozenset(("borrowed", "plugin", "lmcache"))

_KEY = {"model_name": "test_model", "world_size": 3, "dtype": BF16}
_METADATA: dict[str, Any] = {
    "model_name": "test_model", "world_size": 3, "local_world_size": 3, "worker_id": 0, "local_worker_id": 0,
    "kv_dtype": BF16, "kv_shape": (4, 2, 256, 8, 128),
}  # fmt: skip


def modules(side: str) -> Any:
    """The allocators, policies, senders and detectors of one maker, under common names."""
    return _ours() if side == "ours" else _theirs()


def _ours() -> Any:
    from shmcache import _sizing, messages, policies

    return SimpleNamespace(
        ours=True, MemoryFormat=allocators.MemoryFormat, AddressManager=allocators.AddressManager,
        Tensor=allocators.TensorMemoryAllocator, Host=allocators.HostMemoryAllocator,
        Pin=allocators.PinMemoryAllocator, GPU=allocators.GPUMemoryAllocator,
        Mixed=allocators.MixedMemoryAllocator, Buffer=allocators.BufferAllocator,
        PagedTensor=allocators.PagedTensorMemoryAllocator, PagedCpuGpu=allocators.PagedCpuGpuMemoryAllocator,
        BytesObj=allocators.BytesBufferMemoryObj, Metadata=allocators.MemoryObjMetadata,
        Sender=messages.BatchedMessageSender, OpType=messages.OpType, Message=messages.BatchedKVOperationMsg,
        available=_sizing.available_memory_gib, numa=_sizing.numa_mapping, NUMAMapping=_sizing.NUMAMapping,
        check_policy=policies.check_policy, config=config.EngineConfig, keys=keys, parse=keys.parse_cache_key,
        Key=keys.CacheEngineKey, LayerKey=keys.LayerCacheEngineKey, kit=Kit,
    )  # fmt: skip


def _theirs() -> Any:
    from lmcache import utils
    from lmcache.v1 import memory_management as mm
    from lmcache.v1 import system_detection
    from lmcache.v1.cache_controller import message
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_allocators import (
        gpu_memory_allocator,
        host_memory_allocator,
        mixed_memory_allocator,
        paged_cpu_gpu_memory_allocator,
        paged_tensor_memory_allocator,
        pin_memory_allocator,
        tensor_memory_allocator,
    )
    from lmcache.v1.memory_allocators.buffer_allocator import BufferAllocator
    from lmcache.v1.storage_backend.batched_message_sender import BatchedMessageSender
    from lmcache.v1.storage_backend.cache_policy import get_cache_policy

    return SimpleNamespace(
        ours=False, MemoryFormat=mm.MemoryFormat, AddressManager=mm.AddressManager,
        Tensor=tensor_memory_allocator.TensorMemoryAllocator, Host=host_memory_allocator.HostMemoryAllocator,
        Pin=pin_memory_allocator.PinMemoryAllocator, GPU=gpu_memory_allocator.GPUMemoryAllocator,
        Mixed=mixed_memory_allocator.MixedMemoryAllocator, Buffer=BufferAllocator,
        PagedTensor=paged_tensor_memory_allocator.PagedTensorMemoryAllocator,
        PagedCpuGpu=paged_cpu_gpu_memory_allocator.PagedCpuGpuMemoryAllocator,
        BytesObj=mm.BytesBufferMemoryObj, Metadata=mm.MemoryObjMetadata, Sender=BatchedMessageSender,
        OpType=message.OpType, Message=message.BatchedKVOperationMsg,
        available=system_detection.SystemMemoryDetector.get_available_memory_gb,
        numa=system_detection.NUMADetector.get_numa_mapping, NUMAMapping=system_detection.NUMAMapping,
        check_policy=get_cache_policy, config=LMCacheEngineConfig, keys=utils, parse=utils.parse_cache_key,
        Key=utils.CacheEngineKey, LayerKey=utils.LayerCacheEngineKey, kit=LMCacheKit,
    )  # fmt: skip


def eventually(true: Callable[[], object], timeout: float = 10.0) -> bool:
    """Whether something becomes true before the deadline."""
    end = time.monotonic() + timeout
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def in_threads(*work: Callable[[], object], timeout: float = 30.0) -> list[BaseException]:
    """Runs each in a thread of its own, all at once; what they raised."""
    raised: list[BaseException] = []
    together = threading.Barrier(len(work))

    def run(one: Callable[[], object]) -> None:
        try:
            together.wait(timeout)
            one()
        except BaseException as e:
            raised.append(e)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"not done within {timeout} s"
    return raised
