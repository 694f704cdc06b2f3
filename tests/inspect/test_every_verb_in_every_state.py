"""Every verb that only looks, on segments in every state: it ends in time, with the right code, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scenes
from scenes import Scene, prompt, run

LOOKING = (
    ["show"],
    ["procs"],
    ["namespaces"],
    ["holds"],
    ["holds", "--dead"],
    ["keys"],
    ["keys", "--match", "k*", "--sort", "hot", "--limit", "2"],
    ["events"],
    ["stats"],
    ["map"],
)
ABOUT_A_KEY = ("key", "why")


def contents(scene: Scene) -> bytes:
    return (scenes.SHM / f"shmcache.{scene.name}").read_bytes()


@pytest.mark.parametrize("verb", LOOKING, ids=" ".join)
@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_looking_ends_in_time_with_its_code_and_changes_nothing(scene: Scene, verb: list[str], as_json: bool) -> None:
    before = contents(scene) if scene.kind not in ("live", "copy") else b""
    with prompt():
        code, out, err = run(*verb, *scene.source, *(["--json"] if as_json else []))
    expected = scene.exit
    if verb == ["show"] and scene.kind in ("stopped", "full"):
        expected = 3
    assert code == expected, (out, err)
    if code == 4:
        assert not out and len(err.splitlines()) == 1
        return
    assert all(len(line) <= 80 for line in out.splitlines()) or as_json
    if as_json:
        document = json.loads(out)
        assert (document["schema"], document["verb"]) == (1, verb[0])
    if before:
        assert contents(scene) == before


@pytest.mark.parametrize("verb", ABOUT_A_KEY)
@pytest.mark.parametrize("key", ["k2", "nothing like it", "0x" + "00" * 32, "42"])
def test_looking_for_a_key(scene: Scene, verb: str, key: str) -> None:
    with prompt():
        code, out, err = run(verb, *scene.source, key)
    if scene.exit == 4:
        assert code == 4
    elif verb == "key" and (key == "nothing like it" or scene.kind in ("empty", "full")):
        assert (code, out) == (0, out) if scene.kind == "full" and key == "42" else code == 2
    elif verb == "why" and scene.kind == "stopped" and key != "nothing like it":
        assert code == 3 and out.startswith("LOCK-STUCK") and f"pid {scene.child.pid}" in out, "nobody can hit it"
    else:
        assert code == scene.exit, err
    assert all(len(line) <= 80 for line in out.splitlines())


def test_list_names_it_and_its_state(scene: Scene) -> None:
    with prompt():
        code, out, _ = run("list", "--json")
    rows = {row["name"]: row for row in json.loads(out)["segments"]}
    if scene.kind == "copy":
        assert scene.name not in rows
        return
    row = rows[scene.name]
    assert row["state"] == {"poisoned": "poisoned", "garbage": "foreign", "half-made": "half-made"}.get(
        scene.kind, "ready"
    )
    if scene.kind != "poisoned":  # its close could not give the slot back
        assert (row["live"], row["dead"]) == ((0, 1) if scene.kind == "dead" else (int(scene.child is not None), 0))
    if scene.kind in ("poisoned", "stopped", "full"):
        assert code == 3


def test_show_gives_advice_that_fits(scene: Scene) -> None:
    code, out, _ = run("show", *scene.source, "--json")
    if code == 4:
        return
    found = {f["code"]: f for f in json.loads(out)["findings"]}
    expected = {
        "stopped": {"lock-stopped"},
        "poisoned": {"poisoned", "abandoned"},
        "dead": {"abandoned"},
        "empty": {"abandoned"},
        "full": {"pinned-full"},
    }
    assert set(found) == expected.get(scene.kind, set())
    for f in found.values():
        assert f["text"] and f["action"]
    if scene.kind == "stopped":
        assert f"kill -CONT {scene.child.pid}" in found["lock-stopped"]["action"]


def test_top_draws_it(scene: Scene) -> None:
    from shmcache.inspect.top import _State, screen_of

    if scene.kind == "copy":
        return
    state = _State([scene.name], 1.0)
    for _ in range(2):
        with prompt():
            screen = screen_of(state).plain
    assert all(len(line) <= 200 for line in screen.splitlines()) and "q quit" in screen
    says = {"poisoned": "error: ", "stopped": "is stopped", "full": "warning: ", "dead": "info: Nobody is attached"}
    assert says.get(scene.kind, "" if scene.exit == 4 else "hits") in screen
    if scene.exit == 4:
        assert scene.name in screen and "hits" not in screen


def test_metrics_of_it(scene: Scene) -> None:
    if scene.kind == "copy":
        return
    with prompt():
        code, out, _ = run("metrics", scene.name)
    state = {"poisoned": "poisoned", "garbage": "unreadable", "half-made": "unreadable"}.get(scene.kind, "ready")
    assert code == 0 and f'shmcache_state{{segment="{scene.name}",state="{state}"}} 1.0' in out


def test_verify_takes_the_lock_only_where_somebody_could_hold_it(scene: Scene) -> None:
    with prompt():
        code, out, err = run("verify", *scene.source, "--json")
    if scene.exit == 4:
        assert code == 4
        return
    found = json.loads(out)
    assert ("asking for the lock" in err) == (scene.kind in ("live", "stopped", "full"))
    if scene.kind == "stopped":
        assert code == 3
        assert len(found["violations"]) == 1 and str(scene.child.pid) in found["violations"][0]
    else:
        assert found["violations"] == []
        assert code == (3 if scene.kind == "poisoned" else 0)


def test_a_copy_is_checked_like_the_original(scene: Scene, tmp_path: Path) -> None:
    if scene.kind in ("copy", "live"):
        return
    copy = tmp_path / "copy"
    copy.write_bytes(contents(scene))
    code, out, _ = run("verify", "--file", str(copy))
    assert code == scene.exit
    if code == 0:
        assert out.startswith("Sound")
