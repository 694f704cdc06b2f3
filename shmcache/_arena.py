"""The arena grows and is warmed up: which regions to commit, when, and how far it got.

Regions are claimed under the segment's lock, one at a time, by whichever process is free: so all
processes of a host commit in parallel, and a dead one's region is taken over.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

from ._commit import FULL, aside, commit_region, in_thread, populate_region
from ._core import ffi, lib, log
from ._regions import Arena
from ._sizes import format_size
from ._threads import Flag
from .errors import ShmCacheError, from_status

__all__ = ["Arena", "Committer", "PrefaultState"]

_POLL = 0.005
_IDLE_POLL = 0.1
_REAP_EVERY = 0.1
_RETRY_AFTER = 1.0  # no second try sooner after a full tmpfs: each one costs what it reserves
_VAIN_FOR = 5.0  # after waiting for others in vain: they are stopped, or slower than anybody waits
_REPORT_WITHIN = 10.0

PrefaultMode = Literal["background", "wait", "lazy"]


@dataclass(frozen=True)
class PrefaultState:
    """How far this process's own mapping is populated."""

    state: Literal["off", "running", "done", "failed"]
    done: int
    total: int
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.state}: {format_size(self.done)} of {format_size(self.total)}" if self.done else self.state
        return f"{text} ({self.detail})" if self.detail else text


class Committer:
    """Commits regions on behalf of one attached handle (`shmc *`).

    stop() must come before the handle is detached or freed. Made anew in a forked child.
    """

    def __init__(self, arena: Arena, handle: Any) -> None:
        self._arena = arena
        self._handle = handle
        self._stop = Flag()
        self._thread: threading.Thread | None = None
        self._workers: list[threading.Thread] = []
        self._state: Literal["off", "running", "done", "failed"] = "off"
        self._failure = ""
        self._retry_at = 0.0
        self._vain_until = 0.0
        self._reap_at = 0.0

    # ---- growing on demand -------------------------------------------------------------------------

    def ensure_one(self, timeout: float = 1.0, *, whole: bool = False) -> bool:
        """Commits one more region, or waits for one that is being committed.

        True: there is more memory than before, ask again. False: none to be had within the timeout.
        ShmCacheError when the segment cannot be used. `whole`: populate it too, however long it takes.
        """
        now = time.monotonic()
        if now < self._retry_at:
            return False
        # Others, whom somebody has just waited for in vain, are given one look now: done, or dead.
        deadline = now + timeout if now >= self._vain_until else now
        before = self._arena.ready_bytes()
        while not self._stop.is_set():
            status, region = self._claim()
            if status == lib.SHMC_OK:
                return self._commit_aside(region, None if whole else time.monotonic() + timeout / 2)
            if status != lib.SHMC_PENDING and status != lib.SHMC_E_NOT_FOUND:
                raise from_status(status, f"committing memory of segment {self._arena.name!r}")
            if self._arena.ready_bytes() > before:
                self._vain_until = 0.0
                return True
            if status == lib.SHMC_E_NOT_FOUND:
                return False
            if self._reap():
                continue
            if time.monotonic() >= deadline:
                if deadline > now:
                    self._vain_until = time.monotonic() + _VAIN_FOR
                return False
            self._stop.wait(_POLL)
        return False

    def _reap(self) -> bool:
        """Whoever we wait for may have died; a reap makes its region anybody's again. False: it is not yet time."""
        now = time.monotonic()
        if now < self._reap_at:
            return False
        lib.shmc_reap(self._handle, ffi.new("shmc_reap_report *"))
        self._reap_at = now + _REAP_EVERY
        return True

    # ---- in the background -----------------------------------------------------------------------

    def background(self) -> None:
        """Commits all regions, and populates in this process those that others have committed."""
        if self._thread is None and not self._stop.is_set():
            self._state = "running"
            try:
                self._thread = in_thread(self._run, "prefault")
            except RuntimeError as e:  # then memory is had as it is needed
                self._fail(str(e))

    def wait(self) -> bool:
        """Waits until background() is done, with a progress bar on a terminal. False: it failed."""
        self.background()
        thread = self._thread
        if thread is None:
            return False
        if not sys.stderr.isatty():
            thread.join()
            return self._state == "done"
        from tqdm import tqdm  # only here: it costs import time

        total = self._arena.capacity
        with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=self._arena.name) as bar:
            while thread.is_alive():
                thread.join(0.1)
                bar.update(self._arena.mapped_bytes - bar.n)
        return self._state == "done"

    def state(self) -> PrefaultState:
        return PrefaultState(self._state, self._arena.mapped_bytes, self._arena.capacity, self._failure)

    def stop(self) -> None:
        """Ends all threads of this committer and waits for them: a piece of work, tens of ms."""
        self._stop.set()
        for thread in [self._thread, *self._workers]:
            if thread is not None and thread is not threading.current_thread():
                thread.join()
        if self._state == "running":
            self._state = "off"

    def _run(self) -> None:
        try:
            pause = _POLL
            while not self._stop.is_set():
                status, region = self._claim()
                if status == lib.SHMC_OK:
                    if not self._commit(region):
                        break
                    pause = _POLL
                elif not self._populate_one():
                    if status != lib.SHMC_PENDING:
                        break  # none left, or the segment cannot be used
                    self._reap()
                    self._stop.wait(pause)
                    pause = min(2 * pause, _IDLE_POLL)
            while self._populate_one():
                pass
        except (OSError, ShmCacheError) as e:
            self._fail(str(e))
        if self._state == "running" and not self._stop.is_set():
            self._state = "done"

    def _populate_one(self) -> bool:
        """Populates a committed region that this process has not touched yet; False: there is none."""
        arena = self._arena
        region = None if self._stop.is_set() else arena.take_unmapped()
        if region is None:
            return False
        done = False
        try:
            done = populate_region(arena, region, self._stop)
        finally:
            arena.mapped(region, done)
        return True

    # ---- one region ------------------------------------------------------------------------------

    def _claim(self) -> tuple[int, int]:
        out = ffi.new("uint32_t *")
        status = lib.shmc_region_claim(self._handle, out)
        return int(status), int(out[0])

    def _commit_aside(self, region: int, until: float | None) -> bool:
        """In a thread, so that signals reach the caller and not the work; Ctrl-C leaves it running."""
        result = [False]

        def work() -> None:
            result[0] = self._commit(region, until)

        self._workers = [w for w in self._workers if w.is_alive()]
        aside(work, "commit", self._workers.append)
        return result[0]

    def _commit(self, region: int, until: float | None = None) -> bool:
        try:
            flags = commit_region(self._arena, region, self._stop, until)
        except OSError as e:
            self._report(region, False, 0)
            self._retry_at = time.monotonic() + _RETRY_AFTER
            self._fail("shared memory is full" if e.errno in FULL else os.strerror(e.errno) if e.errno else str(e))
            return False
        except BaseException:
            self._report(region, False, 0)
            raise
        if self._state == "failed":
            self._state = "off"
        self._failure = ""
        return self._report(region, True, flags)

    def _report(self, region: int, ok: bool, flags: int) -> bool:
        """Tells the segment. Tried again while the lock is not to be had: nobody else can report it."""
        node = max(0, self._arena.region_node(region))
        deadline = time.monotonic() + _REPORT_WITHIN
        while True:
            status = lib.shmc_region_done(self._handle, region, int(ok), flags, node)
            if status != lib.SHMC_E_LOCK_TIMEOUT or time.monotonic() >= deadline or self._stop.is_set():
                return ok and status >= 0
            time.sleep(_POLL)

    def _fail(self, why: str) -> None:
        if not self._failure:
            log.warning(
                "segment %r: growing stopped at %s of %s: %s",
                self._arena.name,
                format_size(self._arena.ready_bytes()),
                format_size(self._arena.capacity),
                why,
            )
        self._failure = why
        self._state = "failed"
