"""Ways to a cache: open, attach, create; and the way out: unlink."""

from __future__ import annotations

from typing import Literal

from . import _segment
from ._auto import AUTO, Auto
from ._numa import NumaArgument
from ._request import Request
from .cache import SharedCache

__all__ = ["attach", "create", "open", "unlink"]


def open(
    name: str,
    *,
    capacity: int | str | Auto = AUTO,
    region_bytes: int | str | Auto = AUTO,
    align: int | str | Auto = AUTO,
    policy: str | Auto = AUTO,
    max_chunks: int | Auto = AUTO,
    max_attachments: int | Auto = AUTO,
    lifetime: str | Auto = AUTO,
    mode: int | Auto = AUTO,
    numa: NumaArgument | Auto = AUTO,
    hugepages: bool | Auto = AUTO,
    checksum: str | Auto = AUTO,
    pin: bool | Auto = AUTO,
    prefault: str | Auto = AUTO,
    on_incompatible: Literal["error", "replace"] = "error",
    timeout: float = 10.0,
    lock_timeout: float = 1.0,
    label: str | None = None,
    rank: int | None = None,
) -> SharedCache:
    """Attach to a segment, or create it when it is absent.

    Any number of processes may do so at once; exactly one creates.

    Parameters
    ----------
    name
        1 to 64 of `A-Z a-z 0-9 . _ -`, not starting with a dot.
    capacity
        payload bytes, an int or a str such as "8GiB"; needed to create. A multiple of `align`.
    region_bytes
        size of one region, at least 64 KiB; no object is larger. By default the capacity, at most 1 GiB.
        What is beyond a multiple of `align` is left out.
    align
        granule and alignment of objects, a power of two from 64 to 2 MiB; by default 4096.
    policy
        "lru" (default), "fifo", "mru" or "lfu", in any case.
    max_chunks
        size of the tables; by default one chunk per 64 KiB, at least 4,096.
    max_attachments
        by default 64.
    lifetime
        "persistent" (default) until `unlink`, or "ephemeral" until the last attachment leaves.
    mode
        permission bits of the files, exactly; by default 0o600.
    numa, hugepages
        where and how memory is placed; `stats()` says what was obtained.
    checksum
        "xxh3" or "crc32c": a put computes a checksum of the bytes and stores it beside them. `get(verify=True)`
        and `shmcache-inspect verify` compare it, in any process. "xxh3" is faster and longer. "none" (default):
        neither cost nor check.
    pin
        register the memory with CUDA in this process, region by region in the background, so that copies
        to and from devices are fast. It is only about speed: what is not pinned, or not yet, works too.
        By default it happens once this process uses CUDA through torch, which is looked for here, at the
        first tensor view of each dtype and in `wait_pinned`; torch is not imported and CUDA not started
        for it. True starts both, on the current device: select yours before. False: never. All handles
        of a process on one segment share it. `stats().pinning` says how far it got, or why it did not.
    prefault
        "background" (default), "wait" or "lazy".
    on_incompatible
        "replace": another format, a poisoned segment or a changed argument is replaced, with proof
        that nobody is attached. "error": it raises.
    timeout
        seconds for creation and attachment by others to finish.
    lock_timeout
        seconds that any later call waits for the segment's lock.
    label, rank
        shown to operators.

    Raises
    ------
    SegmentMismatchError
        it exists and an argument that was given disagrees.
    OutOfSharedMemoryError
        the file system cannot hold the capacity, or all attachments are in use.
    SegmentPermissionError
        it is somebody else's.
    LockTimeoutError
        somebody else is creating, attaching to or removing it, longer than `timeout`.
    """
    request = Request(
        name, capacity, region_bytes, align, policy, max_chunks, max_attachments, lifetime, mode, numa, hugepages,
        checksum, pin, prefault,
    )  # fmt: skip
    return SharedCache(
        request, how="open", on_incompatible=on_incompatible, timeout=timeout, lock_timeout=lock_timeout, label=label,
        rank=rank,
    )  # fmt: skip


def attach(
    name: str,
    *,
    capacity: int | str | Auto = AUTO,
    region_bytes: int | str | Auto = AUTO,
    align: int | str | Auto = AUTO,
    policy: str | Auto = AUTO,
    max_chunks: int | Auto = AUTO,
    max_attachments: int | Auto = AUTO,
    lifetime: str | Auto = AUTO,
    mode: int | Auto = AUTO,
    numa: NumaArgument | Auto = AUTO,
    hugepages: bool | Auto = AUTO,
    checksum: str | Auto = AUTO,
    pin: bool | Auto = AUTO,
    prefault: str | Auto = AUTO,
    timeout: float = 10.0,
    lock_timeout: float = 1.0,
    label: str | None = None,
    rank: int | None = None,
) -> SharedCache:
    """Attach to a segment that exists, as it is; SegmentNotFoundError when absent. See `open`.

    What is given of the segment's own parameters is only compared: SegmentMismatchError when it disagrees.
    """
    request = Request(
        name, capacity, region_bytes, align, policy, max_chunks, max_attachments, lifetime, mode, numa, hugepages,
        checksum, pin, prefault,
    )  # fmt: skip
    return SharedCache(request, how="attach", timeout=timeout, lock_timeout=lock_timeout, label=label, rank=rank)


def create(
    name: str,
    capacity: int | str,
    *,
    region_bytes: int | str | Auto = AUTO,
    align: int | str | Auto = AUTO,
    policy: str | Auto = AUTO,
    max_chunks: int | Auto = AUTO,
    max_attachments: int | Auto = AUTO,
    lifetime: str | Auto = AUTO,
    mode: int | Auto = AUTO,
    numa: NumaArgument | Auto = AUTO,
    hugepages: bool | Auto = AUTO,
    checksum: str | Auto = AUTO,
    pin: bool | Auto = AUTO,
    prefault: str | Auto = AUTO,
    timeout: float = 10.0,
    lock_timeout: float = 1.0,
    label: str | None = None,
    rank: int | None = None,
) -> SharedCache:
    """Create a segment; SegmentExistsError when there is one of this name. See `open`."""
    request = Request(
        name, capacity, region_bytes, align, policy, max_chunks, max_attachments, lifetime, mode, numa, hugepages,
        checksum, pin, prefault,
    )  # fmt: skip
    return SharedCache(request, how="create", timeout=timeout, lock_timeout=lock_timeout, label=label, rank=rank)


def unlink(name: str, *, force: bool = False) -> None:
    """Remove a segment. Processes that are attached keep its memory until they leave.

    Raises
    ------
    SegmentBusyError
        other processes are attached, and not `force`. Handles of this process do not count.
    SegmentNotFoundError
        there is none of this name.
    """
    _segment.unlink(name, force=force)
