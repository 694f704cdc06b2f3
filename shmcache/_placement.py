"""From LMCache's keys to namespaces, parts and chunks, and back.

    model, world size, dtype, tags (layerwise, MLA, ranks of this host)   -> namespace
    worker id (and layer)                                                 -> part
    chunk hash                                                            -> key of the chunk

So a chunk of all ranks is one entry: it is complete when all have put their part, and evicted whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ._core import lib
from ._keys import Key
from .errors import ConfigurationError
from .keys import CacheEngineKey, LayerCacheEngineKey, dtype_from_name, dtype_name

if TYPE_CHECKING:
    from ._pools import PooledAllocator
    from ._stats import NamespaceInfo
    from .namespace import Namespace

_SCHEMA = "lmcache/1"
_TAG = "lmcache.tag."

_MOST_ABSENT = 4096
MakeKey = Callable[..., Any]


class _Any0(dict[int, int]):
    """Every worker reads and writes part 0."""

    def get(self, _worker: int, _default: object = None) -> int:
        return 0


class Route:
    """One namespace, and which of its parts a worker's key means."""

    __slots__ = ("bases", "cache", "facts", "index", "layers", "space")

    def __init__(self, space: Namespace, facts: dict[str, Any]) -> None:
        self.space = space
        self.cache, self.index = space.cache, space._index
        self.facts = facts
        self.layers: int = facts["layers"]  # 0: objects hold all layers
        step = self.layers or 1
        first, ranks = facts["first"], facts["ranks"]
        self.bases = _Any0() if facts["mla"] else {first + i: i * step for i in range(ranks)}

    def part(self, key: Any) -> int:
        """The part of a key; -1 when it is another host's, or a layer that the model does not have."""
        part = self.bases.get(key.worker_id, -1)
        if part < 0 or not self.layers:
            return part
        layer: int = key.layer_id
        return part + layer if 0 <= layer < self.layers else -1

    def keys(self, chunks: Iterable[Key], parts: Iterable[int], make: Sequence[MakeKey]) -> list[Any]:
        """Keys of these parts of some chunks, chunk by chunk."""
        f = self.facts
        model, world, first = f["model"], f["world"], f["first"]
        dtype = dtype_from_name(f["dtype"])
        tags = {_TAG + name: value for name, value in f["tags"]} or None
        if self.layers:
            places = [(first + part // self.layers, part % self.layers) for part in parts]
            return [make[1](model, world, w, c, dtype, tags, layer) for c in chunks for w, layer in places]
        workers = [first + part for part in parts]
        return [make[0](model, world, w, c, dtype, tags) for c in chunks for w in workers]


class Placement:
    """The routes that one process has met.

    Parameters
    ----------
    pool
        whose cache they lead to.
    metadata
        of this rank; without it a key's world size says how many ranks this host has.
    layers
        of a layerwise model; 0: not known.
    one_copy
        all ranks read one part (MLA).
    lease
        seconds of pins.
    ranks
        first worker id and number of ranks of this host, for keys of this model.
    digest
        of what this model's bytes depend on beside its name.
    """

    def __init__(
        self, pool: PooledAllocator, metadata: Any, layers: int, one_copy: bool, lease: float | None,
        ranks: tuple[int, int] = (0, 0), digest: str = "",
    ) -> None:  # fmt: skip
        self.make: list[MakeKey] = [CacheEngineKey, LayerCacheEngineKey]  # classes of keys to give back
        self._pool = pool
        self._metadata = metadata
        self._layers = layers
        self._one_copy = one_copy
        self._lease = lease
        self._ranks = ranks
        self._digest = digest
        self._absent: dict[Any, tuple[str, int]] = {}  # its name, and how many others there were
        self._is_mine: dict[str, bool] = {}
        self.routes: dict[Any, Route] = {}  # by what `identity` says of a key
        self._by_name: dict[str, Route] = {}
        self._by_index: dict[int, Route] = {}

    @staticmethod
    def identity(key: Any) -> tuple[Any, ...]:
        """What selects the namespace of a key."""
        return (type(key), key.model_name, key.world_size, key.dtype, key.tags)

    def own(self) -> Route | None:
        """The route of this rank's own keys without tags; None without metadata."""
        m = self._metadata
        if m is None:
            return None
        kind = LayerCacheEngineKey if self._layers else CacheEngineKey
        return self.make_way(kind(m.model_name, m.world_size, m.worker_id, 0, m.kv_dtype))

    def find(self, key: Any) -> Route | None:
        """The route of a key; None when its namespace is not there yet."""
        who = self.identity(key)
        route = self.routes.get(who)
        if route is None:
            name, n = self._absent.get(who) or (_name_of(self._facts(key)), 0)
            is_there, n = self._pool.cache.find_namespace(name, max(0, n - 1))
            if is_there:
                return self.make_way(key)
            if len(self._absent) >= _MOST_ABSENT:
                self._absent.clear()
            self._absent[who] = name, n
        return route

    def make_way(self, key: Any) -> Route:
        """The route of a key; its namespace is made where need be. OutOfSharedMemoryError: there are too many."""
        who = self.identity(key)
        route = self.routes.get(who)
        if route is None:
            facts = self._facts(key)
            name = _name_of(facts)
            route = self.routes[who] = self._by_name.get(name) or self._open(name, facts)
            self._absent.pop(who, None)
            if hasattr(key, "from_string"):  # as ours and LMCache's have: made of the same arguments
                self.make[hasattr(key, "layer_id")] = type(key)
        return route

    def _open(self, name: str, facts: dict[str, Any]) -> Route:
        parts = (1 if facts["mla"] else facts["ranks"]) * (facts["layers"] or 1)
        if parts > lib.SHMC_PARTS_MAX:
            raise ConfigurationError(
                f"{facts['ranks']} ranks of {facts['layers']} layers are {parts} parts of a chunk, "
                f"at most {lib.SHMC_PARTS_MAX}",
                hint="do not use layerwise objects",
            )
        route = Route(self._pool.namespace(name, parts, _stored(facts), self._lease), facts)
        self._by_name[name] = self._by_index[route.space._index] = route
        return route

    def _facts(self, key: Any) -> dict[str, Any]:
        m = self._metadata
        known = m is not None and key.world_size == m.world_size
        own = known and key.model_name == m.model_name
        layered = hasattr(key, "layer_id")
        if layered and not self._layers:
            raise ConfigurationError(
                f"{key.to_string()!r} is a layer's key, and how many layers there are is not known",
                hint="give metadata and use_layerwise, or extra_config['shmcache.num_layers']",
            )
        return {
            "schema": _SCHEMA,
            "model": key.model_name,
            "world": key.world_size,
            "dtype": dtype_name(key.dtype),
            "tags": [list(tag) for tag in key.tags or ()],
            "first": self._ranks[0] if known else 0,
            "ranks": self._ranks[1] if known else key.world_size,
            "layers": self._layers if layered else 0,
            "mla": self._one_copy,
            "kv": self._digest if own else "",
        }

    # ---- the other way ------------------------------------------------------------------------------

    def mine(self) -> list[Route]:
        """Routes of this model, also those that others made, and of whatever keys came here; without metadata, all."""
        return [self._by_name.get(info.name) or self._open(info.name, info.descriptor) for info in self._infos()]

    def _infos(self) -> list[NamespaceInfo]:
        m = self._metadata
        found = []
        for info in self._pool.cache.namespaces():
            facts = info.descriptor
            ours = isinstance(facts, dict) and facts.get("schema") == _SCHEMA and facts["tags"] is not None
            if ours and (m is None or info.name in self._by_name or self._is_own(facts)):
                found.append(info)
        return found

    def _is_own(self, facts: dict[str, Any]) -> bool:
        """Whether they are those of this model; of the same name, but with other bytes, they are not."""
        m = self._metadata
        return (facts["model"], facts["world"], facts["kv"]) == (m.model_name, m.world_size, self._digest)

    def count(self) -> int:
        """Chunks of these routes, by all who put some; takes no lock."""
        return sum(info.chunks for info in self._infos())

    def is_mine(self, namespace: str) -> bool:
        """Whether a namespace is of this model, or of keys that came here."""
        if namespace in self._by_name:
            return True
        known = self._is_mine.get(namespace)
        if known is None:
            known = self._is_mine[namespace] = any(info.name == namespace for info in self._infos())
        return known

    def parts(self, route: Route) -> range:
        """This rank's parts of a chunk; all ranks' without metadata, and of keys of another model or world."""
        step = route.layers or 1
        if self._metadata is None or route.facts["mla"] or not self._is_own(route.facts):
            return range(route.space.parts)
        base = route.bases.get(self._metadata.worker_id, 0)
        return range(base, base + step)

    def keys_of(self, index: int, chunk: Key) -> list[Any]:
        """This rank's keys of a chunk of the namespace at `index`; none when it is not one of `mine`."""
        if index not in self._by_index:
            self.mine()  # others may have made it
        route = self._by_index.get(index)
        return [] if route is None else route.keys((chunk,), self.parts(route), self.make)


def _name_of(facts: dict[str, Any]) -> str:
    """A name to read; where it would be too long, or could be that of other facts, a hash."""
    words = [facts["model"], *(word for tag in facts["tags"] for word in tag)]
    name = f"lmcache:{facts['model']}@{facts['world']}@{facts['dtype']}"
    name += "".join(f"@{k}%{v}" for k, v in facts["tags"])
    if facts["kv"]:
        name += f"@kv={facts['kv']}"
    if facts["layers"]:
        name += f"@layers={facts['layers']}"
    if facts["mla"]:
        name += "@mla"
    elif (facts["first"], facts["ranks"]) != (0, facts["world"]):
        name += f"@ranks={facts['first']}+{facts['ranks']}"
    is_plain = all(isinstance(word, str) and not {"@", "%", "="} & set(word) for word in words)
    if is_plain and name.isascii() and len(name) <= lib.SHMC_NAME_MAX:
        return name
    return f"lmcache:sha256={_digest_of(facts)}"


def _digest_of(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _stored(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts as a descriptor, which has room for 1 KiB: of longer tags a hash, from which no key can be told."""
    try:
        if len(json.dumps(facts, ensure_ascii=False).encode()) <= lib.SHMC_DESC_MAX:
            return facts
    except UnicodeEncodeError:
        pass
    return {**facts, "model": facts["model"][:64].encode("ascii", "replace").decode(), "tags": None,
            "sha256": _digest_of(facts)}  # fmt: skip
