"""These tests use the tools of those with real processes; their children, too, end by themselves at last."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "procs"))

_LONGEST = 110  # seconds; below the timeout of a test


@pytest.fixture
def fork(fork: Callable[[Callable[[Any], object]], Any]) -> Callable[[Callable[[Any], object]], Any]:
    """The suite's `fork`, whose children are killed by SIGALRM at last."""

    def start(fn: Callable[[Any], object]) -> Any:
        def guarded(child: Any) -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LONGEST)
            fn(child)

        return fork(guarded)

    return start


@pytest.fixture
def in_child(fork: Any) -> Callable[[Callable[[], object]], None]:
    """Runs a function in a child, whose limits, mounts and user may be changed; it must end well."""

    def run(test: Callable[[], object]) -> None:
        code = fork(lambda child: test()).wait(90)
        assert code == 0, f"the child ended with {code}; what it said is in the captured stderr"

    return run
