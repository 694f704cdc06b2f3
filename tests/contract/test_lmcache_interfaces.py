"""What LMCache's code may call on objects, allocators and backends is there, with the same parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lmcache.v1.memory_management", reason="LMCache is not installed")

from contract_kits import modules

from shmcache import allocators
from shmcache.backend import SharedCPUBackend


def public(cls: type) -> dict[str, Any]:
    return {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}


def parameters(call: Callable[..., Any]) -> list[str]:
    """Names of the parameters, without `self`."""
    return [name for name in inspect.signature(call).parameters if name != "self"]


def lacks(theirs: type, ours: type, but: frozenset[str] = frozenset()) -> list[str]:
    """What one cannot call on ours as on theirs."""
    found = []
    for name, member in public(theirs).items():
        if name in but:
            continue
        mine = getattr(ours, name, None)
        if mine is None and not hasattr(ours, name):
            found.append(name)
        elif callable(member) and callable(mine):
            wanted = parameters(member)
            there = parameters(mine)
            if there[: len(wanted)] != wanted:
                found.append(f"{name}({', '.join(there)}), theirs ({', '.join(wanted)})")
    return found


def test_objects_of_the_plug_in_have_all_that_lmcaches_have() -> None:
    from lmcache.v1.memory_management import MemoryObj

    from shmcache.integrations.lmcache import ShmMemoryObj

    assert issubclass(ShmMemoryObj, MemoryObj)
    assert lacks(MemoryObj, ShmMemoryObj) == []


def test_our_objects_have_all_that_lmcaches_have() -> None:
    from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryObj

    assert lacks(MemoryObj, allocators.TensorMemoryObj) == []
    assert lacks(MemoryObj, allocators.BytesBufferMemoryObj) == []
    assert lacks(BytesBufferMemoryObj, allocators.BytesBufferMemoryObj) == []


@pytest.mark.parametrize("name", ["Tensor", "Host", "Pin", "GPU", "Mixed", "Buffer", "PagedTensor", "PagedCpuGpu"])
def test_our_allocators_have_all_that_lmcaches_have(name: str) -> None:
    from lmcache.v1.memory_management import MemoryAllocatorInterface

    ours, theirs = getattr(modules("ours"), name), getattr(modules("lmcache"), name)
    assert lacks(MemoryAllocatorInterface, ours) == []
    assert lacks(theirs, ours) == []


@pytest.mark.parametrize("plugin", [False, True], ids=["ours", "plug-in"])
def test_our_backend_has_all_that_lmcaches_has(plugin: bool) -> None:
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    from shmcache.integrations.lmcache import ShmLocalCPUBackend

    never = frozenset(("get_non_blocking", "async_batched_submit_put_task"))  # LMCache's raise NotImplementedError
    assert lacks(LocalCPUBackend, ShmLocalCPUBackend if plugin else SharedCPUBackend, never) == []


def test_the_plug_in_is_found_under_the_name_of_the_first_recipe_too() -> None:
    from shmcache import lmcache_backend
    from shmcache.integrations.lmcache import ShmLocalCPUBackend

    assert lmcache_backend.ShmLocalCPUBackend is ShmLocalCPUBackend


def test_the_keys_and_senders_have_all_that_lmcaches_have() -> None:
    ours, theirs = modules("ours"), modules("lmcache")
    assert lacks(theirs.Key, ours.Key) == [] and lacks(theirs.LayerKey, ours.LayerKey) == []
    assert lacks(theirs.Sender, ours.Sender) == []
    assert lacks(theirs.AddressManager, ours.AddressManager) == []
    assert lacks(theirs.Metadata, ours.Metadata) == []


def test_what_only_the_multiprocess_mode_asks_of_objects() -> None:
    allocator = allocators.MixedMemoryAllocator(1 << 20)
    for obj in (
        allocator.allocate((100,), "uint8", allocators.MemoryFormat.KV_2LTD),
        allocator.allocate((100,), None, allocators.MemoryFormat.BINARY_BUFFER),
    ):
        obj.set_used_size(10)
        assert obj.get_size() == 100 == obj.shm_byte_length and obj.shm_offset == 0
        assert obj.get_l1_manager() is None
        obj.set_l1_manager(3)
        obj.set_l1_manager(3)
        with pytest.raises(ValueError):
            obj.set_l1_manager(4)
        obj.reset_l1_manager()
        assert obj.get_l1_manager() is None
    with pytest.raises(ValueError):
        allocator.allocate((100,), "uint8", allocators.MemoryFormat.KV_2LTD).set_used_size(5000)
