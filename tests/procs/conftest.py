"""Children of these tests end by themselves when a test forgets them, or dies."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

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
