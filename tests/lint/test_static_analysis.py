"""The C core has no finding from the compilers' static analysers."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for folder in ("native", "native/core", "native/os") for p in (ROOT / folder).glob("*.c"))
ANALYSERS = {
    "gcc": ["gcc", "-O2", "-fanalyzer", "-c", "-o", "/dev/null"],
    "clang": ["clang", "--analyze", "--analyzer-output", "text", "-o", "-"],
    "clang-tidy": ["clang-tidy", "--quiet"],  # .clang-tidy says which checks, and why not the others
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", ANALYSERS)
def test_the_core_has_no_finding(tool: str) -> None:
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    flags = ["-std=c11", "-D_GNU_SOURCE"]

    def findings(source: Path) -> str:
        command = [*ANALYSERS[tool], str(source), *(["--"] if tool == "clang-tidy" else []), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        said = [line for line in (done.stdout + done.stderr).splitlines() if "warning:" in line or "error:" in line]
        return "\n".join(said)

    with ThreadPoolExecutor(2) as pool:
        assert not "\n".join(filter(None, pool.map(findings, SOURCES)))
