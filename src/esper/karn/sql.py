"""Runs as tables of an in-memory database that can be asked and not changed, or written as Parquet.

The log is read by the same code as everywhere else, so torn lines, damage and attempts are settled before SQL sees
anything. Asking cannot write or read elsewhere, for three reasons of which none relies on another: only a single
statement that the parser calls a SELECT is run, access to files is switched off, and the settings are locked.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from esper.karn.codec import with_nonfinite_words
from esper.karn.columns import quoted, sql_type
from esper.karn.integrity import Integrity, check_run
from esper.karn.sql_views import VIEWS, view_statements
from esper.leyline import LoggedEvent, record

if TYPE_CHECKING:
    import duckdb

CHUNK_LINES = 20_000
_NONFINITE = b'"nonfinite"'
_INTEGRITY = get_type_hints(Integrity)


@record
class Answer:
    """The rows of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool
    """True if there were more rows than were asked for."""


class RunDatabase:
    """The tables of one or more runs, to be asked. Close it, or use it as a context manager."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self._connection = _open_tables(run_dirs)
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    def ask(self, text: str, *, limit: int, timeout_s: float) -> Answer:
        """Runs one SELECT.

        Raises:
            ValueError: It is no single SELECT, it is wrong, or it took too long.
        """
        import duckdb

        statement = self._only_select(text)
        timer = threading.Timer(timeout_s, self._connection.interrupt)
        timer.start()
        try:
            cursor = self._connection.execute(statement)
            rows = cursor.fetchmany(limit + 1)
            columns = tuple(column[0] for column in cursor.description or ())
        except duckdb.InterruptException:
            raise ValueError(f"the query took longer than {timeout_s:g} s and was stopped; raise --timeout") from None
        except duckdb.Error as error:
            raise ValueError(str(error)) from None
        finally:
            timer.cancel()
        return Answer(columns=columns, rows=tuple(rows[:limit]), truncated=len(rows) > limit)

    def close(self) -> None:
        """Frees the tables."""
        self._connection.close()

    def __enter__(self) -> RunDatabase:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _only_select(self, text: str) -> duckdb.Statement:
        import duckdb

        try:
            statements = self._connection.extract_statements(text)
        except duckdb.Error as error:
            raise ValueError(str(error)) from None
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
            raise ValueError(f"expected one SELECT, got {kinds}. Runs can be asked, not changed")
        return statements[0]


def write_parquet(run_dirs: Sequence[Path], folder: Path) -> tuple[Path, ...]:
    """Writes every table of one or more runs that has rows as a Parquet file of its own; returns the files."""
    written = []
    with _open_tables(run_dirs) as connection:
        for name in ("integrity", *VIEWS):
            if connection.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() is not None:
                path = folder / f"{name}.parquet"
                place = str(path).replace("'", "''")
                connection.execute(f"COPY (FROM {name}) TO '{place}' (FORMAT parquet, COMPRESSION zstd)")
                written.append(path)
    return tuple(written)


def _open_tables(run_dirs: Sequence[Path]) -> duckdb.DuckDBPyConnection:
    """The tables in a database that is still open to everything."""
    connection = _connect()
    connection.execute("CREATE TABLE lines (type VARCHAR, line VARCHAR)")
    _add_integrity(connection, [_load(connection, run_dir) for run_dir in run_dirs])
    connection.execute("CREATE SCHEMA typed")
    for statement in view_statements():
        connection.execute(statement)
    return connection


def _connect() -> duckdb.DuckDBPyConnection:
    try:
        import duckdb
    except ImportError:
        raise ImportError("tables of runs need DuckDB: pip install 'esper[runs]'") from None
    # Without a place to spill, a query that needs more memory than there is fails instead of filling a disk.
    return duckdb.connect(":memory:", config={"temp_directory": ""})


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


def _add_integrity(connection: duckdb.DuckDBPyConnection, found: Sequence[Integrity]) -> None:
    types = {name: sql_type(hint) for name, hint in _INTEGRITY.items()} | {"complete": "BOOLEAN"}
    columns = ", ".join(f"{quoted(name)} {kind}" for name, kind in types.items())
    connection.execute(f"CREATE TABLE integrity ({columns})")
    marks = ", ".join("?" for _ in types)
    for entry in found:
        values = [list(v) if isinstance(v := getattr(entry, name), tuple) else v for name in types]
        connection.execute(f"INSERT INTO integrity VALUES ({marks})", values)
