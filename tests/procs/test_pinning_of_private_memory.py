"""Allocators that bring their own memory register it with CUDA, and end that before it goes."""

from __future__ import annotations

import gc
import logging
import sys

import pytest
import torch
from standin import StandIn

from shmcache import _cudart
from shmcache.allocators import MixedMemoryAllocator, PagedCpuGpuMemoryAllocator, PinMemoryAllocator

SIZE = 1 << 20


def test_memory_is_registered_once_and_until_its_last_view_is_gone(cuda: StandIn) -> None:
    allocator = PinMemoryAllocator(SIZE)
    assert [size for _, size in cuda.registered()] == [SIZE]
    obj = allocator.allocate(torch.Size([4, 2]), torch.half)
    assert obj is not None
    view = obj.tensor
    obj.ref_count_down()
    allocator.close()
    del allocator, obj
    gc.collect()
    assert not cuda.calls("unregister"), "a view is left"
    del view
    gc.collect()
    cuda.assert_all_unregistered()


@pytest.mark.parametrize("kind", ["mixed", "paged"])
def test_each_allocator_of_pinned_memory_does_so(cuda: StandIn, kind: str) -> None:
    if kind == "mixed":
        allocator: object = MixedMemoryAllocator(SIZE)
    else:
        allocator = paged = PagedCpuGpuMemoryAllocator()
        paged.init_cpu_memory_allocator(SIZE, [torch.Size([256, 2])], [torch.half])
        del paged
    assert [size for _, size in cuda.registered()] == [SIZE]
    del allocator
    gc.collect()
    cuda.assert_all_unregistered()


def test_a_failure_leaves_pageable_memory_and_a_line_in_the_log(
    cuda: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.fail(1, 2)
    with caplog.at_level(logging.WARNING, "shmcache"):
        allocator = PinMemoryAllocator(SIZE)
    assert sum("pinning" in r.getMessage() for r in caplog.records) == 1
    obj = allocator.allocate(torch.Size([4, 2]), torch.half)
    assert obj is not None and obj.tensor.fill_(1).sum() == 8
    del allocator, obj
    gc.collect()
    assert not cuda.calls("unregister")


@pytest.mark.parametrize("at", ["find", "register", "unregister"])
def test_whatever_the_runtime_raises_is_logged_at_most(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    class Broken:
        def register(self, _address: int, _size: int) -> int:
            if at == "register":
                raise AttributeError("no such symbol")
            return 0

        def unregister(self, _address: int) -> int:
            raise AttributeError("unloaded")

    def find(_start: bool) -> Broken:
        if at == "find":
            raise AssertionError("Torch not compiled with CUDA enabled")
        return Broken()

    raised: list[object] = []
    monkeypatch.setattr(_cudart, "find", find)
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    allocator = PinMemoryAllocator(SIZE)
    assert allocator.allocate(torch.Size([4, 2]), torch.half) is not None
    del allocator
    gc.collect()
    assert not raised
