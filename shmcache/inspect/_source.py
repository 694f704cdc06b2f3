"""Where a control file comes from: the host, mapped read-only, or a copy, read into memory.

What is no usable one ends the verb, with words that say what it is instead.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import BinaryIO

from .. import _shmfs
from .._control import Control, CopiedControl
from .._core import lib
from .._handshake import noted_pid, permission_error
from .._names import check_name, control_name, path_of
from ..errors import SegmentCorruptError
from ._stop import Exit, Stop

_HEADER = 1 << 20  # more than a header takes
_LARGEST = 1 << 36  # that of an arena of 12 TiB


def open_live(name: str) -> tuple[Control, bool]:
    """The control file of a segment, and whether somebody is attached to it."""
    try:
        check_name(name)
    except ValueError as e:
        raise Stop(Exit.USAGE, str(e)) from None
    try:
        fd = _shmfs.open_shm(control_name(name), read_only=True)
    except FileNotFoundError:
        raise Stop(
            Exit.NOT_FOUND, f"there is no segment {name!r} on this host; `shmcache-inspect list` shows what is"
        ) from None
    except PermissionError:
        raise Stop(Exit.REFUSED, str(permission_error(name, path_of(control_name(name))))) from None
    except SegmentCorruptError as e:
        raise Stop(Exit.NOT_A_SEGMENT, str(e)) from None
    try:
        held = _shmfs.is_locked(fd, _shmfs.PRESENCE_BYTE)
        control = Control(fd, writable=False)
        if control.status == lib.SHMC_E_NOT_READY:
            raise Stop(Exit.NOT_A_SEGMENT, f"segment {name!r} is half-made: {_maker(fd)}")
        if control.status:
            raise Stop(Exit.NOT_A_SEGMENT, str(control.error(name)))
        return control, held
    finally:
        os.close(fd)


def _maker(fd: int) -> str:
    pid = noted_pid(fd) if _shmfs.is_locked(fd, _shmfs.HANDSHAKE_BYTE) else 0
    if pid:
        return f"pid {pid} is making it; if that is stopped, all who open it wait: `kill -CONT {pid}`, or end it"
    return "its creator died; the next open with a capacity makes it anew, `shmcache-inspect gc` removes it"


def handshake_pid(name: str) -> int:
    """Who is making, attaching to or removing a segment at this moment; 0: nobody."""
    with contextlib.suppress(OSError, SegmentCorruptError):
        fd = _shmfs.open_shm(control_name(name), read_only=True)
        try:
            return noted_pid(fd) if _shmfs.is_locked(fd, _shmfs.HANDSHAKE_BYTE) else 0
        finally:
            os.close(fd)
    return 0


def _read_copy(f: BinaryIO) -> Control:
    """Of a file that is no control file, only the beginning: it may be a terabyte of something else."""
    data = bytearray(f.read(_HEADER))
    control = CopiedControl(data)
    if len(data) < _HEADER or control.status not in (lib.SHMC_OK, lib.SHMC_E_CORRUPT):
        return control
    if os.fstat(f.fileno()).st_size > _LARGEST:
        raise MemoryError
    del control  # it keeps the buffer as it is
    data = bytearray(data)
    data += f.read()
    return CopiedControl(data)


def open_copy(path: str) -> Control:
    """A copy of a control file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Stop(Exit.NOT_A_SEGMENT, f"{path} is no regular file; give a copy of /dev/shm/shmcache.NAME")
        with open(path, "rb") as f:
            control = _read_copy(f)
    except FileNotFoundError:
        raise Stop(Exit.NOT_FOUND, f"there is no file {path}") from None
    except PermissionError as e:
        raise Stop(Exit.REFUSED, f"{path}: {e.strerror}") from None
    except MemoryError:
        raise Stop(Exit.NOT_A_SEGMENT, f"{path} is too large for a control file, or for this process") from None
    if control.status:
        why = "it is blank, or of a segment that was not finished"
        if control.status != lib.SHMC_E_NOT_READY:
            why = str(control.error(os.path.basename(path)).args[0])
        raise Stop(Exit.NOT_A_SEGMENT, f"{path} is no usable copy of a control file: {why}")
    return control
