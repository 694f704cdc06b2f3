"""Builds the fuzzer: with libFuzzer where clang has it, else as a program that invents inputs by itself."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
SCANS = ("check", "peek", "snapshot")  # loops over whole tables: following each comparison there halves the speed


def sources(root: Path) -> list[Path]:
    folders = [root / "native", root / "native" / "core", root / "native" / "os", root / "tests" / "fuzz"]
    return [p for folder in folders for p in sorted(folder.glob("*.c"))]


def has_libfuzzer(folder: Path) -> bool:
    if not shutil.which("clang"):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / "probe.c"
    probe.write_text("int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { (void)d; (void)n; return 0; }\n")
    command = ["clang", "-fsanitize=fuzzer,address", str(probe), "-o", str(folder / "probe")]
    return subprocess.run(command, capture_output=True, timeout=120).returncode == 0


def build(folder: Path, *, guided: bool, root: Path = ROOT) -> Path:
    """The program; `guided` by coverage, else with a main() of its own. `root`: a copy, to be spoilt."""
    folder.mkdir(parents=True, exist_ok=True)
    if guided:
        cc, flags, link = "clang", (*SANITIZERS, "-fsanitize=fuzzer-no-link"), ("-fsanitize=fuzzer",)
    else:
        cc = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), "cc")
        flags, link = (*SANITIZERS, "-DALONE"), ()

    def one(source: Path) -> str:
        out = folder / f"{source.parent.name}-{source.stem}.o"
        scan = ("-fno-sanitize-coverage=trace-cmp",) if guided and source.stem in SCANS else ()
        command = [cc, "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-pthread", *flags, *scan]
        command += ["-c", str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{cc} refuses {source.name}:\n{done.stderr}")
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(one, sources(root)))
    exe = folder / "fuzz_segment"
    subprocess.run([cc, "-pthread", *flags, *link, "-o", str(exe), *objects], check=True, timeout=120)
    return exe
