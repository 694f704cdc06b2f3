"""As people use it in a hurry: other locales, narrow terminals, closed pipes, odd names, wrong words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import scenes
from scenes import run, small, store

import shmcache

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
KEYS = ("plain", "", "a b", "\x1b[2J", "-x", "x" * 64, "0x41", "*", "é…", "日本語" * 7, 5, 2**400, b"", b"\0" * 64)
NAMESPACE = "ns \x1b[31mred\n\u202e " + "言" * 40


def program(*argv: str | bytes, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "shmcache.inspect", *argv]
    return subprocess.run(command, capture_output=True, timeout=60, env={**os.environ, **env})


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in line)


def odd(name: str) -> None:
    with small(name) as cache:
        kv = cache.namespace(NAMESPACE)
        for key in KEYS:
            store(kv, key)


@pytest.mark.parametrize("env", [ASCII, {"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "utf-8"}])
def test_any_name_in_any_locale(name: str, env: dict[str, str]) -> None:
    """Nothing is an error for want of a character, nothing moves the cursor, nothing is wider than told."""
    odd(name)
    key = "0x" + "00" * 64
    for verb in (["list"], ["show", name], ["keys", name], ["namespaces", name], ["why", name, key], ["key", name, key],
                 ["events", name], ["map", name], ["holds", name], ["stats", name], ["verify", name]):  # fmt: skip
        done = program(*verb, **env)
        text = done.stdout.decode(env["PYTHONIOENCODING"])
        assert done.returncode in (0, 3) and b"Traceback" not in done.stderr, (verb, done.stderr)
        assert "\x1b" not in text and "\u202e" not in text
        assert all(columns(line) <= 80 for line in text.splitlines()), (verb, text)
    shmcache.unlink(name)


def test_what_an_ascii_table_shows_can_be_typed(name: str) -> None:
    with small(name) as cache:
        store(cache, bytes(range(32)))
    shown = program("keys", name, **ASCII).stdout.decode().splitlines()[1].split()[0]
    assert shown.endswith("*") and run("key", name, shown)[0] == 0
    shmcache.unlink(name)


@pytest.mark.parametrize("width", [40, 60, 200])
def test_a_terminal_of_another_width(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    odd(name)
    with small(name) as cache:
        held = scenes.furnish(cache)
        for verb in ("procs", "namespaces", "keys", "holds", "events", "map", "stats", "show"):
            _, out, _ = run(verb, name)
            assert all(columns(line) <= width + 12 * (width < 60) for line in out.splitlines()), (verb, out)
        out = run("keys", name)[1]
        assert "complete" in out, "the state is not what is given up"
        for obj in held:
            obj.release()
    shmcache.unlink(name)


def test_a_long_name_is_shown_whole(name: str) -> None:
    """It is what every other verb wants to be told."""
    long = name + "-" + "n" * (63 - len(name))
    small(long).close()
    try:
        out = run("list")[1]
        assert all(len(line) <= 80 for line in out.splitlines())
        shown = "".join(line.split("  ")[0].strip() for line in out.splitlines()[1:])
        assert long in shown
    finally:
        shmcache.unlink(long)


@pytest.mark.parametrize(
    "argv", ["keys NAME --limit 5000", "keys NAME --limit 5000 --json", "stats NAME --watch 0.1 --json",
             "stats NAME --watch 0.1", "events NAME --limit 5000"],
)  # fmt: skip
def test_nobody_reads_on(name: str, argv: str) -> None:
    with small(name) as cache:
        for i in range(3000):
            store(cache, i, 64)
    command = f"{sys.executable} -m shmcache.inspect {argv.replace('NAME', name)} | head -c 20"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=60)
    shmcache.unlink(name)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 20, b"")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["stats", "NAME", "--watch", "nan"], "no number of seconds"),
        (["stats", "NAME", "--watch", "1e300"], "not in the range"),
        (["stats", "NAME", "--times", "3"], "--watch"),
        (["holds", "NAME", "--older-than", "nan"], "no number of seconds"),
        (["top", "NAME", "--interval", "nan"], "no number of seconds"),
        (["key", "NAME", "int:four"], "whole number"),
        (["key", "NAME", "int:" + "9" * 5000], "the most is 64"),
        (["why", "NAME", "9" * 5000], "the most is 64"),
        (["key", "NAME", "0x123"], "pairs of hex digits"),
        (["key", "NAME", "str:\\U99999999"], "no such character"),
        (["key", "NAME", "\udcff"], "not UTF-8"),
        (["metrics", "NAME", "--json", "--port", "0"], "choose"),
    ],
)
def test_a_wrong_word_is_named(name: str, argv: list[str], says: str) -> None:
    small(name).close()
    code, out, err = run(*[name if a == "NAME" else a for a in argv])
    assert (code, out) == (1, "") and says in err and len(err) < 400, err
    shmcache.unlink(name)


def test_a_path_that_is_no_text(name: str, tmp_path: Path) -> None:
    small(name).close()
    path = os.fsencode(tmp_path) + b"/\xff.svg"
    done = program("map", name, "--svg", path)
    assert done.returncode == 0 and done.stderr == b"" and os.path.exists(path)
    shmcache.unlink(name)


def test_a_file_of_any_size_is_no_danger(name: str, tmp_path: Path) -> None:
    """What is no control file is not read; what looks like one and is far too large neither."""
    huge, taller = tmp_path / "huge", tmp_path / "taller"
    for path in huge, taller:
        path.touch()
        os.truncate(path, 1 << 40)
    small(name).close()
    with taller.open("r+b") as f:
        f.write((scenes.SHM / f"shmcache.{name}").read_bytes())
    with scenes.prompt():
        for path, says in (huge, "blank"), (taller, "too large"):
            code, out, err = run("show", "--file", str(path))
            assert (code, out) == (4, "") and says in err
    shmcache.unlink(name)


def test_events_that_are_there_are_not_denied(name: str) -> None:
    with small(name) as cache:
        store(cache, "k")
    assert "1 events, none shown" in run("events", name, "--limit", "0")[1]
    shmcache.unlink(name)


def test_metrics_of_what_is_not_there() -> None:
    code, out, err = run("metrics", "absent-segment")
    assert (code, out) == (2, "") and "absent-segment" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_users_segment_is_not_called_foreign(name: str, fork: Any) -> None:
    small(name).close()
    run("list", "--json")  # imports: the other user may not read them

    def other(child: Any) -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        _, out, _ = run("list", "--json")
        row = next(r for r in json.loads(out)["segments"] if r["name"] == name)
        assert (row["state"], run("show", name)[0]) == ("not permitted", 5), row

    assert fork(other).wait() == 0
    shmcache.unlink(name)


def test_poisoned_and_locked_ones_hit_nobody(scrap: str, fork: Any) -> None:
    """`why` is asked why a lookup misses: what is stored is no answer when nobody gets it."""
    scenes.poisoned(scrap, fork)
    code, out, _ = run("why", scrap, "k2", "--json")
    found = json.loads(out)
    assert code == 3 and found["verdict"] == "poisoned" and found["chunks"][0]["state"] == "complete"


def test_a_lock_that_is_not_to_be_had_is_no_violation(scrap: str, fork: Any) -> None:
    scene = scenes.stopped(scrap, fork)
    code, out, _ = run("verify", scrap)
    words = " ".join(out.split())
    assert code == 3 and words.startswith("Not looked at under its lock: ") and f"process {scene.child.pid}" in words
    assert "Sound: no invariant is violated (private copy" in words


def test_top_and_metrics_as_json(name: str) -> None:
    with small(name) as cache:
        store(cache, "k")
        code, out, _ = run("top", name, "--interval", "0.1", "--json")
        (found,) = json.loads(out)["segments"]
        assert code == 0 and found["name"] == name and found["rates"]["stores"] == 0 and found["attachments"]
        code, out, _ = run("metrics", name, "--json")
        samples = {s["name"]: s["value"] for m in json.loads(out)["metrics"] for s in m["samples"]}
        assert code == 0 and samples["shmcache_stores_total"] == cache.stats().stores == 1
    shmcache.unlink(name)
    assert run("top", "absent-segment", "--json")[0] == 2
