"""Prometheus metrics of segments whose engines have none: `metrics`. Each scrape is one look, without the lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ._families import families
from ._reader import Reader
from ._render import note, print_json
from ._stop import Exit, Stop
from .cli import complete_names, json_option, verb

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


class _Segments:
    """A Prometheus collector of the segments there are at the time of a scrape."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def collect(self) -> Iterator[Metric]:
        from .._shmfs import control_files

        readers: dict[str, Reader | None] = {}
        for name in self._names or control_files():
            try:
                readers[name] = Reader.open(name)
            except Stop as e:
                if e.code != Exit.NOT_FOUND:
                    readers[name] = None
        yield from families(readers)


def registry(names: tuple[str, ...] = ()) -> CollectorRegistry:
    """With the segments of these names, or all, and nothing else."""
    from prometheus_client import CollectorRegistry

    found = CollectorRegistry(auto_describe=False)
    found.register(_Segments(names))
    return found


def _as_dict(metric: Metric) -> dict[str, Any]:
    samples = [{"name": s.name, "labels": s.labels, "value": s.value} for s in metric.samples]
    return {"name": metric.name, "type": metric.type, "help": metric.documentation, "samples": samples}


def check_there(name: str) -> None:
    """Stop when there is no such segment; one that cannot be read has a metric that says so."""
    try:
        Reader.open(name)
    except Stop as e:
        if e.code in (Exit.NOT_FOUND, Exit.USAGE):
            raise


@verb("metrics")
@click.argument("names", nargs=-1, shell_complete=complete_names)
@click.option("--port", type=click.IntRange(0, 65535), help="Serve at http://ADDRESS:PORT/metrics until Ctrl-C.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Labels are not for everybody: think first.")
@json_option
def metrics_(names: tuple[str, ...], port: int | None, address: str, as_json: bool) -> int:
    """Or of these NAMES. Served with --port, else printed once."""
    from prometheus_client import generate_latest, start_http_server

    if port is not None and as_json:
        raise click.UsageError("--json prints the metrics once, --port serves them: choose")
    if port is None:
        for name in names:
            check_there(name)
        if as_json:
            print_json("metrics", {"metrics": [_as_dict(m) for m in registry(names).collect()]})
            return Exit.SOUND
        click.echo(generate_latest(registry(names)).decode(), nl=False)
        return Exit.SOUND
    try:
        server, _ = start_http_server(port, address, registry(names))
    except OSError as e:
        raise Stop(Exit.USAGE, f"port {port} of {address} is not to be had: {e.strerror}; choose another") from None
    note(f"serving http://{address}:{server.server_port}/metrics")
    threading.Event().wait()
    return Exit.SOUND
