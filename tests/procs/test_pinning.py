"""Pinning in one process, against a stand-in for the CUDA runtime (fake_cudart.c)."""

from __future__ import annotations

import gc
import logging
import math
import resource
from typing import Any

import pytest
from hostile import PROMPT, Stopwatch, assert_sound, eventually, join, small, store, uniform
from standin import StandIn, is_mapped, regions

import shmcache
from shmcache import SharedCache, pinning

MIB = 1 << 20
LONG = 30.0  # seconds


def pinned(name: str, capacity: str = "8MiB", **more: Any) -> SharedCache:
    more = {"region_bytes": "2MiB", "prefault": "background", "pin": True, **more}
    return small(name, capacity, **more)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "shmcache" and r.levelno >= logging.WARNING]


def use_all(cache: SharedCache, objects: int = 4, size: int = 2 * MIB) -> None:
    """Bytes go into every region and come back."""
    for key in range(objects):
        assert store(cache, key, key + 1, size)
    for key in range(objects):
        with cache.get(key) as obj:
            uniform(obj, key + 1)


# ---- success ----------------------------------------------------------------------------------------


def test_every_region_is_registered_whole_and_once(name, cuda, caplog):
    with pinned(name, "7MiB") as cache:
        assert cache.wait_pinned(LONG)
        assert cache.stats().pinning == "done: 7MiB"
        assert sorted(cuda.registered()) == regions(cache), "one call for each, the short one at the end too"
        assert len(cuda.calls("enter")) == 4
        assert {c.rest[2] for c in cuda.calls("enter")} == {1 | 2}, "portable and mapped"
        assert cache.wait_pinned(0), "again: nothing to do"
        assert cache.wait_pinned(float("inf"))
        assert not cuda.calls("unregister")
    cuda.assert_all_unregistered()
    assert len(cuda.calls("unregister")) == 4
    assert warnings_in(caplog) == []
    shmcache.unlink(name)


def test_others_see_what_was_obtained(name, cuda):
    """In the slot of each handle, also of one that came later; gone with the handle."""
    from shmcache.inspect._reader import Reader

    def seen() -> list[tuple[str, int]]:
        return [(s.pin_state, s.pinned_regions) for s in Reader.open(name).slots()]

    cuda.close_gate(3)
    with pinned(name, "7MiB") as cache:
        eventually(lambda: seen() == [("running", 2)], "two regions, and the third at the gate")
        cuda.open_gate()
        assert cache.wait_pinned(LONG)
        assert seen() == [("done", 4)]
        with shmcache.attach(name) as late:
            assert late.wait_pinned(LONG) and seen() == [("done", 4)] * 2
        assert seen() == [("done", 4)]
    with shmcache.attach(name, pin=False):
        assert seen() == [("off", 0)]
    shmcache.unlink(name)


def test_others_see_that_it_failed(name, cuda, caplog):
    from shmcache.inspect._reader import Reader

    cuda.fail(at=2, code=2)
    with pinned(name) as cache:
        assert not cache.wait_pinned(LONG)
        assert [(s.pin_state, s.pinned_regions) for s in Reader.open(name).slots()] == [("failed", 1)]
    assert len(warnings_in(caplog)) == 1
    shmcache.unlink(name)


def test_a_size_that_is_no_multiple_of_a_page_is_registered_to_the_end_of_its_page(name, cuda):
    with small(name, 3 * 65536 + 64, align=64, region_bytes=65536 + 64, pin=True, prefault="background") as cache:
        assert cache.wait_pinned(LONG)
        sizes = [(address % 4096, size) for address, size in sorted(cuda.registered())]
        assert sizes == [(0, math.ceil(size / 4096) * 4096) for _, size in regions(cache)]
    cuda.assert_all_unregistered()
    shmcache.unlink(name)


def test_it_happens_by_default_where_cuda_is_in_use(name, cuda):
    with small(name, prefault="background") as cache:
        assert cache.wait_pinned(LONG)
        assert cache.stats().pinning == "done: 4MiB"
    cuda.assert_all_unregistered()
    shmcache.unlink(name)


def test_regions_that_become_ready_later_are_registered_then(name, cuda):
    with pinned(name, "6MiB", prefault="lazy") as cache:
        cuda.await_call("register", 1)
        eventually(lambda: cache.stats().pinning == "running: 2MiB of 6MiB", "the first region counts")
        assert not cache.wait_pinned(0.05), "the others have no memory yet"
        assert cuda.registered() == regions(cache)[:1]
        use_all(cache, 3)
        assert cache.wait_pinned(LONG)
        assert sorted(cuda.registered()) == regions(cache)
    cuda.assert_all_unregistered()
    shmcache.unlink(name)


def test_handles_of_a_process_share_one_registration(name, cuda):
    first = pinned(name)
    assert first.wait_pinned(LONG)
    second = join(name, pin=True)
    assert second.wait_pinned(LONG)
    assert len(cuda.calls("enter")) == 4
    first.close()
    assert second.stats().pinning == "done: 8MiB"
    assert not cuda.calls("unregister"), "the second one still uses it"
    second.close()
    cuda.assert_all_unregistered()
    shmcache.unlink(name)


def test_opening_and_closing_again_and_again_leaves_no_registration(name, cuda):
    for n in range(1, 6):
        with pinned(name) as cache:
            assert cache.wait_pinned(LONG), cache.stats().pinning
            assert len(cuda.calls("enter")) == 4 * n
        cuda.assert_all_unregistered()
    shmcache.unlink(name)


def test_what_a_view_keeps_mapped_stays_registered(name, cuda):
    cache = pinned(name)
    assert cache.wait_pinned(LONG)
    obj = cache.allocate(4096)
    view = obj.byte_array
    address = cache._attachment.arena().address
    obj.release()
    cache.close()
    del obj
    gc.collect()
    view[:4] = b"tail"
    assert not cuda.calls("unregister")
    del view
    gc.collect()
    cuda.assert_all_unregistered()
    assert not is_mapped(address)
    shmcache.unlink(name)


# ---- off --------------------------------------------------------------------------------------------


def test_pin_false_calls_nothing(name, cuda):
    with pinned(name, pin=False) as cache:
        assert not cache.wait_pinned(0.1)
        assert cache.stats().pinning == "off"
    assert cuda.calls() == []
    shmcache.unlink(name)


def test_without_cuda_nobody_hears_of_it(name, caplog, monkeypatch):
    monkeypatch.delenv("SHMCACHE_CUDART", raising=False)
    with small(name) as cache:
        assert not cache.wait_pinned(LONG), "at once"
        assert cache.stats().pinning == "off (CUDA is not in use in this process)"
    assert warnings_in(caplog) == []
    shmcache.unlink(name)


def test_pin_true_without_a_device_warns_once(name, caplog, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("SHMCACHE_CUDART", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with small(name, pin=True) as cache, join(name, pin=True) as second:
        assert not cache.wait_pinned(LONG)
        assert cache.stats().pinning == second.stats().pinning == "off (no CUDA device)"
        use_all(cache, 1)
    (warning,) = warnings_in(caplog)
    assert "no CUDA device" in warning and name in warning
    shmcache.unlink(name)


def test_cuda_that_comes_later_is_seen_at_the_first_view_of_a_tensor(name, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("SHMCACHE_CUDART", raising=False)
    with small(name, prefault="background") as cache:
        cuda = StandIn(tmp_path, monkeypatch)
        with cache.allocate((16,), torch.float32) as obj:
            obj.tensor.fill_(1.0)
        cuda.await_call("register")
        assert cache.wait_pinned(LONG)
    cuda.assert_all_unregistered()
    shmcache.unlink(name)


# ---- failure ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 2, 100, 999])
def test_a_failure_half_way_is_told_once_and_shown_for_ever(name, cuda, caplog, code):
    cuda.fail(at=3, code=code)
    with pinned(name) as cache:
        assert not cache.wait_pinned(LONG)
        text = cache.stats().pinning
        assert text.startswith("failed: 4MiB of 8MiB pinned: cudaError") and f"({code})" in text
        assert "at region 2" in text and text.endswith("are pageable")
        assert ("RLIMIT_MEMLOCK" in text) == (code == 2)
        assert [c.rest[0] for c in cuda.calls("clear")] == [code], "by the thread whose error it is"
        with join(name, pin=True) as second:
            assert not second.wait_pinned(0.1)
            use_all(second)
        assert len(cuda.calls("enter")) == 3, "no second try"
        assert cache.stats().pinning == text
        assert_sound(cache)
    (warning,) = warnings_in(caplog)
    assert "pinning failed, 4MiB of 8MiB are pinned" in warning and f"({code})" in warning and "slower" in warning
    cuda.assert_all_unregistered()
    assert len(cuda.calls("unregister")) == 2
    shmcache.unlink(name)


def test_the_limit_is_named(name, cuda, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (64 << 10, 64 << 10))
    cuda.fail(at=1, code=2)
    with pinned(name) as cache:
        assert not cache.wait_pinned(LONG)
        assert "failed: 0 bytes of 8MiB" in cache.stats().pinning
        assert "RLIMIT_MEMLOCK is 64KiB" in cache.stats().pinning
    shmcache.unlink(name)


def test_what_another_library_registered_is_not_ours_to_unregister(name, cuda, caplog):
    cuda.fail(at=2, code=712)
    with pinned(name) as cache:
        assert cache.wait_pinned(LONG)
        assert cache.stats().pinning == "done: 8MiB, 2MiB by another library"
        assert [c.rest[0] for c in cuda.calls("clear")] == [712]
    cuda.assert_all_unregistered()
    assert len(cuda.calls("unregister")) == 3
    assert warnings_in(caplog) == []
    shmcache.unlink(name)


def test_a_graph_being_captured_is_waited_for(name, cuda, caplog, monkeypatch):
    monkeypatch.setattr(pinning, "_CAPTURE_POLL", 0.01)
    cuda.fail(at=2, code=900)
    with pinned(name) as cache:
        assert cache.wait_pinned(LONG)
        assert [c.rest[0] for c in cuda.calls("clear")] == [900]
        assert len(cuda.calls("enter")) == 5
    cuda.assert_all_unregistered()
    assert warnings_in(caplog) == []
    shmcache.unlink(name)


def test_a_failing_unregister_is_one_line_for_debugging(name, cuda, caplog):
    caplog.set_level(logging.DEBUG, logger="shmcache")
    cuda.fail_unregistering(4)
    cache = pinned(name)
    address = cache._attachment.arena().address
    assert cache.wait_pinned(LONG)
    cache.close()
    assert not is_mapped(address)
    assert [c.rest[0] for c in cuda.calls("clear")] == [4] * 4
    (line,) = [r for r in caplog.records if "unregistering" in r.getMessage()]
    assert line.levelno == logging.DEBUG and "cudaErrorCudartUnloading (4)" in line.getMessage()
    assert warnings_in(caplog) == []
    shmcache.unlink(name)


def test_a_library_that_cannot_be_loaded_is_a_failure_of_pinning_only(name, caplog, monkeypatch):
    monkeypatch.setenv("SHMCACHE_CUDART", "/nonexistent/cudart.so")
    with small(name) as cache:
        assert not cache.wait_pinned(0.1)
        assert "SHMCACHE_CUDART=/nonexistent/cudart.so" in cache.stats().pinning
        use_all(cache, 1)
    assert len(warnings_in(caplog)) == 1
    shmcache.unlink(name)


# ---- slow calls -------------------------------------------------------------------------------------


def test_nobody_waits_for_a_slow_registration(name, cuda):
    cuda.close_gate(at=2)
    watch = Stopwatch()
    cache = pinned(name)
    assert watch.seconds < PROMPT
    address, size, _ = cuda.await_call("enter", 2).rest
    assert cache.stats().pinning == "running: 2MiB of 8MiB"
    use_all(cache)
    watch = Stopwatch()
    cache.close()
    assert watch.seconds < PROMPT, "the call in flight goes on without it"
    gc.collect()
    assert is_mapped(address) and is_mapped(address + size - 1)
    assert not cuda.calls("unregister")
    with pinned(name) as again:  # a mapping of its own beside the old one
        use_all(again)
        cuda.open_gate()
        assert again.wait_pinned(LONG)
    eventually(lambda: len(cuda.calls("unregister")) == 2 + 4, "the thread left behind cleans up", LONG)
    cuda.assert_all_unregistered()
    eventually(lambda: not is_mapped(address), "and ends the mapping")
    shmcache.unlink(name)
