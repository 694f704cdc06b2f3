"""The demo's command line. Run by itself it only checks the options and the room in /dev/shm."""

from __future__ import annotations

import argparse
import re
import shutil
from dataclasses import dataclass

from layout import CHUNK_BYTES, KV_HEADS

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_PAGE = 4096
_LEAST_CHUNKS = 12  # 8 published, 1 half-written, and room for the allocator


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    ranks: int  # rank processes per engine; they split the model's KV heads evenly
    capacity: int  # bytes of KV; the default holds 22 chunks
    keep: bool  # leave the segment behind, to look at it with shmcache-inspect


def parse(argv: list[str] | None = None) -> Options:
    """Parse the command line; exits with a message when something cannot work."""
    parser = argparse.ArgumentParser(
        prog="run-demo",
        description="Two engines and a restart share the KV of a real language model through shmcache.",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help=f"rank processes per engine, each with its share of the {KV_HEADS} KV heads: 1 or 3 (default 1)",
    )
    parser.add_argument("--capacity", type=_size, default="256MiB", help="bytes of KV to share (default 256MiB)")
    parser.add_argument("--keep", action="store_true", help="do not unlink the segment at the end")
    args = parser.parse_args(argv)
    if args.ranks < 1 or KV_HEADS % args.ranks:
        parser.error(f"--ranks {args.ranks}: the model has {KV_HEADS} KV heads, so use 1 or {KV_HEADS}")
    least = _LEAST_CHUNKS * CHUNK_BYTES
    if args.capacity < least:
        parser.error(f"--capacity {mib(args.capacity)}: the demo needs at least {mib(least)}")
    free = shutil.disk_usage("/dev/shm").free
    if free < args.capacity:
        parser.error(
            f"/dev/shm has {mib(free)} free and --capacity is {mib(args.capacity)}: make it larger"
            " (in a container: --shm-size 1g) or pass a smaller --capacity"
        )
    return Options(args.ranks, args.capacity, args.keep)


def mib(nbytes: int) -> str:
    """Bytes as people read them."""
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 256MiB or 1GiB")
    return int(float(match[1]) * _UNITS[match[2]]) // _PAGE * _PAGE


if __name__ == "__main__":
    parse()
