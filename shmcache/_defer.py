"""Doing things once an event has happened: `release(after=event)` and `put(after=event)`.

An event is anything with `query()` that becomes true, such as `torch.cuda.Event`. One thread per
attachment polls; it starts at the first use, is a daemon, and is not inherited over a fork.

The caller and the thread share a SimpleQueue and nothing that needs a lock written in Python: an
interrupt inside a Condition's methods would leave it locked for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ._core import log
from ._threads import start
from .errors import SegmentClosedError

_FIRST_POLL = 0.0005  # seconds between two polls; doubles while nothing happens
_SLOWEST_POLL = 0.005


class EventLike(Protocol):
    """What `after=` takes."""

    def query(self) -> bool: ...


class _Entry:
    """An action that waits for its event; `dead`: whoever queued it was told that it failed."""

    __slots__ = ("action", "dead", "event")

    def __init__(self, event: EventLike, action: Callable[[bool], None]) -> None:
        self.event = event
        self.action = action
        self.dead = False


class Deferred:
    """Actions that wait for events. Each is called exactly once: with True when its event has
    happened, with False when that will never be known (the event raised)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._incoming: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()  # None: stop
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop_at: float | None = None  # time.monotonic() at which what still waits is given up
        self._given_up = 0

    def add(self, event: EventLike, action: Callable[[bool], None]) -> None:
        """Queue `action`. TypeError when `event` has no query()."""
        if not callable(getattr(event, "query", None)):
            raise TypeError(f"after={event!r}: expected something with query(), such as torch.cuda.Event")
        entry = _Entry(event, action)
        try:
            with self._starting:
                if self._stop_at is not None:
                    raise SegmentClosedError(f"cache {self._name!r} was closed meanwhile")
                # not alive: its start was interrupted. Should it run after all, two share the queue
                if self._thread is None or not self._thread.is_alive():
                    name = f"shmcache-{self._name}-deferred"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    start(self._thread)
                self._incoming.put(entry)
        except BaseException:
            entry.dead = True
            raise

    def _poll(self, waiting: list[_Entry]) -> list[_Entry]:
        """One pass over what waits; what still does."""
        left = []
        for entry in waiting:
            if entry.dead:
                continue
            known = True
            try:
                happened = bool(entry.event.query())
            except Exception:
                log.exception("%s: query() of an event failed; what waited for it is given up", self._name)
                happened, known = True, False
            if not happened:
                left.append(entry)
                continue
            try:
                entry.action(known)
            except Exception:
                log.exception("%s: a deferred call failed", self._name)
        return left

    def _take_new(self, waiting: list[_Entry]) -> bool:
        """Move what came in to `waiting`; blocks while there is nothing at all. True: asked to stop.

        Without a timeout of the queue's own: in CPython 3.11, with two readers, that one may never end.
        """
        while True:
            try:
                entry = self._incoming.get(block=not waiting)
            except queue.Empty:
                return False
            if entry is None:
                self._incoming.put(None)  # for another thread, should there be one
                return True
            waiting.append(entry)

    def _run(self) -> None:
        waiting: list[_Entry] = []
        pause = _FIRST_POLL
        while True:
            stopping = self._take_new(waiting)
            left = self._poll(waiting)
            pause = _FIRST_POLL if len(left) < len(waiting) else min(2 * pause, _SLOWEST_POLL)
            waiting = left
            if stopping and (not waiting or self._stop_at is None or time.monotonic() >= self._stop_at):
                self._given_up += len(waiting)
                return
            if waiting:
                time.sleep(pause)

    def close(self, timeout: float) -> int:
        """Wait until all is done, at most `timeout` seconds; how many had to be given up."""
        with self._starting:
            self._stop_at = time.monotonic() + timeout
            thread = self._thread
        self._incoming.put(None)
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(timeout + 1.0)
        return self._given_up
