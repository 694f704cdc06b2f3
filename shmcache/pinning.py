"""Pinning: the regions of an arena registered with CUDA in this process, so that devices copy at full speed.

    off -> running -> done          one thread for each arena and process; what failed stays failed
                   -> failed

It is only about speed: a copy from or to a region that is not registered works, through a buffer of
the driver. A region is registered by one call, since a copy must not straddle two registrations, and
when its memory exists and is mapped here: the call itself would touch pages one by one, and cannot be
interrupted. Processes begin at different regions, because registering the same pages at the same time
makes both wait in the kernel.

A registration belongs to the process. It goes with it, however it dies; a forked child has none and
must not touch its parent's. It ends just before the memory is unmapped, which is after the last view
of it, and with the process's exit it ends by itself. Rejected: registering on demand (the copy that
needs it would wait for it), and the whole arena in one call (minutes, and nothing to show for a failure).
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from typing import Any, Literal, Protocol

from ._auto import Auto
from ._commit import in_thread, populate_region
from ._core import ffi, lib, log
from ._cudart import ALREADY_REGISTERED, CAPTURING, Runtime, describe, find
from ._regions import Arena
from ._sizes import format_size
from ._threads import Flag

_PAGE = os.sysconf("SC_PAGE_SIZE")
_POLL = 0.005  # for regions that others are still committing
_IDLE_POLL = 0.25
_POLL_EACH = 1e-4  # longer for many regions: a look at one costs 3 us
_BREATH = 0.1  # of a call's time, between two: in it the driver keeps locks that launches and copies need
_CAPTURE_POLL = 1.0
_STATES = {
    "off": lib.SHMC_PIN_OFF, "running": lib.SHMC_PIN_RUNNING, "done": lib.SHMC_PIN_DONE, "failed": lib.SHMC_PIN_FAILED,
}  # fmt: skip
_JOIN = 1.0  # a call in flight takes about 0.1 s per GiB; past this it is left behind


class Attached(Protocol):
    """What can tell others: an attachment on the segment."""

    @property
    def handle(self) -> Any: ...


class Pinner:
    """Registers one arena in this process. All handles on the segment share it."""

    def __init__(self, arena: Arena) -> None:
        self._arena: Arena | None = arena  # None: stopped
        self._name = arena.name
        self._total = arena.capacity
        self._lock = threading.RLock()
        self._stop = Flag()
        self._asked = False
        self._may_start_cuda = False
        self._settled = False  # started, or known to be impossible
        self._started = False
        self._first = 0
        self._thread: threading.Thread | None = None
        self._registered: list[int] = []  # addresses, ours to unregister
        self._state: Literal["off", "running", "done", "failed"] = "off"
        self._detail = ""
        self._pinned = 0  # bytes
        self._regions = 0  # of them, how many regions
        self._attachments: weakref.WeakSet[Attached] = weakref.WeakSet()  # whose slots say so, for people
        self._foreign = 0  # of them, registered by somebody else in this process
        _pinners.add(self)

    def serve(self, attachment: Attached) -> None:
        """From now on its slot tells other processes what was obtained here."""
        self._attachments.add(attachment)
        self._tell()

    def _tell(self) -> None:
        state = _STATES[self._state]
        for attachment in list(self._attachments):  # one that is closed, or a forked parent's, is no harm
            lib.shmc_note_pinning(attachment.handle, state, self._regions)

    def ask(self, pin: bool | Auto, who: int) -> None:
        """A handle's wish: True, AUTO or False. `who` tells the processes of a host apart."""
        if pin is False:
            return
        with self._lock:
            self._asked = True
            self._may_start_cuda |= pin is True
            self._first = who
        self.poke()

    def poke(self) -> None:
        """Starts, when somebody asked for it and CUDA is there by now. Never raises."""
        if self._settled or not self._asked:
            return
        with self._lock:
            arena = self._arena
            if self._settled or arena is None:
                return
            if _lost:
                self._settled, self._detail = True, "forked child"
                return
            try:
                runtime = find(self._may_start_cuda)
                if runtime is not None:
                    self._begin(arena, runtime)
                    return
            except Exception as e:
                self._settled = True
                self._fail(str(e))
                return
            if self._may_start_cuda:
                self._settled = True
                self._detail = "no CUDA device"
                log.warning("segment %r: pin=True, but there is no CUDA device in this process: not pinned",
                            self._name)  # fmt: skip
            else:
                self._detail = "CUDA is not in use in this process"

    def _begin(self, arena: Arena, runtime: Runtime) -> None:
        self._detail = ""
        self._settled = self._started = True
        self._state = "running"
        self._tell()
        end = functools.partial(_unregister, runtime, self._registered, os.getpid(), self._name)
        arena.before_unmap.append(end)
        self._thread = in_thread(functools.partial(self._run, arena, runtime), "pin")

    def wait(self, timeout: float) -> bool:
        """Whether all of the arena is registered, at the latest after `timeout` seconds."""
        self.poke()
        thread = self._thread
        if thread is not None:
            thread.join(min(max(0.0, timeout), threading.TIMEOUT_MAX))
        return self._state == "done"

    def stop(self) -> None:
        """Registers no more. What is registered stays so until it is unmapped.

        A call in flight cannot be interrupted: its thread is left to it, and keeps the memory mapped.
        """
        with self._lock:
            self._arena = None
            self._stop.set()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN)

    def __str__(self) -> str:
        """What was obtained, for people."""
        done, total = format_size(self._pinned), format_size(self._total)
        if self._state == "running":
            return f"running: {done} of {total}"
        if self._state == "failed":
            return f"failed: {done} of {total} pinned: {self._detail}; copies from and to the rest are pageable"
        if self._state == "done":
            return f"done: {total}" + (f", {format_size(self._foreign)} by another library" if self._foreign else "")
        return f"off ({self._detail})" if self._detail else "off"

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self, arena: Arena, runtime: Runtime) -> None:
        """`arena` keeps the memory mapped for as long as this thread may be inside a call."""
        first = first_region(self._first, arena.n_regions)
        left = [*range(first, arena.n_regions), *range(first)]
        pause = _POLL
        try:
            while left and not self._stop.is_set():
                region = next((i for i in left if self._is_there(arena, i)), None)
                if region is None:
                    self._stop.wait(pause)
                    pause = min(2 * pause, _IDLE_POLL + len(left) * _POLL_EACH)
                    continue
                pause = _POLL
                start = time.monotonic()
                code = self._register(arena, runtime, region)
                if code == CAPTURING:
                    self._stop.wait(_CAPTURE_POLL)
                elif code:
                    self._fail(f"{describe(code)} at region {region}")
                    return
                else:
                    left.remove(region)
                    self._stop.wait(_BREATH * (time.monotonic() - start))
        except Exception as e:
            self._fail(str(e))
            return
        if not left:
            self._state = "done"
            self._tell()

    def _is_there(self, arena: Arena, i: int) -> bool:
        """Whether region i is committed, and mapped page by page here; if nobody else does that, now."""
        if self._stop.is_set() or not arena.regions([i])[0].ready:
            return False
        if arena.take(i):
            done = False
            try:
                done = populate_region(arena, i, self._stop)
            finally:
                arena.mapped(i, done)
        return arena.is_mapped(i)

    def _register(self, arena: Arena, runtime: Runtime, i: int) -> int:
        """CUDA's code; 0 also for what was registered before, which is then not ours to unregister."""
        address, length = arena.region_address(i), arena.region_length(i)
        size = -(-length // _PAGE) * _PAGE
        code = runtime.register(address, size)
        if code not in (0, ALREADY_REGISTERED):
            return code
        if code == 0:
            self._registered.append(address)
        else:
            self._foreign += length
        self._pinned += length
        self._regions += 1
        self._tell()
        # A driver may keep pinned memory from forked children, for the sake of private pages. Ours are shared.
        lib.shmc_inherit(ffi.cast("void *", address), size)
        return 0

    def _fail(self, why: str) -> None:
        self._detail = why
        self._state = "failed"
        self._tell()
        log.warning(
            "segment %r: pinning failed, %s of %s are pinned: %s; copies between a device and the rest are "
            "pageable: slower, and they make the thread that starts them wait",
            self._name, format_size(self._pinned), format_size(self._total), why,
        )  # fmt: skip

    # ---- fork ------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """In a forked child: it inherits neither the thread nor the registrations."""
        self._lock = threading.RLock()
        self._stop = Flag()
        self._thread = None
        if self._asked and _lost:
            self._settled, self._state, self._detail = True, "off", "forked child"
            self._pinned = self._foreign = self._regions = 0


def first_region(who: int, n: int) -> int:
    """Where process number `who` begins: 0, n/2, n/4, 3n/4, ... so that any number of them is spread well."""
    at, step = 0.0, float(n)
    while who > 0:
        step /= 2
        at += step * (who & 1)
        who >>= 1
    return int(at)


def _unregister(runtime: Runtime, addresses: list[int], pid: int, name: str) -> None:
    """Just before the memory is unmapped. Never raises: at the end of a process CUDA may be gone already."""
    if os.getpid() != pid:
        return
    failed = ""
    while addresses:
        try:
            code = runtime.unregister(addresses.pop())
            failed = failed or (describe(code) if code else "")
        except Exception as e:
            failed = failed or str(e)
    if failed:
        log.debug("segment %r: unregistering from CUDA: %s", name, failed)


_pinners: weakref.WeakSet[Pinner] = weakref.WeakSet()
_lost = False  # this is a forked child of a process that was using CUDA, which works in no child


def _after_fork_in_child() -> None:
    global _lost
    _lost = _lost or any(pinner._started and not pinner._stop.is_set() for pinner in _pinners)
    for pinner in list(_pinners):
        pinner._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
