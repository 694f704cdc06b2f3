"""A segment to disk and back, so that a reboot need not be cold: `dump` and `load`."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from .._auto import AUTO
from .._checksum import CHECKSUMS, checksum_name
from .._formats import format_of
from .._keys import decode, encode
from .._meta import layout_from
from .._order import all_chunks
from .._sizes import parse_size
from ..errors import ChecksumError, ShmCacheError
from ._attach import DEADLINE, cache_of
from ._reader import Reader
from ._render import note, print_json, say, size
from ._stop import Exit, Stop
from ._tensorfile import Contents, DumpFile, Entry, Writer, header_room
from .cli import confirm, json_option, readable_path, segment_argument, verb, yes_option
from .keys import namespace_index


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    """A bar on a terminal; else nothing."""
    from tqdm import tqdm

    with tqdm(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar


# ---- dump ---------------------------------------------------------------------------------------------


@verb("dump")
@segment_argument
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--namespace", metavar="NAME", help="Only this one.")
@json_option
def dump_(name: str, file: str, namespace: str | None, as_json: bool) -> int:
    """Those that are complete. Attaches, as an engine does; each chunk is held while it is written."""
    if os.path.lexists(file) and not stat.S_ISREG(os.lstat(file).st_mode):  # it would be replaced
        raise Stop(Exit.USAGE, f"{file} is there, and no regular file: name another")
    reader = Reader.open(name)
    if reader.state != "ready":
        raise Stop(Exit.UNHEALTHY, f"segment {name!r} is {reader.state}: its chunks cannot be had any more")
    if namespace is not None:
        namespace_index(reader, namespace)
    spaces = [n for n in reader.namespaces().values() if namespace in (None, n.name)]
    contents = Contents(name, int(reader.geometry.capacity), reader.policy, time.time())
    contents.checksum = checksum_name(int(reader.geometry.flags))
    contents.namespaces = [{"name": n.name, "parts": n.parts, "descriptor": n.descriptor} for n in spaces]
    total = sum(n.bytes for n in spaces)
    left_out = damaged = 0
    with cache_of(name) as cache:
        handles = [cache.namespace(n.name) for n in spaces]
        number = {handle._index: i for i, handle in enumerate(handles)}
        keys = [
            (number[ns], key)
            for ns, published, key in all_chunks(cache)
            if ns in number and published == handles[number[ns]].parts
        ]
        longest = max((len(encode(key)[1]) for _, key in keys), default=0)
        try:
            writer = Writer(file, contents, header_room(sum(handles[i].parts for i, _ in keys), longest))
        except OSError as e:
            raise _unwritable(file, e) from None
        with writer, _progress(f"dump {name}", total) as bar:
            for i, key in keys:
                try:
                    written = _dump_chunk(writer, i, handles[i], key, cache.checksum != "none")
                except OSError as e:
                    if not isinstance(e, ShmCacheError):
                        raise _unwritable(file, e) from None
                    raise
                except ChecksumError as e:
                    note(str(e.args[0]))
                    damaged += 1
                    continue
                left_out += not written
                bar.update(written)
            bar.total = bar.n  # what the tables count is whole extents
            try:
                writer.finish()
            except OSError as e:
                raise _unwritable(file, e) from None
    chunks = len(keys) - left_out - damaged
    if as_json:
        data = {"name": name, "file": file, "chunks": chunks, "parts": len(writer.entries), "gone_meanwhile": left_out,
                "damaged": damaged}  # fmt: skip
        print_json("dump", {**data, "bytes": os.stat(file).st_size})
    else:
        say(f"Wrote {chunks} chunks, {len(writer.entries)} parts, {size(os.stat(file).st_size)} to {file}.")
        if left_out:
            say(f"{left_out} went while it was written.")
        if damaged:
            say(f"{damaged} have other bytes than were put, and were left out.", "error")
    return Exit.UNHEALTHY if damaged else Exit.SOUND


def _unwritable(file: str, e: OSError) -> Stop:
    code = Exit.REFUSED if isinstance(e, PermissionError) else Exit.USAGE
    return Stop(code, f"{file} cannot be written: {e.strerror}")


def _dump_chunk(writer: Writer, index: int, handle: Any, key: Any, verify: bool) -> int:
    """Bytes written; 0 when the chunk went meanwhile. All parts or none: it is pinned first, and verified.

    (The dump has checksums of its own: what is wrong here would be right there.)
    """
    with handle.lookup([key], pin=True, touch=False) as hit:
        if not hit.n:
            return 0
        for part in range(handle.parts if verify else 0):
            hit.get(0, part=part, verify=True).release()
        written = 0
        for part in range(handle.parts):
            with hit.get(0, part=part) as obj:
                data = obj.byte_array
                writer.add(index, part, obj._look().blob, encode(key), data)
                written += len(data)
    return written


# ---- load ---------------------------------------------------------------------------------------------


@verb("load")
@click.argument("file", type=readable_path())
@segment_argument
@click.option("--capacity", help='Size of a segment that is made for it, such as "64GiB"; by default that of the dump.')
@yes_option
@json_option
def load_(file: str, name: str, capacity: str | None, yes: bool, as_json: bool) -> int:
    """The segment is made if it is absent. Evicts nothing: the hottest that fit are loaded.

    What is there already stays and is skipped, so a load that was interrupted is finished by another.
    """
    from .._directory import segments
    from .._open import open as open_cache

    dump = DumpFile(file)
    try:
        room = parse_size(capacity, "--capacity") if capacity is not None else dump.contents.capacity
    except ValueError as e:
        raise click.UsageError(str(e)) from None
    made = next((s.state for s in segments() if s.name == name), None) in (None, "half-made")
    what = f"Make segment {name!r} of {size(room)} and load" if made else f"Load into {name!r}"
    confirm(f"{what} {len(dump.entries)} parts, {size(dump.bytes)}?", yes)
    if made:
        kind = dump.contents.checksum
        cache = open_cache(name, capacity=room, policy=dump.contents.policy, timeout=DEADLINE, lock_timeout=DEADLINE,
                           checksum=kind if kind in CHECKSUMS else AUTO, label="inspect")  # fmt: skip
    else:
        cache = cache_of(name)
    with cache:
        counts = _load(dump, cache, name)
    dump.close()
    if as_json:
        print_json("load", {"name": name, "file": file, "made": made, **counts})
    else:
        say(f"Loaded {counts['chunks']} chunks, {size(counts['bytes'])}; {counts['there']} were there already.")
        if counts["no_room"]:
            say(f"{counts['no_room']} of the coldest did not fit.", "warning")
        if counts["damaged"]:
            say(f"{counts['damaged']} are damaged in the file and were left out.", "error")
    return Exit.UNHEALTHY if counts["damaged"] else Exit.SOUND


def _load(dump: DumpFile, cache: Any, name: str) -> dict[str, int]:
    handles = [
        cache.namespace(n["name"], parts=n["parts"], descriptor=n["descriptor"]) for n in dump.contents.namespaces
    ]
    counts = dict.fromkeys(("chunks", "bytes", "there", "no_room", "damaged"), 0)
    chunks = list(dump.chunks())
    first = _first_that_fits(chunks, cache.stats().bytes)
    counts["no_room"] = first
    with _progress(f"load {name}", sum(e.end - e.start for group in chunks[first:] for e in group)) as bar:
        for group in chunks[first:]:
            handle = handles[group[0].namespace]
            key = decode(group[0].kind, group[0].raw)
            if handle.contains(key):
                counts["there"] += 1
            else:
                outcome = _load_chunk(dump, handle, key, group)
                counts[outcome] += 1
                counts["bytes"] += sum(e.end - e.start for e in group) if outcome == "chunks" else 0
            bar.update(sum(e.end - e.start for e in group))
    return counts


def _first_that_fits(chunks: list[list[Entry]], there: Any) -> int:
    """From the hottest back, as long as there is room: the file is coldest first."""
    free = there.capacity - there.used
    for i in range(len(chunks) - 1, -1, -1):
        free -= sum(e.end - e.start for e in chunks[i])
        if free < 0:
            return i + 1
    return 0


def _load_chunk(dump: DumpFile, handle: Any, key: Any, group: list[Entry]) -> str:
    """All parts are read and checked before the first is published; what happened, as `counts` names it."""
    held = []
    try:
        for e in group:
            layout = layout_from(dump.contents.layouts[e.layout], e.end - e.start)
            shapes, dtypes = [g.shape for g in layout.groups], [g.dtype.name for g in layout.groups]
            one = layout.single is not None
            obj = handle.allocate(
                shapes[0] if one else shapes, dtypes[0] if one else dtypes, fmt=format_of(layout.fmt), evict=False
            )
            if obj is None:
                return "no_room"
            held.append((e, obj))
            if not dump.read(e, obj.byte_array):
                note(f"the checksum of {e.name} is wrong")
                return "damaged"
        for e, obj in held:
            handle.put(key, obj, part=e.part)
        return "chunks"
    finally:
        for _, obj in held:
            obj.release()
