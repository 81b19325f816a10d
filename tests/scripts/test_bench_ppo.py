"""`esper bench ppo` as a user meets it, and the toy it uses."""

import json
from pathlib import Path

import numpy as np
import pytest

from esper.scripts.bench_ppo import CUE, ENVS, run_rival
from esper.scripts.cli import main
from esper.scripts.cue_recall import CueRecall


def test_the_bench_measures_every_env_and_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ppo.json"
    main(["bench", "ppo", "--env-steps", "200", "--rival-steps", "0", "--envs", "2", "--seeds", "1", "--out", str(out)])
    shown = capsys.readouterr().out
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
