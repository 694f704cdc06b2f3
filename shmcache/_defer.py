"""Doing things once an event has happened: `release(after=event)` and `put(after=event)`.

An event is anything with `query()` that becomes true, such as `torch.cuda.Event`. One thread per
attachment polls; it starts at the first use, is a daemon, and is not inherited over a fork.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from ._core import log
from .errors import SegmentClosedError

_FIRST_POLL = 0.0005  # seconds between two polls; doubles while nothing happens
_SLOWEST_POLL = 0.005


class EventLike(Protocol):
    """What `after=` takes."""

    def query(self) -> bool: ...


class Deferred:
    """Actions that wait for events. Each is called exactly once: with True when its event has
    happened, with False when that will never be known (the event raised)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: list[tuple[EventLike, Callable[[bool], None]]] = []
        self._running = 0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def add(self, event: EventLike, action: Callable[[bool], None]) -> None:
        """Queue `action`. TypeError when `event` has no query()."""
        if not callable(getattr(event, "query", None)):
            raise TypeError(f"after={event!r}: expected something with query(), such as torch.cuda.Event")
        with self._changed:
            if self._stopped:
                raise SegmentClosedError(f"cache {self._name!r} was closed meanwhile")
            self._waiting.append((event, action))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"shmcache-{self._name}-deferred", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _poll(self) -> bool:
        """One pass over what waits; whether anything happened."""
        with self._changed:
            waiting = self._waiting[:]
        some = False
        for entry in waiting:
            event, action = entry
            try:
                happened = bool(event.query())
            except Exception:
                log.exception("%s: query() of an event failed; what waited for it is given up", self._name)
                happened, known = True, False
            else:
                known = True
            if not happened:
                continue
            some = True
            with self._changed:
                self._waiting = [w for w in self._waiting if w is not entry]
                self._running += 1
            try:
                action(known)
            except Exception:
                log.exception("%s: a deferred call failed", self._name)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()
        return some

    def _run(self) -> None:
        pause = _FIRST_POLL
        while True:
            with self._changed:
                while not self._waiting and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
            if self._poll():
                pause = _FIRST_POLL
            else:
                time.sleep(pause)
                pause = min(2 * pause, _SLOWEST_POLL)

    def close(self, timeout: float) -> int:
        """Wait until all is done, at most `timeout` seconds; how many had to be given up."""
        end = time.monotonic() + timeout
        with self._changed:
            while self._waiting or self._running:
                left = end - time.monotonic()
                if left <= 0 or threading.current_thread() is self._thread:
                    break
                self._changed.wait(left)
            self._stopped = True
            self._changed.notify_all()
            return len(self._waiting)
