"""Verbs that change a segment: they ask, do what they say, and refuse where it is not safe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scenes
from scenes import run, small, store

import shmcache

CHANGING = (["reap"], ["unpin", "--dead"], ["remove", "k2"], ["clear"], ["unlink"])


def at(verb: list[str], name: str, *more: str) -> list[str]:
    return [verb[0], name, *verb[1:], *more]


@pytest.mark.parametrize("verb", CHANGING, ids=" ".join)
def test_without_a_terminal_and_without_yes_nothing_is_changed(scrap: str, fork: Any, verb: list[str]) -> None:
    scenes.dead(scrap, fork)
    before = (scenes.SHM / f"shmcache.{scrap}").read_bytes()
    code, out, err = run(*at(verb, scrap))
    assert (code, out) == (5, "")
    assert "--yes" in err and scrap in err
    assert (scenes.SHM / f"shmcache.{scrap}").read_bytes() == before


@pytest.mark.parametrize("verb", [["reap"], ["unpin", "--dead"]], ids=" ".join)
def test_what_the_dead_hold_comes_back(scrap: str, fork: Any, verb: list[str]) -> None:
    scenes.dead(scrap, fork)
    code, out, _ = run(*at(verb, scrap, "--yes", "--json"))
    found = json.loads(out)
    assert code == 0
    assert (found["slots"], found["holds"], found["blocks"], found["quarantined"]) == (1, 3, 1, 0)
    assert found.get("pins", 2) == 2
    _, out, _ = run("holds", scrap, "--json")
    assert json.loads(out)["total"] == 0
    assert run("verify", scrap)[0] == 0
    code, out, _ = run(*at(verb, scrap))
    assert code == 0, "with nothing to do there is nothing to ask"


def test_unpin_says_that_it_is_for_the_dead_only(scrap: str, fork: Any) -> None:
    code, _, err = run("unpin", scrap)
    assert code == 1 and "--dead" in err


def test_remove_takes_one_chunk_and_only_a_clear_name_for_it(name: str) -> None:
    with small(name) as cache:
        kv = cache.namespace("kv")
        for key in ("k", b"k", 7, "7"):
            store(cache, key)
        store(kv, "only here")
        code, _, err = run("remove", name, "k", "--yes")
        assert code == 1 and "0x6b" in err and "default" in err
        assert run("remove", name, "0x6b", "--yes")[0] == 0
        assert run("remove", name, "int:7", "--yes")[0] == 0
        assert run("remove", name, "only*", "--yes", "--namespace", "kv")[0] == 0
        assert run("remove", name, "absent", "--yes")[0] == 2
        assert run("remove", name, "k", "--yes", "--namespace", "nowhere")[0] == 2
        assert set(cache.keys()) == {"k", "7"} and kv.keys() == []
    shmcache.unlink(name)


# Exit codes of what attaches: dump, load, reap, unpin, remove, clear; and of unlink.
CODES = {
    "live": ((0, 0, 0, 0, 0, 0), 5),
    "dead": ((0, 0, 0, 0, 0, 0), 0),
    "stopped": ((3, 3), 3),
    "poisoned": ((3, 3, 3, 3, 3, 3), 0),
    "empty": ((0, 0, 0, 0, 2, 0), 0),
    "full": ((0, 0, 0, 0, 2, 0), 5),
    "garbage": ((4, 4, 4, 4, 4, 4), 4),
    "half_made": ((4, 0, 0, 0, 2, 0), 0),  # load makes it anew
}


@pytest.mark.parametrize("kind", CODES)
def test_in_every_state_it_is_done_or_refused_with_its_code(scrap: str, fork: Any, tmp_path: Path, kind: str) -> None:
    dump = tmp_path / "other"
    with small(f"{scrap}-b") as other:
        store(other, "from the dump", 64)
        assert run("dump", f"{scrap}-b", str(dump))[0] == 0
    shmcache.unlink(f"{scrap}-b")
    scenes.KINDS[kind](scrap, fork)
    codes, unlink = CODES[kind]
    verbs = (["dump", scrap, str(tmp_path / "d")], ["load", str(dump), scrap, "--yes"],
             *(at(verb, scrap, "--yes") for verb in CHANGING[:4]))  # fmt: skip
    for verb, expected in zip(verbs, codes):  # noqa: B905  # of a stopped one, two will do: each waits for 2 s
        with scenes.prompt():
            code, _, err = run(*verb)
        assert code == expected, (verb, err)
    if kind != "stopped":
        assert run("unlink", scrap, "--yes")[0] == unlink
    run("unlink", scrap, "--yes", "--force")
    assert not list(scenes.SHM.glob(f"shmcache.{scrap}*"))


def test_clear_leaves_what_is_held(name: str) -> None:
    with small(name) as cache:
        held = scenes.furnish(cache)
        code, out, _ = run("clear", name, "--namespace", "llama:tp2", "--yes", "--json")
        assert code == 0 and json.loads(out)["removed"] == 4 and json.loads(out)["left"] == 0
        code, out, _ = run("clear", name, "--yes", "--json")
        found = json.loads(out)
        assert (found["removed"], found["left"]) == (3, 2)
        assert set(cache.keys()) == {"k2", "k3"}
        for obj in held:
            obj.release()
    shmcache.unlink(name)


def test_unlink_refuses_while_others_are_attached(scrap: str, fork: Any) -> None:
    scene = scenes.live(scrap, fork)
    code, _, err = run("unlink", scrap, "--yes")
    assert code == 5 and str(scene.child.pid) in err
    assert run("unlink", scrap, "--yes", "--force")[0] == 0
    assert not list(scenes.SHM.glob(f"shmcache.{scrap}*"))
    assert run("unlink", scrap, "--yes")[0] == 2


def test_unlink_of_what_is_no_segment_needs_force(scrap: str, fork: Any) -> None:
    scenes.garbage(scrap, fork)
    assert run("unlink", scrap, "--yes")[0] == 4
    assert run("unlink", scrap, "--yes", "--force")[0] == 0
    assert not list(scenes.SHM.glob(f"shmcache.{scrap}*"))


@pytest.mark.parametrize("verb", CHANGING[2:3], ids=" ".join)
def test_a_stopped_lock_holder_costs_two_seconds_and_says_who(scrap: str, fork: Any, verb: list[str]) -> None:
    scene = scenes.stopped(scrap, fork)
    with scenes.prompt():
        code, _, err = run(*at(verb, scrap, "--yes"))
    assert code == 3 and str(scene.child.pid) in err


@pytest.mark.parametrize("verb", CHANGING[:4], ids=" ".join)
def test_a_poisoned_segment_takes_no_change_but_its_removal(scrap: str, fork: Any, verb: list[str]) -> None:
    scenes.poisoned(scrap, fork)
    code, _, err = run(*at(verb, scrap, "--yes"))
    assert code == 3 and "poisoned" in err
    assert run("unlink", scrap, "--yes")[0] == 0


def test_gc_finds_only_what_is_proven_abandoned(scrap: str, fork: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shmcache import _shmfs

    monkeypatch.setattr(_shmfs, "control_files", lambda: sorted(there))
    there = {scrap}
    stray = scenes.SHM / f"shmcache.{scrap}.0123456789abcdef.0000"
    monkeypatch.setattr("shmcache.inspect.change._orphan_regions", lambda: [f"/{stray.name}"] if stray.exists() else [])
    cache = small(scrap, lifetime="ephemeral")
    assert run("gc", "--yes", "--json")[0] == 0
    assert (scenes.SHM / f"shmcache.{scrap}").exists(), "somebody is attached"
    cache.close()
    small(scrap).close()
    assert run("gc", "--yes")[1].startswith("Nothing")
    assert (scenes.SHM / f"shmcache.{scrap}").exists(), "persistent: it waits for a warm restart"
    assert run("gc")[0] == 0
    assert run("gc", "--persistent")[0] == 5
    _, out, _ = run("gc", "--persistent", "--yes", "--json")
    assert [r["name"] for r in json.loads(out)["removed"]] == [scrap]
    assert not list(scenes.SHM.glob(f"shmcache.{scrap}*"))

    scenes.poisoned(scrap, fork)
    stray.write_bytes(b"x")
    _, out, _ = run("gc", "--yes", "--json")
    found = json.loads(out)
    assert [r["why"] for r in found["removed"]] == ["poisoned, nobody attached"]
    assert found["stray_files"] == [str(stray)]
    assert not list(scenes.SHM.glob(f"shmcache.{scrap}*"))

    scenes.half_made(scrap, fork)
    assert json.loads(run("gc", "--yes", "--json")[1])["removed"][0]["why"].startswith("half-made")
    scenes.garbage(scrap, fork)
    assert run("gc", "--yes")[1].startswith("Nothing"), "a file that is not ours stays"


def test_gc_waits_for_nobody_who_holds_the_handshake(scrap: str, fork: Any) -> None:
    from shmcache._handshake import Handshake
    from shmcache.inspect.change import _abandoned

    small(scrap, lifetime="persistent").close()
    with Handshake.acquire(scrap, 0), scenes.prompt():
        assert _abandoned(scrap, True, True) is None
    assert (scenes.SHM / f"shmcache.{scrap}").exists()
