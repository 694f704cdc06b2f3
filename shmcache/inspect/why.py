"""Why a lookup of a key misses: `why`. The tables say what is there, the event ring what was."""

from __future__ import annotations

from typing import Any

import click

from .._events import Event
from .._keys import encode
from ._health import process_state, stuck_lock
from ._keytext import KIND_NAMES, Raw, is_pattern, matcher, short, show
from ._reader import Reader
from ._records import LINKED, WRITING, events, holds, parts_of, raw_key
from ._records import Budget as _Budget
from ._render import accuracy, age, print_json, say, size
from ._stop import Exit, Stop
from .cli import end, json_option, source_and_key, verb
from .key import parse_key, resolve
from .keys import namespace_index, state_of

_REMOVED = {
    "evict": ("evicted", "evicted {ago} ago by {who}, to make room"),
    "remove": ("removed", "removed {ago} ago by {who}"),
    "clear": ("cleared", "cleared {ago} ago by {who}"),
    "bump": ("invalidated", "invalidated by a bump of its namespace; cleared away {ago} ago by {who}"),
}


@verb("why")
@source_and_key
@click.option("--namespace", metavar="NAME", help="Where the lookup looks; by default everywhere.")
@json_option
def why_(reader: Reader, key: str, namespace: str | None, as_json: bool) -> int:
    index = namespace_index(reader, namespace) if namespace is not None else None
    facts = [_chunk_fact(reader, ns, chunk) for ns, chunk in resolve(reader, key, None)]
    found, _, _ = events(reader)
    wanted = _remembered(key, facts, found) if is_pattern(key) else set(parse_key(key))
    past, since, complete = _history(reader, found, wanted)
    verdict, text = _verdict(reader, facts, past, index, namespace, since, complete)
    barred = _barred(reader) if verdict == "hit" else None
    if barred is not None:
        verdict, text = barred
    rows = [{k: v for k, v in f.items() if k not in ("raw", "type", "index")} for f in facts]
    if as_json:
        data = {
            "key": key,
            "namespace": namespace,
            "verdict": verdict,
            "text": text,
            "chunks": rows,
            "history": past[-20:],
        }
        print_json("why", {"name": reader.name, **accuracy(reader), **data})
        return end(reader, barred is None)
    say(f"{verdict.upper()}: {text}", "good" if verdict == "hit" else "warning")
    for f in rows:
        say(f"  now   {short(f['key'], 24)} ({f['key_type']}) in {f['namespace']!r}: {f['state']}")
    for e in past[-8:]:
        say(f"  {age(e['ago']):>8} ago  {e['what']} in {e['namespace']!r} by {e['by']}")
    if not complete:
        say(f"  events before {age(since)} ago are forgotten", "dim")
    return end(reader, barred is None)


def _barred(reader: Reader) -> tuple[str, str] | None:
    """Why nobody gets what is there all the same."""
    there = "it is there, but every lookup misses or fails"
    if reader.state != "ready":
        return reader.state, f"{there}: the segment is {reader.state}. See `shmcache-inspect show {reader.name}`."
    lock, held_for = stuck_lock(reader)
    if not held_for:
        return None
    how = "stopped" if process_state(lock.pid) in ("T", "t") else "not going on"
    return (
        "lock-stuck",
        f"{there}: pid {lock.pid} holds the lock for {age(held_for)} at least, and is {how}. "
        f"See `shmcache-inspect show {reader.name}`.",
    )


def _chunk_fact(reader: Reader, index: int, chunk: Any) -> dict[str, Any]:
    """What a record of the chunk table says."""
    n = reader.namespaces()[index]
    state = state_of(chunk, n.generation, n.parts)
    blocks = parts_of(reader, chunk)
    writing = [int(b.part) for b in blocks if b.state == WRITING]
    there = {int(b.part) for b in blocks if b.state != WRITING}
    missing = [p for p in range(n.parts) if p not in there]
    writers = _writers(reader, {int(b.block) for b in blocks if b.state == WRITING}) if writing else {}
    words = {
        "complete": "complete: a lookup finds it",
        "incomplete": f"incomplete: {len(there)} of {n.parts} parts, missing {_ranges(missing)}",
        "reserved": "only reserved: no part is published yet",
        "invalidated": f"of generation {chunk.ns_gen}; the namespace was bumped to {n.generation}",
    }
    text = words.get(state, state)
    if writing:
        text += f"; part {_ranges(writing)} is being written by pid {', '.join(map(str, sorted(writers))) or '?'}"
    elif state == "incomplete":
        text += _absent_ranks(reader, missing)
    kind, raw = raw_key(chunk)
    return {
        "index": index, "type": kind, "raw": raw, "key": show(kind, raw), "key_type": KIND_NAMES.get(kind, str(kind)),
        "namespace": n.name, "state": state, "text": text, "missing_parts": missing if state != "complete" else [],
        "writing_parts": writing, "writers": sorted(writers), "generation": int(chunk.ns_gen),
        "linked": bool(chunk.flags & LINKED),
    }  # fmt: skip


def _absent_ranks(reader: Reader, missing: list[int]) -> str:
    """Which of the missing parts have no living process of that rank: nobody is there to store them."""
    ranks = {s.rank for s in reader.slots() if not s.dead and s.rank is not None}
    absent = [part for part in missing if part not in ranks]
    return f" (rank {_ranges(absent)} is not attached)" if ranks and absent else ""


def _writers(reader: Reader, blocks: set[int]) -> set[int]:
    pids = {(s.slot, s.gen): s.pid for s in reader.slots()}
    found = {pids.get((int(h.slot), int(h.slot_gen))) for h in holds(reader, _Budget()) if int(h.block) in blocks}
    return {pid for pid in found if pid}


def _ranges(numbers: list[int]) -> str:
    """0-3, 5"""
    out: list[str] = []
    i = 0
    while i < len(numbers):
        j = i
        while j + 1 < len(numbers) and numbers[j + 1] == numbers[j] + 1:
            j += 1
        out.append(str(numbers[i]) if i == j else f"{numbers[i]}-{numbers[j]}")
        i = j + 1
    return ", ".join(out)


def _remembered(pattern: str, facts: list[dict[str, Any]], found: list[Event]) -> set[Raw]:
    """The key that a pattern means: of those that are there, else of those that were."""
    fits = matcher(pattern)
    raws = {(f["type"], f["raw"]) for f in facts} or {raw for e in found if fits(show(*(raw := encode(e.key))))}
    if len(raws) > 1:
        some = ", ".join(short(show(*raw), 24) for raw in sorted(raws)[:8])
        raise Stop(Exit.USAGE, f"key {pattern!r} may have been any of {len(raws)}: {some}; give more of it")
    return raws


def _history(reader: Reader, found: list[Event], wanted: set[Raw]) -> tuple[list[dict[str, Any]], float, bool]:
    """Events of these keys, oldest first; seconds that the ring reaches back; whether to the segment's beginning."""
    labels = {s.pid: s.label for s in reader.slots()}
    now = reader.now_ns

    def row(e: Event) -> dict[str, Any]:
        who = f"pid {e.pid}" + (f" ({labels[e.pid]})" if labels.get(e.pid) else "")
        what = "became complete" if e.kind == "admit" else f"went ({e.cause})"
        after = (f for f in found if f.seq > e.seq and f.pid == e.pid and f.kind == "admit")
        room_for = next(after, None) if e.cause == "evict" else None  # what its evictor stored next
        return {
            "seq": e.seq, "ago": max(0, now - e.time_ns) / 1e9, "kind": e.kind, "cause": e.cause, "what": what,
            "namespace": e.namespace, "generation": e.generation, "pid": e.pid, "by": who, "complete": e.complete,
            "room_for": None if room_for is None else {"key": show(*encode(room_for.key)), "bytes": room_for.bytes,
                                                      "namespace": room_for.namespace},
        }  # fmt: skip

    since = max(0, now - found[0].time_ns) / 1e9 if found else 0.0
    return [row(e) for e in found if encode(e.key) in wanted], since, not found or found[0].seq == 0


def _verdict(
    reader: Reader, facts: list[dict[str, Any]], past: list[dict[str, Any]], index: int | None, namespace: str | None,
    since: float, complete: bool,
) -> tuple[str, str]:  # fmt: skip
    """One word for scripts, one sentence for people."""
    here = [f for f in facts if index is None or f["index"] == index]
    for state in ("complete", "incomplete", "reserved"):
        for f in here:
            if f["state"] == state:
                word = {"complete": "hit", "incomplete": "incomplete", "reserved": "reserved"}[state]
                more = "" if len({g["key_type"] for g in here}) < 2 else "; the same text is there as another type too"
                return word, f"in {f['namespace']!r} it is {f['text']}{more}."
    elsewhere = [f for f in facts if f["state"] == "complete" and f not in here]
    if elsewhere:
        spaces = ", ".join(repr(f["namespace"]) for f in elsewhere)
        return (
            "other-namespace",
            f"it is complete in {spaces}, not in {namespace!r}: do engines agree on it?",
        )
    for f in here:
        if f["state"] == "invalidated":
            return "invalidated", f"in {f['namespace']!r} it is {f['text']}."
    mine = [e for e in past if index is None or e["namespace"] == namespace]
    last = mine[-1] if mine else None
    if last is not None and last["kind"] == "remove":
        word, sentence = _REMOVED.get(last["cause"], ("removed", "gone {ago} ago by {who}"))
        parts = "" if last["complete"] else " It was not complete then."
        for_ = last["room_for"]
        next_ = f": it stored {short(for_['key'], 24)} ({size(for_['bytes'])}) next" if for_ else ""
        return word, f"it was {sentence.format(ago=age(last['ago']), who=last['by'])}{next_}.{parts}"
    for f in here:
        return "removed", f"in {f['namespace']!r} it is {f['state']}."
    if past and index is not None:
        return "other-namespace", f"it was stored in {past[-1]['namespace']!r}, never in {namespace!r}."
    if last is not None:
        return "unknown", "its last event says that it became complete, but it is not there: it moved while we looked."
    if complete:
        return (
            "never-stored",
            "it was never completely stored in this segment. Do engines make keys alike?",
        )
    return "never-stored", f"nothing is known of it in the last {age(since)}; what was before is forgotten."
