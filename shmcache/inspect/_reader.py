"""A segment seen from outside: mapped read-only, no lock, no slot, nothing written.

The header and its counters are exact (C reads them between two equal sequence numbers); tables are
read record by record while others change them, so a list is `live, approximate`. A copy of a control
file is read into memory first. Nothing here waits for anybody.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .._control import Control
from .._core import NIL, ffi, lib, operation_name, text
from .._request import LIFETIMES, POLICIES
from .._stats import NamespaceInfo, namespace_info, stats_from
from ._keytext import printable
from ._source import handshake_pid, open_copy, open_live
from ._stop import Exit, Stop

TICK_NS = 1 << 26
_STATES = {lib.SHMC_S_READY: "ready", lib.SHMC_S_UNLINKING: "unlinking", lib.SHMC_S_POISONED: "poisoned"}
_SLOT_STATES = {
    lib.SHMC_SLOT_LIVE: "live",
    lib.SHMC_SLOT_QUARANTINE: "quarantined",
    lib.SHMC_SLOT_REAPING: "being reaped",
}
_LIVENESS = {lib.SHMC_ALIVE: "alive", lib.SHMC_EXECED: "exec'ed", lib.SHMC_GONE: "dead"}
_PIN_STATES = {
    lib.SHMC_PIN_OFF: "off",
    lib.SHMC_PIN_RUNNING: "running",
    lib.SHMC_PIN_DONE: "done",
    lib.SHMC_PIN_FAILED: "failed",
}
_POLICY_NAMES = {number: name for name, number in POLICIES.items()}
_LIFETIME_NAMES = {number: name for name, number in LIFETIMES.items()}
REGION_STATES = {lib.SHMC_R_ABSENT: "absent", lib.SHMC_R_COMMITTING: "committing", lib.SHMC_R_READY: "ready"}


@dataclass(frozen=True)
class Slot:
    """One attachment. `life` is alive, dead, exec'ed, closed or unknown."""

    slot: int
    gen: int
    state: str
    life: str
    pid: int
    rank: int | None
    label: str
    holds: int
    writes: int
    age: float | None  # seconds
    pin_state: str  # of its process, by its own word: off, running, done, failed
    pinned_regions: int

    @property
    def dead(self) -> bool:
        return self.life in ("dead", "closed")


@dataclass(frozen=True)
class Lock:
    """The lock word and the notes beside it. `pid` 0: free."""

    pid: int
    tid: int
    operation: str
    held_for: float | None  # seconds; None: not timed (1 hold in 64 is)
    died: bool  # the holder died inside: the next one to come rolls back
    awaited: bool
    in_transaction: bool
    journal: int
    acquisitions: int


class Reader:
    """See the module. `open` and `open_file` make one, or end the verb with the right exit code."""

    def __init__(self, name: str, control: Control, *, copy: bool, held: bool) -> None:
        self.name = name
        self.control = control
        self.copy = copy
        self.held = held  # somebody's presence is on the file
        self.base, self.size = control.base, control.size
        self.geometry = control.geometry

    @classmethod
    def open(cls, name: str) -> Reader:
        control, held = open_live(name)
        return cls(name, control, copy=False, held=held)

    @classmethod
    def open_file(cls, path: str) -> Reader:
        """A copy of a control file, wherever it lies."""
        return cls(os.path.basename(path), open_copy(path), copy=True, held=False)

    def handshake_pid(self) -> int:
        """Who is creating, attaching or removing at this moment; 0: nobody."""
        return handshake_pid(self.name)

    # ---- the header ------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        self.control.revalidate()
        return _STATES.get(self.control.state, "corrupt")

    @property
    def lifetime(self) -> str:
        return _LIFETIME_NAMES.get(int(self.geometry.lifetime), "?")

    @property
    def policy(self) -> str:
        return _POLICY_NAMES.get(int(self.geometry.policy), "?")

    @property
    def version(self) -> str:
        return text(self.control.identity.version)

    @property
    def created(self) -> float:
        return float(self.control.identity.created_ns / 1e9)

    @property
    def now_ns(self) -> int:
        """The clock of events and attachments. In a copy it stands still at the newest record."""
        return self._copy_time() if self.copy else time.monotonic_ns()

    def _copy_time(self) -> int:
        newest = 0
        info = ffi.new("shmc_slot_info *")
        for i in range(self.geometry.max_attachments):
            if lib.shmc_peek_slot(self.base, self.size, i, info) == 0 and info.state != lib.SHMC_SLOT_FREE:
                newest = max(newest, int(info.attached_ns))
        event, n, cell = ffi.new("shmc_event[1]"), ffi.new("uint32_t *"), ffi.new("uint64_t[2]")
        last = int(self.raw_stats().events) - 1
        if last >= 0 and lib.shmc_events_read(self.base, self.size, last, event, 1, n, cell, cell + 1) == 0 and n[0]:
            newest = max(newest, int(event[0].time_ns))
        return newest

    def raw_stats(self) -> Any:
        out = ffi.new("shmc_stats *")
        if lib.shmc_peek_stats(self.base, self.size, out) < 0:
            raise Stop(Exit.NOT_A_SEGMENT, f"segment {self.name!r}: its header is not valid any more")
        return out

    def stats(self) -> dict[str, Any]:
        """Counters as `shmcache.Stats` names them, and whether they are of one instant."""
        raw = self.raw_stats()
        found = asdict(stats_from(raw, "", "", "", ""))
        for what in ("pinning", "hugepages", "numa", "prefault"):  # of a process, not of the segment
            del found[what]
        return {**found, "events": int(raw.events), "exact": bool(raw.exact)}

    def lock(self) -> Lock:
        raw = ffi.new("shmc_lock_info *")
        lib.shmc_peek_lock(self.base, self.size, raw)
        tid, since = int(raw.owner_tid), int(raw.hold_since_ns)
        pid = tid if self.copy else _process_of(tid)
        if tid and raw.holder_slot != NIL:
            info = ffi.new("shmc_slot_info *")
            if lib.shmc_peek_slot(self.base, self.size, raw.holder_slot, info) == 0 and info.state:
                pid = int(info.pid)
        return Lock(
            pid=pid,
            tid=tid,
            operation=operation_name(raw.holder_op) if tid or raw.owner_died else "",
            held_for=max(0, self.now_ns - since) / 1e9 if tid and since and not self.copy else None,
            died=bool(raw.owner_died),
            awaited=bool(raw.awaited),
            in_transaction=bool(raw.in_transaction),
            journal=int(raw.journal),
            acquisitions=int(raw.acquisitions),
        )

    # ---- small tables ----------------------------------------------------------------------------

    def slots(self) -> list[Slot]:
        """Attachments, also dead ones that nobody has cleared away yet."""
        found = []
        now = self.now_ns
        info = ffi.new("shmc_slot_info *")
        for i in range(self.geometry.max_attachments):
            if lib.shmc_peek_slot(self.base, self.size, i, info) or info.state == lib.SHMC_SLOT_FREE:
                continue
            found.append(
                Slot(
                    slot=i,
                    gen=int(info.gen),
                    state=_SLOT_STATES.get(info.state, f"state {info.state}"),
                    life=self._life(info),
                    pid=int(info.pid),
                    rank=int(info.rank) if info.rank < 1 << 31 else None,
                    label=printable(text(info.label)),
                    holds=int(info.holds),
                    writes=int(info.writes),
                    age=max(0, now - int(info.attached_ns)) / 1e9,
                    pin_state=_PIN_STATES.get(info.pin_state, "off"),
                    pinned_regions=int(info.pinned_regions),
                )
            )
        return found

    def _life(self, info: Any) -> str:
        if info.leaving == info.gen:
            return "closed"
        if self.copy:
            return "unknown"
        if not self.held:
            return "dead"  # nobody's presence: proof in every pid namespace
        if not self.control.same_namespaces:
            return "unknown"  # pids of another namespace mean nothing here
        return _LIVENESS[lib.shmc_liveness(info.pid, info.start_time, info.start_stack)]

    def namespaces(self) -> dict[int, NamespaceInfo]:
        """By index, as records name them."""
        out = ffi.new("shmc_namespace_info *")
        return {
            i: namespace_info(out)
            for i in range(self.geometry.max_namespaces)
            if lib.shmc_peek_namespace(self.base, self.size, i, out) == 0
        }

    def regions(self) -> Iterator[Any]:
        """A shmc_region_info for each region; the struct is used again for the next."""
        info = ffi.new("shmc_region_info *")
        for i in range(self.geometry.n_regions):
            if lib.shmc_peek_region(self.base, self.size, i, info) == 0:
                yield info


def _process_of(tid: int) -> int:
    """The process of a thread; the number itself when it cannot be told."""
    with contextlib.suppress(OSError), open(f"/proc/{tid}/status", "rb") as f:
        for line in f:
            if line.startswith(b"Tgid:"):
                return int(line.split()[1])
    return tid
