"""Segments of this host: connect to one by name, leave it, remove it.

This is the boundary to the layers above. `connect` runs the whole handshake and calls the caller's
`claim`, which takes a slot in the attachment table, while the handshake is still held: so a segment
cannot be removed or replaced between the look and the leap. What is found wins over what is asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from ._arena import Committer
from ._control import Control, own_namespaces
from ._core import ffi, lib, log
from ._create import create_segment, remove_segment
from ._directory import SegmentInfo, segments
from ._handshake import Handshake, Presence
from ._mapping import Mapping, mapping_of
from ._names import check_name
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
_FIRST_TIMEOUT = 60.0  # for another process that got hold of it first


class Claimed(Protocol):
    """What `claim` returns: anything that has the attached `shmc *` as `handle`."""

    @property
    def handle(self) -> Any: ...


T = TypeVar("T", bound=Claimed)


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
            creating = handshake.size == 0 and may_create
            if creating:
                mapping: Mapping | None = _create(handshake, request)
            else:
                mapping = _settle(handshake, request, how, on_incompatible)
            if mapping is None:
                continue  # something stale was removed: start over, now without it
            try:
                presence, claimed = _claim(handshake, mapping, claim)
            except BaseException:
                if creating:
                    remove_segment(handshake, mapping.control)
                raise
        if creating:
            _commit_first(mapping, presence, claimed)
        return mapping, presence, claimed


def _create(handshake: Handshake, request: Request) -> Mapping:
    control, arena = create_segment(handshake, request)
    mapping = Mapping(request.name, handshake.inode, control, arena)
    mapping.acquire()
    return mapping


def _commit_first(mapping: Mapping, presence: Presence, claimed: Claimed) -> None:
    """Region 0, before the creator returns. It is reserved already, so only time can be short."""
    committer = Committer(mapping.arena, claimed.handle)
    try:
        committer.ensure_one(_FIRST_TIMEOUT, whole=True)
    except ShmCacheError as e:
        log.warning("segment %r: its first region is not ready yet: %s", mapping.name, e)
    except BaseException:  # Ctrl-C: nobody will be given what could be closed
        committer.stop()
        lib.shmc_detach(claimed.handle, 0, ffi.new("uint32_t *"))
        presence.close()
        _remove_if_alone(mapping)
        mapping.release()
        raise


def disconnect(mapping: Mapping, presence: Presence) -> None:
    """Leaves after the handle was detached. The last one to leave an ephemeral segment removes it."""
    presence.close()
    if mapping.control.ephemeral and _remove_if_alone(mapping):
        log.info("ephemeral segment %r removed: nobody is attached", mapping.name)
    mapping.release()


def _remove_if_alone(mapping: Mapping) -> bool:
    try:
        with Handshake.acquire(mapping.name, time.monotonic() + _LEAVE_TIMEOUT) as handshake:
            if handshake.inode == mapping.inode and handshake.nobody_attached():
                remove_segment(handshake, mapping.control)
                return True
    except (FileNotFoundError, LockTimeoutError, SegmentPermissionError, SegmentCorruptError):
        pass  # gone already, or busy: the next to open or leave it decides
    return False


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
    ours = (lib.SHMC_OK, lib.SHMC_E_FORMAT, *([lib.SHMC_E_CORRUPT] if on_incompatible == "replace" else []))
    if control.status not in ours:  # also when replacing: a file that was never a segment is not ours to remove
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
    return mapping_of(handshake, control)


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
