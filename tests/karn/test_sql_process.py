"""Queries in a child: limits that hold whatever the query does, and a child that never outlives its parent."""

from __future__ import annotations

import datetime
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("duckdb", reason="queries need the extra `runs`")

from esper.karn.sql_process import ask_runs
from tests.karn.logs import seal, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, rounds=2)
    seal(folder)
    return folder


def ask(run: Path, text: str, timeout_s: float = 30.0) -> tuple[tuple[object, ...], ...]:
    answer, _ = ask_runs([run], text, limit=10, timeout_s=timeout_s)
    return answer.rows


def test_answers_and_checks_come_back_whole(run: Path) -> None:
    answer, found = ask_runs([run], "select round, run from rounds order by round", limit=1, timeout_s=30.0)
    assert (answer.columns, answer.truncated, answer.rows[0][0]) == (("round", "run"), True, 0)
    assert found[run].has_end
    assert found[run].problems == ()


def test_values_without_a_word_in_json_are_text(run: Path) -> None:
    row = ask(
        run, "select 1.5::decimal(4,2), date '2026-01-02', 'a'::blob, [1, null], {'a': 'nan'::double}, 2::hugeint**70"
    )
    assert row[0][:4] == ("1.50", str(datetime.date(2026, 1, 2)), "b'a'", [1, None])
    assert repr(row[0][4]) == "{'a': nan}"


LONG = "select count(*) from range(1000000000000) a, range(1000000) b"
ONE_LONG_CALL = "select levenshtein(repeat('x', 200000), repeat('y', 200000))"


@pytest.mark.parametrize("text", [LONG, ONE_LONG_CALL])
def test_the_time_limit_ends_any_query(text: str, run: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"took longer than 0.3 s and was stopped; raise --timeout"):
        ask(run, text, timeout_s=0.3)
    assert time.monotonic() - begun < 15.0, "the start of a process and no more"


@pytest.mark.parametrize(
    "text",
    ["select repeat('x', 2000000000)", "select list(i)::varchar from range(1000000000) t(i)"],
)
def test_the_memory_limit_ends_any_query(text: str, run: Path) -> None:
    with pytest.raises(ValueError, match="needs more memory than it may use"):
        ask(run, text, timeout_s=120.0)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 3_000_000, "kilobytes"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_parent_leaves_no_child(number: int, run: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "esper.scripts.cli", "query", str(run), ONE_LONG_CALL], stderr=subprocess.PIPE
    )
    child = wait_for_child(parent.pid)
    wait_until_at_work(child)
    parent.send_signal(number)
    _, reported = parent.communicate(timeout=30.0)
    assert reported == (b"esper: stopped\n" if number == signal.SIGINT else b"")
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the query goes on without its parent")


def wait_until_at_work(pid: int) -> None:
    """Until the limit of memory is set, and then for more processor time than reading a small log takes."""
    begun = None
    for _ in range(3_000):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        limits = Path(f"/proc/{pid}/limits").read_text()
        if begun is None and re.search(r"Max data size\s+\d", limits):
            begun = cpu_s
        if begun is not None and cpu_s > begun + 0.7:
            return
        time.sleep(0.05)
    raise AssertionError("the query never came to work")


def wait_for_child(pid: int) -> int:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    for _ in range(300):
        if children := listed.read_text().split():
            return int(children[0])
        time.sleep(0.1)
    raise AssertionError("the command starts no process")
