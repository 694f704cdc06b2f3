"""Eviction policies by LMCache's names, and who would be evicted next.

The order is kept in the segment, by the C core, for all processes together. LRU, MRU: hits move a
chunk; FIFO: they do not; LFU: fewest hits first, oldest of those first. Counts saturate at 1,023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._order import next_victims

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ._keys import Key
    from .cache import SharedCache

__all__ = ["POLICY_NAMES", "SegmentPolicy", "check_policy"]

POLICY_NAMES = ("LRU", "LFU", "FIFO", "MRU")


def check_policy(name: str | None) -> str:
    """The policy as `shmcache.open` names it. ValueError for none, or for one that is not known."""
    if not name:
        raise ValueError(f"the cache policy cannot be empty: it is one of {', '.join(POLICY_NAMES)}")
    if not isinstance(name, str) or name.upper() not in POLICY_NAMES:
        raise ValueError(f"cache policy {name!r}: it is one of {', '.join(POLICY_NAMES)}")
    return name.lower()


class SegmentPolicy:
    """The policy of a cache, as far as one can ask it.

    Parameters
    ----------
    name
        one of `POLICY_NAMES`, in any case.
    to_keys
        what a chunk, given by namespace index and key, is called by the caller: any number of keys.
    """

    def __init__(self, name: str, cache: SharedCache, to_keys: Callable[[int, Key], Iterable[Any]]) -> None:
        self.name = check_policy(name).upper()
        self._cache = cache
        self._to_keys = to_keys

    def get_evict_candidates(self, cache_dict: object = None, num_candidates: int = 1) -> list[Any]:
        """Keys of the chunks that would go next, at most `num_candidates` chunks; asking changes nothing.

        `cache_dict` is not needed: LMCache's policies are told which entries there are.
        """
        chunks = next_victims(self._cache, num_candidates, self.name == "MRU")
        return [key for namespace, chunk in chunks for key in self._to_keys(namespace, chunk)]
