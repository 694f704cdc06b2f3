"""What LMCache promises of its AddressManager (T-M), for both makers, from one thread and from many."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from contract_differences import expected
from contract_kits import in_threads

from shmcache import errors
from shmcache.allocators import AddressManager

P = 4096
Blocks = list[tuple[int, int]]


def disjoint(blocks: Blocks) -> bool:
    ordered = sorted(blocks)
    return all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ordered))


def sound(m: Any) -> bool:
    return bool(m.check_consistency()) and m.get_free_size() + m.total_allocated_size == m.get_heap_size()


def test_T_M1_a_new_range_is_free(maker: Any) -> None:
    for m, align in ((maker.AddressManager(10 * P), P), (maker.AddressManager(10 * P, align_bytes=1024), 1024)):
        assert m.total_allocated_size == 0 and m.get_free_size() == 10 * P == m.get_heap_size() and sound(m)
        assert m.compute_aligned_size(1) == align


def test_T_M2_sizes_are_rounded_up(maker: Any) -> None:
    m = maker.AddressManager(10 * P)
    assert [m.compute_aligned_size(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]
    assert maker.AddressManager(10 * P, align_bytes=256).compute_aligned_size(257) == 512


def test_T_M3_pieces_do_not_overlap_and_add_up(maker: Any) -> None:
    m = maker.AddressManager(10 * P)
    first = m.allocate(100)
    assert first[0] >= 0 and first[1] == P
    blocks = [first, *(m.allocate(n) for n in (1000, 2000, 5000))]
    assert [n for _, n in blocks] == [4096, 4096, 4096, 8192]
    assert disjoint(blocks) and m.total_allocated_size == 5 * P and sound(m)


def test_T_M4_an_exact_size(maker: Any) -> None:
    m = maker.AddressManager(P)
    assert m.allocate(P) == (0, P) and m.get_free_size() == 0 and sound(m)


def test_T_M5_no_room_is_a_runtime_error(maker: Any) -> None:
    m = maker.AddressManager(2 * P)
    with pytest.raises(RuntimeError):
        m.allocate(3 * P)
    m.allocate(2 * P)
    with pytest.raises(RuntimeError, match="memory"):
        m.allocate(1)
    for wrong in (0, -1):
        with pytest.raises(ValueError):
            m.allocate(wrong)
        with pytest.raises(ValueError):
            m.batched_allocate(wrong, 2)
    assert m.total_allocated_size == 2 * P and sound(m)


def test_T_M6_batches(maker: Any) -> None:
    m = maker.AddressManager(10 * P)
    assert m.batched_allocate(100, 1) == [(0, P)]
    five = m.batched_allocate(1000, 5)
    assert len(five) == 5 and disjoint(five) and {n for _, n in five} == {P}
    before = m.get_free_size()
    assert m.batched_allocate(4096, 0) == [] and m.get_free_size() == before
    assert len(m.batched_allocate(P, 4)) == 4 and m.get_free_size() == 0 and sound(m)


def test_T_M7_a_batch_that_does_not_fit_changes_nothing(maker: Any) -> None:
    m = maker.AddressManager(4 * P)
    with pytest.raises(RuntimeError):
        m.batched_allocate(P, 5)
    assert m.get_free_size() == 4 * P and sound(m)
    m.allocate(P)
    with pytest.raises(RuntimeError):
        m.batched_allocate(P, 4)
    with pytest.raises(RuntimeError):
        m.batched_allocate(P, -1)
    assert m.get_free_size() == 3 * P and sound(m)
    assert len(m.batched_allocate(P, 3)) == 3


def test_T_M8_a_batch_takes_holes_and_what_was_added(maker: Any) -> None:
    m = maker.AddressManager(8 * P)
    blocks = [m.allocate(P) for _ in range(8)]
    for address, size in blocks[::2]:
        m.free(address, size)
    again = m.batched_allocate(P, 4)
    assert sorted(again) == blocks[::2] and m.get_free_size() == 0 and sound(m)
    m.sbrk(4 * P)
    more = m.batched_allocate(P, 4)
    assert sorted(more) == [(i * P, P) for i in range(8, 12)] and sound(m)


@pytest.mark.parametrize("order", ["successor", "predecessor", "both"])
def test_T_M9_neighbouring_holes_become_one(maker: Any, order: str) -> None:
    m = maker.AddressManager(4 * P)
    blocks = [m.allocate(P) for _ in range(4)]
    for i in {"successor": (1, 0), "predecessor": (0, 1), "both": (0, 2, 1)}[order]:
        m.free(*blocks[i])
        assert sound(m)
    n = 3 if order == "both" else 2
    assert m.allocate(n * P) == (0, n * P) and sound(m)


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_T_M9_all_freed_is_one_whole(maker: Any, order: str) -> None:
    m = maker.AddressManager(64 * P)
    blocks = [m.allocate(n * P) for n in (1, 2, 3, 1, 5, 8, 1, 1, 13, 21, 2, 6)]
    if order == "reversed":
        blocks.reverse()
    else:
        random.Random(7).shuffle(blocks)
    for address, size in blocks:
        m.free(address, size)
        assert sound(m)
    assert m.get_free_size() == 64 * P and m.allocate(64 * P) == (0, 64 * P)


def test_T_M9_a_wrong_free_changes_nothing(maker: Any) -> None:
    """LMCache's believes every free, and its check then sees nothing."""
    m = maker.AddressManager(4 * P)
    address, size = m.allocate(2 * P)
    m.allocate(P)
    m.free(address, size)
    with expected(maker, "not zero", ours=pytest.raises(errors.StaleHandleError), lmcache=nullcontext()):
        m.free(address, size)
    assert m.total_allocated_size == expected(maker, "not zero", ours=P, lmcache=-P)
    assert m.check_consistency()
    if maker.ours:
        with pytest.raises(errors.StaleHandleError):
            m.free(2 * P, 2 * P)
        assert m.total_allocated_size == P and sound(m)


def test_T_M10_the_range_grows(maker: Any) -> None:
    m = maker.AddressManager(4 * P)
    blocks = [m.allocate(P) for _ in range(4)]
    m.sbrk(4 * P)
    assert m.get_heap_size() == 8 * P and m.get_free_size() == 4 * P and sound(m)
    assert m.allocate(3 * P) == (4 * P, 3 * P)
    m.free(*blocks[1])
    m.free(*blocks[3])
    m.sbrk(100)  # rounded up
    assert m.get_heap_size() == 9 * P and m.get_free_size() == 4 * P and sound(m)
    assert m.allocate(2 * P) == (7 * P, 2 * P)
    for piece in ((0, P), (2 * P, P), (4 * P, 3 * P), (7 * P, 2 * P)):
        m.free(*piece)
        assert sound(m)
    assert m.allocate(9 * P) == (0, 9 * P)


def test_T_M10_many_pieces_survive_growth(maker: Any) -> None:
    rng = random.Random(11)
    m = maker.AddressManager(1024 * P)
    live: Blocks = []
    for turn in range(6):
        while m.get_free_size() > 300 * P:
            live.append(m.allocate(rng.randint(1, 70) * P))
        rng.shuffle(live)
        while len(live) > 10:
            m.free(*live.pop())
        m.sbrk(rng.randint(1, 200) * P)
        assert disjoint(live) and sound(m), turn
        assert m.total_allocated_size == sum(n for _, n in live)
    for piece in live:
        m.free(*piece)
    assert m.get_free_size() == m.get_heap_size() and sound(m)


def test_T_M_a_tail_shorter_than_the_alignment_is_never_given_out(maker: Any) -> None:
    m = maker.AddressManager(10000)
    assert m.get_heap_size() == 10000
    m.batched_allocate(P, 2)
    with pytest.raises(RuntimeError):
        m.allocate(1)
    assert m.get_free_size() == 10000 - 2 * P and m.check_consistency()


# ---- threads ----------------------------------------------------------------------------------------


def test_T_M11_concurrent_allocations_do_not_overlap(maker: Any) -> None:
    m = maker.AddressManager(512 * P)
    blocks: Blocks = []

    def take() -> None:
        blocks.extend(m.allocate(100) for _ in range(10))

    assert in_threads(*[take] * 50) == []
    assert len(blocks) == 500 and disjoint(blocks) and m.total_allocated_size == 500 * P and sound(m)


def test_T_M11_concurrent_frees_give_all_back(maker: Any) -> None:
    m = maker.AddressManager(100 * P)
    blocks = m.batched_allocate(P, 100)
    work = [lambda mine=blocks[i::10]: [m.free(*b) for b in mine] for i in range(10)]
    assert in_threads(*work) == []
    assert m.get_free_size() == 100 * P and sound(m) and m.allocate(100 * P)


def test_T_M11_allocations_and_frees_mixed(maker: Any) -> None:
    m = maker.AddressManager(400 * P)
    old, new = m.batched_allocate(P, 100), []
    work: list[Callable[[], object]] = [lambda mine=old[i::5]: [m.free(*b) for b in mine] for i in range(5)]
    work += [lambda: new.extend(m.allocate(2 * P) for _ in range(20))] * 5
    assert in_threads(*work) == []
    assert len(new) == 100 and disjoint(new) and m.total_allocated_size == 200 * P and sound(m)


@pytest.mark.parametrize(("threads", "rounds"), [(20, 100), (20, 50)])
def test_T_M11_many_take_and_give_back(maker: Any, threads: int, rounds: int) -> None:
    m = maker.AddressManager(200 * P)

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(rounds):
            m.free(*m.allocate(rng.randint(1, 2 * P)))

    assert in_threads(*[lambda seed=i: use(seed) for i in range(threads)]) == []
    assert m.get_free_size() == 200 * P and sound(m)


def test_T_M11_concurrent_batches_are_disjoint(maker: Any) -> None:
    m = maker.AddressManager(256 * P)
    batches: list[Blocks] = []
    assert in_threads(*[lambda: batches.append(m.batched_allocate(P, 10))] * 20) == []
    assert disjoint([b for batch in batches for b in batch]) and m.total_allocated_size == 200 * P and sound(m)


def test_a_range_that_cannot_be_made_longer_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    m = AddressManager(4 * P)
    first, _, third = (m.allocate(P) for _ in range(3))
    m.free(*first)
    real, calls = AddressManager._lay, []

    def full(self: AddressManager, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("sbrk: the tables of the new range are full")
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(AddressManager, "_lay", full)
        with pytest.raises(RuntimeError):
            m.sbrk(P)
    with pytest.raises(ValueError):
        m.sbrk(-P)
    assert m.get_heap_size() == 4 * P and m.total_allocated_size == 2 * P and sound(m)
    m.sbrk(P)
    assert m.get_free_size() == 3 * P and sound(m)
    m.free(*third)
    assert m.allocate(3 * P) == (2 * P, 3 * P) and sound(m)
