"""What can go wrong, one class for each thing a caller can do about it.

A message says what was asked and what is there; `hint` says what to do, and is part of the text.
A class lists the C status codes that it stands for, and the map from code to class is built from
the classes, so that the two cannot drift apart. (A test compares the numbers with the C header.)
All of them survive pickling, since they travel between worker processes.
"""

from __future__ import annotations

import errno
from typing import ClassVar

__all__ = [
    "CapacityError",
    "ChecksumError",
    "ConfigurationError",
    "LockTimeoutError",
    "NamespaceMismatchError",
    "OutOfSharedMemoryError",
    "RawCloneError",
    "SegmentBusyError",
    "SegmentClosedError",
    "SegmentCorruptError",
    "SegmentExistsError",
    "SegmentMismatchError",
    "SegmentNotFoundError",
    "SegmentPermissionError",
    "ShmCacheError",
    "StaleHandleError",
]


class ShmCacheError(Exception):
    """Base of all errors of shmcache."""

    codes: ClassVar[tuple[int, ...]] = ()
    default_hint: ClassVar[str | None] = None
    default_errno: ClassVar[int] = 0
    code: int
    hint: str | None

    def __init__(self, message: str = "", *, hint: str | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.hint = self.default_hint if hint is None else hint
        self.code = code if code is not None else (self.codes[0] if self.codes else 0)
        if isinstance(self, OSError):
            object.__setattr__(self, "errno", self.default_errno)

    def __str__(self) -> str:
        message = str(self.args[0]) if self.args else ""
        return f"{message} ({self.hint})" if self.hint else message


class SegmentNotFoundError(ShmCacheError, FileNotFoundError):
    """No segment of this name exists on this host."""

    default_errno = errno.ENOENT
    default_hint = "shmcache.open() with a capacity creates it"


class SegmentExistsError(ShmCacheError, FileExistsError):
    """create() found a segment of this name."""

    default_errno = errno.EEXIST
    default_hint = "use shmcache.open() to share it, or shmcache.unlink() first"


class SegmentBusyError(ShmCacheError):
    """The segment cannot be removed or replaced while others are attached."""


class SegmentMismatchError(ShmCacheError):
    """What exists is not what was asked for: arguments, format, or pid namespace."""

    codes = (-14,)  # FORMAT


class SegmentCorruptError(ShmCacheError):
    """The file is not a segment, or its contents contradict themselves."""

    codes = (-15, -13, -5)  # CORRUPT, NOT_SHMCACHE, POISONED
    default_hint = "shmcache.unlink(name) removes it once nobody is attached"


class SegmentPermissionError(ShmCacheError, PermissionError):
    """The segment belongs to somebody else."""

    default_errno = errno.EACCES


class SegmentClosedError(ShmCacheError):
    """The cache was closed in this process."""

    codes = (-6,)  # CLOSED


class NamespaceMismatchError(ShmCacheError):
    """Another attachment made this namespace with other parts or another descriptor."""

    codes = (-10,)  # MISMATCH


class ConfigurationError(ShmCacheError, ValueError, AssertionError):
    """Settings that contradict each other. (LMCache asserts them, hence the third base.)"""


class CapacityError(ShmCacheError, ValueError):
    """The request is larger than a region: it could never be served."""

    codes = (-2,)  # CAPACITY


class ChecksumError(ShmCacheError):
    """The bytes of a part are not those that were put."""

    default_hint = (
        "somebody wrote to them after the put, or memory fails: remove(key) makes it a miss, then it can be stored "
        "anew; `shmcache-inspect verify` tells which others are wrong"
    )


class OutOfSharedMemoryError(ShmCacheError, OSError):
    """The shared memory file system, or a fixed table of the segment, is full."""

    codes = (-8, -9)  # SLOTS, NAMESPACES
    default_errno = errno.ENOSPC


class LockTimeoutError(ShmCacheError, TimeoutError):
    """A lock was not to be had in time; the message names its holder."""

    codes = (-4,)  # LOCK_TIMEOUT
    default_errno = errno.ETIMEDOUT


class StaleHandleError(ShmCacheError):
    """A handle that was released, reaped, or inherited over a fork."""

    codes = (-3, -7)  # STALE, FORKED


class RawCloneError(ShmCacheError):
    """This process or thread was made by a raw clone(), and cannot own a robust lock."""

    codes = (-17,)  # RAW_CLONE
    default_hint = "start the process with os.fork(), multiprocessing or exec"


def _subclasses(base: type[ShmCacheError]) -> list[type[ShmCacheError]]:
    return [base, *(deeper for direct in base.__subclasses__() for deeper in _subclasses(direct))]


_CLASS_OF = {code: cls for cls in _subclasses(ShmCacheError) for code in cls.codes}


def from_status(status: int, message: str, *, hint: str | None = None) -> ShmCacheError:
    """The error for a negative C status. Codes without a class of their own give the base class."""
    return _CLASS_OF.get(status, ShmCacheError)(message, hint=hint, code=status)
