"""A pseudo-terminal of 80 columns with the command in it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9])")


def _plain(raw: bytes) -> str:
    return _ESCAPE.sub(b"", raw).replace(b"\r", b"").decode("utf-8", "replace")


class Terminal:
    """`python -m shmcache.inspect ARGS` on a terminal; closed by a `with`."""

    def __init__(self, *argv: str, rows: int = 24, columns: int = 80, **env: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shmcache.inspect", *argv], stdin=slave, stdout=slave, stderr=slave,
            env={**clean, "TERM": "xterm-256color", **env}, start_new_session=True,
        )  # fmt: skip
        self.slave = slave
        self.raw = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    @property
    def text(self) -> str:
        return _plain(self.raw)

    @property
    def lines(self) -> list[str]:
        """Of a program that fills the screen again and again: each screen begins at the top left."""
        return [line for screen in self.raw.split(b"\x1b[H") for line in _plain(screen).split("\n")]

    def read(self, seconds: float) -> None:
        if select.select([self.master], [], [], seconds)[0]:
            self.raw += os.read(self.master, 65536)

    def wait_for(self, pattern: str, timeout: float = 15.0) -> str:
        """Until it is written; forgets what was before it."""
        end = time.monotonic() + timeout
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, f"{pattern!r} is not in {self.text[-2000:]!r}"
            self.read(0.1)
        return found.group(0)

    def press(self, keys: str) -> None:
        self.raw = b""
        os.write(self.master, keys.encode())

    def end(self, timeout: float = 15.0) -> int:
        limit = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < limit, f"it does not end: {self.text[-500:]!r}"
            self.read(0.05)
        while select.select([self.master], [], [], 0)[0]:
            self.read(0)
        return int(self.process.returncode)

    def interrupt(self) -> int:
        """As a person at the keyboard: again, when the first came just before Python began to read."""
        for _ in range(20):
            self.process.send_signal(signal.SIGINT)
            try:
                return self.end(1.0)
            except AssertionError:
                continue
        raise AssertionError("it does not end")

    def is_as_before(self) -> bool:
        """The settings of the terminal."""
        return termios.tcgetattr(self.slave) == self.before
