"""Layers import downwards only: C by includes, Python by imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
PACKAGE = ROOT / "shmcache"

# A C file may include headers of a lower number (or its own).
C_LAYERS = [
    {"shmcache.h"},
    {"linux.h"},
    {"layout.h"},
    {"types.h"},
    {"journal.h"},
    {"list.h", "lock.h", "events.h", "namespaces.h"},
    {"extents.h", "index.h", "holds.h", "policy.h"},
    {"chunks.h"},
    {"attach.h", "check.h"},
    {"api.h"},
    {"objects.h"},
]
C_RANK = {name: rank for rank, names in enumerate(C_LAYERS) for name in names}
# without a header of their own
C_ENDS = {"api.c": 10, "api_memory.c": 10, "api_keys.c": 10, "format.c": 9, "snapshot.c": 9, "peek.c": 9, "fast.c": 11}


def includes(path: Path) -> list[str]:
    return [m.rsplit("/", 1)[-1] for m in re.findall(r'#include "([^"]+)"', path.read_text())]


@pytest.mark.parametrize("path", sorted([*NATIVE.rglob("*.c"), *NATIVE.rglob("*.h")]), ids=lambda p: p.name)
def test_c_includes_go_down(path: Path) -> None:
    header = path.name.replace(".c", ".h")
    rank = C_ENDS.get(path.name, C_RANK.get(header))
    assert rank is not None, f"{path.name} has no layer: add it to C_LAYERS"
    for name in includes(path):
        if name != header:
            assert C_RANK[name] < rank, f"{path.name} includes {name}"


def test_only_the_lock_and_the_os_layer_know_the_clock_and_the_kernel() -> None:
    kernel = re.compile(r"\b(?:open|read|write|mmap|munmap|madvise|syscall|malloc|calloc|free|poll|close)\s*\(")
    for path in (NATIVE / "core").glob("*.[ch]"):
        for n, line in enumerate(path.read_text().splitlines(), 1):
            assert not kernel.search(line.split("/*")[0]), f"{path.name}:{n}: {line.strip()}"


# Python modules from the bottom; a module imports only from earlier groups or its own.
PY_LAYERS = [
    {"_version", "_auto", "_threads", "errors", "_shmcore"},
    {"_core", "_sizes", "_names", "_dtypes", "_formats", "_numa", "_cudart", "_metric_names"},
    {"_meta", "_checksum"},
    {"_shmfs", "_space", "_request", "_control", "_keys", "_events", "_stats", "_defer", "_pending"},
    {"_regions", "_commit", "_arena", "pinning", "_handshake", "_create", "_mapping", "_directory"},
    {"_segment"},
    {"_attachment", "_calls"},
    {"_block", "memory", "_tensors"},
    {"_allocate", "_order", "lookup", "reservation"},
    {"_storing", "_finding", "namespace"},
    {"_default", "cache"},
    {"_open"},
    {"__init__"},
    # LMCache's contract; `import shmcache` needs none of it
    {"keys", "policies", "_objects", "_private", "_host_memory", "_election", "_sizing"},
    {"config", "_pools", "_addresses", "messages"},
    {"allocators", "_placement", "_requests", "metrics"},
    {"_backend_memory", "_backend_finding"},
    {"backend"},
    {"integrations"},
    {"lmcache_backend"},
    {"inspect"},
]
PY_RANK = {name: rank for rank, names in enumerate(PY_LAYERS) for name in names}

# Subpackages are top layers: they import from anything above, nothing there imports from them.
SUBPACKAGES = {
    "inspect": [
        {"__init__", "_stop", "_plain"},
        {"_keytext", "_attach", "_source"},
        {"_reader"},
        {"_render", "_records", "_memory", "_tensorfile"},
        {"_picture", "_families", "_payload"},
        {"_health"},
        {"cli"},
        {"segments", "people", "keys", "history", "check", "arena", "exporter"},
        {"key"},
        {"why", "change", "dump", "top"},
        {"__main__"},
    ],
    "integrations": [{"__init__", "lmcache"}],
}


def imports(path: Path, level: int = 1) -> set[str]:
    """Modules of ours imported when `path` is imported or run; not those for type checking only.

    `level` as in the import: 1 of its own package, 2 of the package above.
    """
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        id(sub)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for sub in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only or not isinstance(node, ast.ImportFrom) or node.level != level:
            continue
        found |= {node.module.split(".")[0]} if node.module else {a.name for a in node.names}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_python_imports_go_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")  # a folder is one layer
    assert own in PY_RANK, f"{path.name} has no layer: add it to PY_LAYERS"
    for name in imports(path):
        if name in PY_RANK:
            assert PY_RANK[name] <= PY_RANK[own], f"{path.name} imports {name}"


IN_SUBPACKAGES = [p for package in SUBPACKAGES for p in sorted((ROOT / "shmcache" / package).glob("*.py"))]


@pytest.mark.parametrize("path", IN_SUBPACKAGES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_imports_inside_a_subpackage_go_down(path: Path) -> None:
    rank = {name: i for i, names in enumerate(SUBPACKAGES[path.parent.name]) for name in names}
    assert path.stem in rank, f"{path.name} has no layer: add it to SUBPACKAGES"
    for name in imports(path) & rank.keys():
        assert rank[name] <= rank[path.stem], f"{path.name} imports {name}"
    for name in imports(path, 2) & PY_RANK.keys():
        assert PY_RANK[name] < PY_RANK[path.parent.name], f"{path.name} imports {name}"


def test_every_subpackage_has_its_layers() -> None:
    assert {p.parent.name for p in (ROOT / "shmcache").glob("*/__init__.py")} == set(SUBPACKAGES)


def test_only_the_core_wrapper_imports_the_compiled_module() -> None:
    users = {p.stem for p in (ROOT / "shmcache").glob("*.py") if "_shmcore" in imports(p)}
    assert users == {"_core"}


def test_only_the_bottom_knows_posix_names() -> None:
    users = {
        p.stem for p in (ROOT / "shmcache").glob("*.py") if re.search(r"^\s*import posix_ipc", p.read_text(), re.M)
    }
    assert users == {"_shmfs"}
