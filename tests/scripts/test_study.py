"""`esper study`: the whole way from nothing to a table, and on again after a stop."""

import csv
import json
from dataclasses import replace

import pytest

from esper.evidence import studies
from esper.evidence.arms import FRONTIER, EvaluationRequest
from esper.karn.integrity import check_run
from esper.leyline.rundir import CHECKPOINTS_DIR, LOCK_FILE
from esper.scripts import study
from esper.scripts.cli import main
from esper.simic.run.run_dir import create_run
from esper.tolaria.kinds import Workers
from tests.integration.losses import lose_one
from tests.nissa.events import log_path

TINY = studies.Study(
    description="for tests", preset="smoke", policies=1, seeds=2, tune_episodes=0, changes={"task": "digits_mlp"}
)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setitem(studies.STUDIES, "tiny", TINY)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "studies"


def test_a_study_trains_judges_and_goes_on(tiny, capsys):
    main(["study", "tiny", "--out", str(tiny), "--workers", "1"])
    shown = capsys.readouterr().out
    assert "ppo round 2/2" in shown
    assert "ppo_greedy" in shown
    folder = tiny / "tiny"
    assert (folder / "policy-0" / CHECKPOINTS_DIR / "ckpt-00000002").is_dir()
    summary = json.loads((folder / "evaluation" / "summary.json").read_text())
    assert summary
    before = (folder / "evaluation" / "results.csv").read_bytes()

    main(["study", "tiny", "--out", str(tiny), "--workers", "1"])
    assert "ppo round" not in capsys.readouterr().out, "a finished training is not repeated"
    assert (folder / "evaluation" / "results.csv").read_bytes() == before, "nor a finished run"


@pytest.mark.parametrize("budget", [None, 2_000])
def test_plain_networks_are_tuned_where_there_is_a_size(budget, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(study, "evaluate_command", lambda request, **more: asked.append(request.arms))
    request = EvaluationRequest(task="digits_mlp", budget=budget, out=tmp_path)
    study._judge(replace(TINY, tune_episodes=4), request, Workers(count=1))
    assert [FRONTIER in arms for arms in asked] == [budget is not None, False]


SIZES = studies.Study(
    description="for tests",
    task="digits_limited",
    epochs=8,
    budgets=(800, 1_700),
    arms=("schedule", "search_random", "static_final", "static_frontier"),
    subject="search_random",
    policies=0,
    seeds=2,
    tune_episodes=4,
    search_episodes=4,
)


def test_a_study_of_sizes_compares_with_plain_networks_and_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(studies.STUDIES, "sizes", SIZES)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    command = ["study", "sizes", "--out", str(tmp_path / "out"), "--workers", "1"]
    main(command)
    folder = tmp_path / "out" / "sizes"
    with (folder / "frontier.csv").open() as file:
        points = list(csv.DictReader(file))
    assert {(row["budget"], row["what"]) for row in points} >= {
        (budget, what) for budget in ("800", "1700") for what in ("plain network", "best search", "best rule")
    }
    assert all(float(row["params"]) <= int(row["budget"]) and float(row["training_macs"]) > 0 for row in points)
    assert "| 800 | plain network | static_800 |" in (folder / "frontier.md").read_text()
    report = (folder / "at_800" / "report.md").read_text()
    assert "training GMACs" in report
    assert "arm - static_800 (points)" in report
    done = {path: path.read_bytes() for path in folder.glob("*/results.csv")}
    assert len(done) == 2
    capsys.readouterr()
    main(command)
    assert {path: path.read_bytes() for path in folder.glob("*/results.csv")} == done
    assert "opened twice" not in capsys.readouterr().out


def test_a_training_without_a_checkpoint_starts_again(tiny, capsys):
    (tiny / "tiny" / "policy-0" / CHECKPOINTS_DIR).mkdir(parents=True)
    main(["study", "tiny", "--out", str(tiny), "--workers", "1"])
    assert "ppo round 1/2" in capsys.readouterr().out


def test_a_training_that_another_process_has_just_begun_is_not_removed(tiny, judged, capsys):
    run = create_run(tiny / "tiny", "policy-0")
    with run.lock():
        assert start(tiny) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert (run.path / LOCK_FILE).is_file()
    assert judged == []
    assert start(tiny) == 0


def test_a_training_whose_checkpoints_were_all_refused_is_not_removed(tiny, judged, capsys):
    run = create_run(tiny / "tiny", "policy-0")
    (run.checkpoints / "ckpt-00000001").symlink_to(run.path)
    assert start(tiny) == 4
    assert "none of 1 checkpoints is valid" in capsys.readouterr().err
    assert run.path.is_dir()


@pytest.fixture
def judged(monkeypatch):
    """The policies that evaluations were asked for, which are not made."""
    asked = []
    monkeypatch.setattr(study, "evaluate_command", lambda request, **rest: asked.append(request.policy))
    return asked


def start(tiny):
    """The exit code; 0 if there is none."""
    try:
        main(["study", "tiny", "--out", str(tiny), "--workers", "1"])
    except SystemExit as stop:
        return stop.code
    return 0


def test_a_loss_in_the_last_round_is_made_up_for_before_anything_is_judged(tiny, judged, monkeypatch, capsys):
    lose_one(monkeypatch, round_idx=1)
    assert start(tiny) == 3
    assert judged == []
    capsys.readouterr()
    assert start(tiny) == 0
    assert "ppo round 2/2" in capsys.readouterr().out
    run = tiny / "tiny" / "policy-0"
    assert judged == [(str(run),)]
    found = check_run(run)
    assert (found.problems, found.num_missing_seq) == ((), 0)


def test_a_finished_training_that_lost_events_for_good_is_not_judged(tiny, judged, monkeypatch, capsys):
    lose_one(monkeypatch, round_idx=1)
    folder = tiny / "tiny"
    train = ["train", "--preset", "smoke", "--task", "digits_mlp", "--workers", "1", "--runs", str(folder)]
    with pytest.raises(SystemExit) as caught:
        main([*train, "--run-id", "policy-0"])
    assert caught.value.code == 3
    for _ in range(2):
        assert start(tiny) == 3
        reported = capsys.readouterr().err
        assert f"the event log of {folder / 'policy-0'} is not whole: 1 events are lost" in reported
    assert judged == []


def test_a_training_that_was_killed_before_its_last_word_gets_it(tiny, judged):
    assert start(tiny) == 0
    log = log_path(tiny / "tiny" / "policy-0")
    *others, last = log.read_bytes().splitlines(keepends=True)
    assert b"RUN_ENDED" in last
    log.write_bytes(b"".join(others))
    log.with_name(f"{log.name}.sha256").unlink()  # a kill leaves no checksum
    assert start(tiny) == 0
    assert check_run(tiny / "tiny" / "policy-0").problems == ()
    assert len(judged) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "unknown study 'nothing'. Known: demo"),
        (["demo", "--policies", "0"], "--policies must be at least 1"),
    ],
)
def test_mistakes(arguments, words, capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        main(["study", *arguments, "--out", str(tmp_path)])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
