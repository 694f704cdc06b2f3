"""KeyboardInterrupt at any instant: no hold, no lock, no attachment is left behind.

Two ways: storms of real signals at random times, and, for the calls of every day, an interrupt at
each single place where CPython would deliver one.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hostile import (
    KIB,
    MIB,
    PROMPT,
    Patience,
    Stopwatch,
    assert_only_published,
    eventually,
    files_of,
    join,
    settle,
    small,
    store,
    uniform,
)

import shmcache
from shmcache import _shmfs
from shmcache._defer import Deferred
from shmcache.config import EngineConfig
from shmcache.messages import BatchedMessageSender, OpType

# ---- storms ---------------------------------------------------------------------------------------


class Interrupts:
    """SIGINT raises KeyboardInterrupt while armed, once, so that the loop itself survives."""

    def __init__(self) -> None:
        self.armed = False
        self.n = 0
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, _number: int, _frame: object) -> None:
        if self.armed:
            self.armed = False
            self.n += 1
            raise KeyboardInterrupt

    def survive(self, work: Callable[[], object], seconds: float, least: tuple[int, int] = (0, 0)) -> int:
        """Call `work` again and again, with `least` calls and interrupts; how often it was called."""
        calls = 0
        patience = Patience(seconds)
        while patience.lasts(calls > least[0] and self.n > least[1]):
            calls += 1
            try:
                self.armed = True
                work()
                self.armed = False
            except KeyboardInterrupt:
                pass
        self.armed = False
        return calls


def shower(child: Any, slowest: float, seed: int) -> None:
    """SIGINT to the child at random times, until it says what came of it."""
    dice = random.Random(seed)
    patience = Patience(0.0, longest=100.0)
    while patience.lasts(child.told(dice.random() * slowest)):
        child.kill(signal.SIGINT)


def open_descriptors() -> set[int]:
    found = set(map(int, os.listdir("/proc/self/fd")))
    for fd in list(found):
        try:
            os.fstat(fd)
        except OSError:  # the one with which they were listed
            found.remove(fd)
    return found


class Event:
    """Happens when told to."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


def everyday(cache: Any, dice: random.Random) -> Callable[[], None]:
    keys = [f"k{i}" for i in range(16)]

    def get() -> None:
        obj = cache.get(dice.choice(keys))
        if obj is not None:
            uniform(obj)
            obj.release()

    def get_dropped() -> None:
        kept = [cache.get(key) for key in keys[:4]]
        for obj in kept:
            if obj is not None:
                uniform(obj)

    def get_many() -> None:
        for obj in cache.get_many(keys):
            if obj is not None:
                with obj:
                    uniform(obj)

    def look() -> None:
        with cache.lookup(keys, pin=True) as hit:
            for i in range(hit.n):
                with hit.get(i) as obj:
                    uniform(obj)

    def look_and_drop() -> None:
        hit = cache.lookup(keys[: dice.randrange(1, 16)], pin=True)
        if hit.n:
            kept = hit.get(0)
            uniform(kept)

    def write() -> None:
        key = dice.choice(keys)
        with cache.allocate(16 * KIB) as obj:
            obj.byte_array[:] = bytes([dice.randrange(256)]) * (16 * KIB)
            cache.put(key, obj)

    def write_dropped() -> None:
        obj = cache.allocate(16 * KIB)
        obj.byte_array[:] = b"\x01" * (16 * KIB)
        cache.put(dice.choice(keys), obj)

    def write_many() -> None:
        objs = cache.allocate_many(16 * KIB, n=4, timeout=1.0)
        for obj in objs:
            obj.byte_array[:] = b"\x02" * (16 * KIB)
        cache.put_many(keys[:4], objs)
        for obj in objs:
            obj.release()

    def reserve() -> None:
        with cache.reserve(dice.choice(keys), 16 * KIB) as r:
            if r.state == "WRITE":
                r.obj.byte_array[:] = b"\x03" * (16 * KIB)
                if dice.random() < 0.5:
                    r.put()

    def references() -> None:
        obj = cache.get(dice.choice(keys))
        if obj is None:
            return
        obj.ref_count_up()
        obj.pin()
        obj.ref_count_down()
        obj.unpin()
        obj.ref_count_up()
        obj.release()

    def remove() -> None:
        cache.remove(dice.choice(keys))

    def full() -> None:
        cache.allocate(cache.capacity, evict=False, timeout=0.002)

    calls = [get, get_dropped, get_many, look, look_and_drop, write, write_dropped, write_many, reserve, references]
    calls += [remove, full]
    return lambda: dice.choice(calls)()


def nothing_held(cache: Any) -> None:
    """What an interrupted frame had is gone with the frame."""
    sys.last_value = sys.last_traceback = None
    gc.collect()
    eventually(lambda: settle(cache) or cache.stats().counts.holds == 0, f"no hold is left: {cache.stats().counts}")
    assert_only_published(cache)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_storm_of_interrupts_in_everyday_calls(name, fork):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")

    def main(child: Any) -> None:
        cache = join(name)
        work = everyday(cache, random.Random(seed))
        interrupts = Interrupts()
        child.tell("ready")
        calls = interrupts.survive(work, 4.0, least=(500, 200))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing_held(cache)
        child.tell(f"{calls} {interrupts.n}")
        child.await_parent()
        assert cache.verify() == []

    with small(name, capacity=1 * MIB) as cache:
        for i in range(8):
            store(cache, f"k{i}", i + 1, 16 * KIB)
        child = fork(main)
        assert child.listen() == "ready"
        shower(child, 0.002, seed)
        said = child.listen()
        assert said, f"the child ended with {child.wait()}"
        print(f"calls, interrupts: {said}")
        calls, interrupts = map(int, said.split())
        assert calls > 500 and interrupts > 200
        assert cache.stats().counts.holds == 0
        assert cache.stats().lock.recoveries == 0
        assert_only_published(cache)
        child.go()
        assert child.wait() == 0
    shmcache.unlink(name)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_storm_of_interrupts_in_what_waits_for_events(name, fork):
    """However often it was interrupted, what waits for an event is done once that has happened."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")

    def main(child: Any) -> None:
        watcher = join(name)
        interrupts = Interrupts()
        child.tell("ready")
        handles = interrupted = 0
        patience = Patience(3.0)
        while patience.lasts(handles > 3 and interrupted > 20):
            # a handle of its own: its thread starts among interrupts
            cache = join(name)
            event = Event()

            def later(cache: Any = cache, event: Event = event) -> None:
                with cache.allocate(4 * KIB) as obj:
                    obj.byte_array[:] = b"\x04" * (4 * KIB)
                    cache.put("later", obj, after=event)
                found = cache.get("k0")
                found.release(after=event)
                cache.lookup(["k0", "k1"], pin=True).release(after=event)

            before = interrupts.n
            interrupts.survive(later, 0.02)
            interrupted += interrupts.n - before
            gc.collect()
            cache.get("k0").release(after=event)
            event.happened = True
            eventually(lambda: watcher.stats().counts.holds == 0 or gc.collect() < 0, "the thread does its work", 20.0)
            found = watcher.get("later")
            if found is not None:
                with found:
                    uniform(found, 4)
            watcher.remove("later")
            cache.close()
            handles += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing_held(watcher)
        child.tell(f"{handles} {interrupted}")
        child.await_parent()

    with small(name, capacity=4 * MIB) as cache:
        for i in range(2):
            store(cache, f"k{i}", i + 1)
        child = fork(main)
        assert child.listen() == "ready"
        shower(child, 0.001, seed)
        said = child.listen()
        assert said, f"the child ended with {child.wait()}"
        print(f"handles, interrupts: {said}")
        handles, interrupted = map(int, said.split())
        assert handles > 3 and interrupted > 20
        child.go()
        assert child.wait() == 0
        cache.reap()
        assert_only_published(cache)
    shmcache.unlink(name)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_storm_of_interrupts_in_opening_and_closing(name, fork):
    """Neither the handshake, which would lock everybody out, nor presence, nor a slot stays behind."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")

    def main(child: Any) -> None:
        interrupts = Interrupts()

        def open_and_close() -> None:
            with small(name, timeout=5.0) as cache, cache.get("k") as obj:
                uniform(obj, 7)

        open_and_close()
        gc.collect()
        descriptors = open_descriptors()
        child.tell("ready")
        calls = interrupts.survive(open_and_close, 3.0, least=(100, 30))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.collect()
        child.tell(f"{calls} {interrupts.n} {len(open_descriptors() - descriptors)}")
        child.await_parent()

    with small(name) as cache:
        store(cache, "k", 7)
        child = fork(main)
        assert child.listen() == "ready"
        shower(child, 0.004, seed)
        said = child.listen()
        assert said, f"the child ended with {child.wait()}"
        print(f"opens, interrupts, descriptors left: {said}")
        calls, interrupts, descriptors = map(int, said.split())
        assert calls > 100 and interrupts > 30
        # the process lives, and must have given back everything
        with join(name, timeout=3.0) as other:
            assert other.stats().counts.attachments == 2, "slots of interrupted opens came back"
            assert other.stats().counts.holds == 0
        cache.close()
        fd = _shmfs.open_shm(f"/shmcache.{name}")
        try:
            assert not _shmfs.is_locked(fd, _shmfs.HANDSHAKE_BYTE)
            assert not _shmfs.is_locked(fd, _shmfs.PRESENCE_BYTE), "nobody is attached any more"
        finally:
            os.close(fd)
        assert descriptors < interrupts / 4, "descriptors of interrupted opens were closed"
        child.go()
        assert child.wait() == 0
    with small(name) as cache:
        assert cache.contains("k")
        assert_only_published(cache)
    shmcache.unlink(name)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_storm_of_interrupts_in_creating_and_removing(name, fork):
    """An interrupted creation leaves nothing behind, or what the next one can use or replace."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")

    def main(child: Any) -> None:
        interrupts = Interrupts()

        def create_and_remove() -> None:
            with small(name, region_bytes=1 * MIB, timeout=5.0) as cache:
                store(cache, "k", 7)
            shmcache.unlink(name)

        child.tell("ready")

        def guarded() -> None:
            with contextlib.suppress(shmcache.SegmentNotFoundError, AttributeError):
                create_and_remove()

        calls = interrupts.survive(guarded, 2.0, least=(50, 50))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.collect()
        child.tell(f"{calls} {interrupts.n}")
        child.await_parent()

    child = fork(main)
    assert child.listen() == "ready"
    shower(child, 0.004, seed)
    said = child.listen()
    assert said, f"the child ended with {child.wait()}"
    print(f"rounds, interrupts: {said}")
    calls, interrupts = map(int, said.split())
    assert calls > 50 and interrupts > 50
    with small(name, region_bytes=1 * MIB, timeout=3.0) as cache:
        assert len(files_of(name)) == 1 + 4, "of one generation"
        assert cache.stats().counts.attachments == 1, "slots of interrupted opens came back"
        cache.clear()
        assert_only_published(cache)
    child.go()
    assert child.wait() == 0
    shmcache.unlink(name, force=True)
    assert files_of(name) == []


@pytest.mark.parametrize("what", ["allocate", "reserve"])
def test_ctrl_c_ends_a_wait_within_a_slice_or_two(name, fork, what):
    with small(name) as cache:
        keep = cache.allocate(cache.capacity) if what == "allocate" else cache.reserve("k", 4096)

        def main(child: Any) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            mine = join(name)
            pending = mine.reserve("k", 4096) if what == "reserve" else None
            child.tell("waiting")
            try:
                if pending is not None:
                    pending.wait(timeout=60.0)
                else:
                    mine.allocate(4096, timeout=60.0)
            except KeyboardInterrupt:
                child.tell("interrupted")
            child.await_parent()

        child = fork(main)
        child.listen()
        eventually(lambda: cache.stats().waits >= 1, "it waits")
        watch = Stopwatch()
        child.kill(signal.SIGINT)
        assert child.listen() == "interrupted"
        assert watch.seconds < PROMPT
        child.go()
        child.wait()
        keep.release()
        cache.reap()
        assert cache.stats().counts.holds == 0
        assert_only_published(cache)
    shmcache.unlink(name)


# ---- everywhere -----------------------------------------------------------------------------------


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th place inside shmcache where CPython looks for signals.

    It looks at the start of a Python function, at a jump back, and after a call to a function that is
    not Python's own.
    """

    _FOLDER = os.path.dirname(shmcache.__file__)
    _FINALIZERS = ("__del__", "__call__")  # Python swallows what they raise

    def __init__(self, n: int, code: str = _FOLDER) -> None:
        self._left, self._code = n, code
        self.hit = False
        self.where = "nowhere"
        self._before: dict[Any, str] = {}  # the operation that each frame did last
        self._called_python: set[Any] = set()

    def _global(self, frame: Any, event: str, arg: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self._code):
            return None
        if frame.f_code.co_name in self._FINALIZERS:
            return None
        frame.f_trace_opcodes = True
        if frame.f_back is not None:
            self._called_python.add(frame.f_back)
        return self._local

    def _local(self, frame: Any, event: str, arg: object) -> Any:
        if event == "opcode":
            before = self._before.get(frame, "RESUME")
            at = frame.f_code.co_code[frame.f_lasti]
            self._before[frame] = dis.opname[at]
            returned = frame in self._called_python
            self._called_python.discard(frame)
            looks = before.startswith(("RESUME", "JUMP_BACKWARD")) or (before.startswith("CALL") and not returned)
            if looks and dis.opname[at] != "PUSH_EXC_INFO":  # there the call has failed
                self._left -= 1
                if self._left == 0:
                    self.hit = True
                    self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
                    raise KeyboardInterrupt from None
        elif event == "return":
            self._before.pop(frame, None)
            if frame.f_back is not None:
                self._called_python.add(frame.f_back)
        return self._local

    def run(self, work: Callable[[], object]) -> None:
        sys.settrace(self._global)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            self._before.clear()
            self._called_python.clear()


def interrupted_everywhere(
    work: Callable[[], object], check: Callable[[str], object], stride: int = 1, **where: str
) -> int:
    """`work` with an interrupt at place 1, 2, 3 ... until it gets through; `check` after each."""
    n = random.randrange(1 - stride, 1)
    while True:
        n += stride
        at = InterruptAt(n, **where)
        at.run(work)
        check(f"place {n}, {at.where}")
        if not at.hit:
            return n - 1


EVERYDAY = ["get", "lookup", "lookup dropped", "store", "store dropped", "many", "reserve", "references", "pin", "wait"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("what", EVERYDAY)
def test_an_interrupt_at_every_place_of_an_everyday_call(name, what):
    with small(name) as cache:
        for i in range(4):
            store(cache, f"k{i}", i + 1)
        keys = [f"k{i}" for i in range(4)]
        cache.pin("k3")  # of another round: stays
        kept: list[Any] = []

        def get() -> None:
            with cache.get("k0") as obj:
                uniform(obj, 1)

        def lookup() -> None:
            with cache.lookup(keys, pin=True) as hit:
                for i in range(hit.n):
                    with hit.get(i) as obj:
                        uniform(obj, i + 1)

        def lookup_dropped() -> None:
            kept.append(cache.lookup(keys, pin=True))
            kept.append(kept[-1].get(1))

        def store_one() -> None:
            with cache.allocate(4096) as obj:
                obj.byte_array[:] = b"\x09" * 4096
                cache.put("new", obj, parent="k0")

        def store_dropped() -> None:
            kept.append(cache.allocate(4096))
            cache.put("new", kept[-1])

        def many() -> None:
            objs = cache.allocate_many(4096, n=3)
            cache.put_many(["a", "b", "c"], objs)
            kept.extend(objs)
            kept.extend(cache.get_many(keys))

        def reserve() -> None:
            with cache.reserve("new", 4096) as r:
                if r.state == "WRITE":
                    r.put()

        def references() -> None:
            obj = cache.get("k0")
            kept.append(obj)
            obj.ref_count_up()
            obj.pin()
            obj.get_ref_count()
            obj.ref_count_down()
            obj.unpin()
            obj.ref_count_up()
            obj.release()

        def pin() -> None:
            if cache.pin("k0"):
                cache.unpin("k0")
            cache.contains("k0")
            cache.touch(keys)

        def wait() -> None:
            cache.allocate(cache.capacity, evict=False, timeout=0.001)

        work = {
            "get": get, "lookup": lookup, "lookup dropped": lookup_dropped, "store": store_one,
            "store dropped": store_dropped, "many": many, "reserve": reserve, "references": references, "pin": pin,
            "wait": wait,
        }[what]  # fmt: skip

        def check(place: str) -> None:
            kept.clear()
            gc.collect()
            while cache.unpin("k0"):
                pass
            settle(cache)
            assert cache.stats().counts.holds == 1, f"{place}: {cache.stats().counts}"
            for key in ("new", "a", "b", "c"):
                cache.remove(key)
            s = cache.stats()
            assert s.bytes.used == 4 * 4096, f"{place}: {s.bytes}"

        work()  # what is only done once is not of interest
        check("once")
        places = interrupted_everywhere(work, check)
        print(f"{places} places")
        assert places >= 10
        assert cache.unpin("k3")
        assert_only_published(cache)
    shmcache.unlink(name)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("what", ["a thread that waits for an event", "messages"])
def test_an_interrupt_at_every_place_of_starting_and_stopping_a_thread(name, what):
    """Also inside threading.py: it stays an interrupt, and whoever comes next waits for nothing."""
    with small(name) as cache:
        store(cache, "k", 7)
        deferred: list[Any] = []

        def wait_for_an_event() -> None:
            deferred.append(Deferred(name))
            deferred[-1].add(Event(), lambda known: None)

        def check(place: str) -> None:
            while deferred:
                watch = Stopwatch()
                deferred.pop().close(0.0)
                assert watch.seconds < PROMPT, place

        sender = BatchedMessageSender(
            SimpleNamespace(worker_id=0), EngineConfig(), "here", SimpleNamespace(put_msg=lambda message: None)
        )

        def send() -> None:
            sender.add_kv_op(OpType.ADMIT, 7)
            sender.flush()

        def sends(place: str) -> None:
            watch = Stopwatch()
            assert sender.flush() and watch.seconds < PROMPT, place

        work, then = (send, sends) if what == "messages" else (wait_for_an_event, check)
        places = interrupted_everywhere(work, then, code=threading.__file__)
        print(f"{places} places")
        assert places >= 10
        sender.close()
    shmcache.unlink(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("thread", ["running", "not yet started"])
def test_an_interrupt_at_every_place_of_what_waits_for_an_event(name, thread):
    """An interrupted put(after=...) publishes its own bytes or nothing, and its holds go in any case."""
    with small(name) as watcher:
        cache = watcher if thread == "running" else join(name)
        event = Event()
        leaked = 0
        problems: list[str] = []

        def work() -> None:
            with cache.allocate(4096) as obj:
                obj.byte_array[:] = b"\x11" * 4096
                cache.put("later", obj, after=event)
            found = cache.get("k")
            found.release(after=event)

        def check(place: str) -> None:
            nonlocal cache, event, leaked
            gc.collect()
            others = [cache.allocate(4096) for _ in range(4)]
            for other in others:
                other.byte_array[:] = b"\xee" * 4096  # being written, and never put
            last = cache.get("k")
            last.release(after=event)  # goes when all that was queued before it is done
            event.happened = True
            end = time.monotonic() + 2.0
            while watcher.stats().counts.holds > len(others) + leaked and time.monotonic() < end:
                settle(cache)
                gc.collect()
                time.sleep(0.0005)
            left = watcher.stats().counts.holds - len(others) - leaked
            if left > 0:
                problems.append(f"{place}: {left} holds are never given back")
            found = watcher.get("later")
            if found is not None:
                with found:
                    if set(bytes(found.byte_array)) != {0x11}:
                        problems.append(f"{place}: published bytes that somebody is writing")
            for other in others:
                with contextlib.suppress(shmcache.ShmCacheError):
                    other.release()
            if thread != "running":
                cache._close(0.0)  # does not wait for events that will not happen
                cache = join(name)
            leaked = watcher.stats().counts.holds
            watcher.remove("later")
            event = Event()

        store(watcher, "k", 7)
        if thread == "running":
            work()
            check("once")
        places = interrupted_everywhere(work, check)
        print(f"{places} places")
        if cache is not watcher:
            cache.close()
        assert places >= 20
        assert problems == [], f"{len(problems)} of {places} places:\n" + "\n".join(problems)
        assert_only_published(watcher)
    shmcache.unlink(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("what", ["attach", "create", "unlink"])
def test_an_interrupt_at_every_place_of_opening_and_closing(scrap, fork, what):
    """Afterwards the name can be opened at once, with one attachment, and nothing of this process is in the way."""
    child = fork(lambda child: interrupted_opening_and_closing(child, scrap, what))
    places, _, problems = child.listen(100).partition(" ")
    assert places, f"the child ended with {child.wait()}"
    assert child.wait() == 0
    print(f"{places} places")
    assert int(places) > 50
    found = json.loads(problems)
    assert found == [], f"{len(found)} problems:\n" + "\n".join(found)


def interrupted_opening_and_closing(child: Any, name: str, what: str) -> None:
    def attach() -> None:
        with join(name, timeout=3.0) as cache:
            assert cache.contains("k")

    def create() -> None:
        with small(name, timeout=3.0) as cache:
            store(cache, "k", 7)

    def remove() -> None:
        shmcache.unlink(name)

    work = {"attach": attach, "create": create, "unlink": remove}[what]
    if what != "create":
        create()
    problems: list[str] = []
    lost: list[str] = []
    attachments = 1
    gc.collect()
    descriptors = open_descriptors()

    def locked(byte: int) -> bool:
        try:
            fd = _shmfs.open_shm(f"/shmcache.{name}")
        except FileNotFoundError:
            return False
        try:
            return _shmfs.is_locked(fd, byte)
        finally:
            os.close(fd)

    def check(place: str) -> None:
        nonlocal attachments
        gc.collect()
        if locked(_shmfs.HANDSHAKE_BYTE):
            problems.append(f"{place}: the handshake stays locked, the name is unusable for everybody")
        if locked(_shmfs.PRESENCE_BYTE):
            problems.append(f"{place}: presence stays behind, the segment can never be replaced")
        for fd in open_descriptors() - descriptors:
            # between a system call and the name that its result gets, a descriptor can be lost: no more than that
            lost.append(place)
            os.close(fd)
        with small(name, timeout=3.0) as cache:
            now = cache.stats().counts.attachments
            if now > attachments:
                problems.append(f"{place}: a slot stays taken for as long as this process lives")
            attachments = now
            if cache.verify():
                problems.append(f"{place}: {cache.verify()}")
            store(cache, "k", 7)
        if len(files_of(name)) != 2:
            problems.append(f"{place}: {files_of(name)}")
        if what == "create":
            shmcache.unlink(name)
            attachments = 1

    # creating has too many for all of them
    places = interrupted_everywhere(work, check, stride=5 if what == "create" else 1)
    print(f"descriptors lost: {lost}", file=sys.stderr)
    if len(lost) > 12:
        problems.append(f"descriptors stay open: {lost}")
    child.tell(f"{places} {json.dumps(problems)}")
