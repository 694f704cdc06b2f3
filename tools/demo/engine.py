"""An engine as the story sees it: a driver and its ranks, all children of this process."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.process import BaseProcess
from typing import Any

import driver
import rank
from layout import STAGING_BYTES
from segment import Run
from worker import WorkerError, receive

_STOP_S = 20.0


class Engine:
    """Starts the processes and waits until they are ready. Leaving the `with` kills what is left of them."""

    def __init__(self, run: Run, label: str) -> None:
        self.label = label
        self.processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        self._conn, driver_end = context.Pipe()
        pipes = [context.Pipe() for _ in range(run.ranks)]
        staging = context.RawArray("b", STAGING_BYTES)  # private to this engine, not part of the cache
        rank_conns = [ours for ours, _ in pipes]
        self.processes += [
            context.Process(target=rank.main, args=(theirs, run, label, number, staging), name=f"{label} rank {number}")
            for number, (_, theirs) in enumerate(pipes)
        ]
        args = (driver_end, run, label, rank_conns, staging)
        self.processes.append(context.Process(target=driver.main, args=args, name=f"{label} driver"))
        try:
            for process in self.processes:
                _start(process)
            for end in [driver_end, *(end for pipe in pipes for end in pipe)]:
                end.close()  # the children hold them now: a death is seen as the end of a pipe
            receive(self._conn, label)
        except BaseException:
            self.kill()
            raise

    def call(self, method: str, *args: object) -> Any:
        """Have the driver do something, and wait for the result."""
        self._conn.send((method, args))
        return receive(self._conn, self.label)

    def stop(self) -> None:
        """End all processes in good order."""
        self._conn.close()
        for process in self.processes:
            process.join(_STOP_S)
            if process.exitcode != 0:
                raise WorkerError(f"{process.name} did not end well: exit code {process.exitcode}")

    def kill(self) -> None:
        """SIGKILL, the last rank first; returns when all are gone."""
        for process in [*reversed(self.processes[:-1]), self.processes[-1]]:
            if process.pid is not None:
                process.kill()
                process.join(_STOP_S)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


def _start(process: BaseProcess) -> None:
    """Start a child that Ctrl-C does not reach: it is for the story, which then ends its children."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, handler)
