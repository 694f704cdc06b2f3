"""The driver process of an engine: runs the model, asks the cache, and sends its ranks the keys.

The model itself is not split: only the KV is, by heads, over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from ctypes import Array, c_byte
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from layout import CHUNK_TOKENS, chunk_keys
from model import Model, staging_tensor
from segment import Run, attach
from tqdm import tqdm
from worker import receive, serve

from shmcache import ReapReport

if TYPE_CHECKING:
    from transformers import DynamicCache

_ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Prefix:
    """How much of a prompt came from the cache."""

    tokens: int  # of the whole prompt
    chunks: int  # full chunks of the prompt
    hits: int  # leading chunks found
    load_s: float


@dataclass(frozen=True)
class Stored:
    """What an engine computed of a prompt and published."""

    prefix: Prefix
    prefill_s: float
    chunks: int
    new_parts: int
    store_s: float


@dataclass(frozen=True)
class Answer:
    """A generated answer and how it came about."""

    prefix: Prefix
    first_token_s: float
    tokens: list[int]
    text: str
    logits: np.ndarray[Any, np.dtype[np.float32]]  # one row for each token


class Driver:
    """An engine: each public method is a request of the story."""

    def __init__(self, run: Run, label: str, ranks: list[Connection], staging: Array[c_byte]) -> None:
        self.label = label
        self.ranks = ranks
        self.staging = staging_tensor(staging)
        self.model = Model(label)
        self.cache, self.kv = attach(run, f"{label} driver")
        self._receive_all()  # every rank has attached

    def ask(self, prompt: list[str], use_cache: bool) -> Answer:
        """Answer a prompt, from cached KV as far as there is any."""
        began = time.perf_counter()
        ids = self.model.encode(prompt)
        kv, prefix = self._load(ids) if use_cache else (self.model.empty_kv(), Prefix(len(ids), 0, 0, 0.0))
        logits = self.model.prefill(ids, kv)
        first_token_s = time.perf_counter() - began
        tokens, rows = self.model.generate(logits, kv, _ANSWER_TOKENS)
        return Answer(prefix, first_token_s, tokens, self.model.decode(tokens), rows.numpy())

    def publish(self, prompt: list[str]) -> Stored:
        """Compute the KV of a prompt that the cache lacks, and store its full chunks."""
        began = time.perf_counter()
        keys, prefix = self._stage(prompt)
        staged = time.perf_counter()
        missing = range(prefix.hits, prefix.chunks)
        new = self._each(missing, "store", lambda i: (i, keys[i], keys[i - 1] if i else None))
        return Stored(prefix, staged - began, len(missing), sum(new), time.perf_counter() - staged)

    def publish_half(self, prompt: list[str]) -> int:
        """Store a prompt's next chunk, except that the last rank stops half-way; the bytes it holds then."""
        keys, prefix = self._stage(prompt)
        index = prefix.hits
        for conn in self.ranks[:-1]:
            conn.send(("store", (index, keys[index], keys[index - 1])))
        self.ranks[-1].send(("store_half", (index,)))
        return int(self._receive_all()[-1])

    def hits(self, prompt: list[str]) -> int:
        """Leading complete chunks of a prompt, without touching or loading them."""
        with self.kv.lookup(chunk_keys(self.model.encode(prompt)), touch=False) as hit:
            return int(hit.n)

    def used_bytes(self) -> int:
        """Bytes of the arena that are allocated."""
        return int(self.cache.stats().bytes.used)

    def reap(self) -> ReapReport:
        """Take back what dead processes left behind."""
        return self.cache.reap()

    def close(self) -> None:
        """Detach; closing their pipes ends the ranks."""
        for conn in self.ranks:
            conn.close()
        self.cache.close()

    def _load(self, ids: list[int]) -> tuple[DynamicCache, Prefix]:
        """The KV of the longest cached prefix. The pin keeps it in place while the ranks copy."""
        keys = chunk_keys(ids)
        began = time.perf_counter()
        with self.kv.lookup(keys, pin=True) as hit:
            hits = int(hit.n)
            self._each(range(hits), "load", lambda i: (i, keys[i]))
        load_s = time.perf_counter() - began
        return self.model.kv_from(self.staging, hits * CHUNK_TOKENS), Prefix(len(ids), len(keys), hits, load_s)

    def _stage(self, prompt: list[str]) -> tuple[list[bytes], Prefix]:
        """Have all full chunks of a prompt in staging, cached or computed; their keys."""
        ids = self.model.encode(prompt)
        kv, prefix = self._load(ids)
        self.model.prefill(ids, kv)
        for index in range(prefix.hits, prefix.chunks):
            self.model.stage(kv, index, self.staging)
        return chunk_keys(ids), prefix

    def _each(self, indices: Sequence[int], method: str, args: Callable[[int], tuple[object, ...]]) -> list[Any]:
        """Ask all ranks to do all chunks, each at its own pace; their replies."""
        for index in indices:
            for conn in self.ranks:
                conn.send((method, args(index)))
        bar = tqdm(indices, desc=f"  {self.label}: {method}", unit="chunk", leave=False, disable=None)
        return [reply for _ in bar for reply in self._receive_all()]

    def _receive_all(self) -> list[Any]:
        return [receive(conn, f"{self.label} rank {rank}") for rank, conn in enumerate(self.ranks)]


def main(conn: Connection, run: Run, label: str, ranks: list[Connection], staging: Array[c_byte]) -> None:
    """Entry point of a driver process."""
    serve(conn, lambda: Driver(run, label, ranks, staging))
