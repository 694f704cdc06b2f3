"""The C core as the layers above call it: `ffi`, `lib`, and the way from a status to an error.

Nothing above this module and below `_segment` and `_arena` imports the compiled module itself. A
compiled module of another version of the package (an upgrade that left the old file in place) is
refused here, at import, and not by a crash later.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import TYPE_CHECKING, Any, Final

from . import _shmcore
from ._version import __version__

ffi: Any = _shmcore.ffi
lib: Any = _shmcore.lib


def _load_fast() -> Any:
    """The module of native/python/fast.c, from the shared object that the first one came from."""
    spec = importlib.util.spec_from_file_location(f"{__package__}._shmfast", _shmcore.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fast: Any = _load_fast()

NIL: Final = 0xFFFFFFFF
NULL: Any = ffi.NULL
SLICE_NS: Final = 100_000_000  # longest stay in C of any wait: Ctrl-C and reaping come in between
KEY_MAX: Final[int] = lib.SHMC_KEY_MAX
META_MAX: Final[int] = lib.SHMC_META_MAX

log: Final = logging.getLogger("shmcache")

_built: str = ffi.string(lib.shmc_version()).decode()
if _built != __version__:
    raise ImportError(
        f"shmcache is version {__version__}, its compiled module was built for {_built}: "
        "install the package again, so that both are of one build"
    )

FINGERPRINT: Final[int] = lib.shmc_fingerprint()

Part: Any = fast.Part  # a shmc_part, as `fast` makes them; the same fields
if TYPE_CHECKING:

    class Held:
        """What objects are made of, so that `fast` can make them."""

        def release(self, after: Any = None) -> None: ...
        def ref_count_down(self) -> None: ...
else:
    Held = fast.Held
NO_KEY: Final[int] = fast.NO_KEY
UNUSUAL: Final[int] = fast.UNUSUAL

PART = ffi.typeof("shmc_part *")
PARTS = ffi.typeof("shmc_part[]")
OWNERS = ffi.typeof("shmc_owner *[]")
KEYS = ffi.typeof("shmc_keys *")
BYTES = ffi.typeof("uint8_t[]")
U32 = ffi.typeof("uint32_t *")
U64 = ffi.typeof("uint64_t *")


def address_of(pointer: Any) -> int:
    """What a pointer points to, as `fast` takes it. Whoever uses it keeps the pointer."""
    return int(ffi.cast("uintptr_t", pointer))


def owned(pointer: Any, free: Any, keep: Any = None) -> Any:
    """`pointer`, freed with its last reference and not before; `keep` is kept until then.

    What `ffi.gc` makes is freed early where it is part of garbage with cycles: the collector finalizes all of
    that, in any order, and a `__del__` that comes later still uses it. So the collector is not shown it; it
    refers to nothing that could be part of a cycle.
    """
    if keep is not None:
        free = functools.partial(free)  # no frame of Python, in which an interrupt would get lost
        free.keep = keep
    return fast.untracked(ffi.gc(pointer, free))


def part_pointer(part: Any) -> Any:
    """A part, of either kind, as C takes it; whoever uses it keeps the part."""
    return ffi.cast(PART, part.address) if type(part) is Part else part


def operation_name(op: int) -> str:
    """What a thread does inside the lock, as timeouts report it."""
    return text(lib.shmc_op_name(op))


def text(array: Any, length: int | None = None) -> str:
    """A char array of C as a str; undecodable bytes are replaced, since a damaged file may hold any."""
    raw: bytes = ffi.string(array) if length is None else bytes(ffi.buffer(array)[0:length])
    return raw.decode("utf-8", "replace")
