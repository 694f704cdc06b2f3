"""open, create, attach, unlink, segments: what each promises, and the typed error for each bad input."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import shmcache

SHM = Path("/dev/shm")
SMALL = 1 << 20


def files(name: str) -> list[Path]:
    return sorted(SHM.glob(f"shmcache.{name}*"))


def test_open_creates_then_attaches(name: str) -> None:
    with shmcache.open(name, capacity=SMALL) as a, shmcache.open(name) as b:
        with a.default.allocate(100) as obj:
            obj.byte_array[:] = b"x" * 100
            assert a.put("k", obj)
        got = b.get("k")
        assert got is not None and bytes(got.byte_array) == b"x" * 100
        got.release()
        assert a.stats().counts.attachments == 2
        a.unlink()
    assert files(name) == []


def test_create_refuses_what_exists_and_attach_what_does_not(name: str) -> None:
    with pytest.raises(shmcache.SegmentNotFoundError, match=name):
        shmcache.attach(name)
    with pytest.raises(ValueError, match="capacity"):
        shmcache.open(name)
    with shmcache.create(name, SMALL) as cache:
        with pytest.raises(shmcache.SegmentExistsError, match=name):
            shmcache.create(name, SMALL)
        shmcache.attach(name).close()
        cache.unlink()
    with pytest.raises(shmcache.SegmentNotFoundError):
        shmcache.unlink(name)


@pytest.mark.parametrize("bad", ["", ".hidden", "a/b", "x" * 65, "sp ace", "ü", "a\0b", 7, None])
def test_bad_names_are_value_errors(bad: object) -> None:
    for call in (
        lambda: shmcache.open(bad, capacity=SMALL),  # type: ignore[arg-type]
        lambda: shmcache.attach(bad),  # type: ignore[arg-type]
        lambda: shmcache.unlink(bad),  # type: ignore[arg-type]
    ):
        with pytest.raises((ValueError, TypeError)):
            call()


@pytest.mark.parametrize(
    "arguments",
    [
        {"capacity": 0},
        {"capacity": -1},
        {"capacity": "12 parsecs"},
        {"capacity": True},
        {"capacity": 1.5},
        {"capacity": 4097},
        {"capacity": SMALL, "align": 3},
        {"capacity": SMALL, "align": 32},
        {"capacity": SMALL, "align": 4 << 20},
        {"capacity": SMALL, "region_bytes": 100},
        {"capacity": SMALL, "region_bytes": 65535},
        {"capacity": SMALL, "region_bytes": 65536, "align": 131072},
        {"capacity": SMALL, "policy": "best"},
        {"capacity": SMALL, "max_chunks": 0},
        {"capacity": SMALL, "max_attachments": 0},
        {"capacity": SMALL, "max_attachments": 1 << 20},
        {"capacity": SMALL, "lifetime": "eternal"},
        {"capacity": SMALL, "mode": 0o1777777},
        {"capacity": SMALL, "prefault": "sometimes"},
        {"capacity": SMALL, "on_incompatible": "ignore"},
        {"capacity": SMALL, "timeout": -1},
        {"capacity": SMALL, "lock_timeout": 0},
        {"capacity": SMALL, "lock_timeout": float("inf")},
        {"capacity": SMALL, "rank": -3},
        {"capacity": SMALL, "label": 7},
        {"capacity": SMALL, "label": b"engine"},
    ],
    ids=str,
)
def test_bad_arguments_are_value_errors_and_leave_nothing(name: str, arguments: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        shmcache.open(name, **arguments)  # type: ignore[arg-type]
    assert files(name) == []


def test_more_than_the_host_has_is_refused_with_both_numbers(name: str) -> None:
    with pytest.raises(shmcache.OutOfSharedMemoryError) as caught:
        shmcache.create(name, "8TiB", max_chunks=5000)
    assert "8" in str(caught.value) and isinstance(caught.value, OSError)
    assert files(name) == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"capacity": 2 * SMALL}, ["2097152", "1048576"]),
        ({"align": 512}, ["512", "4096"]),
        ({"policy": "fifo"}, ["fifo", "lru"]),
        ({"max_chunks": 17}, ["17", "4096"]),
        ({"max_attachments": 3}, ["3", "64"]),
        ({"lifetime": "ephemeral"}, ["ephemeral", "persistent"]),
        ({"region_bytes": 65536}, ["65536", "1048576"]),
    ],
    ids=str,
)
def test_a_disagreeing_argument_shows_both_values(name: str, given: dict[str, object], shown: list[str]) -> None:
    with shmcache.create(name, SMALL) as cache:
        with pytest.raises(shmcache.SegmentMismatchError) as caught:
            shmcache.open(name, **given)  # type: ignore[arg-type]
        for value in shown:
            assert value in str(caught.value)
        with pytest.raises(shmcache.SegmentMismatchError):
            shmcache.attach(name, **given)  # type: ignore[arg-type]
        assert cache.stats().counts.attachments == 1
        cache.unlink()


def test_what_agrees_may_be_said_again(name: str) -> None:
    with shmcache.create(name, SMALL, policy="FIFO", max_attachments=3) as cache:
        for _ in range(3):
            shmcache.attach(name, capacity="1MiB", align=4096, policy="fifo", max_attachments=3).close()
        shmcache.open(name, policy="Fifo").close()
        cache.unlink()
    with pytest.raises(shmcache.SegmentNotFoundError):
        shmcache.attach(name, capacity=SMALL)


def test_an_interrupt_while_it_prefaults_leaves_no_attachment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_committer: object) -> bool:
        raise KeyboardInterrupt

    with shmcache.create(name, SMALL) as cache:
        monkeypatch.setattr("shmcache._arena.Committer.wait", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            shmcache.attach(name, prefault="wait")
        assert caught.value is not None and cache.stats().counts.attachments == 1
        cache.unlink()


def test_replace_needs_proof_that_nobody_is_attached(name: str) -> None:
    first = shmcache.create(name, SMALL)
    with pytest.raises(shmcache.SegmentBusyError):
        shmcache.open(name, capacity=2 * SMALL, on_incompatible="replace")
    first.close()
    with shmcache.open(name, capacity=2 * SMALL, on_incompatible="replace") as cache:
        assert cache.capacity == 2 * SMALL
        cache.unlink()


def test_files_have_exactly_the_mode_whatever_the_umask(name: str) -> None:
    old = os.umask(0o077)
    try:
        with shmcache.create(name, 4 * 65536, region_bytes=65536, mode=0o640) as cache:
            assert len(files(name)) == 5
            assert {stat.S_IMODE(p.stat().st_mode) for p in files(name)} == {0o640}
            cache.unlink()
    finally:
        os.umask(old)


@pytest.mark.parametrize(
    ("capacity", "region_bytes", "align"),
    [
        (65536, 65536, 64),
        (10 * 65536 + 4096, 65536, 4096),
        (SMALL, 3 * 65536, 512),
        (6 << 20, 2 << 20, 1 << 20),
        (4096, 4096, 4096),
        (SMALL, 100_000, 4096),
        (SMALL, 65536 + 1, 64),
        (6 << 20, (3 << 20) - 1, 2 << 20),
    ],
)
def test_any_geometry_is_sound(name: str, capacity: int, region_bytes: int, align: int) -> None:
    with shmcache.create(name, capacity, region_bytes=region_bytes, align=align, prefault="wait") as cache:
        assert cache.stats().bytes.ready == capacity
        shmcache.open(name, capacity=capacity, region_bytes=region_bytes).close()
        taken = []
        while (obj := cache.default.allocate(align)) is not None:
            obj.byte_array[:] = bytes([len(taken) % 251]) * align
            taken.append(obj)
            if len(taken) > 2000:
                break
        assert cache.verify() == []
        for i, obj in enumerate(taken):
            assert bytes(obj.byte_array) == bytes([i % 251]) * align
            obj.release()
        assert cache.stats().bytes.used == 0 and cache.verify() == []
        cache.unlink()


def test_one_allocation_of_the_whole_capacity_succeeds(name: str) -> None:
    for capacity in (SMALL, 3 * 65536):
        with shmcache.create(name, capacity) as cache:
            with cache.default.allocate(capacity) as obj:
                assert obj.get_size() == obj.get_physical_size() == capacity
            cache.unlink()


def test_a_size_as_text_is_exact(name: str) -> None:
    with shmcache.create(name, "1.5MiB") as cache:
        assert cache.capacity == 3 << 19
        cache.unlink()


def corrupt(name: str, offset: int, data: bytes) -> None:
    with open(SHM / f"shmcache.{name}", "r+b") as f:
        f.seek(offset)
        f.write(data)


def test_a_file_that_was_never_a_segment_is_not_removed(name: str) -> None:
    shmcache.create(name, SMALL).close()
    corrupt(name, 0, b"\xa5" * 8)
    for how in ("error", "replace"):
        with pytest.raises(shmcache.SegmentCorruptError):
            shmcache.open(name, capacity=SMALL, on_incompatible=how)  # type: ignore[arg-type]
    assert any(s.name == name for s in shmcache.segments())
    shmcache.unlink(name, force=True)
    for region in files(name):  # nothing says any more whose they are
        region.unlink()


@pytest.mark.parametrize("offset", [64, 72, 80, 88, 120, 140])
def test_a_damaged_header_is_a_typed_error(name: str, offset: int) -> None:
    shmcache.create(name, SMALL).close()
    corrupt(name, offset, b"\xa5" * 8)
    with pytest.raises((shmcache.SegmentCorruptError, shmcache.SegmentMismatchError)):
        shmcache.attach(name)
    assert any(s.name == name for s in shmcache.segments())
    with shmcache.open(name, capacity=SMALL, on_incompatible="replace") as cache:
        assert cache.verify() == []
        cache.unlink()


def test_another_format_shows_both_values(name: str) -> None:
    shmcache.create(name, SMALL).close()
    corrupt(name, 8, (77).to_bytes(4, "little"))
    with pytest.raises(shmcache.SegmentMismatchError, match="77"):
        shmcache.attach(name)
    shmcache.unlink(name, force=True)


@pytest.mark.parametrize("content", [b"", b"x", b"garbage" * 3000, bytes(100_000)])
def test_a_foreign_or_half_made_file_is_no_crash(name: str, content: bytes) -> None:
    (SHM / f"shmcache.{name}").write_bytes(content)
    os.chmod(SHM / f"shmcache.{name}", 0o600)
    assert any(s.name == name for s in shmcache.segments())
    try:
        with shmcache.open(name, capacity=SMALL) as cache:
            assert cache.verify() == []
    except (shmcache.SegmentCorruptError, shmcache.SegmentMismatchError):
        assert content.strip(b"\0"), "an empty stub of a dead creator is taken over"
    shmcache.unlink(name, force=True)


def test_a_truncated_control_file_is_a_typed_error(name: str) -> None:
    shmcache.create(name, SMALL).close()
    os.truncate(SHM / f"shmcache.{name}", 8192)
    with pytest.raises(shmcache.SegmentCorruptError):
        shmcache.attach(name)
    shmcache.unlink(name, force=True)


def test_a_missing_or_replaced_region_is_a_typed_error(name: str) -> None:
    shmcache.create(name, SMALL).close()
    region = files(name)[1]
    size = region.stat().st_size
    region.unlink()
    with pytest.raises(shmcache.ShmCacheError):
        shmcache.attach(name)
    region.write_bytes(bytes(size))
    with pytest.raises(shmcache.ShmCacheError):
        shmcache.attach(name)
    shmcache.unlink(name, force=True)


def test_segments_lists_without_attaching(name: str) -> None:
    with shmcache.create(name, SMALL) as cache:
        info = next(s for s in shmcache.segments() if s.name == name)
        assert (info.alive, info.dead, info.lifetime) == (1, 0, "persistent")
        assert info.bytes > 0 and info.state.lower() == "ready" and info.created
        assert cache.stats().counts.attachments == 1
        cache.unlink()
    assert not any(s.name == name for s in shmcache.segments())


def test_own_handles_do_not_make_a_segment_busy(name: str) -> None:
    a, b = shmcache.create(name, SMALL), shmcache.attach(name)
    shmcache.unlink(name)
    with a.default.allocate(10) as obj:
        assert a.put("still", obj) and b.contains("still")
    a.close()
    b.close()


def test_a_closed_cache_says_so_and_views_stay_mapped(name: str) -> None:
    cache = shmcache.create(name, SMALL)
    obj = cache.default.allocate((4, 4), "float32")
    assert obj is not None
    tensor = obj.tensor
    assert tensor is not None
    tensor.fill_(3)
    ns = cache.namespace("other")
    cache.close()
    cache.close()
    assert cache.closed
    assert float(tensor.sum()) == 48
    for call in (
        lambda: cache.get("k"),
        lambda: cache.contains("k"),
        lambda: cache.allocate(10),
        lambda: cache.lookup(["k"]),
        lambda: cache.stats(),
        lambda: cache.verify(),
        lambda: cache.reap(),
        lambda: cache.namespace("x"),
        lambda: cache.keys(),
        lambda: cache.put("k", obj),
        lambda: cache.__enter__(),
        *(lambda call=call: call([]) for call in (ns.lookup, ns.leading, ns.touch, ns.get_many, ns.pin_many)),
        lambda: ns.put_many([], []),
        lambda: ns.allocate_many(10, n=0),
    ):
        with pytest.raises(shmcache.SegmentClosedError, match=name):
            call()
    obj.release()
    shmcache.unlink(name)


def test_a_pickled_cache_attaches_by_name(name: str) -> None:
    with shmcache.create(name, SMALL) as cache:
        with cache.default.allocate(10) as obj:
            cache.put(b"k", obj)
        with pickle.loads(pickle.dumps(cache)) as other:
            assert other.contains(b"k") and other.stats().counts.attachments == 2
        cache.unlink()


def test_another_uids_segment_is_a_permission_error(name: str) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to make a file of another uid")
    shmcache.create(name, SMALL).close()
    path = SHM / f"shmcache.{name}"
    os.chown(path, 12345, 12345)
    for call in (lambda: shmcache.attach(name), lambda: shmcache.open(name, capacity=SMALL)):
        with pytest.raises(shmcache.SegmentPermissionError) as caught:
            call()
        assert name in str(caught.value) and "12345" in str(caught.value) and "600" in str(caught.value)
    os.chown(path, 0, 0)
    shmcache.unlink(name)


def test_import_and_bytes_need_no_torch(name: str) -> None:
    code = (
        "import sys, shmcache\n"
        f"c = shmcache.create({name!r}, '1MiB')\n"
        "o = c.allocate(100); o.byte_array[:3] = b'abc'; c.put('k', o); o.release()\n"
        "assert bytes(c.get('k').byte_array[:3]) == b'abc'\n"
        "c.unlink(); c.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_metadata_is_at_most_half_a_percent(name: str) -> None:
    from shmcache._core import ffi, lib

    for gib in (8, 64, 512, 1024):
        plan = ffi.new("shmc_geometry *", {"capacity": gib << 30, "align": 4096, "max_attachments": 64})
        assert lib.shmc_plan(plan) == 0
        assert plan.control_bytes <= 0.005 * plan.capacity, gib
        per_entry = 128 + 112 + 4 * (plan.n_buckets + plan.n_part_buckets) / plan.max_chunks
        assert per_entry <= 256
