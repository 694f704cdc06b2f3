"""Flags and threads that an interrupt leaves usable."""

from __future__ import annotations

import threading
import time

import pytest

from shmcache._threads import Flag, start


def test_a_flag_is_set_once_and_wakes_who_waits() -> None:
    flag = Flag()
    assert not flag.is_set() and not flag.wait(0.001)
    woken: list[bool] = []
    waiters = [threading.Thread(target=lambda: woken.append(flag.wait(20.0))) for _ in range(3)]
    for thread in waiters:
        thread.start()
    begin = time.monotonic()
    flag.set()
    flag.set()
    for thread in waiters:
        thread.join(20.0)
    assert woken == [True] * 3 and time.monotonic() - begin < 10
    assert flag.is_set() and flag.wait(0.0) and flag.wait(20.0)


class Interrupted(threading.Thread):
    """Ends its start as CPython's does when an interrupt arrives inside Condition.wait."""

    def start(self) -> None:
        lock = threading.Lock()
        with lock:
            lock.release()
            raise KeyboardInterrupt


class Refused(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_an_interrupted_start_is_an_interrupt() -> None:
    with pytest.raises(RuntimeError, match="release unlocked lock"):
        Interrupted().start()
    with pytest.raises(KeyboardInterrupt):
        start(Interrupted())


def test_a_refused_start_is_that_also_while_something_else_is_handled() -> None:
    with pytest.raises(RuntimeError, match="can't start"):
        start(Refused())
    try:
        raise KeyError("k")
    except KeyError:
        with pytest.raises(RuntimeError, match="can't start"):
            start(Refused())
        with pytest.raises(KeyboardInterrupt):
            start(Interrupted())
