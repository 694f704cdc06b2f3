"""What happened: `events`, `stats`, `diff`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import click

from .._events import Event
from .._keys import encode
from ._keytext import printable, short, show
from ._reader import Reader
from ._records import events
from ._render import accuracy, age, count, fields, foot, note, percent, print_json, ratio, say, size, table
from ._stop import Exit, Stop
from .cli import Seconds, end, json_option, readable_path, source, verb

_POLL = 0.2


def event_row(e: Event, now_ns: int) -> dict[str, Any]:
    return {
        "seq": e.seq, "ago": max(0, now_ns - e.time_ns) / 1e9, "time_ns": e.time_ns, "kind": e.kind,
        "cause": e.cause, "namespace": e.namespace, "generation": e.generation, "key": show(*encode(e.key)),
        "bytes": e.bytes, "pid": e.pid, "complete": e.complete,
    }  # fmt: skip


@verb("events")
@source
@click.option("--follow", "-f", is_flag=True, help="Go on until Ctrl-C; with --json one object a line.")
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="How many of the past.")
@json_option
def events_(reader: Reader, follow: bool, limit: int, as_json: bool) -> int:
    found, cursor, _ = events(reader)
    past = found[-limit:] if limit else []
    forgotten = found[0].seq if found else 0
    rows = [event_row(e, reader.now_ns) for e in past]
    if not follow:
        if as_json:
            print_json(
                "events",
                {"name": reader.name, **accuracy(reader), "next": cursor, "forgotten": forgotten, "events": rows},
            )
        elif rows:
            _print_events(rows)
            foot(reader, f"{len(rows)} of {len(found)}", f"{forgotten} older ones are forgotten" if forgotten else "")
        else:
            say(f"{len(found)} events, none shown: --limit" if found else "Nothing was admitted or removed yet.")
        return end(reader)
    for batch in _follow(reader, rows, cursor):
        if as_json:
            for row in batch:
                print_json("event", row, line=True)
        else:
            for row in batch:
                say(_line(row))
    return end(reader)


def _follow(reader: Reader, rows: list[dict[str, Any]], cursor: int) -> Iterator[list[dict[str, Any]]]:
    yield rows
    while reader.state == "ready" and not reader.copy:
        found, cursor, lost = events(reader, cursor)
        if lost:
            note(f"{lost} events were overwritten before they were read")
        if found:
            yield [event_row(e, reader.now_ns) for e in found]
        time.sleep(_POLL)


def _what(r: dict[str, Any]) -> str:
    return "admit" if r["kind"] == "admit" else str(r["cause"])


def _line(r: dict[str, Any]) -> str:
    space, key = short(printable(r["namespace"]), 16), short(r["key"], 22)
    return f"{r['seq']:>10} {_what(r):<7} {space:<16} {key:<22} pid {r['pid']}"


def _print_events(rows: list[dict[str, Any]]) -> None:
    table(
        [">~SEQ", ">AGO", "WHAT", "<NAMESPACE", "<KEY", ">~BYTES", ">PID"],
        [
            (r["seq"], age(r["ago"]), _what(r), short(printable(r["namespace"]), 16), short(r["key"], 20),
             size(r["bytes"]), r["pid"])
            for r in rows
        ],
    )  # fmt: skip


# ---- stats --------------------------------------------------------------------------------------------


def snapshot(reader: Reader) -> dict[str, Any]:
    s = reader.stats()
    return {"name": reader.name, "time": round(time.time(), 3), "state": reader.state,
            "hit_ratio": ratio(s["hits"], s["hits"] + s["misses"]), **s}  # fmt: skip


@verb("stats")
@source
@click.option("--watch", type=Seconds(0.1), metavar="SECONDS", help="Again and again, with rates.")
@click.option("--times", type=click.IntRange(1), help="End after so many, with --watch.")
@json_option
def stats_(reader: Reader, watch: float | None, times: int | None, as_json: bool) -> int:
    if watch is None:
        if times is not None:
            raise click.UsageError("--times is how often to --watch: give that too")
        now = snapshot(reader)
        if as_json:
            print_json("stats", now)
        else:
            _print_stats(now)
        return end(reader)
    before, n = None, 0
    while times is None or n < times:
        if n:
            time.sleep(watch)
        now = snapshot(reader)
        if as_json:
            print_json("stats", now, line=True)
        else:
            _print_rates(before, now)
        before, n = now, n + 1
        if now["state"] != "ready":  # it will not change any more
            break
    return end(reader)


def flatten(s: dict[str, Any]) -> dict[str, float]:
    """`bytes.used` and so on; numbers only."""
    out: dict[str, float] = {}
    for name, value in s.items():
        if isinstance(value, dict):
            out.update({f"{name}.{inner}": v for inner, v in flatten(value).items()})
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            out[name] = value
    return out


def _print_stats(s: dict[str, Any]) -> None:
    flat = {k: v for k, v in flatten(s).items() if k not in ("time", "schema")}
    fields((k, _value(k, v)) for k, v in flat.items())
    say("exact: of one instant" if s["exact"] else "copied while a transaction was under way", "dim")


def _value(name: str, v: float) -> str:
    if name.startswith("bytes."):
        return f"{count(v)} ({size(v)})"
    return percent(v, 1) if name == "hit_ratio" else count(v)


_RATES = {
    "HITS/s": "hits",
    "MISSES/s": "misses",
    "STORES/s": "stores",
    "EVICT/s": "evictions",
    "LOCK/s": "lock.acquisitions",
}


def _print_rates(before: dict[str, Any] | None, now: dict[str, Any]) -> None:
    if before is None:
        say(f"{'TIME':<8}{''.join(f'{head:>13}' for head in _RATES)}{'USED':>7}", "head")
    a, b = flatten(before or now), flatten(now)
    seconds = max(1e-9, b["time"] - a["time"])
    cells = "".join(f"{'-' if before is None else count((b[n] - a[n]) / seconds):>13}" for n in _RATES.values())
    clock = time.strftime("%H:%M:%S", time.localtime(now["time"]))
    say(f"{clock:<8}{cells}{percent(now['bytes']['used'], now['bytes']['capacity']):>7}")


# ---- diff ---------------------------------------------------------------------------------------------


def _load(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
    except FileNotFoundError:
        raise Stop(Exit.NOT_FOUND, f"there is no file {path}") from None
    except PermissionError as e:
        raise Stop(Exit.REFUSED, f"{path}: {e.strerror}") from None
    except (OSError, ValueError) as e:
        raise Stop(Exit.USAGE, f"{path} cannot be read as JSON: {e}") from None
    if not isinstance(found, dict) or found.get("verb") != "stats" or found.get("schema") != 1:
        raise Stop(Exit.USAGE, f"{path} is no output of `shmcache-inspect stats NAME --json`")
    return found


@verb("diff")
@click.argument("before", type=readable_path())
@click.argument("after", type=readable_path())
@json_option
def diff_(before: str, after: str, as_json: bool) -> int:
    a, b = _load(before), _load(after)
    if a["name"] != b["name"]:
        raise Stop(Exit.USAGE, f"{before} is of segment {a['name']!r}, {after} of {b['name']!r}")
    x, y = flatten(a), flatten(b)
    seconds = y.pop("time") - x.pop("time")
    if any(y[k] < x[k] for k in ("hits", "stores", "lock.acquisitions", "events")):
        note("counters fell: the segment was made anew in between, or the files are in the wrong order")
    rows: list[dict[str, Any]] = [
        {"counter": k, "before": x[k], "after": y[k], "change": y[k] - x[k],
         "per_second": round((y[k] - x[k]) / seconds, 3) if seconds > 0 else None}
        for k in y if k in x and k not in ("schema", "hit_ratio")
    ]  # fmt: skip
    looked = sum(y[k] - x[k] for k in ("hits", "misses"))
    hit_ratio = ratio(y["hits"] - x["hits"], looked)
    if as_json:
        print_json("diff", {"name": a["name"], "seconds": seconds, "hit_ratio": hit_ratio, "counters": rows})
        return Exit.SOUND
    table(
        ["COUNTER", ">BEFORE", ">AFTER", ">CHANGE", ">PER SECOND"],
        [
            (r["counter"], count(r["before"]), count(r["after"]), f"{r['change']:+,.0f}",
             "-" if r["per_second"] is None else f"{r['per_second']:,.1f}")
            for r in rows if r["change"]
        ],
    )  # fmt: skip
    say(f"{age(seconds)}; of {count(looked)} lookups in between {percent(hit_ratio or 0, 1)} hit", "dim")
    return Exit.SOUND
