"""Segments of this host: connect to one by name, leave it, remove it.

This is the boundary to the layers above. `connect` runs the whole handshake and calls the caller's
`claim`, which takes a slot in the attachment table, while the handshake is still held: so a segment
cannot be removed or replaced between the look and the leap. What is found wins over what is asked.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from ._arena import Committer
from ._control import Control, own_namespaces
from ._core import lib, log
from ._create import create_segment, remove_segment
from ._directory import SegmentInfo, segments
from ._handshake import Handshake, Presence
from ._names import check_name
from ._regions import Arena
from ._request import Request
from .errors import (
    LockTimeoutError,
    SegmentBusyError,
    SegmentCorruptError,
    SegmentExistsError,
    SegmentMismatchError,
    SegmentNotFoundError,
    SegmentPermissionError,
    ShmCacheError,
    from_status,
)

__all__ = [
    "Claimed",
    "Mapping",
    "SegmentInfo",
    "connect",
    "disconnect",
    "reattach_in_child",
    "segments",
    "unlink",
]

How = Literal["open", "attach", "create"]
OnIncompatible = Literal["error", "replace"]
_LEAVE_TIMEOUT = 1.0


class Claimed(Protocol):
    """What `claim` returns: anything that has the attached `shmc *` as `handle`."""

    @property
    def handle(self) -> Any: ...


T = TypeVar("T", bound=Claimed)


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
            raise SegmentCorruptError(f"the mapping of segment {self.name!r} has ended")
        return self._arena

    def acquire(self) -> None:
        with _lock:
            self._uses += 1
            _mappings[self.name, self.instance] = self

    def release(self) -> None:
        with _lock:
            self._uses -= 1
            if self._uses == 0:
                self._arena = None
                _mappings.pop((self.name, self.instance), None)


_mappings: dict[tuple[str, int], Mapping] = {}
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """Mappings are inherited with their uses; a lock that another thread held is nobody's here."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- attaching ----------------------------------------------------------------------------------------


def connect(
    request: Request,
    *,
    how: How,
    on_incompatible: OnIncompatible = "error",
    timeout: float,
    claim: Callable[[Mapping], T],
) -> tuple[Mapping, Presence, T]:
    """Creates the segment or attaches to it. On any error nothing is left that was not there before.

    `claim(mapping)` runs under the handshake and attaches a handle; its errors pass through.
    """
    deadline = time.monotonic() + timeout
    may_create = how != "attach" and isinstance(request.capacity, int)
    while True:
        try:
            handshake = Handshake.acquire(request.name, deadline, create_mode=request.file_mode if may_create else None)
        except FileNotFoundError:
            raise _absent(request, how) from None
        with handshake:
            if handshake.size == 0 and may_create:
                control, arena, flags = create_segment(handshake, request)
                mapping = Mapping(request.name, handshake.inode, control, arena)
                mapping.acquire()
                try:
                    presence, claimed = _claim(handshake, mapping, claim)
                except BaseException:
                    remove_segment(handshake, control)
                    raise
                Committer(arena, claimed.handle).finish_first(flags)
                return mapping, presence, claimed
            found = _settle(handshake, request, how, on_incompatible)
            if found is not None:
                presence, claimed = _claim(handshake, found, claim)
                return found, presence, claimed
        # something stale was removed: start over, now without it


def disconnect(mapping: Mapping, presence: Presence) -> None:
    """Leaves after the handle was detached. The last one to leave an ephemeral segment removes it."""
    presence.close()
    if mapping.control.ephemeral:
        try:
            with Handshake.acquire(mapping.name, time.monotonic() + _LEAVE_TIMEOUT) as handshake:
                if handshake.inode == mapping.inode and handshake.nobody_attached():
                    remove_segment(handshake, mapping.control)
                    log.info("ephemeral segment %r removed: nobody is attached", mapping.name)
        except (FileNotFoundError, LockTimeoutError, SegmentPermissionError, SegmentCorruptError):
            pass  # gone already, or busy: the next to open or leave it decides
    mapping.release()


def reattach_in_child(mapping: Mapping, claim: Callable[[Mapping], T], *, timeout: float = 10.0) -> tuple[Presence, T]:
    """In a forked child: a slot of its own on the mapping it inherited, whose uses it inherited too.

    When the name is gone or leads to another segment by now, the memory is still there for those who
    have it mapped: then the slot is claimed without handshake and presence.
    """
    try:
        handshake = Handshake.acquire(mapping.name, time.monotonic() + timeout)
    except FileNotFoundError:
        return Presence.nowhere(), claim(mapping)
    with handshake:
        if handshake.inode != mapping.inode:
            return Presence.nowhere(), claim(mapping)
        mapping.control.revalidate()
        _settle_namespaces(handshake, mapping.control)
        presence = Presence.take(handshake)
        try:
            return presence, claim(mapping)
        except BaseException:
            presence.close()
            raise


def _claim(handshake: Handshake, mapping: Mapping, claim: Callable[[Mapping], T]) -> tuple[Presence, T]:
    """Presence, then a slot. Takes over one use of the mapping, and gives it back on an error."""
    presence = None
    try:
        presence = Presence.take(handshake)
        return presence, claim(mapping)
    except BaseException:
        if presence is not None:
            presence.close()
        mapping.release()
        raise


def _absent(request: Request, how: How) -> Exception:
    if how == "attach":
        return SegmentNotFoundError(f"there is no segment {request.name!r} on this host")
    return ValueError(f"segment {request.name!r} does not exist, and creating it needs a capacity")


def _settle(handshake: Handshake, request: Request, how: How, on_incompatible: OnIncompatible) -> Mapping | None:
    """What the control file holds: a mapping to attach to, None after removing it, or an error."""
    control = Control(handshake.fd, writable=True)
    if control.status == lib.SHMC_E_NOT_READY:
        if how == "attach" or not isinstance(request.capacity, int):
            raise _absent(request, how)
        log.info("segment %r: its creator died half way, creating it again", request.name)
        remove_segment(handshake)
        return None
    if control.status not in (lib.SHMC_OK, lib.SHMC_E_FORMAT):
        raise control.error(request.name)
    if control.status == lib.SHMC_OK:
        if control.state == lib.SHMC_S_UNLINKING:
            remove_segment(handshake, control)
            return None
        if control.ephemeral and handshake.nobody_attached():
            log.info("segment %r: an ephemeral one whose processes are gone, removed", request.name)
            remove_segment(handshake, control)
            return None
        handshake.note_pid()
    if how == "create":
        raise SegmentExistsError(f"segment {request.name!r} exists already")
    try:
        _check_compatible(request, control)
    except ShmCacheError as e:
        if on_incompatible != "replace" or not isinstance(request.capacity, int):
            raise
        if not handshake.nobody_attached():
            raise SegmentBusyError(
                f"segment {request.name!r} is not what was asked, and somebody is attached, so it stays: {e}",
                hint="end these processes, or use another name",
            ) from e
        log.warning("segment %r is replaced: %s", request.name, e)
        remove_segment(handshake, control if control.status == lib.SHMC_OK else None)
        return None
    _settle_namespaces(handshake, control)
    return _mapping_of(handshake, control)


def _check_compatible(request: Request, control: Control) -> None:
    if control.status != lib.SHMC_OK:
        raise control.error(request.name)
    if control.state == lib.SHMC_S_POISONED:
        raise SegmentCorruptError(
            f"segment {request.name!r} was found damaged and is out of use", code=lib.SHMC_E_POISONED
        )
    request.check_agrees(control.geometry)


def _settle_namespaces(handshake: Handshake, control: Control) -> None:
    """Across pid namespaces the lock would not work; with nobody attached the segment becomes ours, warm."""
    if control.same_namespaces:
        return
    if not handshake.nobody_attached():
        raise SegmentMismatchError(
            f"segment {handshake.name!r} is in use by processes of another pid namespace "
            f"({control.identity.pid_ns}, ours is {own_namespaces()[0]}), where its lock cannot work",
            hint="share the pid namespace: docker run --pid=..., or hostPID / shareProcessNamespace in Kubernetes",
        )
    status = lib.shmc_takeover(control.base, control.size, *own_namespaces())
    if status:
        raise from_status(status, f"segment {handshake.name!r} cannot be taken over from another pid namespace")
    control.revalidate()
    log.info("segment %r taken over warm from a pid namespace that is gone", handshake.name)


def _mapping_of(handshake: Handshake, control: Control) -> Mapping:
    """The one of this process, or a new one; with one use taken."""
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


# ---- removing -------------------------------------------------------------------------------------------


def unlink(name: str, *, force: bool = False, timeout: float = 10.0) -> None:
    """Removes a segment. Processes that have it mapped keep the memory until they leave.

    SegmentBusyError while other processes are attached, unless forced; handles of this process do
    not count. A file that shmcache did not make is only removed by force.
    """
    check_name(name)
    try:
        handshake = Handshake.acquire(name, time.monotonic() + timeout)
    except FileNotFoundError:
        raise SegmentNotFoundError(f"there is no segment {name!r} on this host", hint="") from None
    with handshake:
        control = Control(handshake.fd, writable=True)
        if not force:
            _check_removable(handshake, control)
        remove_segment(handshake, control if control.status == lib.SHMC_OK else None)
        log.info("segment %r unlinked%s", name, " by force" if force else "")


def _check_removable(handshake: Handshake, control: Control) -> None:
    name, hint = handshake.name, "end these processes, or use force=True (shmcache-inspect: --force)"
    if control.status == lib.SHMC_E_NOT_SHMCACHE:
        raise control.error(name)
    if handshake.nobody_attached():
        return
    if control.status != lib.SHMC_OK or not control.same_namespaces:
        raise SegmentBusyError(f"segment {name!r} is in use by processes that cannot be told from here", hint=hint)
    others = sorted({slot.pid for slot in control.attached() if not slot.gone and slot.pid != os.getpid()})
    if others:
        raise SegmentBusyError(f"segment {name!r} is in use by pid {', '.join(map(str, others))}", hint=hint)
