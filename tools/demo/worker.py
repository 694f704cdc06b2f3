"""The loop of a child process: take a request, answer it, end when the pipe or the time ends."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LIFETIME_S = 1800  # no child outlives this, whatever happens to its parent
REPLY_S = 300


class WorkerError(RuntimeError):
    """A child failed, died or was late."""


def serve(conn: Connection, make: Callable[[], Any]) -> None:
    """Build a service and answer (method, arguments) until the other end closes."""
    signal.alarm(LIFETIME_S)
    try:
        service = make()
    except Exception:
        conn.send((False, traceback.format_exc()))
        return
    reply: tuple[bool, object] = (True, None)
    try:
        while True:
            conn.send(reply)
            method, args = conn.recv()
            try:
                reply = (True, getattr(service, method)(*args))
            except Exception:
                reply = (False, traceback.format_exc())
    except (EOFError, ConnectionError):
        service.close()


def receive(conn: Connection, who: str) -> Any:
    """The reply to the oldest open request; WorkerError instead of waiting for ever."""
    try:
        if not conn.poll(REPLY_S):
            raise WorkerError(f"{who} did not answer within {REPLY_S} s")
        done, value = conn.recv()
    except (EOFError, ConnectionError) as error:
        raise WorkerError(f"{who} is gone") from error
    if not done:
        raise WorkerError(f"{who} failed:\n{value}")
    return value
