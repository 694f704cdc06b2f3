"""Text for streams that cannot take all of it: other locales than UTF-8, and names with bytes of no character.

…  becomes *, which is a wildcard as well        ·  becomes .        all else an escape
"""

from __future__ import annotations

import codecs
import io
import sys

_PLAIN = {"…": "*", "·": "."}
_HANDLER = "shmcache-inspect"


def _escaped(e: UnicodeError) -> tuple[str, int]:
    assert isinstance(e, UnicodeEncodeError)
    bad = e.object[e.start : e.end]
    return "".join(_PLAIN.get(c) or c.encode("unicode_escape").decode("ascii") for c in bad), e.end


codecs.register_error(_HANDLER, _escaped)


def never_fail() -> None:
    """From now on no character is an error to standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def writable(text: str) -> str:
    """`text` as standard output will show it, to be measured."""
    encoding = sys.stdout.encoding or "utf-8"
    if text.isascii() or encoding.lower().replace("-", "") == "utf8":
        return text
    return text.encode(encoding, _HANDLER).decode(encoding)
