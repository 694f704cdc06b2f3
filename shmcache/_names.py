"""Names of segments and of the files they are made of.

    /dev/shm/shmcache.NAME                    the control segment
    /dev/shm/shmcache.NAME.INSTANCE.NNNN      its regions; INSTANCE is 16 hex digits, new at every
                                              creation, so that no generation meets another's regions

A segment's name may not end like a region's, or a control file could pass for a region of another
segment and be removed with it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SHM_FOLDER = "/dev/shm"
_PREFIX = "shmcache."
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", re.ASCII)
_REGION = re.compile(r"(.+)\.([0-9a-f]{16})\.([0-9]{4,})", re.ASCII)


class FileName(NamedTuple):
    """What a file in /dev/shm is by its name; instance and region are None for a control file."""

    segment: str
    instance: int | None
    region: int | None


def check_name(name: str) -> str:
    """The name itself, or ValueError."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(f"segment name is {name!r}: use 1 to 64 of A-Z a-z 0-9 . _ - and do not start with a dot")
    if _REGION.fullmatch(name) is not None:
        raise ValueError(
            f"segment name is {name!r}: a name may not end in .<16 hex digits>.<digits>, "
            "which is how the files of another segment's memory are named"
        )
    return name


def control_name(name: str) -> str:
    """Name of the control segment as shm_open takes it."""
    return f"/{_PREFIX}{name}"


def region_name(name: str, instance: int, region: int) -> str:
    """Name of a region as shm_open takes it."""
    return f"/{_PREFIX}{name}.{instance:016x}.{region:04d}"


def path_of(shm_name: str) -> str:
    """Where a name of shm_open lies in the file system."""
    return SHM_FOLDER + shm_name


def parse_file(file: str) -> FileName | None:
    """What a file name of /dev/shm (no folder) is, or None when it is none of ours."""
    if not file.startswith(_PREFIX):
        return None
    rest = file[len(_PREFIX) :]
    found = _REGION.fullmatch(rest)
    if found is not None and _NAME.fullmatch(found.group(1)) is not None:
        return FileName(found.group(1), int(found.group(2), 16), int(found.group(3)))
    return FileName(rest, None, None) if _NAME.fullmatch(rest) is not None else None
