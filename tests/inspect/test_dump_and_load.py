"""A dump holds every bit, is whole or not there, and comes back in any state of the segment it meets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import scenes
import torch
from safetensors import safe_open
from scenes import run, small, store

import shmcache
from shmcache import MemoryFormat


@pytest.fixture
def other(name: str) -> Any:
    yield f"{name}-2"
    if (scenes.SHM / f"shmcache.{name}-2").exists():
        shmcache.unlink(f"{name}-2", force=True)


DTYPES = ["uint8", "bfloat16", "float16", "float32", "int64", "bool", "float8_e4m3fn", "complex64", "uint16"]


def fill(cache: Any) -> dict[tuple[str, Any, int], tuple[Any, ...]]:
    """Chunks of many kinds; what each is to be, by namespace, key and part."""
    kv = cache.namespace("llama:tp2", parts=2, descriptor={"model": "llama", "layers": [1, 2]})
    plain = cache.default
    there: dict[tuple[str, Any, int], tuple[Any, ...]] = {}

    def put(space: Any, key: Any, part: int, shape: Any, dtype: Any, fmt: Any = None) -> None:
        with space.allocate(shape, dtype, fmt=fmt) as obj:
            obj.byte_array[:] = os.urandom(obj.get_size())
            bytes_ = bytes(obj.byte_array)
            assert space.put(key, obj, part=part)
            looks = obj.get_shapes(), obj.get_dtypes(), obj.get_memory_format()
            there[space.name, key, part] = (bytes_, *looks)

    for i, dtype in enumerate(DTYPES):
        put(plain, dtype, 0, (3, 5, i + 1), dtype)
    for i in range(6):
        for part in range(2):
            put(kv, bytes([i]) * 32, part, (2, 4, 16, 8), torch.bfloat16, MemoryFormat.KV_2LTD)
    put(plain, -7, 0, [(4, 4), (9,)], [torch.float32, torch.bfloat16])
    put(plain, "ünïcode", 0, 12345, None)
    plain.touch(["float16", b"none"])
    return there


def contents(cache: Any) -> dict[tuple[str, Any, int], tuple[Any, ...]]:
    found: dict[tuple[str, Any, int], tuple[Any, ...]] = {}
    for info in cache.namespaces():
        space = cache.namespace(info.name)
        for key in space.keys():
            for part in range(info.parts):
                with space.get(key, part=part) as obj:
                    looks = obj.get_shapes(), obj.get_dtypes(), obj.get_memory_format()
                    found[info.name, key, part] = (bytes(obj.byte_array), *looks)
    return found


def test_a_round_trip_is_bit_exact_in_order_and_read_by_others(name: str, other: str, tmp_path: Path) -> None:
    file = tmp_path / "dump.safetensors"
    with small(name) as cache:
        there = fill(cache)
        store(cache.namespace("llama:tp2"), b"half", part=1)
        order = {n.name: cache.namespace(n.name).keys() for n in cache.namespaces()}
        descriptors = {n.name: (n.parts, n.descriptor) for n in cache.namespaces()}
        code, out, _ = run("dump", name, str(file), "--json")
        assert code == 0
        assert (json.loads(out)["chunks"], json.loads(out)["parts"]) == (len(DTYPES) + 2 + 6, len(there))
    code, out, _ = run("load", str(file), other, "--yes", "--json")
    assert code == 0 and json.loads(out)["made"] and json.loads(out)["chunks"] == len(DTYPES) + 2 + 6
    with shmcache.attach(other, prefault="lazy") as again:
        assert contents(again) == there
        assert {n.name: again.namespace(n.name).keys() for n in again.namespaces()} == order
        assert {n.name: (n.parts, n.descriptor) for n in again.namespaces()} == descriptors
        assert again.verify() == []
    with safe_open(file, "pt") as f:
        tensors = {k: f.get_tensor(k) for k in f.keys()}
    shapes = sorted((str(t.dtype), tuple(t.shape)) for t in tensors.values())
    assert ("torch.bfloat16", (2, 4, 16, 8)) in shapes and len(tensors) == len(there)
    raw = {bytes(t.contiguous().view(torch.uint8).flatten().numpy()) for t in tensors.values()}
    assert raw == {v[0] for v in there.values()}
    shmcache.unlink(name)
    shmcache.unlink(other)


def test_a_dump_is_for_its_owner_s_eyes(name: str, tmp_path: Path) -> None:
    """A prompt can be told from its KV, so neither the umask nor what a killed dump has left matters."""
    small(name).close()
    file = tmp_path / "d"
    (tmp_path / "d.partial").write_bytes(b"")
    (tmp_path / "d.partial").chmod(0o666)
    assert run("dump", name, str(file))[0] == 0
    assert file.stat().st_mode & 0o777 == 0o600
    shmcache.unlink(name)


def test_one_namespace(name: str, other: str, tmp_path: Path) -> None:
    file = str(tmp_path / "d")
    with small(name) as cache:
        fill(cache)
    assert run("dump", name, file, "--namespace", "llama:tp2")[0] == 0
    assert run("dump", name, file, "--namespace", "none")[0] == 2
    assert run("load", file, other, "--yes")[0] == 0
    with shmcache.attach(other, prefault="lazy") as again:
        assert [n.name for n in again.namespaces()] == ["llama:tp2"] and again.stats().counts.complete == 6
    shmcache.unlink(name)
    shmcache.unlink(other)


def test_a_dump_that_fails_half_way_leaves_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shmcache.inspect import dump

    file = tmp_path / "d"
    file.write_text("the one before")
    original, n = dump._dump_chunk, iter(range(100))

    def breaks(*args: Any) -> int:
        if next(n) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(dump, "_dump_chunk", breaks)
    with small(name) as cache:
        fill(cache)
        assert run("dump", name, str(file))[0] == 130
        assert [p.name for p in tmp_path.iterdir()] == ["d"] and file.read_text() == "the one before"
        assert cache.stats().counts.holds == 0, "and holds nothing"
    shmcache.unlink(name)


def test_a_killed_dump_is_never_taken_for_one(name: str, other: str, tmp_path: Path) -> None:
    """The partial file is refused, at whatever byte the writer was stopped."""
    file = tmp_path / "d"
    with small(name) as cache:
        fill(cache)
    run("dump", name, str(file))
    whole = file.read_bytes()
    for size in (0, 5, 8, 1000, 70_000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        code, _, err = run("load", str(file), other, "--yes")
        assert code == 1 and "no whole dump" in err, size
    file.write_bytes(bytes(8) + whole[8:])  # as before its last step
    assert run("load", str(file), other, "--yes")[0] == 1
    file.write_bytes(whole + b"x")
    assert run("load", str(file), other, "--yes")[0] == 1
    assert not (scenes.SHM / f"shmcache.{other}").exists()
    shmcache.unlink(name)


def test_a_load_interrupted_half_way_is_finished_by_the_next(
    name: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shmcache.inspect import dump

    file = str(tmp_path / "d")
    with small(name) as cache:
        there = fill(cache)
    run("dump", name, file)
    original, n = dump._load_chunk, iter(range(100))

    def breaks(*args: Any) -> str:
        if next(n) == 5:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as m:
        m.setattr(dump, "_load_chunk", breaks)
        assert run("load", file, other, "--yes")[0] == 130
    with shmcache.attach(other, prefault="lazy") as again:
        some = contents(again)
        assert 0 < len(some) < len(there) and some.items() <= there.items()
        assert again.verify() == [] and again.stats().counts.holds == 0
    code, out, _ = run("load", file, other, "--yes", "--json")
    assert (code, json.loads(out)["there"]) == (0, 5)
    with shmcache.attach(other, prefault="lazy") as again:
        assert contents(again) == there
    shmcache.unlink(name)
    shmcache.unlink(other)


def test_a_load_that_is_killed_leaves_whole_chunks_only(name: str, other: str, tmp_path: Path) -> None:
    file = str(tmp_path / "d")
    with small(name, capacity="64MiB") as cache:
        kv = cache.namespace("kv", parts=4)
        for i in range(200):
            for part in range(4):
                store(kv, i, 65536, part=part, fill=i)
    run("dump", name, file)
    shmcache.unlink(name)
    argv = [sys.executable, "-m", "shmcache.inspect", "load", file, other, "--yes"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as loading:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                if json.loads(run("stats", other, "--json")[1])["counts"]["complete"] >= 10:
                    break
            except ValueError:
                pass  # not there yet
            time.sleep(0.001)
        loading.send_signal(signal.SIGKILL)
    with shmcache.attach(other, prefault="lazy") as again:
        kv = again.namespace("kv")
        again.reap()
        for key in kv.keys():
            for part in range(4):
                with kv.get(key, part=part) as obj:
                    assert bytes(obj.byte_array) == bytes([key]) * 65536
        assert again.verify() == []
    assert run("load", file, other, "--yes")[0] == 0
    with shmcache.attach(other, prefault="lazy") as again:
        assert again.stats().counts.complete == 200
    shmcache.unlink(other)


def test_damaged_bytes_are_never_published(name: str, other: str, tmp_path: Path) -> None:
    file = tmp_path / "d"
    with small(name) as cache:
        there = fill(cache)
    run("dump", name, str(file))
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1  # of the hottest chunk
    file.write_bytes(raw)
    code, out, err = run("load", str(file), other, "--yes", "--json")
    assert (code, json.loads(out)["damaged"]) == (3, 1) and "checksum" in err
    with shmcache.attach(other, prefault="lazy") as again:
        assert len(contents(again)) == len(there) - 1 and contents(again).items() <= there.items()
        assert again.stats().bytes.used == again.stats().bytes.evictable
    shmcache.unlink(name)
    shmcache.unlink(other)


def test_the_hottest_that_fit_are_loaded_and_nothing_is_evicted(name: str, other: str, tmp_path: Path) -> None:
    file = str(tmp_path / "d")
    with small(name) as cache:
        for i in range(16):
            store(cache, i, 65536)
    run("dump", name, file)
    with small(other, capacity="512KiB") as cache:
        store(cache, "mine", 65536)
        code, out, _ = run("load", file, other, "--yes", "--json")
        assert code == 0 and json.loads(out)["no_room"] == 9
        assert cache.keys() == ["mine", *range(9, 16)]
        assert cache.stats().evictions == 0
    shmcache.unlink(name)
    shmcache.unlink(other)


def test_load_asks_and_says_what_is_no_dump(name: str, tmp_path: Path) -> None:
    file = tmp_path / "d"
    small(name).close()
    assert run("dump", name, str(file))[0] == 0, "an empty segment has an empty dump"
    code, _, err = run("load", str(file), name)
    assert code == 5 and "--yes" in err
    assert run("load", str(tmp_path / "none"), name, "--yes")[0] == 2
    assert run("load", __file__, name, "--yes")[0] == 1
    assert run("load", str(file), name, "--yes", "--capacity", "8 GB")[0] == 1
    assert run("dump", name, str(tmp_path / "no" / "folder"))[0] == 1
    (tmp_path / "link").symlink_to("/nowhere")
    for special in ("/dev/null", tmp_path / "link"):
        code, _, err = run("dump", name, str(special))
        assert code == 1 and "no regular file" in err, "it would be replaced"
    assert run("dump", f"{name}x", str(file))[0] == 2
    shmcache.unlink(name)
