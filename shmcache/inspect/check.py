"""Whether all invariants hold: `verify`.

On a copy, and on a segment nobody is attached to, they are checked in a private mapping: no lock. On a
live one the lock is asked for, with a deadline of 2 s; a lock that is not to be had within it is a
finding too, and then a private copy is checked, which is exact when the holder is stopped.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from .. import _shmfs
from .._core import ffi, lib, text
from .._names import control_name
from ..errors import LockTimeoutError, ShmCacheError
from ._reader import Reader
from ._render import note, print_json, say, some
from ._stop import Exit
from .cli import json_option, source, verb

_TEXT = 1 << 16


@verb("verify")
@source
@json_option
def verify_(reader: Reader, as_json: bool) -> int:
    """Check all invariants: in a copy or an abandoned segment without the lock, else asking for it for 2 s."""
    if reader.copy:
        how, violations = "copy", check_copy(reader.control.base, reader.size)
    elif not reader.held or reader.state != "ready":
        how, violations = "private copy: no lock needed", check_private(reader)
    else:
        note(f"asking for the lock of {reader.name!r}, for 2 s at most")
        how, violations = _live(reader)
    if as_json:
        print_json("verify", {"name": reader.name, "how": how, "state": reader.state, "sound": not violations,
                              "violations": violations})  # fmt: skip
    elif violations:
        say(f"{some(len(violations), 'violation')} ({how}):", "error")
        for line in violations:
            say(f"  {line}")
    else:
        say(f"Sound: no invariant is violated ({how}).", "good")
    return Exit.UNHEALTHY if violations or reader.state == "poisoned" else Exit.SOUND


def _live(reader: Reader) -> tuple[str, list[str]]:
    from ._attach import attached

    try:
        with attached(reader.name) as a:
            out = ffi.new("char[]", _TEXT)
            rc = lib.shmc_verify(a.handle, out, _TEXT)
            if rc >= 0:
                return "live, in one hold of the lock", _lines(out, rc)
            raise a.error(rc, "verify")
    except ShmCacheError as e:
        why = "the lock was not to be had" if isinstance(e, LockTimeoutError) else "not attached"
        return f"private copy: {why}", [str(e), *check_private(reader)]


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
