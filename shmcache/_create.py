"""Making a segment's files and removing them; both under the handshake.

A creation that does not reach READY leaves nothing behind, or, when it is killed, a stub that the next
one removes: regions, then the control file, so that as long as anything is left it can be found.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from typing import Any

from . import _shmfs
from ._commit import FULL, reserve_aside
from ._control import Control, own_namespaces
from ._core import ffi, lib, log
from ._handshake import Handshake, names_inode
from ._names import control_name, region_name
from ._regions import Arena
from ._request import Request
from ._sizes import format_size
from ._space import check_room
from .errors import OutOfSharedMemoryError, ShmCacheError

_PAGE = 4096


def create_segment(handshake: Handshake, request: Request) -> tuple[Control, Arena]:
    """A READY segment in the empty control file, with the memory of region 0 reserved.

    ValueError, OutOfSharedMemoryError or OSError; then everything is as before, the stub included.
    """
    try:
        return _fill(handshake, request, request.plan())
    except BaseException as e:
        _undo(handshake, request)
        if isinstance(e, ShmCacheError) or not isinstance(e, OSError):
            raise
        if e.errno == errno.EFBIG:
            raise OutOfSharedMemoryError(
                f"segment {request.name!r} cannot be created: its files may be of {_largest_file()} bytes at most",
                hint="raise RLIMIT_FSIZE (ulimit -f), or ask for smaller regions (region_bytes)",
            ) from e
        if e.errno not in FULL:
            raise
        raise OutOfSharedMemoryError(
            f"segment {request.name!r} of {request.capacity} bytes cannot be created: {e.strerror}",
            hint="ask for a smaller capacity or remove unused segments",
        ) from e


def _fill(handshake: Handshake, request: Request, g: Any) -> tuple[Control, Arena]:
    _remove_regions(request.name)  # of a generation whose control file somebody has removed by hand
    pages = g.n_regions * (-(-g.region_bytes // _PAGE) * _PAGE) if g.region_bytes % _PAGE else g.capacity
    check_room(request.name, g.control_bytes + pages)
    os.fchmod(handshake.fd, request.file_mode)
    os.ftruncate(handshake.fd, g.control_bytes)
    os.posix_fallocate(handshake.fd, 0, g.control_bytes)
    handshake.note_pid()

    control = Control(handshake.fd, writable=True)
    instance = int.from_bytes(os.urandom(8), "little")
    seed = ffi.new("uint64_t[2]", [int.from_bytes(os.urandom(8), "little") for _ in range(2)])
    status = lib.shmc_format(control.base, control.size, g, instance, *own_namespaces(), seed)
    if status:
        raise OSError(errno.EINVAL, f"formatting a segment failed with status {status}")
    control.geometry, control.identity.instance = g, instance
    arena = Arena(request.name, control)
    arena.create_regions(request.file_mode)
    # Reserving says now whether there is room. Clearing pages may take seconds and must not keep
    # others from attaching: it is done after the handshake.
    reserve_aside(arena, 0)
    control.set_state(lib.SHMC_S_READY)
    control.revalidate()
    log.info("segment %r created: %s in %d regions", request.name, format_size(g.capacity), g.n_regions)
    return control, arena


def _undo(handshake: Handshake, request: Request) -> None:
    """Removes what a failed creation made, also when no descriptor is left to list the folder with."""
    try:
        remove_segment(handshake)
    except OSError:
        instance = Control(handshake.fd, writable=True).instance
        for i in range(request.plan().n_regions if instance else 0):
            _shmfs.unlink_shm(region_name(request.name, instance, i))
        _shmfs.unlink_shm(control_name(request.name))


def _largest_file() -> int:
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0]


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
        with contextlib.suppress(PermissionError):  # somebody else's leftovers: not of our instance
            _shmfs.unlink_shm(region)
