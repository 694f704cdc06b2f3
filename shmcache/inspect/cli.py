"""The command: which verb is where, what all of them share, and exit codes.

A verb's module is imported when it is called: `shmcache-inspect --help` imports none.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from .. import errors
from .._version import __version__
from ._plain import never_fail
from ._stop import Exit, Stop

F = TypeVar("F", bound=Callable[..., Any])

# verb: (module, what it does). Help texts stand here so that listing them imports nothing.
VERBS = {
    "list": ("segments", "All segments of this host."),
    "show": ("segments", "One segment on one page, with advice when something is wrong."),
    "procs": ("people", "Attachments: processes, ranks, what they hold."),
    "namespaces": ("people", "Namespaces: parts, chunks, hit ratio."),
    "holds": ("people", "References and pins, and whose they are."),
    "keys": ("keys", "Keys of chunks, coldest to hottest."),
    "key": ("key", "One chunk: parts, sizes, dtype and shape, holds, ages."),
    "why": ("why", "Why a lookup of a key misses, or that it hits."),
    "events": ("history", "What was admitted and removed, by whom, why."),
    "stats": ("history", "All counters."),
    "diff": ("history", "What happened between two `stats --json`."),
    "map": ("arena", "A picture of the arena."),
    "top": ("top", "Live view: rates, occupancy, lock, attachments."),
    "verify": ("check", "Whether all invariants hold, and checksums agree."),
    "metrics": ("exporter", "Serve Prometheus metrics of all segments."),
    "dump": ("dump", "Write all chunks to a file (safetensors)."),
    "load": ("dump", "Put the chunks of a dump into a segment. Asks."),
    "reap": ("change", "Return what dead attachments hold. Asks."),
    "unpin": ("change", "Give back pins of dead attachments. Asks."),
    "remove": ("change", "Remove one chunk. Asks."),
    "clear": ("change", "Remove all chunks nobody holds. Asks."),
    "gc": ("change", "Remove segments that are proven abandoned. Asks."),
    "unlink": ("change", "Remove a segment. Asks."),
    "schema": ("segments", "The JSON schema of all --json output."),
    "completion": ("segments", "Shell completion: bash, zsh or fish."),
}
_ATTACHING = ("verify", "dump")  # the first only where somebody else is attached
_CHANGING = ("reap", "unpin", "remove", "clear", "gc", "unlink", "load")

EPILOG = """Exit codes: 0 sound, 1 usage, 2 not found, 3 unhealthy or its lock not to be had,
4 not a segment (foreign, half-made, another version), 5 refused (not confirmed, in use, not permitted)."""


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f".{VERBS[cmd_name][0]}", __package__)
        command: click.Command = getattr(module, f"{cmd_name}_")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `| head` has seen enough: no fault of the segment's, and click would make it one
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return Exit.SOUND

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = (
            ("Looking (no lock, nothing written)", [v for v in VERBS if v not in _ATTACHING + _CHANGING]),
            ("Looking from inside (attach, ask for the lock for 2 s at most)", list(_ATTACHING)),
            ("Changing", list(_CHANGING)),
        )
        for title, verbs in groups:
            with formatter.section(title):
                formatter.write_dl([(v, VERBS[v][1]) for v in verbs])


@click.group(cls=_Verbs, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shmcache-inspect")
def group() -> None:
    """What is in a shmcache segment, who holds it, why a lookup missed, what is safe to do."""


# ---- what verbs share ---------------------------------------------------------------------------


def cleandoc(text: str) -> str:
    """As inspect.cleandoc, which takes 4 ms to import."""
    first, _, rest = text.strip().partition("\n")
    return "\n".join([first, *(line.removeprefix("    ") for line in rest.splitlines())])


def verb(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A click command; its help is what VERBS says, then what its own docstring has to add."""

    def made(f: Callable[..., Any]) -> click.Command:
        words = "\n\n".join(filter(None, (VERBS[name][1], cleandoc(f.__doc__ or ""))))
        return click.command(name, help=words, context_settings={"help_option_names": ["-h", "--help"]})(f)

    return made


def complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from .._shmfs import control_files

    return [name for name in control_files() if name.startswith(incomplete)]


def segment_argument(f: F) -> F:
    """NAME, required."""
    return click.argument("name", shell_complete=complete_names)(f)


def source(f: F) -> F:
    """NAME or --file COPY; the verb gets an open Reader as `reader`."""
    import functools

    @functools.wraps(f)
    def wrapped(name: str | None, file: str | None, **rest: Any) -> Any:
        return f(open_reader(name, file), **rest)

    wrapped = click.option("--file", type=readable_path(), help="A copy of a control file, instead of NAME.")(wrapped)
    return click.argument("name", required=False, shell_complete=complete_names)(wrapped)  # type: ignore[return-value]


def source_and_key(f: F) -> F:
    """NAME KEY, or --file COPY KEY; the verb gets `reader` and `key`."""
    import functools

    @functools.wraps(f)
    def wrapped(words: tuple[str, ...], file: str | None, **rest: Any) -> Any:
        if len(words) != (1 if file else 2):
            raise click.UsageError("give the NAME of a segment and a KEY, or --file COPY and a KEY")
        return f(open_reader(None if file else words[0], file), key=words[-1], **rest)

    wrapped = click.option("--file", type=readable_path(), help="A copy of a control file, instead of NAME.")(wrapped)
    argument = click.argument("words", nargs=-1, metavar="NAME KEY", shell_complete=complete_names)
    return argument(wrapped)  # type: ignore[return-value]


def open_reader(name: str | None, file: str | None) -> Any:
    from ._reader import Reader

    if (name is None) == (file is None):
        raise click.UsageError("give either the NAME of a segment or --file with a copy of its control file")
    return Reader.open(name) if name is not None else Reader.open_file(str(file))


def json_option(f: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="One JSON document; see `schema`.")(f)


class Seconds(click.FloatRange):
    """A time that can be waited for: no nan, and not for ever."""

    def __init__(self, least: float, most: float = 1e8) -> None:
        super().__init__(least, most)

    def _describe_range(self) -> str:
        return f"at least {self.min:g}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if seconds != seconds:
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


def readable_path() -> click.Path:
    """A file that is looked for, and may be another's, when it is opened: with the right exit code."""
    return click.Path(readable=False)


def yes_option(f: F) -> F:
    return click.option("--yes", is_flag=True, help="Do not ask.")(f)


def confirm(question: str, yes: bool) -> None:
    """Asks on a terminal. Elsewhere, without --yes, nothing is changed: exit code 5."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Stop(Exit.REFUSED, f"{question} Nothing was changed: there is no terminal to ask on; use --yes.")
    if not click.confirm(question, err=True):
        raise Stop(Exit.REFUSED, "Nothing was changed.")


def end(reader: Any, healthy: bool = True) -> int:
    """The exit code of a verb that has printed what it was asked for."""
    if not healthy or reader.state == "poisoned":
        from ._render import note

        if healthy:
            note(f"segment {reader.name!r} is poisoned: see `shmcache-inspect show {reader.name}`")
        return Exit.UNHEALTHY
    return Exit.SOUND


_CODES: tuple[tuple[type[BaseException], Exit], ...] = (
    (errors.SegmentNotFoundError, Exit.NOT_FOUND),
    (errors.LockTimeoutError, Exit.UNHEALTHY),
    (errors.SegmentBusyError, Exit.REFUSED),
    (errors.SegmentPermissionError, Exit.REFUSED),
    (errors.SegmentMismatchError, Exit.NOT_A_SEGMENT),
    (errors.SegmentCorruptError, Exit.NOT_A_SEGMENT),
    (errors.ShmCacheError, Exit.UNHEALTHY),
    (PermissionError, Exit.REFUSED),
    (OSError, Exit.USAGE),
)


def run(argv: list[str] | None = None) -> int:
    """The command's exit code."""
    never_fail()
    try:
        return int(group.main(args=argv, prog_name="shmcache-inspect", standalone_mode=False) or 0)
    except Stop as e:
        click.echo(f"shmcache-inspect: {e}", err=True)
        return e.code
    except click.ClickException as e:
        e.show()
        return Exit.USAGE
    except (click.Abort, KeyboardInterrupt):
        return 130
    except (errors.ShmCacheError, OSError) as e:
        click.echo(f"shmcache-inspect: {e}", err=True)
        poisoned = getattr(e, "code", 0) == -5
        return Exit.UNHEALTHY if poisoned else next(code for kind, code in _CODES if isinstance(e, kind))


def main() -> NoReturn:
    sys.exit(run())
