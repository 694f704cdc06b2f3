"""Each finding of `show`: when it is true it is said, with its level, and with what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import scenes
from scenes import run, small, store

import shmcache
from shmcache._core import lib
from shmcache._handshake import Handshake
from shmcache._space import Room
from shmcache.inspect import _health

seen: set[str] = set()


def findings(name: str) -> dict[str, dict[str, str]]:
    code, out, _ = run("show", name, "--json")
    found = {f["code"]: f for f in json.loads(out)["findings"]}
    assert code == (3 if any(f["level"] != "info" for f in found.values()) else 0)
    seen.update(found)
    return found


def engine(fork: Any, name: str, then: Any = None) -> Any:
    def body(child: Any) -> None:
        scenes.leave(child)
        cache = small(name)
        held = scenes.furnish(cache)
        child.tell("ready")
        if then:
            then(cache)
        child.await_parent()
        del held

    child = fork(body)
    assert child.listen() == "ready"
    return child


def test_a_sound_segment_has_none(name: str) -> None:
    with small(name):
        assert findings(name) == {}
    assert set(findings(name)) == {"abandoned"}
    shmcache.unlink(name)


def test_the_dead_beside_the_living(scrap: str, fork: Any) -> None:
    with small(scrap, label="survivor") as cache:
        child = engine(fork, scrap)
        child.kill()
        child.wait()
        found = findings(scrap)["dead-holds"]
        assert found["level"] == "warning" and "4 holds" in found["text"] and f"reap {scrap}" in found["action"]
        cache.reap()
        assert findings(scrap) == {}


def test_a_dead_one_that_held_nothing(scrap: str, fork: Any) -> None:
    def body(child: Any) -> None:
        scenes.leave(child)
        cache = small(scrap)
        child.tell("ready")
        child.await_parent()
        del cache

    with small(scrap):
        child = fork(body)
        assert child.listen() == "ready"
        child.kill()
        child.wait()
        assert findings(scrap)["dead-attachments"]["level"] == "info"


@pytest.mark.parametrize("in_transaction", [0, 1])
def test_a_lock_that_is_held_too_long_and_a_holder_that_died(scrap: str, fork: Any, in_transaction: int) -> None:
    def hold(cache: Any) -> None:
        lib.shmc_debug_hold_lock(cache._attachment.handle, 50 * 10**9, in_transaction)

    child = engine(fork, scrap, hold)
    scenes.until(lambda: "lock-stuck" in findings(scrap))
    found = findings(scrap)["lock-stuck"]
    assert str(child.pid) in found["text"] and "microseconds" in found["text"]
    child.kill()
    child.wait()
    found = findings(scrap)["holder-died"]
    assert found["level"] == "info" and "rolls back" in found["action"]
    code, out, _ = run("verify", scrap)
    assert code == 0, out
    small(scrap).close()
    assert "holder-died" not in findings(scrap)


def test_a_holder_that_is_stopped(scrap: str, fork: Any) -> None:
    scene = scenes.stopped(scrap, fork)
    found = findings(scrap)["lock-stopped"]
    assert found["level"] == "error" and f"kill -CONT {scene.child.pid}" in found["action"]
    assert re.search(r"for 0\.\d s at least", found["text"])


def test_counters_are_those_before_what_the_stopped_one_began(scrap: str, fork: Any) -> None:
    """The debug call leaves the header in the middle of a transaction that spoils what is in use."""
    scenes.stopped(scrap, fork)
    found = json.loads(run("stats", scrap, "--json")[1])
    assert found["exact"] and found["bytes"]["used"] == 92 << 10
    page = json.loads(run("show", scrap, "--json")[1])
    assert page["stats"]["bytes"] == found["bytes"]


@pytest.mark.parametrize("stop", [True, False])
def test_who_keeps_everybody_from_attaching(scrap: str, fork: Any, stop: bool) -> None:
    def body(child: Any) -> None:
        scenes.leave(child)
        with Handshake.acquire(scrap, 0) as mine:
            mine.note_pid()
            child.tell("ready")
            child.await_parent()

    small(scrap).close()
    child = fork(body)
    assert child.listen() == "ready"
    if stop:
        child.kill(signal.SIGSTOP)
        scenes.until(lambda: _health.process_state(child.pid) == "T")
    found = findings(scrap)["handshake-stopped" if stop else "handshake-held"]
    assert str(child.pid) in found["text"] and found["level"] == ("error" if stop else "info")
    if stop:
        with scenes.prompt():
            code, _, err = run("unlink", scrap, "--yes")
        assert code == 3 and str(child.pid) in err


def test_a_creator_that_stopped_half_way_is_named(scrap: str, fork: Any) -> None:
    def body(child: Any) -> None:
        scenes.leave(child)
        with Handshake.acquire(scrap, 0, create_mode=0o600) as mine:
            os.ftruncate(mine.fd, 1 << 20)
            mine.note_pid()
            child.tell("ready")
            child.await_parent()

    child = fork(body)
    assert child.listen() == "ready"
    code, _, err = run("show", scrap)
    assert code == 4 and f"kill -CONT {child.pid}" in err
    child.kill()
    child.wait()
    assert "its creator died" in run("show", scrap)[2]


def test_a_holder_that_does_not_exist_here(scrap: str, fork: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scenes.stopped(scrap, fork)
    monkeypatch.setattr(_health, "process_state", lambda pid: "")
    assert findings(scrap)["lock-lost"]["level"] == "error"


def test_poisoned_and_unlinking(scrap: str, fork: Any) -> None:
    with small(scrap) as cache:
        base = cache._attachment.base
        lib.shmc_set_state(base, lib.SHMC_S_POISONED)
        assert findings(scrap)["poisoned"]["level"] == "error"
        lib.shmc_set_state(base, lib.SHMC_S_UNLINKING)
        assert findings(scrap)["unlinking"]["level"] == "warning"
        lib.shmc_set_state(base, lib.SHMC_S_READY)


def test_an_ephemeral_one_that_nobody_removed(scrap: str, fork: Any) -> None:
    def body(child: Any) -> None:
        scenes.leave(child)
        cache = small(scrap, lifetime="ephemeral")
        child.tell("ready")
        child.await_parent()
        del cache

    child = fork(body)
    assert child.listen() == "ready"
    child.kill()
    child.wait()
    assert "gc" in findings(scrap)["ephemeral-abandoned"]["action"]


def test_full_tables_and_memory(name: str) -> None:
    with small(name, max_attachments=2) as cache:
        with small(name) as second:
            assert "attachments-full" in findings(name)
            assert second.name == name
        for i in range(256):
            cache.namespace(f"n{i}")
        assert "namespaces-full" in findings(name)
        store(cache.namespace("n0"), "k")
        held = [cache.namespace("n0").get("k") for _ in range(8000)]
        assert "holds-full" in findings(name)
        big = cache.namespace("n1").allocate(3_900_000)
        found = findings(name)["pinned-full"]
        assert f"holds {name}" in found["action"]
        shmcache.release_many([*held, big])
    shmcache.unlink(name)


def test_memory_that_was_removed_by_hand(scrap: str) -> None:
    small(scrap).close()
    region = next(scenes.SHM.glob(f"shmcache.{scrap}.*.0000"))
    region.unlink()
    found = findings(scrap)["lost-memory"]
    assert found["level"] == "error" and str(region) in found["text"]


def test_a_file_system_that_is_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with small(name, region_bytes="1MiB"):
        monkeypatch.setattr(_health, "room", lambda: Room(1 << 20, "/dev/shm has", "enlarge it"))
        found = findings(name)["no-room"]
        assert found["level"] == "error" and "3 MiB are still to be reserved" in found["text"]
        monkeypatch.undo()

        class Nearly:
            f_bavail, f_blocks, f_frsize = 4, 100, 1 << 30

        monkeypatch.setattr(_health.os, "statvfs", lambda path: Nearly)
        assert "4 GiB left" in findings(name)["shm-nearly-full"]["text"]
        monkeypatch.undo()
    shmcache.unlink(name)


def test_processes_of_another_pid_namespace_are_not_judged(
    scrap: str, fork: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenes.live(scrap, fork)
    monkeypatch.setattr("shmcache._control.own_namespaces", lambda: (1, 1))
    assert "nsenter" in findings(scrap)["other-namespace"]["action"]
    assert [a["life"] for a in json.loads(run("procs", scrap, "--json")[1])["attachments"]] == ["unknown"]


def test_a_process_that_execs_is_quarantined(scrap: str, fork: Any) -> None:
    def body(child: Any) -> None:
        cache = small(scrap)
        held = scenes.furnish(cache)
        child.tell("ready")
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(50)"])
        del held

    with small(scrap) as cache:
        child = fork(body)
        assert child.listen() == "ready"

        def execed() -> bool:
            rows = json.loads(run("procs", scrap, "--json")[1])["attachments"]
            return any(r["life"] == "exec'ed" for r in rows)

        scenes.until(execed)
        cache.reap()
        assert "quarantine" in findings(scrap)


def test_pinning_that_failed(name: str) -> None:
    with small(name, region_bytes="1MiB") as cache:
        handle = cache._attachment.handle
        assert "off in 1 process" in run("show", name)[1] and json.loads(run("show", name, "--json")[1])["pinning"] == [
            {"pid": os.getpid(), "rank": 0, "state": "off", "regions": 0}
        ]
        lib.shmc_note_pinning(handle, lib.SHMC_PIN_DONE, 4)
        assert findings(name) == {}
        code, out, _ = run("show", name)
        assert code == 0 and "4 of 4 regions in 1 of 1 process\n" in re.sub(r" +\n", "\n", out)
        lib.shmc_note_pinning(handle, lib.SHMC_PIN_FAILED, 3)
        found = findings(name)["pinning-failed"]
        assert found["level"] == "warning" and f"pid {os.getpid()}" in found["text"] and "3 of 4" in found["text"]
        row = json.loads(run("procs", name, "--json")[1])["attachments"][0]
        assert (row["pinning"], row["pinned_regions"]) == ("failed", 3)
        assert "3/4, failed" in run("procs", name)[1]
    with small(name) as cache:  # the slot is another attachment's by now
        assert findings(name) == {}
    shmcache.unlink(name)


def test_a_process_that_was_taken_for_dead_says_nothing_for_another(name: str) -> None:
    """Its note goes into a slot that is somebody else's by then: it is not taken for his, nor put over it."""
    from shmcache.inspect._reader import Reader

    first, second = small(name), small(name)
    try:
        handle = first._attachment.handle
        slots = lib.shmc_slot_of(handle), lib.shmc_slot_of(second._attachment.handle)
        second.close()
        third = small(name)  # in the second's slot
        assert lib.shmc_slot_of(third._attachment.handle) == slots[1]
        assert lib.shmc_note_pinning(third._attachment.handle, lib.SHMC_PIN_RUNNING, 1) == 0
        assert lib.shmc_note_pinning(second._attachment.handle, lib.SHMC_PIN_DONE, 1) == lib.SHMC_E_CLOSED
        assert {s.slot: s.pin_state for s in Reader.open(name).slots()} == {slots[0]: "off", slots[1]: "running"}
        third.close()
    finally:
        first.close()
        shmcache.unlink(name)


def test_a_full_segment_of_the_dead_is_told_apart(scrap: str, fork: Any) -> None:
    """Who held it is gone: the advice is to return it, not to find who holds it."""

    def fill(child: Any) -> None:
        scenes.leave(child)
        cache = small(scrap)
        for i in range(64):
            store(cache, i, 65536)
        pins = cache.lookup(range(64), pin=True)
        child.tell("ready")
        child.await_parent()
        del pins

    child = fork(fill)
    assert child.listen() == "ready"
    child.kill()
    child.wait()
    found = findings(scrap)
    assert set(found) == {"abandoned"} and "64 holds" in found["abandoned"]["text"]


def test_all_findings_were_seen() -> None:
    codes = set(re.findall(r'"(?:error|warning|info)",\s+"([a-z-]+)"', Path(_health.__file__).read_text()))
    assert len(codes) > 15
    if len(seen) > 10:  # not when only some of these tests are run
        assert not codes - seen
