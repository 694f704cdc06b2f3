"""One attachment of this process: the handle, what its calls use again and again, its threads.

A `SharedCache` has one at a time. It gets another in a forked child, or after others took this
process for dead; objects keep the attachment they were made under, because their holds are its.

    holds    owners without a hold, each with its address: (owner, address)
    at       the address of the handle
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from . import errors
from ._arena import Committer, PrefaultState
from ._checksum import checksum_of
from ._core import NULL, OWNERS, address_of, ffi, lib, log, operation_name, owned
from ._defer import Deferred, EventLike
from ._dtypes import TABLE, torch_dtype
from .pinning import Pinner

Hold = tuple[Any, int]  # (shmc_owner, its address)

POOLED = 512  # kept for the next call; also in native/python/fast.c
_start_lock = threading.Lock()


def _renew_start_lock() -> None:
    global _start_lock
    _start_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_start_lock)


class Home(Protocol):
    """What an attachment needs of its cache."""

    @property
    def name(self) -> str: ...

    def _reattach(self, old: Attachment) -> None: ...


class Attachment:
    """See the module. Made by `Attachment.claim`, under the handshake of the segment."""

    __slots__ = (
        "__weakref__",
        "_committer",
        "_deferred",
        "_home",
        "_slot",
        "address",
        "at",
        "base",
        "bases",
        "checksum",
        "closed",
        "handle",
        "holds",
        "mapping",
        "name",
        "pid",
        "presence",
        "size",
        "ticket",
        "ticket_at",
    )

    def __init__(self, home: Home, mapping: Any, handle: Any) -> None:
        self._home = weakref.ref(home)  # objects keep their cache by their namespace
        self.name = home.name
        self.mapping = mapping
        self.handle = handle
        self.at = address_of(handle)
        self.base = mapping.base
        self.size = int(mapping.size)
        self.checksum = checksum_of(self.name, int(mapping.geometry.flags))  # None: the segment has none
        self.presence: Any = None
        self._slot = (-1, 0)
        self.pid = os.getpid()
        self.closed = False
        self.address: int = mapping.arena.address
        self.holds: list[Hold] = []
        self.ticket = ffi.new("uint32_t *")  # of allocations that will not wait
        self.ticket_at = address_of(self.ticket)
        self.bases: dict[int, Any] = {}
        self._committer: Committer | None = None
        self._deferred: Deferred | None = None

    @classmethod
    def claim(cls, home: Home, mapping: Any, lock_timeout: float, rank: int | None, label: str | None) -> Attachment:
        """Take a slot of the segment's attachment table."""
        raw = lib.shmc_new(mapping.base, mapping.size, int(lock_timeout * 1e9))
        if raw == NULL:
            raise errors.SegmentCorruptError(f"segment {home.name!r}: its header is not valid")
        new = cls(home, mapping, owned(raw, lib.shmc_drop, mapping.base))
        name = (label or "").encode()[: lib.SHMC_LABEL_MAX - 1]
        number = -1 if rank is None else rank
        rc = lib.shmc_attach(new.handle, number, name)
        if rc == lib.SHMC_E_SLOTS:  # perhaps of dead processes
            lib.shmc_reap(new.handle, ffi.new("shmc_reap_report *"))
            rc = lib.shmc_attach(new.handle, number, name)
        if rc < 0:
            raise new.error(rc, "attach")
        slot = lib.shmc_slot_of(new.handle)
        new._slot = (slot, new._slot_state(slot)[0])
        mapping.pinner.serve(new)
        return new

    def _slot_state(self, slot: int) -> tuple[int, int]:
        info = ffi.new("shmc_slot_info *")
        lib.shmc_slot(self.handle, slot, info)
        return info.gen, info.state

    # ---- what calls use again ---------------------------------------------------------------

    def new_hold(self) -> Hold:
        """An owner without a hold. It exists before the call that takes one (design, section 8)."""
        try:
            return self.holds.pop()
        except IndexError:
            owner = owned(lib.shmc_owner_new(self.handle, 1), lib.shmc_owner_free)
            return owner, address_of(owner)

    def new_holds(self, n: int) -> tuple[list[Hold], Any]:
        """n of them, and one array of all."""
        pairs: list[Hold] = []
        pop, add = self.holds.pop, pairs.append
        try:
            for _ in range(n):
                add(pop())
        except IndexError:
            while len(pairs) < n:
                add(self.new_hold())
        return pairs, ffi.new(OWNERS, [owner for owner, _ in pairs])

    def empty_holds(self, pairs: list[Hold]) -> None:
        """Owners that hold nothing (any more) are for the next call."""
        self.holds.extend(pairs[: max(0, POOLED - len(self.holds))])

    def release(self, pairs: list[Hold]) -> int:
        """Give holds back, last to first; a status."""
        rc: int = lib.shmc_release(self.handle, ffi.new(OWNERS, [owner for owner, _ in pairs]), len(pairs))
        if rc >= 0:
            self.empty_holds(pairs)
        return rc

    def release_after(self, pairs: list[Hold], event: EventLike) -> None:
        """Give holds back once `event` has happened."""
        self.after(event, lambda: self.release(pairs))

    def after(self, event: EventLike, release: Callable[[], int]) -> None:
        """Call `release`, which returns a status, once `event` has happened."""

        def act(_known: bool) -> None:
            rc = release()
            if rc < 0 and not self.closed:
                raise self.error(rc, "deferred release")

        self.deferred().add(event, act)

    def arena(self) -> Any:
        """The mapped arena. Whoever hands out addresses in it keeps it."""
        return self._mapped("view").arena

    def pinner(self) -> Pinner:
        """Registers the arena with CUDA."""
        pinner: Pinner = self._mapped("pin").pinner
        return pinner

    def _mapped(self, what: str) -> Any:
        mapping = self.mapping
        if mapping is None:
            raise self.error(lib.SHMC_E_CLOSED, what)
        return mapping

    def base_tensor(self, code: int) -> Any:
        """All of the arena as one tensor of a dtype, of which objects are views."""
        import torch

        row = TABLE[code]
        arena = self.arena()
        with torch.inference_mode(False):
            base = torch.frombuffer(arena.buffer, dtype=torch_dtype(row), count=arena.bytes // row.itemsize)
        self.bases[code] = base
        self.pinner().poke()  # whoever copies to a device has most likely started CUDA by now
        return base

    # ---- threads ------------------------------------------------------------------------------

    def committer(self) -> Committer:
        """Commits regions of the arena, in the background and when an allocation needs one."""
        if self._committer is None:
            with _start_lock:
                if self._committer is None:
                    self._committer = Committer(self.arena(), self.handle)
        return self._committer

    def prefault_state(self) -> PrefaultState | None:
        """How far the committer got; None when none was started."""
        return None if self._committer is None else self._committer.state()

    def deferred(self) -> Deferred:
        """What waits for events."""
        if self._deferred is None:
            with _start_lock:
                if self._deferred is None:
                    self._deferred = Deferred(self.name)
        return self._deferred

    def stop(self, timeout: float) -> None:
        """End the threads; what still waits for an event after `timeout` seconds is given up."""
        if self._deferred is not None:
            left = self._deferred.close(timeout)
            if left:
                log.warning("%s: closed with %d deferred releases or puts, whose events did not happen in %g s",
                            self.name, left, timeout)  # fmt: skip
        if self._committer is not None:
            self._committer.stop()
            self._committer = None  # it keeps the arena mapped

    # ---- failures -----------------------------------------------------------------------------

    def recover(self, rc: int, what: str) -> None:
        """After a call failed with `rc`: return when it is worth another try, else raise."""
        home = self._home()
        if rc == lib.SHMC_E_FORKED and home is not None:
            home._reattach(self)
            return
        if rc == lib.SHMC_E_STALE and not self.closed and home is not None and not self.mine():
            home._reattach(self)
            raise errors.StaleHandleError(
                f"{what}: this process was taken for dead and its attachment to {self.name!r} cleared away; "
                "it has attached again, and all earlier holds are gone",
                code=rc,
            )
        raise self.error(rc, what)

    def is_own(self) -> bool:
        """Whether it is this process's, not that of the one it was forked from."""
        return self.pid == os.getpid()

    def mine(self) -> bool:
        """Whether the slot is still this attachment's."""
        slot, gen = self._slot
        return self._slot_state(slot) == (gen, lib.SHMC_SLOT_LIVE)

    def error(self, rc: int, what: str) -> Exception:
        """The exception for a status, with what is known about it."""
        name = self.name
        hint = None
        if rc == lib.SHMC_E_CLOSED or self.closed:
            return errors.SegmentClosedError(
                f"{what}: cache {name!r} is closed in this process", hint="open it again", code=rc
            )
        if rc == lib.SHMC_E_INVAL:
            # arguments are checked before: so the tables do not know what this handle found in them
            return errors.SegmentCorruptError(
                f"{what}: segment {name!r} has lost a namespace or a part that it had: it is damaged",
                hint='close it everywhere, then open it with on_incompatible="replace", or shmcache.unlink it',
                code=rc,
            )
        if rc == lib.SHMC_E_LOCK_TIMEOUT:
            message, hint = self._lock_timeout(what)
        elif rc == lib.SHMC_E_POISONED:
            message = f"{what}: segment {name!r} is damaged and refuses all further work"
            hint = 'close it everywhere, then open it with on_incompatible="replace", or shmcache.unlink it'
        elif rc == lib.SHMC_E_SLOTS:
            most = self.mapping.geometry.max_attachments
            message = f"{what}: all {most} attachments of segment {name!r} are in use (max_attachments={most})"
            hint = "close some, or make the segment again with a larger max_attachments"
        elif rc == lib.SHMC_E_NAMESPACES:
            most = self.mapping.geometry.max_namespaces
            message = f"{what}: all {most} namespaces of segment {name!r} are in use"
            hint = "use fewer names, or another segment"
        elif rc == lib.SHMC_E_FORKED:
            message = f"{what}: it belongs to process {self.pid}, from which this one was forked"
            hint = "only the process that took a hold can give it back; take one of your own"
        elif rc == lib.SHMC_E_STALE:
            message = f"{what}: it was released before, or is not this attachment's"
        elif rc == lib.SHMC_E_OS:
            message = f"{what}: a system call failed: {os.strerror(ffi.errno)}"
        elif rc == lib.SHMC_E_RAW_CLONE:
            message = f"{what}: this thread or process was made by a raw clone(), its locks could hang everyone"
        else:
            message = f"{what}: status {rc} of segment {name!r}"
        return errors.from_status(rc, message, hint=hint)

    def _lock_timeout(self, what: str) -> tuple[str, str]:
        holder = ffi.new("shmc_holder *")
        lib.shmc_last_holder(self.handle, holder)
        message = (
            f"{what}: the lock of segment {self.name!r} is held by process {holder.pid} "
            f"({operation_name(holder.op)}) for {holder.age_ns / 1e9:.3g} s"
        )
        hint = f"it is stopped, or being dumped: let it go on (kill -CONT {holder.pid}) or end it"
        return message, hint
