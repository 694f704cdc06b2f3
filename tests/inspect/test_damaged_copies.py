"""A copy with any damage: every verb ends in time, with an exit code and never a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import scenes
from scenes import run, small

import shmcache

VERBS = ("show", "procs", "namespaces", "holds", "keys", "events", "stats", "map", "verify")


@pytest.fixture(scope="module")
def image() -> bytes:
    import os
    import uuid

    name = f"t{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with small(name) as cache:
        held = scenes.furnish(cache)
        raw = (scenes.SHM / f"shmcache.{name}").read_bytes()
        for obj in held:
            obj.release()
    shmcache.unlink(name)
    return raw


def used(image: bytes) -> list[int]:
    """Places that are not 0: where something is."""
    return [i for i, byte in enumerate(image[: 1 << 20]) if byte]


@pytest.mark.parametrize("seed", range(12))
def test_random_damage(image: bytes, tmp_path: Path, seed: int) -> None:
    r = random.Random(seed)
    raw, places = bytearray(image), used(image)
    for _ in range(r.choice((1, 8, 200, 5000))):
        at = r.choice(places) if r.random() < 0.9 else r.randrange(len(raw))
        raw[at] = r.choice((0, 0xFF, r.randrange(256)))
    if r.random() < 0.7:
        raw[:2048] = image[:2048]  # so that it is still taken for a segment
    copy = tmp_path / "copy"
    copy.write_bytes(raw)
    for verb in VERBS:
        with scenes.prompt():
            code, _, err = run(verb, "--file", str(copy))
        assert code in (0, 3, 4), (verb, err)
    for key in ("k2", "0x" + "01" * 32, "k*"):
        for verb in ("key", "why"):
            assert run(verb, "--file", str(copy), key)[0] in (0, 1, 2, 3, 4)


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 20_000, 1_000_000])
def test_a_copy_that_was_cut_short(image: bytes, tmp_path: Path, size: int) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(image[:size])
    for verb in VERBS:
        code, out, err = run(verb, "--file", str(copy))
        assert (code, out) == (4, "") and str(copy) in err
