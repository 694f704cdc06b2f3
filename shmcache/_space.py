"""How many bytes of shared memory this process can still get: the file system's and the cgroup's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from ._names import SHM_FOLDER
from ._sizes import format_size
from .errors import OutOfSharedMemoryError

_UNLIMITED = 1 << 60


class Room(NamedTuple):
    """Free bytes, where they are limited, and what raises the limit."""

    free: int
    where: str
    remedy: str


def room() -> Room:
    """The narrowest limit."""
    fs = os.statvfs(SHM_FOLDER)
    limits = [Room(fs.f_bavail * fs.f_frsize, f"{SHM_FOLDER} has", "enlarge it (mount -o remount,size=...)")]
    limits += (Room(free, "the memory cgroup allows", "raise its memory limit") for free in _cgroup_limits())
    return min(limits)


def check_room(name: str, needed: int) -> None:
    """OutOfSharedMemoryError with both numbers when that many bytes cannot be had."""
    free, where, remedy = room()
    if needed > free:
        raise OutOfSharedMemoryError(
            f"segment {name!r} needs {needed} bytes ({format_size(needed)}), {where} {free} bytes free",
            hint=f"ask for a smaller capacity, remove unused segments, or {remedy}",
        )


def cgroup_allows(needed: int) -> bool:
    """Whether that many bytes more, and some for others, stay below the limits of the memory cgroup.

    Beyond them the kernel refuses nothing: it kills a process of the group.
    """
    return all(needed + needed // 8 <= free for free in _cgroup_limits())


def _cgroup_limits() -> Iterator[int]:
    """Bytes left in each memory cgroup above this process, v2 and v1. Nothing where none is visible.

    Shared memory and anonymous memory cannot be reclaimed; file cache can, so it does not count.
    """
    for line in _lines("/proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            root, limit_file, limit_key, used_keys = "/sys/fs/cgroup", "memory.max", None, ("anon", "shmem")
        elif "memory" in controllers.split(","):
            root, limit_file, limit_key = "/sys/fs/cgroup/memory", None, "hierarchical_memory_limit"
            used_keys = ("total_rss", "total_shmem")
        else:
            continue
        # Without a cgroup namespace the path is the host's and may not be visible: the root is then ours.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            folder = "/".join([root, *parts[:depth]])
            stat = dict(_pairs(f"{folder}/memory.stat"))
            text = stat.get(limit_key, "") if limit_key else next(iter(_lines(f"{folder}/{limit_file}")), "")
            if text.isdigit() and int(text) < _UNLIMITED:
                used = sum(int(stat.get(key, "0")) for key in used_keys)
                yield max(0, int(text) - used)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as f:
            return f.read().splitlines()
    except OSError:
        return []


def _pairs(path: str) -> Iterator[tuple[str, str]]:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if value.isdigit():
            yield key, value
