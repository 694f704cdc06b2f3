"""Workers are killed at random under load: no invariant breaks, no byte is wrong, nobody hangs (soak.c)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import crash_build
import pytest

Built = Callable[..., Path]


def soak(exe: Path, **options: int) -> tuple[int, dict[str, int], str]:
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([str(exe), *words], capture_output=True, text=True, timeout=options["seconds"] + 200)
    figures = {name: int(value) for name, value in re.findall(r"([a-z][a-z ]*?) (\d+)(?:,|$)", done.stdout)}
    print(done.stdout)
    return done.returncode, figures, done.stdout + done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", [0, 3], ids=["lru", "lfu"])
def test_random_kills_break_nothing(built: Built, policy: int) -> None:
    status, n, text = soak(built("soak"), seconds=5, kills=20, operations=2_000, seed=11 + policy, policy=policy)
    assert status == 0 and n["violations"] == 0, text[-3000:]
    assert n["kills"] >= 20 and n["operations"] >= 2_000


@pytest.mark.timeout(300)
def test_random_kills_break_nothing_under_the_sanitizers(built: Built) -> None:
    status, n, text = soak(built("soak", *crash_build.SANITIZERS), seconds=5, kills=10, seed=5)
    assert status == 0 and n["violations"] == 0, text[-3000:]
    assert n["kills"] >= 10


@pytest.mark.timeout(300)
def test_without_the_journal_random_kills_corrupt(built: Built) -> None:
    """The soak is able to fail. Which kill does the damage is chance, so it gets a few seeds."""
    exe = built("soak", *crash_build.NO_JOURNAL)
    assert any(soak(exe, seconds=6, seed=seed)[0] != 0 for seed in range(1, 6))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", range(4), ids=["lru", "fifo", "mru", "lfu"])
def test_minutes_of_random_kills_break_nothing(built: Built, policy: int) -> None:
    status, n, text = soak(built("soak"), seconds=180, kills=2_000, seed=100 + policy, policy=policy, workers=8)
    assert status == 0 and n["violations"] == 0, text[-3000:]
    assert n["kills"] >= 2_000
