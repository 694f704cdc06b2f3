"""The one place where the C sources become the Python module `shmcache._shmcore` (cffi, API mode).

No prototype is typed twice: the declarations are the text of native/include/shmcache.h between
`cdef-begin` and `cdef-end`. The package's version is compiled in, so that a stale module is
recognised at import. Paths are relative to the project's root, as setuptools wants them.
"""

import glob
import re

from cffi import FFI

HEADER = "native/include/shmcache.h"
VERSION_FILE = "shmcache/_version.py"
SOURCE_FOLDERS = ("native", "native/core", "native/os", "native/python")


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as f:
        return f.read()


def version() -> str:
    found = re.search(r'^__version__ = "([^"]+)"$', _read(VERSION_FILE), re.MULTILINE)
    if found is None:
        raise SystemExit(f'{VERSION_FILE} has no line __version__ = "..."')
    return found.group(1)


def declarations() -> str:
    """What cffi is to parse: plain C, without the preprocessor and without attributes."""
    text = _read(HEADER)
    begin, end = text.index("/* cdef-begin"), text.index("/* cdef-end")
    lines = [line for line in text[begin:end].splitlines() if not line.lstrip().startswith("#")]
    return re.sub(r"__attribute__\s*\(\(.*?\)\)", "", "\n".join(lines))


def sources() -> list[str]:
    return sorted(path for folder in SOURCE_FOLDERS for path in glob.glob(f"{folder}/*.c"))


def depends() -> list[str]:
    """What a rebuild depends on besides the sources; all of it goes into the sdist."""
    headers = [path for folder in (*SOURCE_FOLDERS, "native/include") for path in glob.glob(f"{folder}/*.h")]
    return sorted([*headers, "native/build_shmcore.py", "native/build_backend.py", VERSION_FILE])


def make_ffi() -> FFI:
    ffi = FFI()
    ffi.cdef(declarations())
    ffi.set_source(
        "shmcache._shmcore",
        '#include "shmcache.h"',
        sources=sources(),
        depends=depends(),
        include_dirs=["native/include"],
        define_macros=[("_GNU_SOURCE", "1"), ("SHMC_VERSION", f'"{version()}"')],
        extra_compile_args=["-O2", "-std=c11", "-fvisibility=hidden", "-pthread"],
        extra_link_args=["-pthread"],
    )
    return ffi
