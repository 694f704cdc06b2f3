"""The CUDA runtime as far as pinning needs it, and the one place that calls it.

It is torch's, or the shared library that the environment variable SHMCACHE_CUDART names: with
cudaHostRegister, cudaHostUnregister and cudaGetLastError, so that the code above can be driven by a
stand-in where there is no GPU. Calls return CUDA's code, and leave no error behind for others to find.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any, Final, Protocol

from ._sizes import format_size

LIBRARY: Final = "SHMCACHE_CUDART"

MEMORY_ALLOCATION: Final = 2
ALREADY_REGISTERED: Final = 712
CAPTURING: Final = 900  # another thread is capturing a CUDA graph

# Portable: pinned for all contexts of the process, not only for that of the device that is current in
# the thread which registers. Mapped: kernels may also read and write the memory in place.
_FLAGS = 1 | 2

_RELAXED = 2  # cudaStreamCaptureModeRelaxed

_ERRORS = {
    1: "cudaErrorInvalidValue",
    MEMORY_ALLOCATION: "cudaErrorMemoryAllocation",
    3: "cudaErrorInitializationError",
    4: "cudaErrorCudartUnloading",
    35: "cudaErrorInsufficientDriver",
    46: "cudaErrorDevicesUnavailable",
    100: "cudaErrorNoDevice",
    700: "cudaErrorIllegalAddress",
    709: "cudaErrorContextIsDestroyed",
    ALREADY_REGISTERED: "cudaErrorHostMemoryAlreadyRegistered",
    713: "cudaErrorHostMemoryNotRegistered",
    800: "cudaErrorNotPermitted",
    801: "cudaErrorNotSupported",
    CAPTURING: "cudaErrorStreamCaptureUnsupported",
    999: "cudaErrorUnknown",
}


def describe(code: int) -> str:
    """A CUDA error for people."""
    what = f"{_ERRORS.get(code, 'CUDA error')} ({code})"
    if code != MEMORY_ALLOCATION:
        return what
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)
    return f"{what}, no more memory could be locked: RLIMIT_MEMLOCK is {text}"


class Runtime(Protocol):
    """CUDA in this process."""

    def register(self, address: int, size: int) -> int: ...

    def unregister(self, address: int) -> int: ...


def find(start: bool) -> Runtime | None:
    """The runtime, or None when CUDA is not in use in this process.

    With `start` torch is imported and CUDA initialized where need be, and None means that there is no
    device. OSError: the library cannot be loaded. RuntimeError: torch cannot initialize CUDA.
    """
    path = os.environ.get(LIBRARY)
    if path:
        return _Library(path)
    if start:
        import torch

        started: Any = torch.cuda
        if not started.is_available():
            return None
        started.init()
        return _Torch(torch)
    # Asking whether there is a device would start CUDA, and forked children could not use it any more.
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)  # None: torch is just being imported
    if is_initialized is None or not is_initialized():
        return None
    return _Torch(sys.modules["torch"])


class _Library:
    """A shared library with the three functions."""

    def __init__(self, path: str) -> None:
        try:
            library = ctypes.CDLL(path)
            self._register = library.cudaHostRegister
            self._unregister = library.cudaHostUnregister
            self._last_error = library.cudaGetLastError
        except (OSError, AttributeError) as e:
            raise OSError(f"{LIBRARY}={path}: {e}") from None
        self._register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._unregister.argtypes = [ctypes.c_void_p]

    def register(self, address: int, size: int) -> int:
        return self._clear(self._register(address, size, _FLAGS))

    def unregister(self, address: int) -> int:
        return self._clear(self._unregister(address))

    def _clear(self, code: int) -> int:
        if code:
            self._last_error()
        return code


class _Torch:
    """torch's runtime, which has all but cudaGetLastError: that is taken from the library torch has loaded."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._runtime = torch.cuda.cudart()
        self._device = _device_in_use(torch)
        symbols = ctypes.CDLL(None)  # what is loaded for all to see: libcudart, unless torch contains it
        self._last_error = getattr(symbols, "cudaGetLastError", None)
        self._exchange_mode = getattr(symbols, "cudaThreadExchangeStreamCaptureMode", None)

    def register(self, address: int, size: int) -> int:
        with self._here():
            return self._clear(int(self._runtime.cudaHostRegister(address, size, _FLAGS)))

    def unregister(self, address: int) -> int:
        with self._here():
            return self._clear(int(self._runtime.cudaHostUnregister(address)))

    def _clear(self, code: int) -> int:
        """The error is this thread's, and torch would report it at a call that has nothing to do with it."""
        if code and self._last_error is not None:
            self._last_error()
        return code

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """On the device that this process uses: a new thread is on device 0, where a call would make a context.

        And so that it neither spoils a graph that another thread is capturing nor is refused because of it.
        """
        with self._torch.cuda.device(self._device):
            if self._exchange_mode is None:
                yield
                return
            mode = ctypes.c_int(_RELAXED)
            self._exchange_mode(ctypes.byref(mode))
            try:
                yield
            finally:
                self._exchange_mode(ctypes.byref(mode))


def _device_in_use(torch: Any) -> int:
    """The calling thread's, or the first with a context when that one has none (another thread chose)."""
    current = int(torch.cuda.current_device())
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None or has_context(current):
        return current
    return next((d for d in range(torch.cuda.device_count()) if has_context(d)), current)
