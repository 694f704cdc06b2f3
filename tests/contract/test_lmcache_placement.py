"""Where keys lie: layers, ranks, hosts, tags, MLA; how large the segment is; what several handles make of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from contract_kits import BF16, MIB, Kit, Sink

import shmcache
from shmcache import _sizing, allocators, errors
from shmcache.backend import SharedCPUBackend
from shmcache.config import EngineMetadata, LayerGroup

T2D = torch.Size((16, 2, 64))  # a layer's object
CHUNK = torch.Size((2, 4, 16, 64))


class Setup:
    """Backends over segments of one name; at the end all goes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kit = Kit("", name)
        self.made: list[SharedCPUBackend] = []

    def __call__(
        self, *, extra: dict[str, Any] | None = None, meta: dict[str, Any] | None = None, worker: Any = None,
        **settings: Any,
    ) -> SharedCPUBackend:  # fmt: skip
        settings = {"max_local_cpu_size": "1MiB", **settings}
        config = self.kit.config(extra_config={"shm_name": self.name, **(extra or {})}, **settings)
        fields = {"world_size": 1, "local_world_size": 1, "kv_shape": (4, 2, 16, 1, 64), **(meta or {})}
        metadata = self.kit.metadata(**fields)
        metadata.chunk_size = 16
        backend = SharedCPUBackend(config, metadata, "cpu", worker)
        self.made.append(backend)
        return backend

    def key(self, chunk: Any, worker: int = 0, world: int = 1, **fields: Any) -> Any:
        return self.kit.key(chunk, worker, world_size=world, **fields)

    def put(self, backend: Any, key: Any, value: float = 1.0, shape: torch.Size = CHUNK, fmt: Any = None) -> None:
        obj = backend.allocate(shape, BF16, fmt, busy_loop=False)
        obj.tensor.fill_(value)
        backend.submit_put_task(key, obj)
        obj.ref_count_down()

    def close(self) -> None:
        for backend in self.made:
            backend.close()
        self.made.clear()


@pytest.fixture
def make(name: str) -> Iterator[Setup]:
    setup = Setup(name)
    yield setup
    setup.close()
    if any(s.name == name for s in shmcache.segments()):
        shmcache.unlink(name, force=True)


# ---- layers -------------------------------------------------------------------------------------------


def test_each_layer_is_a_key_of_its_own(make: Setup) -> None:
    backend = make(use_layerwise=True)
    layers = make.key(1).split_layers(4)
    for i in (0, 2):
        make.put(backend, layers[i], i, T2D)
    assert [backend.contains(k) for k in layers] == [True, False, True, False]
    assert [k.layer_id for k in backend.get_keys()] == [0, 2]
    assert backend.batched_contains(layers) == 1
    assert backend.get_blocking(layers[1]) is None and layers[2] in backend.hot_cache
    got = backend.get_blocking(layers[2])
    assert float(got.tensor.max()) == 2 and got.metadata.fmt.name == "KV_T2D" and got.get_num_tokens() == 16
    got.ref_count_down()


def test_batches_of_layers(make: Setup) -> None:
    """As the engine does them: all layers of a chunk, and one layer of all chunks."""
    backend = make(use_layerwise=True)
    chunks = [make.key(c).split_layers(4) for c in range(3)]
    for chunk in chunks:
        objs = backend.batched_allocate(T2D, BF16, 4, busy_loop=False)
        for i, obj in enumerate(objs):
            obj.tensor.fill_(chunk[i].chunk_hash * 10 + i)
        backend.batched_submit_put_task(chunk, objs)
        for obj in objs:
            obj.ref_count_down()
    assert backend.get_keys() == [k for chunk in chunks for k in chunk]
    for layer in range(4):
        keys = [chunk[layer] for chunk in chunks]
        assert asyncio.run(backend.batched_async_contains("x", keys, pin=True)) == 3
        found = asyncio.run(backend.batched_get_non_blocking("x", keys))
        assert [float(obj.tensor.max()) for obj in found] == [c * 10 + layer for c in range(3)]
        for obj in found:
            assert obj.unpin() is True
            obj.ref_count_down()
    assert backend.cache.stats().counts.holds == 0
    mixed = [chunks[0][1], chunks[2][3], chunks[1][0]]
    found = backend.batched_get_blocking(mixed)
    assert [float(obj.tensor.max()) for obj in found] == [1, 23, 10]
    for obj in found:
        obj.ref_count_down()
    assert backend.remove(chunks[1][2]) is True
    assert [backend.contains(k) for k in chunks[1]] == [False] * 4, "a chunk goes with all its layers"
    assert backend.clear() == 2 * 16, "tokens, not layers times tokens"


def test_a_chunk_of_layers_is_admitted_and_evicted_once(make: Setup) -> None:
    sink = Sink()
    config = make.kit.config(use_layerwise=True, max_local_cpu_size="1MiB", extra_config={"shm_name": make.name})
    meta = make.kit.metadata(world_size=1, local_world_size=1, kv_shape=(4, 2, 16, 1, 64))
    backend = SharedCPUBackend(config, meta, "cpu", sink)
    make.made.append(backend)
    told = []
    for key in make.key(7).split_layers(4):
        make.put(backend, key, shape=T2D)
        backend.batched_msg_sender.flush()
        told.append(len(sink.operations))
    assert told == [0, 0, 0, 1]
    backend.remove(make.key(7).split_layers(4)[1])
    make.put(backend, make.key(8).split_layers(4)[0], shape=T2D)
    backend.remove(make.key(8).split_layers(4)[0])
    backend.batched_msg_sender.flush()
    assert sink.story() == [("ADMIT", 7), ("EVICT", 7)], "what was never admitted is not evicted"


def test_layers_of_two_ranks_are_one_chunk(make: Setup) -> None:
    ranks = [make(use_layerwise=True, meta={"world_size": 2, "local_world_size": 2, "worker_id": r,
                                            "local_worker_id": r}) for r in (0, 1)]  # fmt: skip
    keys = [make.key(1, r, 2).split_layers(4) for r in (0, 1)]
    for r in (0, 1):
        for i, key in enumerate(keys[r]):
            make.put(ranks[r], key, r * 10 + i, T2D)
    (info,) = [i for i in ranks[0].cache.namespaces() if i.chunks]
    assert info.parts == 8 and info.complete == 1 and info.chunks == 1
    assert ranks[0].get_keys() == keys[0] and ranks[1].get_keys() == keys[1]
    got = ranks[0].get_blocking(keys[1][3])
    assert float(got.tensor.min()) == 13
    got.ref_count_down()


def test_a_layer_that_the_model_does_not_have(make: Setup) -> None:
    backend = make(use_layerwise=True)
    beyond = make.key(1).split_layers(5)[4]
    assert backend.contains(beyond) is False and backend.get_blocking(beyond) is None
    obj = backend.allocate(T2D, BF16)
    with pytest.raises(ValueError):
        backend.submit_put_task(beyond, obj)
    obj.ref_count_down()


def test_how_many_layers_there_are_must_be_known(make: Setup, name: str) -> None:
    backend = make()
    layer = make.key(1).get_first_layer()
    with pytest.raises(errors.ConfigurationError, match=r"shmcache\.num_layers"):
        backend.contains(layer)
    backend = make(extra={"shmcache.num_layers": 3})
    make.put(backend, make.key(1).split_layers(3)[2], shape=T2D)
    assert backend.contains(make.key(1).split_layers(3)[2])


@pytest.mark.parametrize(
    ("layerwise", "blending", "fmt"),
    [(False, False, "KV_2LTD"), (False, True, "KV_2LTD"), (True, False, "KV_T2D"), (True, True, "KV_2TD")],
)
def test_default_formats(make: Setup, layerwise: bool, blending: bool, fmt: str) -> None:
    backend = make(use_layerwise=layerwise, enable_blending=blending)
    key = make.key(1).get_first_layer() if layerwise else make.key(1)
    make.put(backend, key)
    got = backend.get_blocking(key)
    assert got.get_memory_format().name == fmt
    got.ref_count_down()


def test_positions_of_tokens_are_kept_for_blending(make: Setup) -> None:
    """What was set on the metadata before the put is read by another handle; none where none was set."""
    one = make(use_layerwise=True, enable_blending=True)
    two = make(use_layerwise=True, enable_blending=True)
    shape = torch.Size((2, 16, 64))
    for chunk, positions in ((1, torch.arange(100, 116)), (2, None), (3, torch.arange(5))):
        key = make.key(chunk).get_first_layer()
        obj = one.allocate(shape, BF16, busy_loop=False)
        assert obj.metadata.cached_positions is None, "memory may have held another's"
        obj.tensor.fill_(chunk)
        obj.metadata.cached_positions = positions
        one.batched_submit_put_task([key], [obj])
        obj.ref_count_down()
        got = two.get_blocking(key)
        found = got.metadata.cached_positions
        assert (found is None) if positions is None else torch.equal(found, positions)
        assert got.get_size() == shape.numel() * 2 and float(got.tensor.max()) == chunk
        got.ref_count_down()
        assert one.remove(key)


# ---- groups of layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["large first", "small first"])
def test_objects_of_hybrid_models_round_trip(make: Setup, order: str) -> None:
    """Two groups, of other shapes and dtypes; also a partial chunk."""
    groups = [LayerGroup(3, 64, torch.float32), LayerGroup(2, 32, BF16, 1)]
    if order == "small first":
        groups.reverse()
    backend = make()
    meta = EngineMetadata("m", 1, 1, 0, 0, BF16, (5, 2, 16, 1, 64), chunk_size=16, layer_groups=groups)
    backend.metadata = meta
    total = 2 * 3 * 16 * 64 * 4 + 2 * 16 * 32 * 2
    assert backend.get_full_chunk_size_bytes() == total
    for chunk, tokens in ((1, 16), (2, 5)):
        shapes, dtypes = meta.get_shapes(tokens), meta.get_dtypes()
        (obj,) = backend.batched_allocate(shapes, dtypes, 1, busy_loop=False)
        for i in range(2):
            obj.get_tensor(i).fill_(10 * chunk + i)
        backend.submit_put_task(make.key(chunk), obj)
        obj.ref_count_down()
        other = make()
        got = other.get_blocking(make.key(chunk))
        assert got.get_shapes() == shapes and got.get_dtypes() == dtypes
        assert got.metadata.shapes == shapes and got.metadata.dtypes == dtypes
        assert got.get_size() == got.metadata.get_size() == sum(s.numel() * d.itemsize for s, d in zip(
            shapes, dtypes, strict=True))  # fmt: skip
        assert [float(got.get_tensor(i).min()) for i in range(2)] == [10 * chunk, 10 * chunk + 1]
        got.ref_count_down()


def test_layers_of_groups_add_up(make: Setup) -> None:
    """A layerwise hybrid model has as many layers as its groups together."""
    meta = EngineMetadata("m", 1, 1, 0, 0, BF16, (5, 2, 16, 1, 64), chunk_size=16,
                          layer_groups=[LayerGroup(3, 64, BF16), LayerGroup(2, 64, BF16)])  # fmt: skip
    config = make.kit.config(use_layerwise=True, max_local_cpu_size="1MiB", extra_config={"shm_name": make.name})
    backend = SharedCPUBackend(config, meta, "cpu")
    make.made.append(backend)
    keys = make.key(1, model_name="m").split_layers(5)
    for key in keys:
        make.put(backend, key, shape=T2D)
    assert backend.get_keys() == keys
    assert backend.get_full_chunk_size_bytes() == T2D.numel() * 2


# ---- ranks and hosts ------------------------------------------------------------------------------------


def test_keys_of_ranks_of_another_host(make: Setup) -> None:
    """Ranks 2 and 3 of 4 are here."""
    backend = make(meta={"world_size": 4, "local_world_size": 2, "worker_id": 3, "local_worker_id": 1})
    for worker in (2, 3):
        make.put(backend, make.key(1, worker, 4), worker)
    assert [backend.contains(make.key(1, w, 4)) for w in range(5)] == [False, False, True, True, False]
    assert backend.get_blocking(make.key(1, 0, 4)) is None and backend.pin(make.key(1, 1, 4)) is False
    assert backend.remove(make.key(1, 0, 4)) is False
    obj = backend.allocate(CHUNK, BF16)
    with pytest.raises(ValueError, match=r"no rank of this host: ranks are \[2, 3\]"):
        backend.submit_put_task(make.key(1, 0, 4), obj)
    assert obj.get_ref_count() == 1
    obj.ref_count_down()
    assert [k.worker_id for k in backend.get_keys()] == [3]


def test_with_rank_agreement_a_chunk_counts_when_all_ranks_have_put(make: Setup) -> None:
    both = {"world_size": 2, "local_world_size": 2}
    plain = make(meta=both)
    agreeing = make(meta=both, extra={"shmcache.rank_agreement": True})
    keys = [make.key(c, 0, 2) for c in range(3)]
    for key in keys:
        make.put(plain, key)
    assert plain.contains(keys[0]) and not agreeing.contains(keys[0])
    assert plain.batched_contains(keys) == 3 and agreeing.batched_contains(keys) == 0
    assert agreeing.contains(keys[0], pin=True) is False and agreeing.keys_in_request == []
    for chunk in (0, 1):
        make.put(plain, make.key(chunk, 1, 2))
    assert agreeing.contains(keys[0]) and agreeing.batched_contains(keys, pin=True) == 2
    assert asyncio.run(agreeing.batched_async_contains("x", [make.key(c, 1, 2) for c in range(3)], pin=True)) == 2
    assert agreeing.contains(keys[2]) is False
    got = agreeing.get_blocking(keys[2])
    assert got is not None, "a get asks for one part"
    got.ref_count_down()


def test_mla_has_one_copy_unless_it_is_switched_off(make: Setup) -> None:
    mla = {"world_size": 2, "local_world_size": 2, "use_mla": True, "kv_shape": (4, 1, 16, 1, 64)}
    backend = make(meta=mla)
    assert backend.cache.capacity == MIB
    make.put(backend, make.key(1, 0, 2), 5)
    assert backend.contains(make.key(1, 1, 2)) and [k.worker_id for k in backend.get_keys()] == [0]
    assert backend.calculate_chunk_budget() == MIB // (4 * 16 * 64 * 2)
    make.close()
    shmcache.unlink(make.name)
    backend = make(meta=mla, extra={"save_only_first_rank": False})
    assert backend.cache.capacity == 2 * MIB
    make.put(backend, make.key(1, 0, 2), 5)
    assert not backend.contains(make.key(1, 1, 2))


# ---- what selects a namespace -----------------------------------------------------------------------------


def test_tags_models_dtypes_and_world_sizes_do_not_mix(make: Setup) -> None:
    backend = make()
    tag = "lmcache.tag."
    keys = [
        make.key(1), make.key(1, request_configs={tag + "u": "ann"}), make.key(1, request_configs={tag + "u": "bob"}),
        make.key(1, request_configs={tag + "u": "ann", tag + "v": "1"}),
        make.key(1, request_configs={tag + "v": "1", tag + "u": "ann"}), make.key(1, dtype=torch.float16),
        make.key(1, world=2), make.key(1, model_name="other"),
    ]  # fmt: skip
    for i, key in enumerate(keys):
        assert not backend.contains(key), i
        make.put(backend, key, i)
    for i, key in enumerate(keys):
        got = backend.get_blocking(key)
        assert float(got.tensor.max()) == i
        got.ref_count_down()
    same = make.key(1, request_configs={tag + "u": "ann", "no-tag": 1})
    assert backend.contains(same)
    names = {i.name for i in backend.cache.namespaces() if i.chunks}
    assert len(names) == len(keys)
    assert backend.remove(keys[1]) and not backend.contains(same) and backend.contains(keys[0])
    there = backend.get_keys()
    assert len(there) == len(keys) - 1 == len(backend.hot_cache) and set(there) == set(keys) - {keys[1]}
    other = make()  # which met none of these keys
    mine = {k for k in there if (k.model_name, k.world_size) == ("test_model", 1)}
    assert set(other.get_keys()) == mine and len(other.hot_cache) == len(mine)
    assert other.clear() == 16 * len(mine)
    assert backend.clear() == 16 * (len(there) - len(mine)) and backend.get_keys() == []


def test_keys_of_another_world_are_listed_evicted_and_reported(make: Setup) -> None:
    """Whatever the metadata says: the backend stores what it is given, and has it then."""
    worker = Sink()
    backend = make(worker=worker)
    key = make.key(1, world=3, worker=2, model_name="another")
    alone = make.key(2, world=1, model_name="another")
    for one in (key, alone):
        make.put(backend, one)
    assert backend.get_keys() == [key, alone] and list(backend.hot_cache) == [key, alone]
    assert backend.cache_policy.get_evict_candidates(backend.hot_cache, 2)[-1] == alone
    assert backend.batched_msg_sender.flush() and worker.story() == [("ADMIT", 2)], "the other has 3 ranks"
    assert backend.clear() == 32


@pytest.mark.parametrize(
    ("meta", "extra", "settings"),
    [
        ({"kv_shape": (4, 2, 16, 2, 64)}, {}, {}),
        ({"kv_shape": (3, 2, 16, 1, 64)}, {}, {}),
        ({"kv_dtype": torch.float16}, {}, {}), ({}, {"shmcache.revision": "main@2"}, {}),
    ],
    ids=["heads", "layers", "dtype", "revision"],
)  # fmt: skip
def test_bytes_that_look_different_do_not_mix(
    make: Setup, meta: dict[str, Any], extra: dict[str, Any], settings: dict[str, Any]
) -> None:
    """The same model name and the same hashes, but other bytes behind them."""
    one, two = make(), make(meta=meta, extra=extra, **settings)
    make.put(one, make.key(1), 1)
    assert not two.contains(make.key(1))
    make.put(two, make.key(1), 2)
    for backend, value in ((one, 1), (two, 2)):
        got = backend.get_blocking(make.key(1))
        assert float(got.tensor.max()) == value
        got.ref_count_down()
    assert len(one.get_keys()) == len(two.get_keys()) == 1 == len(one.hot_cache)
    assert one.clear() == 16 and not one.contains(make.key(1))
    assert two.contains(make.key(1)), "those of the other bytes are not this backend's to clear"


def test_stages_of_a_pipeline_with_unequal_layers_are_one_chunk(make: Setup) -> None:
    """Of 7 layers rank 0 has 4 and rank 1 has 3: their parts differ in size, and make one chunk."""
    ranks = [
        make(
            extra={"shmcache.rank_agreement": True},
            meta={"world_size": 2, "local_world_size": 2, "worker_id": r, "local_worker_id": r,
                  "kv_shape": (4 - r, 2, 16, 1, 64)},
        )
        for r in (0, 1)
    ]  # fmt: skip
    for r in (0, 1):
        assert not ranks[0].contains(make.key(1, 0, 2))
        make.put(ranks[r], make.key(1, r, 2), r, torch.Size((2, 4 - r, 16, 64)))
    assert ranks[0].contains(make.key(1, 0, 2)) and ranks[1].contains(make.key(1, 1, 2))
    got = ranks[0].get_blocking(make.key(1, 1, 2))
    assert got.get_shape() == (2, 3, 16, 64)
    got.ref_count_down()


def test_the_ranks_of_a_host_may_be_said(make: Setup) -> None:
    """For engines that give the world's size as the host's: of 8 ranks, 4 and 5 are here."""
    said = {"shmcache.local_ranks": 2, "shmcache.first_rank": 4}
    backend = make(extra=said, meta={"world_size": 8, "local_world_size": 8, "worker_id": 5, "local_worker_id": 1})
    assert backend.cache.capacity == 2 * MIB
    for worker in (4, 5):
        make.put(backend, make.key(1, worker, 8), worker)
    assert [backend.contains(make.key(1, w, 8)) for w in (3, 4, 5, 6)] == [False, True, True, False]
    with pytest.raises(errors.ConfigurationError, match=r"shmcache\.first_rank"):
        make(extra={"shmcache.first_rank": 9}, meta={"world_size": 8, "local_world_size": 2, "worker_id": 5})


def test_tags_that_look_like_others_do_not_mix(make: Setup) -> None:
    """A tag's value may hold what separates tags, a model's name too; and 5 is not "5"."""
    backend = make()
    tag = "lmcache.tag."
    keys = [
        make.key(1, request_configs=configs, model_name=model)
        for model, configs in (
            ("test_model", {tag + "a": "1@b%2"}), ("test_model", {tag + "a": "1", tag + "b": "2"}),
            ("test_model", {tag + "a%1@b": "2"}), ("test_model", {tag + "n": 5}), ("test_model", {tag + "n": "5"}),
            ("m@1@bfloat16@x%1", None), ("m", {tag + "x": "1"}), ("test_model", {tag + "a": "1@mla"}),
        )
    ]  # fmt: skip
    for i, key in enumerate(keys):
        assert not backend.contains(key), i
        make.put(backend, key, i)
    other = make()
    assert set(other.get_keys()) == {key for key in keys if key.model_name == "test_model"}
    for i, key in enumerate(keys):
        got = other.get_blocking(key)
        assert float(got.tensor.max()) == i
        got.ref_count_down()
    assert set(other.get_keys()) == set(keys), "those that it met"


def test_tags_of_any_length(make: Setup) -> None:
    """Longer ones than a segment can note are stored, and do not mix; their keys are not listed."""
    backend = make()
    keys = [make.key(1, request_configs={"lmcache.tag.user": "x" * size}) for size in (700, 1200, 1201)]
    for i, key in enumerate(keys):
        assert backend.contains(key) is False and backend.get_blocking(key) is None
        make.put(backend, key, i)
    other = make()
    for i, key in enumerate(keys):
        got = other.get_blocking(key)
        assert float(got.tensor.max()) == i
        got.ref_count_down()
    assert keys[0] in other.get_keys()


def test_chunk_hashes_of_all_kinds(make: Setup) -> None:
    backend = make()
    hashes = [0, 1, -1, 2**63, -(2**64), 2**256 - 1, b"\x01", b"\x00" * 32, b"\xff" * 32]
    for i, chunk in enumerate(hashes):
        make.put(backend, make.key(chunk), i)
    assert [k.chunk_hash for k in backend.get_keys()] == hashes
    for i, chunk in enumerate(hashes):
        got = backend.get_blocking(make.key(chunk))
        assert float(got.tensor.max()) == i
        got.ref_count_down()


def test_a_long_model_name(make: Setup) -> None:
    names = ["org/" + "x" * 300 + end for end in ("a", "b")]
    for i, model in enumerate(names):
        backend = make(meta={"model_name": model})
        make.put(backend, make.key(1, model_name=model), i)
        assert [k.model_name for k in backend.get_keys()] == [model]
        got = backend.get_blocking(make.key(1, model_name=model))
        assert float(got.tensor.max()) == i
        got.ref_count_down()


def test_a_handle_lists_what_others_put_under_tags(make: Setup) -> None:
    one, two = make(), make()
    tagged = make.key(1, request_configs={"lmcache.tag.u": "ann"})
    make.put(one, tagged)
    assert two.get_keys() == [tagged] and len(two.hot_cache) == 1
    assert two.clear() == 16 and one.get_keys() == []


def test_a_handle_is_told_of_candidates_that_others_put_under_tags(make: Setup) -> None:
    one, two = make(), make()
    tagged = make.key(1, request_configs={"lmcache.tag.u": "ann"})
    make.put(one, tagged)
    assert two.cache_policy.get_evict_candidates(two.hot_cache, 1) == [tagged]


@pytest.mark.parametrize(
    "fields",
    [
        {"request_configs": {"lmcache.tag.u": "ann"}},
        {"model_name": "another"},
        {"dtype": torch.float16},
        {"world": 2, "worker": 1},
    ],
    ids=str,
)
def test_a_miss_is_one_only_until_somebody_puts(make: Setup, fields: dict[str, Any]) -> None:
    """Also where the namespace was not there when it was first asked for, and others came meanwhile."""
    one, two = make(), make()
    key, other = make.key(1, **fields), make.key(1, request_configs={"lmcache.tag.u": "bob"})
    for _ in range(2):
        assert not two.contains(key) and two.get_blocking(key) is None and two.batched_contains([key]) == 0
    make.put(one, other)
    assert not two.contains(key)
    make.put(one, key)
    assert two.contains(key) and two.batched_contains([key]) == 1 and two.pin(key) and two.unpin(key)


def test_a_namespace_whose_maker_died_half_way_hides_no_other(make: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader may see one that is rolled back then, and whose place goes to another."""
    one, two = make(), make()
    key = make.key(1, request_configs={"lmcache.tag.u": "ann"})
    real = shmcache.SharedCache.find_namespace
    monkeypatch.setattr(shmcache.SharedCache, "find_namespace", lambda *args: (False, real(*args)[1] + 1))
    assert not two.contains(key)
    monkeypatch.undo()
    make.put(one, key)
    assert two.contains(key)


# ---- pages ------------------------------------------------------------------------------------------------


def test_pages_for_peer_to_peer(make: Setup) -> None:
    """`metadata.address` is the number of the page, for every handle; smaller objects take a page, too."""
    one = make(enable_p2p=True)
    page = CHUNK.numel() * 2
    assert one.cache.capacity == MIB // page * page
    small = torch.Size((2, 4, 3, 64))
    for i, shape in enumerate([CHUNK, small, CHUNK, small]):
        make.put(one, make.key(i), i, shape)
    two = make(enable_p2p=True)
    for i, shape in enumerate([CHUNK, small, CHUNK, small]):
        got = two.get_blocking(make.key(i))
        assert got.metadata.address == i and got.shm_offset == i * page
        assert got.tensor.shape == shape and got.get_size() == shape.numel() * 2 and got.get_physical_size() == page
        assert float(got.tensor.min()) == i == float(got.tensor.max()) and got.get_num_tokens() == shape[2]
        start = got.metadata.address * page
        flat = two.memory_allocator.buffer[start : start + got.get_size()].view(BF16)
        assert bool((flat == i).all()), "a transfer by page number reads these bytes"
        got.ref_count_down()
    engine = two.get_memory_allocator().cpu_allocator  # as LMCache's P2PBackend asks it
    assert engine.shapes == [CHUNK] and engine.dtypes == [BF16] and engine.align_bytes == page
    assert engine.buffer_ptr == two.memory_allocator.buffer.data_ptr() and engine.buffer_size == MIB
    budget = one.calculate_chunk_budget()
    assert budget == MIB // page
    assert len(one.batched_allocate(small, BF16, budget, busy_loop=False)) == budget, "all chunks gave way"
    with pytest.raises(ValueError, match="page"):
        one.allocate(torch.Size((2, 4, 17, 64)), BF16)


def test_copies_of_foreign_objects_take_pages_too(make: Setup) -> None:
    backend = make(enable_p2p=True)
    other = allocators.MixedMemoryAllocator(MIB)
    page = CHUNK.numel() * 2
    shapes = [torch.Size((2, 4, 3, 64)), CHUNK, torch.Size((2, 4, 5, 64))]
    for i, shape in enumerate(shapes):
        obj = other.allocate(shape, BF16, allocators.MemoryFormat.KV_2LTD)
        obj.tensor.fill_(i)
        backend.submit_put_task(make.key(i), obj)
    for i, shape in enumerate(shapes):
        got = backend.get_blocking(make.key(i))
        assert got.metadata.address * page == got.shm_offset and got.get_physical_size() == page
        assert got.tensor.shape == shape and float(got.tensor.max()) == i
        got.ref_count_down()


def test_pages_need_metadata(make: Setup) -> None:
    config = make.kit.config(enable_p2p=True, max_local_cpu_size="1MiB", extra_config={"shm_name": make.name})
    with pytest.raises(errors.ConfigurationError, match="metadata"):
        SharedCPUBackend.initialize_allocator(object.__new__(SharedCPUBackend), config, None)


def test_layerwise_pages_hold_a_layer_each(make: Setup) -> None:
    """LMCache's batched_allocate fails here."""
    backend = make(enable_p2p=True, use_layerwise=True)
    keys = make.key(1).split_layers(4)
    objs = backend.batched_allocate(T2D, BF16, 4, busy_loop=False)
    assert [obj.metadata.address for obj in objs] == [0, 1, 2, 3]
    backend.batched_submit_put_task(keys, objs)
    assert backend.batched_contains(keys) == 4


# ---- sizes ------------------------------------------------------------------------------------------------


def sized(**fields: Any) -> Any:
    return Kit("", "").config(**fields)


def mla(worker: int = 0) -> Any:
    return Kit("", "").metadata(
        world_size=2, local_world_size=2, worker_id=worker, local_worker_id=worker, use_mla=True
    )


def test_the_first_rank_may_have_a_size_of_its_own() -> None:
    config = sized(max_local_cpu_size=2, extra_config={"first_rank_max_local_cpu_size": 7})
    assert _sizing.configured_gib(config, mla(0)) == 7.0
    assert _sizing.configured_gib(config, mla(1)) == 7.0, "it is the same segment"
    elsewhere = Kit("", "").metadata(world_size=4, local_world_size=2, worker_id=3, local_worker_id=1, use_mla=True)
    assert _sizing.configured_gib(config, elsewhere) == 2.0
    assert _sizing.configured_gib(config, Kit("", "").metadata()) == 2.0, "only with MLA"
    off = sized(max_local_cpu_size=2, extra_config={
        "first_rank_max_local_cpu_size": 7, "save_only_first_rank": False})  # fmt: skip
    assert _sizing.configured_gib(off, mla(0)) == 2.0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_whichever_rank_comes_first_makes_the_segment_of_the_first_rank(make: Setup, order: tuple[int, int]) -> None:
    extra = {"first_rank_max_local_cpu_size": 3 / 1024}
    for rank in order:
        backend = make(
            extra=extra, meta={"world_size": 2, "local_world_size": 2, "worker_id": rank, "local_worker_id": rank,
                               "use_mla": True, "kv_shape": (4, 1, 16, 1, 64)},
        )  # fmt: skip
        assert backend.cache.capacity == 3 * MIB


def test_what_is_reserved_is_left_to_the_system(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module_has in (4.0,):
        monkeypatch.setattr(_sizing, "available_memory_gib", lambda has=module_has: has)
    config = sized(max_local_cpu_size=3, reserve_local_cpu_size=2.5)
    assert _sizing.effective_gib(3.0, config, mla()) == 1.5
    assert _sizing.effective_gib(1.0, config, mla()) == 1.0
    assert _sizing.effective_gib(3.0, config, Kit("", "").metadata()) == 3.0, "only with MLA"
    assert _sizing.effective_gib(3.0, config, None) == 3.0
    with pytest.raises(errors.ConfigurationError, match="reserve_local_cpu_size"):
        _sizing.effective_gib(3.0, sized(reserve_local_cpu_size=4), mla())
    monkeypatch.setattr(_sizing, "available_memory_gib", lambda: 0.0)
    with caplog.at_level(logging.WARNING, "shmcache"):
        assert _sizing.effective_gib(3.0, config, mla()) == 3.0
    assert "configured size" in caplog.text


def test_the_rules_of_sizes_are_lmcaches(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same private method on both sides."""
    backend = kit.backend()
    if kit.ours:
        monkeypatch.setattr(_sizing, "available_memory_gib", lambda: 4.0)
    else:
        from lmcache.v1.system_detection import SystemMemoryDetector

        monkeypatch.setattr(SystemMemoryDetector, "get_available_memory_gb", staticmethod(lambda: 4.0))
    first = kit.metadata(use_mla=True)
    for reserve, expected in ((0.0, 3.0), (0.5, 3.0), (1.5, 2.5), (3.75, 0.25)):
        config = kit.config(reserve_local_cpu_size=reserve)
        assert backend._calculate_effective_cpu_size(3.0, config, first) == expected
        assert backend._calculate_effective_cpu_size(3.0, config, kit.metadata()) == 3.0
    for reserve in (4.0, 9.0):
        with pytest.raises(AssertionError):
            backend._calculate_effective_cpu_size(3.0, kit.config(reserve_local_cpu_size=reserve), first)


@pytest.mark.parametrize(("explicit", "align"), [(None, 4096), (512, 512), (65536, 65536)])
def test_a_segment_has_the_alignment_that_is_asked(make: Setup, explicit: int | None, align: int) -> None:
    backend = make(extra={} if explicit is None else {"local_cpu.pinned_align_bytes": explicit})
    assert backend.memory_allocator.align_bytes == align
    obj = backend.allocate(torch.Size((3,)), torch.uint8)
    assert obj.get_physical_size() == align
    obj.ref_count_down()


def test_capacity_may_be_said_for_the_whole_host(make: Setup) -> None:
    backend = make(max_local_cpu_size=0, extra={"shmcache.capacity": "3MiB"})
    assert backend.cache.capacity == 3 * MIB
    again = make(max_local_cpu_size=0)
    assert again.cache.capacity == 3 * MIB, "0: what is there"


def test_without_a_size_the_segment_has_to_be_there(make: Setup) -> None:
    with pytest.raises(shmcache.SegmentNotFoundError):
        make(max_local_cpu_size=0)


# ---- several handles -----------------------------------------------------------------------------------------


def test_other_parameters_replace_a_segment_that_nobody_uses(make: Setup) -> None:
    make.put(backend := make(), make.key(1))
    assert backend.cache.capacity == MIB
    make.close()
    backend = make(max_local_cpu_size="2MiB")
    assert backend.cache.capacity == 2 * MIB and backend.get_keys() == []
    make.close()
    backend = make(max_local_cpu_size="2MiB", cache_policy="FIFO", extra={"local_cpu.pinned_align_bytes": 8192})
    assert backend.memory_allocator.align_bytes == 8192 and backend.cache.capacity == 2 * MIB


def test_the_same_parameters_find_what_is_there(make: Setup) -> None:
    make.put(make(), make.key(1), 4)
    make.close()
    backend = make()
    got = backend.get_blocking(make.key(1))
    assert float(got.tensor.max()) == 4
    got.ref_count_down()


def test_a_segment_in_use_is_taken_as_it_is(make: Setup, caplog: pytest.LogCaptureFixture) -> None:
    first = make()
    make.put(first, make.key(1), 4)
    with caplog.at_level(logging.WARNING, "shmcache"):
        second = make(max_local_cpu_size="2MiB", extra={"local_cpu.pinned_align_bytes": 8192})
    assert "taken as it is" in caplog.text and "2MiB" in caplog.text.replace(" ", "")
    assert second.cache.capacity == MIB and second.memory_allocator.align_bytes == 4096
    assert second.memory_allocator.size == MIB
    assert second.contains(make.key(1))


@pytest.mark.parametrize("kind", ["pages", "no pages"])
def test_a_handle_with_pages_never_gives_a_wrong_address(make: Setup, kind: str) -> None:
    """One with pages and one without on a segment: bytes are right for both, and so is each page number or none."""
    one = make(enable_p2p=kind == "pages")
    two = make(enable_p2p=kind != "pages")
    shapes = [torch.Size((2, 4, 3, 64)), torch.Size((2, 4, 5, 64)), CHUNK, CHUNK]
    for chunk, (backend, shape) in enumerate(zip((one, two) * 4, shapes * 2, strict=True)):
        make.put(backend, make.key(chunk), chunk, shape)
    page = CHUNK.numel() * 2
    outside = 0
    for chunk in range(8):
        for backend, is_paged in ((one, kind == "pages"), (two, kind != "pages")):
            got = backend.get_blocking(make.key(chunk))
            assert float(got.tensor.max()) == chunk == float(got.tensor.min())
            if got.shm_offset % page and is_paged:
                outside += 1
                with pytest.raises(errors.ConfigurationError, match="enable_p2p"):
                    _ = got.metadata
            else:
                assert got.metadata.address * (page if is_paged else 1) == got.shm_offset
            got.ref_count_down()
    assert outside and one.cache.verify() == []


def test_other_parts_under_the_same_name_are_an_error(make: Setup) -> None:
    """Two models of one name and other layers, layerwise: they get namespaces of their own."""
    one = make(use_layerwise=True)
    two = make(use_layerwise=True, meta={"kv_shape": (6, 2, 16, 1, 64)})
    make.put(one, make.key(1).split_layers(4)[3], 1, T2D)
    make.put(two, make.key(1).split_layers(6)[3], 2, T2D)
    got = one.get_blocking(make.key(1).split_layers(4)[3])
    assert float(got.tensor.max()) == 1
    got.ref_count_down()


def test_without_memory_for_a_copy_a_foreign_object_is_not_stored(
    make: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make()
    held = backend.batched_allocate(CHUNK, BF16, MIB // (CHUNK.numel() * 2))
    foreign = allocators.MixedMemoryAllocator(MIB).allocate(CHUNK, BF16)
    called: list[Any] = []
    with caplog.at_level(logging.WARNING, "shmcache"):
        backend.submit_put_task(make.key(1), foreign, on_complete_callback=called.append)
    assert "not stored: no memory" in caplog.text and called == [] and not backend.contains(make.key(1))
    held.pop().ref_count_down()
    backend.submit_put_task(make.key(1), foreign, on_complete_callback=called.append)
    assert called == [make.key(1)] and foreign.get_ref_count() == 1 and foreign.is_valid()
    assert [obj.get_ref_count() for obj in held] == [1] * len(held)


def test_when_all_namespaces_are_in_use_nothing_is_stored_and_it_is_logged(
    make: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """Each set of tags is a namespace, of which a segment has so many."""
    backend = make()
    most = int(backend.cache._attached().mapping.geometry.max_namespaces)
    keys = [make.key(1, request_configs={"lmcache.tag.user": str(i)}) for i in range(most + 3)]
    obj = backend.allocate(CHUNK, BF16)
    with caplog.at_level(logging.WARNING, "shmcache"):
        for key in keys:
            backend.submit_put_task(key, obj)
    assert "not stored" in caplog.text and str(most) in caplog.text
    there = [backend.contains(key) for key in keys]
    assert there[0] and not any(there[-3:])
    obj.ref_count_down()
    make.put(backend, make.key(2))
    assert backend.contains(make.key(2)) and backend.cache.verify() == []


def test_looks_and_gets_are_no_use(make: Setup) -> None:
    """Only a touch moves a chunk; a get by a lookup id is one."""
    backend = make()
    for chunk in range(4):
        make.put(backend, make.key(chunk))
    backend.contains(make.key(0))
    backend.batched_contains([make.key(0)])
    backend.get_blocking(make.key(0)).ref_count_down()
    backend.pin(make.key(0)) and backend.unpin(make.key(0))
    assert [k.chunk_hash for k in backend.get_keys()] == [0, 1, 2, 3]
    keys = [make.key(0), make.key(1)]
    asyncio.run(backend.batched_async_contains("x", keys, pin=True))
    for obj in asyncio.run(backend.batched_get_non_blocking("x", keys)):
        obj.unpin()
        obj.ref_count_down()
    assert [k.chunk_hash for k in backend.get_keys()] == [2, 3, 1, 0]


def test_the_class_of_the_segments_memory_is_the_mixed_allocator(make: Setup) -> None:
    backend = make()
    assert isinstance(backend.memory_allocator, allocators.MixedMemoryAllocator)
    obj = backend.allocate(torch.Size((100, 0, 0, 0)), None, allocators.MemoryFormat.BINARY_BUFFER)
    assert len(obj.byte_array) == 100
    obj.byte_array[:3] = b"abc"
    backend.submit_put_task(make.key(1), obj)
    got = backend.get_blocking(make.key(1))
    assert bytes(got.byte_array[:3]) == b"abc" and got.get_size() == 100
    got.ref_count_down()


def test_a_wrong_device_is_a_runtime_error(name: str) -> None:
    kit = Kit("private", name)
    make_it: Callable[[str], Any] = lambda device: SharedCPUBackend(  # noqa: E731
        kit.config(), None, device, None, kit.allocator(MIB)
    )
    with pytest.raises(RuntimeError):
        make_it("toaster")
    assert make_it("cuda").dst_device == ("cuda" if torch.cuda.is_available() else "cpu")
