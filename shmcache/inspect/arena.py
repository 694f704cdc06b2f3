"""A picture of the arena: `map`, on the terminal or as SVG."""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING, Any

import click

from ._keytext import printable, short
from ._reader import Reader
from ._records import Budget
from ._render import accuracy, console, foot, percent, print_json, size, table
from ._stop import Exit, Stop
from .cli import end, json_option, source, verb

if TYPE_CHECKING:
    from ._picture import Picture

Kinds = list[tuple[tuple[int, int], Any]]  # (state, namespace), bytes of each cell
_MARKS = {"unreserved": " ", "free": "·", "writing": "+", "leaving": "-", "unseen": "?"}
_ROWS = 16
_SVG_COLUMNS, _SVG_ROWS = 256, 16
_CELL_W, _CELL_H, _GAP, _MARGIN = 4, 28, 4, 16
_GREYS = {"unreserved": "#f5f5f5", "free": "#e4e4e4", "unseen": "#c8a0a0"}
_TERMINAL = ("cyan", "green", "magenta", "yellow", "blue", "red")


@verb("map")
@source
@click.option("--svg", type=click.Path(dir_okay=False, writable=True), help="Write a picture for a report.")
@json_option
def map_(reader: Reader, svg: str | None, as_json: bool) -> int:
    from ._picture import take

    if svg is not None:
        picture = take(reader, _SVG_COLUMNS * _SVG_ROWS, Budget())
        try:
            with open(svg, "w", encoding="utf-8") as f:
                f.write(_svg(reader, picture))
        except OSError as e:
            raise Stop(Exit.USAGE, f"{svg} cannot be written: {e.strerror}") from None
        if not as_json:
            console().print(f"Wrote {svg}: {size(picture.capacity)} in cells of {size(picture.cell_bytes)}.")
            return end(reader)
    columns = max(16, min(console().width, 120) - 12)
    picture = take(reader, columns * _ROWS, Budget())
    if as_json:
        print_json("map", _document(reader, picture))
    else:
        _draw(reader, picture, columns)
    return end(reader)


def _letter(namespace: int) -> str:
    return chr(ord("a") + namespace) if namespace < 26 else "z"


def _mark(state: str, namespace: int) -> str:
    if state in _MARKS:
        return _MARKS[state]
    return _letter(namespace).upper() if state == "kept" else _letter(namespace)


def _draw(reader: Reader, picture: Picture, columns: int) -> None:
    from rich.text import Text

    from ._picture import STATES

    cells = picture.dominant()
    for row in range(0, len(cells), columns):
        line = Text(f"{size(row * picture.cell_bytes):>9} |")
        for state, namespace in cells[row : row + columns]:
            known = STATES[state] in ("evictable", "kept", "writing", "leaving")
            style = _TERMINAL[namespace % len(_TERMINAL)] if known else "dim"
            line.append(_mark(STATES[state], namespace), style + (" bold" if STATES[state] == "kept" else ""))
        line.append("|")
        console().print(line)
    console().print()
    rows = [
        (_mark(STATES[state], ns) if STATES[state] != "unreserved" else "blank", STATES[state],
         short(printable(picture.namespaces.get(ns, "")), 30), size(total), percent(total, picture.capacity))
        for (state, ns), total in sorted(picture.totals().items())
    ]  # fmt: skip
    table(["MARK", "STATE", "<NAMESPACE", ">BYTES", ">SHARE"], rows)
    foot(reader, f"a cell is {size(picture.cell_bytes)}, marked as most of it is",
         "not all: time was up" if picture.partial else "")  # fmt: skip


def _document(reader: Reader, picture: Picture) -> dict[str, Any]:
    from ._picture import STATES

    return {
        "name": reader.name,
        **accuracy(reader, picture.partial),
        "capacity": picture.capacity,
        "cell_bytes": picture.cell_bytes,
        "totals": [
            {"state": STATES[state], "namespace": picture.namespaces.get(ns), "bytes": total}
            for (state, ns), total in sorted(picture.totals().items())
        ],
        "cells": "".join(_mark(STATES[state], ns) for state, ns in picture.dominant()),
    }


# ---- SVG ----------------------------------------------------------------------------------------------


def _colour(state: str, namespace: int) -> str:
    if state in _GREYS:
        return _GREYS[state]
    lightness = {"evictable": 0.68, "kept": 0.40, "writing": 0.85, "leaving": 0.80}[state]
    r, g, b = colorsys.hls_to_rgb((0.58 + namespace * 0.381966) % 1.0, lightness, 0.25 if state == "leaving" else 0.6)
    return f"#{round(r * 255):02x}{round(g * 255):02x}{round(b * 255):02x}"


def _escape(text: str) -> str:
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _rectangles(kinds: Kinds, scale: Any) -> list[tuple[int, float, int, float, tuple[int, int]]]:
    """x, y, width, height and kind. Neighbours in a row that are of one kind, from top to bottom, become one."""
    found: list[tuple[int, float, int, float, tuple[int, int]]] = []
    whole: tuple[float, float, tuple[int, int]] | None = None  # the last cell, when it was of one kind
    for i in range(len(scale)):
        x, y = _MARGIN + i % _SVG_COLUMNS * _CELL_W, float(_MARGIN + i // _SVG_COLUMNS * (_CELL_H + _GAP))
        stack = [(kind, float(cells[i]) * float(scale[i])) for kind, cells in kinds if cells[i]]
        this = (y, stack[0][1], stack[0][0]) if len(stack) == 1 else None
        if this is not None and this == whole:
            left, top, w, h, kind = found.pop()
            found.append((left, top, w + _CELL_W, h, kind))
            continue
        whole = this
        for kind, h in stack:
            found.append((x, y, _CELL_W, h, kind))
            y += h
    return found


def _svg(reader: Reader, picture: Picture) -> str:
    """A cell is a column of as many pixels as it has bytes, in one scale: areas are bytes."""
    from ._picture import STATES

    scale = _CELL_H / picture.cell_bytes
    totals = sorted(picture.totals().items())
    rows = -(-len(picture.cell_sizes) // _SVG_COLUMNS)
    width = 2 * _MARGIN + _SVG_COLUMNS * _CELL_W
    legend = 3 * _MARGIN + rows * (_CELL_H + _GAP)
    height = legend + 20 * (len(totals) + 1)
    title = f"{reader.name}: {size(picture.capacity)} in cells of {size(picture.cell_bytes)}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f"<title>{_escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<g id="arena" data-bytes-per-unit="{picture.cell_bytes / (_CELL_W * _CELL_H):.9g}">',
    ]
    kinds = [(kind, picture.cover[kind]) for kind, _ in totals]
    whole = sum((cells for _, cells in kinds), 0 * picture.cell_sizes)
    squeeze = (picture.cell_sizes / whole.clip(min=1)).clip(max=1.0)  # a race may have counted bytes twice
    for x, y, w, h, (state, ns) in _rectangles(kinds, squeeze * scale):
        out.append(f'<rect class="{STATES[state]}" data-ns="{ns}" x="{x}" y="{y:.6g}" width="{w}" height="{h:.9g}" '
                   f'fill="{_colour(STATES[state], ns)}"/>')  # fmt: skip
    out.append("</g>")
    out.append(f'<text x="{_MARGIN}" y="{legend}" font-size="13">{_escape(title)}</text>')
    for n, ((state, ns), total) in enumerate(totals, 1):
        y = legend + 20 * n
        words = f"{STATES[state]} {picture.namespaces.get(ns, '')}: {size(total)}, {percent(total, picture.capacity)}"
        out.append(f'<rect x="{_MARGIN}" y="{y - 11}" width="12" height="12" stroke="#888888" '
                   f'fill="{_colour(STATES[state], ns)}"/>')  # fmt: skip
        out.append(f'<text x="{_MARGIN + 20}" y="{y}" font-size="13">{_escape(words)}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"
