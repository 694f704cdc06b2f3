"""Listing keys, coldest to hottest, from records that C copied in slices.

No lock is held over the whole: the copy is consistent record by record. When nothing moved meanwhile,
the policy's own links give the order. Otherwise stamps do, which say when a chunk was last moved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._core import NIL, U32, ffi, lib
from ._keys import BYTES_TYPE, INT_TYPE, Key, decode, encode

if TYPE_CHECKING:
    import numpy as np

    from .cache import SharedCache

_PARKED = 2  # enum chunk_flag in native/core/layout.h
_SLACK = 1024


def _record_type() -> np.dtype[Any]:
    import numpy as np

    words = ["chunk", "gen", "next", "ns", "published", "held", "klen", "ktype", "flags", "spare"]
    dtype = np.dtype([("stamp", "u8"), *((word, "u4") for word in words), ("key", "u1", lib.SHMC_KEY_MAX)])
    if dtype.itemsize != ffi.sizeof("shmc_key_record"):
        raise ImportError("shmc_key_record is not what _order.py expects")
    return dtype


def _copy_records(cache: SharedCache) -> tuple[Any, bool]:
    """Records of all linked chunks, and whether no chunk came or went during the copy."""
    import numpy as np

    dtype = _record_type()
    before = cache._raw_stats()
    pieces = []
    cursor, n = ffi.new(U32), ffi.new(U32)
    most = int(cache._attached("keys").mapping.geometry.max_chunks)  # a damaged count is no reason for 240 GiB
    room = min(int(before.chunks), most) + _SLACK
    while True:
        records = np.empty(room, dtype)
        a = cache._attachment
        rc = lib.shmc_scan_keys(a.handle, cursor, NIL, ffi.from_buffer("shmc_key_record *", records), room, n)
        if rc < 0:
            a.recover(rc, "keys")
            continue
        pieces.append(records[: n[0]])
        if rc == 0:
            break
        room = _SLACK * 16
    after = cache._raw_stats()
    quiet = bool(before.exact and after.exact and before.events == after.events)
    return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)), quiet


def _cold_to_hot(records: Any) -> Any:
    """Row numbers in policy order."""
    import numpy as np

    is_parked = records["flags"] & _PARKED != 0
    rows = np.flatnonzero(~is_parked)
    rows = rows[np.argsort(records["stamp"][rows], kind="stable")]
    if len(rows):
        rows = _by_links(records, rows)
    # parked ones come back to the place that their stamp gives them
    both = np.concatenate([rows, np.flatnonzero(is_parked)])
    return both[np.argsort(records["stamp"][both], kind="stable")]


def _by_links(records: Any, rows: Any) -> Any:
    """`rows`, which are sorted by stamp, in the order of the links where those are whole."""
    import numpy as np

    chunk = records["chunk"].astype(np.int64)
    row_of = np.full(int(chunk.max()) + 2, -1, np.int64)
    row_of[chunk[rows]] = rows
    link = records["next"].astype(np.int64)
    link[link >= len(row_of)] = len(row_of) - 1  # NIL, and what is not in the copy
    successor = row_of[link]
    if bool((successor[rows[:-1]] == rows[1:]).all()):
        return rows  # the usual case: stamps and links agree

    has_predecessor = np.zeros(len(records), bool)
    has_predecessor[successor[rows][successor[rows] >= 0]] = True
    heads = rows[~has_predecessor[rows]]  # one for each level, in order of their stamps
    next_row = successor.tolist()
    order: list[int] = []
    seen = bytearray(len(records))
    for head in heads.tolist():
        at = head
        while at >= 0 and not seen[at]:
            seen[at] = 1
            order.append(at)
            at = next_row[at]
    walked = np.array(order, np.int64)
    levels = len(np.unique(records["stamp"][rows] >> np.uint64(48)))
    if len(order) == len(rows) and len(heads) == levels:
        return walked
    missing = np.array([row for row in rows.tolist() if not seen[row]], np.int64)
    both = np.concatenate([walked, missing])
    return both[np.argsort(records["stamp"][both], kind="stable")]


def list_keys(cache: SharedCache, namespace: int, published: int) -> list[Key]:
    """Keys of chunks of a namespace with at least so many published parts, coldest to hottest."""
    return list(list_chunks(cache, namespace, published))


def list_chunks(cache: SharedCache, namespace: int, published: int = 1) -> dict[Key, int]:
    """The same with how many parts are published."""
    import numpy as np

    records, quiet = _copy_records(cache)
    order = _cold_to_hot(records)
    found = records[order]
    found = found[(found["ns"] == namespace) & (found["published"] >= published)]
    if not len(found):
        return {}
    keys: list[Key]
    klen = int(found["klen"][0])
    if klen and bool((found["klen"] == klen).all() and (found["ktype"] == BYTES_TYPE).all()):
        keys = np.ascontiguousarray(found["key"][:, :klen]).view(f"V{klen}").ravel().tolist()
    elif klen == 8 and bool((found["klen"] == 8).all() and (found["ktype"] == INT_TYPE).all()):
        keys = np.ascontiguousarray(found["key"][:, :8]).view(">i8").ravel().tolist()
    else:
        rows = zip(found["ktype"].tolist(), found["klen"].tolist(), found["key"], strict=True)
        keys = [decode(kind, row[:size].tobytes()) for kind, size, row in rows]
    counts = found["published"].tolist()
    if not quiet:  # a key that was removed and put again may have been met twice: the hotter one counts
        hottest_first: dict[Key, int] = {}
        for key, count in zip(reversed(keys), reversed(counts), strict=True):
            hottest_first.setdefault(key, count)
        return dict(reversed(hottest_first.items()))
    return dict(zip(keys, counts, strict=True))


def next_victims(cache: SharedCache, n: int, hottest_first: bool) -> list[tuple[int, Key]]:
    """Namespace index and key of the chunks that would be evicted next: nobody holds or pins them."""
    records, _ = _copy_records(cache)
    found = records[_cold_to_hot(records)]
    found = found[found["held"] == 0]
    if hottest_first:
        found = found[::-1]
    return [
        (int(row["ns"]), decode(int(row["ktype"]), row["key"][: row["klen"]].tobytes()))
        for row in found[: max(0, n)]
    ]  # fmt: skip


def all_chunks(cache: SharedCache) -> list[tuple[int, int, Key]]:
    """All chunks as (index of the namespace, published parts, key), coldest to hottest over all namespaces."""
    records, _ = _copy_records(cache)
    found = records[_cold_to_hot(records)]
    names = ("ns", "published", "ktype", "klen")
    rows = zip(*(found[name].tolist() for name in names), found["key"], strict=True)
    chunks = [(ns, published, decode(kind, raw[:size].tobytes())) for ns, published, kind, size, raw in rows]
    last = {(ns, encode(key)): i for i, (ns, _, key) in enumerate(chunks)}  # met twice when it was put again meanwhile
    return [chunks[i] for i in sorted(last.values())]
