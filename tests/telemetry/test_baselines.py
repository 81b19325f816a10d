"""Exact counts of every event type for three declared runs, through the real session: a change that tells more or less
is seen at once."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from esper.karn.integrity import check_run
from esper.leyline import HEAD_NAMES
from esper.simic.run.environment import identity
from esper.simic.run.session import start_new
from esper.tolaria import handles
from esper.tolaria.handles import ProcessHandle
from tests.integration.kills import training_facts
from tests.telemetry.sessions import BLIND, LIFE, events_of, live, of, play_session
from tests.tolaria.worlds import PickledHandle

STORED = Path(__file__).parent / "baseline_counts.json"
ROUNDS, ENVS, EPOCHS = 2, 2, 5
LEARNING = replace(BLIND, rounds=ROUNDS, envs=ENVS, episode_length=EPOCHS)
WAITING = replace(LEARNING, controller="wait_only")
SCRIPTED = replace(LIFE, envs=ENVS)


def plain(config, runs):
    start = start_new(config, runs, "plain")
    play_session(start)
    return start.run.path


KINDS = {"waiting": (plain, WAITING), "learning": (plain, LEARNING), "scripted": (live, SCRIPTED)}


def play(name, folder):
    """One of the three, without a worker process and by two."""
    run, config = KINDS[name]
    where = [{"worker_kind": "inline"}, {"worker_kind": "process", "workers": 2}]
    return [run(replace(config, **place), folder / str(number)) for number, place in enumerate(where)]


def counts(run):
    return dict(sorted(Counter(event.type.value for event in events_of(run)).items()))


COMMON = {
    "RUN_STARTED": 1,
    "RUN_ENDED": 1,
    "EVENTS_DROPPED": 0,
    "WORKER_STATE_CHANGED": 0,
    "GOVERNOR_STATE_CHANGED": 0,
}
DECLARED = {
    name: {
        **COMMON,
        "EPOCH_COMPLETED": config.rounds * ENVS * config.episode_length,
        "ACTION_TAKEN": config.rounds * ENVS * config.episode_length,
        "EPISODE_COMPLETED": config.rounds * ENVS,
        "ROUND_COMPLETED": config.rounds,
        "PROFILE_MEASURED": config.rounds,
        "CHECKPOINT_RECORDED": config.rounds,
        "CHOICE_STATS": config.rounds * len(HEAD_NAMES),
        "PPO_UPDATE_COMPLETED": config.rounds if name == "learning" else 0,
    }
    for name, (_, config) in KINDS.items()
}
DECLARED["scripted"] |= {"SEED_GERMINATED": 2 * ENVS, "SEED_FOSSILIZED": ENVS, "SEED_PRUNED": ENVS}


def check_lives(run):
    """First seed: training, blending, holding. Second: training; after its prune embargo, then free again."""
    events = events_of(run)
    for env in range(ENVS):
        mine = [event for event in events if event.env == env]
        moves = [event.data.to_stage for event in of(mine, "SEED_STAGE_CHANGED")]
        assert moves[:4] == ["TRAINING", "BLENDING", "HOLDING", "TRAINING"]
        assert set(moves[4:]) <= {"EMBARGOED", "DORMANT"}
        seeds = [event.data.slots.get("r0c0") for event in of(mine, "EPOCH_COMPLETED")]
        undecided = [seed for seed in seeds if seed and seed.stage in ("BLENDING", "HOLDING")]
        assert len(of(mine, "COALITION_MEASURED")) == len(undecided) + 1, "and once at the end of the episode"


@pytest.mark.parametrize(
    "name", [name if name == "waiting" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_a_baseline_has_its_counts_wherever_it_runs(tmp_path, name):
    """To store new ones after a change that is meant to tell more: write what this test shows into the file."""
    here, *elsewhere = play(name, tmp_path)
    assert check_run(here).complete
    assert all(counts(other) == counts(here) for other in elsewhere)
    assert all(training_facts(other) == training_facts(here) for other in elsewhere)
    expected = DECLARED[name]
    assert {kind: counts(here).get(kind, 0) for kind in expected} == expected
    if name == "waiting":
        assert set(counts(here)) == {kind for kind, count in expected.items() if count}, "and nothing else"
    if name == "scripted":
        check_lives(here)
    stored = json.loads(STORED.read_text())
    if stored["made_with"] == {key: identity()[key] for key in stored["made_with"]}:
        assert counts(here) == stored["counts"][name]


FOUR = replace(LEARNING, task="digits_mlp", envs=4, minibatches=4, episode_length=4)


@pytest.mark.parametrize("handle", [PickledHandle, pytest.param(ProcessHandle, marks=pytest.mark.slow)])
def test_four_workers_tell_the_same_facts_as_one(tmp_path, monkeypatch, handle):
    here = plain(FOUR, tmp_path / "here")
    monkeypatch.setattr(handles, "ProcessHandle", handle)
    elsewhere = plain(replace(FOUR, worker_kind="process", workers=4), tmp_path / "elsewhere")
    assert of(events_of(elsewhere), "RUN_STARTED")[0].data.num_workers == 4
    assert training_facts(elsewhere) == training_facts(here)
