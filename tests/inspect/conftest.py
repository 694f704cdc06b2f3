"""Scenes, made once for all verbs that only look: what they promise is that nothing changes."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import scenes


@pytest.fixture(scope="module", params=list(scenes.KINDS))
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[scenes.Scene]:
    """Each state in turn; the segment and its processes are gone afterwards."""
    plugins = request.config.pluginmanager.get_plugins()
    Child = next(p for p in plugins if hasattr(p, "Child")).Child  # the suite's `fork` is for one test
    children: list[Any] = []

    def fork(fn: Any) -> Any:
        children.append(Child(fn))
        return children[-1]

    name = f"t{os.getpid()}-{uuid.uuid4().hex[:8]}"
    more = [tmp_path_factory.mktemp("copy")] if request.param == "copied" else []
    try:
        yield scenes.KINDS[request.param](name, fork, *more)
    finally:
        for child in children:
            child.close()
        for p in scenes.SHM.glob(f"shmcache.{name}*"):
            p.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("SHMCACHE_INSPECT", raising=False)
