"""Random damage of logs through every command that reads them: one message, no traceback, no hang, no other file."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("duckdb", reason="queries need the extra `runs`")
pytest.importorskip("matplotlib", reason="reports need the extra `runs`")

from esper.scripts.cli import main
from tests.karn.logs import every_type, seal, write_round

NUM_CASES = int(os.environ.get("ESPER_DAMAGED_LOGS", "500"))
MAX_S = 300
Lines = list[bytes]


def flip_bits(lines: Lines, rng: random.Random) -> Lines:
    content = bytearray(b"".join(lines))
    for _ in range(rng.randint(1, 30)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return [bytes(content)]


def truncate(lines: Lines, rng: random.Random) -> Lines:
    content = b"".join(lines)
    return [content[: rng.randrange(len(content))]]


def duplicate(lines: Lines, rng: random.Random) -> Lines:
    return rng.choices(lines, k=len(lines) + 5)


def reorder(lines: Lines, rng: random.Random) -> Lines:
    return rng.sample(lines, len(lines))


def change_numbers(word: Callable[[random.Random], bytes]) -> Callable[[Lines, random.Random], Lines]:
    """Puts words where numbers are, so that most lines stay JSON."""

    def change(lines: Lines, rng: random.Random) -> Lines:
        changed = list(lines)
        for place in rng.sample(range(len(lines)), 8):
            parts = changed[place].split(b": ")
            numbers = [i for i in range(1, len(parts)) if parts[i][:1].isdigit()]
            i = rng.choice(numbers)
            rest = parts[i].lstrip(b"0123456789.e+-")
            parts[i] = word(rng) + rest
            changed[place] = b": ".join(parts)
        return changed

    return change


def bad_text(lines: Lines, rng: random.Random) -> Lines:
    words = (b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"\xc3", b"\x1b[2J", b"<script>")
    changed = list(lines)
    for place in rng.sample(range(len(lines)), 8):
        at = rng.choice([i for i, byte in enumerate(changed[place]) if byte == ord('"')])
        changed[place] = changed[place][: at + 1] + rng.choice(words) + changed[place][at + 1 :]
    return changed


HUGE = (2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**25, 10**400)
DAMAGES: tuple[Callable[[Lines, random.Random], Lines], ...] = (
    flip_bits,
    truncate,
    duplicate,
    reorder,
    change_numbers(lambda rng: b"%d" % (rng.choice(HUGE) * rng.choice((1, -1)))),
    change_numbers(lambda rng: b"[" * (depth := rng.choice((3, 500, 4000))) + b"]" * depth),
    change_numbers(
        lambda rng: rng.choice((b"1e308", b"-1e308", b"1e400", b"NaN", b"null", b"5e-324", b"true", b'"a"'))
    ),
    bad_text,
)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    log = every_type(tmp_path_factory.mktemp("sound"))
    write_round(log, 1)
    return log.path.read_bytes().splitlines(keepends=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(NUM_CASES))
def test_no_damage_of_a_log_makes_a_reader_crash_hang_or_write_elsewhere(
    case: int, lines: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(case)
    run, home = tmp_path / "run", tmp_path / "home"
    (run / "events").mkdir(parents=True)
    home.mkdir()
    monkeypatch.chdir(home)
    damaged = DAMAGES[case % len(DAMAGES)](lines, rng)
    if rng.random() < 0.3:
        damaged = rng.choice(DAMAGES)(damaged, rng) if len(damaged) > 8 else damaged
    (run / "events" / "a000-s0.jsonl").write_bytes(b"".join(damaged))
    if rng.random() < 0.5:
        seal(run)
    table = rng.choice(("events", "rounds", "seeds", "gates", "ppo_updates", "epochs", "runs", "integrity", "profile"))
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(MAX_S)
    try:
        for args in (
            ["status", str(run)],
            ["verify", str(run)],
            ["query", str(run), f"from {table}", "--format", rng.choice(("table", "csv", "json"))],
            ["report", str(run)],
            ["export", str(run), "parquet"],
        ):
            try:
                main(args)
            except SystemExit as stopped:
                assert stopped.code in (1, 2), args  # noqa: PT017
            reported = capsys.readouterr()
            assert "Traceback" not in reported.err
    finally:
        signal.alarm(0)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "home"}
    assert list(home.iterdir()) == []
    assert {path.name for path in run.iterdir()} <= {"events", "report.html", "tables"}


def _hang(*_: object) -> None:
    raise AssertionError(f"a reader took more than {MAX_S} s")
