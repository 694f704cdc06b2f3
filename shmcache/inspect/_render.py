"""Plain tables and lines for 80 columns, colours on a terminal only, and the one way to print JSON.

Everything that comes from a segment is `Text`: never markup, never an escape sequence.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ._keytext import cells, short
from ._plain import writable

if TYPE_CHECKING:
    from rich.console import Console

    from ._reader import Reader

_NARROWEST = 6
_MARKS = "<>=~"  # before the name of a column
SCHEMA = 1  # of all JSON output; moves when a field changes its meaning or goes
STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan", "good": "green", "dim": "dim", "head": "bold"}
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@cache
def console() -> Console:
    """Standard output. Not a terminal, or NO_COLOR: no styles; 80 columns unless COLUMNS says otherwise."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process as if something were wrong

    plain = bool(os.environ.get("NO_COLOR"))
    return _Console(highlight=False, markup=False, emoji=False, color_system=None if plain else "auto")


def print_json(verb: str, data: dict[str, Any], *, line: bool = False) -> None:
    """One JSON document; `line`: on one line, for streams."""
    document = {"schema": SCHEMA, "version": __version__, "verb": verb, **data}
    sys.stdout.write(json.dumps(document, indent=None if line else 2, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], styles: Sequence[str] | None = None) -> None:
    """Columns whose name begins with `>` are numbers, to the right. Where the width is small, those with `<` are cut
    short, those with `=` go on in the next line, and then those with `~` are left out, the last first."""
    from rich.table import Table
    from rich.text import Text

    rows_of_cells = [[writable(str(cell)) for cell in row] for row in rows]
    if not rows_of_cells:
        return
    t = Table(box=None, pad_edge=False, header_style=STYLES["head"], padding=(0, 2, 0, 0))
    widths = _fit(columns, rows_of_cells, console().width)
    for name, width in zip(columns, widths, strict=True):
        if width:
            t.add_column(name.lstrip(_MARKS), justify="right" if name[0] == ">" else "left",
                         no_wrap=name[0] != "=", overflow="fold", min_width=width, max_width=width)  # fmt: skip
    for i, row in enumerate(rows_of_cells):
        shown = [
            cell if name[0] == "=" else writable(short(cell, width))
            for name, cell, width in zip(columns, row, widths, strict=True)
            if width
        ]
        t.add_row(*map(Text, shown), style=STYLES.get(styles[i], "") if styles else "")
    console().print(t)


def _fit(columns: Sequence[str], rows: list[list[str]], width: int) -> list[int]:
    """Widths: what is there, less what the widest of those that may be narrower must give up; 0: left out."""
    natural = [max(len(name.lstrip(_MARKS)), *(cells(row[i]) for row in rows)) for i, name in enumerate(columns)]
    least = [{"<": _NARROWEST, "=": 2 * _NARROWEST}.get(name[0], w) for name, w in zip(columns, natural, strict=True)]
    optional = [i for i, name in enumerate(columns) if "~" in name[:2]]
    whole = next((i for i, name in enumerate(columns) if name[0] == "="), -1)  # what the others give way to
    while True:
        widths = list(natural)
        over = sum(widths) + 2 * (sum(w > 0 for w in widths) - 1) - width
        while over > 0 and (soft := [i for i, w in enumerate(widths) if w > least[i]]):
            widths[max(soft, key=lambda i: (i != whole, widths[i]))] -= 1
            over -= 1
        if over <= 0 or not optional:
            return widths
        last = optional.pop()
        natural[last] = least[last] = 0


def say(text: str = "", style: str = "") -> None:
    """Lines, wrapped at the width."""
    from rich.text import Text

    console().print(Text(writable(text), style=STYLES.get(style, style)))


def fields(pairs: Iterable[tuple[str, str]]) -> None:
    """`name   value`, the value wrapped beside its name."""
    from rich.table import Table
    from rich.text import Text

    t = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    t.add_column(no_wrap=True, min_width=11, style=STYLES["dim"])
    t.add_column(overflow="fold")
    for name, value in pairs:
        t.add_row(Text(name), Text(writable(value)))
    console().print(t)


def foot(reader: Reader, *more: str) -> None:
    """Under a table: what it is worth."""
    said = ["a copy" if reader.copy else "live, approximate", *filter(None, more)]
    say("; ".join(said), "dim")


def accuracy(reader: Reader, partial: bool = False) -> dict[str, Any]:
    """The same for JSON. `partial`: time was up before the whole table was read."""
    return {"source": "copy" if reader.copy else "live", "exact": False, "partial": partial}


def note(text: str) -> None:
    """What is said beside the output: to standard error."""
    print(text, file=sys.stderr)


# ---- numbers --------------------------------------------------------------------------------------


def size(n: int | float) -> str:
    """Three digits and a binary unit."""
    for unit, factor in _UNITS:
        if abs(n) >= factor:
            x = n / factor
            digits = f"{x:.{2 if x < 10 else 1 if x < 100 else 0}f}"
            return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {unit}"
    return f"{n:.0f} B"


def count(n: int | float) -> str:
    return f"{n:,.0f}"


def some(n: int, what: str, many: str = "") -> str:
    """`1 hold`, `2 holds`."""
    return f"{n:,} {what if n == 1 else many or what + 's'}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def ratio(part: float, whole: float) -> float | None:
    """For JSON: None when there is nothing to divide by."""
    return round(part / whole, 6) if whole else None


def age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return "-"
