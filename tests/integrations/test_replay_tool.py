"""The replay tool: LMCache's StorageManager in two processes, a segment beside private caches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmcache.v1.storage_backend.storage_manager", reason="LMCache is not installed")
pytestmark = pytest.mark.timeout(240)

TOOL = Path(__file__).parents[2] / "tools/replay/main.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True, timeout=200)


def test_ranks_agree_and_one_copy_serves_both(tmp_path: Path) -> None:
    """Under MLA a segment holds once what two private caches hold twice, so it holds twice as much."""
    trace = tmp_path / "trace.jsonl"
    requests = [
        {"hash_ids": [0, *range(10 * talk + 1, 10 * talk + 2 + turn)]} for turn in range(4) for talk in range(8)
    ]
    trace.write_text("".join(json.dumps(r) + "\n" for r in requests))
    done = run("--trace", str(trace), "--kind", "mla", "--requests", "32", "--capacity", "16MiB", "--json")
    assert done.returncode == 0, done.stderr
    shared, private = (json.loads(done.stdout)[which] for which in ("shared", "private"))
    assert shared["agreement"] == private["agreement"] == 1 and shared["sound"] and private["sound"]
    assert shared["chunks"][0] == shared["chunks"][1] > 1.7 * private["chunks"][0]
    assert shared["hit_ratio"] >= private["hit_ratio"] > 0
    assert shared["bytes"] <= 16 << 20


@pytest.mark.parametrize(
    "options", [["--trace", "nowhere"], ["--requests", "0"], ["--capacity", "much"], ["--tokens", "513"]]
)
def test_bad_options_are_said(options: list[str]) -> None:
    done = run(*options)
    assert done.returncode == 2 and options[0] in done.stderr
