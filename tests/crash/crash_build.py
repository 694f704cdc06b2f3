"""Compiles the C tests of this folder together with the core's sources, each file once per set of flags."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"

WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wvla", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1")
THREAD_SANITIZER = ("-fsanitize=thread", "-fno-omit-frame-pointer", "-O1")
CRASH_POINTS = ("-DSHMC_CRASHPOINTS",)
NO_JOURNAL = ("-DSHMC_NO_JOURNAL",)

PROGRAMS = {
    "crash_points": ("world", "digest", "worlds", "cases", "crash_points"),
    "core_unit": (
        *("world", "digest", "core_unit", "unit_extents", "unit_keys", "unit_holds"),
        *("unit_policy", "unit_sharing", "unit_damage", "unit_late"),
    ),
    "soak": ("world", "digest", "soak"),
    "threads": ("world", "digest", "threads"),
}


def seen_lock(program: str) -> tuple[str, ...]:
    """For the thread sanitizer: threads.c has a timed lock that it knows."""
    return ("-Dpthread_mutex_clocklock=lock_that_is_seen",) if program == "threads" else ()


def core_sources() -> list[Path]:
    return sorted(p for folder in (NATIVE, NATIVE / "core", NATIVE / "os") for p in folder.glob("*.c"))


def sources(program: str) -> list[Path]:
    return core_sources() + [HERE / f"{name}.c" for name in PROGRAMS[program]]


def compiler() -> str:
    """The system's C compiler: $CC, gcc, clang or cc."""
    for name in (os.environ.get("CC"), "gcc", "clang", "cc"):
        if name and shutil.which(name):
            return name
    raise SystemExit("no C compiler: install gcc or clang, or set CC")


def compile_all(folder: Path, files: Iterable[Path], flags: tuple[str, ...], cc: str) -> list[Path]:
    """Object files of `files`; raises with the compiler's words when one does not compile."""

    def one(source: Path) -> Path:
        out = folder / f"{source.parent.name}-{source.stem}.o"
        if out.exists():
            return out
        command = [cc, "-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-pthread", *flags, "-c", str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{cc} refuses {source.name}:\n{done.stderr}")
        return out

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, files))


def build(folder: Path, program: str, flags: tuple[str, ...] = (), cc: str | None = None) -> Path:
    """The executable of `program`, compiled into a folder of its flags in `folder`."""
    cc = cc or compiler()
    folder /= hashlib.sha256("\0".join([cc, *flags]).encode()).hexdigest()[:12]
    exe = folder / program
    if not exe.exists():
        objects = compile_all(folder, sources(program), flags, cc)
        subprocess.run([cc, "-pthread", *flags, "-o", str(exe), *map(str, objects)], check=True, timeout=120)
    return exe
