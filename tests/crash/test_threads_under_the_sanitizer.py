"""Threads on one handle and on handles of their own: no data race but those that lock-free readers take on purpose."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import crash_build
import pytest

# Readers without the lock copy, and validate the copy by a number read before and after. To the sanitizer
# that is a race; whether a torn copy can be taken for a good one is what the soak and the models test.
ON_PURPOSE = ["race:shmc_peek_", "race:shmc_stats_read", "race:shmc_events_read"]


def run(built: Callable[..., Path], folder: Path, program: str, *arguments: str, timeout: float = 200) -> str:
    if not shutil.which("clang"):
        pytest.skip("clang is not installed: only with it the thread sanitizer is known to see this lock")
    exe = built(program, *crash_build.THREAD_SANITIZER, *crash_build.seen_lock(program), cc="clang")
    (folder / "on-purpose").write_text("\n".join(ON_PURPOSE))
    fixed_layout = ["setarch", "-R"] if shutil.which("setarch") else []  # it does not like much randomness there
    env = {**os.environ, "TSAN_OPTIONS": f"suppressions={folder / 'on-purpose'}"}
    command = [*fixed_layout, str(exe), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert done.returncode == 0, done.stderr[:6000]
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("look", [[], ["look"]], ids=["calls", "calls and a reader without the lock"])
def test_threads_race_for_nothing(built: Callable[..., Path], tmp_path: Path, look: list[str]) -> None:
    assert "sound" in run(built, tmp_path, "threads", "2000", *look)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_threads_race_for_nothing_for_long(built: Callable[..., Path], tmp_path: Path) -> None:
    assert "sound" in run(built, tmp_path, "threads", "100000", "look", timeout=500)
    assert "promises kept" in run(built, tmp_path, "core_unit", "--effort", "1", timeout=500)
