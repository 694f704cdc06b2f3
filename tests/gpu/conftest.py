"""Tests on a real GPU: skipped, with the reason, where there is none.

The test itself never starts CUDA, so that other tests of the run can still fork. Its processes are
spawned, do what a function of gpu_workers says, and are killed by their pid at the end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_workers
import pytest

_START = 90.0  # seconds for a process to import torch and start CUDA
_spawn = multiprocessing.get_context("spawn")


class Worker:
    """A spawned process that runs `fn(connection, *args)`."""

    def __init__(self, fn: Callable[..., None], *args: Any) -> None:
        self._here, there = _spawn.Pipe()
        self._process = _spawn.Process(target=gpu_workers.guarded, args=(fn, there, *args), daemon=True)
        self._process.start()
        there.close()
        self.pid = self._process.pid

    def listen(self, timeout: float = _START) -> Any:
        """The next thing it sends. AssertionError with its traceback when it failed."""
        if not self._here.poll(timeout):
            raise TimeoutError(f"worker {self.pid} said nothing for {timeout} s")
        try:
            what, value = self._here.recv()
        except EOFError:
            raise AssertionError(f"worker {self.pid} ended with {self._process.exitcode}") from None
        assert what == "said", value
        return value

    def tell(self, value: Any) -> None:
        self._here.send(value)

    def kill(self) -> None:
        """Returns when it is dead and gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(30.0)
        assert self._process.exitcode is not None, f"worker {self.pid} does not die"


@pytest.fixture
def worker(gpus: int) -> Iterator[Callable[..., Worker]]:
    """worker(fn, *args) -> Worker."""
    started: list[Worker] = []

    def start(fn: Callable[..., None], *args: Any) -> Worker:
        started.append(Worker(fn, *args))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many there are; skips the test when there is none."""
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no GPU: there is no /dev/nvidiactl")
    asked = Worker(gpu_workers.count_devices)
    try:
        found = asked.listen()
    finally:
        asked.kill()
    if not found:
        pytest.skip("no GPU: torch finds no CUDA device")
    return int(found)
