"""One attachment for one call, without what `shmcache.attach` does besides: no reap, no thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .._attachment import Attachment
from .._core import ffi, lib
from .._request import Request
from .._segment import connect, disconnect

DEADLINE = 2.0  # seconds for the handshake, and for the lock


class _Home:
    """What an attachment wants to know of its cache."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _reattach(self, old: Attachment) -> None:
        raise old.error(lib.SHMC_E_CLOSED, "attach")  # one call is made: nothing is attached again


@contextlib.contextmanager
def attached(name: str) -> Iterator[Attachment]:
    """The errors of `shmcache.attach`; LockTimeoutError after 2 s."""
    mapping, presence, attachment = connect(
        Request(name),
        how="attach",
        timeout=DEADLINE,
        claim=lambda mapping: Attachment.claim(_Home(name), mapping, DEADLINE, None, "inspect"),
    )
    try:
        yield attachment
    finally:
        lib.shmc_detach(attachment.handle, 0, ffi.new("uint32_t *"))
        attachment.closed = True
        disconnect(mapping, presence)


def cache_of(name: str) -> Any:
    """An ordinary attachment, for what changes keys. A context manager."""
    from .._open import attach

    return attach(name, timeout=DEADLINE, lock_timeout=DEADLINE, prefault="lazy", label="inspect")
