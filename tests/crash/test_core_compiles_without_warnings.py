"""The core and its C tests compile without a warning under gcc and clang (advice goes nowhere near users' builds)."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import crash_build
import pytest

Built = Callable[..., Path]
PROGRAMS = [(p, crash_build.CRASH_POINTS if p == "crash_points" else ()) for p in crash_build.PROGRAMS]


@pytest.fixture(params=PROGRAMS, ids=lambda p: " with ".join([p[0], *p[1]]))
def program(request: pytest.FixtureRequest) -> tuple[str, tuple[str, ...]]:
    return request.param


@pytest.mark.timeout(300)
def test_no_warning_of_gcc(built: Built, program: tuple[str, tuple[str, ...]]) -> None:
    """What the other tests build is built so."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed")
    assert built(program[0], *program[1], cc="gcc").exists()


@pytest.mark.timeout(300)
def test_no_warning_of_clang(tmp_path: Path, program: tuple[str, tuple[str, ...]]) -> None:
    if not shutil.which("clang"):
        pytest.skip("clang is not installed")
    flags = (*crash_build.WARNINGS, *program[1], "-fsyntax-only")
    crash_build.compile_all(tmp_path, crash_build.sources(program[0]), flags, "clang")


@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_a_warning_is_an_error(tmp_path: Path, cc: str) -> None:
    if not shutil.which(cc):
        pytest.skip(f"{cc} is not installed")
    source = tmp_path / "narrow.c"
    source.write_text("int f(long x);\nint f(long x) { return x; }\n")
    with pytest.raises(RuntimeError, match=r"conversion|precision"):
        crash_build.compile_all(tmp_path, [source], (*crash_build.WARNINGS, "-fsyntax-only"), cc)


@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_no_warning_in_what_speaks_python(tmp_path: Path, cc: str) -> None:
    if not shutil.which(cc):
        pytest.skip(f"{cc} is not installed")
    flags = ("-isystem", sysconfig.get_paths()["include"], f"-I{crash_build.NATIVE / 'include'}")
    files = (crash_build.NATIVE / "python").glob("*.c")
    crash_build.compile_all(tmp_path, files, crash_build.WARNINGS + flags, cc)
