"""A run that the real trainer wrote, stopped and resumed, read in every way: the figures must agree with each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("duckdb", reason="queries need the extra `runs`")

from esper.karn.diagnosis import diagnose
from esper.karn.history import read_history
from esper.karn.integrity import check_run
from esper.karn.process import read_heartbeat
from esper.karn.replay import replay
from esper.karn.sql import RunDatabase
from esper.scripts.cli import main
from tests.karn.logs import read_view

ROUNDS, ENVS, EPOCHS = 3, 2, 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    smoke = ["--preset", "smoke", "--task", "digits_mlp", "--workers", "1", "--rounds", "2"]
    main(["train", "ppo", *smoke, "--runs", str(folder), "--run-id", "real"])
    main(["train", "--resume", str(folder / "real"), "--rounds", str(ROUNDS)])
    return folder / "real"


@pytest.fixture(scope="module")
def database(run: Path) -> Iterator[RunDatabase]:
    with RunDatabase([run]) as opened:
        yield opened


def one(database: RunDatabase, text: str) -> tuple[object, ...]:
    (row,) = database.ask(text, limit=2).rows
    return row


def test_the_record_is_whole(run: Path) -> None:
    found = check_run(run)
    assert found.problems == ()
    assert found.num_malformed == 0


def test_the_verdict_is_completion(run: Path) -> None:
    view = read_view(replay(run))
    assert diagnose(view, read_heartbeat(run, 0.0), 0.0)[0].state.value == "completed"
    assert view.attempt == 1
    assert view.num_updates == len(view.returns) == ROUNDS
    assert view.epochs.keys() == set(range(ENVS))


def test_every_step_is_there_once(database: RunDatabase) -> None:
    steps = ROUNDS * ENVS * EPOCHS
    distinct = "count(distinct (env, episode, epoch))"
    assert one(database, f"select count(*), {distinct} from epochs") == (steps, steps)
    assert one(database, f"select count(*), {distinct} from decisions") == (steps, steps)
    assert one(database, "select count(*), max(num_env_steps_total) from rounds") == (ROUNDS, steps)
    assert one(database, "select count(*) from episodes") == (ROUNDS * ENVS,)
    assert one(database, "select count(*) from ppo_updates where performed") == (ROUNDS,)
    assert one(database, "select status, num_envs, epochs_per_episode from runs") == ("completed", ENVS, EPOCHS)


def test_what_was_planted_lives_or_ended(database: RunDatabase) -> None:
    books = "sum(num_germinated - num_fossilized - num_pruned - num_alive), sum(num_germinated)"
    difference, planted = one(database, f"select {books} from episodes")
    assert difference == 0
    assert one(database, "select count(*) from seeds") == (planted,)
    assert one(database, "select count(*) from decisions where op = 'GERMINATE' and ok") == (planted,)
    assert isinstance(planted, int)
    assert planted > 0  # otherwise this run shows nothing; choose another seed


def test_rewards_are_the_sum_of_their_terms(database: RunDatabase) -> None:
    terms = "select run, seq, sum(amount) as total from reward_terms group by run, seq"
    (gap,) = one(
        database, f"select max(abs(d.reward_raw - t.total)) from decisions d join ({terms}) t using (run, seq)"
    )
    assert gap == pytest.approx(0.0, abs=1e-6)
    returns = "select env, episode, sum(reward_raw) as total from decisions group by env, episode"
    (gap,) = one(
        database, f"select max(abs(e.return_raw - r.total)) from episodes e join ({returns}) r using (env, episode)"
    )
    assert gap == pytest.approx(0.0, abs=1e-6)


def test_slots_agree_with_the_moves_of_their_seeds(database: RunDatabase, run: Path) -> None:
    """The stage a slot reports after an epoch is the one its seed last moved to."""
    last = (
        "select seed_id, s.env, s.epoch, stage, "
        "(select to_stage from seed_history h where h.seed_id = s.seed_id and h.seq < s.seq "
        "order by h.seq desc limit 1) as moved_to from slots s where seed_id is not null"
    )
    rows = database.ask(last, limit=1000).rows
    assert rows
    assert [row for row in rows if row[3] != row[4]] == []
    assert len(read_history(replay(run)).seeds) == one(database, "select count(*) from seeds")[0]


def test_a_report_can_be_made_of_it(run: Path) -> None:
    pytest.importorskip("matplotlib", reason="reports need the extra `runs`")
    main(["report", str(run)])
    assert "The record is whole." in (run / "report.html").read_text(encoding="utf-8")
