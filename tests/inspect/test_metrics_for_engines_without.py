"""`metrics`: what Prometheus scrapes is what stats say; the board and the alerts use names that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import scenes
from prometheus_client.parser import text_string_to_metric_families
from scenes import run, small, store

import shmcache

TOOLS = Path(__file__).parents[2] / "tools" / "monitoring"


def samples(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values by label name) to value."""
    return {
        (s.name, *(v for _, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_they_are_what_stats_say(name: str) -> None:
    with small(name) as cache:
        held = scenes.furnish(cache)
        code, out, _ = run("metrics", name)
        stats = cache.stats()
        for obj in held:
            obj.release()
    shmcache.unlink(name)
    assert code == 0
    found = samples(out)
    assert found["shmcache_hits_total", name] == stats.hits
    assert found["shmcache_stores_total", name] == stats.stores
    assert found["shmcache_bytes", "pinned", name] == stats.bytes.pinned
    assert found["shmcache_bytes", "used", name] == stats.bytes.used
    assert found["shmcache_entries", "holds", name] == stats.counts.holds == 4
    assert found["shmcache_attachments", "live", name] == 1
    assert found["shmcache_lock_acquisitions_total", name] == stats.lock.acquisitions
    assert found["shmcache_namespace_complete_chunks", "llama:tp2", name] == 3
    assert found["shmcache_state", name, "ready"] == 1
    assert all(key[0].startswith("shmcache_") for key in found)


def test_each_state_can_be_scraped(scrap: str, fork: Any) -> None:
    scenes.garbage(scrap, fork)
    assert samples(run("metrics", scrap)[1]) == {("shmcache_state", scrap, "unreadable"): 1}
    (scenes.SHM / f"shmcache.{scrap}").unlink()
    assert samples(run("metrics", scrap)[1]) == {}
    scene = scenes.stopped(scrap, fork)
    with scenes.prompt():
        found = samples(run("metrics", scrap)[1])
    assert found["shmcache_lock_holder_pid", scrap] == scene.child.pid


def test_a_port_serves_what_is_there_at_the_time(name: str) -> None:
    with small(name) as cache:
        argv = [sys.executable, "-m", "shmcache.inspect", "metrics", name, "--port", "0"]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                said = server.stderr.readline()
                url = said.split()[-1]
                for n in (1, 2):
                    store(cache, n)
                    with urllib.request.urlopen(url, timeout=10) as answer:
                        found = samples(answer.read().decode())
                    assert found["shmcache_stores_total", name] == n
            finally:
                server.kill()
    shmcache.unlink(name)


def test_a_port_that_is_taken_is_said_to_be(name: str) -> None:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        code, _, err = run("metrics", name, "--port", str(s.getsockname()[1]))
    assert code == 1 and "choose another" in err


@pytest.mark.parametrize("file", ["grafana-board.json", "alert-rules.yml"])
def test_the_examples_use_names_that_exist(name: str, file: str) -> None:
    with small(name) as cache:
        store(cache, "k")
        exported = {key[0] for key in samples(run("metrics", name)[1])}
    shmcache.unlink(name)
    text = (TOOLS / file).read_text()
    used = set(re.findall(r"\bshmcache_[a-z_]+", text))
    assert used and used <= exported, used - exported


def test_the_board_is_json_with_panels() -> None:
    board = json.loads((TOOLS / "grafana-board.json").read_text())
    assert len(board["panels"]) >= 8
    assert all(p["title"] and p["targets"][0]["expr"] for p in board["panels"])
