"""Making a segment's files and removing them; both under the handshake.

A creation that does not reach READY leaves nothing behind, or, when it is killed, a stub that the next
one removes: regions, then the control file, so that as long as anything is left it can be found.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

from . import _shmfs
from ._commit import commit_region, in_thread
from ._control import Control, own_namespaces
from ._core import ffi, lib, log
from ._handshake import Handshake, names_inode
from ._names import control_name
from ._regions import Arena
from ._request import Request
from ._sizes import format_size
from ._space import check_room
from .errors import OutOfSharedMemoryError, ShmCacheError

_PAGE = 4096
_FULL = (errno.ENOSPC, errno.ENOMEM)


def create_segment(handshake: Handshake, request: Request) -> tuple[Control, Arena, int]:
    """A READY segment in the empty control file, and the flags of its region 0, which is committed.

    ValueError, OutOfSharedMemoryError or OSError; then everything is as before, the stub included.
    """
    try:
        return _fill(handshake, request, request.plan())
    except BaseException as e:
        remove_segment(handshake)
        if isinstance(e, ShmCacheError) or not isinstance(e, OSError) or e.errno not in _FULL:
            raise
        raise OutOfSharedMemoryError(
            f"segment {request.name!r} of {request.capacity} bytes cannot be created: {e.strerror}",
            hint="ask for a smaller capacity or remove unused segments",
        ) from e


def _fill(handshake: Handshake, request: Request, g: Any) -> tuple[Control, Arena, int]:
    _remove_regions(request.name)  # of a generation whose control file somebody has removed by hand
    pages = g.n_regions * (-(-g.region_bytes // _PAGE) * _PAGE) if g.region_bytes % _PAGE else g.capacity
    check_room(request.name, g.control_bytes + pages)
    os.fchmod(handshake.fd, request.file_mode)
    os.ftruncate(handshake.fd, g.control_bytes)
    os.posix_fallocate(handshake.fd, 0, g.control_bytes)

    control = Control(handshake.fd, writable=True)
    instance = int.from_bytes(os.urandom(8), "little")
    seed = ffi.new("uint64_t[2]", [int.from_bytes(os.urandom(8), "little") for _ in range(2)])
    status = lib.shmc_format(control.base, control.size, g, instance, *own_namespaces(), seed)
    if status:
        raise OSError(errno.EINVAL, f"formatting a segment failed with status {status}")
    handshake.note_pid()
    control.geometry, control.identity.instance = g, instance
    arena = Arena(request.name, control)
    arena.create_regions(request.file_mode)
    flags = _commit_first(arena)
    control.set_state(lib.SHMC_S_READY)
    control.revalidate()
    log.info("segment %r created: %s in %d regions", request.name, format_size(g.capacity), g.n_regions)
    return control, arena, flags


def _commit_first(arena: Arena) -> int:
    """Region 0, before anybody can attach: the first allocation need not wait."""
    stop = threading.Event()
    result: list[int | OSError] = []

    def work() -> None:
        try:
            result.append(commit_region(arena, 0, stop))
        except OSError as e:
            result.append(e)

    thread = in_thread(work, "create")
    try:
        thread.join()
    except BaseException:
        stop.set()
        thread.join()
        raise
    outcome = result[0]
    if isinstance(outcome, OSError):
        raise outcome
    return outcome


def remove_segment(handshake: Handshake, control: Control | None = None) -> None:
    """Removes all files of the name. `control`: mapped writable, when its state can be trusted."""
    if control is not None:
        control.set_state(lib.SHMC_S_UNLINKING)  # whoever meets it finishes it
    _remove_regions(handshake.name)
    if names_inode(handshake.name, handshake.inode):
        _shmfs.unlink_shm(control_name(handshake.name))


def _remove_regions(name: str) -> None:
    # Of every instance: who holds the handshake of the name holds it for all of its generations.
    for region in _shmfs.region_files(name):
        _shmfs.unlink_shm(region)
