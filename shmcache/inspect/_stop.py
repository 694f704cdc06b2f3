"""How a verb ends early: an exit code that scripts can rely on, and words for a person."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes of `shmcache-inspect`; they never change their meaning."""

    SOUND = 0
    USAGE = 1
    NOT_FOUND = 2  # no such segment, key or file
    UNHEALTHY = 3  # something is wrong with the segment, or its lock was not to be had
    NOT_A_SEGMENT = 4  # foreign, half-made, damaged header, or another version's
    REFUSED = 5  # not confirmed, in use, or not permitted


class Stop(Exception):
    """Ends the verb: `code`, and a message that says what was asked, what is there, what to do."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code
