"""Kits (see `contract_kits`) as fixtures, and LMCache's process-wide threads put away after each test."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from contract_kits import HAS_LMCACHE, KITS, NEED_LMCACHE, Kit, modules

_skip = pytest.mark.skipif(not HAS_LMCACHE, reason="LMCache is not installed")


def params_of(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=_skip if name in NEED_LMCACHE else ()) for name in names]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's pool of threads does not survive a fork: a child that uses it waits for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tame(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """LMCache without metrics of its own, and without its monitor's thread afterwards."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    from lmcache import observability
    from lmcache.v1.pin_monitor import PinMonitor

    monkeypatch.setattr(observability.PrometheusLogger, "GetOrCreate", staticmethod(lambda *_, **__: MagicMock()))
    from contract_kits import BorrowedKit

    PinMonitor.GetOrCreate(BorrowedKit("", "").config())
    yield
    PinMonitor.DestroyInstance()
    assert not [t for t in threading.enumerate() if t.name.startswith(("PinMonitor", "batched-msg"))]


def _made(kind: str, request: pytest.FixtureRequest) -> Iterator[Kit]:
    if kind in NEED_LMCACHE:
        request.getfixturevalue("tame")
    kit = KITS[kind](kind, request.getfixturevalue("name"))
    yield kit
    kit.close()


@pytest.fixture(params=params_of(list(KITS)))
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """Every kit there is."""
    yield from _made(request.param, request)


@pytest.fixture(params=params_of([kind for kind in KITS if kind != "lmcache"]))
def our_kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """Every kit with our backend."""
    yield from _made(request.param, request)


@pytest.fixture(params=["ours", *params_of(["lmcache"])])
def maker(request: pytest.FixtureRequest) -> Any:
    """Allocators, policies, senders and detectors: ours, then LMCache's. See `contract_kits.modules`."""
    if request.param == "lmcache":
        request.getfixturevalue("tame")
    return modules(request.param)
