"""Children of these tests end by themselves when a test forgets them, or dies."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standin import StandIn

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
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A stand-in for the CUDA runtime, in use in this process and its children."""
    return StandIn(tmp_path, monkeypatch)
