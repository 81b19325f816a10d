"""The study over held-out tasks: which tasks, what is collected, and a report that follows from the rows alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from esper.evidence import draws
from esper.evidence import plan as plan_module
from esper.evidence.draws import CHOSEN, choose_checkpoint, late_checkpoints
from esper.evidence.learning_checks import check_training
from esper.evidence.manifest import CheckResult
from esper.evidence.many_tasks import COLUMNS, score_runs
from esper.evidence.studies import HeldOutOptions
from esper.evidence.universal import UniversalPlan, chosen_tasks, collect_rows, kept_by_host, report_text, run_universal
from esper.runtime.nursery import heldout_list
from esper.simic.run.session import start_new
from esper.simic.training.config import preset, with_overrides
from esper.simic.training.vectorized import open_session


def test_tasks_are_spread_over_the_list_and_every_kind_keeps_its_share() -> None:
    assert chosen_tasks(500) == list(heldout_list())
    some = chosen_tasks(13)
    assert len({row.task.name for row in some}) == 13
    assert {row.why for row in some} == {row.why for row in heldout_list()}


def made_up() -> pd.DataFrame:
    rows = []
    for task in ("heldout:20", "heldout:21", "heldout:22", "heldout:23"):
        for seed in range(3):
            gains = {"wait_only": 0.0, "largest": 6.0, "ppo_greedy": 8.0, "random": 1.0, "open_loop": 7.0}
            for arm, gain in gains.items():
                policy = "abc" if arm in ("ppo_greedy", "open_loop", "random") else ""
                rows.append(
                    (
                        task,
                        "deeper",
                        arm,
                        policy,
                        seed,
                        50.0 + seed + gain,
                        1.5,
                        0,
                        "cnn.conv cnn.norm" if gain > 5 else "",
                    )
                )
            for episodes, gain in ((4, 2.0), (16, 7.0), (64, 9.0)):
                rows.append((task, "deeper", "search_random", "", seed, 50.0 + seed + gain, 1.5, episodes, ""))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def test_the_report_follows_from_the_rows() -> None:
    text = report_text(made_up())
    assert text == report_text(made_up().sample(frac=1.0, random_state=1)), "in any order"
    assert "| D1: above every rule on held-out tasks | yes |" in text
    assert "minus largest, the best rule" in text
    assert "| search_random | 64 | 4 | +9.00 | +8.00 |" in text
    assert "32 episodes over 4 tasks" in text
    assert "| heldout:21 |" in text
    assert "D4: above clock_only | not measured" in text


def test_what_was_kept_is_counted_by_kind_of_host() -> None:
    table = kept_by_host(score_runs(made_up()), "ppo_greedy")
    assert table.loc["mixed"].to_dict() == {"cnn.conv": 1.0, "cnn.norm": 1.0}
    assert kept_by_host(score_runs(made_up()), "wait_only").to_numpy().sum() == 0.0


def test_nothing_played_is_said(tmp_path: Path) -> None:
    assert collect_rows(tmp_path).empty
    with pytest.raises(ValueError, match="there are no runs yet"):
        report_text(collect_rows(tmp_path))


def trained(folder: Path, name: str, **changes: object) -> str:
    """A policy after one small round over the nursery."""
    small = {"envs": 4, "groups": 2, "rounds": 1, "minibatches": 2, "width": 16, "level": "off"}
    config = with_overrides(preset("nursery"), {**small, "backend": "auto", "worker_kind": "inline", **changes})
    with open_session(start_new(config, folder, name)) as session:
        session.run()
    return str(folder / name)


def test_a_late_checkpoint_may_be_chosen(tmp_path: Path) -> None:
    for number in range(1, 17):
        (tmp_path / "checkpoints" / f"ckpt-{number:08d}").mkdir(parents=True)
    assert [int(path.name[-2:]) for path in late_checkpoints(tmp_path)] == [10, 12, 14, 16]


def test_the_checkpoint_that_gains_most_is_chosen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "VALIDATION_DRAWS", 2)
    run = Path(trained(tmp_path, "run", rounds=2))
    said: list[str] = []
    choose_checkpoint(run, 1, said.append)
    assert [line.split(":")[0] for line in said] == ["run, ckpt-00000001", "run, ckpt-00000002"]
    (run / CHOSEN).write_text('{"ckpt-00000001": 2.5, "ckpt-00000002": -1.0}')
    assert choose_checkpoint(run, 1, said.append) == run / "checkpoints" / "ckpt-00000001"
    assert len(said) == 2, "what is chosen is not judged again"


@pytest.mark.slow
def test_a_small_study_goes_all_the_way_and_is_not_played_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "VALIDATION_DRAWS", 2)
    plan = UniversalPlan(
        folder=tmp_path / "study",
        policies=tuple(trained(tmp_path, f"policy-{seed}", seed=seed) for seed in range(2)),
        clock_only=(trained(tmp_path, "clock_only-0", sees="clock"),),
        options=HeldOutOptions(tasks=2, task_seeds=2, search=(4,), tuning_tasks=1),
        workers=1,
    )
    said: list[str] = []
    read: list[Path] = []

    def check(run: Path) -> list[CheckResult]:
        read.append(run)
        return check_training(run)

    monkeypatch.setattr(plan_module, "check_training", check)
    report = run_universal(plan, said.append)
    assert sorted(path.name for path in read) == ["clock_only-0", "policy-0", "policy-1"], "each log is read once"
    rows = collect_rows(plan.folder)
    policies = rows.groupby("arm").policy_id.nunique()
    assert policies["ppo_greedy"] == policies["open_loop"] == policies["usual"] == 2
    assert set(rows[rows.arm == "usual"].policy_id) == set(rows[rows.arm == "ppo_greedy"].policy_id)
    assert policies["clock_only"] == 1
    assert set(rows[rows.arm == "clock_only"].policy_id).isdisjoint(rows[rows.arm == "ppo_greedy"].policy_id)
    assert set(rows.arm) >= {"wait_only", "largest", "search_random", "search_tpe", "random", "ppo_sampled"}
    runs = rows.groupby(["task", "arm", "policy_id", "run_seed", "episodes"]).size()
    assert runs.max() == 1, "no run is counted twice"
    assert "D4: above clock_only | not measured" not in report
    assert (plan.folder / "universal.png").is_file()
    assert (plan.folder / "report.md").read_text() == report
    before = {place: place.stat().st_mtime_ns for place in plan.folder.rglob("results.csv")}
    assert before
    run_universal(plan, said.append)
    assert {place: place.stat().st_mtime_ns for place in plan.folder.rglob("results.csv")} == before
    with pytest.raises(ValueError, match="policy-0 sees everything; a clock_only policy is trained with --sees clock"):
        run_universal(replace(plan, clock_only=plan.policies), said.append)
