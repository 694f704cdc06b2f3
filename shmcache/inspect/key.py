"""One chunk from all sides: `key`; and what the text of a key may mean."""

from __future__ import annotations

from typing import Any

import click

from .._core import ffi
from .._formats import format_of
from .._meta import layout_from
from ._keytext import is_pattern, parse, printable, short, show
from ._reader import TICK_NS, Reader
from ._records import LINKED, WRITING, Budget, holds, parts_of, raw_key, versions
from ._render import accuracy, age, fields, foot, print_json, say, size, table
from ._stop import Exit, Stop
from .cli import end, json_option, source_and_key, verb
from .keys import find_chunks, namespace_index, state_of, text_of


def resolve(reader: Reader, text: str, namespace: str | None) -> list[tuple[int, Any]]:
    """(namespace, chunk record) of every version of what the text may mean, visible ones first."""
    spaces = [namespace_index(reader, namespace)] if namespace is not None else list(reader.namespaces())
    if is_pattern(text):
        budget = Budget()
        some, total = find_chunks(reader, budget, spaces[0] if namespace is not None else None, text, "hot", 8)
        if total > 1 and len({text_of(r) for r in some}) > 1:
            shown = ", ".join(short(text_of(r), 24) for r in some)
            raise Stop(
                Exit.USAGE, f"key {text!r} may be any of {total}: {shown}; use `keys --match` and more of the key"
            )
        if not total and budget.partial:
            raise Stop(Exit.NOT_FOUND, f"key {text!r} was not met before time was up: give the whole key")
        keys = [(int(r["ktype"]), r["key"][: int(r["klen"])].tobytes()) for r in some[:1]]
    else:
        keys = parse_key(text)
    found = [(ns, chunk) for ns in spaces for key in keys for chunk in versions(reader, ns, key)]
    return sorted(found, key=lambda pair: 0 if pair[1].flags & LINKED else 1)


def parse_key(text: str) -> list[tuple[int, bytes]]:
    try:
        return parse(text)
    except ValueError as e:
        raise click.UsageError(str(e)) from None


def part_rows(reader: Reader, chunk: Any) -> list[dict[str, Any]]:
    rows = []
    for b in parts_of(reader, chunk):
        layout = layout_from(bytes(ffi.buffer(b.meta)[0 : b.meta_len]), int(b.size)) if b.size else None
        rows.append(
            {
                "part": int(b.part), "state": "writing" if b.state == WRITING else "published", "bytes": int(b.size),
                "extent": int(b.extent), "offset": int(b.offset), "references": int(b.refs),
                "dtype": [g.dtype.name for g in layout.groups] if layout else [],
                "shape": [list(g.shape) for g in layout.groups] if layout else [],
                "format": format_of(layout.fmt).name if layout else "UNDEFINED",
            }
        )  # fmt: skip
    return rows


def holders(reader: Reader, chunk: Any, budget: Budget) -> list[int]:
    """Pids that hold or pin it, one for each hold."""
    pids = {(s.slot, s.gen): s.pid for s in reader.slots()}
    return [pids.get((int(h.slot), int(h.slot_gen)), 0) for h in holds(reader, budget) if h.chunk == chunk.chunk]


@verb("key")
@source_and_key
@click.option("--namespace", metavar="NAME")
@json_option
def key_(reader: Reader, key: str, namespace: str | None, as_json: bool) -> int:
    budget = Budget()
    names = reader.namespaces()
    found = resolve(reader, key, namespace)
    if not found:
        raise Stop(Exit.NOT_FOUND, f"key {key!r} is not in segment {reader.name!r}; `why` tells what is known of it")
    now = reader.now_ns
    rows = []
    for ns, chunk in found:
        n = names[ns]
        rows.append(
            {
                "key": show(*raw_key(chunk)), "namespace": n.name, "state": state_of(chunk, n.generation, n.parts),
                "generation": int(chunk.ns_gen), "published": int(chunk.published), "parts": n.parts,
                "bytes": int(chunk.bytes), "held": int(chunk.held), "holders": holders(reader, chunk, budget),
                "age": max(0, now - int(chunk.admit_tick) * TICK_NS) / 1e9,
                "idle": max(0, now - int(chunk.last_tick) * TICK_NS) / 1e9,
                "part": part_rows(reader, chunk),
            }
        )  # fmt: skip
    if as_json:
        print_json("key", {"name": reader.name, **accuracy(reader, budget.partial), "chunks": rows})
        return end(reader)
    for r in rows:
        _page(r)
    foot(reader)
    return end(reader)


def _page(r: dict[str, Any]) -> None:
    held = f"{r['held']} times" + (f", by pid {', '.join(map(str, sorted(set(r['holders']))))}" if r["holders"] else "")
    fields(
        [
            ("key", r["key"]),
            ("namespace", printable(r["namespace"])),
            ("state", f"{r['state']}, {r['published']} of {r['parts']} parts published"),
            ("bytes", size(r["bytes"])),
            ("holds", held if r["held"] else "nobody: it may be evicted"),
            ("ages", f"made {age(r['age'])} ago, last used {age(r['idle'])} ago"),
        ]
    )
    table(
        [">PART", "STATE", ">BYTES", ">~EXTENT", ">~OFFSET", ">~REFS", "<DTYPE", "<SHAPE"],
        [
            (p["part"], p["state"], size(p["bytes"]), size(p["extent"]), p["offset"], p["references"],
             ",".join(p["dtype"]), " ".join(map(str, p["shape"])))
            for p in r["part"][:64]
        ],
    )  # fmt: skip
    if len(r["part"]) > 64:
        say(f"and {len(r['part']) - 64} more parts", "dim")
