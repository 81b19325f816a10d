"""The `esper` command: one subcommand per thing a person wants to do."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Union

import tyro

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
from esper.scripts.bench_coalitions import bench_coalitions_command
from esper.scripts.bench_engine import bench_engine_command
from esper.scripts.bench_ppo import bench_ppo_command
from esper.scripts.bench_telemetry import bench_telemetry_command
from esper.scripts.evaluate import evaluate_command
from esper.scripts.export import export_command
from esper.scripts.grow import grow_command
from esper.scripts.query import query_command
from esper.scripts.report import report_command
from esper.scripts.sandbox import sandbox_command
from esper.scripts.status import status_command
from esper.scripts.tasks import tasks_command
from esper.scripts.train import train_command
from esper.scripts.verify import verify_command

# Commands import torch when they run, not before, so that help and errors come at once.
COMMANDS: dict[str, Callable[..., None]] = {
    "grow": grow_command,
    "train": train_command,
    "evaluate": evaluate_command,
    "tasks": tasks_command,
    "sandbox": sandbox_command,
    "status": status_command,
    "query": query_command,
    "report": report_command,
    "export": export_command,
    "verify": verify_command,
}
BENCHMARKS: dict[str, Callable[..., None]] = {
    "engine": bench_engine_command,
    "coalitions": bench_coalitions_command,
    "ppo": bench_ppo_command,
    "telemetry": bench_telemetry_command,
}

# What a person can mend gets one line and no traceback. The first row that fits decides.
EXIT_CODES: tuple[tuple[tuple[type[Exception], ...], ExitCode], ...] = (
    ((CheckpointError,), ExitCode.CHECKPOINT),
    ((StorageError,), ExitCode.STORAGE),
    ((NumericFailure,), ExitCode.NUMERIC),
    ((WorkersFailed,), ExitCode.WORKERS),
    ((ValueError, DataNotFound, DataDamaged, ModelFileError, RunBusy), ExitCode.USAGE),
    ((ImportError, PermissionError, NotADirectoryError), ExitCode.USAGE),
)
USER_ERRORS = tuple(kind for kinds, _ in EXIT_CODES for kind in kinds)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one subcommand. What a person can mend is one line and an exit code; ESPER_DEBUG=1 adds the traceback."""
    try:
        tyro.cli(_commands(), prog="esper", description="Esper grows neural networks while they train.", args=argv)
    except USER_ERRORS as error:
        if os.environ.get("ESPER_DEBUG"):
            traceback.print_exc()
        sys.stderr.write(f"esper: error: {error}\n")
        raise SystemExit(next(code for kinds, code in EXIT_CODES if isinstance(error, kinds))) from None
    except BrokenPipeError:
        # The reader of a pipe has had enough, as with `| head`. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.stderr.write("esper: stopped\n")
        raise SystemExit(ExitCode.INTERRUPTED) from None


def _commands() -> Any:
    words = "Measure speed, beside what it is up against."
    bench: Any = Annotated[_one_of(BENCHMARKS), tyro.conf.subcommand(name="bench", description=words)]
    return Union[_one_of(COMMANDS), bench]  # noqa: UP007 (made at run time)


def _one_of(commands: Mapping[str, Callable[..., None]]) -> Any:
    rows = tuple(
        Annotated[Any, tyro.conf.subcommand(name=name, constructor=command)] for name, command in commands.items()
    )
    return Union[rows]  # noqa: UP007 (made at run time)


if __name__ == "__main__":
    main()
