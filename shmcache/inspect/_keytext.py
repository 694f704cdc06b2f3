"""Keys as people type and read them.

    0x0a1b...     bytes         int:42     int         str:...    str, where the plain text could be misread
    plain text    str; when typed, also the bytes of that text, and the int

Text of a segment is untrusted: whatever is not printable is shown as an escape.
"""

from __future__ import annotations

import fnmatch
import re
import unicodedata
from collections.abc import Callable

from .._keys import BYTES_TYPE, INT_TYPE, STR_TYPE, decode, encode

KIND_NAMES = {BYTES_TYPE: "bytes", STR_TYPE: "str", INT_TYPE: "int"}
_MARKED = re.compile(r"0x|int:|str:")
_ESCAPED = re.compile(r"\\(?:\\|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt])")  # what show() writes
_HEX_PREFIX = re.compile(r"0x([0-9a-f]*)[*…]")
Raw = tuple[int, bytes]  # type code and bytes, as stored


def printable(text: str) -> str:
    """`text` with control characters and the like as escapes: it cannot move a terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def show(kind: int, raw: bytes) -> str:
    """The one text of a key; `parse` takes it back."""
    if kind == INT_TYPE:
        return f"int:{decode(kind, raw)!r}"
    if kind == STR_TYPE:
        text = str(decode(kind, raw))
        plain = text and text.isprintable() and not _MARKED.match(text) and not any(c in text for c in "*?[…")
        return text if plain else "str:" + printable(text.replace("\\", "\\\\"))
    return f"0x{raw.hex()}"


def cells(text: str) -> int:
    """Columns of a terminal that it takes."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in text)


def short(text: str, width: int) -> str:
    """At most `width` columns; what is cut off is `…`, which `key` and `why` take as a wildcard."""
    if cells(text) <= width:
        return text
    text = text[: width - 1]
    while cells(text) > width - 1:
        text = text[:-1]
    return text + "…"


def parse(text: str) -> list[Raw]:
    """All keys that the text may mean; ValueError when it can be none."""
    if text.startswith("0x"):
        try:
            return [encode(bytes.fromhex(text[2:]))]
        except ValueError:
            raise ValueError(f"key {_begin(text)}: 0x is followed by pairs of hex digits, at most 64") from None
    if text.startswith("int:"):
        return [encode(_number(text[4:], text))]
    if text.startswith("str:"):
        try:
            return [encode(_ESCAPED.sub(lambda m: m[0].encode("ascii").decode("unicode_escape"), text[4:]))]
        except UnicodeError:
            raise ValueError(f"key {_begin(text)}: there is no such character") from None
    try:
        raw = text.encode()
    except UnicodeError:
        raise ValueError(f"key {_begin(text)} is not UTF-8: give its bytes, as 0x...") from None
    found = [encode(text), encode(raw)]
    if re.fullmatch(r"-?[0-9]+", text):
        found.append(encode(_number(text, text)))
    return found


def _begin(text: str) -> str:
    return repr(short(text, 60))


def _number(digits: str, text: str) -> int:
    """64 bytes hold at most 155 digits."""
    try:
        return int(digits[:200], 0) if digits[:2].lower() in ("0x", "0b", "0o") else int(digits[:200])
    except ValueError:
        raise ValueError(f"key {_begin(text)}: int: is followed by a whole number") from None


def is_pattern(text: str) -> bool:
    return any(c in text for c in "*?[…")


def hex_prefix(pattern: str) -> bytes | None:
    """The first bytes of a pattern such as 0x0a1b…, without a last half byte; None for other patterns."""
    found = _HEX_PREFIX.fullmatch(pattern)
    return bytes.fromhex(found[1][: len(found[1]) & ~1]) if found else None


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether the shown text of a key matches a shell pattern; `…` is `*`."""
    match = re.compile(fnmatch.translate(pattern.replace("…", "*"))).match
    return lambda text: match(text) is not None
