"""`esper evaluate` as a user meets it, and the promises it makes about the test split."""

import ast
import csv
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import esper
from esper.evidence import plan
from esper.evidence.arms import ARMS
from esper.evidence.evaluation import agent_digest
from esper.evidence.manifest import note_test_access
from esper.evidence.plan import check_unseen
from esper.evidence.results import ResultStore
from esper.evidence.runs import Arena, FinishedRun, Job
from esper.leyline import EpisodeSeed
from esper.leyline.files import sole_user
from esper.runtime.data.splits import Dataset, Split
from esper.runtime.tasks import get_task_spec, load_task_data, override
from esper.scripts.cli import main
from esper.simic.run.run_state import LoadedPolicy
from tests.evidence.made_up import evaluation, untrained

SHORT = ["evaluate", "--task", "digits_limited", "--epochs", "8"]


def columns(folder: Path, *names: str) -> list[tuple[str, ...]]:
    with (folder / "results.csv").open() as file:
        return [tuple(row[name] for name in names) for row in csv.DictReader(file)]


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    main([*SHORT, *args])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*SHORT, *args])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_the_plain_use_compares_all_fixed_controllers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record_of_openings: Path
) -> None:
    out = tmp_path / "results"
    output = shown(capsys, "--seeds", "2", "--out", str(out))
    arms = ["wait_only", "schedule", "largest", "periodic", "plateau", "fragrow", "heuristic"]
    assert columns(out, "arm", "run_seed") == [(arm, seed) for arm in arms for seed in ("20000", "20001")]
    assert all(arm in output for arm in arms)
    assert "opened once on this machine" in output
    assert "INVALID" not in output
    files = {"results.csv", "curves.csv", "topologies.jsonl", "manifest.json", "summary.json", "report.md"}
    assert files < {path.name for path in out.iterdir()}
    (line,) = record_of_openings.read_text().splitlines()
    assert json.loads(line)["run_seeds"] == [20_000, 20_001]


def test_a_second_start_goes_on_and_opens_the_test_split_only_if_it_must(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record_of_openings: Path
) -> None:
    out = tmp_path / "results"
    asked = ("--arms", "schedule", "--out", str(out))
    shown(capsys, *asked, "--seeds", "1")
    first = (out / "results.csv").read_text()
    shown(capsys, *asked, "--seeds", "2")
    assert (out / "results.csv").read_text().startswith(first)
    assert len(columns(out, "arm")) == 4
    assert len(record_of_openings.read_text().splitlines()) == 2
    whole = (out / "results.csv").read_text()
    shown(capsys, *asked, "--seeds", "1")
    assert (out / "results.csv").read_text() == whole
    assert len(record_of_openings.read_text().splitlines()) == 2
    sessions = json.loads((out / "manifest.json").read_text())["sessions"]
    assert [session["opened_test"] for session in sessions] == [True, True, False]
    shown(capsys, "--arms", "periodic", "--seeds", "1", "--out", str(out))
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["arms"] == ["wait_only", "schedule", "periodic"], "what was started stays"
    assert len(manifest["run_seeds"]) == 2


def test_other_conditions_are_not_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "results")
    shown(capsys, "--arms", "schedule", "--seeds", "1", "--out", out)
    for other in (["--blueprint", "mlp.lora"], ["--budget", "9000"], ["--epochs", "9"], ["--subject", "fragrow"]):
        message = refused(capsys, "--arms", "schedule", "--seeds", "1", "--out", out, *other)
        assert "another --out" in message


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for workers in ("1", "2"):
        out = tmp_path / workers
        shown(capsys, "--arms", "random", "static_final", "--seeds", "1", "--workers", workers, "--out", str(out))
        rows = sorted(ResultStore(out).results.values(), key=lambda row: row.key)
        found.append([replace(row, setup="", run_s=0.0, controller_s=0.0, wall_s=0.0) for row in rows])
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_a_report_is_made_again_from_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, again = tmp_path / "results", tmp_path / "again"
    shown(capsys, "--arms", "schedule", "--seeds", "1", "--out", str(out))
    shown(capsys, "--from", str(out / "results.csv"), "--out", str(again))
    for path in again.iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name
    assert (again / "report.md").exists()
    (out / "manifest.json").unlink()
    assert "manifest.json is missing" in refused(capsys, "--from", str(out / "results.csv"))
    assert "wants a results.csv" in refused(capsys, "--from", str(out / "nothing.csv"))


def test_an_interruption_keeps_what_was_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results"
    play = Arena.play

    def interrupted(self: Arena, job: Job, test: Split) -> Iterator[FinishedRun]:
        if job.arm.name == "schedule":
            raise KeyboardInterrupt
        return play(self, job, test)

    monkeypatch.setattr(Arena, "play", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main([*SHORT, "--arms", "schedule", "--seeds", "2", "--out", str(out)])
    assert stopped.value.code == 130
    assert "2 finished runs are in" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    shown(capsys, "--arms", "schedule", "--seeds", "2", "--out", str(out))
    assert len(columns(out, "arm")) == 4
    assert [s["ended"] is None for s in json.loads((out / "manifest.json").read_text())["sessions"]] == [True, False]


def test_a_machine_without_a_record_of_openings_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    main([*SHORT, "--arms", "wait", "--seeds", "1", "--out", str(tmp_path / "results")])
    both = capsys.readouterr()
    assert "not on record" in both.err
    assert "an unknown number of times" in both.out


def test_two_evaluations_do_not_write_to_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    with sole_user(out):
        reported = refused(capsys, "--arms", "wait", "--seeds", "1", "--out", str(out))
        assert f"another process writes to {out}" in reported
        assert list(out.iterdir()) == []
    refused(capsys, "--arms", "moon", "--out", str(out))
    assert not out.exists(), "a request that makes no sense leaves nothing"


def test_half_a_line_in_the_record_of_openings_costs_no_other(record_of_openings: Path) -> None:
    record_of_openings.parent.mkdir(parents=True, exist_ok=True)
    record_of_openings.write_bytes(b'{"test_sha256": "ab", "x": "\xff')
    assert note_test_access({"test_sha256": "cd"}) == 1
    assert note_test_access({"test_sha256": "cd"}) == 2


# ---- the test split


def test_only_evaluations_open_the_test_split() -> None:
    root = Path(esper.__file__).parent
    callers = {
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("open_test", "reread")
    }
    assert callers == {"evidence/evaluation.py", "runtime/data/splits.py"}


def test_tuning_and_preparing_leave_it_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Dataset) -> Split:
        raise AssertionError("the test split was opened")

    monkeypatch.setattr(Dataset, "open_test", refuse)
    output = shown(capsys, "--tune", "--tune-episodes", "4", "--arms", "periodic", "--out", str(tmp_path))
    assert "was not opened" in output
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    assert list(tuned["arms"]) == ["periodic"]
    with pytest.raises(AssertionError, match="was opened"):
        main([*SHORT, "--tuned", str(tmp_path / "tuned.json"), "--out", str(tmp_path / "results")])


def test_tuned_parameters_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {
        "format": 3,
        "task": "digits_limited",
        "horizon": 8,
        "rows": None,
        "budget": None,
        "metric": "committed controller-validation accuracy",
        "arms": {
            "schedule": {
                "chosen": {"blueprint": "mlp.lora", "blend": "linear_fast", "gap": 1},
                "score": 90.0,
                "episodes": 64,
                "training_macs": 1,
            }
        },
    }
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(content))
    out = tmp_path / "results"
    shown(capsys, "--arms", "schedule", "--seeds", "1", "--tuned", str(path), "--out", str(out))
    (grown,) = [t for t in ResultStore(out).topologies.values() if t.arm == "schedule"]
    assert [life.blueprint for life in grown.lives] == ["mlp.lora"]
    assert "episodes (schedule 64)" in (out / "report.md").read_text()


def test_shuffled_labels_leave_every_arm_guessing(tmp_path: Path) -> None:
    task = override(get_task_spec("digits_limited"), horizon=8)
    data = load_task_data(task)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    shuffled = replace(data, train=replace(data.train, targets=data.train.targets[order]))
    seeds = tuple(EpisodeSeed(env_id=n, episode=0, run_seed=n) for n in range(2))
    with Arena(evaluation(task, shuffled, tmp_path, {}), workers=1) as arena:
        for name in ("wait_only", "schedule", "random"):
            for done in arena.play(Job(arm=ARMS[name], policy_id="", seeds=seeds), data.open_test()):
                assert done.result.test_accuracy_pct < 20


# ---- learned arms


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[LoadedPolicy]:
    """Two untrained policies in place of those that --policy names."""
    blueprints = get_task_spec("digits_limited").blueprint_keys
    made = [
        untrained(name, blueprints, run_seed=run_seed, folder=tmp_path, task="digits_limited", episode_length=8)
        for run_seed, name in enumerate(("aaa", "bbb"))
    ]
    monkeypatch.setattr(plan, "load_policies", lambda places: tuple(made[: len(places)]))
    return made


def test_a_policy_is_played_frozen_and_random_matches_its_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policies: list[LoadedPolicy]
) -> None:
    out = tmp_path / "results"
    before = [agent_digest(policy.agent) for policy in policies]
    main(["evaluate", "--task", "digits_limited", "--policy", "one,two", "--arms", "all", "--seeds", "2",
          "--out", str(out)])  # fmt: skip
    assert [agent_digest(policy.agent) for policy in policies] == before
    output = capsys.readouterr().out
    assert "ppo_greedy - arm" in " ".join(output.split())
    assert "C. learning to decide helps: NOT EVIDENCE" in output
    runs = columns(out, "arm", "policy_id")
    for arm in ("ppo_greedy", "ppo_sampled", "random", "static_final"):
        assert [policy_id for name, policy_id in runs if name == arm] == ["aaa", "aaa", "bbb", "bbb"]
    assert [policy_id for name, policy_id in runs if name == "heuristic"] == ["", ""]
    assert {epochs for (epochs,) in columns(out, "host_epochs")} == {"8"}, "as in its training"
    report = (out / "report.md").read_text()
    assert "aaa: learning checks | not checked | no log" in report
    assert "static_wide was left out" in report


def test_a_folder_among_the_arms_is_a_policy(tmp_path: Path, policies: list[LoadedPolicy]) -> None:
    (tmp_path / "run").mkdir()
    assert plan.names_and_places(["wait", str(tmp_path / "run")], ["x,y"]) == (
        ["wait", "ppo_greedy"],
        [Path("x"), Path("y"), tmp_path / "run"],
    )


def test_a_seed_that_trained_a_policy_may_not_judge_it(policies: list[LoadedPolicy]) -> None:
    check_unseen(policies, [20_000, 20_001])
    with pytest.raises(ValueError, match=r"policy bbb has trained on run seeds \[1\]"):
        check_unseen(policies, [1, 20_000])


def test_policies_trained_for_other_lengths_need_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policies: list[LoadedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(policies[1], config=replace(policies[1].config, episode_length=9))
    monkeypatch.setattr(plan, "load_policies", lambda places: (policies[0], other))
    with pytest.raises(SystemExit):
        main(["evaluate", "--task", "digits_limited", "--policy", "one,two", "--out", str(tmp_path / "results")])
    assert "say which with --epochs" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_policy_that_is_nowhere_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*SHORT, "--policy", str(tmp_path / "none"), "--out", str(tmp_path / "results")])
    assert stopped.value.code != 0
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


# ---- controls


def test_controls_are_made_up_for_if_an_interruption_lost_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.evidence.limits.MIN_SEEDS", 2)
    out = tmp_path / "results"
    asked = [*SHORT, "--arms", "static_final", "--seeds", "2", "--out", str(out)]
    found = []
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            main(asked)
        assert stopped.value.code == 2
        assert "A. growing pays: INVALID: static_frontier was not run" in capsys.readouterr().out
        manifest = json.loads((out / "manifest.json").read_text())
        found.append([(check["name"], check["passed"]) for check in manifest["controls"]])
        (out / "manifest.json").write_text(json.dumps({**manifest, "controls": []}))
    assert found == [[("A/A", True)], [("A/A", True)]]
