"""How torch's CUDA runtime is found and called, against a stand-in for torch."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shmcache import _cudart


class FakeTorch:
    """As much of torch as is asked, on two devices. `done` tells what was called, and on which device."""

    def __init__(self, initialized: bool, contexts: tuple[int, ...] = (0,), available: bool = True) -> None:
        self.done: list[Any] = []
        self.device = 0
        self.code = 0
        self._C = SimpleNamespace(_cuda_hasPrimaryContext=lambda d: d in contexts)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: initialized,
            is_available=lambda: self._note("is_available") or available,
            init=lambda: self._note("init"),
            current_device=lambda: self.device,
            device_count=lambda: 2,
            device=self._on,
            cudart=lambda: SimpleNamespace(
                cudaHostRegister=lambda *args: self._note("register", *args) or self.code,
                cudaHostUnregister=lambda *args: self._note("unregister", *args) or self.code,
            ),
        )

    def _note(self, *what: Any) -> None:
        self.done.append((*what, f"on {self.device}"))

    @contextlib.contextmanager
    def _on(self, device: int) -> Any:
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before


class Symbols:
    """What the process has loaded for all to see."""

    def __init__(self, done: list[Any]) -> None:
        self._done = done
        self._mode = 0  # global

    def cudaGetLastError(self) -> int:
        self._done.append("clear")
        return 0

    def cudaThreadExchangeStreamCaptureMode(self, reference: Any) -> int:
        cell = reference._obj
        cell.value, self._mode = self._mode, cell.value
        self._done.append(f"mode {self._mode}")
        return 0


@pytest.fixture
def use(monkeypatch):
    """use(torch, symbols): this torch is imported, and nothing else is loaded."""
    monkeypatch.delenv("SHMCACHE_CUDART", raising=False)

    def use(torch: Any, symbols: object = None) -> None:
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setattr(_cudart.ctypes, "CDLL", lambda path: symbols)

    return use


def test_by_default_a_torch_that_has_not_started_cuda_is_left_alone(use):
    torch = FakeTorch(initialized=False)
    use(torch)
    assert _cudart.find(start=False) is None
    assert torch.done == [], "not even is_available: it would keep forked children from using CUDA"


@pytest.mark.parametrize("torch", [None, SimpleNamespace(), SimpleNamespace(cuda=SimpleNamespace())])
def test_a_torch_that_is_just_being_imported_is_not_used(use, torch):
    use(torch)
    assert _cudart.find(start=False) is None


def test_asked_to_it_starts_cuda_where_there_is_a_device(use):
    torch = FakeTorch(initialized=False)
    use(torch)
    assert _cudart.find(start=True) is not None
    assert torch.done == [("is_available", "on 0"), ("init", "on 0")]
    torch = FakeTorch(initialized=False, available=False)
    use(torch)
    assert _cudart.find(start=True) is None
    assert torch.done == [("is_available", "on 0")]


@pytest.mark.parametrize(("contexts", "device"), [((0,), 0), ((1,), 1), ((0, 1), 0), ((), 0)])
def test_calls_are_made_on_the_device_that_the_process_uses(use, contexts, device):
    torch = FakeTorch(True, contexts)
    use(torch)
    runtime = _cudart.find(start=False)
    assert runtime is not None
    assert runtime.register(4096, 8192) == 0
    assert runtime.unregister(4096) == 0
    assert torch.done == [("register", 4096, 8192, 3, f"on {device}"), ("unregister", 4096, f"on {device}")]
    assert torch.device == 0, "and the thread's own comes back"


def test_an_error_is_returned_and_cleared_and_the_capture_mode_restored(use):
    torch = FakeTorch(True)
    use(torch, Symbols(torch.done))
    runtime = _cudart.find(start=False)
    assert runtime is not None
    torch.code = 2
    assert runtime.register(4096, 8192) == 2
    assert torch.done == ["mode 2", ("register", 4096, 8192, 3, "on 0"), "clear", "mode 0"]
    torch.done.clear()
    torch.code = 0
    assert runtime.unregister(4096) == 0
    assert torch.done == ["mode 2", ("unregister", 4096, "on 0"), "mode 0"]


def test_unknown_codes_are_described_too():
    assert _cudart.describe(12345) == "CUDA error (12345)"
    assert _cudart.describe(712) == "cudaErrorHostMemoryAlreadyRegistered (712)"
