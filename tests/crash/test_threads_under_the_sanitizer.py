"""Threads on one handle and on handles of their own: no data race, also with a reader that takes no lock."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import crash_build
import pytest


def run(built: Callable[..., Path], program: str, *arguments: str, timeout: float = 200) -> str:
    if not shutil.which("clang"):
        pytest.skip("clang is not installed: only with it the thread sanitizer is known to see this lock")
    exe = built(program, *crash_build.THREAD_SANITIZER, *crash_build.seen_lock(program), cc="clang")
    fixed_layout = ["setarch", "-R"] if shutil.which("setarch") else []  # it does not like much randomness there
    command = [*fixed_layout, str(exe), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert done.returncode == 0, done.stderr[:6000]
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("look", [[], ["look"]], ids=["calls", "calls and a reader without the lock"])
def test_threads_race_for_nothing(built: Callable[..., Path], look: list[str]) -> None:
    assert "sound" in run(built, "threads", "2000", *look)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_threads_race_for_nothing_for_long(built: Callable[..., Path]) -> None:
    assert "sound" in run(built, "threads", "100000", "look", timeout=500)
    assert "promises kept" in run(built, "core_unit", "--effort", "1", timeout=500)
