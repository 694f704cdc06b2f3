"""Where our results are meant to differ from LMCache 0.5.6's. Tests assert both sides, see `expected`."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Difference(NamedTuple):
    lmcache: str
    ours: str
    why: str


DIFFERENCES: dict[str, Difference] = {
    "another object": Difference(
        "hot_cache and get_blocking give the object that was put",
        "they give another object on the same block, with a reference of its own",
        "bytes are shared by processes, Python objects are not",
    ),
    "one entry for all ranks": Difference(
        "each rank has a cache; remove takes the caller's object",
        "remove takes all ranks' parts of the chunk",
        "half a chunk is dead weight on every rank",
    ),
    "admitted when complete": Difference(
        "ADMIT is sent by each rank, and with layerwise objects for each layer",
        "ADMIT is sent once, when all ranks (and layers) have put their part",
        "until then no rank can use the chunk",
    ),
    "policy is told": Difference(
        "the policy is called once for each new key of a batch",
        "a batch is one call into the segment, under one hold of its lock",
        "one lock round for 64 keys",
    ),
    "leading run": Difference(
        "batched_get_non_blocking raises KeyError at a miss and keeps the references that it took",
        "it returns the objects before the first miss",
        "the caller asked for a prefix",
    ),
    "ref count of the evicted": Difference(
        "an object that batched_allocate evicts keeps ref_count 1, though it is invalid",
        "its count is 0",
        "later versions of LMCache want that, too",
    ),
    "tokens of a layer": Difference(
        "token_dim of KV_T2D is 1 and of KV_2TD 0, so that a layer has 2 tokens",
        "0 and 1, as the layouts say",
        "clear() is to count tokens",
    ),
    "own pins": Difference(
        "unpin of a stored key is True, also when nobody had pinned it; pins are anonymous",
        "unpin spends a pin of this process, and is False without one",
        "nobody can take another's pin away",
    ),
    "double unpin": Difference(
        "the second unpin of an object warns and is True",
        "it warns and is False",
        "the answer says whether there was a pin",
    ),
    "double free": Difference(
        "one ref_count_down too many is logged, and frees the block again",
        "StaleHandleError, nothing changes (the plug-in logs it); allocator.free of a freed object is logged",
        "two owners of one block corrupt both",
    ),
    "foreign objects": Difference(
        "any object is kept as it is",
        "one of another allocator is copied into the segment at put, and keeps its count",
        "other processes could not read it",
    ),
    "rules of pages": Difference(
        "a buffer that is no multiple of a page is an AssertionError; a smaller object reports a full page",
        "ValueError; a smaller object has its own size",
        "a page is room, not size",
    ),
    "not zero": Difference(
        "a request that never fits raises nothing in the allocator, and a wrong size raises ValueError",
        "the same; and an AddressManager's free of what was not allocated is a StaleHandleError",
        "a wrong free is a bug in the caller, best seen where it happens",
    ),
    "size of raw data": Difference(
        "raw_data of one object has its size, of a batch's objects the aligned size",
        "always the object's size",
        "one rule",
    ),
    "candidates": Difference(
        "LFU forgets the candidates that it names; asked for 0 candidates all policies name all",
        "asking changes nothing; 0 are none",
        "a question is no order",
    ),
    "settings that contradict": Difference(
        "AssertionError",
        "ConfigurationError, which is an AssertionError and a ValueError",
        "assertions vanish under -O",
    ),
    "numbers of GPUs": Difference(
        "gpu_to_numa_mapping is taken as it is: keys from JSON stay strings, and are not found later",
        "keys and nodes become ints",
        "JSON has no other keys",
    ),
    "size of the first rank": Difference(
        "first_rank_max_local_cpu_size is the size of the first rank's own arena",
        "it is the size of the segment, for all ranks of the first rank's host",
        "they read one copy there, whoever of them comes first",
    ),
    "size of all ranks": Difference(
        "each rank has max_local_cpu_size for itself",
        "the segment has it for each rank of the host, or once where all read one copy",
        "memory is bought once",
    ),
    "numbering of operations": Difference(
        "a batch is whatever is in the queue, also more than kv_msg_batch_size",
        "at most kv_msg_batch_size",
        "the setting says so",
    ),
    "dtype in a string": Difference(
        "from_string raises KeyError for a dtype that is not known",
        "ValueError, as for everything else that is no key",
        "one error for one mistake",
    ),
    "chunk budget": Difference(
        "max_local_cpu_size by the size of a chunk",
        "the arena that exists, by the chunks of all ranks that share it",
        "the configured size may be another",
    ),
}


def expected(side: Any, item: str, *, ours: T, lmcache: T) -> T:
    """What is right for a kit or maker (`side.ours`) where the two differ as `item` says."""
    assert item in DIFFERENCES, f"{item!r} is not in DIFFERENCES"
    return ours if side.ours else lmcache
