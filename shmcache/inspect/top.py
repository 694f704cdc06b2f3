"""The live view: `top`. Rates between two looks, occupancy, the lock, and who is attached."""

from __future__ import annotations

import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ._health import examine, stuck_lock
from ._keytext import printable, short
from ._reader import Reader
from ._records import events
from ._render import STYLES, age, console, count, percent, print_json, ratio, size
from ._stop import Exit, Stop
from .cli import Seconds, complete_names, json_option, verb
from .people import life_word, proc_rows

if TYPE_CHECKING:
    from rich.text import Text

_SORTS = ("pid", "holds", "writing", "events")
_KEYS = "q quit   p pause   s sort   + - faster, slower"
_SLOWEST, _FASTEST = 30.0, 0.1


class _State:
    """What keys change, and what the last look saw."""

    def __init__(self, names: list[str], interval: float) -> None:
        self.names = names
        self.at = 0
        self.interval = interval
        self.paused = False
        self.sort = 0
        self.over = False
        self.forget()

    def forget(self) -> None:
        self.before: dict[str, Any] | None = None
        self.before_time = 0.0
        self.cursor: int | None = None
        self.rates: dict[str, float] = {}
        self.per_pid: Counter[int] = Counter()

    def key(self, key: str) -> None:
        if key in ("q", "Q", "\x03", "\x04"):
            self.over = True
        elif key in (" ", "p"):
            self.paused = not self.paused
        elif key == "s":
            self.sort = (self.sort + 1) % len(_SORTS)
        elif key == "+":
            self.interval = max(_FASTEST, self.interval / 2)
        elif key == "-":
            self.interval = min(_SLOWEST, self.interval * 2)
        elif key in ("n", "\t") and len(self.names) > 1:
            self.at = (self.at + 1) % len(self.names)
            self.forget()


@verb("top")
@click.argument("name", required=False, shell_complete=complete_names)
@click.option("--interval", type=Seconds(_FASTEST, _SLOWEST), default=1.0, show_default=True, metavar="SECONDS")
@json_option
def top_(name: str | None, interval: float, as_json: bool) -> int:
    """Of one segment, or of all in turn. Keys: q quit, p pause, s sort, + and - speed, n next segment.

    With --json: what it shows of one interval, once, of each.
    """
    from .._shmfs import control_files

    names = [name] if name is not None else control_files()
    if not names:
        raise Stop(Exit.NOT_FOUND, "there is no segment on this host")
    if name is not None:
        Reader.open(name)
    if as_json:
        return _once(names, interval, name is not None)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Stop(Exit.USAGE, "top needs a terminal; `shmcache-inspect stats NAME --watch 1` does not")
    _loop(_State(names, interval))
    return Exit.SOUND


def _once(names: list[str], interval: float, must: bool) -> int:
    """One document for all, after one interval. A segment that cannot be read is left out, when it was not named."""
    states = {name: _State([name], interval) for name in names}
    documents = []
    for wait in (interval, 0.0):
        for name, state in list(states.items()):
            try:
                reader = Reader.open(name)
                _look(state, reader)
                if not wait:
                    documents.append(_document(state, reader))
            except Stop:
                if must:
                    raise
                del states[name]
        time.sleep(wait)
    print_json("top", {"interval": interval, "segments": documents})
    return Exit.SOUND


def _document(state: _State, reader: Reader) -> dict[str, Any]:
    lock, held_for = stuck_lock(reader)
    stats = state.before or {}
    rows = [{**r, "events": state.per_pid[r["pid"]]} for r in proc_rows(reader)]
    found = examine(reader, reader.slots(), stats, lock, held_for)
    recent = state.rates["hits"] + state.rates["misses"]
    return {
        "name": reader.name, "state": reader.state, "rates": {k: round(v, 3) for k, v in state.rates.items()},
        "hit_ratio": ratio(state.rates["hits"], recent), "stats": stats, "lock_pid": lock.pid if held_for else None,
        "lock_held_for": round(held_for, 3), "attachments": rows, "findings": [f.as_dict() for f in found],
    }  # fmt: skip


def _loop(state: _State) -> None:
    from rich.live import Live

    with _keyboard() as fd, Live(screen=True, auto_refresh=False, console=console()) as screen:
        shown = screen_of(state)
        while not state.over:
            screen.update(shown, refresh=True)
            end = time.monotonic() + state.interval
            while (left := end - time.monotonic()) > 0 and not state.over:
                if select.select([fd], [], [], left)[0]:
                    typed = os.read(fd, 64)
                    for key in typed.decode("ascii", "replace") or "q":  # nothing: the terminal is gone
                        state.key(key)
                    shown = screen_of(state)  # also when paused: with what the key did
                    screen.update(shown, refresh=True)
            if not state.paused:
                shown = screen_of(state)


@contextmanager
def _keyboard() -> Iterator[int]:
    """Single keys without echo; the terminal is as before at the end."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


# ---- what is shown ------------------------------------------------------------------------------------


def screen_of(state: _State) -> Text:
    """One look, as text of the terminal's height."""
    from rich.text import Text

    name = state.names[state.at]
    out = Text(no_wrap=True, overflow="ellipsis")
    try:
        reader = Reader.open(name)
        _look(state, reader)
        _head(out, state, reader)
        _people(out, state, reader)
    except Stop as e:
        out.append(f"{printable(name)}: {e}\n", STYLES["error"])
        state.forget()
    keys = _KEYS + ("   n next segment" if len(state.names) > 1 else "")
    lines = out.split("\n")[: max(1, console().height - 1)]
    out = Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
    out.append(f"\n{keys}", STYLES["dim"])
    return out


def _look(state: _State, reader: Reader) -> None:
    now, stats = time.monotonic(), reader.stats()
    found, cursor, _ = events(reader, state.cursor if state.cursor is not None else stats["events"])
    if state.before is not None and now > state.before_time:
        seconds = now - state.before_time
        for what in ("hits", "misses", "stores", "evictions"):
            state.rates[what] = (stats[what] - state.before[what]) / seconds
        state.rates["lock"] = (stats["lock"]["acquisitions"] - state.before["lock"]["acquisitions"]) / seconds
        state.per_pid = Counter(e.pid for e in found)
    state.before, state.before_time, state.cursor = stats, now, cursor


def _head(out: Text, state: _State, reader: Reader) -> None:
    stats = state.before or {}
    b, c, rates = stats["bytes"], stats["counts"], state.rates
    clock = time.strftime("%H:%M:%S") + (" paused" if state.paused else "")
    out.append(f"{printable(reader.name)}", STYLES["head"])
    out.append(f"  {reader.state}, {reader.lifetime}, {reader.policy}  every {state.interval:g} s  {clock}\n")
    recent = rates.get("hits", 0.0) + rates.get("misses", 0.0)
    hits = percent(rates.get("hits", 0.0), recent), percent(stats["hits"], stats["hits"] + stats["misses"])
    out.append(f"hits     {hits[0]:>7} now, {hits[1]} in all\n")
    words = ("hits", "misses", "stores", "evictions", "lock")
    out.append("a second " + "  ".join(f"{w} {count(rates[w]) if w in rates else '-'}" for w in words) + "\n")
    for word, part, style in (
        ("kept", b["used"] - b["evictable"], "yellow"), ("used", b["used"], "green"), ("ready", b["ready"], "dim"),
    ):  # fmt: skip
        out.append(f"{word:<9}")
        filled = round(40 * part / b["capacity"]) if b["capacity"] else 0
        out.append("#" * filled, style)
        out.append("." * (40 - filled) + f" {percent(part, b['capacity'])} of {size(b['capacity'])}: {size(part)}\n")
    out.append(f"holds    {count(c['holds'])}  chunks {count(c['chunks'])}, {count(c['complete'])} complete\n")
    lock, held_for = (reader.lock(), 0.0)
    if lock.tid:
        lock, held_for = stuck_lock(reader)
    held = (
        f"held by pid {lock.pid} ({lock.operation}) for {age(held_for)}" if held_for else "free, or held for a moment"
    )
    contended = percent(stats["lock"]["contended"], stats["lock"]["acquisitions"])
    out.append(f"lock     {held}; {contended} contended, {stats['lock']['recoveries']} recoveries\n")
    for f in examine(reader, reader.slots(), stats, lock, held_for):
        out.append(f"{f.level}: {f.text}\n", STYLES[f.level])
    out.append("\n")


def _people(out: Text, state: _State, reader: Reader) -> None:
    by = _SORTS[state.sort]
    rows = proc_rows(reader)
    for r in rows:
        r["events"] = state.per_pid[r["pid"]]
    rows.sort(key=lambda r: r["pid"] if by == "pid" else -r[by])
    out.append(f"{'PID':>8} {'RANK':>4} {'LABEL':<12} {'STATE':<14}{'HOLDS':>8}{'WRITING':>8}{'EVENTS':>8}")
    out.append(f"  by {by}\n", STYLES["dim"])
    for r in rows:
        rank = "-" if r["rank"] is None else r["rank"]
        line = f"{r['pid']:>8} {rank:>4} {short(r['label'] or '-', 12):<12} {short(life_word(r), 14):<14}"
        line += f"{r['holds']:>8}{r['writing']:>8}{r['events']:>8}  {short(r['command'], 24)}\n"
        out.append(line, STYLES["warning"] if r["life"] == "dead" else "")
