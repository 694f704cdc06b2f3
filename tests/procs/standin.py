"""The stand-in for the CUDA runtime, built and set up for one test, and the log of its calls."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from hostile import eventually

from shmcache import SharedCache

SOURCE = Path(__file__).parent / "fake_cudart.c"


@dataclass(frozen=True)
class Call:
    """One line of the log; `rest` as fake_cudart.c says."""

    what: str
    pid: int
    rest: tuple[int, ...]


class StandIn:
    """A library of its own for each test: its table and its counter start empty."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._env = monkeypatch
        self._log = folder / "log"
        self._gate = folder / "gate"
        self.path = folder / "fake_cudart.so"
        compiler = os.environ.get("CC", "cc").split()
        options = ["-shared", "-fPIC", "-O1", "-pthread", "-o", str(self.path), str(SOURCE)]
        subprocess.run([*compiler, *options], check=True, timeout=60)
        self._env.setenv("SHMCACHE_CUDART", str(self.path))
        self._env.setenv("FAKE_CUDART_LOG", str(self._log))

    def fail(self, at: int, code: int) -> None:
        self._env.setenv("FAKE_CUDART_FAIL_AT", str(at))
        self._env.setenv("FAKE_CUDART_CODE", str(code))

    def fail_unregistering(self, code: int) -> None:
        self._env.setenv("FAKE_CUDART_UNREGISTER", str(code))

    def keep_from_children(self) -> None:
        self._env.setenv("FAKE_CUDART_DONTFORK", "1")

    def close_gate(self, at: int = 1) -> None:
        """From the at-th on, registrations wait for open_gate()."""
        self._env.setenv("FAKE_CUDART_GATE", str(self._gate))
        self._env.setenv("FAKE_CUDART_GATE_AT", str(at))

    def open_gate(self) -> None:
        self._gate.touch()

    def calls(self, what: str | None = None, pid: int | None = None) -> list[Call]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        found = [Call(w, int(p), tuple(map(int, rest))) for w, p, *rest in map(str.split, lines)]
        return [c for c in found if what in (None, c.what) and pid in (None, c.pid)]

    def await_call(self, what: str, n: int = 1, pid: int | None = None) -> Call:
        """The n-th such call."""
        eventually(lambda: len(self.calls(what, pid)) >= n, f"call {n} of {what} by {pid or 'anybody'}", 30.0)
        return self.calls(what, pid)[n - 1]

    def registered(self, pid: int | None = None) -> list[tuple[int, int]]:
        """(address, size) of what was registered with success, in order."""
        return [(c.rest[0], c.rest[1]) for c in self.calls("register", pid) if c.rest[2] == 0]

    def assert_all_unregistered(self) -> None:
        """Every registration of this process, once, by its address, while it was still mapped."""
        mine = os.getpid()
        ended = self.calls("unregister", mine)
        assert sorted(c.rest[0] for c in ended) == sorted(address for address, _ in self.registered(mine))
        assert all(code == 0 and mapped for _, code, mapped in (c.rest for c in ended)), ended


def regions(cache: SharedCache) -> list[tuple[int, int]]:
    """(address, size) of every region in this process."""
    arena = cache._attachment.arena()
    return [(r.address, r.bytes) for r in arena.regions()]


def is_mapped(address: int) -> bool:
    """Whether memory of a segment is mapped there in this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        ours = [line.split(" ", 1)[0].split("-") for line in maps if "/shmcache." in line]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ours)


def order(cache: SharedCache, registered: list[tuple[int, int]]) -> list[int]:
    """Indices of regions, in the order of registration."""
    arena = cache._attachment.arena()
    return [(address - arena.address) // arena.stride for address, _ in registered]
