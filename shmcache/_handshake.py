"""The handshake: who may create, attach to or remove the segment of a name; and presence.

Both are OFD locks on the control file. The handshake is a write lock on byte 0, polled, because a
forked child can keep a dead creator's lock alive and a stopped creator must not hang the others.
Presence is a read lock on byte 1, one for each attachment through an open() of its own. Whoever holds
the handshake and finds byte 1 free has proof that nobody is attached, in any pid namespace: to attach
one needs the handshake first. A dying process counts until its descriptors are closed.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
import struct
import time
from typing import Any

from . import _shmfs
from ._core import ffi, lib
from ._names import SHM_FOLDER, control_name, path_of
from .errors import LockTimeoutError, OutOfSharedMemoryError, SegmentPermissionError

_POLL = 0.005
_PID = struct.Struct("I")


class Handshake:
    """The handshake held on the control file that the name leads to. A context manager.

    The object exists before the lock is taken, and gives it back when it is collected: so an
    interrupt between any two steps leaves no lock behind in a process that lives on.
    """

    def __init__(self, name: str, fd: int) -> None:
        self._cell = _own(fd)
        self._noted = False
        self.name = name
        self.fd = fd
        self.inode = _inode(os.fstat(fd))

    @classmethod
    def acquire(cls, name: str, deadline: float, *, create_mode: int | None = None) -> Handshake:
        """Opens (with a mode: creates) the control file and takes the lock.

        FileNotFoundError, SegmentPermissionError, SegmentCorruptError (no regular file) or
        LockTimeoutError; at least one try is made, whatever the deadline (time.monotonic()).
        """
        while True:
            fd = _open_control(name, create_mode)
            if fd is None:  # came and went between two calls
                if time.monotonic() >= deadline:
                    raise _timed_out(name, 0)
                continue
            held = cls(name, fd)
            try:
                _check_owner(name, os.fstat(fd))
                while not _shmfs.try_lock(fd, _shmfs.HANDSHAKE_BYTE, exclusive=True):
                    if time.monotonic() >= deadline:
                        raise _timed_out(name, noted_pid(fd))
                    time.sleep(_POLL)
                if names_inode(name, held.inode):
                    return held
                if time.monotonic() >= deadline:
                    raise _timed_out(name, 0)
            except BaseException:
                held.close()
                raise
            held.close()  # removed while we waited: start over

    def __enter__(self) -> Handshake:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives it back; doing it again does nothing. In a forked child the descriptor is closed already."""
        try:
            if self._noted and self._cell.fd >= 0:
                self._write_pid(0)
        finally:
            lib.shmc_fd_close(self._cell)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def note_pid(self) -> None:
        """Writes who holds the handshake into the file. Only for a file that is ours: with our header, or new."""
        self._noted = True
        self._write_pid(os.getpid())

    def _write_pid(self, pid: int) -> None:
        os.pwrite(self.fd, _PID.pack(pid), lib.shmc_handshake_pid_offset())

    def nobody_attached(self) -> bool:
        """Proof, as long as this handshake is held."""
        return not _shmfs.is_locked(self.fd, _shmfs.PRESENCE_BYTE)


class Presence:
    """This attachment's mark on the segment that somebody is there. Gone with the process.

    In a forked child it is nobody's: the descriptor was closed at the fork, and close() does nothing.
    """

    def __init__(self, fd: int | None) -> None:
        self._cell = None if fd is None else _own(fd)

    @classmethod
    def take(cls, handshake: Handshake) -> Presence:
        # An open of its own: a lock taken through the handshake's would end with the handshake.
        fd = _shmfs.open_shm(control_name(handshake.name))
        mark = cls(fd)  # before the lock, and gives it back when it is collected
        try:
            if _inode(os.fstat(fd)) != handshake.inode:
                raise OSError(f"{path_of(control_name(handshake.name))} was replaced by hand while it was opened")
            if not _shmfs.try_lock(fd, _shmfs.PRESENCE_BYTE, exclusive=False):
                raise OSError(f"presence on {path_of(control_name(handshake.name))} is locked by somebody else")
        except BaseException:
            mark.close()
            raise
        return mark

    @classmethod
    def nowhere(cls) -> Presence:
        """For a segment whose name is gone: nobody can come, so nobody needs to be told."""
        return cls(None)

    def close(self) -> None:
        if self._cell is not None:
            lib.shmc_fd_close(self._cell)


def names_inode(name: str, inode: tuple[int, int]) -> bool:
    """Whether the name still leads to this file."""
    try:
        return _inode(os.lstat(path_of(control_name(name)))) == inode
    except FileNotFoundError:
        return False


def permission_error(name: str, path: str) -> SegmentPermissionError:
    """With owner and mode of the file, as far as they can be seen."""
    try:
        st = os.lstat(path)
        try:
            owner = f"{pwd.getpwuid(st.st_uid).pw_name} (uid {st.st_uid})"
        except KeyError:
            owner = f"uid {st.st_uid}"
        there = f"{path} belongs to {owner}, mode {stat.S_IMODE(st.st_mode):#o}"
    except OSError as e:
        there = f"{path}: {e.strerror}"
    return SegmentPermissionError(
        f"segment {name!r} cannot be used by uid {os.geteuid()}: {there}",
        hint="run as its owner, or use another name",
    )


def _open_control(name: str, create_mode: int | None) -> int | None:
    """None: try again, it vanished or appeared just now."""
    shm_name = control_name(name)
    try:
        return _shmfs.open_shm(shm_name)
    except FileNotFoundError:
        if create_mode is None:
            raise
    except OSError as e:
        raise _refused(name, e) from None
    try:
        return _shmfs.create_shm(shm_name, create_mode)
    except FileExistsError:
        return None
    except OSError as e:
        raise _refused(name, e) from None


def _refused(name: str, e: OSError) -> OSError:
    """What the kernel's refusal to open or make the control file means, and what to do; else `e` itself."""
    if isinstance(e, PermissionError):
        return permission_error(name, path_of(control_name(name)))
    if e.errno == errno.EROFS:
        return SegmentPermissionError(
            f"segment {name!r} cannot be used: {SHM_FOLDER} is a read-only file system (EROFS)",
            hint="mount it writable: attaching writes too",
        )
    if e.errno == errno.ENOSPC:
        return OutOfSharedMemoryError(
            f"segment {name!r} cannot be created: {SHM_FOLDER} has no room for another file",
            hint="remove unused files, or raise its nr_inodes",
        )
    if isinstance(e, FileNotFoundError):
        return OutOfSharedMemoryError(
            f"segment {name!r} cannot be created: this host has no {SHM_FOLDER} (ENOENT)",
            hint=f"mount a tmpfs there: mount -t tmpfs -o mode=1777 tmpfs {SHM_FOLDER}",
        )
    return e


def _check_owner(name: str, st: os.stat_result) -> None:
    if st.st_uid != os.geteuid():
        raise permission_error(name, path_of(control_name(name)))


def _inode(st: os.stat_result) -> tuple[int, int]:
    return st.st_dev, st.st_ino


def _own(fd: int) -> Any:
    """The descriptor in the hands of C: closed once, with all its locks, by a call or when it is collected."""
    cell = ffi.gc(ffi.new("shmc_fd *", {"fd": -1}), lib.shmc_fd_close)
    lib.shmc_fd_set(cell, fd)
    return cell


def noted_pid(fd: int) -> int:
    """Who wrote that it holds the handshake; 0: nobody."""
    raw = os.pread(fd, _PID.size, lib.shmc_handshake_pid_offset())
    return int(_PID.unpack(raw)[0]) if len(raw) == _PID.size else 0


def _timed_out(name: str, pid: int) -> LockTimeoutError:
    holder = f"pid {pid}" if pid else "a process that left no note"
    return LockTimeoutError(
        f"segment {name!r} is being created, attached or removed by {holder}, and the timeout is over",
        hint=f"if pid {pid} is stopped or hangs, end it" if pid else "try again with a longer timeout",
    )
