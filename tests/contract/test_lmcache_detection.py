"""What LMCache promises of memory and NUMA detection (T-N), for both makers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from contract_differences import expected

from shmcache import _sizing, errors


def fake(value: Any) -> Any:
    def call(*_: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    return call


def config(**fields: Any) -> Any:
    return SimpleNamespace(**{"numa_mode": None, "extra_config": None, **fields})


def test_T_N_available_memory_is_what_psutil_says(maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert maker.available() >= 0
    monkeypatch.setattr(psutil, "virtual_memory", fake(SimpleNamespace(available=4 << 30)))
    assert maker.available() == 4.0
    monkeypatch.setattr(psutil, "virtual_memory", fake(RuntimeError("no /proc here")))
    assert maker.available() == 0.0


def test_T_N_no_mode_is_no_placement(maker: Any) -> None:
    assert maker.numa(config()) is None


def test_T_N_an_unknown_mode_is_an_error(maker: Any) -> None:
    wrong = expected(maker, "settings that contradict", ours=errors.ConfigurationError, lmcache=AssertionError)
    with pytest.raises(wrong):
        maker.numa(config(numa_mode="weird"))


def test_T_N_manual_takes_the_mapping(maker: Any) -> None:
    found = maker.numa(config(numa_mode="manual", extra_config={"gpu_to_numa_mapping": {0: 1, 1: 0}}))
    assert found == maker.NUMAMapping({0: 1, 1: 0})


def test_T_N_manual_with_the_keys_of_json(maker: Any) -> None:
    found = maker.numa(config(numa_mode="manual", extra_config={"gpu_to_numa_mapping": {"0": 1, "1": "0"}}))
    there = expected(maker, "numbers of GPUs", ours={0: 1, 1: 0}, lmcache={"0": 1, "1": "0"})
    assert found.gpu_to_numa_mapping == there


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}], ids=str)
def test_T_N_manual_without_a_mapping_is_an_error(maker: Any, extra: Any) -> None:
    wrong = expected(maker, "settings that contradict", ours=errors.ConfigurationError, lmcache=AssertionError)
    with pytest.raises(wrong):
        maker.numa(config(numa_mode="manual", extra_config=extra))


def test_T_N_auto_without_a_device_is_no_placement(maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if maker.ours:
        monkeypatch.setattr(torch.cuda, "current_device", fake(RuntimeError("no device")))
    else:
        from lmcache.v1 import system_detection

        monkeypatch.setattr(system_detection, "torch_dev", SimpleNamespace(current_device=fake(RuntimeError("none"))))
    assert maker.numa(config(numa_mode="auto")) is None


@pytest.mark.parametrize(
    ("mode", "extra", "where"),
    [
        (None, None, None),
        ("auto", None, "interleave"),
        ("manual", {"gpu_to_numa_mapping": {"0": 1, "1": 0, "2": 1}}, [0, 1]),
        ("manual", {"gpu_to_numa_mapping": {0: 0}}, [0]),
    ],
    ids=["none", "auto", "two nodes", "one node"],
)
def test_a_segment_lies_on_the_nodes_of_all_its_ranks(mode: Any, extra: Any, where: Any) -> None:
    assert _sizing.numa_of_segment(config(numa_mode=mode, extra_config=extra)) == where
