"""What LMCache promises of its eviction policies (T-P), for both makers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from contract_differences import expected

import shmcache
from shmcache.policies import POLICY_NAMES, SegmentPolicy


class OurRig:
    """A policy of ours: the order is in a segment."""

    ours = True

    def __init__(self, policy: str, name: str) -> None:
        self.cache = shmcache.create(name, "1MiB", policy=policy.lower())
        self.space = self.cache.default
        self.policy = SegmentPolicy(policy, self.cache, lambda _space, key: [key])
        self._held: dict[str, Any] = {}

    def put(self, key: str) -> None:
        with self.space.allocate(64) as obj:
            assert self.space.put(key, obj)

    def hit(self, key: str) -> None:
        self.space.touch([key])

    def hold(self, key: str) -> None:
        self._held[key] = self.space.get(key)

    def let_go(self, key: str) -> None:
        self._held.pop(key).release()

    def delete(self, key: str) -> None:
        assert self.space.remove(key)

    def candidates(self, n: int = 1) -> list[str]:
        return self.policy.get_evict_candidates(None, n)

    def close(self) -> None:
        for obj in self._held.values():
            obj.release()
        self.cache.close()
        shmcache.unlink(self.cache.name)


class TheirRig:
    """A policy of LMCache, with the map that its backend keeps."""

    ours = False

    def __init__(self, policy: str, _name: str) -> None:
        from lmcache.v1.storage_backend.cache_policy import get_cache_policy

        self.policy = get_cache_policy(policy)
        self.map = self.policy.init_mutable_mapping()

    def put(self, key: str) -> None:
        self.map[key] = SimpleNamespace(can_evict=True)
        self.policy.update_on_put(key)

    def hit(self, key: str) -> None:
        self.policy.update_on_hit(key, self.map)

    def hold(self, key: str) -> None:
        self.map[key].can_evict = False

    def let_go(self, key: str) -> None:
        self.map[key].can_evict = True

    def delete(self, key: str) -> None:
        del self.map[key]
        self.policy.update_on_force_evict(key)

    def candidates(self, n: int = 1) -> list[str]:
        return self.policy.get_evict_candidates(self.map, n)

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def make(maker: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    rigs: list[Any] = []
    if not maker.ours:  # LRU asks a clock by chunk hash, which plain keys do not have
        from lmcache.v1.storage_backend.cache_policy.lru import LRUCachePolicy

        monkeypatch.setattr(LRUCachePolicy, "update_chunk_hash_dict", lambda *_: None)

    def rig(policy: str) -> Any:
        rigs.append((OurRig if maker.ours else TheirRig)(policy, name))
        return rigs[-1]

    yield rig
    for one in rigs:
        one.close()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_T_P1_what_can_be_evicted_is_named(make: Any, policy: str) -> None:
    rig = make(policy)
    assert rig.candidates() == []
    rig.put("a")
    assert rig.candidates() == ["a"]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_T_P2_what_is_in_use_is_not(make: Any, policy: str) -> None:
    rig = make(policy)
    rig.put("a")
    rig.hold("a")
    assert rig.candidates() == []
    rig.put("b")
    assert rig.candidates(5) == ["b"]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_T_P3_asking_changes_nothing(make: Any, policy: str) -> None:
    """Named, used, named again. LMCache 0.5.6's LFU forgets whom it has named."""
    rig = make(policy)
    rig.put("a")
    assert rig.candidates() == ["a"]
    if policy == "LFU" and not rig.ours:
        with pytest.raises(KeyError):
            rig.hit("a")
        assert rig.candidates() == expected(rig, "candidates", ours=["a"], lmcache=[])
        return
    rig.hit("a")
    assert rig.candidates() == ["a"]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_T_P4_what_was_removed_is_not_named(make: Any, policy: str) -> None:
    rig = make(policy)
    rig.put("a")
    rig.delete("a")
    assert rig.candidates() == []
    rig.put("a")
    assert rig.candidates(3) == ["a"]


def test_T_P5_lfu_names_the_least_used_first(make: Any) -> None:
    """Frequencies a 1, b 3, c 2."""
    rig = make("LFU")
    for key in "abc":
        rig.put(key)
    for key in ("b", "b", "c"):
        rig.hit(key)
    assert rig.candidates(3) == ["a", "c", "b"]


def test_T_P5_lfu_breaks_ties_by_age(make: Any) -> None:
    rig = make("LFU")
    for key in "abc":
        rig.put(key)
    assert rig.candidates(2) == ["a", "b"]


@pytest.mark.parametrize(
    ("policy", "order"), [("LRU", "bca"), ("FIFO", "abc"), ("MRU", "acb")], ids=["LRU", "FIFO", "MRU"]
)
def test_T_P_the_order_after_a_hit(make: Any, policy: str, order: str) -> None:
    """Three puts, then a use of the first: LRU oldest first, MRU newest first, FIFO does not care."""
    rig = make(policy)
    for key in "abc":
        rig.put(key)
    rig.hit("a")
    assert "".join(rig.candidates(9)) == order
    assert "".join(rig.candidates(2)) == order[:2]
    rig.hold(order[0])
    assert "".join(rig.candidates(1)) == order[1]
    rig.let_go(order[0])
    assert len(rig.candidates(0)) == expected(rig, "candidates", ours=0, lmcache=3)


def test_T_P_names_in_any_case_and_what_is_none(maker: Any) -> None:
    for good in ("LRU", "lru", "Lfu", "fifo", "MRU"):
        assert maker.check_policy(good)
    for wrong in ("", None, "ARC", "lru "):
        with pytest.raises(ValueError):
            maker.check_policy(wrong)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_backend_evicts_whom_the_policy_names(name: str, policy: str) -> None:
    """Also when the candidates were asked for before, and some were used since."""
    rig = OurRig(policy, name)
    capacity = rig.cache.capacity // 65536
    for i in range(capacity):
        obj = rig.space.allocate(65536)
        rig.space.put(f"{i}", obj)
        obj.release()
    for key in ("0", "1", "0"):
        rig.hit(key)
    named = rig.candidates(3)
    assert rig.candidates(3) == named
    new = []
    for key in named:
        new.append(rig.space.allocate(65536))
        assert not rig.space.contains(key), (policy, named)
    for obj in new:
        obj.release()
    rig.close()
