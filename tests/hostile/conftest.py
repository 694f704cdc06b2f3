"""These tests use the tools of those with real processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "procs"))


@pytest.fixture
def in_child(fork: Any) -> Callable[[Callable[[], object]], None]:
    """Runs a function in a child, whose limits, mounts and user may be changed; it must end well."""

    def run(test: Callable[[], object]) -> None:
        code = fork(lambda child: test()).wait(90)
        assert code == 0, f"the child ended with {code}; what it said is in the captured stderr"

    return run
