"""The contract of one key, one call at a time: a chunk of two parts.

State: ((tag of part 0, of part 1), (who reserved part 0, part 1), tags allocated and not outdated); 0: nothing,
nobody. A tag names the bytes of one put, a reservation is named by the tag that it would put. Nothing is evicted.
A bump outdates what there is, and what was allocated before it. It belongs to all keys of the namespace: here each
of them must find some place for it, which is less than one place for all.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from linearize import Op

PARTS = 2
NONE = (0, 0)
EMPTY: Any = (NONE, NONE, frozenset())
PUT, GET, HAS, HAS_ALL, LOOKUP, REMOVE, RESERVE, ABORT, REAPED, CLEAR, ALLOCATE, BUMP = range(1, 13)
_NAMES = "PUT GET HAS HAS_ALL LOOKUP REMOVE RESERVE ABORT REAPED CLEAR ALLOCATE BUMP"
NAMES = dict(enumerate(_NAMES.split(), 1))
WRITE, PENDING = -1, -2  # of RESERVE; else the tag that was published


def with_part(pair: tuple[int, int], part: int, value: int) -> tuple[int, int]:
    return (value, pair[1]) if part == 0 else (pair[0], value)


def step(state: Any, op: Op) -> Hashable:
    """What the contract says; `result` None: it is not known, its process was killed."""
    tags, reserved, fresh = state
    kind, part, tag = op.what
    right: Any
    then = state
    if kind == PUT:
        right = int(not tags[part] and tag in fresh)
        left = fresh - {tag}
        then = (with_part(tags, part, tag), with_part(reserved, part, 0), left) if right else (tags, reserved, left)
    elif kind == ALLOCATE:
        right = op.result
        then = (tags, reserved, fresh | {tag})
    elif kind == BUMP:
        right = op.result
        then = EMPTY
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
            then = (NONE, NONE, fresh)
    elif kind == RESERVE:
        right = tags[part] or (PENDING if reserved[part] else WRITE)
        if right == WRITE:
            then = (tags, with_part(reserved, part, tag), fresh | {tag})
    elif kind == ABORT:
        right = op.result
        then = (tags, with_part(reserved, part, 0) if reserved[part] == tag else reserved, fresh - {tag})
    elif kind == CLEAR:  # optional: a chunk that is held stays
        return (NONE, NONE, fresh) if any(tags) and not any(reserved) else None
    else:  # REAPED: the reservation of a dead process ends, when there is one
        return (tags, with_part(reserved, part, 0), fresh) if reserved[part] == tag else None
    return then if op.result is None or op.result == right else None
