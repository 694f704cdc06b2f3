"""What the linters and the type checker say: nothing."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import shmcache

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tool", [["ruff", "check", "."], ["mypy"]], ids=lambda t: t[0])
def test_the_tool_has_no_finding(tool: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_public_names_are_these() -> None:
    assert sorted(shmcache.__all__) == [
        "AUTO", "ByteStats", "CapacityError", "ChecksumError", "ConfigurationError", "CountStats", "Event",
        "Events", "LockStats", "LockTimeoutError", "Lookup", "MemoryFormat", "MemoryObj", "MemoryObjMetadata",
        "Namespace", "NamespaceInfo", "NamespaceMismatchError", "OutOfSharedMemoryError", "PackedKeys",
        "RawCloneError", "ReapReport", "Reservation", "ReservationState", "SegmentBusyError", "SegmentClosedError",
        "SegmentCorruptError", "SegmentExistsError", "SegmentInfo", "SegmentMismatchError", "SegmentNotFoundError",
        "SegmentPermissionError", "SharedCache", "ShmCacheError", "StaleHandleError", "Stats", "__version__",
        "attach", "create", "open", "pack", "release_many", "segments", "unlink",
    ]  # fmt: skip
    for name in shmcache.__all__:
        assert getattr(shmcache, name) is not None


def test_a_changed_layout_has_a_number_of_its_own() -> None:
    """The fingerprint covers every shared struct: when it moves, SHMC_FORMAT_VERSION moves with it."""
    from shmcache._core import FINGERPRINT, lib

    if platform.machine() != "x86_64":
        pytest.skip("the pinned value is that of x86_64: the size of a mutex is in it")
    assert (lib.SHMC_FORMAT_VERSION, FINGERPRINT) == (3, 0xB7B299CCF7ABB9CC)
