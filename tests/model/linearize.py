"""Is a concurrent history linearizable? A search over all orders that real time allows, kept small.

    Wing and Gong's search, made in the order of events (Lowe's just-in-time linearization): an
    operation is given its place only when some return demands it. What is remembered between two
    events is a set of configurations: the object's state, and which open operations have had their
    place already. So a history may be long; only how many operations overlap costs.

An optional operation is one whose process was killed in it: it took effect before its `ret`, or never.
A silent one is nobody's call, and may happen whenever the object lets it between `call` and `ret`.
Of what there is on PyPI nothing does this and is kept up; the good ones are Go, Rust and Clojure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

Config = tuple[Hashable, frozenset[int]]


@dataclass(frozen=True)
class Op:
    """One call: when, what (its arguments), and what came back."""

    call: int
    ret: int
    what: Any
    result: Any = None
    who: int = 0
    optional: bool = False
    silent: bool = False


Step = Callable[[Any, Op], Hashable]  # the next state; None: not with this result


class NotLinearizable(AssertionError):
    """Names the operation for which there was no place, and what was open or recent then."""


def check(ops: Iterable[Op], initial: Hashable, step: Step) -> int:
    """Raises NotLinearizable, or returns how many configurations there were at most."""
    history = sorted(ops, key=lambda op: op.call)
    # a call at the very time of a return overlaps it
    events = sorted(
        [(op.call, 0, i) for i, op in enumerate(history)] + [(op.ret, 1, i) for i, op in enumerate(history)]
    )
    configs: set[Config] = {(initial, frozenset())}
    opened: set[int] = set()
    most = 1
    for _, returns, i in events:
        if not returns:
            opened.add(i)
            continue
        placed = _place(i, configs, opened, history, step)
        if history[i].optional or history[i].silent:
            placed |= {config for config in configs if i not in config[1]}
        if not placed:
            raise NotLinearizable(_explain(i, configs, opened, history))
        opened.remove(i)
        configs = placed
        most = max(most, len(configs))
    return most


def _place(i: int, configs: set[Config], opened: set[int], history: list[Op], step: Step) -> set[Config]:
    """All that can be once operation `i` has had its place, after any others that are open."""
    placed: set[Config] = set()
    todo = list(configs)
    seen = set(configs)
    while todo:
        state, done = todo.pop()
        if i in done:
            placed.add((state, done - {i}))
            continue
        for j in opened - done:
            then = step(state, history[j])
            if then is None:
                continue
            config = (then, done if history[j].silent else done | {j})
            if config not in seen:
                seen.add(config)
                todo.append(config)
    return placed


def _explain(i: int, configs: set[Config], opened: set[int], history: list[Op]) -> str:
    op = history[i]
    near = [o for o in history if o.ret > op.call - 1_000_000 and o.call < op.ret]
    lines = [f"no place for {op}", "states that were possible: " + ", ".join(sorted({repr(s) for s, _ in configs}))]
    lines += ["open: " + repr(history[j]) for j in sorted(opened) if j != i]
    return "\n".join([*lines, "before it:", *map(repr, near[-40:])])
