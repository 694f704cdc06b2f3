"""The checker itself: what it must refuse, what it must let pass, and that it agrees with trying all orders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable
from typing import Any

import pytest
from linear_model import (
    ABORT,
    ALLOCATE,
    BUMP,
    GET,
    HAS_ALL,
    LOOKUP,
    NONE,
    PENDING,
    PUT,
    REAPED,
    REMOVE,
    RESERVE,
    WRITE,
    step,
)
from linearize import NotLinearizable, Op, check

START: Any = (NONE, NONE, frozenset(range(3000)))  # as if all were allocated before


def op(call: int, ret: int, kind: int, result: int | None, *, part: int = 0, tag: int = 0, **more: Any) -> Op:
    return Op(call, ret, (kind, part, tag), result, **more)


def refused(*ops: Op) -> bool:
    try:
        check(ops, START, step)
    except NotLinearizable:
        return True
    return False


GOOD = {
    "nothing": [],
    "a get beside the put sees it or not": [
        op(0, 9, PUT, 1, tag=7), op(1, 2, GET, 0), op(3, 4, GET, 7), op(5, 6, GET, 7),
    ],
    "of two puts at once either is first": [op(0, 9, PUT, 1, tag=7), op(1, 8, PUT, 0, tag=8), op(10, 11, GET, 7)],
    "a killed put happened": [op(0, 5, PUT, None, tag=7, optional=True), op(6, 7, GET, 7)],
    "a killed put did not": [op(0, 5, PUT, None, tag=7, optional=True), op(6, 7, GET, 0)],
    "a killed remove happened after a get": [
        op(0, 1, PUT, 1, tag=7), op(2, 9, REMOVE, None, optional=True), op(3, 4, GET, 7), op(10, 11, GET, 0),
    ],
    "another reserves once the dead one was reaped": [
        op(0, 1, RESERVE, WRITE, tag=7), op(2, 20, REAPED, None, tag=7, silent=True),
        op(3, 4, RESERVE, PENDING, tag=8), op(5, 6, RESERVE, WRITE, tag=9),
    ],
    "a put by anybody ends a reservation": [
        op(0, 1, RESERVE, WRITE, tag=7), op(2, 3, PUT, 1, tag=8), op(4, 5, PUT, 0, tag=7), op(6, 7, ABORT, 0, tag=7),
        op(8, 9, GET, 8),
    ],
    "a chunk is complete with its last part": [
        op(0, 1, PUT, 1, tag=7), op(2, 3, HAS_ALL, 0), op(4, 5, PUT, 1, part=1, tag=8), op(6, 7, LOOKUP, 8, part=1),
    ],
    "what was allocated before a bump is not stored": [
        op(0, 1, BUMP, 0), op(2, 3, ALLOCATE, 0, tag=7), op(4, 5, BUMP, 0), op(6, 7, PUT, 0, tag=7), op(8, 9, GET, 0),
    ],
    "a bump beside a put comes before or after it": [
        op(0, 1, BUMP, 0), op(2, 3, ALLOCATE, 0, tag=7), op(4, 9, PUT, 1, tag=7), op(5, 8, BUMP, 0), op(10, 11, GET, 0),
    ],
    "a bump ends a reservation": [
        op(0, 1, RESERVE, WRITE, tag=7), op(2, 3, BUMP, 0), op(4, 5, RESERVE, WRITE, tag=8), op(6, 7, PUT, 0, tag=7),
        op(8, 9, PUT, 1, tag=8), op(10, 11, GET, 8),
    ],
}  # fmt: skip

BAD = {
    "a get misses what was put before": [op(0, 1, PUT, 1, tag=7), op(2, 3, GET, 0)],
    "a get sees what nobody put": [op(0, 1, PUT, 1, tag=7), op(2, 3, GET, 8)],
    "a get sees what is put only later": [op(0, 1, GET, 7), op(2, 3, PUT, 1, tag=7)],
    "both of two puts are first": [op(0, 9, PUT, 1, tag=7), op(1, 8, PUT, 1, tag=8)],
    "neither of two puts is first": [op(0, 9, PUT, 0, tag=7), op(1, 8, PUT, 0, tag=8)],
    "seen, then not yet there": [op(0, 9, PUT, 1, tag=7), op(1, 2, GET, 7), op(3, 4, GET, 0)],
    "removed, then there again": [op(0, 1, PUT, 1, tag=7), op(2, 3, REMOVE, 1), op(4, 5, GET, 7)],
    "removed twice": [op(0, 1, PUT, 1, tag=7), op(2, 9, REMOVE, 1), op(3, 8, REMOVE, 1)],
    "bytes of one put change into another's": [
        op(0, 9, PUT, 1, tag=7), op(1, 8, PUT, 0, tag=8), op(2, 3, GET, 7), op(4, 5, GET, 8),
    ],
    "a killed put comes and goes": [
        op(0, 9, PUT, None, tag=7, optional=True), op(1, 2, GET, 7), op(3, 4, GET, 0),
    ],
    "a killed put happens after its death": [
        op(0, 5, PUT, None, tag=7, optional=True), op(6, 7, GET, 0), op(8, 9, GET, 7),
    ],
    "two reserve at once": [op(0, 9, RESERVE, WRITE, tag=7), op(1, 8, RESERVE, WRITE, tag=8)],
    "pending on nobody": [op(0, 1, RESERVE, PENDING, tag=7)],
    "pending on what was given up": [
        op(0, 1, RESERVE, WRITE, tag=7), op(2, 3, ABORT, 0, tag=7), op(4, 5, RESERVE, PENDING, tag=8),
    ],
    "a reservation outlives the reaping of the dead": [
        op(0, 1, RESERVE, WRITE, tag=7), op(2, 5, REAPED, None, tag=7, silent=True),
        op(6, 7, RESERVE, WRITE, tag=8), op(8, 9, RESERVE, WRITE, tag=9),
    ],
    "there still after a bump": [op(0, 1, PUT, 1, tag=7), op(2, 3, BUMP, 0), op(4, 5, GET, 7)],
    "stored although outdated": [op(0, 1, BUMP, 0), op(2, 3, PUT, 1, tag=7)],
    "reserved, and outdated at once": [
        op(0, 1, BUMP, 0), op(2, 3, RESERVE, WRITE, tag=7), op(4, 5, PUT, 0, tag=7),
    ],
    "a lookup finds half a chunk": [op(0, 1, PUT, 1, tag=7), op(2, 3, LOOKUP, 7)],
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_it_lets_pass(case: str) -> None:
    assert not refused(*GOOD[case])


@pytest.mark.parametrize("case", BAD)
def test_it_refuses(case: str) -> None:
    assert refused(*BAD[case])


def test_it_says_where() -> None:
    with pytest.raises(NotLinearizable, match=r"no place for Op\(call=2, ret=3"):
        check(BAD["a get misses what was put before"], START, step)


def by_all_orders(ops: list[Op]) -> bool:
    """The definition, for short histories: whether some order fits."""
    for n in range(sum(o.optional for o in ops) + 1):
        for left_out in itertools.combinations([o for o in ops if o.optional], n):
            for order in itertools.permutations([o for o in ops if o not in left_out]):
                if any(b.ret < a.call for a, b in itertools.combinations(order, 2)):
                    continue
                state: Hashable | None = START
                for o in order:
                    state = step(state, o)
                    if state is None:
                        break
                else:
                    return True
    return False


def test_it_agrees_with_trying_all_orders() -> None:
    dice = random.Random(1)
    answers = []
    for _ in range(1500):
        ops = []
        for tag in range(1, dice.randrange(2, 6)):
            call = dice.randrange(12)
            kind = dice.choice([PUT, PUT, GET, GET, REMOVE, RESERVE])
            results = {PUT: [0, 1], GET: [0, 1, 2, 3], REMOVE: [0, 1], RESERVE: [WRITE, PENDING, 1, 2]}[kind]
            optional = dice.random() < 0.2
            result = None if optional else dice.choice(results)
            ops.append(op(call, call + dice.randrange(1, 9), kind, result, tag=tag, optional=optional))
        answers.append(by_all_orders(ops))
        assert refused(*ops) is not answers[-1], ops
    assert 200 < sum(answers) < 1300


def test_one_wrong_answer_in_a_long_history_is_found() -> None:
    """Calls that were made one at a time, with the times of a crowd around them; then one answer is changed."""
    dice = random.Random(2)
    found = 0
    for _ in range(20):
        state: Any = START
        ops = []
        for i in range(1, 400):
            kind, part = dice.choice([PUT, PUT, GET, GET, GET, REMOVE, HAS_ALL, LOOKUP]), dice.randrange(2)
            likely = [0, 1, *state[0]]
            for result in likely:
                then = step(state, op(0, 0, kind, result, part=part, tag=1000 + i))
                if then is not None:
                    state = then
                    call, ret = 10 * i - dice.randrange(25), 10 * i + dice.randrange(25)
                    ops.append(op(call, ret, kind, result, part=part, tag=1000 + i))
                    break
        assert not refused(*ops)
        i = dice.choice([i for i, o in enumerate(ops) if o.what[0] == GET and o.result])
        ops[i] = op(ops[i].call, ops[i].ret, GET, 1000 + i + 300 if i < 90 else 1001, part=ops[i].what[1])
        found += refused(*ops)
    assert found == 20
