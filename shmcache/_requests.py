"""Which keys a lookup found, until they are touched: prefix before suffix, lookup by lookup.

LMCache keeps one list for a whole process, in which two lookups mix. Here each lookup id has its own,
and lookups without an id have one for each thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

_MOST_LISTS = 1024  # lookups that nobody finished; the oldest is forgotten


class RequestKeys:
    """Lists of keys by lookup id, or by thread."""

    def __init__(self) -> None:
        self._lists: OrderedDict[Any, list[Any]] = OrderedDict()
        self._threads: dict[Any, int] = {}  # lookup id -> thread that looked it up
        self._lock = threading.Lock()

    def add(self, keys: list[Any], lookup_id: str | None = None) -> None:
        """These keys were found, in this order, by the calling thread."""
        me = threading.get_ident()
        with self._lock:
            self._lists.setdefault(me if lookup_id is None else lookup_id, []).extend(keys)
            if lookup_id is not None:
                self._threads[lookup_id] = me
            if len(self._lists) > _MOST_LISTS:
                self._threads.pop(self._lists.popitem(last=False)[0], None)

    def take(self, lookup_id: str | None = None) -> list[list[Any]]:
        """The lists of a lookup id, or of all lookups of the calling thread; they are forgotten here."""
        with self._lock:
            if lookup_id is not None:
                ids: list[Any] = [lookup_id]
            else:
                me = threading.get_ident()
                ids = [me, *(i for i, thread in self._threads.items() if thread == me)]
            found = []
            for i in ids:
                self._threads.pop(i, None)
                keys = self._lists.pop(i, None)
                if keys:
                    found.append(keys)
            return found

    def all(self) -> list[Any]:
        """All keys in all lists."""
        with self._lock:
            return [key for keys in self._lists.values() for key in keys]

    def __len__(self) -> int:
        return sum(map(len, list(self._lists.values())))
