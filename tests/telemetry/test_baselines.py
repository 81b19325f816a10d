"""Exact counts of every event type for declared runs: a change that tells more or less is seen at once."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from esper.leyline import HEAD_NAMES, ActionSpec, LifecycleOp, TelemetryLevel, wait
from esper.simic.training import vectorized
from esper.simic.training.identity import identity
from tests.simic.training.runs import TINY
from tests.telemetry.logs import events_of, open_log, run_with

STORED = Path(__file__).parent / "baseline_counts.json"
LEARNING = replace(TINY, task="digits_blind", rounds=2, envs=2, episode_length=5)
SCRIPTED = replace(
    TINY, task="digits_blind", rounds=1, envs=1, episode_length=16, minibatches=1, controller="wait_only"
)


class OneLife:
    """Plants, blends and keeps one seed as soon as each step is legal, then plants another and prunes it."""

    PLAN = (
        (LifecycleOp.GERMINATE, "r0c0", "cnn.conv"),
        (LifecycleOp.ADVANCE, "r0c0", None),
        (LifecycleOp.FOSSILIZE, "r0c0", None),
        (LifecycleOp.GERMINATE, "r1c0", "cnn.norm"),
        (LifecycleOp.PRUNE, "r1c0", None),
    )

    def __init__(self, setting) -> None:
        self.layout = setting.layout

    def begin(self, state):
        self.left = list(self.PLAN)

    def act(self, state):
        if not self.left:
            return [wait(0)]
        op, slot, blueprint = self.left[0]
        if not state.post_action_masks[0].slot_by_op[op][self.layout.slot_position(slot)]:
            return [wait(0)]
        self.left.pop(0)
        blend = "linear_fast" if blueprint else None
        return [ActionSpec(env_id=0, op=op, slot=slot, blueprint=blueprint, blend=blend)]

    def store(self, before, after):
        """Nothing to remember."""


def counts(folder):
    return dict(sorted(Counter(event["type"] for event in events_of(folder)).items()))


def test_a_scripted_life_has_exactly_its_events(tmp_path, monkeypatch):
    monkeypatch.setattr(vectorized, "make_controller", lambda name, setting: OneLife(setting))
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, SCRIPTED, TelemetryLevel.NORMAL)
    found = counts(tmp_path)
    assert found["SEED_GERMINATED"] == 2
    assert found["SEED_FOSSILIZED"] == found["SEED_PRUNED"] == 1
    # First seed: training, blending, holding. Second: training; after its prune embargo, then free again.
    moves = [e["data"]["to_stage"] for e in events_of(tmp_path, "SEED_STAGE_CHANGED")]
    assert moves[:4] == ["TRAINING", "BLENDING", "HOLDING", "TRAINING"]
    assert set(moves[4:]) <= {"EMBARGOED", "DORMANT"}
    assert found["EPOCH_COMPLETED"] == found["ACTION_TAKEN"] == 16
    blended = [e for e in events_of(tmp_path, "EPOCH_COMPLETED") if e["data"]["slots"]["r0c0"]["alpha_share"] > 0.0]
    assert found["COALITION_MEASURED"] == len(blended)
    assert found["CHOICE_STATS"] == len(HEAD_NAMES)
    for once in ("RUN_STARTED", "EPISODE_COMPLETED", "ROUND_COMPLETED", "PROFILE_MEASURED"):
        assert found[once] == 1
    told = {"SEED_STAGE_CHANGED", "GATE_EVALUATED", "SEED_GERMINATED", "SEED_FOSSILIZED", "SEED_PRUNED",
            "EPOCH_COMPLETED", "ACTION_TAKEN", "COALITION_MEASURED", "CHOICE_STATS", "RUN_STARTED",
            "EPISODE_COMPLETED", "ROUND_COMPLETED", "PROFILE_MEASURED"}  # fmt: skip
    assert set(found) - {"REWARD_HACKING_SUSPECTED", "ANOMALY_DETECTED"} == told


@pytest.mark.parametrize("workers", [1, 2])
def test_a_learning_run_has_the_stored_counts(tmp_path, workers):
    """To store new ones after a change that is meant to tell more: write what this test shows into the file."""
    config = replace(LEARNING, worker_kind="process", workers=workers)
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, config, TelemetryLevel.NORMAL)
    stored = json.loads(STORED.read_text())
    here = {"torch": identity()["torch"], "cpu_capability": identity()["cpu_capability"]}
    if stored["made_with"] != here:
        pytest.skip(f"the counts were stored with {stored['made_with']}, this is {here}")
    assert counts(tmp_path) == stored["counts"]
