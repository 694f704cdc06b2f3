"""Whatever bytes a control segment holds: a typed error, violations or POISONED; no crash, hang or wild read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import fuzz_build
import fuzz_images
import pytest
from fuzz_images import an_input, change

# Inputs that once were a crash, a hang or a wrong answer, as small as they could be made.
FINDINGS = {
    # a namespace's generation moved by itself: each allocation looked for outdated chunks for half a second
    "vain looks": an_input(1, [change(4, 8, 0x010301FF)], bytes([4, 2, 8, 0, 255, 8]) + bytes(66)),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "images"
    name = f"t{os.getpid()}-fuzz"
    try:
        fuzz_images.make_images(folder, name)
    finally:
        for left in fuzz_images.SHM.glob(f"shmcache.{name}*"):
            left.unlink()
    return folder


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """program(guided) -> the executable"""
    folder = tmp_path_factory.mktemp("fuzz-build")
    made: dict[bool, Path] = {}

    def get(guided: bool) -> Path:
        if guided not in made:
            made[guided] = fuzz_build.build(folder / str(guided), guided=guided)
        return made[guided]

    return get


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> bool:
    return fuzz_build.has_libfuzzer(tmp_path_factory.mktemp("fuzz-probe"))


def attempt(command: list[str], images: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SHMC_FUZZ_IMAGES": str(images), "ASAN_OPTIONS": "", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, env=env)


def run(command: list[str], images: Path, timeout: float) -> str:
    done = attempt(command, images, timeout)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-5000:]}"
    return done.stdout + done.stderr


def write_inputs(folder: Path) -> list[str]:
    folder.mkdir()
    inputs = fuzz_images.first_inputs() + list(FINDINGS.values())
    files = []
    for i, data in enumerate(inputs):
        (folder / f"{i:04}").write_bytes(data)
        files.append(str(folder / f"{i:04}"))
    return files


def fuzz(program: Path, images: Path, folder: Path, *, guided: bool, seconds: int, seed: int) -> int:
    """How many inputs were run."""
    if not guided:
        said = run([str(program), str(seconds), str(seed)], images, seconds + 60)
        return int(re.findall(r"^(\d+) runs$", said, re.MULTILINE)[-1])
    write_inputs(folder / "corpus")
    options = [f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=400", "-timeout=20"]
    options.append(f"-artifact_prefix={folder}/")
    said = run([str(program), *options, str(folder / "corpus")], images, seconds + 60)
    return int(re.findall(r"Done (\d+) runs", said)[-1])


@pytest.mark.timeout(300)
def test_seconds_of_fuzzing_find_nothing(program, images, guided, tmp_path):
    assert fuzz(program(guided), images, tmp_path, guided=guided, seconds=8, seed=1) > 300


@pytest.mark.timeout(300)
def test_all_that_was_ever_found_stays_fixed(program, images, guided, tmp_path):
    files = write_inputs(tmp_path / "inputs")
    run([str(program(guided)), *(["-timeout=4"] if guided else []), *files], images, 120)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 6))
def test_minutes_of_fuzzing_find_nothing(program, images, guided, tmp_path, seed):
    assert fuzz(program(guided), images, tmp_path, guided=guided, seconds=180, seed=seed) > 10_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 3))
def test_without_coverage_too(program, images, tmp_path, seed):
    assert fuzz(program(False), images, tmp_path, guided=False, seconds=60, seed=seed) > 1_000


# What guards a read, and what it is when somebody forgets it.
FORGOTTEN = [
    ("core/peek.c", "i < c.n_blocks && steps < SHMC_PARTS_MAX", "i != NIL && steps < SHMC_PARTS_MAX"),
    ("core/types.h", "if (__builtin_expect(i < c->count, 1)) return", "if (__builtin_expect(i < NIL, 1)) return"),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("file", "guard", "forgotten"), FORGOTTEN, ids=[file for file, *_ in FORGOTTEN])
def test_a_forgotten_check_is_found(images, guided, tmp_path, file, guard, forgotten):
    if not guided:
        pytest.skip("clang with libFuzzer is not installed")
    for part in ("native", "tests/fuzz"):
        shutil.copytree(fuzz_build.ROOT / part, tmp_path / part)
    source = tmp_path / "native" / file
    text = source.read_text()
    assert text.count(guard) == 1
    source.write_text(text.replace(guard, forgotten))
    spoilt = fuzz_build.build(tmp_path / "build", guided=True, root=tmp_path)
    write_inputs(tmp_path / "corpus")
    options = ["-max_total_time=60", "-seed=1", "-max_len=400", "-timeout=4", f"-artifact_prefix={tmp_path}/"]
    assert attempt([str(spoilt), *options, str(tmp_path / "corpus")], images, 120).returncode
