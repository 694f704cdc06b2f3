"""Private memory of this host for the allocators that bring their own: pageable, placed, or registered with CUDA."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

from . import _cudart
from ._commit import aside
from ._core import ffi, lib, log

if TYPE_CHECKING:
    import torch


def host_memory(size: int, *, node: int | None = None, hugepages: bool = False, pin: bool = False) -> torch.Tensor:
    """`size` bytes of zeros as a flat uint8 tensor, which keeps them.

    Parameters
    ----------
    node
        NUMA node whose memory is preferred; its pages are then touched before return.
    hugepages
        ask for transparent huge pages; what comes of it is the kernel's.
    pin
        register it with CUDA. Where that cannot be it stays pageable, which is logged.
    """
    import torch

    if size <= 0:
        raise ValueError(f"an arena of {size} bytes: it takes at least 1")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hugepages:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as e:
            log.warning("no huge pages for %d bytes: %s", size, e.strerror)
    address = int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))
    if node is not None:
        _touch_on(address, size, node)
    owner = _Owner(memory, address, _register(address, size) if pin else None)
    # Whatever holds the buffer holds the memory, and the registration ends before it.
    return torch.frombuffer(
        ffi.buffer(ffi.gc(ffi.cast("uint8_t *", address), owner), size), dtype=torch.uint8
    )  # fmt: skip


def _touch_on(address: int, size: int, node: int) -> None:
    """The preference belongs to a thread, so one touches all pages and goes."""

    def work() -> None:
        lib.shmc_numa_prefer(node)
        lib.shmc_populate(ffi.cast("void *", address), size)

    aside(work, "place")


def _register(address: int, size: int) -> Any:
    """The runtime that registered it; None, logged, when none did."""
    try:
        runtime = _cudart.find(True)
        if runtime is None:
            log.info("no CUDA device in this process: %d bytes stay pageable", size)
            return None
        code = runtime.register(address, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        why = _cudart.describe(code) if code else ""
    except Exception as e:  # of torch, whatever its version raises
        why = str(e)
    if why:
        log.warning("pinning %d bytes failed: %s; copies from and to them are pageable", size, why)
        return None
    return runtime


class _Owner:
    """Keeps the memory, and ends its registration when the last view is gone."""

    def __init__(self, memory: mmap.mmap, address: int, runtime: Any) -> None:
        self._memory = memory
        self._address = address
        self._runtime = runtime
        self._pid = os.getpid()

    def __call__(self, _pointer: Any) -> None:
        """Never raises: at the end of a process CUDA may be gone already."""
        if self._runtime is None or os.getpid() != self._pid:
            return
        try:
            self._runtime.unregister(self._address)
        except Exception as e:
            log.debug("unregistering %d bytes from CUDA: %s", len(self._memory), e)
