"""The control segment mapped into this process: what it says, before anybody attaches.

A file is believed only after C has found every table inside it. Reading needs no lock; who writes
(state, takeover) holds the handshake.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

from ._core import ffi, lib
from .errors import SegmentCorruptError, SegmentMismatchError, ShmCacheError

_BLOCK = 512  # unit of st_blocks
_FIRST_PAGE = 4096
_HEAD = 1 << 20  # more than the header and as many slots as there can be
_STRAY_WORDS = 4  # what a creator that died at once may have left in the first page: state and pid


def own_namespaces() -> tuple[int, int]:
    """Identities of this process's pid and time namespaces; 0 where the kernel has none."""

    def inode(kind: str) -> int:
        try:
            return os.stat(f"/proc/self/ns/{kind}").st_ino
        except OSError:
            return 0

    return inode("pid"), inode("time")


def unmap(address: int, size: int) -> None:
    """Gives address space back: for finalizers, which may not refer to what they outlive."""
    lib.shmc_unmap(ffi.cast("void *", address), size)


def _is_blank(page: bytes) -> bool:
    words = memoryview(page)[: len(page) & ~3].cast("I")
    return sum(map(bool, words)) <= _STRAY_WORDS and not any(page[len(page) & ~3 :])


@dataclass(frozen=True)
class Attached:
    """One slot that is in use."""

    pid: int
    gone: bool  # proven; anything else counts as alive


class Control:
    """A control file. `status` is what C says of it; 0 or a SHMC_E_* code. size 0: it is not mapped.

    The mapping ends with the last reference to `base`, and never at interpreter exit, where other
    threads may still be inside a call. close() ends it at once, for a mapping nobody else was given.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        st = os.fstat(fd)
        self.size = 0
        self.base: Any = ffi.NULL
        self.geometry: Any = ffi.new("shmc_geometry *")
        self.identity: Any = ffi.new("shmc_identity *")
        self.status: int = lib.SHMC_E_NOT_READY
        if st.st_blocks * _BLOCK < st.st_size or st.st_size == 0:
            # Creation did not get beyond reserving the file. Through a mapping, reading the holes
            # would allocate them, or be a SIGBUS when shared memory is full.
            if not _is_blank(os.pread(fd, _FIRST_PAGE, 0)):
                self.status = lib.SHMC_E_NOT_SHMCACHE
            return
        self.base = lib.shmc_map(fd, st.st_size, int(writable))
        if self.base == ffi.NULL:
            raise OSError(ffi.errno, f"cannot map {st.st_size} bytes of a control segment: {os.strerror(ffi.errno)}")
        self.size = st.st_size
        self._unmap = weakref.finalize(self.base, unmap, int(ffi.cast("uintptr_t", self.base)), self.size)
        self._unmap.atexit = False
        self.revalidate()

    def revalidate(self) -> None:
        """Reads the header again."""
        self.status = lib.shmc_validate(self.base, self.size, self.geometry, self.identity)
        # A creator that dies while it writes the header leaves some of what identifies a layout at 0.
        who = self.identity
        if self.status == lib.SHMC_E_FORMAT and not (who.format and who.fingerprint and who.word and who.libc):
            self.status = lib.SHMC_E_NOT_READY
        # Without our magic it is a stub only if it is blank: someone else's file is not to be taken over.
        unmarked = self.status in (lib.SHMC_E_NOT_READY, lib.SHMC_E_CORRUPT) and not self.identity.magic
        if unmarked and not _is_blank(bytes(ffi.buffer(self.base, min(self.size, _FIRST_PAGE)))):
            self.status = lib.SHMC_E_NOT_SHMCACHE

    def close(self) -> None:
        """Unmaps now."""
        if self.size:
            self._unmap()
            self.base, self.size = ffi.NULL, 0

    @property
    def instance(self) -> int:
        return int(self.identity.instance)

    @property
    def state(self) -> int:
        return int(self.identity.state)

    @property
    def ephemeral(self) -> bool:
        return bool(self.geometry.lifetime)

    @property
    def same_namespaces(self) -> bool:
        return (int(self.identity.pid_ns), int(self.identity.time_ns)) == own_namespaces()

    def set_state(self, state: int) -> None:
        lib.shmc_set_state(self.base, state)

    def attached(self) -> list[Attached]:
        """Slots in use. `gone` is only meaningful inside the segment's own pid namespace."""
        out, info = [], ffi.new("shmc_slot_info *")
        for slot in range(self.geometry.max_attachments):
            if lib.shmc_peek_slot(self.base, self.size, slot, info) or info.state == lib.SHMC_SLOT_FREE:
                continue
            verdict = lib.shmc_liveness(info.pid, info.start_time, info.start_stack)
            out.append(Attached(int(info.pid), verdict == lib.SHMC_GONE))
        return out

    def error(self, name: str) -> ShmCacheError:
        """The error for a status that is not 0."""
        if self.status == lib.SHMC_E_FORMAT:
            there = ffi.string(self.identity.version).decode("ascii", "replace")
            return SegmentMismatchError(
                f"segment {name!r} was made by shmcache {there} (format {self.identity.format}, layout "
                f"{self.identity.fingerprint:016x}), this is {ffi.string(lib.shmc_version()).decode()} "
                f"(format {lib.SHMC_FORMAT_VERSION}, layout {lib.shmc_fingerprint():016x})",
                hint="use the same version everywhere, or another name, or on_incompatible='replace'",
                code=self.status,
            )
        if self.status == lib.SHMC_E_NOT_SHMCACHE:
            return SegmentCorruptError(
                f"the file of segment {name!r} was not made by shmcache, or only its first bytes are left",
                hint="use another name, or remove it with shmcache.unlink(name, force=True)",
                code=self.status,
            )
        return SegmentCorruptError(
            f"segment {name!r} contradicts itself: {self.size} bytes, planned {self.geometry.control_bytes}",
            code=self.status,
        )


class CopiedControl(Control):
    """A control file's bytes, or its first, in this process's own memory: nobody can take them away."""

    def __init__(self, data: bytearray, size: int | None = None) -> None:
        self._data = data
        self.size = len(data) if size is None else size
        self.base = ffi.cast("void *", ffi.from_buffer(data)) if data else ffi.NULL
        self.geometry = ffi.new("shmc_geometry *")
        self.identity = ffi.new("shmc_identity *")
        self.status = lib.SHMC_E_NOT_READY
        if data:
            self.revalidate()

    def close(self) -> None:
        pass  # with the last reference

    @classmethod
    def head_of(cls, fd: int) -> CopiedControl:
        """Header and slots of a file that is not ours. Mapped, its owner could end this process by truncating it."""
        st = os.fstat(fd)
        if st.st_blocks * _BLOCK < st.st_size:
            return cls(bytearray())
        data = bytearray(os.pread(fd, _HEAD, 0))
        return cls(data, st.st_size if len(data) == _HEAD else len(data))
