"""What needs a terminal: `top`, questions, colours."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import scenes
from scenes import run, small, until
from terminal import Terminal

import shmcache


def test_top_shows_rates_and_obeys_keys(scrap: str, fork: Any) -> None:
    scene = scenes.live(scrap, fork)
    with Terminal("top", scrap, "--interval", "0.2") as t:
        t.wait_for(r"hits +[\d.]+% now")
        t.wait_for(r"stores [1-9][\d,]*")
        t.wait_for(rf"{scene.child.pid} +0 engine-0 +alive +3 +1 +[1-9]")
        t.press("s")
        t.wait_for("by holds")
        t.press("+")
        t.wait_for("every 0.1 s")
        t.press("p")
        t.wait_for("paused")
        t.raw = b""
        t.read(0.5)
        assert "stores" not in t.text or "paused" in t.text
        t.press("p")
        t.wait_for(r"used +#*\.+ +[\d.]+% of 4 MiB")
        assert all(len(line) <= 80 for line in t.lines)
        scene.child.kill(signal.SIGSTOP)
        t.wait_for("stopped")
        scene.child.kill()
        scene.child.wait()
        t.wait_for("dead")
        t.wait_for("Nobody is attached")
        t.press("q")
        assert t.end() == 0
        assert t.is_as_before()


def test_top_outlives_its_segment(scrap: str, fork: Any) -> None:
    with small(scrap), Terminal("top", scrap, "--interval", "0.1") as t:
        t.wait_for("used ")
        shmcache.unlink(scrap)
        t.wait_for("there is no segment")
        t.press("q")
        assert t.end() == 0


def test_top_on_a_stopped_lock_holder_names_it(scrap: str, fork: Any) -> None:
    scene = scenes.stopped(scrap, fork)
    with Terminal("top", scrap, "--interval", "0.1") as t:
        t.wait_for(f"held by pid {scene.child.pid}")
        t.wait_for("is stopped")
        assert t.interrupt() == 130
        assert t.is_as_before()


def test_top_without_a_terminal_says_what_to_use(name: str) -> None:
    small(name).close()
    code, _, err = run("top", name)
    assert code == 1 and "stats NAME --watch" in err
    assert run("top", f"{name}x")[0] == 2
    shmcache.unlink(name)


@pytest.mark.parametrize(("answer", "code"), [("n\n", 5), ("\n", 5), ("y\n", 0)])
def test_a_question_is_asked_and_its_answer_obeyed(scrap: str, fork: Any, answer: str, code: int) -> None:
    small(scrap).close()
    with Terminal("unlink", scrap) as t:
        t.wait_for(r"Remove .* \[y/N\]")
        t.press(answer)
        assert t.end() == code
    assert (scenes.SHM / f"shmcache.{scrap}").exists() == (code != 0)


def test_ctrl_c_at_a_question_changes_nothing(scrap: str) -> None:
    small(scrap).close()
    with Terminal("unlink", scrap) as t:
        t.wait_for(r"\[y/N\]")
        assert t.interrupt() == 130
    assert (scenes.SHM / f"shmcache.{scrap}").exists()


def test_colours_on_a_terminal_only_and_not_with_no_color(scrap: str, fork: Any) -> None:
    scenes.poisoned(scrap, fork)
    with Terminal("show", scrap) as t:
        assert t.end() == 3
        assert b"\x1b[1;31m" in t.raw
        assert "ERROR: The segment was found damaged" in t.text
    with Terminal("show", scrap, NO_COLOR="1") as t:
        assert t.end() == 3
        assert b"\x1b[" not in t.raw
    code, out, _ = run("show", scrap)
    assert code == 3 and "\x1b" not in out


def test_a_narrow_terminal_gets_narrow_tables(scrap: str, fork: Any) -> None:
    scenes.live(scrap, fork)
    with Terminal("keys", scrap, columns=60) as t:
        assert t.end() == 0
        assert all(len(line) <= 60 for line in t.text.split("\n"))


def test_following_events_shows_them_as_they_come(scrap: str, fork: Any) -> None:
    scene = scenes.live(scrap, fork)
    with Terminal("events", scrap, "--follow", "--limit", "2") as t:
        t.wait_for(rf"admit +default +int:1\d\d\d +pid {scene.child.pid}\n")
        until(lambda: t.read(0.1) or t.text.count("\n") > 40)
        assert t.interrupt() == 130


def test_a_dump_shows_its_progress(name: str, tmp_path: Path) -> None:
    with small(name) as cache:
        for obj in scenes.furnish(cache):
            obj.release()
    with Terminal("dump", name, str(tmp_path / "d")) as t:
        assert t.end() == 0
        assert "100%" in t.text and "Wrote" in t.text
    shmcache.unlink(name)
