"""Which bytes of the arena are what: coverage of equal cells, by state and namespace.

Cells are counted in payload bytes, region after region, so that they add up to the capacity. Extents
are taken as they come, slice by slice: memory does not grow with the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._core import lib
from ._reader import Reader
from ._records import FREE, LINKED, WRITING, Budget, block_arrays, chunk_arrays

# What a byte can be. `unseen`: of a ready region, but in no extent that was read (others changed it meanwhile).
STATES = ("unreserved", "free", "evictable", "kept", "writing", "leaving", "unseen")
UNRESERVED, IS_FREE, EVICTABLE, KEPT, IS_WRITING, LEAVING, UNSEEN = range(len(STATES))
NO_NAMESPACE = 0xFFFF
Array = np.ndarray[Any, Any]
Kind = tuple[int, int]  # state, namespace


@dataclass
class Picture:
    """`cover[state, namespace]`: bytes of each cell. All of a cell's add up to `cell_sizes`, but for races."""

    capacity: int
    cell_bytes: int
    cell_sizes: Array
    namespaces: dict[int, str]
    partial: bool = False
    cover: dict[Kind, Array] = field(default_factory=dict)

    def totals(self) -> dict[Kind, int]:
        return {kind: int(cells.sum()) for kind, cells in self.cover.items()}

    def dominant(self) -> list[Kind]:
        """What most of each cell is."""
        kinds = list(self.cover)
        most = np.argmax(np.stack([self.cover[k] for k in kinds]), axis=0)
        return [kinds[i] for i in most]

    def add(self, kind: Kind, start: Array, length: Array) -> None:
        """Extents, none longer than a region, may span many cells."""
        cells = self.cover.setdefault(kind, np.zeros(len(self.cell_sizes), np.int64))
        size = self.cell_bytes
        end = start + length
        first, last = start // size, (end - 1) // size
        one = first == last
        np.add.at(cells, first[one], length[one])
        first, last, start, end = first[~one], last[~one], start[~one], end[~one]
        np.add.at(cells, first, (first + 1) * size - start)
        np.add.at(cells, last, end - last * size)
        step = np.zeros(len(cells) + 1, np.int64)
        np.add.at(step, first + 1, size)
        np.add.at(step, last, -size)
        cells += np.cumsum(step)[:-1]


def take(reader: Reader, n_cells: int, budget: Budget) -> Picture:
    g = reader.geometry
    capacity, align = int(g.capacity), int(g.align)
    cell = -(-capacity // n_cells // align) * align or align
    n = -(-capacity // cell)
    sizes = np.full(n, cell, np.int64)
    sizes[-1] = capacity - (n - 1) * cell
    picture = Picture(capacity, cell, sizes, {i: ns.name for i, ns in reader.namespaces().items()})
    for i, region in enumerate(reader.regions()):
        if region.state != lib.SHMC_R_READY:
            picture.add((UNRESERVED, NO_NAMESPACE), np.array([i * int(g.region_bytes)]), np.array([int(region.bytes)]))
    kept, linked = _chunks(reader, budget)
    for blocks in block_arrays(reader, budget):
        _add_blocks(picture, reader, blocks, kept, linked)
    picture.partial = budget.partial
    seen = sum(picture.cover.values(), np.zeros(n, np.int64))
    unseen = np.maximum(sizes - seen, 0)
    if unseen.any():
        picture.cover[UNSEEN, NO_NAMESPACE] = unseen
    return picture


def _chunks(reader: Reader, budget: Budget) -> tuple[Array, Array]:
    """By index: whether somebody holds it, whether it is in the cache."""
    n = int(reader.geometry.max_chunks)
    kept, linked = np.zeros(n + 1, bool), np.zeros(n + 1, bool)  # the last one stands for `none`
    for chunks in chunk_arrays(reader, budget):
        at = np.minimum(chunks["chunk"], n)
        kept[at] = chunks["held"] > 0
        linked[at] = chunks["flags"] & LINKED != 0
    kept[n] = linked[n] = False
    return kept, linked


def _add_blocks(
    picture: Picture,
    reader: Reader,
    blocks: Array,
    kept: Array,
    linked: Array,
) -> None:
    g = reader.geometry
    offset, length = blocks["offset"].astype(np.int64), blocks["extent"].astype(np.int64)
    start = offset - offset // int(g.region_stride) * (int(g.region_stride) - int(g.region_bytes))
    sane = (length > 0) & (start >= 0) & (length <= picture.capacity) & (start <= picture.capacity - length)
    chunk = np.minimum(blocks["chunk"], len(kept) - 1)
    state = np.where(linked[chunk], np.where(kept[chunk], KEPT, EVICTABLE), LEAVING)
    state = np.where(blocks["state"] == WRITING, IS_WRITING, state)
    state = np.where(blocks["state"] == FREE, IS_FREE, state)
    space = np.where(state == IS_FREE, NO_NAMESPACE, blocks["ns"])
    kinds = state * 65536 + space
    for kind in np.unique(kinds[sane]):
        rows = sane & (kinds == kind)
        picture.add((int(kind) >> 16, int(kind) & 0xFFFF), start[rows], length[rows])
