"""Threads and flags that an interrupt (Ctrl-C) in the calling thread leaves usable.

`threading.Condition`, and with it `Event` and `Thread.start`, keep a lock by Python code: an exception
of a signal handler that arrives inside can leave it locked for ever, or come out as
`RuntimeError: release unlocked lock` (CPython 3.11, `threading.py`).
"""

from __future__ import annotations

import contextlib
import sys
import threading


class Flag:
    """What `threading.Event` is for: set once, by anybody, and waited for."""

    __slots__ = ("_gate", "_set")

    def __init__(self) -> None:
        self._set = False
        self._gate = threading.Lock()  # locked until it is set
        self._gate.acquire()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        with contextlib.suppress(RuntimeError):  # it was open
            self._gate.release()

    def wait(self, timeout: float) -> bool:
        """Whether it is set, at the latest after `timeout` seconds."""
        if not self._set and self._gate.acquire(timeout=timeout):
            self._gate.release()  # to the next who waits
        return self._set


def start(thread: threading.Thread) -> None:
    """`thread.start()`, which an interrupt leaves as itself. RuntimeError: no more threads are to be had."""
    handled = sys.exc_info()[1]
    try:
        thread.start()
    except RuntimeError as e:
        interrupt = e.__context__
        if interrupt is None or interrupt is handled:
            raise
        raise interrupt from None
