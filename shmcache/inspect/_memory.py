"""The memory of a segment: what its regions say they got, and what their files take."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from .._core import lib
from .._names import path_of, region_name
from ._reader import Reader

_BLOCK = 512  # unit of st_blocks


def lost_regions(reader: Reader) -> list[str]:
    """Files that are not there, or not those the segment was made with."""
    lost = []
    for i, region in enumerate(reader.regions()):
        path = path_of(region_name(reader.name, reader.control.instance, i))
        try:
            fine = os.lstat(path).st_ino == region.inode
        except OSError:
            fine = False
        if not fine:
            lost.append(path)
    return lost


def resident(reader: Reader) -> int:
    """Bytes of payload that take memory now."""
    total = 0
    for i in range(reader.geometry.n_regions):
        with contextlib.suppress(OSError):
            total += os.lstat(path_of(region_name(reader.name, reader.control.instance, i))).st_blocks * _BLOCK
    return total


def region_summary(reader: Reader) -> dict[str, Any]:
    """What was obtained, by region: state, huge pages, nodes (none without a policy)."""
    from .._regions import FLAG_HUGE, FLAG_PARTLY_HUGE

    out: dict[str, Any] = {
        "regions": 0,
        "ready": 0,
        "committing": 0,
        "huge_bytes": 0,
        "partly_huge_bytes": 0,
        "nodes": {},
    }
    for r in reader.regions():
        out["regions"] += 1
        if r.state == lib.SHMC_R_COMMITTING:
            out["committing"] += 1
        if r.state != lib.SHMC_R_READY:
            continue
        out["ready"] += 1
        out["huge_bytes"] += int(r.bytes) if r.flags & FLAG_HUGE else 0
        out["partly_huge_bytes"] += int(r.bytes) if r.flags & FLAG_PARTLY_HUGE else 0
        if reader.geometry.numa_node_mask:
            node = str(int(r.node))
            out["nodes"][node] = out["nodes"].get(node, 0) + int(r.bytes)
    return out
