"""Runs as tables: every payload field has a column, values arrive, attempts count once, and nothing can be changed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

pytest.importorskip("duckdb", reason="queries need the extra `runs`")

from esper.karn.sql import Answer, RunDatabase
from esper.karn.sql_views import MIN_EPISODES, VIEWS, sql_type, without_none
from esper.leyline import EVENTS, PPOUpdateMetrics, Severity, TelemetryEventType
from tests.karn.logs import (
    PAYLOADS,
    LogWriter,
    T,
    ended,
    episode_completed,
    epoch_completed,
    every_type,
    gate_evaluated,
    germinated,
    ids_of,
    seed_ended,
    started,
    write_round,
    write_run,
)

STAMP = ("run", "group", "seq", "wall")


def ask(database: RunDatabase, text: str) -> Answer:
    return database.ask(text, limit=10_000)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDatabase]:
    folder = tmp_path_factory.mktemp("everything")
    every_type(folder)
    with RunDatabase([folder]) as database:
        yield database


@pytest.mark.parametrize("view", [*VIEWS])
def test_every_view_shows_what_one_event_of_each_type_says(view: str, everything: RunDatabase) -> None:
    answer = ask(everything, f"select * from {view}")
    assert answer.columns[:4] == STAMP
    assert len(answer.rows) >= 1
    assert len(set(answer.columns)) == len(answer.columns)


# Which view holds the fields of a payload; a nested record or mapping adds its own name or has a view of its own.
HOMES: dict[TelemetryEventType, tuple[str, ...]] = {
    T.RUN_STARTED: ("runs",),
    T.RUN_ENDED: ("runs",),
    T.ROUND_COMPLETED: ("rounds",),
    T.EPISODE_COMPLETED: ("episodes", "episode_slots"),
    T.EPOCH_COMPLETED: ("epochs", "slots"),
    T.ACTION_TAKEN: ("decisions", "decision_heads"),
    T.SEED_GERMINATED: ("seeds", "seed_history"),
    T.SEED_STAGE_CHANGED: ("seed_history",),
    T.GATE_EVALUATED: ("gates",),
    T.SEED_FOSSILIZED: ("seeds", "seed_history"),
    T.SEED_PRUNED: ("seeds", "seed_history"),
    T.COALITION_MEASURED: ("coalitions", "attributions"),
    T.GOVERNOR_STATE_CHANGED: ("safety",),
    T.PPO_UPDATE_COMPLETED: ("ppo_updates", "ppo_heads"),
    T.ANOMALY_DETECTED: ("anomalies",),
    T.REWARD_HACKING_SUSPECTED: ("safety",),
    T.TREND_DETECTED: ("trends",),
    T.PROFILE_MEASURED: ("profile",),
    T.CHOICE_STATS: ("choices",),
    T.CHECKPOINT_RECORDED: ("checkpoints",),
    T.WORKER_STATE_CHANGED: ("workers",),
    T.EVENTS_DROPPED: ("drops",),
}
# Fields that appear under another name or as rows, and those that only `events` holds.
ELSEWHERE: dict[TelemetryEventType, set[str]] = {
    T.EPISODE_COMPLETED: {"slots"},
    T.EPOCH_COMPLETED: {"slots", "debug"},
    T.ACTION_TAKEN: {"heads", "components"},
    T.SEED_GERMINATED: {"cause"},
    T.SEED_STAGE_CHANGED: {"alpha_share", "epochs_in_stage"},
    T.GATE_EVALUATED: {"checks"},
    T.SEED_FOSSILIZED: {"cause"},
    T.SEED_PRUNED: {"cause"},
    T.COALITION_MEASURED: {"rows", "interaction_pp"},
    T.PPO_UPDATE_COMPLETED: {"metrics", "layers"},
    T.ANOMALY_DETECTED: {"debug"},
    T.PROFILE_MEASURED: {"phases", "cuda"},
    T.CHOICE_STATS: {"choices"},
    T.CHECKPOINT_RECORDED: {"round"},
}


@pytest.mark.parametrize("kind", list(TelemetryEventType))
def test_every_field_of_a_payload_is_a_column(kind: TelemetryEventType, everything: RunDatabase) -> None:
    columns = {name for view in HOMES[kind] for name in ask(everything, f"select * from {view}").columns}
    wanted = {field.name for field in fields(EVENTS[kind].payload)} - ELSEWHERE.get(kind, set())
    hints = get_type_hints(EVENTS[kind].payload)
    if kind is T.PPO_UPDATE_COMPLETED:  # columns without the name of the record they are in
        hints = get_type_hints(PPOUpdateMetrics)
        wanted = set(hints) - {"heads"}
    for name in wanted:
        if sql_type(hints[name]).startswith("STRUCT"):
            parts = {f"{name}_{part}" for part in get_type_hints(without_none(hints[name]))}
            assert parts <= columns, f"{kind.value}.{name}"
        else:
            assert name in columns, f"{kind.value}.{name}"


def test_events_holds_every_type_with_its_whole_payload(everything: RunDatabase) -> None:
    answer = ask(everything, "select type, data from events")
    assert [row[0] for row in answer.rows] == [kind.value for kind in TelemetryEventType]
    assert ask(
        everything, "select data->>'$.phases.train.wall_ms' from events where type = 'PROFILE_MEASURED'"
    ).rows == (("2000.0",),)


def test_values_arrive_as_they_were_measured(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    where = {"round": 3, "episode": 5, "env": 1, "epoch": 2}
    measured = epoch_completed(val_loss=math.nan, train_loss=None, lr=math.inf, val_accuracy_pct=12.5)
    log.emit(T.EPOCH_COMPLETED, measured, **where)
    text = "select round, episode, env, epoch, train_loss, val_accuracy_pct, lr, val_loss from epochs"
    with RunDatabase([tmp_path]) as database:
        *row, loss = ask(database, text).rows[0]
        assert row == [3, 5, 1, 2, None, 12.5, math.inf]
        assert math.isnan(loss)
        slots = ask(database, "select slot_id, stage, contribution_pp, blueprint from slots").rows
    assert slots == (("r0c0", "TRAINING", 0.5, "mlp.lora"), ("r0c1", "TRAINING", None, "mlp.lora"))


def test_lists_and_mappings_become_rows_in_their_order(everything: RunDatabase) -> None:
    assert ask(everything, "select mask, accuracy_pct from coalitions").rows == (("00", 78.0), ("10", 80.0))
    assert ask(everything, "select term, amount from reward_terms").rows == (("gain", 0.75), ("rent", -0.25))
    heads = ask(everything, "select head, choice, num_legal from decision_heads").rows
    assert heads == (("op", "GERMINATE", 2), ("slot", "r0c0", 2))
    assert ask(everything, "select choice, num_chosen from choices").rows == (("WAIT", 4), ("GERMINATE", 2))
    assert ask(everything, "select phase, cpu_ms from profile").rows == (("train", 1900.0), ("other", None))
    assert ask(everything, "select name, value, passed from gates").rows == (
        ("epochs", 1.0, False),
        ("gradient", None, False),
    )


def test_a_gate_that_has_opened_is_a_row_without_checks(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.GATE_EVALUATED, gate_evaluated(passed=True, checks=()), round=0, episode=0, env=0, epoch=4)
    with RunDatabase([tmp_path]) as database:
        assert ask(database, "select gate_passed, name, value from gates").rows == ((True, None, None),)


def test_seeds_meet_their_fates(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    for number, fate in enumerate((T.SEED_FOSSILIZED, T.SEED_PRUNED, None)):
        where = {"round": 0, "episode": 0, "env": number}
        log.emit(T.SEED_GERMINATED, germinated(seed_id=f"{number}.0.r0c0.0"), epoch=1, **where)
        if fate is not None:
            log.emit(fate, seed_ended(seed_id=f"{number}.0.r0c0.0", contribution_pp=number + 0.5), epoch=4, **where)
    with RunDatabase([tmp_path]) as database:
        seeds = ask(database, "select env, fate, born_epoch, end_epoch, contribution_pp from seeds").rows
        yields = ask(database, 'select * exclude (run, "group", seq, wall) from blueprint_yield').rows
        history = ask(database, "select env, from_stage, to_stage from seed_history").rows
    assert seeds == ((0, "fossilized", 1, 4, 0.5), (1, "pruned", 1, 4, 1.5), (2, "alive", 1, None, None))
    assert yields == (("mlp.lora", 3, 1, 1, 0.5),)
    assert history == (
        (0, "DORMANT", "GERMINATED"),
        (0, "HOLDING", "FOSSILIZED"),
        (1, "DORMANT", "GERMINATED"),
        (1, "HOLDING", "PRUNED"),
        (2, "DORMANT", "GERMINATED"),
    )


@pytest.mark.parametrize("num", [MIN_EPISODES - 1, MIN_EPISODES])
def test_a_correlation_needs_enough_episodes(num: int, tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    for n in range(num):
        done = episode_completed(return_raw=float(n), final_accuracy_pct=50.0 - 2 * n)
        log.emit(T.EPISODE_COMPLETED, done, round=n, episode=n, env=0, epoch=2)
    log.emit(T.EPISODE_COMPLETED, episode_completed(final_accuracy_pct=None), round=9, episode=99, env=0, epoch=2)
    with RunDatabase([tmp_path]) as database:
        answer = ask(database, "select num_episodes, pearson_r from reward_calibration").rows
    assert answer == ((num, None if num < MIN_EPISODES else pytest.approx(-1.0)),)


def test_rounds_that_were_repeated_after_a_crash_appear_once(tmp_path: Path) -> None:
    first = LogWriter(tmp_path)
    first.emit(T.RUN_STARTED, started())
    write_round(first, 0)
    resume_at = first.seq
    write_round(first, 1)
    first.emit(T.RUN_ENDED, ended(status="failed"))
    second = LogWriter(tmp_path, attempt=1, first_seq=resume_at)
    second.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000001"))
    write_round(second, 1)
    second.write(b"not an event\n")
    with RunDatabase([tmp_path]) as database:
        assert ask(database, "select round from rounds").rows == ((0,), (1,))
        assert ask(database, "select attempt, status, resumed_from from runs").rows == ((1, None, "ckpt-00000001"),)
        assert ask(database, "select num_malformed, has_end, complete from integrity").rows == ((1, False, False),)
        (problems,) = ask(database, "select problems from integrity").rows[0]
        assert any(f"{second.path.name} at byte" in problem for problem in problems)


def test_a_run_that_goes_on_after_its_end_has_no_status_yet(tmp_path: Path) -> None:
    first = LogWriter(tmp_path)
    first.emit(T.RUN_STARTED, started())
    first.emit(T.RUN_ENDED, ended(status="interrupted"))
    second = LogWriter(tmp_path, attempt=1, first_seq=first.seq)
    second.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000001"))
    with RunDatabase([tmp_path]) as database:
        assert ask(database, "select attempt, status from runs").rows == ((1, None),)


def test_several_runs_stay_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", rounds=2, run="20260101-000000-aaaaaa")
    write_run(tmp_path / "b", rounds=3, run="20260101-000000-bbbbbb")
    with RunDatabase([tmp_path / "a", tmp_path / "b"]) as database:
        text = "select run, count(*), max(num_ops['GERMINATE']) from rounds group by run order by run"
        assert ask(database, text).rows == (("20260101-000000-aaaaaa", 2, 1), ("20260101-000000-bbbbbb", 3, 1))
        assert [row[0] for row in ask(database, "select run from runs").rows] == [
            "20260101-000000-aaaaaa",
            "20260101-000000-bbbbbb",
        ]
        assert ask(database, "select num_fossilized from blueprint_yield order by run").rows == ((4,), (6,))


@pytest.mark.parametrize(
    ("view", "kind"),
    [
        ("anomalies", T.ANOMALY_DETECTED),
        ("safety", T.GOVERNOR_STATE_CHANGED),
        ("safety", T.REWARD_HACKING_SUSPECTED),
        ("trends", T.TREND_DETECTED),
        ("ppo_updates", T.PPO_UPDATE_COMPLETED),
        ("workers", T.WORKER_STATE_CHANGED),
        ("checkpoints", T.CHECKPOINT_RECORDED),
        ("drops", T.EVENTS_DROPPED),
    ],
)
def test_what_can_be_urgent_tells_how_urgent_it_is(view: str, kind: TelemetryEventType, tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    for severity in (Severity.WARNING, Severity.CRITICAL):
        log.emit(kind, PAYLOADS[kind](), severity, **ids_of(kind))
    with RunDatabase([tmp_path]) as database:
        assert ask(database, f"select severity from {view} order by seq").rows == (("warning",), ("critical",))


def test_runs_with_one_id_are_refused_and_runs_without_any_are_not(tmp_path: Path) -> None:
    write_run(tmp_path / "a", rounds=1)
    write_run(tmp_path / "b", rounds=1)
    for name in ("c", "d"):
        (tmp_path / name / "events").mkdir(parents=True)
    with RunDatabase([tmp_path / "a", tmp_path / "c", tmp_path / "d"]) as database:
        assert ask(database, "select count(*) from runs").rows == ((1,),)
    with pytest.raises(ValueError, match=r"a and .*b both hold run"):
        RunDatabase([tmp_path / "a", tmp_path / "b"])


def test_a_query_that_needs_too_much_memory_is_stopped(everything: RunDatabase) -> None:
    with pytest.raises(ValueError, match="needs more memory than it may use"):
        everything.ask("select length(list(i)::varchar) from range(1000000000) t(i)", limit=1)
    assert ask(everything, "select 1").rows == ((1,),)


def test_the_memory_of_a_query_is_bounded(everything: RunDatabase) -> None:
    (reported,) = ask(everything, "select current_setting('memory_limit')").rows[0]
    assert reported in ("953.7 MiB", "953.8 MiB")  # a thousand million bytes, and a little for the log


FORBIDDEN = [
    "copy rounds to 'stolen.csv'",
    "copy (select 1) to '{folder}/stolen.csv'",
    "create table mine as select 1",
    "insert into lines values ('a', 'b')",
    "delete from lines",
    "update lines set type = 'x'",
    "drop view rounds",
    "attach '{folder}/mine.db'",
    "attach ':memory:' as mine",
    "set threads = 1",
    "pragma threads = 1",
    "install httpfs",
    "load json",
    "export database '{folder}/out'",
    "call pragma_version()",
    "select 1; copy (select 1) to '{folder}/stolen.csv'",
    "",
]


@pytest.mark.parametrize("text", FORBIDDEN)
def test_statements_that_are_not_one_select_are_refused(text: str, everything: RunDatabase, tmp_path: Path) -> None:
    before = ask(everything, "select count(*) from lines")
    with pytest.raises(ValueError, match="expected one SELECT"):
        ask(everything, text.format(folder=tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert ask(everything, "select count(*) from lines") == before


@pytest.mark.parametrize(
    "change",
    [
        "delete from lines returning type",
        "insert into lines values ('a', 'b') returning type",
        "update lines set type = 'x' returning type",
    ],
)
def test_a_select_cannot_change_tables_from_within(change: str, everything: RunDatabase) -> None:
    before = ask(everything, "select type, line from lines order by line")
    with pytest.raises(ValueError, match="can be asked, not changed"):
        ask(everything, f"with x as ({change}) select * from x")
    assert ask(everything, "select type, line from lines order by line") == before


def test_times_with_a_time_zone_are_refused_with_the_way_to_write_them(
    everything: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pytz", None)  # as where it is not installed
    with pytest.raises(ValueError, match=r"^a time with a time zone .* to_timestamp\(wall\)::timestamp"):
        ask(everything, "select to_timestamp(wall) from runs")
    assert len(ask(everything, "select to_timestamp(wall)::timestamp from runs").rows) == 1


@pytest.mark.parametrize(
    "text",
    [
        "select * from read_text('{file}')",
        "select * from read_csv('{file}')",
        "select * from read_json('{file}')",
        "select * from '{file}'",
        "select * from glob('{folder}/*')",
        "select * from query('select * from read_text(''{file}'')')",
    ],
)
def test_a_select_cannot_read_files(text: str, everything: RunDatabase, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="disabled by configuration"):
        ask(everything, text.format(file=secret, folder=tmp_path))


@pytest.mark.parametrize("text", FORBIDDEN[:1] + FORBIDDEN[7:8] + ["set enable_external_access = true"])
def test_files_and_settings_are_closed_even_without_the_check_of_statements(
    text: str, everything: RunDatabase, tmp_path: Path
) -> None:
    import duckdb

    with pytest.raises(duckdb.Error, match=r"disabled by configuration|has been locked"):
        everything._connection.execute(text.format(folder=tmp_path))


def test_words_that_help_to_find_the_way_are_selects(everything: RunDatabase) -> None:
    names = {row[0] for row in ask(everything, "show tables").rows}
    assert names >= {*VIEWS, "integrity"}
    assert [row[0] for row in ask(everything, "describe rounds").rows][:4] == list(STAMP)


def test_rows_beyond_the_limit_are_cut_and_reported(everything: RunDatabase) -> None:
    answer = everything.ask("select * from range(5)", limit=3)
    assert (len(answer.rows), answer.truncated) == (3, True)
    answer = everything.ask("select * from range(3)", limit=3)
    assert (len(answer.rows), answer.truncated) == (3, False)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("select 1 a, 2 a", ("a", "a_1")),
        ("select 1 a, 2 a, 3 a_1, 4 a", ("a", "a_2", "a_1", "a_3")),
        ("select 1 A, 2 a", ("A", "a")),
    ],
)
def test_columns_of_one_name_are_numbered(text: str, columns: tuple[str, ...], everything: RunDatabase) -> None:
    assert ask(everything, text).columns == columns


@pytest.mark.parametrize(
    "text", ["select *\nfrom roundz", "select from 1", "select 1 +\n'a'", "select nix from rounds"]
)
def test_a_mistake_is_one_line(text: str, everything: RunDatabase) -> None:
    with pytest.raises(ValueError, match="Error") as caught:
        ask(everything, text)
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith("^")


def test_mistakes_are_reported_by_the_parser(everything: RunDatabase) -> None:
    with pytest.raises(ValueError, match='Did you mean "rounds"'):
        ask(everything, "select * from roundz")
    with pytest.raises(ValueError, match="syntax error"):
        ask(everything, "select from 1")
