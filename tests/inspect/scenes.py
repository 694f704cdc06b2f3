"""Segments in the states an operator meets, and running the command in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

import shmcache
from shmcache import SharedCache
from shmcache._core import lib
from shmcache.inspect import cli
from shmcache.inspect._render import console

SHM = Path("/dev/shm")
PROMPT = 5.0  # what must end within 2 s is given this much, for a busy machine
_LONGEST = 60


def small(name: str, **more: Any) -> SharedCache:
    """4 MiB, and without background threads: every fork meets only what the test does."""
    options = {"capacity": "4MiB", "prefault": "lazy", "hugepages": False, "label": "engine-0", "rank": 0, **more}
    return shmcache.open(name, **options)


def store(kv: Any, key: Any, nbytes: int = 4096, part: int = 0, fill: int = 7) -> None:
    with kv.allocate(nbytes) as obj:
        obj.byte_array[:] = bytes([fill]) * nbytes
        assert kv.put(key, obj, part=part)


def furnish(cache: SharedCache) -> list[Any]:
    """Something of everything; returns what holds it."""
    kv = cache.namespace("llama:tp2", parts=2, descriptor={"model": "llama"})
    for i in range(4):
        for part in range(2):
            if (i, part) != (3, 1):
                store(kv, bytes([i]) * 32, 8192, part)
    default = cache.default
    for i in range(6):
        store(default, f"k{i}")
    store(default, 42)
    default.remove("k0")
    held = [default.get("k1"), default.lookup(["k2"], pin=True), default.allocate(10_000)]
    default.pin("k3")
    default.remove("k1")
    return held


def run(*argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    console.cache_clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(list(argv))
    if "--json" in argv and out.getvalue():
        check_schema(out.getvalue())
    return code, out.getvalue(), err.getvalue()


@cache
def _validators() -> dict[str, Any]:
    """For each verb; stricter than what is published, which allows more fields."""
    schema = json.loads((Path(cli.__file__).parent / "schema.json").read_text())

    def close(node: Any) -> None:
        if isinstance(node, dict):
            if "properties" in node:
                node["additionalProperties"] = False
            for value in node.values():
                close(value)

    close(schema["$defs"])
    verbs = [ref["$ref"].rpartition("/")[2] for ref in schema.pop("oneOf")]
    return {v.removeprefix("verb-"): jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{v}"}) for v in verbs}


def check_schema(text: str) -> None:
    """Every document in it is as the schema says."""
    try:
        documents = [json.loads(text)]
    except ValueError:
        documents = [json.loads(line) for line in text.splitlines()]
    for document in documents:
        _validators()[document["verb"]].validate(document)


def leave(child: Any) -> None:
    """In a child: it ends by itself when the test forgets it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LONGEST)


@dataclass
class Scene:
    """What a verb is pointed at: NAME, or --file COPY."""

    kind: str
    name: str
    source: tuple[str, ...]
    exit: int  # of verbs that only look
    child: Any = None


Fork = Callable[[Callable[[Any], object]], Any]


def live(name: str, fork: Fork) -> Scene:
    """One process that goes on storing and looking up."""

    def engine(child: Any) -> None:
        leave(child)
        cache = small(name)
        held = furnish(cache)
        child.tell("ready")
        i = 0
        while held:
            store(cache, 1000 + i % 50)
            cache.lookup([1000 + i % 50])
            cache.remove(1000 + (i + 25) % 50)
            i += 1
            time.sleep(0.0005)

    child = fork(engine)
    assert child.listen() == "ready"
    return Scene("live", name, (name,), 0, child)


def dead(name: str, fork: Fork) -> Scene:
    """All of its processes were killed while they held things."""

    def engine(child: Any) -> None:
        leave(child)
        held = furnish(small(name))
        child.tell("ready")
        child.await_parent()
        del held

    child = fork(engine)
    assert child.listen() == "ready"
    child.kill()
    child.wait()
    return Scene("dead", name, (name,), 0, child)


def stopped(name: str, fork: Fork) -> Scene:
    """Its one process is stopped inside the lock, in the middle of a transaction."""

    def engine(child: Any) -> None:
        leave(child)
        cache = small(name)
        held = furnish(cache)
        child.tell("ready")
        lib.shmc_debug_hold_lock(cache._attachment.handle, 50 * 10**9, 1)
        del held

    child = fork(engine)
    assert child.listen() == "ready"
    until(lambda: held_by(name) == child.pid)
    child.kill(signal.SIGSTOP)
    until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    return Scene("stopped", name, (name,), 0, child)


def poisoned(name: str, fork: Fork) -> Scene:
    cache = small(name)
    held = furnish(cache)
    lib.shmc_set_state(cache._attachment.base, lib.SHMC_S_POISONED)
    for obj in held:
        with contextlib.suppress(shmcache.ShmCacheError):
            obj.release()
    with contextlib.suppress(shmcache.ShmCacheError):
        cache.close()
    return Scene("poisoned", name, (name,), 3)


def copied(name: str, fork: Fork, folder: Path) -> Scene:
    """The control file of a live one, copied and moved away; nothing is left on the host."""
    cache = small(name)
    held = furnish(cache)
    copy = folder / "control-file"
    copy.write_bytes((SHM / f"shmcache.{name}").read_bytes())
    for obj in held:
        obj.release()
    cache.close()
    shmcache.unlink(name)
    return Scene("copy", name, ("--file", str(copy)), 0)


def empty(name: str, fork: Fork) -> Scene:
    small(name).close()
    return Scene("empty", name, (name,), 0)


def full(name: str, fork: Fork) -> Scene:
    """No byte is free, and all of it is pinned."""

    def engine(child: Any) -> None:
        leave(child)
        cache = small(name)
        for i in range(64):
            store(cache, i, 65536)
        pins = cache.lookup(range(64), pin=True)
        child.tell("ready")
        child.await_parent()
        del pins

    child = fork(engine)
    assert child.listen() == "ready"
    return Scene("full", name, (name,), 0, child)


def garbage(name: str, fork: Fork) -> Scene:
    (SHM / f"shmcache.{name}").write_bytes(os.urandom(100_000))
    return Scene("garbage", name, (name,), 4)


def half_made(name: str, fork: Fork) -> Scene:
    (SHM / f"shmcache.{name}").write_bytes(b"")
    return Scene("half-made", name, (name,), 4)


KINDS: dict[str, Callable[..., Scene]] = {
    f.__name__: f for f in (live, dead, stopped, poisoned, copied, empty, full, garbage, half_made)
}


def held_by(name: str) -> int:
    from shmcache.inspect._reader import Reader

    lock = Reader.open(name).lock()
    return lock.pid if lock.in_transaction else 0


def until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)


@contextlib.contextmanager
def prompt() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < PROMPT
