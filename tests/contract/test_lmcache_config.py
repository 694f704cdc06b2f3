"""Settings: LMCache's keys, from code, a file and variables; and what is said when they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract_kits import BF16

import shmcache
from shmcache import keys
from shmcache.backend import SharedCPUBackend
from shmcache.config import EngineConfig, EngineMetadata, LayerGroup


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for variable in list(os.environ):
        if variable.startswith("LMCACHE_"):
            monkeypatch.delenv(variable)


DEFAULTS = {
    "chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 5.0, "reserve_local_cpu_size": 0.0,
    "local_cpu_use_hugepages": False, "cache_policy": "LRU", "numa_mode": None, "use_layerwise": False,
    "enable_blending": False, "save_unfull_chunk": False, "enable_async_loading": False, "enable_p2p": False,
    "enable_controller": False, "pin_timeout_sec": 300, "pin_check_interval_sec": 30,
    "enable_lazy_memory_allocator": False, "blocking_timeout_secs": 10, "extra_config": None,
}  # fmt: skip


def test_defaults_are_those_of_lmcache(maker: Any) -> None:
    config = maker.config.from_defaults()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert config.get_extra_config_value("kv_msg_batch_size", 50) == 50


def test_an_instance_gets_a_name_of_its_own() -> None:
    one, two = EngineConfig(), EngineConfig()
    assert one.lmcache_instance_id and one.lmcache_instance_id != two.lmcache_instance_id


def test_settings_from_a_file(maker: Any, tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        "chunk_size: 64\nlocal_cpu: false\nmax_local_cpu_size: 2.5\ncache_policy: lfu\nremote_url: null\n"
        "extra_config:\n  shm_name: prod\n  kv_msg_batch_size: 7\n"
    )
    config = maker.config.from_file(str(file))
    assert (config.chunk_size, config.local_cpu, config.max_local_cpu_size) == (64, False, 2.5)
    assert config.cache_policy == "lfu" and config.use_layerwise is False
    assert config.get_extra_config_value("shm_name") == "prod"
    assert config.get_extra_config_value("kv_msg_batch_size", 50) == 7


def test_settings_from_variables(maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "128")
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "false")
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "1.5")
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", json.dumps({"shm_name": "prod"}))
    config = maker.config.from_env()
    assert (config.chunk_size, config.local_cpu, config.max_local_cpu_size) == (128, False, 1.5)
    assert config.get_extra_config_value("shm_name") == "prod"


def test_variables_win_over_the_file_and_code_over_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\ncache_policy: MRU\n")
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "128")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    config = EngineConfig.from_file()
    assert config.chunk_size == 128 and config.cache_policy == "MRU"
    assert EngineConfig(chunk_size=32).chunk_size == 32, "code alone does not look at variables"
    assert EngineConfig.from_defaults().chunk_size == 256


def test_unknown_settings_are_those_of_other_parts(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("remote_url: lm://x\nnixl_role: sender\nchunk_size: 16\n")
    assert EngineConfig.from_file(file).chunk_size == 16


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="LMCACHE_CONFIG_FILE"):
        EngineConfig.from_file()
    with pytest.raises(FileNotFoundError):
        EngineConfig.from_file(tmp_path / "absent.yaml")
    wrong = tmp_path / "wrong.yaml"
    for text in ("- a\n- b\n", "just text\n", "a: [\n"):
        wrong.write_text(text)
        with pytest.raises(ValueError, match=r"wrong\.yaml"):
            EngineConfig.from_file(wrong)
    wrong.write_text("")
    assert EngineConfig.from_file(wrong).chunk_size == 256


@pytest.mark.parametrize(
    ("key", "value"),
    [("chunk_size", 0), ("chunk_size", "many"), ("max_local_cpu_size", -1), ("cache_policy", "ARC"),
     ("cache_policy", ""), ("numa_mode", "weird"), ("pin_timeout_sec", 0), ("blocking_timeout_secs", -1),
     ("local_cpu", "perhaps"), ("extra_config", "not a mapping"), ("max_local_cpu_size", "5 parsecs"),
     ("max_local_cpu_size", float("inf")), ("reserve_local_cpu_size", float("nan"))],
)  # fmt: skip
def test_a_wrong_value_names_its_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        EngineConfig(**{key: value})
    config = EngineConfig()
    with pytest.raises(ValueError, match=key):
        setattr(config, key, value)


def test_a_wrong_variable_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "lots")
    with pytest.raises(ValueError, match="chunk_size"):
        EngineConfig.from_env()
    monkeypatch.delenv("LMCACHE_CHUNK_SIZE")
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", "{not json")
    with pytest.raises(ValueError):
        EngineConfig.from_env()


def test_sizes_are_gib_or_say_their_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert EngineConfig(max_local_cpu_size="512MiB").max_local_cpu_size == 0.5
    assert EngineConfig(max_local_cpu_size="2").max_local_cpu_size == 2.0
    assert EngineConfig(reserve_local_cpu_size="1.5GiB").reserve_local_cpu_size == 1.5
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "256MiB")
    assert EngineConfig.from_env().max_local_cpu_size == 0.25


# ---- metadata ---------------------------------------------------------------------------------------


def test_shapes_of_a_chunk(maker: Any) -> None:
    """[K and V, layers, tokens, hidden]; one for MLA."""
    meta = maker.kit("", "").metadata()
    assert meta.get_shapes() == [torch.Size((2, 4, 256, 1024))] and meta.get_dtypes() == [BF16]
    assert meta.get_shapes(10) == [torch.Size((2, 4, 10, 1024))]
    assert meta.get_num_groups() == 1 and meta.is_first_rank()
    mla = maker.kit("", "").metadata(kv_shape=(4, 1, 256, 1, 576), use_mla=True, worker_id=1, local_worker_id=1)
    assert mla.get_shapes() == [torch.Size((1, 4, 256, 576))] and not mla.is_first_rank()


def test_shapes_of_groups_of_layers() -> None:
    groups = [LayerGroup(3, 1024, torch.float32), LayerGroup(2, 576, BF16, 1)]
    meta = EngineMetadata("m", 1, 1, 0, 0, BF16, (5, 2, 256, 8, 128), chunk_size=16, layer_groups=groups)
    assert meta.get_shapes() == [torch.Size((2, 3, 16, 1024)), torch.Size((1, 2, 16, 576))]
    assert meta.get_dtypes() == [torch.float32, BF16] and meta.get_num_groups() == 2


def test_a_config_and_metadata_need_what_lmcaches_backend_reads(name: str) -> None:
    """Of whatever class they are, and without what only newer versions have."""
    shape = (4, 2, 16, 2, 8)
    extra = {"shmcache.segment": name, "shmcache.capacity": "1MiB"}
    settings = SimpleNamespace(
        cache_policy="LRU", local_cpu=True, lmcache_instance_id="i", use_layerwise=False, enable_blending=False,
        max_local_cpu_size=1.0, reserve_local_cpu_size=0.0, extra_config=extra, enable_p2p=False, chunk_size=16,
        numa_mode=None,
    )  # fmt: skip
    rank = SimpleNamespace(model_name="m", world_size=1, worker_id=0, kv_dtype=BF16, kv_shape=shape, use_mla=False)
    key = SimpleNamespace(model_name="m", world_size=1, worker_id=0, chunk_hash=7, dtype=BF16, tags=None, to_string=str)
    backend = SharedCPUBackend(settings, rank, "cpu")
    assert backend.get_full_chunk_size_bytes() == 4 * 2 * 16 * 2 * 8 * 2
    obj = backend.allocate(torch.Size((2, 4, 16, 16)), BF16)
    backend.submit_put_task(key, obj)
    assert backend.contains(key, pin=True) and backend.unpin(key) and backend.calculate_chunk_budget() > 0
    assert backend.get_keys() == [keys.CacheEngineKey("m", 1, 0, 7, BF16)]
    backend.close()
    shmcache.unlink(name)
