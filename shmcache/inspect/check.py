"""Whether all invariants hold, and all bytes are those that were put: `verify`.

On a copy, and on a segment nobody is attached to, they are checked in a private mapping: no lock. On a
live one the lock is asked for, with a deadline of 2 s; a lock that is not to be had within it is a
finding too, and then a private copy is checked, which is exact when the holder is stopped. Bytes are
compared with the checksums of a segment that keeps them, in any state: `_payload`.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import click

from .. import _shmfs
from .._core import ffi, lib, text
from .._names import control_name
from ..errors import LockTimeoutError, ShmCacheError
from ._payload import Payload, check_payload
from ._reader import Reader
from ._render import note, print_json, say, size, some
from ._stop import Exit
from .cli import json_option, source, verb

_TEXT = 1 << 16
_SHOWN = 20


@verb("verify")
@source
@click.option("--no-checksums", is_flag=True, help="Tables only: do not read the bytes of all parts.")
@json_option
def verify_(reader: Reader, no_checksums: bool, as_json: bool) -> int:
    """Without the lock in a copy or an abandoned segment, else asking for it for 2 s. Checksums need none."""
    barred = ""  # why the lock was not to be had
    if reader.copy:
        how, violations = "copy", check_copy(reader.control.base, reader.size)
    elif not reader.held or reader.state != "ready":
        how, violations = "private copy: no lock needed", check_private(reader)
    else:
        note(f"asking for the lock of {reader.name!r}, for 2 s at most")
        how, violations, barred = _live(reader)
    payload = None if no_checksums else check_payload(reader)
    sound = not violations and not barred and not (payload and payload.mismatches)
    if as_json:
        print_json("verify", {"name": reader.name, "how": how, "state": reader.state, "sound": sound,
                              "violations": [barred, *violations] if barred else violations,
                              "lock_error": barred or None, "checksums": payload and payload.as_dict()})  # fmt: skip
    else:
        if barred:
            say(f"Not looked at under its lock: {barred}", "error")
        _say_violations(how, violations)
        if reader.state != "ready":
            say(f"But the segment is {reader.state}: `shmcache-inspect show {reader.name}`", "error")
        if payload is not None:
            _say_payload(reader.name, payload)
    return Exit.SOUND if sound and reader.state != "poisoned" else Exit.UNHEALTHY


def _say_violations(how: str, violations: list[str]) -> None:
    if not violations:
        say(f"Sound: no invariant is violated ({how}).", "good")
        return
    say(f"{some(len(violations), 'violation')} ({how}):", "error")
    for line in violations:
        say(f"  {line}")


def _say_payload(name: str, p: Payload) -> None:
    if p.skipped:
        say(f"Checksums ({p.kind}) were not compared: {p.skipped}.", "warning")
        return
    read = f"{some(p.checked, 'part')}, {size(p.bytes)} read"
    if p.mismatches:
        say(f"{some(len(p.mismatches), 'part')} with other bytes than were put ({p.kind}, {read}):", "error")
        for m in p.mismatches[:_SHOWN]:
            key = "removed, still held" if m["key"] is None else m["key"]
            say(f"  {m['namespace']!r} {key} part {m['part']}: put as {m['expected']}, is {m['actual']}")
        if len(p.mismatches) > _SHOWN:
            say(f"  and {len(p.mismatches) - _SHOWN} more: --json")
        say(f"  -> `shmcache-inspect remove {name} KEY` makes one a miss, to be stored anew.")
    else:
        say(f"Checksums ({p.kind}): {read}, all as they were put.", "good")
    if p.without:
        say(f"{some(p.without, 'part')} without a checksum.", "warning")


def _live(reader: Reader) -> tuple[str, list[str], str]:
    """How it was looked at, what was found, and why not with the lock."""
    from ._attach import attached

    try:
        with attached(reader.name) as a:
            out = ffi.new("char[]", _TEXT)
            rc = lib.shmc_verify(a.handle, out, _TEXT)
            if rc >= 0:
                return "live, in one hold of the lock", _lines(out, rc), ""
            raise a.error(rc, "verify")
    except ShmCacheError as e:
        why = "the lock was not to be had" if isinstance(e, LockTimeoutError) else "not attached"
        return f"private copy: {why}", check_private(reader), str(e)


def check_private(reader: Reader) -> list[str]:
    """On a copy-on-write mapping: roll-back and all stay private. What others change meanwhile voids the findings."""
    before = reader.lock().acquisitions
    found = _check_mapped(reader)
    if found and reader.lock().acquisitions != before:
        return ["it was in use while its copy was checked, so nothing can be said: try again"]
    return found


def _check_mapped(reader: Reader) -> list[str]:
    fd = _shmfs.open_shm(control_name(reader.name), read_only=True)
    try:
        with mmap.mmap(fd, reader.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as private:
            view: Any = ffi.from_buffer(private)
            try:
                return check_copy(ffi.cast("void *", view), reader.size)
            finally:
                ffi.release(view)
    finally:
        os.close(fd)


def check_copy(base: Any, size: int) -> list[str]:
    """Violations in memory that is our own; rolls back what its owner left half done."""
    out = ffi.new("char[]", _TEXT)
    rc = lib.shmc_verify_copy(base, size, out, _TEXT)
    if rc < 0:
        return [f"the header is not valid (status {rc})"]
    return _lines(out, rc)


def _lines(out: Any, rc: int) -> list[str]:
    lines = text(out).splitlines()
    return lines if len(lines) >= rc else [*lines, f"{rc} violations in all"]
