"""What this process has mapped: one Mapping for each segment instance, shared by all handles on it."""

from __future__ import annotations

import os
import threading
from typing import Any

from ._control import Control
from ._handshake import Handshake
from ._regions import Arena
from .errors import SegmentClosedError
from .pinning import Pinner


class Mapping:
    """One segment instance mapped into this process, shared by all handles on it.

    Counted: connect() takes a use, disconnect() gives it back; with the last one the arena is let go,
    and its address space ends with the last view of it. A `shmc *` made from `base` must not outlive
    the Mapping object.
    """

    def __init__(self, name: str, inode: tuple[int, int], control: Control, arena: Arena) -> None:
        self.name = name
        self.inode = inode
        self.control = control
        self.instance = control.instance
        self.pinner = Pinner(arena)
        self._arena: Arena | None = arena
        self._uses = 0

    @property
    def base(self) -> Any:
        return self.control.base

    @property
    def size(self) -> int:
        return self.control.size

    @property
    def geometry(self) -> Any:
        return self.control.geometry

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            raise SegmentClosedError(f"segment {self.name!r} is no longer mapped in this process")
        return self._arena

    def acquire(self) -> None:
        with _lock:
            self._uses += 1
            _mappings[self.name, self.instance] = self

    def release(self) -> None:
        with _lock:
            self._uses -= 1
            if self._uses:
                return
            self._arena = None
            _mappings.pop((self.name, self.instance), None)
        self.pinner.stop()


_mappings: dict[tuple[str, int], Mapping] = {}
_lock = threading.RLock()


def _after_fork_in_child() -> None:
    """Mappings are inherited with their uses; a lock that another thread held is nobody's here."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def mapping_of(handshake: Handshake, control: Control) -> Mapping:
    """The mapping of this process for what the control file holds, or a new one; with one use taken."""
    with _lock:
        known = _mappings.get((handshake.name, control.instance))
        if known is not None and known.inode == handshake.inode:
            known._uses += 1
            return known
    arena = Arena(handshake.name, control)
    arena.open_regions()
    mapping = Mapping(handshake.name, handshake.inode, control, arena)
    mapping.acquire()
    return mapping
