"""Each part of the C core keeps its promises, in one process; also under the sanitizers and valgrind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import crash_build
import pytest

Built = Callable[..., Path]


def kept(command: list[str], timeout: float = 300) -> int:
    """How many promises the program says it kept; it stops at the first that it did not."""
    env = {**os.environ, "ASAN_OPTIONS": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    found = re.search(r"^(\d+) promises kept$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found, f"after {done.stdout[-300:]}\n{done.stderr[-4000:]}"
    return int(found[1])


@pytest.mark.timeout(400)
def test_each_part_of_the_core_keeps_its_promises(built: Built) -> None:
    exe = str(built("core_unit"))
    listed = subprocess.run([exe, "--list"], capture_output=True, text=True, check=True, timeout=60)
    assert kept([exe]) == len(listed.stdout.splitlines()) > 40


@pytest.mark.timeout(400)
def test_each_part_keeps_its_promises_under_the_sanitizers(built: Built) -> None:
    assert kept([str(built("core_unit", *crash_build.SANITIZERS)), "--effort", "2", "--seed", "2"]) > 40


@pytest.mark.skipif(not shutil.which("valgrind"), reason="valgrind is not installed")
@pytest.mark.timeout(600)
def test_each_part_keeps_its_promises_under_memcheck(built: Built) -> None:
    memcheck = ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full"]
    assert kept([*memcheck, str(built("core_unit")), "--effort", "1"], timeout=580) > 40


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10, 14))
def test_much_random_damage_under_the_sanitizers(built: Built, seed: int) -> None:
    exe = str(built("core_unit", *crash_build.SANITIZERS))
    assert kept([exe, "--effort", "40", "--seed", str(seed), "damage"], timeout=3500)
    assert kept([exe, "--effort", "10", "--seed", str(seed), "model"], timeout=3500)
