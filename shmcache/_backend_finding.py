"""The finding half of the backend: where a key lies, what is there, loading, pins and removal."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from ._core import fast
from ._keys import INT_TYPE, PackedKeys, pack
from ._objects import TensorMemoryObj
from ._placement import Placement, Route
from ._requests import Found, RequestKeys
from .metrics import Lifespans

_SAME = ("worker_id", "model_name", "world_size", "dtype", "tags")
_hash = operator.attrgetter("chunk_hash")
_NOTHING = pack(())
_contains = fast.contains
_unpin = fast.unpin


class BackendFinding:
    """Part of `SharedCPUBackend`."""

    _placement: Placement
    _routes: dict[Any, Route]
    _requests: RequestKeys
    _agree: bool
    lifespans: Lifespans

    # ---- where a key lies ---------------------------------------------------------------------------

    def _find(self, key: Any) -> tuple[Route | None, int]:
        """Route and part of a key; no route when nothing can be stored under it yet."""
        route = self._routes.get((type(key), key.model_name, key.world_size, key.dtype, key.tags))
        if route is None:
            route = self._placement.find(key)
            if route is None:
                return None, -1
        part = route.part(key)
        return (route, part) if part >= 0 else (None, -1)

    def _find_all(self, keys: Sequence[Any]) -> tuple[Route | None, int]:
        """The same when all keys agree in both, as those of one request of one rank (and layer) do."""
        route, part, _ = self._find_packed(keys)
        return route, part

    def _find_packed(self, keys: Sequence[Any]) -> tuple[Route | None, int, PackedKeys]:
        """The same, and their hashes joined."""
        if type(keys) is not list:
            keys = list(keys)
        names = _SAME if not keys or not hasattr(keys[0], "layer_id") else (*_SAME, "layer_id")
        joined = fast.alike(keys, names, "chunk_hash")
        if joined is False:
            return None, -1, _NOTHING
        packed = pack(list(map(_hash, keys))) if joined is True else PackedKeys(joined, len(keys), 8, INT_TYPE)
        return *self._find(keys[0]), packed

    def _which(self, part: int) -> int | None:
        """What has to be there: the part, or with rank agreement all parts."""
        return None if self._agree else part

    # ---- looking ------------------------------------------------------------------------------------

    def _has(self, key: Any) -> bool:
        route, part = self._find(key)
        return route is not None and route.space.contains(key.chunk_hash, part=part)

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether the key's part is stored. With `pin` it is pinned, and noted for `touch_cache`."""
        try:
            route = self._routes.get((type(key), key.model_name, key.world_size, key.dtype, key.tags))
            if route is None:
                route = self._placement.find(key)
                if route is None:
                    return False
            part = route.part(key) if route.layers else route.bases.get(key.worker_id, -1)
            if part < 0:
                return False
            if pin:
                return self._pin_found(route, part, key)
            if self._agree:
                part = -1
            a = route.cache._attachment  # kept through the call
            rc: int = _contains(a.at, route.index, key.chunk_hash, part)
            return rc == 1 if rc >= 0 else route.space.contains(key.chunk_hash, part=None if part < 0 else part)
        except Exception as e:
            if self._goes_on("contains", e):
                return False
            raise

    def _pin_found(self, route: Route, part: int, key: Any) -> bool:
        pinned = route.space.pin(key.chunk_hash, part=self._which(part))
        if pinned:
            self._requests.add(Found((key,), None))
        return pinned

    def _goes_on(self, what: str, error: Exception) -> bool:
        """Whether a call that failed answers as an empty cache would; here its caller is told."""
        return False

    def batched_contains(self, keys: Sequence[Any], pin: bool = False) -> int:
        """How many leading keys are stored; with `pin`, exactly these are pinned, and noted for `touch_cache`."""
        return self._leading(keys, pin, None)

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        """`batched_contains`, noted under the lookup id."""
        return self._leading(keys, pin, lookup_id)

    def _leading(self, keys: Sequence[Any], pin: bool, lookup_id: str | None) -> int:
        route, part, packed = self._find_packed(keys)
        touch = None
        if route is not None:
            n = route.space.leading(packed, part=self._which(part), pin=pin)
            touch = (route.space, packed if n == packed.n else packed[:n])
        else:
            n = 0
            try:
                for key in keys:  # of several ranks, layers or models
                    route, part = self._find(key)
                    if route is None or not route.space.leading([key.chunk_hash], part=self._which(part), pin=pin):
                        break
                    n += 1
            except BaseException:
                if pin:  # the caller is told of none
                    for key in keys[:n]:
                        self._routes[self._placement.identity(key)].space.unpin_later([key.chunk_hash])
                raise
        if pin and n:
            self._requests.add(Found(keys[:n], touch), lookup_id)
        return n

    def touch_cache(self, lookup_id: str | None = None) -> None:
        """Count a use of the keys that were pinned since the last time, suffix before prefix.

        Of one lookup; without an id, of all lookups of the calling thread, one after the other. Keys
        that are gone are skipped.
        """
        for lookup in self._requests.take(lookup_id):
            for found in reversed(lookup):
                self._touch(found)

    def _touch(self, found: Found) -> None:
        self.lifespans.used(found.keys)
        if found.touch is not None:
            space, packed = found.touch
            space.touch(packed)
            return
        for key in reversed(found.keys):
            route, _ = self._find(key)
            if route is not None:
                route.space.touch([key.chunk_hash])

    @property
    def keys_in_request(self) -> list[Any]:
        """Keys that were pinned and not touched yet, of all lookups."""
        return self._requests.all()

    # ---- loading -------------------------------------------------------------------------------------

    def get_blocking(self, key: Any) -> TensorMemoryObj | None:
        """The object, with a reference that is the caller's to give back; None when it is absent."""
        try:
            route = self._routes.get((type(key), key.model_name, key.world_size, key.dtype, key.tags))
            if route is None:
                route = self._placement.find(key)
                if route is None:
                    return None
            part = route.part(key) if route.layers else route.bases.get(key.worker_id, -1)
            if part < 0:
                return None
            obj: Any = route.space.get(key.chunk_hash, part=part)
            if obj is not None:
                obj._key = key.chunk_hash
            return obj  # type: ignore[no-any-return]
        except Exception as e:
            if self._goes_on("get_blocking", e):
                return None
            raise

    def batched_get_blocking(self, keys: Sequence[Any]) -> list[Any]:
        """`get_blocking` of each, in one call where the keys are of one rank; None where absent."""
        route, part, packed = self._find_packed(keys)
        if route is None:
            return [self.get_blocking(key) for key in keys]
        found: list[Any] = route.space.get_many(packed, part=part)
        for key, obj in zip(keys, found, strict=True):
            if obj is not None:
                obj._key = key.chunk_hash
        return found

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """The leading objects that are there: up to the first that is not. Counts as their use."""
        found = self.batched_get_blocking(keys)
        n = next((i for i, obj in enumerate(found) if obj is None), len(found))
        for obj in found[n:]:
            if obj is not None:
                obj.release()
        self.touch_cache(lookup_id)
        return found[:n]

    def cancel_request(self, req_id: str) -> None:
        """Forget what a lookup noted for `touch_cache`."""
        self._requests.take(req_id)

    # ---- pins and removal ----------------------------------------------------------------------------

    def pin(self, key: Any) -> bool:
        """Keep the chunk from eviction, for at most `pin_timeout_sec`; False when it is absent."""
        route, part = self._find(key)
        return route is not None and route.space.pin(key.chunk_hash, part=part)

    def unpin(self, key: Any) -> bool:
        """Give back one pin of this process on the key; False when it has none. Others' pins stay."""
        try:
            route = self._routes.get((type(key), key.model_name, key.world_size, key.dtype, key.tags))
            if route is None:  # not met in this class of keys
                route = self._placement.find(key)
                if route is None:
                    return False
            a = route.cache._attachment  # kept through the call
            rc: int = _unpin(a.at, route.index, key.chunk_hash)
            return rc == 1 if rc >= 0 else route.space.unpin(key.chunk_hash)
        except Exception as e:
            if self._goes_on("unpin", e):
                return False
            raise

    def batched_unpin(self, keys: Sequence[Any]) -> int:
        """`unpin` of each, in one call where the keys are of one rank; how many pins were given back."""
        route, _, packed = self._find_packed(keys)
        if route is None:
            return sum(map(self.unpin, keys))
        return sum(route.space.unpin_many(packed))

    def remove(self, key: Any, force: bool = True) -> bool:
        """Remove the chunk, all ranks' parts; False when it is absent.

        Bytes live on while they are held. With `force` this process's pins on it go too.
        """
        route, _ = self._find(key)
        if route is None or not route.space.remove(key.chunk_hash):
            return False
        while force and route.space.unpin(key.chunk_hash):
            pass
        return True

    def batched_remove(self, keys: Sequence[Any], force: bool = True) -> int:
        """`remove` of each; how many were there. (Layers of one chunk go together.)"""
        there = sum(map(self._has, dict.fromkeys(keys)))
        for key in keys:
            self.remove(key, force)
        return there
