"""`list`, `show`, `schema` and `completion`."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import click

from .._checksum import checksum_name
from .._names import control_name, path_of
from ._health import Finding, examine, stuck_lock, unhealthy
from ._keytext import printable
from ._memory import region_summary, resident
from ._reader import Reader, Slot
from ._render import age, count, fields, note, percent, print_json, ratio, say, size, some, table
from ._stop import Exit, Stop
from .cli import end, json_option, source, verb


def _summary(name: str) -> dict[str, Any]:
    """One row of `list`; never fails, whatever the file holds."""
    from .._directory import segments

    empty: dict[str, Any] = dict.fromkeys(("capacity", "used", "hit_ratio", "created", "lifetime"))
    try:
        reader = Reader.open(name)
    except Stop as e:
        found = next((s for s in segments() if s.name == name), None)
        state = "not permitted" if e.code == Exit.REFUSED else found.state if found else "gone"
        return {"name": name, **empty, "bytes": found.bytes if found else 0, "live": found.alive if found else 0,
                "dead": 0, "state": state, "findings": []}  # fmt: skip
    stats = reader.stats()
    slots = reader.slots()
    dead = sum(s.dead for s in slots)
    lock = reader.lock()
    findings = examine(reader, slots, stats, *(stuck_lock(reader) if lock.tid else (lock, 0.0)))
    return {
        "name": name,
        "capacity": stats["bytes"]["capacity"],
        "used": stats["bytes"]["used"],
        "hit_ratio": ratio(stats["hits"], stats["hits"] + stats["misses"]),
        "created": reader.created,
        "lifetime": reader.lifetime,
        "bytes": resident(reader) + os.lstat(path_of(control_name(name))).st_blocks * 512,
        "live": len(slots) - dead,
        "dead": dead,
        "state": reader.state,
        "findings": [f.as_dict() for f in findings],
    }


@verb("list")
@json_option
def list_(as_json: bool) -> int:
    from .._shmfs import control_files

    rows = [_summary(name) for name in control_files()]
    if as_json:
        print_json("list", {"segments": rows})
    else:
        table(
            ["=NAME", ">BYTES", ">USED", ">~HITS", ">LIVE", ">DEAD", "~LIFETIME", "=STATE"],
            [
                (r["name"], size(r["bytes"]), "-" if r["used"] is None else percent(r["used"], r["capacity"]),
                 "-" if r["hit_ratio"] is None else percent(r["hit_ratio"], 1), r["live"], r["dead"],
                 r["lifetime"] or "-", _state_word(r))
                for r in rows
            ],
            [_style(r) for r in rows],
        )  # fmt: skip
        if not rows:
            say("There is no segment on this host.")
    bad = any(r["state"] == "poisoned" or any(f["level"] != "info" for f in r["findings"]) for r in rows)
    return Exit.UNHEALTHY if bad else Exit.SOUND


def _state_word(row: dict[str, Any]) -> str:
    worst = next((f["code"] for f in row["findings"] if f["level"] != "info"), "")
    return f"{row['state']}: {worst}" if worst and worst != row["state"] else str(row["state"])


def _style(row: dict[str, Any]) -> str:
    return next((f["level"] for f in row["findings"] if f["level"] != "info"), "")


def collect(reader: Reader) -> tuple[dict[str, Any], list[Finding]]:
    """All that `show` shows."""
    stats, slots = reader.stats(), reader.slots()
    lock, held_for = stuck_lock(reader)
    findings = examine(reader, slots, stats, lock, held_for)
    g, b = reader.geometry, stats["bytes"]
    data = {
        "name": reader.name,
        "source": "copy" if reader.copy else "live",
        "state": reader.state,
        "healthy": not unhealthy(findings),
        "findings": [f.as_dict() for f in findings],
        "version": reader.version,
        "created": reader.created,
        "instance": f"{reader.control.instance:016x}",
        "lifetime": reader.lifetime,
        "policy": reader.policy,
        "checksum": checksum_name(int(reader.geometry.flags)),
        "geometry": {
            what: int(getattr(g, what))
            for what in ("capacity", "region_bytes", "align", "n_regions", "control_bytes", "mode", "max_chunks",
                         "max_blocks", "max_holds", "max_attachments", "max_namespaces", "n_events")
        },
        "memory": {**region_summary(reader), "resident": None if reader.copy else resident(reader)},
        "stats": stats,
        "hit_ratio": ratio(stats["hits"], stats["hits"] + stats["misses"]),
        "fragmentation": ratio(b["free"] - b["largest_free"], b["free"]),
        "evictions_per_second": _eviction_rate(reader),
        "lock": {
            "held": bool(lock.tid),
            "pid": lock.pid if lock.tid else None,
            "operation": lock.operation,
            "held_for": round(held_for, 3) if held_for else lock.held_for,
            "awaited": lock.awaited,
            "holder_died": lock.died,
            "contended_ratio": ratio(stats["lock"]["contended"], stats["lock"]["acquisitions"]),
        },
        "attachments": {"live": sum(not s.dead for s in slots), "dead": sum(s.dead for s in slots)},
        "pinning": pinning_summary(slots),
        "same_pid_namespace": reader.control.same_namespaces,
    }  # fmt: skip
    return data, findings


def pinning_summary(slots: list[Slot]) -> list[dict[str, Any]]:
    """What each living process says that it has registered with a device."""
    by_pid = {s.pid: s for s in sorted(slots, key=lambda s: s.pinned_regions) if not s.dead}  # handles share it
    return [{"pid": s.pid, "rank": s.rank, "state": s.pin_state, "regions": s.pinned_regions}
            for s in sorted(by_pid.values(), key=lambda s: s.slot)]  # fmt: skip


def _pinning_words(processes: list[dict[str, Any]], regions: int) -> str:
    """`12 of 16 regions in 3 of 4 processes`; those that got the same together, the most first."""
    alike = Counter((p["regions"], p["state"]) for p in processes if p["state"] != "off")
    if not alike:
        return f"off in {some(len(processes), 'process', 'processes')}" if processes else "nobody is attached"
    of = some(len(processes), "process", "processes")
    words = {"running": ", still going on", "failed": ", then it failed"}
    return "; ".join(
        f"{n} of {some(regions, 'region')} in {k} of {of}{words.get(state, '')}"
        for (n, state), k in sorted(alike.items(), reverse=True)
    )


def _eviction_rate(reader: Reader) -> float | None:
    """Evictions in the last minute that the event ring still knows, a second."""
    from ._records import events

    found, _, _ = events(reader)
    if not found:
        return None
    now = reader.now_ns
    recent = [e for e in found if now - e.time_ns < 60e9]
    window = min(60.0, (now - found[0].time_ns) / 1e9)
    return round(sum(e.cause == "evict" for e in recent) / window, 3) if window > 0 else None


@verb("show")
@source
@json_option
def show_(reader: Reader, as_json: bool) -> int:
    data, findings = collect(reader)
    if as_json:
        print_json("show", data)
    else:
        _page(data)
    return end(reader, not unhealthy(findings))


def _page(d: dict[str, Any]) -> None:
    s, b, g, lock, m = d["stats"], d["stats"]["bytes"], d["geometry"], d["lock"], d["memory"]
    taken = s["lock"]
    for f in d["findings"]:
        say(f"{f['level'].upper()}: {f['text']}", f["level"])
        if f["action"]:
            say(f"  -> {f['action']}")
    if d["findings"]:
        say()
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(d["created"]))
    where = (
        "a copy; ages count to its newest record"
        if d["source"] == "copy"
        else "live; counters " + ("exact" if s["exact"] else "of a transaction under way")
    )
    people = f"{d['attachments']['live']} live, {d['attachments']['dead']} dead"
    if d["source"] == "copy":
        people = f"{d['attachments']['live']} recorded"
    held = "free"
    if lock["held"]:
        held = f"held by pid {lock['pid']} ({lock['operation']})"
        held += f" for {age(lock['held_for'])}" if lock["held_for"] else ""
    elif lock["holder_died"]:
        held = f"its holder died ({lock['operation']}); the next caller recovers"
    nodes = ", ".join(f"node {n}: {size(v)}" for n, v in m["nodes"].items()) or "no policy"
    rate = d["evictions_per_second"]
    fields(
        [
            ("segment", f"{printable(d['name'])} ({d['state']}, {d['lifetime']}; {where})"),
            ("made", f"{made} by shmcache {printable(d['version'])}"),
            ("geometry", f"{size(g['capacity'])} in {some(m['regions'], 'region')} of {size(g['region_bytes'])}, "
                         f"align {size(g['align'])}, policy {d['policy']}, mode {g['mode']:04o}"
                         + (f", checksums {d['checksum']}" if d["checksum"] != "none" else "")),
            ("tables", f"{size(g['control_bytes'])}: {count(g['max_chunks'])} chunks, {count(g['max_blocks'])} blocks, "
                       f"{count(g['max_holds'])} holds, {g['max_attachments']} attachments"),
            ("memory", f"{m['ready']} of {m['regions']} regions ready"
                       + (f", {m['committing']} being committed" if m["committing"] else "")
                       + (f", {size(m['resident'])} resident" if m["resident"] is not None else "")),
            ("huge pages", f"{size(m['huge_bytes'])} of {size(b['ready'])}"
                           + (f", {size(m['partly_huge_bytes'])} in part" if m["partly_huge_bytes"] else "")),
            ("NUMA", nodes),
            ("pinning", _pinning_words(d["pinning"], m["regions"])),
            ("used", f"{percent(b['used'], b['capacity'])}: {size(b['used'])}, of it {size(b['evictable'])} evictable, "
                     f"{size(b['pinned'])} pinned or held, {size(max(0, b['used'] - b['evictable'] - b['pinned']))} "
                     "unpublished or on its way out"),
            ("free", f"{size(b['free'])} ready, the largest piece {size(b['largest_free'])}, "
                     f"{size(b['capacity'] - b['ready'])} not yet reserved"),
            ("fragmented", "-" if d["fragmentation"] is None else percent(d["fragmentation"], 1)),
            ("chunks", f"{count(s['counts']['chunks'])}, {count(s['counts']['complete'])} complete, "
                       f"in {some(s['counts']['namespaces'], 'namespace')}; {some(s['counts']['holds'], 'hold')}"),
            ("hits", f"{percent(s['hits'], s['hits'] + s['misses'])} of {count(s['hits'] + s['misses'])} lookups"),
            ("evictions", f"{count(s['evictions'])}" + ("" if rate is None else f", {rate:.1f}/s of late")),
            ("lock", f"{held}; taken {count(taken['acquisitions'])} times, "
                     f"{percent(taken['contended'], taken['acquisitions'])} contended, "
                     f"{taken['recoveries']} recoveries, longest hold seen {taken['max_hold_ns'] / 1e3:.0f} us"),
            ("attached", people),
            ("health", "sound, seen from outside; `verify` looks inside" if d["healthy"] else "see above"),
        ]
    )  # fmt: skip


@click.command("schema", help="The JSON schema of all --json output.")
def schema_() -> None:
    from importlib.resources import files

    click.echo(files("shmcache.inspect").joinpath("schema.json").read_text(encoding="utf-8"), nl=False)


@click.command("completion", help="Print the completion script of a shell; see its first line.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_(shell: str) -> None:
    from click.shell_completion import get_completion_class

    from .cli import group

    kind = get_completion_class(shell)
    assert kind is not None
    rc = "~/.config/fish/completions/shmcache-inspect.fish" if shell == "fish" else f"~/.{shell}rc"
    note(f"# add to {rc}:  shmcache-inspect completion {shell} >> {rc}")
    click.echo(kind(group, {}, "shmcache-inspect", "_SHMCACHE_INSPECT_COMPLETE").source())
