"""A put that waits for its event: `put(..., after=event)`.

The object may be released before the event has happened (a `with` block usually ends first). Then
its holds move here, and go once the put is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ._core import log

if TYPE_CHECKING:
    from ._attachment import Attachment, Hold
    from ._defer import EventLike
    from .memory import MemoryObj


class PendingPut:
    """Takes care of the objects of one deferred put until it is done."""

    __slots__ = ("_after", "_attachment", "_done", "_kept", "_lock", "_objs", "_put")

    def __init__(self, attachment: Attachment, objs: list[MemoryObj], put: Callable[[], object]) -> None:
        self._attachment = attachment
        self._objs = objs
        self._put = put
        self._kept: list[Hold] = []
        self._after: list[tuple[list[Hold], EventLike]] = []
        self._done = False
        self._lock = threading.Lock()

    def keep(self, holds: list[Hold], after: EventLike | None) -> bool:
        """Take over the holds of a released object; False when the put is done already."""
        with self._lock:
            if self._done:
                return False
            if after is None:
                self._kept += holds
            else:
                self._after.append((holds, after))
            return True

    def run(self, known: bool) -> None:
        """The event has happened; `known` False: that will never be known, so nothing is published."""
        attachment = self._attachment
        try:
            with self._lock:
                if known:
                    self._put()
        except Exception:
            log.exception("%s: a deferred put failed", attachment.name)
        finally:
            with self._lock:
                self._done = True
                kept, after = self._kept, self._after
            for obj in self._objs:
                obj._put_done()
            self._objs = []
        if kept and attachment.release(kept) < 0 and not attachment.closed:
            log.error("%s: the holds of a deferred put could not be released", attachment.name)
        for holds, event in after:
            attachment.release_after(holds, event)
