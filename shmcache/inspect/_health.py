"""What is wrong with a segment, in words, and what to do about it.

A finding has a level: `error` (work has stopped, or soon will), `warning` (something is lost until
somebody acts), `info` (worth knowing). Errors and warnings make the exit code 3.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from .._names import SHM_FOLDER
from .._space import room
from ._memory import lost_regions
from ._reader import Lock, Reader, Slot
from ._render import age, percent, size, some

_STUCK_AFTER = 0.25  # seconds of one and the same hold; ordinary ones take microseconds
_NEARLY = 0.95


@dataclass(frozen=True)
class Finding:
    level: str
    code: str  # stable, for scripts
    text: str
    action: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def unhealthy(findings: list[Finding]) -> bool:
    return any(f.level != "info" for f in findings)


def process_state(pid: int) -> str:
    """R, S, D, T (stopped), Z ... of a process; empty: there is none."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as f:
        return f.read().rpartition(b")")[2].split()[0].decode()
    return ""


def stuck_lock(reader: Reader) -> tuple[Lock, float]:
    """The lock, and for how many seconds at least the present hold lasts: looked at twice when it is held."""
    first = reader.lock()
    if reader.copy or not first.tid:
        return first, 0.0
    begin = time.monotonic()
    while time.monotonic() - begin < _STUCK_AFTER:
        time.sleep(0.02)
        now = reader.lock()
        if (now.tid, now.acquisitions) != (first.tid, first.acquisitions):
            return now, 0.0
    return first, max(first.held_for or 0.0, time.monotonic() - begin)


def examine(reader: Reader, slots: list[Slot], stats: dict[str, Any], lock: Lock, held_for: float) -> list[Finding]:
    """All findings, worst first."""
    found: list[Finding] = []
    name = reader.name

    def add(level: str, code: str, text: str, action: str = "") -> None:
        found.append(Finding(level, code, text, action))

    state = reader.state
    if state == "poisoned":
        add(
            "error",
            "poisoned",
            "The segment was found damaged and refuses all work: every call is a miss or an error.",
            f"End or restart its engines, then `shmcache-inspect unlink {name}`, or open it with "
            'on_incompatible="replace". Keep a copy of the control file for a report.',
        )
    elif state == "unlinking":
        add(
            "warning",
            "unlinking",
            "The segment is being removed; who began has not finished.",
            f"`shmcache-inspect unlink {name} --force` finishes it, as does the next open.",
        )
    _lock(add, reader, lock, held_for)
    _handshake(add, reader)
    _attachments(add, reader, slots, stats)
    _pinning(add, reader, slots)
    _memory(add, reader, slots, stats)
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda f: order[f.level])


def _lock(add: Any, reader: Reader, lock: Lock, held_for: float) -> None:
    if lock.died:
        add(
            "info",
            "holder-died",
            f"A process died inside the lock (in {lock.operation}); the tables are as it left them.",
            f"Nothing: the next caller rolls back {some(lock.journal, 'word')} and goes on.",
        )
    if not lock.tid or not held_for:
        return
    state = process_state(lock.pid)
    what = f"Process {lock.pid} holds the lock ({lock.operation}) for {age(held_for)} at least"
    if not state:
        add(
            "error",
            "lock-lost",
            f"{what}, but there is no such process here.",
            "It lives in another pid namespace, or was made by a raw clone: look on the host.",
        )
    elif state in "Tt":
        add(
            "error",
            "lock-stopped",
            f"{what}, and is stopped: all others time out.",
            f"Let it go on (`kill -CONT {lock.pid}`) or end it (`kill -KILL {lock.pid}`): "
            "either way the others continue, nothing is lost.",
        )
    else:
        add(
            "error",
            "lock-stuck",
            f"{what} (state {state}); an ordinary hold takes microseconds.",
            f"See what it does (`cat /proc/{lock.pid}/wchan`); ending it is safe: the next caller rolls back.",
        )


def _handshake(add: Any, reader: Reader) -> None:
    pid = 0 if reader.copy else reader.handshake_pid()
    if not pid:
        return
    time.sleep(_STUCK_AFTER)  # a moment is enough to attach
    if reader.handshake_pid() != pid:
        return
    what = f"Process {pid} is attaching to it, making or removing it: all others who want to do so wait"
    if process_state(pid) in ("T", "t"):
        add("error", "handshake-stopped", f"{what}, and it is stopped.", f"`kill -CONT {pid}`, or end it.")
    else:
        add("info", "handshake-held", f"{what}.", "Wait: making a large segment takes seconds.")


def _attachments(add: Any, reader: Reader, slots: list[Slot], stats: dict[str, Any]) -> None:
    if reader.copy:
        return
    name = reader.name
    dead = [s for s in slots if s.dead]
    lost = sum(s.holds + s.writes for s in dead)
    if not reader.held and reader.state != "ready":
        add("info", "abandoned", "Nobody is attached (an orphan): it may go.", "`shmcache-inspect gc` removes it.")
    elif not reader.held:
        if reader.lifetime == "ephemeral":
            add(
                "warning",
                "ephemeral-abandoned",
                "It is ephemeral and nobody is attached (an orphan).",
                "`shmcache-inspect gc` removes it.",
            )
        else:
            add(
                "info",
                "abandoned",
                f"Nobody is attached (an orphan); {size(stats['bytes']['used'])} wait for a warm restart"
                + (f", with {some(len(dead), 'dead attachment')} to clear away" if dead else "")
                + (f" that had {some(lost, 'hold')}" if lost else "")
                + ".",
                "Nothing: the next engine to open it clears away and starts warm. "
                f"Or `shmcache-inspect unlink {name}` to free the memory.",
            )
    elif lost:
        add(
            "warning",
            "dead-holds",
            f"{some(lost, 'hold')} of {some(len(dead), 'dead attachment')} keep memory from the living.",
            f"`shmcache-inspect reap {name}` returns them; so does the next attach, or anybody who waits.",
        )
    elif dead:
        add(
            "info",
            "dead-attachments",
            f"{some(len(dead), 'dead attachment')}, holding nothing.",
            "Nothing: they go by themselves.",
        )
    if any(s.state == "quarantined" for s in slots):
        add(
            "info",
            "quarantine",
            "An attachment is dying or has exec'ed: its unpublished blocks wait for proof.",
            "Wait.",
        )
    if reader.held and not reader.control.same_namespaces:
        add(
            "warning",
            "other-namespace",
            "Its processes live in another pid namespace: they cannot be judged from here.",
            "Run this tool there: `nsenter -t PID -p -m`, or in the container.",
        )
    if stats["counts"]["attachments"] >= reader.geometry.max_attachments:
        add(
            "warning",
            "attachments-full",
            f"All {reader.geometry.max_attachments} attachments are in use.",
            "Reap dead ones, or make the segment again with a larger max_attachments.",
        )


def _pinning(add: Any, reader: Reader, slots: list[Slot]) -> None:
    failed = sorted({s.pid for s in slots if s.pin_state == "failed" and not s.dead})
    if failed:
        regions = min(s.pinned_regions for s in slots if s.pid in failed)
        add(
            "warning",
            "pinning-failed",
            f"Pinning failed in {some(len(failed), 'process', 'processes')} (pid {', '.join(map(str, failed[:8]))}), "
            f"the least has {regions} of {reader.geometry.n_regions} regions: copies of the rest are slow.",
            "Its log has the reason (logger `shmcache`), its stats().pinning too: often `ulimit -l`.",
        )


def _memory(add: Any, reader: Reader, slots: list[Slot], stats: dict[str, Any]) -> None:
    b, c, g = stats["bytes"], stats["counts"], reader.geometry
    unpublished = max(0, b["used"] - b["evictable"] - b["pinned"])
    kept = b["pinned"] + unpublished
    lost = sum(s.holds + s.writes for s in slots if s.dead)
    if (reader.held or reader.copy) and b["capacity"] and kept > 0.9 * b["capacity"]:
        dead = f"{some(lost, 'hold')} are of the dead: `shmcache-inspect reap {reader.name}` returns them. "
        add(
            "warning",
            "pinned-full",
            f"{percent(kept, b['capacity'])} of the memory is pinned, held or being written: "
            "little can be evicted, so stores fail.",
            f"{dead if lost else ''}See who: `shmcache-inspect holds {reader.name}`. "
            "Release pins sooner, use leases, or a larger capacity.",
        )
    if c["holds"] > _NEARLY * g.max_holds:
        add(
            "warning",
            "holds-full",
            f"{c['holds']} of {g.max_holds} holds are in use: lookups get shorter.",
            "Release them, or make the segment again with a larger max_chunks.",
        )
    if c["namespaces"] >= g.max_namespaces:
        add("warning", "namespaces-full", f"All {g.max_namespaces} namespaces are in use.", "Use fewer names.")
    if reader.copy:
        return
    missing = lost_regions(reader)
    if missing:
        add(
            "error",
            "lost-memory",
            f"{some(len(missing), 'region file')} lost or replaced ({missing[0]} ...): nobody can attach any more.",
            f"End its engines, then `shmcache-inspect unlink {reader.name} --force`.",
        )
    with contextlib.suppress(OSError):
        free, where, remedy = room()
        missing_bytes = b["capacity"] - b["ready"]
        if missing_bytes > free:
            add(
                "error",
                "no-room",
                f"{size(missing_bytes)} are still to be reserved, {where} {size(free)} free.",
                f"Remove unused files or {remedy}.",
            )
        else:
            fs = os.statvfs(SHM_FOLDER)
            if fs.f_bavail * fs.f_frsize < 0.05 * fs.f_blocks * fs.f_frsize:
                left = size(fs.f_bavail * fs.f_frsize)
                add(
                    "warning",
                    "shm-nearly-full",
                    f"{SHM_FOLDER} has {left} left: new segments and others will fail.",
                    "Remove unused files there, or enlarge it (mount -o remount,size=...).",
                )
