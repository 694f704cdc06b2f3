"""One of all processes attached to a segment, for a topic: an OFD lock on a byte of the control file.

It ends with the process, whatever ends it, and the next to ask wins.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

from . import _shmfs
from ._core import lib
from ._handshake import _inode, _own
from ._mapping import Mapping
from ._names import control_name

_FIRST_BYTE = 1 << 40  # beyond any file, and the bytes of the handshake


class Election:
    """A candidate. In a forked child it is nobody: the descriptor was closed at the fork."""

    def __init__(self, mapping: Mapping, topic: str) -> None:
        self._pid = os.getpid()
        self._byte = _FIRST_BYTE + zlib.crc32(topic.encode())
        self._cell: Any = None  # removed, or replaced: nobody else can come to this segment
        try:
            fd = _shmfs.open_shm(control_name(mapping.name))
        except FileNotFoundError:
            return
        cell = _own(fd)
        if _inode(os.fstat(fd)) == mapping.inode:
            self._cell = cell

    def won(self) -> bool:
        """Whether this process is the one, from now until `close` or its end."""
        if os.getpid() != self._pid:
            return False  # the parent's
        return self._cell is None or _shmfs.try_lock(self._cell.fd, self._byte, exclusive=True)

    def close(self) -> None:
        """Let others have it."""
        if self._cell is not None:
            lib.shmc_fd_close(self._cell)
