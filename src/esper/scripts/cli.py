"""The `esper` command: one subcommand per thing a person wants to do."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import tyro

from esper import __version__
from esper.leyline import (
    CheckpointError,
    DataDamaged,
    DataNotFound,
    ExitCode,
    ModelFileError,
    NumericFailure,
    RunBusy,
    StorageError,
    WorkersFailed,
)
from esper.scripts.compare import compare_command
from esper.scripts.evaluate import evaluate_command
from esper.scripts.export import export_command, report_command
from esper.scripts.grow import grow_command
from esper.scripts.query import query_command
from esper.scripts.sandbox import sandbox_command
from esper.scripts.serve import serve_command
from esper.scripts.status import status_command, verify_command
from esper.scripts.study import study_command
from esper.scripts.tasks import tasks_command
from esper.scripts.terminal import print_stderr
from esper.scripts.train import train_command
from esper.scripts.watch import watch_command

# Commands import torch when they run, not before, so that help and errors come at once.
COMMANDS: dict[str, Callable[..., None]] = {
    "grow": grow_command,
    "train": train_command,
    "study": study_command,
    "evaluate": evaluate_command,
    "compare": compare_command,
    "tasks": tasks_command,
    "sandbox": sandbox_command,
    "status": status_command,
    "watch": watch_command,
    "serve": serve_command,
    "query": query_command,
    "report": report_command,
    "export": export_command,
    "verify": verify_command,
}
# What a person can mend gets one line and no traceback. The first row that fits decides.
EXIT_CODES: tuple[tuple[tuple[type[Exception], ...], ExitCode], ...] = (
    ((CheckpointError,), ExitCode.CHECKPOINT),
    ((StorageError,), ExitCode.STORAGE),
    ((NumericFailure,), ExitCode.NUMERIC),
    ((WorkersFailed,), ExitCode.WORKERS),
    ((ValueError, DataNotFound, DataDamaged, ModelFileError, RunBusy), ExitCode.USAGE),
    ((ImportError, PermissionError, NotADirectoryError), ExitCode.USAGE),
    ((OSError,), ExitCode.STORAGE),
)
USER_ERRORS = tuple(kind for kinds, _ in EXIT_CODES for kind in kinds)

REMEDIES: Mapping[int, str] = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "it is a folder; name a file",
    errno.ENOTDIR: "a part of the path is a file; name a folder",
    errno.EEXIST: "name another one",
    errno.EACCES: "check the permissions, or name another place",
    errno.EPERM: "check the permissions, or name another place",
    errno.EROFS: "the disk is read-only; name another place",
    errno.ENOSPC: "free space there, or write elsewhere",
    errno.EDQUOT: "free space there, or write elsewhere",
}
"""What to do about an error of the operating system, by its number."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one subcommand. What a person can mend is one line and an exit code; ESPER_DEBUG=1 adds the traceback."""
    _open_missing_streams()
    _write_any_character()
    warnings.formatwarning = _in_one_line
    args = sys.argv[1:] if argv is None else list(argv)
    if args == ["--version"]:
        sys.stdout.write(f"esper {__version__}\n")
        return
    try:
        about = "Esper grows neural networks while they train. 'esper --version' prints the version."
        listed = not args or args[0] in ("-h", "--help")
        try:
            command: Callable[[], None] = tyro.cli(_commands(listed), prog="esper", description=about, args=args)
        except SystemExit:
            sys.stdout.flush()  # help is output too
            raise
        command()
        sys.stdout.flush()  # here and not at exit, where Python would answer a full disk with a traceback
    except BrokenPipeError:  # the reader of a pipe has had enough, as with `| head`
        _let_go_of_output()
    except USER_ERRORS as error:
        if os.environ.get("ESPER_DEBUG"):
            traceback.print_exc()
        _let_go_of_output()
        print_stderr(f"error: {_in_words(error)}")
        raise SystemExit(next(code for kinds, code in EXIT_CODES if isinstance(error, kinds))) from None
    except KeyboardInterrupt:
        sys.stderr.write("esper: stopped\n")
        raise SystemExit(ExitCode.INTERRUPTED) from None


def _in_one_line(message: Warning | str, *where: object, **more: object) -> str:
    """A warning without the line of code that gave it, which concerns nobody at a terminal."""
    from esper.karn.console import clean

    return f"esper: {clean(str(message))}\n"


def _open_missing_streams() -> None:
    """Gives a process that was started without standard streams (`>&-`) silent ones.

    The next file it opens would get the free descriptor: an event log that is standard error to every library.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _write_any_character() -> None:
    """Where the terminal's encoding lacks a character, its number is written: a curve must not end a command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _let_go_of_output() -> None:
    """Drops output that cannot be written: Python would try once more at exit, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_words(error: Exception) -> str:
    """The message; of an error of the operating system: the path, the reason and what to do, without its number."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    place = "cannot write the output, or read or write a file" if error.filename is None else str(error.filename)
    remedy = REMEDIES.get(error.errno, "check the path and the disk, and try again")
    return f"{place}: {' '.join(str(error.strerror).split())}; {remedy}"


def _commands(listed: bool) -> Any:
    """All subcommands as a type for tyro; `listed` ones are described by their first line only."""
    benchmarks = find_benchmarks()
    if not benchmarks:
        return _one_of({**COMMANDS, "bench": _no_benchmarks}, listed)
    words = "Measure speed, beside what it is up against."
    bench: Any = Annotated[_one_of(benchmarks, listed), tyro.conf.subcommand(name="bench", description=words)]
    return Union[_one_of(COMMANDS, listed), bench]  # noqa: UP007 (made at run time)


def find_benchmarks() -> Mapping[str, Callable[..., None]]:
    """The benchmarks of the checkout this package is run from; none where it is installed."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "__init__.py").is_file():
        return {}
    if str(root) not in sys.path:
        sys.path.append(str(root))  # worker processes import benchmarks by name
    from benchmarks import BENCHMARKS

    return BENCHMARKS


def _no_benchmarks() -> None:
    """Benchmarks come with the source tree and are not installed: clone it and run `make bench`."""
    raise ValueError("benchmarks come with the source tree and are not installed; clone it and run 'make bench' there")


def _one_of(commands: Mapping[str, Callable[..., None]], listed: bool) -> Any:
    rows = []
    for name, command in commands.items():
        words = (command.__doc__ or "").partition("\n")[0] if listed else None
        rows.append(Annotated[Any, tyro.conf.subcommand(name=name, description=words, constructor=_deferred(command))])
    return Union[tuple(rows)]  # noqa: UP007 (made at run time)


def _deferred(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """What tyro may call once it has parsed the arguments: it keeps them for later and does no work yet."""

    @wraps(command)
    def remember(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return partial(command, *args, **kwargs)

    hints = get_type_hints(command, include_extras=True)
    entries = signature(command).parameters.items()
    remember.__signature__ = signature(command)  # type: ignore[attr-defined]
    remember.__annotations__ = {**hints, **{name: _shown(hints[name], entry.default) for name, entry in entries}}
    del remember.__wrapped__  # its annotations would count
    return remember


def _shown(hint: Any, default: Any) -> Any:
    """An argument, or a record of them, whose help says what is done without it.

    `PATH`, not `{None}|PATH (default: None)`.
    """
    kind, notes = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
    if isinstance(kind, type) and is_dataclass(kind) and default is Parameter.empty:
        hints = get_type_hints(kind, include_extras=True)
        unset = [(e.name, _shown(hints[e.name], e.default), e.default) for e in fields(kind) if e.default in (None, ())]
        made: Any = make_dataclass(kind.__name__, unset, bases=(kind,), frozen=True, kw_only=True)
        return Annotated[made, *notes]
    if default not in (None, ()):
        return hint
    words = [part.__name__.upper() for part in get_args(kind) if isinstance(part, type) and part is not NoneType]
    metavar = "|".join(words) if NoneType in get_args(kind) else None
    return Annotated[kind, tyro.conf.arg(metavar=metavar or None, help_behavior_hint=""), *notes]


if __name__ == "__main__":
    main()
