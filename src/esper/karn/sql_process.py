"""A query in a process of its own, so that its limits hold: DuckDB stops for neither in the middle of a function.

The child reads a request, loads the logs, sends what a check of each found, and then the answer. All of it is JSON:
nothing the child writes can run code in its parent. It ends with its parent, whose end of the pipe closes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TextIO

from esper.karn.integrity import Integrity
from esper.karn.replay import log_bytes
from esper.karn.sql import LOG_COPIES, MEMORY_BYTES, TOO_MUCH_MEMORY, Answer, RunDatabase

PROCESS_BYTES = 1_000_000_000
"""What the child may use beside DuckDB's own limit: Python, rows on their way, and what DuckDB does not count."""
_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "ImportError": ImportError, "OSError": OSError}


def ask_runs(
    run_dirs: Sequence[Path], text: str, *, limit: int, timeout_s: float
) -> tuple[Answer, dict[Path, Integrity]]:
    """Runs one SELECT over the logs of runs in a child process. Reading the logs does not count as time of the query.

    Returns:
        The rows, in which what JSON has no word for (dates, decimals, bytes) is text; and a check of each run.

    Raises:
        ValueError: It is no single SELECT, it is wrong, or it needs too much time or memory.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "esper.karn.sql_process"]  # -P: no module is taken from the current folder
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "process_group": 0,
    }  # Ctrl-C is the parent's to handle
    with tempfile.TemporaryFile() as errors, subprocess.Popen(command, env=env, stderr=errors, **pipes) as child:  # type: ignore[call-overload]
        timer = threading.Timer(timeout_s, child.kill)
        try:
            child.stdin.write(json.dumps([[*map(str, run_dirs)], text, limit]).encode() + b"\n")
            child.stdin.flush()
            checked = [
                Integrity(**{**found, "problems": tuple(found["problems"])}) for found in _receive(child, errors)
            ]
            until = time.monotonic() + timeout_s
            timer.start()
            try:
                columns, rows, truncated = _receive(child, errors)
            except ChildProcessError:
                if time.monotonic() < until:
                    raise
                words = f"the query took longer than {timeout_s:g} s and was stopped; raise --timeout"
                raise ValueError(words) from None
        except ChildProcessError as error:
            raise ValueError(TOO_MUCH_MEMORY) from error
        finally:
            timer.cancel()
            child.kill()
    answer = Answer(columns=tuple(columns), rows=tuple(map(tuple, rows)), truncated=truncated)
    return answer, dict(zip(run_dirs, checked, strict=True))


def _receive(child: subprocess.Popen[bytes], errors: IO[bytes]) -> Any:
    """The next line of the child. ChildProcessError: it was killed; RuntimeError: it has a defect."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line.endswith(b"\n"):
        if (code := child.wait()) < 0:
            raise ChildProcessError(f"the process of the query was ended by signal {-code}")
        errors.seek(0)
        raise RuntimeError(f"the process of the query ended with code {code}: {errors.read().decode(errors='replace')}")
    error, args, value = json.loads(line)
    if error is not None:
        raise _ERRORS[error](*args)
    return value


def _serve() -> None:
    """The child: one request, two lines."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where DuckDB may draw a progress bar
    names, text, limit = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run_dirs = [Path(name) for name in names]
    try:
        allowed = MEMORY_BYTES + PROCESS_BYTES + LOG_COPIES * sum(map(log_bytes, run_dirs))
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with RunDatabase(run_dirs) as database:
            _send(out, [asdict(found) for found in database.runs.values()])
            answer = database.ask(text, limit=limit)
            _send(out, [answer.columns, _plain(answer.rows), answer.truncated])
    except MemoryError:
        _send(out, None, "ValueError", [TOO_MUCH_MEMORY])
    except OSError as error:
        _send(out, None, "OSError", error.args if error.errno is None else [*error.args[:2], error.filename])
    except (ValueError, ImportError) as error:
        _send(out, None, "ValueError" if isinstance(error, ValueError) else "ImportError", [str(error)])
    os._exit(0)  # threads of DuckDB may be at work still


def _send(out: TextIO, value: object, error: str | None = None, args: Sequence[object] = ()) -> None:
    out.write(json.dumps([error, args, value]) + "\n")
    out.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _serve()
