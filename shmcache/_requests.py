"""Which keys a lookup found, until they are touched: prefix before suffix, lookup by lookup.

LMCache keeps one list for a whole process, in which two lookups mix. Here each lookup id has its own,
and lookups without an id have one for each thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ._keys import PackedKeys
    from .namespace import Namespace

_MOST_LISTS = 1024  # lookups that nobody finished; the oldest is forgotten
_MOST_FOUND = 65536  # in one list that nobody touches


class Found(NamedTuple):
    """Keys that one call found, and where to touch them; `touch` None: each has to be looked up again."""

    keys: Sequence[Any]
    touch: tuple[Namespace, PackedKeys] | None


class RequestKeys:
    """What was found, by lookup id, or by thread."""

    def __init__(self) -> None:
        self._lists: OrderedDict[Any, list[Found]] = OrderedDict()
        self._threads: dict[Any, int] = {}  # lookup id -> thread that looked it up
        self._lock = threading.Lock()
        _all.add(self)

    def add(self, found: Found, lookup_id: str | None = None) -> None:
        """This was found by the calling thread."""
        me = threading.get_ident()
        with self._lock:
            found_so_far = self._lists.setdefault(me if lookup_id is None else lookup_id, [])
            found_so_far.append(found)
            if len(found_so_far) > _MOST_FOUND:
                del found_so_far[0]
            if lookup_id is not None:
                self._threads[lookup_id] = me
            if len(self._lists) > _MOST_LISTS:
                self._threads.pop(self._lists.popitem(last=False)[0], None)

    def take(self, lookup_id: str | None = None) -> list[list[Found]]:
        """What a lookup id found, or all lookups of the calling thread, each for itself; it is forgotten here."""
        with self._lock:
            if lookup_id is not None:
                ids: list[Any] = [lookup_id]
            else:
                me = threading.get_ident()
                ids = [me, *(i for i, thread in self._threads.items() if thread == me)]
            for i in ids:
                self._threads.pop(i, None)
            taken = [self._lists.pop(i, None) for i in ids]
        return [found for found in taken if found]

    def all(self) -> list[Any]:
        """All keys that wait to be touched."""
        with self._lock:
            return [key for lists in self._lists.values() for found in lists for key in found.keys]

    def __len__(self) -> int:
        return len(self.all())


_all: weakref.WeakSet[RequestKeys] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: another thread of the parent may have been inside."""
    for requests in list(_all):
        requests._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
