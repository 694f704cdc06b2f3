"""The C core as the layers above call it: `ffi`, `lib`, and the way from a status to an error.

Nothing above this module and below `_segment` and `_arena` imports the compiled module itself. A
compiled module of another version of the package (an upgrade that left the old file in place) is
refused here, at import, and not by a crash later.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from . import _shmcore
from ._version import __version__

ffi: Any = _shmcore.ffi
lib: Any = _shmcore.lib

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

PART = ffi.typeof("shmc_part *")
PARTS = ffi.typeof("shmc_part[]")
OWNERS = ffi.typeof("shmc_owner *[]")
KEYS = ffi.typeof("shmc_keys *")
BYTES = ffi.typeof("uint8_t[]")
U32 = ffi.typeof("uint32_t *")
U64 = ffi.typeof("uint64_t *")


def operation_name(op: int) -> str:
    """What a thread does inside the lock, as timeouts report it."""
    return text(lib.shmc_op_name(op))


def text(array: Any, length: int | None = None) -> str:
    """A char array of C as a str; undecodable bytes are replaced, since a damaged file may hold any."""
    raw: bytes = ffi.string(array) if length is None else bytes(ffi.buffer(array)[0:length])
    return raw.decode("utf-8", "replace")
