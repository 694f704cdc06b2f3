"""`map`: what is drawn is what is there, to the byte."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import scenes
from scenes import run, small, store

import shmcache

_SVG = "{http://www.w3.org/2000/svg}"


def areas(path: Path) -> Counter[str]:
    """Bytes by state, from the areas of the rectangles."""
    root = ET.parse(path).getroot()
    arena = root.find(f"{_SVG}g[@id='arena']")
    assert arena is not None
    unit = float(arena.attrib["data-bytes-per-unit"])
    found: Counter[str] = Counter()
    for r in arena.iter(f"{_SVG}rect"):
        found[r.attrib["class"]] += float(r.attrib["width"]) * float(r.attrib["height"]) * unit  # type: ignore[assignment]
    return found


def totals(document: dict[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in document["totals"]:
        found[row["state"]] += row["bytes"]
    return found


@pytest.mark.parametrize("region_bytes", ["4MiB", "1MiB", "1.5MiB"])
def test_areas_add_up_to_what_stats_say(name: str, tmp_path: Path, region_bytes: str) -> None:
    svg = tmp_path / "arena.svg"
    with small(name, region_bytes=region_bytes) as cache:
        held = scenes.furnish(cache)
        store(cache, "large", 900_000)
        code, out, _ = run("map", name, "--json", "--svg", str(svg))
        found, b = json.loads(out), cache.stats().bytes
        assert code == 0
        for obj in held:
            obj.release()
    shmcache.unlink(name)
    by_state = totals(found)
    assert "unseen" not in by_state
    assert by_state["unreserved"] == b.capacity - b.ready
    assert by_state["free"] == b.free
    assert by_state["evictable"] == b.evictable
    assert by_state["kept"] == b.pinned
    assert by_state["writing"] == 12288 and by_state["leaving"] == 4096
    assert sum(by_state.values()) == b.capacity == found["capacity"]
    drawn = areas(svg)
    assert set(drawn) == {state for state, n in by_state.items() if n}
    for state, n in drawn.items():
        assert n == pytest.approx(by_state[state], rel=1e-4), state


def test_every_mark_stands_for_its_cell(name: str) -> None:
    with small(name) as cache:
        store(cache, "a", 1 << 20)
        pinned = cache.lookup(["a"], pin=True)
        store(cache.namespace("other"), "b", 2 << 20)
        _, out, _ = run("map", name, "--json")
        pinned.release()
    shmcache.unlink(name)
    cells = json.loads(out)["cells"]
    quarter = len(cells) // 4
    assert set(cells[: quarter - 1]) == {"A"}
    assert set(cells[quarter + 1 : 3 * quarter - 1]) == {"b"}
    assert set(cells[3 * quarter + 1 :]) == {"·"}


def test_names_of_a_segment_cannot_break_the_picture(name: str, tmp_path: Path) -> None:
    svg = tmp_path / "arena.svg"
    with small(name) as cache:
        store(cache.namespace('<script>alert("x")</script>&\x1b[2J'), "k")
        assert run("map", name, "--svg", str(svg))[0] == 0
        _, out, _ = run("map", name)
    shmcache.unlink(name)
    assert "\x1b" not in out
    root = ET.parse(svg).getroot()
    assert not list(root.iter(f"{_SVG}script"))
    assert any("<script>" in (t.text or "") for t in root.iter(f"{_SVG}text"))


def test_a_busy_segment_is_drawn_too(scrap: str, fork: Any, tmp_path: Path) -> None:
    scenes.live(scrap, fork)
    svg = tmp_path / "arena.svg"
    for _ in range(5):
        with scenes.prompt():
            assert run("map", scrap, "--svg", str(svg))[0] == 0
        assert sum(areas(svg).values()) <= (4 << 20) * 1.0001


def test_it_says_where_it_cannot_write(name: str, tmp_path: Path) -> None:
    small(name).close()
    code, _, err = run("map", name, "--svg", str(tmp_path / "no" / "folder.svg"))
    assert code == 1 and "folder.svg" in err
    shmcache.unlink(name)
