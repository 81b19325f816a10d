"""The log of a real run: exact counts, figures that agree with the trainer's, identities between events."""

from collections import Counter
from dataclasses import replace

import pytest

from esper.leyline import EVENTS, HEAD_NAMES, TelemetryEventType, TelemetryLevel
from tests.simic.training.runs import TINY
from tests.telemetry.logs import events_of, open_log, run_with

RUN = replace(TINY, task="digits_blind", rounds=2, envs=2, episode_length=8)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    folder, kept = tmp_path_factory.mktemp("run"), []
    with open_log(folder, strict=True) as hub:
        run_with(hub, RUN, TelemetryLevel.NORMAL, keep=kept)
    return events_of(folder), kept[0]


def of(events, kind):
    return [event for event in events if event["type"] == kind]


def test_a_waiting_run_has_exactly_the_declared_counts(tmp_path):
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, replace(RUN, controller="wait_only"), TelemetryLevel.NORMAL)
    rounds, envs, epochs = 2, 2, 8
    assert Counter(event["type"] for event in events_of(tmp_path)) == {
        "RUN_STARTED": 1,
        "EPOCH_COMPLETED": rounds * envs * epochs,
        "ACTION_TAKEN": rounds * envs * epochs,
        "EPISODE_COMPLETED": rounds * envs,
        "ROUND_COMPLETED": rounds,
        "PROFILE_MEASURED": rounds,
        "CHOICE_STATS": rounds * len(HEAD_NAMES),
    }


def test_a_learning_run_tells_every_step_and_update(logged):
    counts = Counter(event["type"] for event in logged[0])
    assert counts["EPOCH_COMPLETED"] == counts["ACTION_TAKEN"] == 2 * 2 * 8
    assert counts["PPO_UPDATE_COMPLETED"] == counts["ROUND_COMPLETED"] == counts["PROFILE_MEASURED"] == 2
    assert counts["EPISODE_COMPLETED"] == 4
    assert counts["EVENTS_DROPPED"] == 0


def test_sequence_numbers_have_no_gap(logged):
    assert [event["seq"] for event in logged[0]] == list(range(len(logged[0])))


def test_update_figures_are_the_trainers_own(logged):
    events, trainer = logged
    for event, summary in zip(of(events, "PPO_UPDATE_COMPLETED"), trainer.history, strict=True):
        data, ppo = event["data"], summary.ppo
        assert data["performed"]
        assert data["joint"]["approx_kl"] == ppo["approx_kl"]
        assert data["critic"]["explained_variance"] == ppo.get("explained_variance")
        assert data["losses"]["policy"] == ppo["policy_loss"]
        for head in HEAD_NAMES:
            assert data["heads"][head]["entropy_share"] == ppo.get(f"entropy_{head}")


def test_round_figures_are_the_trainers_own(logged):
    events, trainer = logged
    for event, summary in zip(of(events, "ROUND_COMPLETED"), trainer.history, strict=True):
        assert event["round"] == summary.round_idx
        for name in ("accuracy_mean_pct", "return_mean", "return_std", "params_ratio_mean", "num_env_steps_total"):
            assert event["data"][name] == getattr(summary, name)


def test_components_sum_to_the_reward(logged):
    for event in of(logged[0], "ACTION_TAKEN"):
        assert sum(event["data"]["components"].values()) == pytest.approx(event["data"]["reward_raw"], abs=1e-6)


def test_lifecycle_events_match_what_was_done(logged):
    events = logged[0]
    acted = Counter(event["data"]["op"] for event in of(events, "ACTION_TAKEN") if event["data"]["ok"])
    assert acted["GERMINATE"] == len(of(events, "SEED_GERMINATED")) > 0
    assert acted["FOSSILIZE"] == len(of(events, "SEED_FOSSILIZED"))
    for event in of(events, "EPISODE_COMPLETED"):
        data = event["data"]
        assert data["num_germinated"] == data["num_fossilized"] + data["num_pruned"] + data["num_alive"]
        assert sum(data["components_sum"].values()) == pytest.approx(data["return_raw"])


def test_choices_add_up(logged):
    for event in of(logged[0], "CHOICE_STATS"):
        data = event["data"]
        assert sum(choice["num_chosen"] for choice in data["choices"].values()) == data["num_decisions"]
        assert all(choice["num_chosen"] <= choice["num_legal"] for choice in data["choices"].values())
    ops = [event["data"] for event in of(logged[0], "CHOICE_STATS") if event["data"]["head"] == "op"]
    assert [stats["num_decisions"] for stats in ops] == [16, 16]


def test_phases_sum_to_the_time_of_the_round(logged):
    for profile, done in zip(of(logged[0], "PROFILE_MEASURED"), of(logged[0], "ROUND_COMPLETED"), strict=True):
        total = sum(phase["wall_ms"] for phase in profile["data"]["phases"].values())
        assert total == pytest.approx(1e3 * done["data"]["duration_s"], rel=0.01)


def test_probabilities_are_told_for_used_heads_only(logged):
    for event in of(logged[0], "ACTION_TAKEN"):
        data = event["data"]
        used = {"WAIT": {"op"}, "GERMINATE": {"op", "slot", "blueprint", "blend"}}.get(data["op"], {"op", "slot"})
        assert set(data["heads"]) == used
        for head in data["heads"].values():
            assert 0.0 < head["prob_share"] <= 1.0
            assert (head["entropy_share"] is None) == (head["num_legal"] == 1)


def test_env_events_come_in_env_order_within_a_step(logged):
    steps = [(event["round"], event["epoch"], event["env"]) for event in of(logged[0], "EPOCH_COMPLETED")]
    assert steps == sorted(steps)


def test_facts_do_not_depend_on_the_number_of_workers(tmp_path, logged):
    from tests.integration.kills import training_facts

    folder = tmp_path / "two"
    with open_log(folder, strict=True) as hub:
        run_with(hub, replace(RUN, worker_kind="process", workers=2), TelemetryLevel.NORMAL)
    one = tmp_path / "one"
    with open_log(one, strict=True) as hub:
        run_with(hub, RUN, TelemetryLevel.NORMAL)
    assert training_facts(folder) == training_facts(one)


def test_every_level_tells_what_it_promises(tmp_path):
    for level in (TelemetryLevel.MINIMAL, TelemetryLevel.DEBUG):
        folder = tmp_path / level.name
        with open_log(folder, strict=True) as hub:
            run_with(hub, RUN, level, escalate_on_anomaly=False)
        told = {TelemetryEventType(event["type"]) for event in events_of(folder)}
        assert all(EVENTS[kind].level <= level for kind in told)
        layers = [event["data"]["layers"] for event in events_of(folder, "PPO_UPDATE_COMPLETED")]
        assert all(bool(found) == (level is TelemetryLevel.DEBUG) for found in layers)
