"""What LMCache promises of LocalCPUBackend (T-L), for ours in all its forms and for LMCache's own."""

from __future__ import annotations

import asyncio
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from contract_differences import expected
from contract_kits import BF16, BYTES, MIB, SHAPE, Kit, Sink, in_threads, modules

import shmcache
from shmcache import errors

RUST = {"rust_raw_block.device_path": "/dev/null", "rust_raw_block.use_odirect": True}


def stored(backend: Any, key: Any) -> tuple[int, int]:
    """Address and references of what is stored under a key, not counting the look itself."""
    obj = backend.get_blocking(key)
    facts = (obj.data_ptr, obj.get_ref_count() - 1)
    obj.ref_count_down()
    return facts


# ---- construction -----------------------------------------------------------------------------------


def test_T_L1_a_given_allocator_is_used_as_it_is(kit: Kit) -> None:
    allocator = kit.allocator(MIB)
    backend = kit.backend(allocator=allocator)
    assert backend.use_hot is True
    assert backend.memory_allocator is backend.get_memory_allocator() is allocator
    assert backend.lmcache_worker is None and backend.instance_id == "test_instance"
    assert len(backend.hot_cache) == 0 and list(backend.hot_cache) == []
    assert backend.layerwise is False and backend.enable_blending is False
    assert backend.get_allocator_backend() is backend


def test_T_L1_neither_metadata_nor_allocator_is_a_configuration_error(kit: Kit) -> None:
    """AssertionError on both sides; ours says what is missing."""
    wrong = expected(kit, "settings that contradict", ours=errors.ConfigurationError, lmcache=AssertionError)
    with pytest.raises(wrong):
        kit._make(kit.config(), None, None, None)
    assert issubclass(wrong, AssertionError)


def test_T_L2_a_worker_without_metadata_gives_no_sender(kit: Kit) -> None:
    worker = Sink()
    backend = kit.backend(worker=worker)
    assert backend.lmcache_worker is worker and backend.batched_msg_sender is None


def test_T_L3_layerwise_and_blending_are_taken_from_the_config(kit: Kit) -> None:
    backend = kit.backend({"use_layerwise": True, "enable_blending": True})
    assert backend.layerwise is True and backend.enable_blending is True


def test_T_L4_the_name_is_that_of_the_class(kit: Kit) -> None:
    """LMCache, and the plug-in in its place, are LocalCPUBackend: the controller knows it by this."""
    name = "LocalCPUBackend" if kit.kind in ("plugin", "lmcache") else "SharedCPUBackend"
    assert str(kit.backend()) == name


# ---- contains ---------------------------------------------------------------------------------------


def test_T_L5_a_missing_key_is_not_there_pinned_or_not(kit: Kit) -> None:
    backend = kit.backend()
    assert backend.contains(kit.key(1)) is False
    assert backend.contains(kit.key(1), pin=True) is False
    assert backend.keys_in_request == []


def test_T_L6_a_stored_key_is_there(kit: Kit) -> None:
    backend = kit.backend()
    (obj,) = kit.fill(backend, [1], keep=True)
    assert backend.contains(kit.key(1)) is True and not obj.is_pinned
    assert backend.contains(kit.key(1), pin=True) is True and obj.is_pinned
    assert backend.keys_in_request == [kit.key(1)]


def test_T_L7_there_are_no_put_tasks(kit: Kit) -> None:
    backend = kit.backend()
    kit.fill(backend, [1])
    assert backend.exists_in_put_tasks(kit.key(1)) is False
    assert backend.exists_in_put_tasks(kit.key(2)) is False


# ---- put --------------------------------------------------------------------------------------------


def test_T_L8_a_put_stores_the_bytes_in_place_and_counts_one_reference(kit: Kit) -> None:
    backend = kit.backend()
    obj = kit.obj(backend, 3)
    assert obj.get_ref_count() == 1
    assert backend.submit_put_task(kit.key(1), obj) is None
    assert obj.get_ref_count() == 2
    assert kit.key(1) in backend.hot_cache
    found = backend.hot_cache[kit.key(1)]
    assert (found is obj) is expected(kit, "another object", ours=False, lmcache=True)
    assert found.data_ptr == obj.data_ptr and torch.equal(found.tensor, obj.tensor)
    del found
    gc.collect()
    assert obj.get_ref_count() == 2


def test_T_L9_a_second_put_changes_nothing(kit: Kit) -> None:
    backend = kit.backend()
    first, second = kit.obj(backend, 1), kit.obj(backend, 2)
    backend.submit_put_task(kit.key(1), first)
    called: list[Any] = []
    backend.submit_put_task(kit.key(1), second, on_complete_callback=called.append)
    assert stored(backend, kit.key(1)) == (first.data_ptr, 2)
    assert first.get_ref_count() == 2 and second.get_ref_count() == 1
    assert called == [] and float(first.tensor.sum()) == SHAPE.numel()


def test_T_L10_a_batch_is_stored_in_order(kit: Kit) -> None:
    backend = kit.backend()
    keys, objs = [kit.key(i) for i in (3, 1, 2)], [kit.obj(backend, i) for i in (3, 1, 2)]
    assert backend.batched_submit_put_task(keys, objs) is None
    assert list(backend.get_keys()) == keys
    assert [stored(backend, key)[0] for key in keys] == [obj.data_ptr for obj in objs]


def test_T_L10_a_longer_side_of_a_batch_is_cut_off(kit: Kit) -> None:
    backend = kit.backend()
    objs = [kit.obj(backend, i) for i in range(2)]
    backend.batched_submit_put_task([kit.key(i) for i in range(3)], objs[:2])
    backend.batched_submit_put_task([kit.key(7)], objs)
    assert sorted(k.chunk_hash for k in backend.get_keys()) == [0, 1, 7]


def test_T_L11_without_local_cpu_a_batch_is_not_stored(kit: Kit) -> None:
    backend = kit.backend({"local_cpu": False})
    obj = kit.obj(backend)
    assert backend.batched_submit_put_task([kit.key(1)], [obj]) is None
    assert backend.contains(kit.key(1)) is False and obj.get_ref_count() == 1
    backend.submit_put_task(kit.key(1), obj)  # the single form does not ask
    assert backend.contains(kit.key(1)) is True


def test_T_L12_a_batch_of_new_keys_is_one_notice_and_one_of_duplicates_none(kit: Kit) -> None:
    """References of the duplicates stay 1."""
    backend = kit.backend(metadata=kit.metadata(world_size=1, local_world_size=1))
    keys = [kit.key(i, world_size=1) for i in range(3)]
    objs, again = ([kit.obj(backend, i) for i in range(3)] for _ in range(2))
    told: list[Any] = []
    if not kit.ours:
        backend.cache_policy.update_on_put = told.append
    start = backend.cache.events().next if kit.ours else 0
    before = backend.cache.stats().lock.acquisitions if kit.ours else 0
    backend.batched_submit_put_task(keys, objs)
    notices = backend.cache.stats().lock.acquisitions - before if kit.ours else len(told)
    assert notices == expected(kit, "policy is told", ours=1, lmcache=3)
    told.clear()
    if kit.ours:
        admitted = backend.cache.events(start)
        assert [e.key for e in admitted] == [0, 1, 2]
        start = admitted.next
    backend.batched_submit_put_task(keys, again)
    assert told == [] and (not kit.ours or backend.cache.events(start) == [])
    assert [obj.get_ref_count() for obj in again] == [1, 1, 1]
    assert [obj.get_ref_count() for obj in objs] == [2, 2, 2]


def test_T_L_callback_once_for_each_newly_stored_key_and_what_it_raises_is_logged(kit: Kit) -> None:
    backend = kit.backend()
    called: list[Any] = []

    def callback(key: Any) -> None:
        called.append(key)
        raise RuntimeError("not the cache's problem")

    keys, objs = [kit.key(1), kit.key(2), kit.key(1)], [kit.obj(backend, i) for i in range(3)]
    backend.batched_submit_put_task(keys, objs, on_complete_callback=callback)
    assert called == keys[:2]
    assert backend.contains(keys[0]) and backend.contains(keys[1])


# ---- get --------------------------------------------------------------------------------------------


def test_T_L13_a_missing_key_gives_none(kit: Kit) -> None:
    backend = kit.backend()
    kit.fill(backend, [2])
    assert backend.get_blocking(kit.key(1)) is None
    found = backend.batched_get_blocking([kit.key(1), kit.key(2), kit.key(3)])
    assert [obj is not None for obj in found] == [False, True, False]


def test_T_L14_a_get_counts_a_reference_for_the_caller(kit: Kit) -> None:
    backend = kit.backend()
    (obj,) = kit.fill(backend, [5], keep=True)
    got = backend.get_blocking(kit.key(5))
    assert (got is obj) is expected(kit, "another object", ours=False, lmcache=True)
    assert got.data_ptr == obj.data_ptr and got.get_ref_count() == obj.get_ref_count() == 3
    assert got.metadata.fmt.name == "KV_T2D" and got.get_shape() == SHAPE and got.get_dtype() == BF16
    got.ref_count_down()
    assert obj.get_ref_count() == 2


def test_T_L26_references_of_a_life(kit: Kit) -> None:
    """r0 -> put r0+1 -> get r0+2 -> remove r0+1."""
    backend = kit.backend()
    obj = kit.obj(backend)
    r0 = obj.get_ref_count()
    backend.submit_put_task(kit.key(1), obj)
    assert obj.get_ref_count() == r0 + 1
    got = backend.get_blocking(kit.key(1))
    assert obj.get_ref_count() == r0 + 2
    assert backend.remove(kit.key(1)) is True
    assert obj.get_ref_count() == r0 + 1 == got.get_ref_count()
    got.ref_count_down()
    obj.ref_count_down()
    assert backend.memory_allocator.memcheck()
    assert not obj.is_valid() and obj.tensor is None


def test_T_L29_a_prefix_get_stops_at_the_first_miss(kit: Kit) -> None:
    """Of k0..k3 only k0 and k2 are stored: [k0], and a reference on nothing else."""
    backend = kit.backend()
    o0, o2 = kit.fill(backend, [0, 2], keep=True)
    keys = [kit.key(i) for i in range(4)]
    outcome = expected(kit, "leading run", ours=nullcontext(), lmcache=pytest.raises(KeyError))
    found: list[Any] = []
    with outcome:
        found = asyncio.run(backend.batched_get_non_blocking("lookup", keys, {}))
    assert len(found) == expected(kit, "leading run", ours=1, lmcache=0)
    assert o2.get_ref_count() == 2
    assert o0.get_ref_count() == 3, "ours: the caller's; LMCache: leaked"
    assert all(obj.data_ptr == o0.data_ptr for obj in found)


# ---- pins -------------------------------------------------------------------------------------------


def test_T_L15_pin_and_unpin_by_key(kit: Kit) -> None:
    backend = kit.backend()
    (obj,) = kit.fill(backend, [1], keep=True)
    assert backend.pin(kit.key(1)) is True and obj.is_pinned
    assert backend.unpin(kit.key(1)) is True and not obj.is_pinned
    assert backend.pin(kit.key(2)) is False and backend.unpin(kit.key(2)) is False
    assert backend.unpin(kit.key(1)) is expected(kit, "own pins", ours=False, lmcache=True)
    assert obj.get_ref_count() == 2 and backend.contains(kit.key(1))


def test_T_L_what_was_pinned_by_key_is_unpinned_through_the_object(kit: Kit) -> None:
    """As LMCache's retrieve does it."""
    backend = kit.backend()
    kit.fill(backend, [1])
    assert backend.contains(kit.key(1), pin=True)
    got = backend.get_blocking(kit.key(1))
    assert got.is_pinned and got.unpin() is True and not got.is_pinned
    got.ref_count_down()


def test_T_L_async_contains_pins_the_leading_run_only(kit: Kit) -> None:
    backend = kit.backend()
    objs = kit.fill(backend, [0, 1, 3], keep=True)
    keys = [kit.key(i) for i in range(4)]
    assert asyncio.run(backend.batched_async_contains("lookup", keys, pin=True)) == 2
    assert [obj.is_pinned for obj in objs] == [True, True, False]
    assert backend.keys_in_request == keys[:2]
    assert backend.batched_contains(keys) == 2
    assert backend.batched_contains(keys[1:], pin=True) == 1
    assert backend.batched_contains([]) == 0


def test_T_K_a_staging_object_and_a_looked_up_one_are_separate(kit: Kit) -> None:
    """Of the same bytes: the pins and references of one are not the other's."""
    backend = kit.backend()
    (found,) = kit.fill(backend, [1], keep=True)
    staging = kit.obj(backend, 1)
    assert backend.contains(kit.key(1), pin=True)
    assert found.is_pinned and not staging.is_pinned
    staging.ref_count_down()
    assert found.is_pinned and found.get_ref_count() == 2
    assert found.unpin() is True and not found.is_pinned


# ---- removal ----------------------------------------------------------------------------------------


def test_T_L16_remove_takes_the_key_and_one_reference(kit: Kit) -> None:
    backend = kit.backend()
    (obj,) = kit.fill(backend, [1], keep=True)
    assert obj.get_ref_count() == 2
    assert backend.remove(kit.key(1)) is True
    assert obj.get_ref_count() == 1 and not backend.contains(kit.key(1))
    assert obj.is_valid() and obj.tensor.shape == SHAPE, "its bytes live on while they are held"
    assert kit.key(1) not in backend.hot_cache and backend.get_keys() == []


def test_T_L16_remove_takes_all_ranks_parts(kit: Kit) -> None:
    backend = kit.backend()
    for worker in range(3):
        kit.fill(backend, [1], worker=worker)
    assert all(backend.contains(kit.key(1, worker)) for worker in range(3))
    assert backend.remove(kit.key(1, 1)) is True
    there = [backend.contains(kit.key(1, worker)) for worker in range(3)]
    assert there == expected(kit, "one entry for all ranks", ours=[False] * 3, lmcache=[True, False, True])


def test_T_L17_removing_a_missing_key_is_false(kit: Kit) -> None:
    backend = kit.backend()
    assert backend.remove(kit.key(1)) is False
    kit.fill(backend, [1, 2])
    assert backend.batched_remove([kit.key(1), kit.key(9), kit.key(2)]) == 2
    assert backend.get_keys() == []


def test_T_L16_remove_takes_the_pins_of_the_caller_along(kit: Kit) -> None:
    backend = kit.backend()
    (obj,) = kit.fill(backend, [1], keep=True)
    assert backend.pin(kit.key(1)) and backend.pin(kit.key(1))
    assert backend.remove(kit.key(1)) is True
    assert not obj.is_pinned and obj.get_ref_count() == 1
    obj.ref_count_down()
    assert backend.memory_allocator.memcheck() and not obj.is_valid()


# ---- messages ---------------------------------------------------------------------------------------


def test_T_L18_a_put_and_a_remove_are_one_admit_and_one_evict(kit: Kit) -> None:
    """Both carry the chunk hash, inside a batched message."""
    worker = Sink()
    backend = kit.backend(metadata=kit.metadata(local_world_size=1, world_size=1), worker=worker)
    key = kit.key(77, world_size=1)
    backend.submit_put_task(key, kit.obj(backend))
    backend.batched_submit_put_task([key], [kit.obj(backend)])  # a duplicate
    assert backend.remove(key)
    backend.batched_msg_sender.flush()
    assert worker.story() == [("ADMIT", 77), ("EVICT", 77)]
    assert [op.seq_num for op in worker.operations] == [0, 1]
    assert {(m.instance_id, m.worker_id, m.location) for m in worker.messages} == {("test_instance", 0, str(backend))}


def test_T_L18_admission_is_told_when_all_ranks_have_put(kit: Kit) -> None:
    worker = Sink()
    backend = kit.backend(metadata=kit.metadata(), worker=worker)
    told = []
    for rank in range(3):
        kit.fill(backend, [5], worker=rank)
        backend.batched_msg_sender.flush()
        told.append(len(worker.operations))
    assert told == expected(kit, "admitted when complete", ours=[0, 0, 1], lmcache=[1, 2, 3])


def test_T_L_all_ways_to_leave_are_told(kit: Kit) -> None:
    """By remove, clear and eviction."""
    worker = Sink()
    backend = kit.backend(metadata=kit.metadata(local_world_size=1, world_size=1), worker=worker)
    n = MIB // BYTES
    kit.fill(backend, list(range(n)), world_size=1)
    assert backend.remove(kit.key(0, world_size=1))
    held = [kit.obj(backend), kit.obj(backend)]  # one room, and one eviction
    held += backend.batched_allocate(SHAPE, BF16, 2, busy_loop=False) or []  # LMCache's evicts layers only
    backend.clear()
    backend.batched_msg_sender.flush()
    evicted = [key for kind, key in worker.story() if kind == "EVICT"]
    assert sorted(evicted) == list(range(n))
    assert [key for kind, key in worker.story() if kind == "ADMIT"] == list(range(n))


def test_T_L_close_sends_what_is_left(kit: Kit) -> None:
    worker = Sink()
    backend = kit.backend(
        {"extra_config": {"kv_msg_batch_timeout": 0.5}},
        metadata=kit.metadata(local_world_size=1, world_size=1), worker=worker,
    )  # fmt: skip
    for chunk in range(5):
        kit.fill(backend, [chunk], world_size=1)
    kit.close_now(backend)
    admits = [op for op in worker.story() if op[0] == "ADMIT"]
    assert admits == [("ADMIT", chunk) for chunk in range(5)]


# ---- allocation -------------------------------------------------------------------------------------


def test_T_L19_an_object_has_the_shape_and_dtype_that_were_asked(kit: Kit) -> None:
    obj = kit.backend().allocate(SHAPE, BF16)
    assert obj.metadata.shape == obj.tensor.shape == SHAPE and obj.metadata.dtype == obj.tensor.dtype == BF16
    assert obj.get_size() == BYTES and obj.metadata.fmt.name == "KV_2LTD" and obj.get_num_tokens() == 8
    assert obj.metadata.ref_count == 1 and obj.metadata.pin_count == 0


def test_T_L20_a_given_format_is_kept(kit: Kit) -> None:
    backend = kit.backend()
    for fmt in ("KV_2LTD", "KV_T2D", "KV_2TD", "KV_MLA_FMT"):
        obj = backend.allocate(SHAPE, BF16, kit.formats[fmt])
        assert obj.metadata.fmt.name == fmt == obj.get_memory_format().name
        obj.ref_count_down()


@pytest.mark.parametrize(
    ("layerwise", "blending", "fmt"),
    [(True, True, "KV_2TD"), (True, False, "KV_T2D"), (False, False, "KV_2LTD"), (False, True, "KV_2LTD")],
)
def test_T_L21_the_default_format_follows_the_config(kit: Kit, layerwise: bool, blending: bool, fmt: str) -> None:
    backend = kit.backend({"use_layerwise": layerwise, "enable_blending": blending})
    obj = backend.allocate(SHAPE, BF16)
    assert obj.metadata.fmt.name == fmt
    (batched,) = backend.batched_allocate(SHAPE, BF16, 1)
    assert batched.metadata.fmt.name == fmt


def test_T_L22_a_batch_of_objects_alike(kit: Kit) -> None:
    backend = kit.backend()
    objs = backend.batched_allocate(SHAPE, BF16, 3)
    assert len(objs) == 3 and len({obj.data_ptr for obj in objs}) == 3
    assert all(obj.tensor.shape == SHAPE and obj.tensor.dtype == BF16 for obj in objs)
    assert [obj.get_size() for obj in objs] == [BYTES] * 3
    assert len(backend.batched_allocate(SHAPE, BF16, 0)) == 0


def test_T_L22_a_batch_is_all_or_nothing(kit: Kit) -> None:
    backend = kit.backend()
    free = MIB // BYTES
    held = backend.batched_allocate(SHAPE, BF16, free - 1)
    assert backend.batched_allocate(SHAPE, BF16, 2, eviction=False) is None
    one = backend.allocate(SHAPE, BF16, eviction=False)
    assert one is not None and backend.allocate(SHAPE, BF16, eviction=False) is None
    assert backend.memory_allocator.memcheck()
    for obj in [*held, one]:
        obj.ref_count_down()
    assert len(backend.batched_allocate(SHAPE, BF16, free, eviction=False)) == free


def test_T_L_a_wrong_size_is_a_value_error(kit: Kit) -> None:
    with pytest.raises(ValueError):
        kit.backend().allocate(torch.Size((0, 4)), BF16, kit.formats["KV_2LTD"], busy_loop=False)


def test_T_L_eviction_skips_what_is_pinned_or_held(kit: Kit) -> None:
    backend = kit.backend()
    n = MIB // BYTES
    objs = kit.fill(backend, list(range(n)), keep=True)
    address = objs[2].data_ptr
    for obj in objs[1:]:
        obj.ref_count_down()  # 0 stays held
    assert backend.pin(kit.key(1))
    new = kit.obj(backend)
    assert [backend.contains(kit.key(i)) for i in range(4)] == [True, True, False, True]
    assert new.data_ptr == address


def test_T_L_a_store_finds_nothing_to_evict_and_returns_at_once(kit: Kit) -> None:
    """busy_loop=False: None, without waiting; what is pinned stays."""
    backend = kit.backend()
    n = MIB // BYTES
    kit.fill(backend, list(range(n)))
    assert all(backend.pin(kit.key(i)) for i in range(n))
    assert backend.allocate(SHAPE, BF16, busy_loop=False) is None
    assert backend.batched_allocate(SHAPE, BF16, 2, busy_loop=False) is None
    assert len(backend.get_keys()) == n


# ---- lists ------------------------------------------------------------------------------------------


def test_T_L23_keys_are_those_that_were_put(kit: Kit) -> None:
    backend = kit.backend()
    assert backend.get_keys() == []
    kit.fill(backend, [4, 5, 6])
    keys = backend.get_keys()
    assert keys == [kit.key(4), kit.key(5), kit.key(6)]
    assert {type(key) for key in keys} == {kit.key_class}, "keys of the class that was put"


def test_T_L_the_hot_cache_is_a_mapping_of_what_is_stored(kit: Kit) -> None:
    backend = kit.backend()
    kit.fill(backend, [4, 5])
    hot = backend.hot_cache
    assert kit.key(4) in hot and kit.key(6) not in hot and "no key" not in hot and None not in hot
    assert len(hot) == 2 and list(hot) == [kit.key(4), kit.key(5)] == list(hot.keys())
    assert [float(obj.tensor.max()) for obj in hot.values()] == [4, 5]
    assert hot.get(kit.key(6)) is None
    with pytest.raises(KeyError):
        hot[kit.key(6)]


def test_T_L_many_chunks_are_cleared_and_counted(kit: Kit) -> None:
    backend = kit.backend()
    shape = torch.Size((2, 1, 3, 8))
    for chunk in range(200):
        obj = kit.obj(backend, shape=shape, fmt="KV_2LTD")
        backend.submit_put_task(kit.key(chunk), obj)
        obj.ref_count_down()
    assert len(backend.get_keys()) == len(backend.hot_cache) == 200
    assert backend.clear() == 600 and backend.get_keys() == []


def test_T_L_touch_makes_the_prefix_hotter_than_its_suffix(kit: Kit) -> None:
    """Keys 1, 2 are pinned in this order and touched: then the list says 3, 2, 1."""
    backend = kit.backend()
    kit.fill(backend, [1, 2, 3])
    assert backend.contains(kit.key(1), pin=True) and backend.contains(kit.key(2), pin=True)
    backend.touch_cache()
    assert [key.chunk_hash for key in backend.get_keys()] == [3, 2, 1]
    assert backend.keys_in_request == []


def test_T_L_clear_keeps_what_is_pinned_or_held_and_counts_tokens(kit: Kit) -> None:
    backend = kit.backend()
    assert backend.clear() == 0
    objs = kit.fill(backend, [1, 2, 3, 4], keep=True)
    for obj in objs[1:]:
        obj.ref_count_down()
    assert backend.pin(kit.key(2))
    # (2, 16, 8, 128) as KV_T2D: 2 tokens by its layout; LMCache's token_dim reads 16
    per_chunk = expected(kit, "tokens of a layer", ours=2, lmcache=16)
    assert backend.clear() == 2 * per_chunk
    assert [key.chunk_hash for key in backend.get_keys()] == [1, 2]
    assert backend.unpin(kit.key(2))
    assert backend.clear() == per_chunk


def test_T_L_without_local_cpu_clear_does_nothing(kit: Kit) -> None:
    backend = kit.backend({"local_cpu": False})
    kit.fill(backend, [1])
    assert backend.clear() == 0 and backend.contains(kit.key(1))


# ---- threads ----------------------------------------------------------------------------------------


def test_T_L24_threads_may_ask_at_once(kit: Kit) -> None:
    backend = kit.backend()
    kit.fill(backend, [1])
    answers: list[bool] = []
    ask = [lambda: answers.extend(backend.contains(kit.key(1)) for _ in range(20))] * 3
    assert in_threads(*ask) == []
    assert answers == [True] * 60


def test_T_L25_threads_may_do_everything_at_once(kit: Kit) -> None:
    backend = kit.backend()
    (obj,) = kit.fill(backend, [1], keep=True)

    def use() -> None:
        for _ in range(10):
            assert backend.contains(kit.key(1))
            assert backend.pin(kit.key(1))
            assert backend.unpin(kit.key(1))
            backend.get_blocking(kit.key(1)).ref_count_down()

    assert in_threads(use, use, use) == []
    assert backend.contains(kit.key(1)) and not obj.is_pinned and obj.get_ref_count() == 2


# ---- sizes ------------------------------------------------------------------------------------------


def test_T_L27_a_raw_block_device_with_odirect_decides_the_alignment(kit: Kit) -> None:
    backend = kit.backend()
    for extra, align in (
        ({**RUST, "rust_raw_block.block_align": 8192}, 8192),
        (RUST, 4096),
        ({**RUST, "rust_raw_block.align_local_cpu_allocator": False}, None),
        ({**RUST, "rust_raw_block.use_odirect": False}, None),
        ({**RUST, "rust_raw_block.use_odirect": False, "rust_raw_block.io_engine": "io_uring"}, 4096),
        ({**RUST, "rust_raw_block.align_local_cpu_allocator": False, "rust_raw_block.use_uring": True}, 4096),
        ({"rust_raw_block.use_odirect": True}, None),
        (None, None),
    ):
        config = kit.config(extra_config=extra)
        assert backend._resolve_local_cpu_allocator_alignment(config) == align, extra
    with pytest.raises(ValueError):
        backend._resolve_local_cpu_allocator_alignment(
            kit.config(extra_config={**RUST, "rust_raw_block.block_align": 3000})
        )


def test_T_L28_an_explicit_alignment_comes_first(kit: Kit) -> None:
    backend = kit.backend()
    extra = {**RUST, "rust_raw_block.block_align": 8192, "local_cpu.pinned_align_bytes": 512}
    assert backend._resolve_local_cpu_allocator_alignment(kit.config(extra_config=extra)) == 512
    for wrong in (3000, 0, -4096, "x"):
        with pytest.raises(ValueError):
            backend._resolve_local_cpu_allocator_alignment(
                kit.config(extra_config={"local_cpu.pinned_align_bytes": wrong})
            )
    powers = [n for n in range(-2, 70) if backend._is_power_of_two(n)]
    assert powers == [1, 2, 4, 8, 16, 32, 64]


def test_T_L_the_size_of_a_full_chunk_and_how_many_fit(kit: Kit) -> None:
    """4 layers of K and V, 256 tokens, 8 heads of 128, bfloat16: 4 MiB."""
    alone = kit.metadata(local_world_size=1, world_size=1)
    backend = kit.backend({"max_local_cpu_size": 0.0625}, metadata=alone, size=32 * MIB)
    assert backend.get_full_chunk_size_bytes() == 4 * 2 * 256 * 8 * 128 * 2
    assert backend.calculate_chunk_budget() == expected(kit, "chunk budget", ours=8, lmcache=16)
    layerwise = kit.backend({"use_layerwise": True}, metadata=alone, size=32 * MIB)
    assert layerwise.get_full_chunk_size_bytes() == MIB
    with pytest.raises(AssertionError):
        kit.backend().get_full_chunk_size_bytes()


@pytest.mark.parametrize("align", [None, 8192])
def test_T_L27_the_allocator_is_made_as_the_config_says(kit: Kit, align: int | None) -> None:
    """Size and alignment; with MLA the first rank's size."""
    for use_mla, rank in ((False, 1), (True, 0), (True, 1)):
        extra = {"first_rank_max_local_cpu_size": 4 / 1024}
        if align is not None:
            extra["local_cpu.pinned_align_bytes"] = align
        if kit.ours:
            extra["shm_name"] = kit.name  # type: ignore[assignment]
        for_one = expected(kit, "size of the first rank", ours=4, lmcache=1 if rank else 4)
        for_all = expected(kit, "size of all ranks", ours=2, lmcache=1)
        size = for_one if use_mla else for_all
        config = kit.config(max_local_cpu_size=1 / 1024, extra_config=extra)
        meta = kit.metadata(world_size=2, local_world_size=2, worker_id=rank, local_worker_id=rank, use_mla=use_mla)
        backend = kit._make(config, meta, None, None)
        allocator = backend.get_memory_allocator()
        assert allocator.size == size * MIB == allocator.buffer.numel()
        assert allocator.align_bytes == (align or 4096)
        assert type(allocator).__name__ == "MixedMemoryAllocator"
        backend.close()
        if kit.ours:
            shmcache.unlink(kit.name)


# ---- layers -----------------------------------------------------------------------------------------


def test_T_L30_layerwise_eviction_takes_all_layers_of_a_chunk(kit: Kit) -> None:
    """Two layers fill the arena; two new ones need the room of both."""
    shape = torch.Size((8, 2, 64))  # 2 KiB: half a page, so each takes a whole one
    backend = kit.backend(
        {"use_layerwise": True}, size=8192,
        metadata=kit.metadata(local_world_size=1, world_size=1, kv_shape=(2, 2, 8, 1, 64)),
    )  # fmt: skip
    layers = kit.key(1, world_size=1).split_layers(2)
    old = backend.batched_allocate(shape, BF16, 2, busy_loop=False)
    backend.batched_submit_put_task(layers, old)
    if not kit.ours:
        assert [obj.get_ref_count() for obj in old] == [2, 2]
    for obj in old:
        obj.ref_count_down()
    new = backend.batched_allocate(shape, BF16, 2, busy_loop=False)
    assert new is not None and len(new) == 2
    assert [backend.contains(layer) for layer in layers] == [False, False]
    assert [obj.is_valid() for obj in old] == [False, False]
    counts = expected(kit, "ref count of the evicted", ours=[0, 0], lmcache=[1, 1])
    assert [obj.get_ref_count() for obj in old] == counts
    assert backend.memory_allocator.memcheck()


def test_T_L_a_foreign_object_is_stored(kit: Kit) -> None:
    """LMCache's tests put objects of any allocator."""
    backend = kit.backend()
    allocator = Kit("private", "").allocator(MIB) if kit.ours else kit.allocator(MIB)
    obj = allocator.allocate(SHAPE, BF16, kit.formats["KV_2LTD"])
    obj.tensor.fill_(6)
    backend.submit_put_task(kit.key(1), obj)
    assert obj.get_ref_count() == expected(kit, "foreign objects", ours=1, lmcache=2)
    got = backend.get_blocking(kit.key(1))
    assert torch.equal(got.tensor, obj.tensor) and got.metadata.fmt.name == "KV_2LTD"
    assert (got.data_ptr == obj.data_ptr) is expected(kit, "foreign objects", ours=False, lmcache=True)
    got.ref_count_down()


@pytest.mark.parametrize("raw", [b"some bytes", bytearray(b"some bytes")], ids=["bytes", "bytearray"])
@pytest.mark.filterwarnings("error::UserWarning")
def test_T_L_an_object_of_plain_bytes_is_stored(kit: Kit, raw: Any) -> None:
    """Of the kit's own class: LMCache's for LMCache's backend and for the plug-in."""
    backend = kit.backend()
    cls = modules("ours" if kit.kind in ("private", "segment") else "lmcache").BytesObj
    backend.submit_put_task(kit.key(1), cls(raw))
    got = backend.get_blocking(kit.key(1))
    assert bytes(got.byte_array) == b"some bytes" and got.get_size() == 10
    assert got.metadata.fmt.name == "BINARY_BUFFER"
    got.ref_count_down()


def test_T_L_a_chunk_that_turned_out_not_to_be_full_is_stored_as_what_it_is(kit: Kit) -> None:
    """A remote connector allocates a full chunk, reads less, and then narrows `raw_data` and the shape."""
    backend = kit.backend()
    full, part = torch.Size((2, 4, 16, 64)), torch.Size((2, 4, 5, 64))
    values = torch.arange(part.numel()).to(BF16)
    for batched in (False, True):
        key = kit.key(int(batched))
        obj = backend.allocate(full, BF16, kit.formats["KV_2LTD"], busy_loop=False)
        n = part.numel() * 2
        obj.raw_data[:n].view(BF16).copy_(values)
        obj.raw_data = obj.raw_data[:n]
        obj.meta.shape = part
        if batched:
            backend.batched_submit_put_task([key], [obj])
        else:
            backend.submit_put_task(key, obj)
        obj.ref_count_down()
        got = backend.get_blocking(key)
        assert got.tensor.shape == part and got.metadata.shape == part and got.get_num_tokens() == 5
        assert torch.equal(got.tensor.flatten(), values)
        got.ref_count_down()
    assert backend.memory_allocator.memcheck()


def test_T_L_one_reference_too_few(kit: Kit) -> None:
    backend = kit.backend()
    obj = kit.obj(backend)
    obj.ref_count_down()
    other = kit.obj(backend)
    raises = expected(kit, "double free", ours=kit.kind != "plugin", lmcache=False)
    with pytest.raises(errors.StaleHandleError) if raises else nullcontext():
        obj.ref_count_down()
    assert other.is_valid() and other.get_ref_count() == 1, "another's block is not touched"
    backend.memory_allocator.free(obj)
    assert other.is_valid() and backend.memory_allocator.memcheck()
