"""What the tests with real processes share. No test waits without a deadline."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmcache
from shmcache import SharedCache
from shmcache._core import ffi, lib

KIB = 1 << 10
MIB = 1 << 20
SHM = Path("/dev/shm")
LONG_NS = 60 * 10**9  # longer than any test; its process is killed or let go before
PROMPT = 5.0  # seconds: far below the timeouts that it is compared with, far above the delays of a busy machine


def small(name: str, capacity: int | str = "4MiB", **more: Any) -> SharedCache:
    """A segment without background threads, so that every fork and kill meets only what the test does.

    And without huge pages: asking for them waits for every CPU, which takes seconds where all are busy.
    """
    more.setdefault("prefault", "lazy")
    more.setdefault("hugepages", False)
    return shmcache.open(name, capacity=capacity, **more)


def join(name: str, **more: Any) -> SharedCache:
    more.setdefault("prefault", "lazy")
    return shmcache.attach(name, **more)


def files_of(name: str) -> list[str]:
    return sorted(p.name for p in SHM.glob(f"shmcache.{name}*"))


def eventually(condition: Callable[[], object], what: str, timeout: float = 10.0) -> None:
    """Polls what no pipe can tell, such as the state of a lock or of a process."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout} s: {what}")
        time.sleep(0.001)


class Patience:
    """`while patience.lasts(enough)` lasts `seconds`, and where little happens in that time, until it is enough."""

    def __init__(self, seconds: float, longest: float = 60.0) -> None:
        self._begin = time.monotonic()
        self._seconds, self._longest = seconds, longest

    def lasts(self, enough: bool) -> bool:
        return time.monotonic() - self._begin < (self._seconds if enough else self._longest)


class Stopwatch:
    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start


# ---- bytes ------------------------------------------------------------------------------------------


def store(kv: Any, key: Any, fill: int = 1, nbytes: int = 4096) -> bool:
    """Put a chunk of one fill byte; nothing is held afterwards."""
    with kv.allocate(nbytes) as obj:
        obj.byte_array[:] = bytes([fill]) * nbytes
        return bool(kv.put(key, obj))


def uniform(obj: Any, fill: int | None = None) -> int:
    """The one byte that all bytes of the object are."""
    raw = bytes(obj.byte_array)
    assert raw == raw[:1] * len(raw), f"mixed bytes: {sorted(set(raw))}"
    assert fill is None or raw[0] == fill, f"filled with {raw[0]}, expected {fill}"
    return raw[0]


_STAMP = struct.Struct("<QQ")


def stamp(obj: Any, key: int) -> None:
    """Key and size at head and tail, as in a block that a torn or recycled write would spoil."""
    view = obj.byte_array
    mark = _STAMP.pack(key, len(view))
    view[: len(mark)] = mark
    view[-len(mark) :] = mark


def check_stamp(obj: Any, key: int) -> None:
    view = obj.byte_array
    mark = _STAMP.pack(key, len(view))
    head, tail = bytes(view[: len(mark)]), bytes(view[-len(mark) :])
    assert head == mark and tail == mark, f"key {key}: found {_STAMP.unpack(head)} and {_STAMP.unpack(tail)}"


# ---- looking at a cache -----------------------------------------------------------------------------


def instance(cache: SharedCache) -> int:
    return int(cache._attachment.mapping.instance)


def recoveries(cache: SharedCache) -> int:
    return cache.stats().lock.recoveries


def settle(cache: SharedCache) -> None:
    """Reap and drain until nothing is left to do; deferred releases of this process included."""
    cache.reap()
    for _ in range(100_000):
        if lib.shmc_step(cache._attachment.handle) != lib.SHMC_MORE:
            return
    raise AssertionError("draining never ends")


def assert_sound(cache: SharedCache) -> None:
    assert cache.verify() == []


def assert_only_published(cache: SharedCache) -> None:
    """Invariant 7: with nobody writing and nothing unlinked still held, all used bytes are published ones."""
    settle(cache)
    assert_sound(cache)
    s = cache.stats()
    assert s.bytes.used == s.bytes.evictable + s.bytes.pinned, s.bytes


# ---- the lock ---------------------------------------------------------------------------------------


def hold_lock(cache: SharedCache, ns: int = LONG_NS, *, in_transaction: bool = False) -> None:
    """Sleeps inside the lock, with `in_transaction` in the middle of changing the header."""
    lib.shmc_debug_hold_lock(cache._attachment.handle, ns, int(in_transaction))


def lock_holder(cache: SharedCache) -> int:
    """Pid of who is inside the lock; 0: nobody."""
    out = ffi.new("shmc_holder *")
    lib.shmc_last_holder(cache._attachment.handle, out)
    return int(out.pid)


def await_holder(cache: SharedCache, pid: int, *, in_transaction: bool = False) -> None:
    eventually(lambda: lock_holder(cache) == pid, f"pid {pid} holds the lock")
    if in_transaction:
        eventually(lambda: not cache._raw_stats().exact, f"pid {pid} is in a transaction")


def state_of(pid: int) -> str:
    """R, S, T (stopped), Z ... of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def await_stopped(pid: int) -> None:
    eventually(lambda: state_of(pid) == "T", f"pid {pid} is stopped")


# ---- the kernel -------------------------------------------------------------------------------------

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _checked(libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    encoded = [None if s is None else s.encode() for s in (source, target, kind, data)]
    _checked(libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def own_mounts() -> None:
    """In a child: mounts made from here on are seen by it and its children only."""
    unshare(CLONE_NEWNS)
    mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def own_shm(size: str) -> None:
    """In a child: a /dev/shm of its own, that small."""
    own_mounts()
    mount("tmpfs", "/dev/shm", "tmpfs", 0, f"size={size},mode=1777")


def need_namespaces(flags: int) -> None:
    """Skips, with the reason printed, where this user may not make such namespaces."""
    pid = os.fork()
    if pid == 0:
        try:
            unshare(flags)
            os._exit(0)
        except OSError as e:
            os._exit(e.errno or 1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        pytest.skip(f"no privilege for namespaces of its own: {os.strerror(code)}")


# ---- dying at one system call -----------------------------------------------------------------------

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
SIGSYS = 31


class _Filter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter)))


def die_instead_of_waking() -> None:
    """From here on this process is killed by the kernel (SIGSYS) in place of a FUTEX_WAKE of everybody.

    That is the call which wakes those who wait for memory or for a publication: it comes after the
    unlock, so everything is done but nobody has been told. Locks of libc wake one at a time.
    """
    load, equal, give = 0x20, 0x15, 0x06
    allow, kill_process = 0x7FFF0000, 0x80000000
    number, op, count = 0, 16 + 8, 16 + 16  # offsets in struct seccomp_data
    wake, everybody = 1, 0x7FFFFFFF
    program = (_Filter * 8)(
        _Filter(load, 0, 0, number),
        _Filter(equal, 0, 5, _SYS_FUTEX[platform.machine()]),
        _Filter(load, 0, 0, op),
        _Filter(equal, 0, 3, wake),
        _Filter(load, 0, 0, count),
        _Filter(equal, 0, 1, everybody),
        _Filter(give, 0, 0, kill_process),
        _Filter(give, 0, 0, allow),
    )
    pr_set_no_new_privs, pr_set_seccomp, mode_filter = 38, 22, 2
    _checked(libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0), "no_new_privs")
    _checked(libc.prctl(pr_set_seccomp, mode_filter, ctypes.byref(_Program(8, program)), 0, 0), "seccomp")


def need_seccomp() -> None:
    if platform.machine() not in _SYS_FUTEX:
        pytest.skip(f"the number of the futex call is not known for {platform.machine()}")
    pid = os.fork()
    if pid == 0:
        try:
            die_instead_of_waking()
            os._exit(0)
        except OSError as e:
            os._exit(e.errno or 1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        pytest.skip(f"seccomp filters are not permitted: {os.strerror(code)}")


# ---- one instruction after another --------------------------------------------------------------------


def trace_me() -> None:
    """In a child: from here on its parent may single-step it."""
    _checked(libc.ptrace(0, 0, None, None), "ptrace")


def await_trap(pid: int) -> int:
    """The signal with which a traced child has stopped."""
    _, status = os.waitpid(pid, 0)
    assert os.WIFSTOPPED(status), f"it has ended: {status}"
    return os.WSTOPSIG(status)


def single_step(pid: int) -> None:
    """Let a traced and stopped child execute one instruction."""
    ptrace_singlestep = 9
    _checked(libc.ptrace(ptrace_singlestep, pid, None, None), "ptrace")
    await_trap(pid)


def need_ptrace() -> None:
    pid = os.fork()
    if pid == 0:
        try:
            trace_me()
        except OSError as e:
            os._exit(e.errno or 1)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        pytest.skip(f"processes may not be traced here: {os.strerror(os.waitstatus_to_exitcode(status))}")
    try:
        single_step(pid)
    except OSError as e:
        pytest.skip(f"single steps are not to be had here: {e}")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
