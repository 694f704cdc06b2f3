"""Let a process die, or stop, just before its n-th call to the operating system or the C core."""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import posix_ipc

_MODULES = (
    "_arena", "_attachment", "_commit", "_control", "_create", "_handshake", "_numa", "_regions", "_segment", "_shmfs",
    "_space", "cache",
)  # fmt: skip
_DOORS = ("os", "lib", "fcntl", "posix_ipc", "mmap")


class _Door:
    """A module or library whose functions report to `step` before each call."""

    def __init__(self, target: Any, step: Callable[[str], None]) -> None:
        self._target = target
        self._step = step

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value) or (isinstance(value, type) and value is not posix_ipc.SharedMemory):
            return value
        step = self._step

        def call(*args: Any, **kwargs: Any) -> Any:
            step(name)
            return value(*args, **kwargs)

        return call


def watch_calls(step: Callable[[str], None]) -> None:
    """In a forked child, for the rest of its life: every such call of shmcache goes through `step`."""
    for name in _MODULES:
        module = importlib.import_module(f"shmcache.{name}")
        for door in _DOORS:
            if hasattr(module, door):
                setattr(module, door, _Door(getattr(module, door), step))


class Counter:
    """Calls `act` before the `at`-th step, and remembers how many there were."""

    def __init__(self, at: int = 0, act: Callable[[], object] | None = None) -> None:
        self._at = at
        self._act = act
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.n = 0

    def off(self) -> None:
        self._act = None

    def __call__(self, name: str) -> None:
        with self._lock:
            self.n = next(self._numbers)
            now = self.n == self._at
        if now and self._act is not None:
            self._act()
