"""`verify` compares the bytes of all parts: it finds what is damaged, and takes nothing else for it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from scenes import SHM, held_by, leave, run, small, store, until

import shmcache
from shmcache._core import lib

pytestmark = pytest.mark.timeout(60)


def furnish(cache: shmcache.SharedCache) -> Any:
    kv = cache.namespace("llama:tp2", parts=2)
    for i in range(8):
        for part in range(2):
            store(kv, bytes([i]) * 32, 10_000 + i, part, fill=i)
    return kv


def flip(cache: shmcache.SharedCache, kv: Any, key: bytes, part: int) -> None:
    with kv.get(key, part=part) as obj:
        arena = cache._attachment.arena().buffer
        arena[obj.shm_offset + 5] = b"\xff"


def verify(*argv: str) -> tuple[int, Any]:
    code, out, _ = run("verify", *argv, "--json")
    return code, json.loads(out)


@pytest.mark.parametrize(("kind", "attached"), [("xxh3", True), ("xxh3", False), ("crc32c", True)])
def test_a_changed_byte_is_found_and_named(name: str, kind: str, attached: bool) -> None:
    with small(name, checksum=kind, lifetime="persistent") as cache:
        kv = furnish(cache)
        assert verify(name)[1]["checksums"]["checked"] == 16
        before = cache.stats()
        flip(cache, kv, b"\3" * 32, 1)
        if not attached:
            cache.close()
        code, found = verify(name)
        sums = found["checksums"]
        assert code == 3 and not found["sound"] and found["violations"] == []
        assert (sums["kind"], sums["checked"], sums["without"], sums["gone"]) == (kind, 16, 0, 0)
        (wrong,) = sums["mismatches"]
        assert (wrong["namespace"], wrong["key"], wrong["part"]) == ("llama:tp2", "0x" + "03" * 32, 1)
        assert wrong["expected"] != wrong["actual"] and len(wrong["actual"]) == 18 and wrong["bytes"] == 10_003
        code, out, _ = run("verify", name)
        assert code == 3 and "1 part with other bytes" in out and wrong["expected"] in out.replace("\n", "")
        assert run("verify", name, "--no-checksums")[0] == 0
        assert verify(name, "--no-checksums")[1]["checksums"] is None
        if attached:
            after = cache.stats()  # it looked without a hold or a lookup
            assert (after.hits, after.misses, after.counts.holds) == (before.hits + 1, before.misses, 0)
        assert run("remove", name, wrong["key"], "--yes")[0] == 0
        code, found = verify(name)
        assert (code, found["checksums"]["checked"]) == (0, 14)
    shmcache.unlink(name)


def test_a_segment_without_has_nothing_to_compare(name: str) -> None:
    with small(name) as cache:
        furnish(cache)
        assert verify(name) == (0, {**verify(name)[1], "checksums": None})
        assert "hecksum" not in run("verify", name)[1]
        assert json.loads(run("show", name, "--json")[1])["checksum"] == "none"
    shmcache.unlink(name)


def test_what_has_none_is_counted(name: str) -> None:
    with small(name, checksum="xxh3") as cache:
        furnish(cache)
        cache._attachment.checksum = None  # as an older version puts
        store(cache.default, "old")
        code, found = verify(name)
        assert (code, found["checksums"]["checked"], found["checksums"]["without"]) == (0, 16, 1)
        assert "1 part without a checksum" in run("verify", name)[1]
        shown = run("show", name)[1]
        assert "xxh3" in shown
    shmcache.unlink(name)


def test_a_copy_has_no_payload_and_says_so(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with small(name, checksum="xxh3") as cache:
        furnish(cache)
        copy.write_bytes((SHM / f"shmcache.{name}").read_bytes())
    code, found = verify("--file", str(copy))
    assert code == 0 and "no payload" in found["checksums"]["skipped"] and found["checksums"]["checked"] == 0
    assert "were not compared" in run("verify", "--file", str(copy))[1]
    next(SHM.glob(f"shmcache.{name}.*")).unlink()
    assert "is not there" in verify(name)[1]["checksums"]["skipped"]
    shmcache.unlink(name, force=True)


def test_a_stopped_holder_of_the_lock_does_not_matter(scrap: str, fork: Any) -> None:
    def engine(child: Any) -> None:
        leave(child)
        cache = small(scrap, checksum="xxh3")
        kv = furnish(cache)
        flip(cache, kv, b"\4" * 32, 0)
        child.tell("ready")
        lib.shmc_debug_hold_lock(cache._attachment.handle, 50 * 10**9, 1)

    child = fork(engine)
    assert child.listen() == "ready"
    until(lambda: held_by(scrap) == child.pid)
    child.kill(signal.SIGSTOP)
    code, found = verify(scrap)
    assert code == 3 and len(found["violations"]) == 1
    assert [(m["key"][:4], m["part"]) for m in found["checksums"]["mismatches"]] == [("0x04", 0)]


def test_what_is_evicted_and_written_anew_meanwhile_is_no_damage(scrap: str, fork: Any) -> None:
    def engine(child: Any) -> None:
        leave(child)
        cache = small(scrap, checksum="xxh3")
        furnish(cache)
        i = 0
        while True:  # the arena is written over again and again
            with cache.allocate(100_000) as obj:
                obj.byte_array[:] = bytes([i % 251]) * 100_000
                cache.put(i, obj)
            i += 1
            if i == 100:
                child.tell("ready")

    child = fork(engine)
    assert child.listen() == "ready"
    checked = 0
    for _ in range(25):
        code, found = verify(scrap)
        sums = found["checksums"]
        assert code == 0 and sums["mismatches"] == [] and sums["skipped"] is None
        checked += sums["checked"]
    assert checked > 100
    child.kill()
    child.wait()


def test_a_dump_leaves_changed_bytes_out_and_a_load_keeps_the_kind(name: str, tmp_path: Path) -> None:
    file = str(tmp_path / "d")
    with small(name, checksum="xxh3") as cache:
        kv = furnish(cache)
        flip(cache, kv, b"\2" * 32, 1)
    code, out, err = run("dump", name, file, "--json")
    assert code == 3 and "part 1 of b'" in err
    assert {k: v for k, v in json.loads(out).items() if k in ("chunks", "parts", "damaged")} == {
        "chunks": 7, "parts": 14, "damaged": 1,
    }  # fmt: skip
    assert "1 have other bytes" in run("dump", name, file)[1]
    shmcache.unlink(name)
    assert run("load", file, name, "--yes")[0] == 0
    code, found = verify(name)
    assert (code, found["checksums"]["checked"]) == (0, 14)
    shmcache.unlink(name)
