"""The command as a program: its start, its help, its exit codes, completion, what it imports."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scenes
from scenes import run, small

import shmcache
from shmcache._core import lib
from shmcache.inspect.cli import VERBS

SCRIPT = Path(sys.executable).with_name("shmcache-inspect")


def program(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shmcache.inspect", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


def test_it_is_installed_beside_the_interpreter() -> None:
    done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"shmcache-inspect, version {shmcache.__version__}\n")


def test_it_starts_in_under_150_ms() -> None:
    """Of a processor's time, in the best of several: it waits for nothing, and what else runs here does not count."""

    def used() -> float:
        r = resource.getrusage(resource.RUSAGE_CHILDREN)
        return r.ru_utime + r.ru_stime

    best = 10.0
    for _ in range(15):
        begin = used()
        assert program("--help").returncode == 0
        best = min(best, used() - begin)
        if best < 0.15:
            return
    raise AssertionError(f"{best:.3f} s")


@pytest.mark.parametrize("verb", ["--help", "list", "show", "procs", "why", "map", "keys", "verify"])
def test_looking_does_not_import_torch(name: str, verb: str) -> None:
    small(name).close()
    argv = [verb] if verb in ("--help", "list") else [verb, name] + (["k"] if verb == "why" else [])
    code = f"""
import sys
from shmcache.inspect import cli
code = cli.run({argv!r})
assert 'torch' not in sys.modules
heavy = {{'numpy', 'psutil', 'tqdm', 'prometheus_client'}} & set(sys.modules)
assert not heavy or {verb!r} in ('map', 'keys'), heavy
assert {verb!r} != '--help' or 'rich' not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shmcache.unlink(name)


def test_the_package_is_imported_at_first_use() -> None:
    code = """
import sys, shmcache
assert not {'torch', 'shmcache.cache', 'shmcache._segment', 'dataclasses'} & set(sys.modules)
assert dir(shmcache) == shmcache.__all__
shmcache.open, shmcache.SegmentNotFoundError
assert 'shmcache.cache' in sys.modules and 'open' in vars(shmcache)
try:
    shmcache.nonsense
except AttributeError as e:
    assert 'nonsense' in str(e)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_of_every_verb_names_its_options() -> None:
    for verb in VERBS:
        code, out, _ = run(verb, "--help")
        assert code == 0 and "Usage: shmcache-inspect" in out and verb in out
        assert all(len(line) <= 80 for line in out.splitlines())
    for verb, word in (("top", "q quit"), ("unpin", "all else"), ("load", "Evicts nothing"), ("verify", "for 2 s")):
        assert word in " ".join(run(verb, "-h")[1].split()), "what its docstring adds is said too"
    _, out, _ = run("--help")
    assert all(f"  {verb}" in out for verb in VERBS) and "Exit codes: 0 sound, 1 usage" in out


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["nonsense"], 1),
        (["show"], 1),
        (["show", "a", "b"], 1),
        (["show", "../etc"], 1),
        (["show", "absent", "--file", "/etc/hostname"], 1),
        (["keys", "absent", "--sort", "colour"], 1),
        (["unpin", "absent"], 1),
        (["show", "absent-segment"], 2),
        (["show", "--file", "/absent/file"], 2),
        (["unlink", "absent-segment", "--yes"], 2),
        (["show", "--file", __file__], 4),
        (["show", "--file", "/dev/null"], 4),
        (["show", "--file", "/dev"], 4),
    ],
)
def test_exit_codes(argv: list[str], code: int) -> None:
    found, out, err = run(*argv)
    assert (found, out) == (code, "") and err


def test_the_program_exits_with_that_code() -> None:
    assert program("show", "absent-segment").returncode == 2
    assert program("nonsense").returncode == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_somebody_elses_copy_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "c"
    copy.write_bytes(b"x")
    copy.chmod(0)
    assert run("show", "--file", str(copy))[0] == 5


def test_another_version_is_told_apart(name: str, tmp_path: Path) -> None:
    small(name).close()
    raw = bytearray((scenes.SHM / f"shmcache.{name}").read_bytes())
    raw[8] += 1  # the format, after the magic
    copy = tmp_path / "copy"
    copy.write_bytes(raw)
    code, _, err = run("show", "--file", str(copy))
    ours = int(lib.SHMC_FORMAT_VERSION)
    assert code == 4 and f"format {ours + 1}" in err and f"format {ours} " in err.replace(",", " ")
    (scenes.SHM / f"shmcache.{name}").write_bytes(raw)
    assert run("show", name)[0] == 4
    _, out, _ = run("list", "--json")
    assert {r["name"]: r["state"] for r in json.loads(out)["segments"]}[name] == "incompatible"
    shmcache.unlink(name, force=True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(name: str, shell: str) -> None:
    code, out, err = run("completion", shell)
    assert code == 0 and "_SHMCACHE_INSPECT_COMPLETE" in out and "add to" in err
    small(name).close()
    if shell == "bash":
        done = program(
            _SHMCACHE_INSPECT_COMPLETE="bash_complete", COMP_WORDS=f"shmcache-inspect show {name[:8]}", COMP_CWORD="2"
        )
        assert name in done.stdout
        done = program(_SHMCACHE_INSPECT_COMPLETE="bash_complete", COMP_WORDS="shmcache-inspect name", COMP_CWORD="1")
        assert "namespaces" in done.stdout
    shmcache.unlink(name)


def test_a_closed_pipe_is_no_error(name: str) -> None:
    with small(name) as cache:
        for i in range(2000):
            scenes.store(cache, i, 64)
        command = f"{sys.executable} -m shmcache.inspect keys {name} --limit 2000 --json | head -1"
        done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    shmcache.unlink(name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_the_schema_is_printed_and_itself_valid() -> None:
    import jsonschema

    code, out, _ = run("schema")
    document = json.loads(out)
    assert code == 0
    jsonschema.Draft202012Validator.check_schema(document)
    told_apart = {ref["$ref"].rpartition("-")[2] for ref in document["oneOf"]}
    assert told_apart == set(VERBS) - {"schema", "completion"} | {"event"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": 1, "verb": "verify", "version": "1"}, document)


def test_a_stranger_next_to_the_segments_does_not_disturb(name: str, fork: Any) -> None:
    """Whatever lies in /dev/shm under our prefix: a folder, a link, a fifo, an empty file."""
    small(name).close()
    made = [scenes.SHM / f"shmcache.{name}-{kind}" for kind in ("folder", "link", "fifo", "empty")]
    made[0].mkdir()
    made[1].symlink_to("/nowhere")
    os.mkfifo(made[2])
    made[3].touch()
    try:
        with scenes.prompt():
            _, out, _ = run("list", "--json")
            states = {r["name"]: r["state"] for r in json.loads(out)["segments"]}
            codes = [run("show", p.name.removeprefix("shmcache."))[0] for p in made]
    finally:
        made[0].rmdir()
        for p in made[1:]:
            p.unlink()
    assert states[name] == "ready" and states[f"{name}-fifo"] == "foreign" and states[f"{name}-empty"] == "half-made"
    assert codes == [4, 4, 4, 4]
    shmcache.unlink(name)
