"""The `esper` command: one subcommand per thing a person wants to do."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence

import tyro

from esper.leyline import DataDamaged, DataNotFound, ModelFileError
from esper.scripts.evaluate import evaluate_command
from esper.scripts.grow import grow_command
from esper.scripts.tasks import tasks_command

COMMANDS: dict[str, Callable[..., None]] = {
    "grow": grow_command,
    "evaluate": evaluate_command,
    "tasks": tasks_command,
}

USER_ERRORS = (ValueError, DataNotFound, DataDamaged, ModelFileError, ImportError, PermissionError, NotADirectoryError)
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one subcommand. What the user got wrong is one line and exit code 2; ESPER_DEBUG=1 adds the traceback."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="esper", description="Esper grows neural networks while they train.", args=argv
        )
    except USER_ERRORS as error:
        if os.environ.get("ESPER_DEBUG"):
            traceback.print_exc()
        sys.stderr.write(f"esper: error: {error}\n")
        raise SystemExit(EXIT_USAGE) from None
    except KeyboardInterrupt:
        sys.stderr.write("esper: stopped\n")
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    main()
