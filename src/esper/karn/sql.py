"""Runs as tables of an in-memory database that can be queried and not changed, or written as Parquet.

The log is read by the same code as everywhere else, so torn lines, damage and attempts are settled before SQL sees
anything. A query cannot write or read elsewhere, for four reasons of which none relies on another: only a single
statement that the parser calls a SELECT is run, it is run in a transaction that may only read, access to files is
switched off, and the settings are locked. What ends a query that takes too long or too much is in `sql_process`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from esper.karn.codec import with_nonfinite_words
from esper.karn.integrity import Integrity, check_run
from esper.karn.replay import log_bytes
from esper.karn.sql_views import VIEWS, quoted, sql_type, view_statements
from esper.leyline import LoggedEvent, record

if TYPE_CHECKING:
    import duckdb

CHUNK_LINES = 20_000
MEMORY_BYTES = 1_000_000_000
"""What a query may use, beside the log itself: a mistake in a join must not take the machine's memory."""
LOG_COPIES = 4
"""How often the log may be held: as it is, and in parts that are sorted and turned into columns."""
TIME_ZONES = "a time with a time zone cannot be shown; write to_timestamp(wall)::timestamp, which is local time"
"""DuckDB would need another library for it, and fails with a traceback."""
TOO_MUCH_MEMORY = "the query needs more memory than it may use and was stopped; ask for fewer rows, columns or runs"
_NONFINITE = b'"nonfinite"'
_ERRNO = re.compile(r'"errno":"(\d+)"')
"""DuckDB gives the number of an error only inside its text."""


@record
class Answer:
    """The rows of a query."""

    columns: tuple[str, ...]
    """No name comes twice: of `a, a` the second is `a_1`."""
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool
    """True if there were more rows than were asked for."""


class RunDatabase:
    """The tables of one or more runs, to be queried. A context manager; `runs` says whether each record is whole."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self._connection, self.runs = _open_tables(run_dirs)
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    def __enter__(self) -> RunDatabase:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def ask(self, text: str, *, limit: int) -> Answer:
        """Runs one SELECT.

        Raises:
            ValueError: It is no single SELECT, it is wrong, or it needs too much memory.
        """
        import duckdb

        statement = self._only_select(text)
        # A SELECT can write: WITH takes an INSERT or DELETE that returns its rows.
        self._connection.execute("BEGIN TRANSACTION READ ONLY")
        try:
            cursor = self._connection.execute(statement)
            rows = cursor.fetchmany(limit + 1)
            columns = _numbered(column[0] for column in cursor.description or ())
        except (duckdb.OutOfMemoryException, MemoryError):
            raise ValueError(TOO_MUCH_MEMORY) from None
        except duckdb.TransactionException as error:
            raise ValueError(f"runs can be asked, not changed: {_one_line(error)}") from None
        except duckdb.Error as error:
            raise ValueError(TIME_ZONES if "pytz" in str(error) else _one_line(error)) from None
        finally:
            self._connection.execute("ROLLBACK")
        return Answer(columns=columns, rows=tuple(rows[:limit]), truncated=len(rows) > limit)

    def _only_select(self, text: str) -> duckdb.Statement:
        import duckdb

        try:
            statements = self._connection.extract_statements(text)
        except duckdb.Error as error:
            raise ValueError(_one_line(error)) from None
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
            raise ValueError(f"expected one SELECT, got {kinds}. Runs can be asked, not changed")
        return statements[0]


def _numbered(names: Iterable[str]) -> tuple[str, ...]:
    given = tuple(names)
    taken: dict[str, None] = {}
    for name in given:
        free = (f"{name}_{number}" for number in count(1))
        taken[name if name not in taken else next(new for new in free if new not in taken and new not in given)] = None
    return tuple(taken)


def _one_line(error: Exception) -> str:
    """DuckDB draws an arrow below the place; the words before it name it as well."""
    return " ".join(word for word in str(error).split() if word.strip("^"))


def write_parquet(run_dir: Path, folder: Path) -> tuple[int, Integrity]:
    """Writes every table of a run as a Parquet file of its own, those without rows too.

    Returns:
        The number of tables, and whether the record of the run is whole.

    Raises:
        OSError: A file cannot be written.
    """
    names = ("integrity", *VIEWS)
    connection, runs = _open_tables([run_dir])
    import duckdb

    with connection:
        for name in names:
            path = folder / f"{name}.parquet"
            place = str(path).replace("'", "''")
            try:
                connection.execute(f"COPY (FROM {name}) TO '{place}' (FORMAT parquet, COMPRESSION zstd)")
            except duckdb.IOException as error:
                number = _ERRNO.search(str(error))
                if number is None:
                    raise OSError(errno.EIO, str(error), str(path)) from None
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
            except duckdb.Error as error:
                raise ValueError(f"{path}: {_one_line(error)}") from None
    return len(names), runs[run_dir]


def _open_tables(run_dirs: Sequence[Path]) -> tuple[duckdb.DuckDBPyConnection, dict[Path, Integrity]]:
    """The tables in a database without restrictions yet, and what a check of each run found."""
    try:
        import duckdb
    except ImportError:
        raise ImportError("tables of runs need DuckDB: pip install 'esper-growth[runs]'") from None
    # Without a place to spill, a query that needs more memory than it may use fails instead of filling a disk.
    memory = f"{MEMORY_BYTES + LOG_COPIES * sum(map(log_bytes, run_dirs))}B"
    connection = duckdb.connect(":memory:", config={"temp_directory": "", "memory_limit": memory})
    connection.execute("CREATE TABLE lines (type VARCHAR, line VARCHAR)")
    runs = {run_dir: _load(connection, run_dir) for run_dir in run_dirs}
    _refuse_copies(runs)
    _add_integrity(connection, runs.values())
    connection.execute("CREATE SCHEMA typed")
    for statement in view_statements():
        connection.execute(statement)
    return connection, runs


def _refuse_copies(runs: Mapping[Path, Integrity]) -> None:
    """Tables are joined by the run's id, so two folders with one id would count everything twice, or mix it."""
    folders: dict[str, Path] = {}
    for folder, found in runs.items():
        if found.run is not None and folders.setdefault(found.run, folder) is not folder:
            raise ValueError(
                f"{folders[found.run]} and {folder} both hold run {found.run}, and tables tell runs apart by their id. "
                "Ask one of them alone, or move the copy out of the folder"
            )


def _load(connection: duckdb.DuckDBPyConnection, run_dir: Path) -> Integrity:
    waiting: list[tuple[str, str]] = []

    def keep(event: LoggedEvent, line: bytes) -> None:
        text = with_nonfinite_words(line) if _NONFINITE in line else line
        waiting.append((event.type.value, text.decode()))
        if len(waiting) == CHUNK_LINES:
            _insert(connection, waiting)
            waiting.clear()

    found = check_run(run_dir, keep)
    _insert(connection, waiting)
    return found


def _insert(connection: duckdb.DuckDBPyConnection, rows: Sequence[tuple[str, str]]) -> None:
    import numpy as np

    if rows:
        kinds, lines = zip(*rows, strict=True)
        chunk = {"type": np.array(kinds, dtype=object), "line": np.array(lines, dtype=object)}
        connection.register("chunk", chunk)
        connection.execute("INSERT INTO lines SELECT type, line FROM chunk")
        connection.unregister("chunk")


def _add_integrity(connection: duckdb.DuckDBPyConnection, found: Iterable[Integrity]) -> None:
    types = {name: sql_type(hint) for name, hint in get_type_hints(Integrity).items()} | {"complete": "BOOLEAN"}
    columns = ", ".join(f"{quoted(name)} {kind}" for name, kind in types.items())
    connection.execute(f"CREATE TABLE integrity ({columns})")
    marks = ", ".join("?" for _ in types)
    for entry in found:
        values = [list(v) if isinstance(v := getattr(entry, name), tuple) else v for name in types]
        connection.execute(f"INSERT INTO integrity VALUES ({marks})", values)
