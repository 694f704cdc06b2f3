"""The contract of one key, one call at a time: a chunk of two parts.

State: ((tag of part 0, of part 1), (who reserved part 0, part 1)); 0: nothing, nobody. A tag names the
bytes of one put, a reservation is named by the tag that it would put. Nothing is evicted.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from linearize import Op

PARTS = 2
EMPTY = ((0, 0), (0, 0))
PUT, GET, HAS, HAS_ALL, LOOKUP, REMOVE, RESERVE, ABORT, REAPED, CLEAR = range(1, 11)
NAMES = dict(enumerate(("PUT", "GET", "HAS", "HAS_ALL", "LOOKUP", "REMOVE", "RESERVE", "ABORT", "REAPED", "CLEAR"), 1))
WRITE, PENDING = -1, -2  # of RESERVE; else the tag that was published


def with_part(pair: tuple[int, int], part: int, value: int) -> tuple[int, int]:
    return (value, pair[1]) if part == 0 else (pair[0], value)


def step(state: Any, op: Op) -> Hashable:
    """What the contract says; `result` None: it is not known, its process was killed."""
    tags, reserved = state
    kind, part, tag = op.what
    right: Any
    then = state
    if kind == PUT:
        right = int(not tags[part])
        if right:
            then = (with_part(tags, part, tag), with_part(reserved, part, 0))
    elif kind == GET:
        right = tags[part]
    elif kind == HAS:
        right = int(tags[part] != 0)
    elif kind == HAS_ALL:
        right = int(all(tags))
    elif kind == LOOKUP:
        right = tags[part] if all(tags) else 0
    elif kind == REMOVE:
        right = int(any(tags))
        if right:  # what is being written for it goes on, and is nobody's reservation any more
            then = EMPTY
    elif kind == RESERVE:
        right = tags[part] or (PENDING if reserved[part] else WRITE)
        if right == WRITE:
            then = (tags, with_part(reserved, part, tag))
    elif kind == ABORT:
        right = op.result
        if reserved[part] == tag:
            then = (tags, with_part(reserved, part, 0))
    elif kind == CLEAR:  # optional: a chunk that is held stays
        return EMPTY if any(tags) and not any(reserved) else None
    else:  # REAPED: the reservation of a dead process ends, when there is one
        return (tags, with_part(reserved, part, 0)) if reserved[part] == tag else None
    return then if op.result is None or op.result == right else None
