"""What the README shows runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs_as_shown(name: str) -> None:
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example
    code = example.group(1).replace('"readme"', repr(name))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "1 leading chunks are there" in done.stdout and "torch.Size([2, 32, 256, 512]) 1.0" in done.stdout
