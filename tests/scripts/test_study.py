"""`esper study`: the whole way from nothing to a table, and on again after a stop."""

import json

import pytest

from esper.leyline.rundir import CHECKPOINTS_DIR
from esper.scripts import study
from esper.scripts.cli import main

TINY = study.Study(
    description="for tests", preset="smoke", policies=1, seeds=2, tune_episodes=0, changes={"task": "digits_mlp"}
)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setitem(study.STUDIES, "tiny", TINY)
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


def test_a_training_without_a_checkpoint_starts_again(tiny, capsys):
    (tiny / "tiny" / "policy-0" / CHECKPOINTS_DIR).mkdir(parents=True)
    main(["study", "tiny", "--out", str(tiny), "--workers", "1"])
    assert "ppo round 1/2" in capsys.readouterr().out


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
