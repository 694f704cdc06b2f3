"""The segments of this host, seen from outside: nothing is attached, locked or written."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from . import _shmfs
from ._control import Control, CopiedControl
from ._core import lib
from ._names import control_name, path_of
from ._request import LIFETIMES
from .errors import ShmCacheError

_BLOCK = 512  # unit of st_blocks
_STATE_NAMES = {lib.SHMC_S_READY: "ready", lib.SHMC_S_UNLINKING: "unlinking", lib.SHMC_S_POISONED: "poisoned"}
_STATUS_NAMES = {
    lib.SHMC_E_NOT_READY: "half-made",
    lib.SHMC_E_FORMAT: "incompatible",
    lib.SHMC_E_NOT_SHMCACHE: "foreign",
}
_LIFETIME_NAMES = {number: name for name, number in LIFETIMES.items()}


@dataclass(frozen=True)
class SegmentInfo:
    """One segment. `state` is "ready", "unlinking", "poisoned", "half-made", "incompatible" (another
    version's), "corrupt" or "foreign" (not made by shmcache, or not readable for us)."""

    name: str
    bytes: int  # allocated, all files together
    alive: int  # attachments
    dead: int  # attachments whose process is gone: the next to attach clears them away
    created: float  # seconds since the epoch
    state: str
    lifetime: str  # "persistent", "ephemeral"; "" when unknown


def segments() -> list[SegmentInfo]:
    """All segments by name. Never raises because of what a file holds."""
    return [info for name in _shmfs.control_files() if (info := _look(name)) is not None]


def _look(name: str) -> SegmentInfo | None:
    try:
        st = os.lstat(path_of(control_name(name)))
    except OSError:
        return None  # removed just now
    size = st.st_blocks * _BLOCK + sum(map(_allocated, _shmfs.region_files(name)))
    unknown = SegmentInfo(name, size, 0, 0, st.st_mtime, "foreign", "")
    try:
        fd = _shmfs.open_shm(control_name(name), read_only=True)
    except FileNotFoundError:
        return None
    except (OSError, ShmCacheError):
        return unknown
    try:
        held = _shmfs.is_locked(fd, _shmfs.PRESENCE_BYTE)
        unknown = replace(unknown, alive=int(held))  # one at least
        ours = os.fstat(fd).st_uid == os.geteuid()
        return _describe(unknown, Control(fd, writable=False) if ours else CopiedControl.head_of(fd), held)
    except (OSError, ShmCacheError):
        return replace(unknown, state="corrupt")
    finally:
        os.close(fd)


def _describe(unknown: SegmentInfo, control: Control, held: bool) -> SegmentInfo:
    try:
        if control.status:
            return replace(unknown, state=_STATUS_NAMES.get(control.status, "corrupt"))
        slots = control.attached()
        # pids of another namespace mean nothing here; presence does
        gone = [slot.gone if control.same_namespaces else not held for slot in slots]
        return replace(
            unknown,
            alive=len(gone) - sum(gone),
            dead=sum(gone),
            created=control.identity.created_ns / 1e9,
            state=_STATE_NAMES.get(control.state, "corrupt"),
            lifetime=_LIFETIME_NAMES.get(int(control.geometry.lifetime), ""),
        )
    finally:
        control.close()


def _allocated(shm_name: str) -> int:
    try:
        return os.lstat(path_of(shm_name)).st_blocks * _BLOCK
    except OSError:
        return 0
