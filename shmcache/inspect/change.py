"""What changes a segment: `reap`, `unpin`, `remove`, `clear`, `gc`, `unlink`. All ask, or need --yes."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from .. import _shmfs
from .._control import Control
from .._core import ffi, lib
from .._create import remove_segment
from .._handshake import Handshake
from .._keys import decode
from .._names import SHM_FOLDER, check_name, path_of
from ..errors import LockTimeoutError, SegmentCorruptError, SegmentPermissionError
from ._attach import DEADLINE, attached, cache_of
from ._keytext import show
from ._reader import Reader
from ._records import HOLD_KINDS, LINKED, Budget, holds, raw_key
from ._render import print_json, say, size, some, table
from ._stop import Exit, Stop
from .cli import confirm, json_option, segment_argument, verb, yes_option
from .key import resolve
from .keys import namespace_index


def _refuse_poisoned(reader: Reader) -> None:
    if reader.state != "ready":
        raise Stop(
            Exit.UNHEALTHY, f"segment {reader.name!r} is {reader.state} and takes no change; `unlink` removes it"
        )


# ---- dead attachments ---------------------------------------------------------------------------------


def _reap(reader: Reader) -> dict[str, int]:
    report = ffi.new("shmc_reap_report *")
    with attached(reader.name) as a:
        rc = lib.shmc_reap(a.handle, report)
        if rc < 0:
            raise a.error(rc, "reap")
    return {what: int(getattr(report, what)) for what in ("slots", "holds", "blocks", "quarantined")}


def _dead(reader: Reader) -> tuple[int, int, int]:
    """Dead attachments, what they hold, and how many of that are pins."""
    dead = {(s.slot, s.gen): s for s in reader.slots() if s.dead}
    kinds = [HOLD_KINDS.get(h.kind, "") for h in holds(reader, Budget()) if (int(h.slot), int(h.slot_gen)) in dead]
    pins = sum(kind in ("pin", "lookup", "pin of a part", "writing, pinned") for kind in kinds)
    return len(dead), sum(s.holds + s.writes for s in dead.values()), pins


@verb("reap")
@segment_argument
@yes_option
@json_option
def reap_(name: str, yes: bool, as_json: bool) -> int:
    reader = Reader.open(name)
    _refuse_poisoned(reader)
    n, held, _ = _dead(reader)
    if n:
        confirm(f"Clear away {some(n, 'dead attachment')} of {name!r} and return {some(held, 'hold')}?", yes)
    done = _reap(reader)
    if as_json:
        print_json("reap", {"name": name, **done})
    else:
        say(
            f"Cleared away {some(done['slots'], 'attachment')}: {some(done['holds'], 'hold')}, "
            f"{some(done['blocks'], 'unpublished block')}."
        )
        if done["quarantined"]:
            say(f"{done['quarantined']} are dying or have exec'ed: their unpublished blocks wait for proof.")
    return Exit.SOUND


@verb("unpin")
@segment_argument
@click.option("--dead", is_flag=True, required=True, help="Those of dead attachments: nobody can spend a living one's.")
@yes_option
@json_option
def unpin_(name: str, dead: bool, yes: bool, as_json: bool) -> int:
    """With all else that they hold: it is what `reap` does."""
    reader = Reader.open(name)
    _refuse_poisoned(reader)
    n, held, pins = _dead(reader)
    if n:
        confirm(
            f"Give back {some(pins, 'pin')}, {some(held, 'hold')} in all, of {some(n, 'dead attachment')} of {name!r}?",
            yes,
        )
    done = _reap(reader)
    if as_json:
        print_json("unpin", {"name": name, "pins": pins, **done})
    else:
        say(
            f"Gave back {some(pins, 'pin')}, {some(done['holds'] + done['blocks'], 'hold')} in all, "
            f"of {some(done['slots'], 'attachment')}."
        )
    return Exit.SOUND


# ---- chunks -------------------------------------------------------------------------------------------


@verb("remove")
@segment_argument
@click.argument("key")
@click.option("--namespace", metavar="NAME")
@yes_option
@json_option
def remove_(name: str, key: str, namespace: str | None, yes: bool, as_json: bool) -> int:
    reader = Reader.open(name)
    _refuse_poisoned(reader)
    names = reader.namespaces()
    found = [
        (names[ns].name, chunk)
        for ns, chunk in resolve(reader, key, namespace)
        if chunk.flags & LINKED and chunk.ns_gen == names[ns].generation
    ]
    if not found:
        raise Stop(Exit.NOT_FOUND, f"key {key!r} is not in segment {name!r}; `why` tells what is known of it")
    if len(found) > 1:
        choice = "; ".join(f"{show(*raw_key(c))} in {space!r}" for space, c in found)
        raise Stop(Exit.USAGE, f"key {key!r} may be: {choice}. Use --namespace and 0x..., str:... or int:...")
    space, chunk = found[0]
    kind, raw = raw_key(chunk)
    kept = f", {chunk.held} times held (their holders keep the bytes)" if chunk.held else ""
    confirm(f"Remove {show(kind, raw)} from {space!r} of {name!r} ({size(chunk.bytes)}{kept})?", yes)
    with cache_of(name) as cache:
        removed = cache.namespace(space).remove(decode(kind, raw))
    if as_json:
        print_json("remove", {"name": name, "namespace": space, "key": show(kind, raw), "removed": removed})
    else:
        say("Removed." if removed else "It went by itself meanwhile.")
    return Exit.SOUND


@verb("clear")
@segment_argument
@click.option("--namespace", metavar="NAME", help="Only this one; by default all.")
@yes_option
@json_option
def clear_(name: str, namespace: str | None, yes: bool, as_json: bool) -> int:
    reader = Reader.open(name)
    _refuse_poisoned(reader)
    names = [n.name for n in reader.namespaces().values()]
    if namespace is not None:
        namespace_index(reader, namespace)
        names = [namespace]
    chunks = sum(n.chunks for n in reader.namespaces().values() if n.name in names)
    where = f"namespace {namespace!r} of " if namespace is not None else ""
    confirm(f"Remove all chunks of {where}{name!r} that nobody holds, of {chunks}? Engines will start cold.", yes)
    with cache_of(name) as cache:
        removed = {space: cache.namespace(space).clear() for space in names}
    left = sum(n.chunks for n in reader.namespaces().values() if n.name in names)
    if as_json:
        print_json("clear", {"name": name, "removed": sum(removed.values()), "left": left, "namespaces": removed})
    else:
        say(f"Removed {sum(removed.values())} chunks; {left} are left, held or stored meanwhile.")
    return Exit.SOUND


# ---- segments -----------------------------------------------------------------------------------------


def _abandoned(name: str, persistent: bool, remove: bool) -> str | None:
    """Why a segment may go, with proof that nobody is attached; None: it stays. `remove`: under the same proof."""
    try:
        with Handshake.acquire(name, time.monotonic() + 0.2) as handshake:
            if not handshake.nobody_attached():
                return None
            control = Control(handshake.fd, writable=remove)
            why = _reason(control, persistent)
            if remove and why is not None:
                remove_segment(handshake, control if control.status == lib.SHMC_OK else None)
            return why
    except (FileNotFoundError, LockTimeoutError, SegmentPermissionError, SegmentCorruptError):
        return None


def _reason(control: Control, persistent: bool) -> str | None:
    if control.status == lib.SHMC_E_NOT_READY:
        return "half-made, its creator is gone"
    if control.status == lib.SHMC_OK and control.state == lib.SHMC_S_POISONED:
        return "poisoned, nobody attached"
    if control.status == lib.SHMC_OK and control.state == lib.SHMC_S_UNLINKING:
        return "its removal was not finished"
    if control.status == lib.SHMC_OK and control.ephemeral:
        return "ephemeral, nobody attached"
    if persistent and control.status in (lib.SHMC_OK, lib.SHMC_E_FORMAT):
        return "persistent, nobody attached"
    return None


def _orphan_regions() -> list[str]:
    """Region files without a control file. Looked for in this order, so that none of a creation under way is taken."""
    from .._names import parse_file

    if not os.path.isdir(SHM_FOLDER):
        return []
    files = [
        (f"/{file}", f.segment) for file in os.listdir(SHM_FOLDER) if (f := parse_file(file)) and f.region is not None
    ]
    there = set(_shmfs.control_files())
    return sorted(file for file, segment in files if segment not in there)


@verb("gc")
@click.option(
    "--persistent", is_flag=True, help="Also persistent ones nobody is attached to: they wait for a warm restart."
)
@yes_option
@json_option
def gc_(persistent: bool, yes: bool, as_json: bool) -> int:
    """Those that are ephemeral, half-made, half-removed or poisoned, with nobody attached, and stray files."""
    found = {name: why for name in _shmfs.control_files() if (why := _abandoned(name, persistent, False)) is not None}
    orphans = _orphan_regions()
    if (found or orphans) and not as_json:
        table(["<NAME", "WHY"], [*found.items(), *((path_of(o), "memory of no segment") for o in orphans)])
    if found or orphans:
        confirm(f"Remove {some(len(found), 'segment')} and {some(len(orphans), 'stray file')}?", yes)
    gone = {name: why for name in found if (why := _abandoned(name, persistent, True)) is not None}
    refused = []
    for file in _orphan_regions():
        if file in orphans:
            try:
                _shmfs.unlink_shm(file)
            except PermissionError:
                refused.append(file)
    removed = [o for o in orphans if o not in refused]
    if as_json:
        data: list[dict[str, Any]] = [{"name": name, "why": why} for name, why in gone.items()]
        strays = {"stray_files": [path_of(o) for o in removed], "not_permitted": [path_of(o) for o in refused]}
        print_json("gc", {"removed": data, **strays})
    else:
        say(
            f"Removed {some(len(gone), 'segment')} and {some(len(removed), 'stray file')}."
            if found or orphans
            else "Nothing is abandoned."
        )
        for file in refused:
            say(f"Not permitted: {path_of(file)} belongs to somebody else.")
    return Exit.REFUSED if refused else Exit.SOUND


@verb("unlink")
@segment_argument
@click.option("--force", is_flag=True, help="Also when somebody is attached, or it is no segment of ours.")
@yes_option
@json_option
def unlink_(name: str, force: bool, yes: bool, as_json: bool) -> int:
    from .._segment import unlink

    try:
        check_name(name)
        reader = Reader.open(name)
        slots = [s for s in reader.slots() if not s.dead]
        what = f"{size(reader.stats()['bytes']['used'])} of chunks, {len(slots)} attached"
    except ValueError as e:
        raise Stop(Exit.USAGE, str(e)) from None
    except Stop as e:
        if e.code != Exit.NOT_A_SEGMENT:
            raise
        what = "no usable segment"
    confirm(f"Remove {name!r} ({what})?", yes)
    unlink(name, force=force, timeout=DEADLINE)
    if as_json:
        print_json("unlink", {"name": name, "removed": True})
    else:
        say(f"Removed {name!r}.")
    return Exit.SOUND
