"""Which NUMA node each region's pages should come from.

Pages of shared memory are placed when they are allocated, by the policy of the thread that does it;
a policy on the mapping is not reliable for shared files. So regions, not pages, are interleaved: the
thread that commits a region prefers the region's node. Machines of one node get no policy at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from ._auto import AUTO, Auto

MAX_NODES = 32  # the segment stores the choice as a mask of 32 bits
NO_NODE = -1
_NODES = "/sys/devices/system/node/has_memory"

NumaArgument = int | str | Sequence[int]


def nodes_with_memory() -> list[int]:
    """As the kernel lists them; [0] where it does not say."""
    try:
        with open(_NODES, encoding="ascii") as f:
            return parse_list(f.read()) or [0]
    except (OSError, ValueError):
        return [0]


def parse_list(text: str) -> list[int]:
    """The kernel's lists: "0-3,8"."""
    nodes: list[int] = []
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return nodes


def check_numa(value: NumaArgument | Auto) -> str | tuple[int, ...] | Auto:
    """The argument in one form, or ValueError. Whether the nodes exist is looked at when creating."""
    if value is AUTO:
        return AUTO
    if isinstance(value, str):
        if value in ("none", "interleave"):
            return value
    elif isinstance(value, int):
        if not isinstance(value, bool) and 0 <= value < MAX_NODES:
            return (value,)
    elif isinstance(value, Sequence) and value and all(type(n) is int and 0 <= n < MAX_NODES for n in value):
        return tuple(sorted({int(n) for n in value}))
    raise ValueError(
        f'numa is {value!r}: use "none", "interleave", a node number below {MAX_NODES} or a list of node numbers'
    )


def node_mask(choice: str | tuple[int, ...] | Auto) -> int:
    """The nodes to use as a mask; 0: no policy."""
    available = [node for node in nodes_with_memory() if node < MAX_NODES]
    if choice == "none":
        return 0
    if isinstance(choice, tuple):
        missing = [node for node in choice if node not in available]
        if missing:
            raise ValueError(f"numa is {list(choice)}: nodes with memory here are {available}")
        available = list(choice)
    elif len(available) < 2:
        return 0
    return sum(1 << node for node in available)


def node_of(region: int, mask: int) -> int:
    """Round robin over the mask's nodes; NO_NODE without a policy."""
    nodes = [node for node in range(MAX_NODES) if mask >> node & 1]
    return nodes[region % len(nodes)] if nodes else NO_NODE
