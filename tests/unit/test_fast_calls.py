"""The calls of one key or object that do not go through cffi: arguments, references, and what they agree on."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
import re
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shmcache
from shmcache import _shmcore
from shmcache._core import fast, ffi


@pytest.fixture
def ns() -> Iterator[Any]:
    name = f"fast-{id(object()):x}"
    with shmcache.create(name, "1MiB", prefault="lazy") as cache:
        yield cache.default
    shmcache.unlink(name)


def put(ns: Any, key: Any) -> None:
    with ns.allocate(4096) as obj:
        assert ns.put(key, obj)


KEYS = [
    *(b"", b"key", b"x" * 64, "", "name", "\u00e4" * 32, 0, 1, -1, 2**63 - 1, -(2**63)),
    *(2**63, 2**64 - 1, 2**64, -(2**63) - 1, 2**500, -(2**500)),
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_one_key_and_many_agree_on_what_a_key_is(ns: Any, key: Any) -> None:
    put(ns, key)
    assert ns.keys() == [key]
    assert ns.contains(key) and ns.contains_many([key]) == [True]
    for found in (ns.get(key), ns.get_many([key])[0]):
        assert found is not None
        found.release()
    assert ns.pin(key) and ns.unpin_many([key]) == [True]
    assert ns.pin_many([key]) == [True] and ns.unpin(key) and not ns.unpin(key)
    with ns.allocate(4096) as again:
        assert not ns.put(key, again)
        assert ns.remove(key) and not ns.remove(key) and not ns.contains(key)
        assert ns.put_many([key], [again]) == [True] and ns.contains(key)


def test_keys_of_other_types_are_taken_or_refused_alike(ns: Any) -> None:
    put(ns, b"a")
    put(ns, 7)
    for same in (bytearray(b"a"), memoryview(b"a"), np.int64(7), np.uint8(7)):
        assert ns.contains(same)
        ns.get(same).release()
        assert ns.pin(same) and ns.unpin(same)
    for wrong in (True, None, 1.5, (1, b"a"), [b"a"], object()):
        for call in (ns.contains, ns.get, ns.pin, ns.unpin, ns.remove):
            with pytest.raises(TypeError):
                call(wrong)
    for long in (b"x" * 65, "x" * 65, "\u00e4" * 33, 2**512):
        for call in (ns.contains, ns.get, ns.pin, ns.unpin, ns.remove):
            with pytest.raises(ValueError, match="the most is 64"):
                call(long)
    with pytest.raises(UnicodeEncodeError):
        ns.contains("\ud800")
    with ns.allocate(4096) as obj:
        for wrong in (True, None, 1.5):
            with pytest.raises(TypeError):
                ns.put(wrong, obj)
        with pytest.raises(TypeError):
            ns.put(b"b", obj, parent=1.5)
        assert ns.put(b"b", obj, parent=np.int64(7))
    assert ns.cache.stats().counts.holds == 0


@pytest.mark.parametrize("key", [b"k", 2**64, bytearray(b"k")], ids=repr)
def test_an_error_names_the_call_whatever_the_key(ns: Any, key: Any) -> None:
    obj = ns.allocate(4096)
    ns.cache.close()
    for what in ("contains", "get", "pin", "unpin", "remove"):
        with pytest.raises(shmcache.SegmentClosedError, match=f"^{what}: "):
            getattr(ns, what)(key)
    with pytest.raises(shmcache.SegmentClosedError, match=r"^put: "):
        ns.put(key, obj)


def test_what_is_put_is_an_object_of_this_namespace(ns: Any) -> None:
    other = ns.cache.namespace("other")
    with other.allocate(4096) as obj, ns.allocate(4096) as mine:
        with pytest.raises(ValueError):
            ns.put(b"k", obj)
        for wrong in (None, b"bytes", SimpleNamespace(_holds=[])):
            with pytest.raises(TypeError):
                ns.put(b"k", wrong)
        mine.ref_count_up()
        assert ns.put(b"k", mine) and mine.published
        mine.ref_count_down()
        with pytest.raises(ValueError):
            ns.put(b"l", mine)
    with pytest.raises(shmcache.StaleHandleError):
        ns.put(b"l", mine)


def test_an_object_gives_back_what_it_holds_however_it_ends(ns: Any) -> None:
    put(ns, b"k")
    counts = lambda: ns.cache.stats().counts.holds  # noqa: E731
    obj = ns.get(b"k")
    obj.ref_count_up()
    obj.ref_count_down()
    assert counts() == 1 and obj.is_valid()
    obj.ref_count_down()
    assert counts() == 0 and not obj.is_valid()
    with pytest.raises(shmcache.StaleHandleError):
        obj.ref_count_down()
    obj.release()
    ends = [
        ns.get(b"k"),
        ns.get_many([b"k"])[0],
        ns.lookup([b"k"]).get(0),
        ns.allocate(4096),
        ns.reserve(b"w", 4096).obj,
    ]
    ends += ns.allocate_many(4096, n=2)
    assert counts() == len(ends)
    alive = list(map(weakref.ref, ends))
    ends.clear()
    assert counts() == 0 and not any(ref() for ref in alive)
    # in a cycle, by the collector
    obj = ns.get(b"k")
    ref, cycle = weakref.ref(obj), [obj]
    cycle.append(cycle)
    del obj, cycle
    gc.collect()
    assert ref() is None and counts() == 0
    obj = ns.get(b"k")
    obj.release(after=SimpleNamespace(query=lambda: True))
    with pytest.raises(TypeError):
        obj.release(before=None)


def test_what_is_freed_by_c_is_freed_last(ns: Any) -> None:
    """In garbage with cycles the collector finalizes first, then `__del__` runs: it called with freed addresses."""

    class User:
        def __init__(self, *used: Any) -> None:
            self.used = used
            self.me = self

        def __del__(self) -> None:
            for obj in self.used:
                obj.release()
                done.append(obj.is_valid())
            done.append(lookup.get(0) is not None)

    put(ns, b"k")
    done: list[bool] = []
    lookup = ns.lookup([b"k"], pin=True)
    a, obj = ns.cache._attachment, ns.get(b"k")
    for freed in (a.handle, obj._holds[0][0], lookup._owner):
        assert not gc.is_tracked(freed)
    del freed
    User(obj, ns.get(b"k"))
    del obj
    gc.collect()
    assert done == [False, False, True] and ns.cache.stats().counts.holds == 1
    lookup.release()
    with pytest.raises(TypeError):
        fast.untracked(1)


def test_a_view_keeps_its_object_for_whoever_reads_it_last() -> None:
    """A `__del__`, in garbage with cycles: the memory was unmapped under it."""

    class User:
        def __init__(self, view: memoryview) -> None:
            self.view = view
            self.me = self

        def __del__(self) -> None:
            read.append((bytes(self.view[:4]), cache.closed or cache.stats().counts.holds))

    read: list[Any] = []
    name = f"fast-{id(read):x}"
    with shmcache.create(name, "1MiB", prefault="lazy") as cache:
        for _ in range(2):
            obj = cache.allocate(4096)
            obj.byte_array[:4] = b"abcd"
            User(obj.byte_array)
            del obj
            if not read:
                gc.collect()
        cache.unlink(force=True)
    gc.collect()
    assert read == [(b"abcd", 1), (b"abcd", True)]


def test_a_handle_keeps_what_it_is_mapped_to(ns: Any) -> None:
    """One that was replaced detaches when it is dropped; by then the collector may have cleared all else."""
    put(ns, b"k")
    cache = ns.cache
    obj, old = ns.get(b"k"), cache._attachment
    handle = old.handle
    cache._reattach(old)
    cache.close()
    old.mapping = old.base = None
    obj._holds.clear()
    del obj, old
    gc.collect()
    del handle


def test_calls_keep_no_references(ns: Any) -> None:
    put(ns, b"k")
    held = ns.allocate(4096)
    watched = [ns, ns.cache, ns.cache._attachment, type(held), None, held._layout, "a key", 2**62, b"k" * 20]

    def everything() -> None:
        for key in (watched[6], watched[7], watched[8]):
            ns.contains(key)
            ns.get(key)
            ns.pin(key)
            ns.unpin(key)
            ns.remove(key)
        ns.get(b"k").release()
        ns.get_many([b"k", b"absent"])[0].ref_count_down()
        obj = ns.allocate(4096)
        ns.put(watched[6], obj)
        ns.put(watched[6], obj, parent=watched[7]) if not obj.published else None
        obj.release()
        ns.remove(watched[6])
        with contextlib.suppress(TypeError):
            ns.contains(1.5)
        fast.alike([held, held], ("_part", "_more"), "absent") if hasattr(held, "absent") else None
        fast.alike([SimpleNamespace(a=1, k=2**62)] * 3, ("a",), "k")

    for _ in range(50):
        everything()
    before = [sys.getrefcount(x) for x in watched]
    for _ in range(200):
        everything()
    after = [sys.getrefcount(x) for x in watched]
    assert all(abs(a - b) < 100 for a, b in zip(after, before, strict=True)), (before, after)
    held.release()


def test_wrong_arguments_are_errors_and_no_crash(ns: Any) -> None:
    a = ns.cache._attachment
    for call in (
        fast.contains,
        fast.get,
        fast.alloc,
        fast.put,
        fast.pin,
        fast.unpin,
        fast.remove,
        fast.objects,
        fast.alike,
    ):
        with pytest.raises(TypeError):
            call()
        with pytest.raises(TypeError):
            call(*[None] * 20)
    with pytest.raises(TypeError):
        fast.contains("no address", ns._index, b"k", 0)
    for number in (-1, 2**32, 2**64 - 1, 2**64, 1 << 80):  # the core would look at the low 32 bits
        with pytest.raises(OverflowError):
            fast.contains(a.at, number, b"k", 0)
        with pytest.raises(OverflowError):
            fast.get(a.at, ns._index, b"k", number, ns._make, a, ns, None, a.new_hold())
    for number in (2**31, 2**32, -(2**31) - 1, 1 << 80):
        with pytest.raises(OverflowError):
            fast.contains(a.at, ns._index, b"k", number)
    with pytest.raises(TypeError):
        fast.put(a.at, ns._index, b"k", 0, None, "no object", a, ns, "no type code")
    with pytest.raises(TypeError):
        fast.put("no address", ns._index, b"k", 0, None, "no object", a, ns)
    with pytest.raises(TypeError, match="below Held"):
        fast.get(a.at, ns._index, b"k", 0, dict, a, ns, None, a.new_hold())
    with pytest.raises(TypeError):
        fast.objects(a.at, 0, "holds", ns._make, a, ns, None)
    empty = fast.Held()
    with pytest.raises(AttributeError):
        empty.release()
    with ns.allocate(4096) as obj:
        for args, names in (((1, 2), {}), ((), {"before": None}), ((None,), {"after": None})):
            with pytest.raises(TypeError):
                obj.release(*args, **names)
        with pytest.raises(TypeError):
            obj.ref_count_down(1)
        assert ns.put(np.str_("k"), obj, part=np.int64(0)) and ns.get("k", part=np.int64(0)).release() is None
    assert ns.cache.stats().counts.holds == 0


def test_help_and_signatures_are_there() -> None:
    assert list(inspect.signature(shmcache.MemoryObj.release).parameters) == ["self", "after"]
    assert list(inspect.signature(shmcache.MemoryObj.ref_count_down).parameters) == ["self"]
    for method in (shmcache.MemoryObj.release, shmcache.MemoryObj.ref_count_down):
        assert method.__doc__ is not None and method.__doc__.startswith("Give back")


def test_alike() -> None:
    def item(a: Any = 1, b: Any = "x", k: Any = 3) -> Any:
        return SimpleNamespace(a=a, b=b, k=k)

    def ask(*items: Any) -> Any:
        return fast.alike(list(items), ("a", "b"), "k")

    assert ask() is False
    assert ask(item(), item(k=-1)) == (3).to_bytes(8, "big") + b"\xff" * 8
    assert ask(item(), item(k=2**63)) is True and ask(item(k=b"x")) is True
    assert ask(item(), item(b="y")) is False and ask(item(), item(a=2), item(k=b"x")) is False
    assert ask(item(a=1), item(a=1.0), item(a=True)) == (3).to_bytes(8, "big") * 3
    nan = float("nan")
    assert ask(item(a=nan), item(a=nan)) != False and ask(item(a=nan), item(a=float("nan"))) is False  # noqa: E712
    assert ask(item(), ffi) is False
    for missing in ([item(), SimpleNamespace(a=1)], [SimpleNamespace(a=1, b="x")]):
        with pytest.raises(AttributeError):
            ask(*missing)


def test_parts_read_as_the_structs_of_cffi_do(ns: Any) -> None:
    put(ns, b"k")
    one, many = ns.get(b"k"), ns.lookup([b"k"]).get(0)
    for field in ("offset", "size", "extent", "block", "gen", "meta_len", "published"):
        assert getattr(one._part, field) == getattr(many._part, field)
    assert one._part.meta == bytes(many._part.meta)[: many._part.meta_len]
    assert one.get_ref_count() == many.get_ref_count() == 3
    one.release()
    many.release()


FIELDS = ["_attachment", "_namespace", "_holds", "_part", "_layout", "_more"]


@pytest.mark.parametrize("field", FIELDS)
def test_an_object_whose_fields_were_taken_away_fails_and_does_not_crash(ns: Any, field: str) -> None:
    put(ns, b"k")
    for value in ("nothing", None, 5, (), "text", [5], [()], [(1,)], [(1, "x")], {}):
        for what in ("release", "ref_count_down", "put"):
            obj = ns.get(b"k")
            delattr(obj, field)
            if value != "nothing":
                setattr(obj, field, value)
            with contextlib.suppress(Exception):
                ns.put(b"q", obj) if what == "put" else getattr(obj, what)()
            with contextlib.suppress(Exception):
                obj.get_size()
    del obj
    assert ns.cache.stats().counts.holds == 0 and not ns.contains(b"q")


def test_holds_that_are_no_list_leave_no_error_behind(ns: Any) -> None:
    """A SystemError "returned a result with an exception set" was what the interpreter made of it."""
    obj = ns.get(b"k") or ns.allocate(4096)
    obj._holds = ()
    obj.release()  # it holds nothing
    with pytest.raises(shmcache.StaleHandleError):
        ns.put(b"k", obj)
    assert ns.cache.stats().counts.holds == 0


def test_an_object_cannot_be_copied_or_pickled(ns: Any) -> None:
    with ns.allocate(4096) as obj:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda x: pickle.dumps(x, 0)):
            with pytest.raises(TypeError):
                copied(obj)
        assert ns.cache.stats().counts.holds == 1


def test_where_a_damaged_extent_lies_is_never_told(ns: Any) -> None:
    """The core finds the damage after it has found the part: an object would be of bytes outside of the arena."""
    with ns.allocate(4321) as obj:
        assert ns.put(b"k", obj)
        tail = struct.pack("<Q", 4321) + obj._part.meta
    a = ns.cache._attachment
    control = ffi.buffer(a.base, a.size)
    at = bytes(control[:]).index(tail) - 56  # of the block's record, which begins with where it lies
    control[at : at + 4] = struct.pack("<I", 0x7FFFFFF0)
    with pytest.raises(shmcache.SegmentCorruptError):
        ns.get(b"k")
    with pytest.raises(shmcache.SegmentCorruptError):
        ns.contains(b"k")


def test_an_attachment_is_kept_while_its_address_is_in_use() -> None:
    """Another thread may attach again during a call; then nobody else keeps the handle and the mapping."""
    for path in Path(shmcache.__file__).parent.rglob("*.py"):
        for n, line in enumerate(path.read_text().splitlines(), 1):
            assert not re.search(r"_attach\w*(\(.*\))?\.(at|ticket_at)\b", line), f"{path.name}:{n}: {line.strip()}"


_TWICE = """
import importlib.util, sys
from shmcache import _shmcore
def load():
    spec = importlib.util.spec_from_file_location("another._shmfast", _shmcore.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


def test_the_module_can_be_loaded_again_and_goes(ns: Any) -> None:
    space: dict[str, Any] = {}
    exec(_TWICE, space)
    again = space["load"]()
    assert again.Held is not fast.Held and again.Part is not fast.Part
    a = ns.cache._attachment
    with pytest.raises(TypeError, match="below Held"):
        again.get(a.at, ns._index, b"k", 0, ns._make, a, ns, None, a.new_hold())
    held, module = weakref.ref(again.Held), weakref.ref(again)
    del again
    space.clear()
    gc.collect()
    assert held() is None and module() is None
    put(ns, b"k")  # what they had in common is still there
    ns.get(b"k").release()
    assert ns.cache.stats().counts.holds == 0


_ELSEWHERE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("shmcache._shmfast", {_shmcore.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.alike([], (), "") is False
"""


def test_another_interpreter_takes_nothing_with_it() -> None:
    """The names that a release looks up were those of the interpreter that had loaded the module last."""
    here = f"""{_TWICE}
import gc
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import shmcache
from shmcache._core import fast
fast = load()
class Object(fast.Held):
    def _release(self): return "slowly"
code = {_ELSEWHERE!r}
for _ in range(3):
    try:
        one = interpreters.create("legacy")
    except TypeError:
        one = interpreters.create(isolated=False)
    failed = getattr(interpreters, "run_string", None) or interpreters.exec
    assert failed(one, code) is None
    interpreters.destroy(one)
    gc.collect()
    [bytes(range(i % 200)).decode("latin1") for i in range(10000)]
    assert Object().release() == "slowly"
print("well")
"""
    done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, timeout=60)
    assert done.stdout == "well\n", done.stderr
