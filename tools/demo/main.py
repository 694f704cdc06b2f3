"""The demo: two engines and a restart share the KV of a real language model.

Engine A reads a manual and publishes its KV. Engine B answers questions about it without
reading it, outlives A's death in the middle of a store, and goes on. Engine C starts when
both are gone and is warm at once. Exits with 0 only if every check on the way holds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from pathlib import Path

import numpy as np
from driver import Answer, Stored
from engine import Engine
from layout import CHUNK_BYTES, CHUNK_TOKENS, MODEL, namespace_name, part_shape
from options import Options, mib, parse
from segment import Run
from worker import WorkerError

import shmcache

_HERE = Path(__file__).parent
_LOGIT_TOLERANCE = 1e-3
_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
_MANUAL = _SYSTEM + "<|im_start|>user\n" + (_HERE / "manual.txt").read_text()
_APPENDIX = "\n" + (_HERE / "appendix.txt").read_text()
_ASK = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_FIRST = [_MANUAL, _ASK.format("What is the telephone number of the fitter on duty?")]
_SECOND = [_MANUAL, _APPENDIX, _ASK.format("What may not be lent to the crews of the ships?")]


class Checks:
    """What the demo claims; each claim is printed as it is tested."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def that(self, claim: str, holds: bool, detail: str = "") -> None:
        """Test one claim."""
        print(f"  {'ok  ' if holds else 'FAIL'} {claim}{f' ({detail})' if detail else ''}", flush=True)
        if not holds:
            self.failed.append(claim)

    def warm(self, what: str, answer: Answer, hits: int, cold: Answer) -> None:
        """Compare an answer that used the cache with the cold one to the same prompt."""
        prefix = answer.prefix
        print(
            f"  {what}: first token after {answer.first_token_s:.3f} s,"
            f" {cold.first_token_s / answer.first_token_s:.1f} times sooner than cold; loaded"
            f" {_copied(prefix.hits, prefix.load_s)}\n  it says {answer.text!r}"
        )
        self.that(f"{hits} chunks of {CHUNK_TOKENS} tokens are hits", prefix.hits == hits == prefix.chunks)
        equal = answer.tokens == cold.tokens
        difference = float(np.abs(answer.logits - cold.logits).max()) if equal else float("nan")
        detail = f"{len(cold.tokens)} tokens, largest logit difference {difference:.1e}"
        self.that("tokens and logits are those of the cold run", equal and difference < _LOGIT_TOLERANCE, detail)


def story(run: Run, checks: Checks) -> None:
    """Engines A, B and C in turn."""
    with contextlib.ExitStack() as engines:
        _say("Engine A reads a manual and publishes its KV")
        a = engines.enter_context(_start(run, "A"))
        stored: Stored = a.call("publish", [_MANUAL])
        _tell_stored(stored)
        published = stored.chunks
        checks.that("all of it is new", stored.new_parts == published * run.ranks > 0)

        _say("Engine B, another process, is asked about the same manual")
        b = engines.enter_context(_start(run, "B"))
        cold: Answer = b.call("ask", _FIRST, False)
        print(f"  cold: first token after {cold.first_token_s:.3f} s, {cold.prefix.tokens:,} tokens computed")
        checks.warm("warm", b.call("ask", _FIRST, True), published, cold)

        _say("Engine A is killed in the middle of a store")
        half = a.call("publish_half", _SECOND)
        during = b.call("used_bytes")
        a.kill()
        print(f"  SIGKILL to A's {len(a.processes)} processes; a rank had {mib(half)} half written, unpublished")
        checks.that("the half-written chunk is not a hit", b.call("hits", _SECOND) == published)
        report: shmcache.ReapReport = b.call("reap")
        print(f"  reaped {report.slots} dead attachments, {report.blocks} unpublished block(s), {report.holds} hold(s)")
        back = during - b.call("used_bytes")
        checks.that("the dead process's memory is free again", back >= half, mib(back))

        _say("Engine B goes on, with a longer prompt")
        stored = b.call("publish", _SECOND)
        _tell_stored(stored)
        longer: Answer = b.call("ask", _SECOND, False)
        checks.warm("warm", b.call("ask", _SECOND, True), published + 1, longer)
        b.stop()

        _say("Everything is stopped; engine C starts")
        alive = [info.alive for info in shmcache.segments() if info.name == run.segment]
        checks.that("the segment is there and nobody is attached", alive == [0])
        c = engines.enter_context(_start(run, "C"))
        checks.warm("its first request", c.call("ask", _FIRST, True), published, cold)
        checks.warm("the longer prompt", c.call("ask", _SECOND, True), published + 1, longer)
        c.stop()
    inventory(run, checks, published + 1)


def inventory(run: Run, checks: Checks, chunks: int) -> None:
    """Print what the segment holds, from a process that has only now attached."""
    _say("What is left in the cache")
    with shmcache.attach(run.segment) as cache:
        stats = cache.stats()
        print(f"  {mib(stats.bytes.used)} of {mib(stats.bytes.capacity)} used, {mib(stats.bytes.pinned)} pinned")
        print(f"  {stats.counts.chunks} chunks, {stats.counts.parts} parts, {stats.counts.holds} holds")
        print(f"  {stats.hits} hits, {stats.misses} misses, {stats.stores} stores, {stats.duplicates} duplicates")
        keys = cache.namespace(namespace_name(run.ranks)).keys()
        print(f"  keys, coldest first: {' '.join(key.hex()[:8] for key in keys)}")
        checks.that("the chunks published, and no others, are there", len(keys) == chunks)
        violations = cache.verify()
        checks.that("the segment's invariants hold", not violations, "; ".join(violations))


def main(options: Options) -> int:
    """Run the story; whatever happens, leave no process and no shared memory behind."""
    run = Run(f"demo-{os.getpid()}-{secrets.token_hex(3)}", options.capacity, options.ranks)
    print(f"{MODEL}, float32. An engine is a driver, which runs the whole model, and {run.ranks} rank process(es),")
    print(f"each with its share of the KV: {list(part_shape(run.ranks))}, {mib(CHUNK_BYTES // run.ranks)} a chunk.")
    print(f"Segment {run.segment!r}, {mib(run.capacity)}.")
    began = time.perf_counter()
    checks = Checks()
    problem = ""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        story(run, checks)
    except KeyboardInterrupt:
        problem = "interrupted"
    except (WorkerError, shmcache.ShmCacheError) as error:
        problem = str(error)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _clean_up(run, options.keep, checks)
    seconds = time.perf_counter() - began
    if problem or checks.failed:
        print(f"\nFAILED after {seconds:.0f} s: {problem or '; '.join(checks.failed)}", file=sys.stderr)
        return 1
    print(f"\nAll as it should be, after {seconds:.0f} s.")
    return 0


def _clean_up(run: Run, keep: bool, checks: Checks) -> None:
    if keep:
        print(f"\nKept: look with shmcache-inspect, remove with shmcache.unlink({run.segment!r})")
        return
    with contextlib.suppress(shmcache.SegmentNotFoundError):
        shmcache.unlink(run.segment, force=True)
    left = sorted(path.name for path in Path("/dev/shm").glob(f"shmcache.{run.segment}*"))
    checks.that("nothing is left in /dev/shm", not left, " ".join(left))


def _start(run: Run, name: str) -> Engine:
    began = time.perf_counter()
    engine = Engine(run, f"engine {name}")
    print(f"  {len(engine.processes)} processes ready after {time.perf_counter() - began:.1f} s", flush=True)
    return engine


def _tell_stored(stored: Stored) -> None:
    hits = stored.prefix.hits
    print(
        f"  {hits} of {stored.prefix.chunks} chunks were there;"
        f" {stored.prefix.tokens - hits * CHUNK_TOKENS:,} tokens computed in {stored.prefill_s:.2f} s;"
        f" stored {_copied(stored.chunks, stored.store_s)}, {stored.new_parts} part(s) new",
        flush=True,
    )


def _copied(chunks: int, seconds: float) -> str:
    nbytes = chunks * CHUNK_BYTES
    return f"{mib(nbytes)} in {seconds * 1000:.0f} ms ({nbytes / seconds / 1e9:.1f} GB/s)"


def _say(title: str) -> None:
    print(f"\n{title}", flush=True)


if __name__ == "__main__":
    sys.exit(main(parse()))
