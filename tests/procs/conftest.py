"""What tests with real processes get."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin import StandIn


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A stand-in for the CUDA runtime, in use in this process and its children."""
    return StandIn(tmp_path, monkeypatch)
