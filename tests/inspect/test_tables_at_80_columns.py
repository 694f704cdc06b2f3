"""What people see, to the letter: golden files. `UPDATE_GOLDEN=1 pytest ...` writes them anew; read the diff."""

from __future__ import annotations

import dataclasses
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scenes
from scenes import run, small

from shmcache.inspect import _render, history, key, keys, people, segments, why
from shmcache.inspect._reader import Reader

GOLDEN = Path(__file__).parent / "golden"
PID = 4711

VERBS: dict[str, list[str]] = {
    "list": ["list"],
    "show": ["show", "NAME"],
    "show-poisoned": ["show", "NAME"],
    "procs": ["procs", "NAME"],
    "namespaces": ["namespaces", "NAME"],
    "holds": ["holds", "NAME"],
    "keys": ["keys", "NAME"],
    "keys-match": ["keys", "NAME", "--match", "k*", "--sort", "hot", "--limit", "2"],
    "key": ["key", "NAME", "k2"],
    "key-parts": ["key", "NAME", "0x0000…"],
    "why-hit": ["why", "NAME", "k2"],
    "why-incomplete": ["why", "NAME", "0x0303…"],
    "why-removed": ["why", "NAME", "k0"],
    "why-never": ["why", "NAME", "never seen"],
    "events": ["events", "NAME", "--limit", "6"],
    "stats": ["stats", "NAME"],
    "map": ["map", "NAME"],
    "verify": ["verify", "NAME"],
}


@pytest.fixture
def fixed_name() -> Iterator[str]:
    """Of a length that does not depend on the pid."""
    name = f"t{os.getpid():07d}-{uuid.uuid4().hex[:8]}"
    yield name
    for p in scenes.SHM.glob(f"shmcache.{name}*"):
        p.unlink(missing_ok=True)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch, fixed_name: str) -> None:
    """Pids, ages, dates and other segments of the host do not show."""
    slots, lines = Reader.slots, history.event_row

    def age(seconds: float | None) -> str:
        return "-" if seconds is None else "1.5 s"

    for module in (people, keys, key, history, segments, why, _render):
        if hasattr(module, "age"):
            monkeypatch.setattr(module, "age", age)
    monkeypatch.setattr(Reader, "slots", lambda self: [dataclasses.replace(s, pid=PID) for s in slots(self)])
    monkeypatch.setattr(history, "event_row", lambda e, now: {**lines(e, now), "pid": PID})
    monkeypatch.setattr(people, "_process", lambda pid: {"command": "python engine.py", "user": "me", "run_state": "S"})
    monkeypatch.setattr("shmcache._shmfs.control_files", lambda: [fixed_name])
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def settled(text: str, name: str) -> str:
    text = text.replace(name, "NAME".ljust(len(name), "."))
    text = re.sub(r"pid \d+", f"pid {PID}", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2026-01-01 00:00:00", text)
    text = re.sub(r"seen\s+\d+ us", "seen 1 us", text)
    text = re.sub(r"taken [\d,]+ times", "taken 50 times", text)
    text = re.sub(r"(acquisitions +)[\d,]+", r"\g<1>50", text)
    text = re.sub(r"(max_hold_ns +)[\d,]+", r"\g<1>1", text)
    text = re.sub(r"shmcache \d+\.\d+\.\d+", "shmcache 0.0.0", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def test_output_is_as_it_was(fixed_name: str, still: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small(fixed_name)
    held = scenes.furnish(cache)
    wrong = {}
    for what, argv in VERBS.items():
        if what.endswith("poisoned"):
            continue
        wrong.update(compare(what, argv, fixed_name))
    for obj in held:
        obj.release()
    cache.close()
    scenes.lib.shmc_set_state(Control(fixed_name).base, scenes.lib.SHMC_S_POISONED)
    wrong.update(compare("show-poisoned", VERBS["show-poisoned"], fixed_name))
    assert not wrong, "\n".join(f"---- {what}\n{text}" for what, text in wrong.items())


def Control(name: str) -> Any:
    from shmcache import _control, _shmfs

    return _control.Control(_shmfs.open_shm(f"/shmcache.{name}"), writable=True)


def compare(what: str, argv: list[str], name: str) -> dict[str, str]:
    """What differs from the golden file."""
    _, out, _ = run(*[name if word == "NAME" else word for word in argv])
    assert all(len(line) <= 80 for line in out.splitlines()), what
    assert "\x1b" not in out
    text, path = settled(out, name), GOLDEN / f"{what}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    return {} if path.read_text() == text else {what: text}
