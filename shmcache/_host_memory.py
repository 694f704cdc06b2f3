"""Private memory of this host for the allocators that bring their own: pageable, placed, or registered with CUDA."""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING

from ._commit import in_thread
from ._core import ffi, lib, log

if TYPE_CHECKING:
    import torch


def host_memory(size: int, *, node: int | None = None, hugepages: bool = False) -> torch.Tensor:
    """`size` bytes of zeros as a flat uint8 tensor, which keeps them.

    Parameters
    ----------
    node
        NUMA node whose memory is preferred; its pages are then touched before return.
    hugepages
        ask for transparent huge pages; what comes of it is the kernel's.
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
    if node is not None:
        _touch_on(memory, size, node)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _touch_on(memory: mmap.mmap, size: int, node: int) -> None:
    """The preference belongs to a thread, so one touches all pages and goes."""
    address = ffi.cast("void *", ffi.cast("uintptr_t", ffi.from_buffer(memory)))

    def work() -> None:
        lib.shmc_numa_prefer(node)
        lib.shmc_populate(address, size)

    thread: threading.Thread = in_thread(work, "place")
    thread.join()
