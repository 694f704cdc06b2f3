"""Dying at any journalled store of any operation leaves the state before it or the state after it.

The work is done by crash_points.c; each run here is a set of its processes, one per core.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import crash_build
import pytest

Built = Callable[..., Path]
SUMMARY = re.compile(
    r"operations (\d+), points (\d+), deaths (\d+), second deaths (\d+), pairs (\d+), "
    r"failures (\d+) in (\d+) operations, corrupt (\d+), ([\d.]+) s"
)
HEADER = crash_build.NATIVE / "include" / "shmcache.h"


Result = tuple[list[str], dict[str, int]]


def run(exe: Path, *options: str, timeout: float = 300, env: dict[str, str] | None = None) -> Result:
    """Output lines and summed figures of one process per core, each with its share of the operations."""
    shards = max(1, min(8, len(os.sched_getaffinity(0))))
    commands = [[str(exe), "--shard", f"{i}/{shards}", *options] for i in range(shards)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen(command, env={**os.environ, **(env or {})}, **pipes) for command in commands]
    lines: list[str] = []
    figures = dict.fromkeys(("operations", "points", "deaths", "second", "pairs", "failures", "failed", "corrupt"), 0)
    try:
        for process in running:
            text, _ = process.communicate(timeout=timeout)
            lines += text.splitlines()
            found = SUMMARY.search(text)
            assert found, f"ended with {process.returncode} and no summary:\n{text[-3000:]}"
            for name, value in zip(figures, found.groups(), strict=False):
                figures[name] += int(value)
    finally:
        for process in running:
            process.kill()
            process.wait()
    print(figures)
    return lines, figures


@pytest.mark.timeout(600)
def test_every_crash_point_of_every_operation_recovers(built: Built) -> None:
    lines, n = run(built("crash_points", *crash_build.CRASH_POINTS), timeout=580)
    assert n["failures"] == 0, "\n".join(lines[:60])
    assert n["deaths"] == n["points"] > 50_000
    assert n["operations"] > 150 and n["second"] > 5_000 and n["pairs"] > 500
    words_stay_within_the_worst_cases(lines)


def words_stay_within_the_worst_cases(lines: list[str]) -> None:
    """The most words that any transaction journalled, beside what journal.c states (and asserts) for its kind."""
    journal = (crash_build.NATIVE / "core" / "journal.c").read_text()
    table = dict(re.findall(r'\[TX_\w+\] = \{"(\w+)", (\d+)\}', journal))
    used: dict[str, int] = {}
    for op, words in re.findall(r"^words (\w+) (\d+)$", "\n".join(lines), re.MULTILINE):
        used[op] = max(used.get(op, 0), int(words))
    for op, words in used.items():
        print(f"{op}: {words} words of {table[op]}")
        assert words <= int(table[op])
    assert set(used) >= set(table) - {"none", "verify"}, "an operation was never run"


@pytest.mark.timeout(300)
def test_without_the_journal_the_same_deaths_corrupt(built: Built) -> None:
    """The tests above are able to fail: with records left out, most operations leave a damaged segment."""
    exe = built("crash_points", *crash_build.CRASH_POINTS, *crash_build.NO_JOURNAL)
    _, n = run(exe, "--every", "20", "--seed", "3")
    assert n["corrupt"] > n["deaths"] // 10
    assert n["failed"] > n["operations"] // 2


@pytest.mark.timeout(600)
def test_a_sample_of_crash_points_recovers_under_the_sanitizers(built: Built) -> None:
    exe = built("crash_points", *crash_build.CRASH_POINTS, *crash_build.SANITIZERS)
    options = {"ASAN_OPTIONS": "detect_leaks=0"}  # the dead free nothing
    lines, n = run(exe, "--every", "100", "--seed", "5", timeout=580, env=options)
    assert n["failures"] == 0, "\n".join(lines[:60])
    assert n["deaths"] > 400


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_second_death_during_every_recovery_recovers(built: Built) -> None:
    lines, n = run(built("crash_points", *crash_build.CRASH_POINTS), "--full", timeout=7000)
    assert n["failures"] == 0, "\n".join(lines[:60])
    assert n["second"] > 10 * n["deaths"]


def test_every_public_function_is_a_crash_case_or_excluded_with_a_reason(built: Built) -> None:
    text = HEADER.read_text()
    code = re.sub(r"/\*.*?\*/", "", text[text.index("cdef-begin") : text.index("cdef-end")], flags=re.DOTALL)
    public = set(re.findall(r"\b(shmc_\w+)\s*\(", code))
    exe = built("crash_points", *crash_build.CRASH_POINTS)
    listed = subprocess.run([str(exe), "--list"], capture_output=True, text=True, timeout=60, check=True).stdout
    cases = set(re.findall(r"^case (\w+): .+$", listed, re.MULTILINE))
    excluded = set(re.findall(r"^excluded (\w+): .{5,}$", listed, re.MULTILINE))
    assert len(public) > 50
    assert not public - cases - excluded, "neither tried nor excluded"
    assert not (cases | excluded) - public, "not in the header"
    assert not cases & excluded
