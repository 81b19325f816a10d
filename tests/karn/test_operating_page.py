"""The operators' page says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from esper.karn.diagnosis import RunCondition
from esper.karn.sql_views import VIEWS
from esper.leyline.thresholds import RECENT_ROUNDS, WARMUP_UPDATES
from esper.scripts.cli import COMMANDS
from tests.karn.logs import every_type

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
EXAMPLES = [query.strip() for block in re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL) for query in block.split(";\n")]


def test_every_verdict_is_explained_in_the_order_of_the_rules() -> None:
    rows = re.search(r"\| verdict \| when \|\n\|---\|---\|\n(.*?)\n\n", PAGE, re.DOTALL)
    assert rows is not None
    reported = [word.strip() for row in rows[1].splitlines() for word in row.split("|")[1].split(",")]
    assert reported == [state.value for state in RunCondition]


def test_figures_on_the_page_are_those_of_the_table() -> None:
    words = {2: "two", 5: "five"}
    assert f"of the last {words[RECENT_ROUNDS]} rounds" in PAGE
    assert f"fewer than {words[WARMUP_UPDATES]} updates" in PAGE


def test_every_table_is_listed_and_every_listed_table_exists() -> None:
    rows = re.search(r"\| table \| one row per \|\n\|---\|---\|\n(.*?)\n\n", PAGE, re.DOTALL)
    assert rows is not None
    reported = {name for row in rows[1].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert reported == {*VIEWS, "integrity"}


def test_every_command_on_the_page_exists() -> None:
    assert (
        {"status", "report", "query", "export", "verify"}
        <= set(re.findall(r"`esper (\w+)", PAGE))
        <= {*COMMANDS, "bench"}
    )


@pytest.mark.parametrize("query", [query for query in EXAMPLES if query])
def test_every_example_runs(query: str, tmp_path: Path) -> None:
    pytest.importorskip("duckdb", reason="queries need the extra `runs`")
    from esper.karn.sql import RunDatabase

    every_type(tmp_path)
    with RunDatabase([tmp_path]) as database:
        assert database.ask(query, limit=10).columns


def test_there_are_examples() -> None:
    assert len([query for query in EXAMPLES if query]) >= 5
