"""The sandboxes: their oracles are the best there is, chance does not pass, and the agent learns in the fastest two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from esper.evidence import sandbox_training
from esper.evidence.sandbox_training import (
    RulePolicy,
    episode_seeds,
    evaluate,
    make_learner,
    oracle_play,
    play_episodes,
    random_play,
    train,
    unseen_seeds,
)
from esper.evidence.sandboxes import ABLATIONS, NUM_ENVS, SANDBOXES, Sandbox, SandboxResult, grow_one
from esper.leyline import ActionExecutionResult, ActionSpec, EpisodeSeed, wait
from esper.scripts import sandbox as command
from esper.scripts.cli import main
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import FrozenPolicy, SimicClient, network_shape
from tests.simic.agent.rounds import learn

BY_NAME = {sandbox.name: sandbox for sandbox in SANDBOXES}


def shortened(name: str, rounds: int) -> Sandbox:
    sandbox = BY_NAME[name]
    config = replace(sandbox.config, schedule_steps=rounds * NUM_ENVS * sandbox.world.horizon)
    return replace(sandbox, rounds=rounds, config=config)


@pytest.mark.parametrize("name", [sandbox.name for sandbox in SANDBOXES if sandbox.higher_is_better])
def test_the_oracle_passes_and_chance_does_not(name: str) -> None:
    sandbox, episodes = BY_NAME[name], unseen_seeds(run_seed=0)
    optimum = sandbox.measure(oracle_play(sandbox, episodes))
    chance = sandbox.measure(random_play(sandbox, episodes))
    assert optimum is not None
    assert chance is not None
    assert sandbox.passes(optimum, optimum)
    assert not sandbox.passes(chance, optimum)


def test_no_other_single_seed_beats_the_oracle_beside_a_decoy() -> None:
    sandbox = BY_NAME["decoy"]
    names, slots = sandbox.world.layout.blueprints, sandbox.world.slot_ids
    rules = [grow_one(name, slot, epoch) for name in names for slot in slots for epoch in range(12)]
    seeds = [EpisodeSeed(env_id=env, episode=0, run_seed=0) for env in range(len(rules))]
    policy = RulePolicy(lambda report, masks: rules[report.env_id](report, masks))
    totals = [episode.total for episode in play_episodes(sandbox.world, policy, sandbox.reward, seeds)]
    optimum = oracle_play(sandbox, seeds[:1]).episodes[0].total
    assert max(totals) == optimum
    assert sorted({round(total, 2) for total in totals})[-2] < optimum


class Waiting(FrozenPolicy):
    """Waits and notes what it sees."""

    def begin(self, state: ActionExecutionResult) -> None:
        super().begin(state)
        self.seen: list[tuple[list[list[float]], list[list[list[float]]]]] = []

    def act(self, state: ActionExecutionResult) -> list[ActionSpec]:
        (group,) = self._observe(state)
        self.seen.append((group.observation.obs_ND.tolist(), group.observation.slot_obs_NSF.tolist()))
        return [wait(report.env_id) for report in state.reports]


def test_when_the_cue_is_needed_nothing_that_is_seen_tells_it_any_more() -> None:
    """Every env has its own cue; the slots open when eight epochs are done."""
    sandbox = BY_NAME["cue"]
    agent = PPOAgent(network_shape(sandbox.world.layout.blueprints), sandbox.config, run_seed=0)
    watcher = Waiting(agent, run_seed=0, greedy=True)
    play_episodes(sandbox.world, watcher, sandbox.reward, unseen_seeds(run_seed=0))
    assert len({tuple(row) for row in watcher.seen[0][0]}) == 3, "the cue is seen at the start"
    for obs, slots in watcher.seen[8:]:
        assert all(row == obs[0] for row in obs)
        assert all(row == slots[0] for row in slots)


@pytest.mark.slow
def test_worlds_run_in_workers_of_any_kind_to_the_same_result() -> None:
    sandbox = replace(shortened("recover", 1), first_rounds=1)
    results = [
        sandbox_training.run_sandbox(sandbox, 0),
        sandbox_training.run_sandbox(sandbox, 0, kind="simulated", workers=3),
        sandbox_training.run_sandbox(sandbox, 0, kind="process", workers=2),
    ]
    here, *elsewhere = (replace(result, cpu_s=0.0) for result in results)
    assert elsewhere == [here, here]


@pytest.mark.slow
def test_where_nothing_helps_the_agent_learns_to_wait() -> None:
    sandbox = shortened("inert", 15)
    played = train(sandbox, run_seed=0)
    assert sandbox.passes(sum(e.total for e in played.episodes) / len(played.episodes), 0.0)
    assert all(episode.num_germinated == 0 for episode in played.episodes)


@pytest.mark.parametrize("bootstrapped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_values_become_the_return_of_a_finite_episode_unless_its_end_is_bootstrapped(bootstrapped: bool) -> None:
    sandbox = shortened("constant", 12)
    agent = PPOAgent(network_shape(sandbox.world.layout.blueprints), sandbox.config, run_seed=0)
    learner = make_learner(sandbox.world, agent, sandbox.reward, run_seed=0)
    for number in range(sandbox.rounds):
        play_episodes(sandbox.world, learner, sandbox.reward, episode_seeds(0, number, NUM_ENVS))
        assert learner.buffer is not None
        if bootstrapped:
            learner.buffer.storage.terminated_TN[-1] = False
            learner.buffer.storage.truncated_TN[-1] = True
            learner.buffer.storage.bootstraps_TN[-1] = learner.buffer.storage.values_TN[-1]
        learn(learner)
    error = evaluate(sandbox, learner).value_error
    assert error is not None
    assert sandbox.passes(error, None) is not bootstrapped


def test_a_world_that_changes_gives_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = replace(shortened("recover", 1), first_rounds=2)
    learners: list[SimicClient] = []
    monkeypatch.setattr(sandbox_training, "evaluate", lambda sandbox, learner, pool: learners.append(learner))
    train(sandbox, run_seed=0)
    steps_of_a_round = NUM_ENVS * sandbox.world.horizon
    assert learners[0].agent.env_steps == 3 * steps_of_a_round
    assert learners[0].scale.count == 3 * steps_of_a_round, "the reward scale is that of the whole life"


def test_the_command_tells_what_was_reached_and_fails_if_that_is_too_little(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SANDBOXES", (shortened("decoy", 1), shortened("cue_blind", 1)))
    main(["sandbox", "--seeds", "1", "--only", "cue_blind"])
    assert "1 of 1" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["sandbox", "--seeds", "1"])
    assert stopped.value.code == 1
    assert "0 of 1" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["sandbox", "--only", "decoi"])
    assert stopped.value.code == 2
    assert "unknown sandbox 'decoi'. Known: decoy, cue_blind" in capsys.readouterr().err


def result(run_seed: int, cpu_s: float = 10.0) -> SandboxResult:
    return SandboxResult(run_seed=run_seed, optimum=1.0, random=0.0, reached=0.75 + run_seed, passed=True, cpu_s=cpu_s)


@pytest.mark.parametrize(
    ("cpu_s", "words", "code"),
    [
        (60.0, "passed, 60 CPU s", 0),
        (61.0, "61, over 60", 0),
        (90.0, "90, over 60", 0),
        (91.0, "91, over the limit", 1),
    ],
)
def test_an_agent_that_takes_long_is_marked_and_one_that_takes_too_long_fails(
    cpu_s: float, words: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sandbox_training, "run_sandbox", lambda sandbox, run_seed, after_round, **where: result(run_seed, cpu_s)
    )
    if code:
        with pytest.raises(SystemExit) as stopped:
            main(["sandbox", "--seeds", "1", "--only", "coin"])
        assert stopped.value.code == code
    else:
        main(["sandbox", "--seeds", "1", "--only", "coin"])
    assert words in capsys.readouterr().out


def test_the_table_shows_the_lowest_and_the_highest_agent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sandbox_training, "run_sandbox", lambda sandbox, run_seed, after_round, **where: result((run_seed + 1) % 3)
    )
    main(["sandbox", "--seeds", "3", "--only", "coin"])
    assert "0.75 to 2.75" in capsys.readouterr().out
    main(["sandbox", "--seeds", "1", "--only", "coin"])
    reported = capsys.readouterr().out
    assert "1.75" in reported
    assert " to " not in reported
    nothing = replace(result(0), reached=None)
    monkeypatch.setattr(sandbox_training, "run_sandbox", lambda sandbox, run_seed, after_round, **where: nothing)
    main(["sandbox", "--seeds", "2", "--only", "coin"])
    assert "coin 0: -, passed" in capsys.readouterr().out


def test_the_table_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    low = replace(result(0), reached=-4.65, random=-0.001)
    agents = {0: low, 1: result(1, cpu_s=72.0)}
    monkeypatch.setattr(
        sandbox_training, "run_sandbox", lambda sandbox, run_seed, after_round, **where: agents[run_seed]
    )
    monkeypatch.setenv("COLUMNS", "80")
    main(["sandbox", "--seeds", "2"])
    reported = capsys.readouterr().out
    assert "…" not in reported
    assert max(map(len, reported.splitlines())) <= 80
    assert reported.count("-4.65 to 1.75") == len(SANDBOXES)
    assert "-0.00" not in reported


def test_only_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sandbox_training, "run_sandbox", lambda sandbox, run_seed, after_round, **where: result(run_seed)
    )
    with pytest.raises(SystemExit) as stopped:
        main(["sandbox", "--only"])
    assert stopped.value.code == 2
    assert "--only needs the name of a sandbox. Known: decoy, coin" in capsys.readouterr().err
    main(["sandbox", "--seeds", "1", "--only", "coin", "cue"])
    reported = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "passed," in line]
    assert reported == ["coin", "cue"]


@pytest.mark.parametrize("terminal", [False, True])
def test_whoever_stops_the_command_keeps_what_is_done(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def second_is_stopped(sandbox: Sandbox, run_seed: int, tick: Callable[[], None], **where: Any) -> SandboxResult:
        if run_seed == 1:
            raise KeyboardInterrupt
        return result(run_seed)

    monkeypatch.setattr(sandbox_training, "run_sandbox", second_is_stopped)
    console = partial(Console, force_terminal=terminal, color_system=None, width=200)
    monkeypatch.setattr(command, "plain_console", console)
    with pytest.raises(SystemExit) as stopped:
        main(["sandbox", "--seeds", "2", "--only", "coin"])
    assert stopped.value.code == 130
    assert "coin 0: 0.75, passed, 10 CPU s" in capsys.readouterr().out


def test_the_command_takes_an_ingredient_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[PPOConfig] = []

    def note(sandbox: Sandbox, run_seed: int, tick: Callable[[], None], **where: Any) -> SandboxResult:
        ran.append(sandbox.config)
        return SandboxResult(run_seed=0, optimum=1.0, random=0.0, reached=1.0, passed=True, cpu_s=0.0)

    monkeypatch.setattr(sandbox_training, "run_sandbox", note)
    for name in ABLATIONS:
        main(["sandbox", "--seeds", "1", "--only", "coin", "--ablate", name])
    main(["sandbox", "--seeds", "1", "--only", "coin"])
    assert len(set(ran)) == len(ABLATIONS) + 1
    assert ran[-1] == BY_NAME["coin"].config
    with pytest.raises(SystemExit) as stopped:
        main(["sandbox", "--ablate", "prior"])
    assert stopped.value.code == 2
    assert "unknown ablation 'prior'. Known: uniform_prior" in capsys.readouterr().err


# ---- minutes of training


def trained(sandbox: Sandbox, run_seed: int) -> tuple[float, bool]:
    """What an agent reaches, and whether that is enough."""
    optimum = sandbox.measure(oracle_play(sandbox, unseen_seeds(run_seed)))
    reached = sandbox.measure(train(sandbox, run_seed=run_seed))
    assert reached is not None
    return reached, sandbox.passes(reached, optimum)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", BY_NAME)
def test_five_of_five_agents_pass(name: str) -> None:
    results = [trained(BY_NAME[name], run_seed) for run_seed in range(5)]
    assert all(passed for _, passed in results), results


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("ablation", "name"), [("one_step", "decoy"), ("magnified", "recover"), ("uniform_prior", "recover")]
)
def test_without_an_ingredient_a_sandbox_fails(ablation: str, name: str) -> None:
    sandbox = replace(BY_NAME[name], config=ABLATIONS[ablation](BY_NAME[name].config))
    reached, passed = trained(sandbox, run_seed=0)
    assert not passed, reached
