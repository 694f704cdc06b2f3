"""Files in /dev/shm: open, remove, list, lock, and how much room is left.

Opening and removing goes through shm_open and shm_unlink, so that no path is built by hand where
the C library may differ. Locks are OFD locks: they belong to the open file description, not to the
process, so that two threads exclude each other too and a close elsewhere does not drop them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct

import posix_ipc

from ._names import SHM_FOLDER, parse_file, path_of
from .errors import SegmentCorruptError

HANDSHAKE_BYTE = 0  # write lock: creating, attaching, removing
PRESENCE_BYTE = 1  # read lock: one per attachment


def open_shm(name: str, *, read_only: bool = False) -> int:
    """An existing object; O_CLOEXEC. FileNotFoundError, PermissionError, or SegmentCorruptError."""
    _check_regular(name, os.lstat(path_of(name)))
    fd = _shm_open(name, os.O_NONBLOCK, 0o600, read_only)
    try:  # its owner may have put a fifo there meanwhile, which must not block us either
        _check_regular(name, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_regular(name: str, st: os.stat_result) -> None:
    if not stat.S_ISREG(st.st_mode):
        raise SegmentCorruptError(
            f"{path_of(name)} is no regular file",
            hint="shmcache did not make it: look what it is, and remove it by hand",
        )


def create_shm(name: str, mode: int) -> int:
    """A new object with exactly this mode, whatever the umask; FileExistsError, or FileNotFoundError: no folder."""
    fd = _shm_open(name, posix_ipc.O_CREX, mode, False)
    os.fchmod(fd, mode)
    return fd


def _shm_open(name: str, flags: int, mode: int, read_only: bool) -> int:
    """OSError with number and path, whatever the library raises."""
    try:
        return int(posix_ipc.SharedMemory(name, flags, mode=mode, read_only=read_only).fd)
    except posix_ipc.ExistentialError as e:
        exists = flags & os.O_CREAT and os.path.isdir(SHM_FOLDER)
        raise (FileExistsError if exists else FileNotFoundError)(f"{path_of(name)}: {e}") from None
    except posix_ipc.PermissionsError as e:
        raise PermissionError(f"{path_of(name)}: {e}") from None
    except OSError as e:  # the library gives no number when there are too many open files
        number = e.errno or (errno.ENFILE if "system" in str(e) else errno.EMFILE)
        raise OSError(number, os.strerror(number), path_of(name)) from None


def unlink_shm(name: str) -> None:
    """Removes a name; one that is gone already is fine."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        pass
    except posix_ipc.PermissionsError as e:
        raise PermissionError(f"{path_of(name)}: {e}") from None


def control_files() -> list[str]:
    """Names of the segments whose control files are there, sorted."""
    files = (parse_file(file) for file in _entries())
    return sorted(f.segment for f in files if f is not None and f.region is None)


def region_files(segment: str) -> list[str]:
    """Names, as shm_open takes them, of all region files of a segment, of any instance."""
    return sorted(
        "/" + file for file in _entries() if (f := parse_file(file)) and f.region is not None and f.segment == segment
    )


def _entries() -> list[str]:
    try:
        return os.listdir(SHM_FOLDER)
    except FileNotFoundError:
        return []


def _flock(kind: int, byte: int) -> bytes:
    # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid (0 for OFD locks)
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)


def try_lock(fd: int, byte: int, *, exclusive: bool) -> bool:
    """Takes the lock unless another open file description holds one that conflicts."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(kind, byte))
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_locked(fd: int, byte: int) -> bool:
    """Whether another open file description holds any lock on the byte. Takes none itself."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
    return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)
