"""What is stored: `keys`, and finding chunks in a table of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .._keys import BYTES_TYPE
from ._keytext import hex_prefix, matcher, printable, short, show
from ._reader import TICK_NS, Reader
from ._records import DRAIN, GONE, LINKED, SHELL, Budget, chunk_arrays
from ._render import accuracy, age, foot, print_json, say, size, table
from ._stop import Exit, Stop
from .cli import end, json_option, source, verb

if TYPE_CHECKING:
    import numpy as np

SORTS = ("cold", "hot", "size", "age", "idle", "key")


def state_of(chunk: Any, generation: int, parts: int) -> str:
    """complete, incomplete, reserved, invalidated, removed or draining."""
    if chunk.flags & GONE:
        return "removed, still held"
    if chunk.flags & DRAIN:
        return "removed, being freed"
    if chunk.ns_gen != generation:
        return "invalidated"
    if chunk.flags & SHELL:
        return "reserved"
    return "complete" if chunk.flags & LINKED and chunk.published == parts else "incomplete"


def namespace_index(reader: Reader, name: str) -> int:
    found = {n.name: i for i, n in reader.namespaces().items()}
    if name not in found:
        there = ", ".join(map(repr, sorted(found))) or "none"
        raise Stop(Exit.NOT_FOUND, f"segment {reader.name!r} has no namespace {name!r}; it has {there}")
    return found[name]


def text_of(record: Any) -> str:
    """The shown key of a numpy record."""
    return show(int(record["ktype"]), record["key"][: int(record["klen"])].tobytes())


# ---- keys -------------------------------------------------------------------------------------------


def _sort_values(rows: np.ndarray[Any, Any], sort: str) -> np.ndarray[Any, Any]:
    """Ascending."""
    import numpy as np

    if sort == "hot":
        return ~rows["stamp"]
    if sort == "size":
        return ~rows["bytes"]
    if sort == "key":
        return np.array([text_of(r) for r in rows], object)
    return rows[{"cold": "stamp", "age": "admit_tick", "idle": "last_tick"}[sort]]


def find_chunks(
    reader: Reader, budget: Budget, namespace: int | None, match: str | None, sort: str, limit: int
) -> tuple[np.ndarray[Any, Any], int]:
    """The first `limit` linked chunks in that order, and how many there are. Memory does not grow with the table."""
    import numpy as np

    best: list[np.ndarray[Any, Any]] = []
    kept = total = 0
    fits = matcher(match) if match else None
    prefix = hex_prefix(match) if match else None
    start = np.frombuffer(prefix or b"", np.uint8)
    for slice_ in chunk_arrays(reader, budget):
        rows = slice_[slice_["flags"] & LINKED != 0]
        if namespace is not None:
            rows = rows[rows["ns"] == namespace]
        if prefix:  # a table may have millions, and a look at each in Python takes a microsecond
            rows = rows[(rows["ktype"] == BYTES_TYPE) & (rows["key"][:, : len(prefix)] == start).all(axis=1)]
        if fits:
            rows = rows[np.fromiter((fits(text_of(r)) for r in rows), bool, len(rows))]
        if not len(rows):
            continue
        total += len(rows)
        best.append(rows.copy())
        kept += len(rows)
        if kept > 4 * limit + 65536:
            best = [_first(np.concatenate(best), sort, limit)]
            kept = len(best[0])
    if not best:
        return np.empty(0), 0
    return _first(np.concatenate(best), sort, limit), total


def _first(rows: np.ndarray[Any, Any], sort: str, limit: int) -> np.ndarray[Any, Any]:
    import numpy as np

    found: np.ndarray[Any, Any] = rows[np.argsort(_sort_values(rows, sort), kind="stable")[:limit]]
    return found


@verb("keys")
@source
@click.option("--namespace", metavar="NAME")
@click.option("--match", metavar="PATTERN", help="A shell pattern for the key as it is shown.")
@click.option("--sort", type=click.Choice(SORTS), default="cold", show_default=True, help="cold: who is evicted next.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True)
@json_option
def keys_(reader: Reader, namespace: str | None, match: str | None, sort: str, limit: int, as_json: bool) -> int:
    budget = Budget()
    names = reader.namespaces()
    index = namespace_index(reader, namespace) if namespace is not None else None
    found, total = find_chunks(reader, budget, index, match, sort, limit)
    now = reader.now_ns
    rows: list[dict[str, Any]] = []
    for r in found:
        ns = names.get(int(r["ns"]))
        generation, parts = (ns.generation, ns.parts) if ns else (0, 0)
        rows.append(
            {
                "key": text_of(r),
                "namespace": ns.name if ns else None,
                "state": "invalidated" if r["ns_gen"] != generation
                else "complete" if r["published"] == parts else "incomplete",
                "published": int(r["published"]),
                "parts": parts,
                "bytes": int(r["bytes"]),
                "held": int(r["held"]),
                "age": max(0, now - int(r["admit_tick"]) * TICK_NS) / 1e9,
                "idle": max(0, now - int(r["last_tick"]) * TICK_NS) / 1e9,
            }
        )  # fmt: skip
    if as_json:
        print_json("keys", {"name": reader.name, **accuracy(reader, budget.partial), "total": total, "keys": rows})
        return end(reader)
    if not rows:
        say("No such key." if match or namespace else "It holds no chunk.")
        return end(reader)
    table(
        ["<KEY", "<NAMESPACE", ">PARTS", ">BYTES", ">~HELD", ">~AGE", ">~IDLE", "STATE"],
        [
            (short(r["key"], 24), short(printable(r["namespace"] or "-"), 20), f"{r['published']}/{r['parts']}",
             size(r["bytes"]), r["held"], age(r["age"]), age(r["idle"]), r["state"])
            for r in rows
        ],
        ["" if r["state"] == "complete" else "warning" for r in rows],
    )  # fmt: skip
    foot(reader, f"{len(rows)} of {total}, {sort} first" if sort != "key" else f"{len(rows)} of {total}",
         "not all: time was up" if budget.partial else "")  # fmt: skip
    return end(reader)
