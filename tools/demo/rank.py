"""One rank process: moves its KV heads between the driver's staging memory and the shared cache.

It knows nothing of the model. The driver sends it keys; the bytes lie in memory that both map.
"""

from __future__ import annotations

from ctypes import Array, c_byte
from multiprocessing.connection import Connection

import torch
from layout import CHUNK_TOKENS, KV_HEADS, part_shape
from model import staging_tensor
from segment import Run, attach
from worker import serve

from shmcache import MemoryObj


class Rank:
    """Part `rank` of every chunk, through an attachment of its own."""

    def __init__(self, run: Run, label: str, rank: int, staging: Array[c_byte]) -> None:
        self.cache, self.kv = attach(run, f"{label} rank {rank}", rank)
        self.rank = rank
        self.shape = part_shape(run.ranks)
        self.unfinished: MemoryObj | None = None
        heads = KV_HEADS // run.ranks
        self.staging = staging_tensor(staging)[:, :, rank * heads : (rank + 1) * heads]

    def store(self, index: int, key: bytes, parent: bytes | None) -> bool:
        """Publish a staged chunk; False when somebody already had."""
        with self._allocate() as obj:
            obj.tensor.copy_(self._staged(index))
            return self.kv.put(key, obj, part=self.rank, parent=parent)

    def store_half(self, index: int) -> int:
        """Write half of a staged chunk and go no further; returns the bytes it occupies."""
        self.unfinished = self._allocate()
        self.unfinished.tensor[0].copy_(self._staged(index)[0])  # K is written, V is not
        return self.unfinished.tensor.nbytes

    def load(self, index: int, key: bytes) -> None:
        """Copy a chunk that the driver has pinned into staging."""
        obj = self.kv.get(key, part=self.rank)
        if obj is None:
            raise RuntimeError(f"rank {self.rank}: pinned chunk {key.hex()[:12]} has no part {self.rank}")
        with obj:
            self._staged(index).copy_(obj.tensor)

    def close(self) -> None:
        """Detach."""
        self.cache.close()

    def _allocate(self) -> MemoryObj:
        obj = self.kv.allocate(self.shape, torch.float32)
        if obj is None:
            raise RuntimeError(f"rank {self.rank}: no room for {self.shape}; pass a larger --capacity")
        return obj

    def _staged(self, index: int) -> torch.Tensor:
        return self.staging[:, :, :, index * CHUNK_TOKENS : (index + 1) * CHUNK_TOKENS]


def main(conn: Connection, run: Run, label: str, rank: int, staging: Array[c_byte]) -> None:
    """Entry point of a rank process."""
    torch.set_num_threads(max(1, torch.get_num_threads() // run.ranks))
    serve(conn, lambda: Rank(run, label, rank, staging))
