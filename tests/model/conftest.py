"""These tests use the tools of those with real processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "procs"))
