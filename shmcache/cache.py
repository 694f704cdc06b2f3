"""A cache: one attachment of this process to one segment, and what is done with it as a whole."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import warnings
import weakref
from typing import Any

from . import _segment, errors
from ._attachment import Attachment
from ._auto import AUTO, Auto
from ._core import ffi, lib, log, text
from ._default import DefaultMethods
from ._events import Events, read_events
from ._request import Request
from ._stats import NamespaceInfo, ReapReport, Stats, namespace_info, stats_from
from .namespace import Namespace, open_namespace

__all__ = ["SharedCache"]

_IN_FLIGHT_SECONDS = 2.0  # close waits for this process's own calls so long
_DEFERRED_SECONDS = 5.0  # and for deferred releases and puts
_VERIFY_TEXT = 1 << 16
_LONGEST_LOCK_TIMEOUT = 1e6

_open_caches: weakref.WeakSet[SharedCache] = weakref.WeakSet()


class SharedCache(DefaultMethods):
    """One attachment to a segment; made by `open`, `attach` or `create`.

    All methods may be called from any thread, and in forked children, which get an attachment of
    their own at first use. Pickling sends the name: unpickling attaches.

    Attributes
    ----------
    name : str
    capacity : int
        payload bytes.
    """

    def __init__(
        self, request: Request, *, how: _segment.How, on_incompatible: _segment.OnIncompatible = "error",
        timeout: float = 10.0, lock_timeout: float = 1.0, label: str | None = None, rank: int | None = None,
    ) -> None:  # fmt: skip
        if not timeout >= 0 or not 0 < lock_timeout <= _LONGEST_LOCK_TIMEOUT:
            raise ValueError(
                f"timeout is {timeout!r}, lock_timeout {lock_timeout!r}: seconds, the second more than 0 and at most "
                f"{_LONGEST_LOCK_TIMEOUT:g}"
            )
        if not isinstance(label, str | None):
            raise ValueError(f"label is {label!r}: a str, or None")
        if on_incompatible not in ("error", "replace"):
            raise ValueError(f"on_incompatible is {on_incompatible!r}: 'error' or 'replace'")
        if rank is not None and (not isinstance(rank, int) or not 0 <= rank < 1 << 31):
            raise ValueError(f"rank is {rank!r}: an int, at least 0, or None")
        self.name = request.name
        self.capacity = 0  # until it is known
        self._lock = threading.RLock()
        self._default: Namespace | None = None
        self._namespace_names: dict[int, str] = {}
        self._lock_timeout = lock_timeout
        self._label = label
        self._rank = rank
        mapping, presence, attachment = _segment.connect(
            request, how=how, on_incompatible=on_incompatible, timeout=timeout, claim=self._claim
        )
        attachment.presence = presence
        self._attachment: Attachment = attachment
        self.capacity = int(mapping.geometry.capacity)
        _open_caches.add(self)
        self._prefault = "background" if isinstance(request.prefault, Auto) else request.prefault
        try:
            self._settle_in(request, rank)
        except BaseException:  # Ctrl-C: nobody will be given what could be closed
            self._close(0.0, at_exit=True)
            raise

    def _settle_in(self, request: Request, rank: int | None) -> None:
        """What comes after attaching: reap, pin, prefault."""
        attachment = self._attachment
        # what the dead left behind; a lock that is not to be had now is somebody else's next chance
        lib.shmc_reap(attachment.handle, ffi.new("shmc_reap_report *"))
        attachment.pinner().ask(request.pin, lib.shmc_slot_of(attachment.handle) if rank is None else rank)
        if self._prefault == "background":
            attachment.committer().background()
        elif self._prefault == "wait":
            attachment.committer().wait()

    def _claim(self, mapping: _segment.Mapping) -> Attachment:
        return Attachment.claim(self, mapping, self._lock_timeout, self._rank, self._label)

    # ---- the attachment --------------------------------------------------------------------------

    def _attached(self, what: str = "use") -> Attachment:
        """The attachment, usable in this process; SegmentClosedError when closed."""
        a = self._attachment
        rc = lib.shmc_check(a.handle)
        if rc < 0 or a.closed:
            a.recover(rc or lib.SHMC_E_CLOSED, what)
            a = self._attachment
        return a

    def _reattach(self, old: Attachment) -> None:
        """A slot of its own, in a forked child or after this process was taken for dead."""
        with self._lock:
            if self._attachment is not old:
                return  # another thread did
            if old.closed:
                raise old.error(lib.SHMC_E_CLOSED, "attach again")
            self._attachment = self._claim_again(old)

    def _claim_again(self, old: Attachment) -> Attachment:
        presence, new = _segment.reattach_in_child(old.mapping, self._claim)
        new.presence = presence
        if old.is_own():
            old.presence.close()
        return new

    def check_fork(self) -> bool:
        """In a forked child, attach now instead of at the first use. Whether it did."""
        before = self._attachment
        return self._attached("check_fork") is not before

    @property
    def closed(self) -> bool:
        """Whether `close` was called in this process."""
        return self._attachment.closed

    @property
    def checksum(self) -> str:
        """What is kept beside each part to verify it by: "none", "xxh3" or "crc32c"."""
        checksum = self._attachment.checksum
        return "none" if checksum is None else checksum.name

    def close(self) -> None:
        """Leave the segment; doing it again does nothing.

        Waits for this process's calls in flight, and for deferred releases and puts, each for a few
        seconds at most. Holds and pins that are left are dropped, and their number is logged. Views
        stay mapped, but their bytes are no longer protected.
        """
        self._close(_DEFERRED_SECONDS)

    def _close(self, deferred_seconds: float, at_exit: bool = False) -> None:
        with self._lock:
            a = self._attachment
            if a.closed:
                return
            own = a.is_own()
            if own:
                a.stop(deferred_seconds)
            dropped = ffi.new("uint32_t *")
            rc = lib.shmc_detach(a.handle, int(_IN_FLIGHT_SECONDS * 1e9), dropped)
            a.closed = True
            a.bases.clear()
            a.holds.clear()
            mapping, a.mapping = a.mapping, None
            if own and rc < 0:
                log.warning("%s: closed without giving the attachment back (%s); the next reap does", self.name,
                            a.error(rc, "detach"))  # fmt: skip
            if dropped[0]:
                # at exit it is what the process ends with anyway: no noise on its stderr
                log.log(logging.INFO if at_exit else logging.WARNING,
                        "%s: closed with %d holds, which were dropped", self.name, dropped[0])  # fmt: skip
            _open_caches.discard(self)
            self._disconnect(mapping, a)

    def _disconnect(self, mapping: Any, a: Attachment) -> None:
        _segment.disconnect(mapping, a.presence)

    def __enter__(self) -> SharedCache:
        if self.closed:
            raise self._attachment.error(lib.SHMC_E_CLOSED, "with")
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        a = getattr(self, "_attachment", None)
        if a is None or a.closed or not a.is_own():
            return
        warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)
        with contextlib.suppress(Exception):
            self._close(0.0)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_attach_again, (self.name, self._lock_timeout, self._label, self._rank))

    def __repr__(self) -> str:
        return f"<SharedCache {self.name!r}, {self.capacity} bytes{', closed' if self.closed else ''}>"

    def unlink(self, *, force: bool = False) -> None:
        """Remove the segment's name and memory; see `shmcache.unlink`. This cache can still be used."""
        self._attached("unlink")
        _segment.unlink(self.name, force=force)

    # ---- namespaces --------------------------------------------------------------------------------

    def namespace(
        self, name: str, *, parts: int | Auto = AUTO, descriptor: object = None, lease: float | None = None
    ) -> Namespace:
        """Find or make a namespace.

        Parameters
        ----------
        name
            at most 256 bytes in UTF-8.
        parts
            blocks that make one chunk complete, at most 4,096; AUTO takes what is there, or 1.
        descriptor
            a str or a dict that JSON can express, in at most 1 KiB: all that must agree for two keys
            to mean the same bytes. None takes what is there.
        lease
            seconds after which pins made through this object end by themselves.

        Raises
        ------
        NamespaceMismatchError
            it is there with other parts or another descriptor.
        OutOfSharedMemoryError
            the table of namespaces is full.
        """
        return open_namespace(self, name, parts, descriptor, lease)

    @property
    def default(self) -> Namespace:
        """The namespace "default", of one part."""
        found = self._default
        if found is None:
            found = self._default = open_namespace(self, "default", AUTO, None, None)
        return found

    def namespaces(self) -> list[NamespaceInfo]:
        """All namespaces of the segment."""
        n = self._attached("namespaces").mapping.geometry.max_namespaces
        return [info for info in map(self._namespace_at, range(n)) if info is not None]

    def find_namespace(self, name: str, start: int = 0) -> tuple[bool, int]:
        """Whether one of this name is at place `start` or after it, and how many there are; takes no lock.

        None is ever removed, so that who looked before goes on from that number; less one, since the last
        may be of a process that died while making it, and then another's comes in its place.
        """
        raw = name.encode("utf-8", "surrogatepass")
        out = ffi.new("shmc_namespace_info *")
        handle = self._attached("namespaces").handle
        n = start
        while lib.shmc_namespace_at(handle, n, out) == 0:
            if out.name_len == len(raw) and bytes(ffi.buffer(out.name)[0 : len(raw)]) == raw:
                return True, n
            n += 1
        return False, n

    def _namespace_at(self, index: int) -> NamespaceInfo | None:
        out = ffi.new("shmc_namespace_info *")
        while True:
            a = self._attachment
            rc = lib.shmc_namespace_at(a.handle, index, out)
            if rc == 0:
                return namespace_info(out)
            if rc == lib.SHMC_E_NOT_FOUND:
                return None
            a.recover(rc, "namespaces")

    def _namespace_name(self, index: int) -> str:
        name = self._namespace_names.get(index)
        if name is None:
            info = self._namespace_at(index)
            name = self._namespace_names[index] = info.name if info else f"#{index}"
        return name

    # ---- looking inside ------------------------------------------------------------------------------

    def _raw_stats(self) -> Any:
        a = self._attached("stats")
        out = ffi.new("shmc_stats *")
        rc = lib.shmc_stats_read(a.base, a.size, out)
        if rc < 0:
            raise errors.from_status(rc, f"stats: the header of segment {self.name!r} is not valid any more")
        return out

    def stats(self) -> Stats:
        """One consistent snapshot; takes no lock."""
        raw = self._raw_stats()
        a = self._attachment
        arena = a.arena()
        state = a.prefault_state()
        return stats_from(
            raw,
            pinning=str(a.pinner()),
            hugepages=arena.hugepages(),
            numa=arena.numa(),
            prefault=str(state) if state is not None else "lazy",
        )

    def wait_pinned(self, timeout: float) -> bool:
        """Start pinning where `pin` allows it and CUDA is in use by now; wait until all memory is pinned.

        False: not within `timeout` seconds, or it failed, or it is off; `stats().pinning` says which. With
        prefault="lazy" it takes until all memory was needed. Nothing depends on it but the speed of copies.
        """
        return self._attached("wait_pinned").pinner().wait(timeout)

    def events(self, since: int | None = None) -> Events:
        """What was admitted and removed, oldest first; takes no lock.

        Parameters
        ----------
        since
            `next` of the last result; None reads all that the segment still knows.
        """
        if since is not None and (not isinstance(since, int) or not 0 <= since < 1 << 64):
            raise ValueError(f"since is {since!r}: `next` of the last result, or None")
        a = self._attached("events")
        found = read_events(a.base, a.size, since or 0, self._namespace_name)
        if since is None:
            found.lost = 0  # nobody waited for what was before
        return found

    def reap(self) -> ReapReport:
        """Return what dead attachments left behind to the pool."""
        r = self._reap()
        return ReapReport(r.slots, r.holds, r.blocks, r.quarantined)

    def _reap(self) -> Any:
        report = ffi.new("shmc_reap_report *")
        while True:
            a = self._attached("reap")
            rc = lib.shmc_reap(a.handle, report)
            if rc >= 0:
                return report
            a.recover(rc, "reap")

    def verify(self) -> list[str]:
        """Violated invariants, as text; empty when sound.

        Takes the lock once, for about 10 ms per 100,000 entries. Never raises on a damaged segment.
        """
        a = self._attached("verify")
        out = ffi.new("char[]", _VERIFY_TEXT)
        rc = lib.shmc_verify(a.handle, out, _VERIFY_TEXT)
        if rc == lib.SHMC_E_CLOSED:
            raise a.error(rc, "verify")
        why = []
        if rc < 0:  # damaged, or the lock is not to be had: look at a copy, rolled back as recovery would
            why = [str(a.error(rc, "verify"))]
            copy = bytearray(ffi.buffer(a.base, a.size))
            rc = lib.shmc_verify_copy(ffi.from_buffer(copy), len(copy), out, _VERIFY_TEXT)
            if rc < 0:
                return [*why, str(errors.from_status(rc, f"the header of segment {self.name!r} is not valid any more"))]
        lines = text(out).splitlines()
        return [*why, *lines] if len(lines) >= rc else [*why, *lines, f"{rc} violations in all"]


def _attach_again(name: str, lock_timeout: float, label: str | None, rank: int | None) -> SharedCache:
    return SharedCache(Request(name), how="attach", lock_timeout=lock_timeout, label=label, rank=rank)


def _renew_locks() -> None:
    for cache in list(_open_caches):
        cache._lock = threading.RLock()


def _close_all() -> None:
    """At interpreter exit: leave properly, so that an ephemeral segment goes with its last user."""
    for cache in list(_open_caches):
        if cache._attachment.is_own():
            with contextlib.suppress(Exception):
                cache._close(0.5, at_exit=True)


os.register_at_fork(after_in_child=_renew_locks)
atexit.register(_close_all)
