"""An unmodified LMCache uses the shared segment by configuration alone: its StorageManager in real processes."""

from __future__ import annotations

import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import shmcache

pytest.importorskip("lmcache.v1.storage_backend.storage_manager", reason="LMCache is not installed")
pytestmark = pytest.mark.timeout(240)

RANK = Path(__file__).with_name("lmcache_rank.py")
SHAPE = [2, 4, 256, 32]


class Rank:
    """A process of `lmcache_rank.py`."""

    def __init__(self, segment: str, rank: int, ranks: int, mla: bool = False) -> None:
        command = [sys.executable, str(RANK), segment, str(rank), str(ranks), "mla" if mla else "mha"]
        env = {**os.environ, "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
            env=env,
        )  # fmt: skip
        self.about: object = None

    def ready(self) -> Rank:
        self.about = self.hear(120)
        return self

    def hear(self, timeout: float = 30) -> object:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        assert ready, f"rank {self.process.pid} said nothing for {timeout} s"
        line = self.process.stdout.readline()
        assert line, f"rank {self.process.pid} ended: {self.process.poll()}"
        return json.loads(line)

    def ask(self, *what: object) -> object:
        self.say(*what)
        return self.hear()

    def say(self, *what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.ask("end") == "closed"
        self.process.wait(20)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


@pytest.fixture
def start(name: str) -> Iterator[Callable[..., list[Rank]]]:
    ranks: list[Rank] = []

    def begin(n: int, mla: bool = False) -> list[Rank]:
        new = [Rank(name, i, n, mla) for i in range(n)]
        ranks.extend(new)
        return [rank.ready() for rank in new]

    yield begin
    for rank in ranks:
        rank.kill()
        for pipe in (rank.process.stdin, rank.process.stdout):
            assert pipe is not None
            pipe.close()
    if any(s.name == name for s in shmcache.segments()):
        shmcache.unlink(name, force=True)


def test_two_ranks_share_chunks_and_one_goes_on_when_the_other_is_killed(
    start: Callable[..., list[Rank]], name: str
) -> None:
    """Put in both, found by both only when both have put; a kill loses nothing; a later process is warm."""
    a, b = start(2)
    assert a.about == b.about == {"class": "ShmLocalCPUBackend", "name": "LocalCPUBackend", "ranks_agree": True}
    assert a.ask("put", [1, 2, 3], [1, 2, 3]) == 3
    assert a.ask("lookup", [1, 2, 3]) == 0 == b.ask("lookup", [1, 2, 3]), "rank 1 has not put its part"
    assert b.ask("put", [1, 2], [11, 12]) == 2
    assert a.ask("lookup", [1, 2, 3]) == 2 == b.ask("lookup", [1, 2, 3])
    assert a.ask("get", [1, 2, 9]) == [[1, 1, SHAPE], [2, 2, SHAPE], None]
    assert b.ask("get", [2, 1]) == [[12, 12, SHAPE], [11, 11, SHAPE]]
    assert a.ask("key_types") == ["lmcache.utils"]

    a.say("hold", [1])  # an unpublished object and a pin
    assert a.hear() == "holding"
    os.kill(a.process.pid, signal.SIGKILL)
    a.process.wait(20)
    assert b.ask("put", [3, 4], [13, 14]) == 2
    assert b.ask("lookup", [1, 2, 3]) == 3
    assert b.ask("memcheck") is True
    with shmcache.attach(name) as cache:
        cache.reap()
        assert cache.stats().counts.holds == 0 and cache.stats().counts.attachments == 2
        assert cache.verify() == []
    b.end()

    c, d = start(2)  # everything again, after a restart of all
    assert c.ask("lookup", [1, 2, 3]) == 3 == d.ask("lookup", [1, 2, 3])
    assert c.ask("get", [1, 3]) == [[1, 1, SHAPE], [3, 3, SHAPE]]
    assert d.ask("get", [3]) == [[13, 13, SHAPE]]


def test_eviction_takes_a_chunk_on_all_ranks_or_on_none(start: Callable[..., list[Rank]]) -> None:
    """More chunks than fit: whatever is put, both ranks give the same answer to every lookup."""
    a, b = start(2)
    budget = a.ask("budget")
    assert budget == b.ask("budget") == 32 * 2**20 // (2 * 4 * 256 * 32 * 2) // 2
    for first in range(0, 3 * budget, 8):
        chunks = list(range(first, first + 8))
        assert a.ask("put", chunks, [c % 100 for c in chunks]) == 8
        assert b.ask("put", chunks, [c % 100 + 1 for c in chunks]) == 8
    for chunk in range(0, 3 * budget, 7):
        assert a.ask("lookup", [chunk]) == b.ask("lookup", [chunk])
    kept = sorted(a.ask("keys"))
    assert kept == sorted(b.ask("keys")) and len(kept) >= budget - 1
    assert a.ask("memcheck") is True
    assert a.ask("remove", kept[0]) == 1 and b.ask("lookup", [kept[0]]) == 0
    assert a.ask("clear") == 256 * (len(kept) - 1)
    assert b.ask("stats") == {"used": 0, "holds": 0}


def test_with_mla_all_ranks_read_one_copy(start: Callable[..., list[Rank]]) -> None:
    a, b = start(2, mla=True)
    assert a.ask("put", [1], [7]) == 1
    assert b.ask("get", [1]) == [[7, 7, [1, 4, 256, 32]]]
    once = a.ask("stats")["used"]
    assert b.ask("put", [1], [8]) == 1  # a duplicate: the first bytes stay, and are there once
    assert a.ask("get", [1]) == [[7, 7, [1, 4, 256, 32]]]
    assert b.ask("stats") == {"used": once, "holds": 0}


def test_the_configuration_in_the_readme_is_the_one_that_works(name: str, tmp_path: Path) -> None:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    text = re.search(r"```yaml\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL)
    assert text
    file = tmp_path / "lmcache.yaml"
    file.write_text(text.group(1).replace("segment: prod", f"segment: {name}").replace("20GiB", "4MiB"))
    config = LMCacheEngineConfig.from_file(str(file))
    (plugin,) = config.storage_plugins
    where = {key: config.extra_config[f"storage_plugin.{plugin}.{key}"] for key in ("module_path", "class_name")}
    backend_class = getattr(importlib.import_module(where["module_path"]), where["class_name"])
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, (2, 2, 256, 2, 8), role="worker")
    backend = backend_class(config=config, metadata=metadata, dst_device="cpu", local_cpu_backend=None, loop=None)
    assert str(backend) == plugin and backend.cache.name == name and backend.cache.capacity == 4 << 20
    backend.close()
    shmcache.unlink(name)
