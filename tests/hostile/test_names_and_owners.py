"""Other users, and whatever they may have put where our files belong: refused by name, and never written to."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from hostile import CLONE_NEWNS, MIB, PROMPT, Stopwatch, files_of, need_namespaces, own_shm, small, store

import shmcache
from shmcache import SegmentCorruptError, SegmentPermissionError, ShmCacheError
from shmcache.inspect import cli

SOMEBODY, SOMEBODY_ELSE = 12345, 12346


def need_root() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def warm_up(name: str) -> None:
    """Another user may not be able to read the interpreter's library: import it all before."""
    with small(f"{name}-w", MIB) as cache:
        store(cache, "k")
        shmcache.segments()
        with contextlib.suppress(ShmCacheError):
            shmcache.attach(f"{name}-absent")
        cache.unlink()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli.run(["list", "--json"])
        cli.run(["show", f"{name}-absent"])


def command(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.run(list(argv))
    return code, out.getvalue()


def test_another_user_is_told_whose_it_is_and_can_do_nothing(name, in_child):
    """B104, from the other side: a process with another uid, which may list."""
    need_root()

    def test() -> None:
        warm_up(name)
        with small(name) as cache:
            store(cache, "k")
            before = {f: os.stat(f"/dev/shm/{f}").st_mtime_ns for f in files_of(name)}
            pid = os.fork()
            if pid == 0:
                become(SOMEBODY)
                attempts = [
                    lambda: shmcache.attach(name),
                    lambda: shmcache.open(name, capacity=MIB, on_incompatible="replace"),
                    lambda: shmcache.create(name, MIB),
                    lambda: shmcache.unlink(name),
                    lambda: shmcache.unlink(name, force=True),
                ]
                for attempt in attempts:
                    with pytest.raises(SegmentPermissionError) as caught:
                        attempt()
                    assert all(word in str(caught.value) for word in (name, "uid 0", "0o600", str(SOMEBODY)))
                assert [s.state for s in shmcache.segments() if s.name == name] == ["foreign"]
                assert command("show", name)[0] == 5
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert {f: os.stat(f"/dev/shm/{f}").st_mtime_ns for f in files_of(name)} == before
            assert cache.verify() == [] and cache.contains("k")
            cache.unlink()

    in_child(test)


PLANTED = ["link", "dangling link", "folder", "fifo", "socket", "of another user", "link to a segment"]


@pytest.mark.parametrize("kind", PLANTED)
def test_what_was_planted_under_our_name_is_refused_and_not_written_to(name, tmp_path, kind):
    """B104: a name that can be guessed, made by somebody before us."""
    path, target = Path(f"/dev/shm/shmcache.{name}"), tmp_path / "target"
    target.write_bytes(b"keep")
    expected: type[ShmCacheError] = SegmentCorruptError
    if kind == "link":
        path.symlink_to(target)
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nothing")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "of another user":
        need_root()
        path.touch()
        path.chmod(0o666)
        os.chown(path, SOMEBODY, SOMEBODY)
        expected = SegmentPermissionError
    else:
        shmcache.create(f"{name}-real", MIB, prefault="lazy").close()
        path.symlink_to(f"/dev/shm/shmcache.{name}-real")
    try:
        watch = Stopwatch()
        attempts = [
            lambda: shmcache.open(name, capacity=MIB),
            lambda: shmcache.open(name, capacity=MIB, on_incompatible="replace"),
            lambda: shmcache.attach(name),
            lambda: shmcache.create(name, MIB),
            lambda: shmcache.unlink(name),
        ]
        for attempt in attempts:
            with pytest.raises(expected) as caught:
                attempt()
            assert str(path) in str(caught.value)
        assert any(s.name == name for s in shmcache.segments())
        assert command("show", name)[0] in (4, 5)
        assert watch.seconds < PROMPT
        assert os.path.lexists(path) and target.read_bytes() == b"keep" and not (tmp_path / "nothing").exists()
    finally:
        path.rmdir() if kind == "folder" else path.unlink()
        if kind == "link to a segment":
            shmcache.unlink(f"{name}-real")


def test_a_region_name_cannot_be_taken_beforehand(name):
    """B104: a file with a region's name but of another instance is not adopted, and not kept."""
    planted = Path(f"/dev/shm/shmcache.{name}.{0:016x}.0000")
    planted.write_bytes(bytes(MIB))
    with small(name, MIB) as cache:
        store(cache, "k")
        assert not planted.exists() and len(files_of(name)) == 2
        cache.unlink()


def test_gc_removes_own_strays_and_lists_those_of_others(name, in_child):
    """B105: in a sticky folder. It ended with an error at the first that was not its own."""
    need_root()
    need_namespaces(CLONE_NEWNS)

    def test() -> None:
        warm_up(name)
        own_shm("16m")
        for uid in (SOMEBODY, SOMEBODY_ELSE):
            for i in range(3):
                stray = f"/dev/shm/shmcache.lost-{uid}.{i:016x}.0000"
                Path(stray).write_bytes(b"x")
                os.chown(stray, uid, uid)
        assert command("gc")[0] == 5  # warm, and refused: not confirmed
        become(SOMEBODY)
        code, out = command("gc", "--yes", "--json")
        said = json.loads(out)
        assert code == 5
        assert len(said["stray_files"]) == 3 and all(f"lost-{SOMEBODY}." in f for f in said["stray_files"])
        assert len(said["not_permitted"]) == 3 and all(f"lost-{SOMEBODY_ELSE}." in f for f in said["not_permitted"])
        assert len(os.listdir("/dev/shm")) == 3
        assert "Not permitted" in command("gc", "--yes")[1]

    in_child(test)


def test_a_umask_of_077_or_0_changes_no_mode(name, in_child):
    """B104: the mode is what was asked for, and 0600 by default."""

    def test() -> None:
        for umask in (0o077, 0, 0o777):
            os.umask(umask)
            with small(name, 4 * MIB, region_bytes=MIB) as cache:
                assert {os.stat(f"/dev/shm/{f}").st_mode & 0o7777 for f in files_of(name)} == {0o600}
                store(cache, "k")
                cache.unlink()

    in_child(test)


def test_a_file_of_another_user_that_shrinks_ends_nobody_who_lists(name, in_child):
    """Mapped, a file that its owner truncates is a SIGBUS for whoever reads it."""
    need_root()
    path = Path(f"/dev/shm/shmcache.{name}")
    with small(name, MIB):
        whole = path.read_bytes()

    def test() -> None:
        owner = os.fork()
        if owner == 0:
            become(SOMEBODY)
            signal.alarm(30)
            while True:
                os.truncate(path, 0)
                path.write_bytes(whole)
        try:
            watch, seen = Stopwatch(), set()
            while watch.seconds < 1.5:
                seen |= {s.state for s in shmcache.segments() if s.name == name}
            assert seen <= {"ready", "half-made", "foreign", "corrupt"}
        finally:
            os.kill(owner, signal.SIGKILL)
            os.waitpid(owner, 0)
        path.write_bytes(whole)
        assert [s.state for s in shmcache.segments() if s.name == name] == ["ready"]

    path.chmod(0o644)
    os.chown(path, SOMEBODY, SOMEBODY)
    try:
        in_child(test)
    finally:
        os.chown(path, os.geteuid(), os.getegid())
        shmcache.unlink(name, force=True)


def test_a_fifo_that_comes_between_look_and_open_blocks_nobody(name, monkeypatch):
    """Whoever may write to the folder can change what is there after it was looked at."""
    path = Path(f"/dev/shm/shmcache.{name}")
    regular = os.lstat(__file__)
    lstat = os.lstat
    monkeypatch.setattr(os, "lstat", lambda p, **more: regular if str(p) == str(path) else lstat(p, **more))
    os.mkfifo(path)
    try:
        watch = Stopwatch()
        with pytest.raises(SegmentCorruptError, match="no regular file"):
            shmcache.attach(name)
        assert [s.state for s in shmcache.segments() if s.name == name] == ["foreign"]
        assert watch.seconds < PROMPT
    finally:
        path.unlink()
