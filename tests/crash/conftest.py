"""Programs of this folder are built once per session and set of flags. A warning is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import crash_build
import pytest

Built = Callable[..., Path]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """built("soak", "-DFLAG", ..., cc="clang") -> the executable"""
    folder = tmp_path_factory.mktemp("crash-build")

    def make(program: str, *flags: str, cc: str | None = None) -> Path:
        return crash_build.build(folder, program, crash_build.WARNINGS + flags, cc)

    return make
