"""Who is there and what they hold: `procs`, `namespaces`, `holds`."""

from __future__ import annotations

import contextlib
import os
import pwd
from typing import Any

import click

from .._core import NIL
from ._health import process_state
from ._keytext import printable, short, show
from ._reader import TICK_NS, Reader, Slot
from ._records import HOLD_KINDS, Budget, block_at, chunk_at, holds, raw_key
from ._render import accuracy, age, count, foot, percent, print_json, ratio, say, size, table
from .cli import Seconds, end, json_option, source, verb

_STOPPED = ("T", "t")


def _process(pid: int) -> dict[str, Any]:
    """What /proc tells; empty strings for a process that is gone."""
    found: dict[str, Any] = {"command": "", "user": "", "run_state": process_state(pid)}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as f:
        found["command"] = printable(f.read().replace(b"\0", b" ").decode("utf-8", "replace").strip())
    with contextlib.suppress(OSError, KeyError):
        found["user"] = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    return found


def proc_rows(reader: Reader) -> list[dict[str, Any]]:
    lock = reader.lock()
    rows = []
    for s in reader.slots():
        process = _process(s.pid) if s.life in ("alive", "exec'ed", "closed") else _process(0)
        rows.append(
            {
                "slot": s.slot, "pid": s.pid, "rank": s.rank, "label": s.label, "life": s.life, "state": s.state,
                "holds": s.holds, "writing": s.writes, "attached_for": s.age,
                "pinning": s.pin_state, "pinned_regions": s.pinned_regions,
                "has_lock": lock.tid != 0 and lock.pid == s.pid, **process,
            }
        )  # fmt: skip
    return rows


@verb("procs")
@source
@json_option
def procs_(reader: Reader, as_json: bool) -> int:
    rows = proc_rows(reader)
    if as_json:
        print_json("procs", {"name": reader.name, **accuracy(reader), "attachments": rows})
    elif rows:
        table(
            [">PID", ">RANK", "<LABEL", "STATE", ">HOLDS", ">~WRITING", ">~PINNED", ">ATTACHED", "<~COMMAND"],
            [
                (r["pid"], "-" if r["rank"] is None else r["rank"], r["label"] or "-", life_word(r), r["holds"],
                 r["writing"], _pinned(r, reader.geometry.n_regions), age(r["attached_for"]), r["command"] or "-")
                for r in rows
            ],
            [_style(r) for r in rows],
        )  # fmt: skip
        foot(reader, "the one with `lock` is inside the lock" if any(r["has_lock"] for r in rows) else "")
    else:
        say("Nobody is attached.")
    return end(reader)


def _pinned(row: dict[str, Any], regions: int) -> str:
    if row["pinning"] == "off":
        return "-"
    failed = ", failed" if row["pinning"] == "failed" else ""
    return f"{row['pinned_regions']}/{regions}{failed}"


def _style(row: dict[str, Any]) -> str:
    if row["has_lock"] and row["run_state"] in _STOPPED:
        return "error"
    return "warning" if row["life"] == "dead" else ""


def life_word(row: dict[str, Any]) -> str:
    words = [row["life"] if row["state"] in ("live", row["life"]) else f"{row['life']}, {row['state']}"]
    if row["run_state"] in _STOPPED:
        words = ["stopped"]
    return " ".join([*words, *(["lock"] if row["has_lock"] else [])])


@verb("namespaces")
@source
@json_option
def namespaces_(reader: Reader, as_json: bool) -> int:
    found = reader.namespaces()
    rows = [
        {
            "index": i, "name": n.name, "parts": n.parts, "generation": n.generation, "chunks": n.chunks,
            "complete": n.complete, "bytes": n.bytes, "hits": n.hits, "misses": n.misses,
            "hit_ratio": ratio(n.hits, n.hits + n.misses), "stores": n.stores, "evictions": n.evictions,
            "descriptor": n.descriptor,
        }
        for i, n in found.items()
    ]  # fmt: skip
    if as_json:
        print_json("namespaces", {"name": reader.name, **accuracy(reader), "namespaces": rows})
    elif rows:
        table(
            ["=NAME", ">~PARTS", ">~GEN", ">CHUNKS", ">COMPLETE", ">BYTES", ">~HITS", ">~EVICTED"],
            [
                (printable(n.name), n.parts, n.generation, count(n.chunks), count(n.complete), size(n.bytes),
                 percent(n.hits, n.hits + n.misses), count(n.evictions))
                for n in found.values()
            ],
        )  # fmt: skip
        foot(reader)
    else:
        say("It has no namespace.")
    return end(reader)


# ---- holds ------------------------------------------------------------------------------------------


def _hold_rows(reader: Reader, slots: dict[tuple[int, int], Slot], budget: Budget) -> list[dict[str, Any]]:
    names = {i: n.name for i, n in reader.namespaces().items()}
    now = reader.now_ns
    if reader.copy:  # where time stands still at the newest record: perhaps a hold
        now = max([now, *(int(h.taken) * TICK_NS for h in holds(reader, budget))])
    rows = []
    for h in holds(reader, budget):
        slot = slots.get((int(h.slot), int(h.slot_gen)))
        block = block_at(reader, h.block) if h.block != NIL else None
        chunk = chunk_at(reader, h.chunk) if h.chunk != NIL else None
        held_for = max(0, now - int(h.taken) * TICK_NS) / 1e9
        of = chunk if chunk is not None else block
        left = (int(h.deadline) * TICK_NS - now) / 1e9 if h.deadline else None
        rows.append(
            {
                "hold": int(h.hold), "gen": int(h.gen), "kind": HOLD_KINDS.get(h.kind, f"kind {h.kind}"),
                "slot": int(h.slot), "pid": slot.pid if slot else None, "label": slot.label if slot else None,
                "life": slot.life if slot else "unknown",
                "namespace": names.get(int(of.ns)) if of is not None else None,
                "key": show(*raw_key(chunk)) if chunk is not None else None,
                "part": int(block.part) if block is not None and chunk is not None else None,
                "bytes": int(block.extent) if block is not None else int(chunk.bytes) if chunk is not None else None,
                "age": held_for, "at_most_age": held_for, "lease_left": left,
            }
        )  # fmt: skip
        if budget.spent():
            break
    return sorted(rows, key=lambda row: -row["age"])


def _part(row: dict[str, Any]) -> str:
    if row["part"] is not None:
        return str(row["part"])
    return "all" if row["key"] else "-"


def _select(reader: Reader, budget: Budget, dead: bool) -> list[dict[str, Any]]:
    slots = {(s.slot, s.gen): s for s in reader.slots()}
    return [r for r in _hold_rows(reader, slots, budget) if not dead or r["life"] in ("dead", "closed")]


@verb("holds")
@source
@click.option("--dead", is_flag=True, help="Only those of processes that are gone.")
@click.option("--older-than", type=Seconds(0), metavar="SECONDS", help="Only those that were taken so long ago.")
@click.option("--limit", type=click.IntRange(1), default=200, show_default=True, help="Rows to print.")
@json_option
def holds_(reader: Reader, dead: bool, older_than: float | None, limit: int, as_json: bool) -> int:
    """The oldest first; ages are good to 0.1 s."""
    budget = Budget()
    rows = [r for r in _select(reader, budget, dead) if older_than is None or r["age"] >= older_than]
    shown = rows[:limit]
    if as_json:
        print_json(
            "holds", {"name": reader.name, **accuracy(reader, budget.partial), "total": len(rows), "holds": shown}
        )
        return end(reader)
    if not rows:
        say("No such hold." if dead or older_than is not None else "Nobody holds anything.")
        return end(reader)
    alive = {r["pid"] for r in shown if r["life"] == "alive"}
    stopped = {pid for pid in alive if process_state(pid) in _STOPPED}
    table(
        [">PID", "STATE", "KIND", "<NAMESPACE", "<KEY", ">~PART", ">BYTES", ">AGE", ">~LEASE"],
        [
            (r["pid"] or "-", "stopped" if r["pid"] in stopped else r["life"], r["kind"],
             short(printable(r["namespace"] or "-"), 16), short(r["key"] or "-", 16), _part(r),
             "-" if r["bytes"] is None else size(r["bytes"]), age(r["age"]),
             "-" if r["lease_left"] is None else age(max(0.0, r["lease_left"])))
            for r in shown
        ],
        ["warning" if r["life"] == "dead" else "" for r in shown],
    )  # fmt: skip
    more = f"{len(rows) - len(shown)} more: --limit" if len(shown) < len(rows) else ""
    foot(reader, more, "not all: time was up" if budget.partial else "")
    return end(reader)
