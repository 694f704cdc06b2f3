"""The core and its C tests compile without a warning under gcc and clang (advice goes nowhere near users' builds)."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import crash_build
import pytest


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [(), crash_build.CRASH_POINTS], ids=["plain", "crash points"])
@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_no_warning(tmp_path: Path, cc: str, flags: tuple[str, ...]) -> None:
    if not shutil.which(cc):
        pytest.skip(f"{cc} is not installed")
    programs = {"crash_points"} if flags else {"core_unit", "soak", "threads"}
    tests = {name for program in programs for name in crash_build.PROGRAMS[program]}
    files = crash_build.core_sources() + [crash_build.HERE / f"{name}.c" for name in sorted(tests)]
    crash_build.compile_all(tmp_path, files, crash_build.WARNINGS + flags, cc)


@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_no_warning_in_what_speaks_python(tmp_path: Path, cc: str) -> None:
    if not shutil.which(cc):
        pytest.skip(f"{cc} is not installed")
    flags = ("-isystem", sysconfig.get_paths()["include"], f"-I{crash_build.NATIVE / 'include'}")
    files = (crash_build.NATIVE / "python").glob("*.c")
    crash_build.compile_all(tmp_path, files, crash_build.WARNINGS + flags, cc)
