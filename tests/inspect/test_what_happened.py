"""`why`, `holds`, `events`, `stats`, `diff`: that what they tell is what happened."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import scenes
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import run, small, store

import shmcache
from shmcache._keys import encode
from shmcache.inspect import _keytext


def why(name: str, key: str, *more: str) -> dict[str, Any]:
    code, out, err = run("why", name, key, *more, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_every_way_to_miss_is_told_apart(scrap: str, fork: Any) -> None:
    def engine(child: Any) -> None:
        scenes.leave(child)
        cache = small(scrap, label="writer", rank=1)
        obj = cache.namespace("two", parts=2).reserve("half", 4096, part=1)
        only = cache.default.reserve("reserved", 4096)
        child.tell("ready")
        child.await_parent()
        del obj, only

    with small(scrap) as cache:
        two, kv = cache.namespace("two", parts=2), cache.default
        child = fork(engine)
        assert child.listen() == "ready"
        store(two, "half", part=0)
        for key in ("stays", "removed", "held", 7):
            store(kv, key)
        held = kv.get("held")
        kv.remove("removed")
        kv.remove("held")

        found = why(scrap, "half")
        assert found["verdict"] == "incomplete"
        chunk = found["chunks"][0]
        assert (chunk["missing_parts"], chunk["writing_parts"], chunk["writers"]) == ([1], [1], [child.pid])
        assert f"written by pid {child.pid}" in found["text"]
        found = why(scrap, "reserved")
        assert found["verdict"] == "reserved" and str(child.pid) in found["text"]
        assert why(scrap, "stays")["verdict"] == "hit"
        assert why(scrap, "7")["verdict"] == "hit", "an int, though the text may be a str"
        assert why(scrap, "str:7")["verdict"] == "never-stored"
        found = why(scrap, "removed")
        assert found["verdict"] == "removed" and f"by pid {__import__('os').getpid()}" in found["text"]
        assert [e["cause"] for e in found["history"]] == ["put", "remove"]
        found = why(scrap, "held")
        assert found["verdict"] == "removed" and found["chunks"][0]["state"] == "removed, still held"
        assert why(scrap, "never")["verdict"] == "never-stored"
        assert why(scrap, "stays", "--namespace", "two")["verdict"] == "other-namespace"
        assert run("why", scrap, "stays", "--namespace", "three")[0] == 2

        child.kill()
        child.wait()
        cache.reap()
        found = why(scrap, "half")
        assert found["verdict"] == "incomplete" and found["chunks"][0]["writing_parts"] == []
        assert "rank 1 is not attached" in found["text"]

        stays = kv.get("stays")
        kv.bump()
        assert why(scrap, "stays")["verdict"] == "invalidated"
        stays.release()
        held.release()
        store(two, "x", part=0)
        store(two, "x", part=1)
        two.clear()
        assert why(scrap, "x")["verdict"] == "cleared"


def test_an_eviction_names_who_did_it_and_when(scrap: str, fork: Any) -> None:
    def hungry(child: Any) -> None:
        scenes.leave(child)
        cache = small(scrap, label="hungry")
        for i in range(8):
            store(cache, ("other", i).__repr__(), 900_000)
        child.tell("done")
        child.await_parent()

    with small(scrap) as cache:
        store(cache, "victim", 900_000)
        child = fork(hungry)
        assert child.listen() == "done"
        found = why(scrap, "victim")
        assert found["verdict"] == "evicted"
        assert f"by pid {child.pid} (hungry), to make room" in found["text"]
        assert found["history"][-1]["ago"] < 30
        room_for = found["history"][-1]["room_for"]
        assert room_for["key"].startswith("('other', ") and room_for["bytes"] >= 900_000
        assert f"it stored {room_for['key']} (" in found["text"]


def test_what_the_ring_forgot_is_said_to_be_forgotten(name: str) -> None:
    with small(name) as cache:
        for i in range(1500):
            store(cache, i, 64)
            cache.remove(i)
        assert why(name, "0")["verdict"] == "never-stored"
        assert "what was before is forgotten" in why(name, "0")["text"]
        _, out, _ = run("events", name, "--json", "--limit", "3")
        found = json.loads(out)
        assert found["next"] == 3000 and found["forgotten"] > 1900 and [e["seq"] for e in found["events"]][-1] == 2999
    shmcache.unlink(name)


def test_holds_tell_kind_owner_and_lease(scrap: str, fork: Any) -> None:
    scene = scenes.dead(scrap, fork)
    with small(scrap, label="second") as cache:  # its attach clears the dead away
        assert json.loads(run("holds", scrap, "--dead", "--json")[1])["total"] == 0
        leased = cache.namespace("leased", lease=30.0)
        store(leased, "k")
        hit = leased.lookup(["k"], pin=True)
        obj = leased.get("k")
        pinned = cache.namespace("leased").get("k")
        pinned.pin()
        rows = json.loads(run("holds", scrap, "--json")[1])["holds"]
        kinds = sorted((r["kind"], r["key"], r["part"]) for r in rows)
        assert kinds == [("lookup", "k", None), ("pin of a part", "k", 0), ("reference", "k", 0), ("reference", "k", 0)]
        assert all(r["label"] == "second" and r["life"] == "alive" for r in rows)
        left = [r["lease_left"] for r in rows if r["kind"] == "lookup"]
        assert 25 < left[0] <= 30.5
        for x in (hit, obj, pinned):
            x.release()
    assert scene.child.pid


def test_dead_holds_are_listed_until_they_are_reaped(scrap: str, fork: Any) -> None:
    scenes.dead(scrap, fork)
    found = json.loads(run("holds", scrap, "--dead", "--json")[1])
    assert found["total"] == 4 and {r["life"] for r in found["holds"]} == {"dead"}
    code, out, _ = run("holds", scrap, "--limit", "2")
    assert code == 0 and "2 more: --limit" in out


def test_ages_of_holds_are_those_of_the_holds(name: str) -> None:
    """Not of their attachment, nor of their chunk: and nobody has to wait to know them."""
    with small(name) as cache:
        store(cache, "k")
        old = cache.get("k")
        time.sleep(0.5)
        young = cache.get("k")
        found = json.loads(run("holds", name, "--json")[1])["holds"]
        assert [r["age"] >= 0.35 for r in found] == [True, False], "the oldest first"
        begin = time.monotonic()
        found = json.loads(run("holds", name, "--older-than", "0.35", "--json")[1])
        assert found["total"] == 1 and found["holds"][0]["age"] >= 0.35
        assert run("holds", name, "--older-than", "3600")[1] == "No such hold.\n"
        assert time.monotonic() - begin < scenes.PROMPT
        old.release()
        young.release()
        again = cache.get("k")  # in the record of one that was given back
        assert json.loads(run("holds", name, "--older-than", "0.35", "--json")[1])["total"] == 0
        again.release()
    shmcache.unlink(name)


def test_events_are_followed_as_lines_of_json(name: str) -> None:
    with small(name) as cache:
        argv = [sys.executable, "-m", "shmcache.inspect", "events", name, "--follow", "--json"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            store(cache, "first")
            for key, then in (("first", "second"), ("second", "third")):
                line = follower.stdout.readline()
                scenes.check_schema(line)
                assert json.loads(line)["key"] == key
                store(cache, then)
            scenes.lib.shmc_set_state(cache._attachment.base, scenes.lib.SHMC_S_POISONED)
            assert follower.wait(timeout=20) == 3, "it ends when nothing will follow"
            scenes.lib.shmc_set_state(cache._attachment.base, scenes.lib.SHMC_S_READY)
    shmcache.unlink(name)


def test_stats_watch_and_diff(name: str, tmp_path: Path) -> None:
    with small(name) as cache:
        code, before, _ = run("stats", name, "--json")
        for i in range(30):
            store(cache, i)
            cache.lookup([i, "absent"])
        _, after, _ = run("stats", name, "--json")
        code, out, _ = run("stats", name, "--watch", "0.1", "--times", "3", "--json")
        assert code == 0 and len(out.splitlines()) == 3
        code, out, _ = run("stats", name, "--watch", "0.1", "--times", "2")
        assert code == 0 and len(out.splitlines()) == 3 and all(len(line) <= 80 for line in out.splitlines())
    shmcache.unlink(name)
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(before)
    b.write_text(after)
    code, out, _ = run("diff", str(a), str(b), "--json")
    found = json.loads(out)
    changes = {r["counter"]: r["change"] for r in found["counters"]}
    assert (changes["hits"], changes["misses"], changes["stores"]) == (30, 30, 30)
    assert changes["bytes.used"] == 30 * 4096 and found["hit_ratio"] == 0.5
    code, out, _ = run("diff", str(a), str(b))
    assert code == 0 and "+30" in out and "50.0% hit" in out
    assert "wrong order" in run("diff", str(b), str(a))[2]
    for bad, expected in (("{", 1), ("[]", 1), ('{"verb": "show", "schema": 1}', 1)):
        a.write_text(bad)
        assert run("diff", str(a), str(b))[0] == expected
    assert run("diff", str(tmp_path / "none"), str(b))[0] == 2


KEYS = st.one_of(st.binary(max_size=64), st.text(max_size=16), st.integers(-(2**500), 2**500))


@settings(max_examples=150, deadline=None)
@given(KEYS)
def test_the_text_of_a_key_is_read_back(key: Any) -> None:
    raw = encode(key)
    text = _keytext.show(*raw)
    assert text.isprintable()
    assert raw in _keytext.parse(text)
    if "…" not in text and not text.startswith(("0x", "int:")):
        assert _keytext.parse(text)[0] == raw


@pytest.mark.parametrize("text", ["0xabc", "0xzz", "0x" + "00" * 65, "x" * 65, "int:zero"])
def test_what_is_no_key_is_a_usage_error(name: str, text: str) -> None:
    small(name).close()
    code, _, err = run("key", name, text)
    assert code == 1 and "key" in err
    shmcache.unlink(name)


def test_a_pattern_must_mean_one_key(name: str) -> None:
    with small(name) as cache:
        for key in ("alpha", "alpine", "beta"):
            store(cache, key)
        assert json.loads(run("key", name, "b*", "--json")[1])["chunks"][0]["key"] == "beta"
        assert json.loads(run("key", name, "alpi…", "--json")[1])["chunks"][0]["key"] == "alpine"
        code, _, err = run("key", name, "al*")
        assert code == 1 and "alpha" in err and "alpine" in err
        assert run("key", name, "c*")[0] == 2
        assert why(name, "b*")["verdict"] == "hit"
        cache.remove("beta")
        assert why(name, "b*")["verdict"] == "removed", "also what only the events know"
        cache.remove("alpha")
        cache.remove("alpine")
        assert run("why", name, "al*")[0] == 1
        assert why(name, "z*")["verdict"] == "never-stored"
        for key in (bytes.fromhex("abcdef01"), bytes.fromhex("abcd0000"), b"\xab"):
            store(cache, key)
        for text, found in (("0xabcde…", "0xabcdef01"), ("0xabcd0*", "0xabcd0000"), ("0xab", "0xab")):
            assert json.loads(run("key", name, text, "--json")[1])["chunks"][0]["key"] == found
        assert run("key", name, "0xabcd…")[0] == 1
    shmcache.unlink(name)


def test_text_of_a_segment_cannot_move_the_cursor(name: str) -> None:
    evil = "\x1b[2J\x1b]0;x\x07[red]\n"
    with small(name, label="l\x1b[2J") as cache:
        store(cache.namespace(evil), evil)
        for verb in (["procs"], ["namespaces"], ["keys"], ["holds"], ["events"], ["show"], ["map"]):
            _, out, _ = run(verb[0], name)
            assert "\x1b" not in out and "\x07" not in out
        _, out, _ = run("keys", name)
        assert "\\x1b" in out
    shmcache.unlink(name)
