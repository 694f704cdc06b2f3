"""What every test gets: a segment name of its own, and a check that it leaves /dev/shm as found.

Tests kill only processes that they started, by pid, and wait with deadlines.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SHM = Path("/dev/shm")
_LONGEST = 110  # seconds of a forked child; below the timeout of a test


def shm_objects() -> set[str]:
    return {p.name for p in SHM.iterdir() if p.name.startswith("shmcache.")}


@pytest.fixture
def name() -> Iterator[str]:
    """A segment name nobody else uses; whatever is left under it is removed, and the test fails."""
    name = f"t{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    left = list(SHM.glob(f"shmcache.{name}*"))
    for p in left:
        p.unlink(missing_ok=True)
    assert not left, f"left in /dev/shm: {[p.name for p in left]}"


@pytest.fixture
def scrap(name: str) -> Iterator[str]:
    """As `name`, for tests that end with the segment still there (they kill its processes): removed silently."""
    yield name
    for p in SHM.glob(f"shmcache.{name}*"):
        p.unlink(missing_ok=True)


class Child:
    """A forked child that runs `fn(pipe_in, pipe_out)` and leaves with os._exit."""

    def __init__(self, fn: Callable[[Child], object]) -> None:
        self._down_r, self._down_w = os.pipe()
        self._up_r, self._up_w = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self.status: int | None = None
        if self.pid == 0:
            code = 1
            try:
                sys.unraisablehook = sys.__unraisablehook__  # pytest's keeps what it is told of, frames and all
                os.close(self._down_w)
                os.close(self._up_r)
                fn(self)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        os.close(self._down_r)
        os.close(self._up_w)

    # in the child
    def tell(self, text: str = "x") -> None:
        os.write(self._up_w, (text + "\n").encode())

    def await_parent(self) -> None:
        os.read(self._down_r, 1)

    # in the parent
    def listen(self, timeout: float = 20.0) -> str:
        """The next line the child tells; '' when it has gone."""
        line = b""
        end = time.monotonic() + timeout
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._up_r], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"child {self.pid} said nothing for {timeout} s")
            byte = os.read(self._up_r, 1)
            if not byte:
                break
            line += byte
        return line.decode().strip()

    def told(self, timeout: float) -> bool:
        """Whether there is something to hear, or the child has gone, within `timeout` seconds."""
        return bool(select.select([self._up_r], [], [], timeout)[0])

    def go(self) -> None:
        os.write(self._down_w, b"g")

    def kill(self, sig: int = signal.SIGKILL) -> None:
        os.kill(self.pid, sig)

    def wait(self, timeout: float = 30.0) -> int:
        """Exit code, or minus the signal. Past the deadline the child is killed and the test fails."""
        if self.status is not None:
            return self.status
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                return self.status
            time.sleep(0.002)
        self.kill()
        os.waitpid(self.pid, 0)
        self.status = -int(signal.SIGKILL)
        raise TimeoutError(f"child {self.pid} did not end within {timeout} s")

    def close(self) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
                self.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        for fd in (self._down_w, self._up_r):
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[Child], object]], Child]]:
    """fork(fn) -> Child. Children still there at the end are killed by pid; those of a killed test, by SIGALRM."""
    children: list[Child] = []

    def start(fn: Callable[[Child], object]) -> Child:
        def guarded(child: Child) -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LONGEST)
            fn(child)

        child = Child(guarded)
        children.append(child)
        return child

    yield start
    for child in children:
        child.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What tests need not look through: with torch and all tests loaded, gc.collect() would take 0.1 s each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config._shm_before = shm_objects()  # type: ignore[attr-defined]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    mine = {n for n in shm_objects() - session.config._shm_before if f"shmcache.t{os.getpid()}-" in n}  # type: ignore[attr-defined]
    if mine:
        session.exitstatus = 1
        print(f"\nleft in /dev/shm by this run: {sorted(mine)}", file=sys.stderr)
