"""`esper bench ppo` as a user meets it, and the toy it uses."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ppo
from benchmarks.cue_recall import CueRecall
from benchmarks.figures_file import check_out, write_figures
from benchmarks.ppo import CARTPOLE, CUE, ENVS, LearnerRun, missed_limits, run_esper, run_rival
from esper.scripts.cli import main


def test_the_bench_measures_every_env_and_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ppo.json"
    short = ["--env-steps", "200", "--rival-steps", "0", "--envs", "2", "--seeds", "1"]
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "ppo", *short, "--out", str(out)])
    assert stopped.value.code == 1, "nobody solves CartPole in 200 steps"
    shown = capsys.readouterr().out
    assert "Missed: seed 0 reached a return of" in shown
    figures = json.loads(out.read_text())
    assert [(run["env"], run["learner"]) for run in figures["runs"]] == [
        (ENVS[0], "Esper"),
        (ENVS[1], "Esper"),
        (ENVS[1], "Esper without memory"),
    ]
    for run in figures["runs"]:
        assert 200 <= run["env_steps"] < 200 + 2 * 128
        assert run["steps_per_cpu_s"] == pytest.approx(run["env_steps"] / run["cpu_s"])
        assert f"return {run['mean_return']:.2f} after {run['env_steps']:,} steps" in shown
    assert figures["threads"] == 1
    assert figures["episodes"] == 100


def learned(
    mean_return: float = 500.0, steps_per_cpu_s: float = 3_000.0, learner: str = "Esper", env: str = CARTPOLE
) -> LearnerRun:
    return LearnerRun(
        learner=learner,
        env=env,
        run_seed=2,
        num_envs=16,
        env_steps=75_000,
        cpu_s=75_000 / steps_per_cpu_s,
        mean_return=mean_return,
    )


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (learned(), None),
        (learned(mean_return=475.0, steps_per_cpu_s=1_000.0), None),
        (learned(mean_return=474.9), "seed 2 reached a return of 474.9, at least 475 expected"),
        (learned(mean_return=float("nan")), "seed 2 reached a return of nan, at least 475 expected"),
        (learned(steps_per_cpu_s=999.0), "seed 2 learned from 999 steps per CPU s, at least 1,000 expected"),
        (learned(mean_return=1.0, steps_per_cpu_s=10.0, env=CUE), None),
        (learned(mean_return=1.0, steps_per_cpu_s=10.0, learner="sb3-contrib RecurrentPPO"), None),
    ],
)
def test_the_exit_code_tells_whether_cartpole_was_solved_fast_enough(
    run: LearnerRun, words: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert missed_limits([learned(), run]) == ([] if words is None else [words])
    monkeypatch.setattr(ppo, "_all_runs", lambda *settings: iter([learned(), run]))
    if words is None:
        main(["bench", "ppo", "--rival-steps", "0"])
    else:
        with pytest.raises(SystemExit) as stopped:
            main(["bench", "ppo", "--rival-steps", "0"])
        assert stopped.value.code == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert (f"Missed: {words}" in shown) == (words is not None)
    assert "at least 475 by every seed, 1,000 steps per CPU s in every run" in shown


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run_seed", range(3))
def test_cartpole_is_solved_within_300_000_steps(run_seed: int) -> None:
    run = run_esper(CARTPOLE, 75_000, 16, run_seed, memory=True)
    assert run.env_steps <= 300_000
    assert missed_limits([run]) == []


@pytest.mark.parametrize("name", ["ppo", "telemetry", "coalitions", "engine"])
def test_a_file_that_cannot_be_written_is_reported_before_the_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    for out, why in ((tmp_path / "file" / "figures.json", "Not a directory"), (tmp_path, "Is a directory")):
        with pytest.raises(SystemExit) as stopped:
            main(["bench", name, "--out", str(out)])
        assert stopped.value.code == 2
        assert f"--out {out} cannot be written ({why})" in capsys.readouterr().err


def test_the_file_is_only_looked_at_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("kept")
    check_out(tmp_path / "old.json")
    check_out(tmp_path / "new" / "figures.json")
    check_out(None)
    assert (tmp_path / "old.json").read_text() == "kept"
    assert list((tmp_path / "new").iterdir()) == []


def test_figures_replace_the_old_ones_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "old.json").symlink_to(tmp_path / "mine")
    with pytest.raises(TypeError):
        write_figures(tmp_path / "old.json", object())
    write_figures(tmp_path / "old.json", {"a": 1})
    assert (tmp_path / "mine").read_text() == "precious"
    assert json.loads((tmp_path / "old.json").read_text()) == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("flag", ["--env-steps", "--envs", "--seeds"])
def test_impossible_sizes_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "ppo", flag, "0"])
    assert stopped.value.code == 2
    assert f"{flag} must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("learner", ["RecurrentPPO", "MaskablePPO"])
def test_rivals_run_on_the_masked_toy(learner: str) -> None:
    pytest.importorskip("sb3_contrib")
    run = run_rival(learner, CUE, 64, 1, run_seed=0)
    assert run.learner == f"sb3-contrib {learner}"
    assert run.env_steps >= 64
    assert 0.0 <= run.mean_return <= 1.0


def ran(monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[tuple[str, str]]:
    """The runs that the command would do, by learner and env; nobody learns anything."""
    done: list[tuple[str, str]] = []

    def esper(env: str, env_steps: int, num_envs: int, run_seed: int, *, memory: bool) -> LearnerRun:
        done.append(("Esper" if memory else "Esper without memory", env))
        return learned(learner=done[-1][0], env=env)

    def rival(learner: str, env: str, env_steps: int, num_envs: int, run_seed: int) -> LearnerRun:
        done.append((learner, env))
        return learned(learner=learner, env=env)

    monkeypatch.setattr(ppo, "run_esper", esper)
    monkeypatch.setattr(ppo, "run_rival", rival)
    main(["bench", "ppo", "--seeds", "2", *flags])
    return done


def test_rivals_run_in_the_same_command_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {(CARTPOLE, "Esper"), (CUE, "Esper"), (CUE, "Esper without memory")}
    rivals = {(env, learner) for env in ENVS for learner in ("RecurrentPPO", "MaskablePPO")}
    for installed, flags, others in ((True, (), rivals), (True, ("--rival-steps", "0"), set()), (False, (), set())):
        monkeypatch.setattr(ppo, "_have_rivals", lambda installed=installed: installed)
        done = ran(monkeypatch, *flags)
        assert {(env, learner) for learner, env in done} == own | others
        assert len(done) == len(own) + 2 + len(others), "two seeds of Esper's learner with memory, one of the rest"
        reported = "sb3-contrib is not installed" in capsys.readouterr().out
        assert reported is not installed


def play(env: CueRecall, seed: int, *, remembers: bool) -> float:
    """One episode of a player who remembers the cue, or takes the first legal action."""
    obs, _ = env.reset(seed=seed)
    cue, over, reward, steps = int(obs.argmax()), False, 0.0, 0
    while not over:
        legal = env.action_masks()
        assert legal.sum() == 4
        answer_due = obs[-1] == 1.0
        assert answer_due == (steps == 7)
        assert not answer_due or legal[cue], "the right action is always legal when it counts"
        assert steps == 0 or not obs[:-1].any(), "the cue is shown once"
        obs, reward, over, _, _ = env.step(np.int64(cue if remembers else legal.argmax()))
        steps += 1
    return reward


def test_the_toy_is_perfect_for_who_remembers_and_a_guess_for_who_does_not() -> None:
    env = CueRecall()
    assert all(play(env, seed, remembers=True) == 1.0 for seed in range(200))
    # 0.25 expected; 0.1 is more than three deviations of 200 tries away.
    assert abs(np.mean([play(env, seed, remembers=False) for seed in range(200)]) - 0.25) < 0.1
