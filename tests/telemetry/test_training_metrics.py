"""The log of a real run: exact counts, figures that agree with the trainer's, identities between events."""

import math
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from esper.leyline import EVENTS, TelemetryEventType, TelemetryLevel
from esper.leyline.run_payloads import PHASES
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import FixedClient
from esper.simic.run.recorder import RunRecorder
from esper.simic.training import vectorized_trainer
from esper.simic.training.vectorized import AgentReads
from esper.tolaria.pool import EnginePool
from tests.simic.training.runs import TINY
from tests.telemetry.logs import events_of, open_log, run_with
from tests.telemetry.sessions import faults
from tests.tolaria.worlds import Fault

RUN = replace(TINY, task="digits_blind", rounds=2, envs=2, episode_length=8)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    folder, kept, updates, update = tmp_path_factory.mktemp("run"), [], [], PPOAgent.update

    def observed(agent, buffer, **kinds):
        updates.append(update(agent, buffer, **kinds))
        return updates[-1]

    with open_log(folder, strict=True) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOAgent, "update", observed)
        run_with(hub, RUN, TelemetryLevel.NORMAL, keep=kept)
    kept[0].updates = updates
    return events_of(folder), kept[0]


def of(events, kind):
    return [event for event in events if event["type"] == kind]


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
    for event, ppo in zip(of(events, "PPO_UPDATE_COMPLETED"), trainer.updates, strict=True):
        data = event["data"]["metrics"]
        assert data["performed"]
        assert data["approx_kl"] == ppo["approx_kl"]
        assert data["explained_variance"] == ppo["explained_variance"]
        assert data["policy_loss"] == ppo["policy_loss"]
        assert data["num_rewards_clipped"] == 0
        assert data["head_entropies"] == ppo["head_entropies"]


def test_round_figures_are_the_trainers_own(logged):
    events, trainer = logged
    for round_idx, (event, summary) in enumerate(zip(of(events, "ROUND_COMPLETED"), trainer.history, strict=True)):
        assert event["round"] == round_idx
        assert event["data"] == asdict(summary)


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


def test_phases_sum_to_the_time_of_their_round(logged):
    rounds = of(logged[0], "ROUND_COMPLETED")
    for profile, completed in zip(of(logged[0], "PROFILE_MEASURED"), rounds, strict=True):
        phases = profile["data"]["phases"]
        assert set(phases) == set(PHASES)
        assert sum(phase["wall_ms"] for phase in phases.values()) == pytest.approx(
            1e3 * completed["data"]["duration_s"]
        )
        assert all(phase["cpu_ms"] >= 0.0 for phase in phases.values())


TAKES_S = {
    EnginePool: {"reset": 1, "step": 2},
    FixedClient: {"begin": 4, "act": 8, "store": 16, "update": 32},
    RunRecorder: {"round_begins": 64, "stored": 128, "round_ends": 256, "checkpoint": 512},
}


def test_phases_account_for_every_second_from_the_end_of_one_round_to_that_of_the_next(tmp_path, monkeypatch):
    """On a clock that only moves inside the calls above, at half the speed for CPU time."""
    now_s, ends_s = [0.0], [0.0]

    def slow(name, call, takes_s):
        def wrapped(*arguments, **options):
            ends_s.extend(now_s if name == "round_ends" else ())
            now_s[0] += takes_s
            return call(*arguments, **options)

        return wrapped

    for kind, calls in TAKES_S.items():
        for name, takes_s in calls.items():
            monkeypatch.setattr(kind, name, slow(name, getattr(kind, name), takes_s))
    clocks = SimpleNamespace(perf_counter=lambda: now_s[0], process_time=lambda: now_s[0] / 2)
    monkeypatch.setattr(vectorized_trainer, "time", clocks)
    waiting = replace(TINY, controller="wait_only", rounds=3, envs=1, minibatches=1, episode_length=2)
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, waiting, TelemetryLevel.NORMAL)
    profiles = [event["data"]["phases"] for event in events_of(tmp_path, "PROFILE_MEASURED")]
    lasted_s = [after - before for before, after in pairwise(ends_s)]
    assert [event["data"]["duration_s"] for event in events_of(tmp_path, "ROUND_COMPLETED")] == lasted_s
    assert [sum(phase["wall_ms"] for phase in phases.values()) for phases in profiles] == [1e3 * s for s in lasted_s]
    playing_s = {"act": 4 + 2 * 8, "execute": 64 + 1 + 2 * 2, "reward": 2 * (16 + 128), "update": 32}
    for phases, before_s in zip(profiles, (0, 256 + 512, 256 + 512), strict=True):
        expected_s = {**playing_s, "other": before_s}
        assert phases == {name: {"wall_ms": 1e3 * s, "cpu_ms": 5e2 * s} for name, s in expected_s.items()}


def test_a_profile_has_what_can_be_measured_here(logged):
    for event in of(logged[0], "PROFILE_MEASURED"):
        data, phases = event["data"], event["data"]["phases"]
        rows = data["host_samples_per_s"] / data["env_steps_per_s"]
        assert rows == pytest.approx(of(logged[0], "RUN_STARTED")[0]["data"]["split_sizes"]["train"])
        assert phases["execute"]["wall_ms"] > phases["act"]["wall_ms"] > 0.0
        assert data["telemetry_cpu_ms"] > 0.0
        assert data["wait_share"] is None, "an inline run has nobody to wait for"
        assert data["cuda"] is None


def test_a_closer_look_after_a_skipped_update_has_nothing_of_the_one_before(logged):
    reads = AgentReads(logged[1].client)
    assert reads.layers()
    found = reads.bundle()
    assert (found.num_ratios_out_of_range, len(found.ratios)) == (0, 0)
    agent = logged[1].client.agent
    spoiled = SimpleNamespace(rollout=lambda: SimpleNamespace(valid_TN=torch.zeros(2, 2, dtype=torch.bool)))
    assert not agent.update(spoiled)["performed"]
    assert reads.layers() is None
    found = reads.bundle()
    assert (found.layers, found.ratios, found.num_ratios_out_of_range) == (None, None, None)


def test_memory_of_devices_is_reported(monkeypatch):
    from esper.simic.run import recorder

    cuda = recorder.torch.cuda
    facts = {"is_available": True, "is_initialized": True, "device_count": 1, "memory_allocated": 3}
    facts |= {"memory_reserved": 5, "memory_stats": {"num_alloc_retries": 2}}
    facts |= {"get_device_properties": SimpleNamespace(total_memory=8)}
    for name, fact in facts.items():
        monkeypatch.setattr(cuda, name, lambda *device, fact=fact: fact)
    (found,) = recorder.cuda_memory().values()
    assert (found.allocated_bytes, found.reserved_bytes, found.total_bytes, found.num_retries) == (3, 5, 8, 2)


def test_probabilities_are_reported_of_heads_that_had_a_choice(logged):
    for event in of(logged[0], "ACTION_TAKEN"):
        data = event["data"]
        used = {"WAIT": {"op"}, "GERMINATE": {"op", "slot", "blueprint", "blend"}}.get(data["op"], {"op", "slot"})
        assert set(data["heads"]) <= used
        assert data["forced"] == (not data["heads"])
        for head in data["heads"].values():
            assert 0.0 < head["prob_share"] < 1.0
            assert 0.0 < head["entropy_share"] <= 1.0
            assert head["num_legal"] > 1
            assert head["probs"] is None
        assert data["seen"] is None


def test_env_events_come_in_env_order_within_a_step(logged):
    steps = [(event["round"], event["epoch"], event["env"]) for event in of(logged[0], "EPOCH_COMPLETED")]
    assert steps == sorted(steps)


def test_a_closer_look_describes_gradients_observations_and_all_probabilities(tmp_path):
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, RUN, TelemetryLevel.DEBUG, escalation_epochs=0)
    for event in events_of(tmp_path, "EPOCH_COMPLETED"):
        data = event["data"]
        layers = {layer["name"]: layer["norm"] for layer in data["debug"]}
        assert len(layers) == len(data["debug"])
        assert any(norm > 0.0 for norm in layers.values())
        training = {slot for slot, seed in data["slots"].items() if seed["stage"] == "TRAINING"}
        assert all(any(slot in name for name in layers) for slot in training)
    num_heads = 0
    for event in events_of(tmp_path, "ACTION_TAKEN"):
        data = event["data"]
        assert data["seen"]["num_nonfinite"] == 0
        assert 0.0 <= data["seen"]["clipped_share"] <= data["seen"]["outlier_share"] < 0.5
        assert data["seen"]["max_deviation"] > 0.0
        chosen = {"op": data["op"], "slot": data["slot_id"], "blueprint": data["blueprint"], "blend": data["blend"]}
        for name, head in data["heads"].items():
            num_heads += 1
            assert len(head["probs"]) == head["num_legal"]
            assert sum(head["probs"].values()) == pytest.approx(1.0, abs=1e-5)
            assert head["probs"][chosen[name]] == pytest.approx(head["prob_share"], rel=1e-5)
    assert num_heads > 20


def test_gradients_are_reported_as_they_were_before_clipping(tmp_path):
    """Clipped ones would never look large. With one minibatch, the layers' norms are those of the whole update."""
    clipped = replace(RUN, ppo_epochs=1, minibatches=1, max_grad_norm=1e-3)
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, clipped, TelemetryLevel.DEBUG, escalation_epochs=0)
    for event in events_of(tmp_path, "PPO_UPDATE_COMPLETED"):
        whole = math.sqrt(sum(layer["norm"] ** 2 for layer in event["data"]["layers"]))
        assert whole == pytest.approx(event["data"]["metrics"]["gradient_stats"]["grad_norm"], rel=1e-4)
        assert whole > 0.01


def test_an_alarm_of_one_env_brings_a_closer_look_at_that_env_alone(tmp_path, monkeypatch):
    from esper.simic.run import recorder
    from esper.simic.telemetry import anomaly_detector
    from esper.simic.telemetry.readings import EnvContext

    def once(report, state, clock):
        if isinstance(clock, EnvContext) and (clock.round, clock.env, clock.epoch) == (0, 1, 5):
            state.windows[1] = (6, 9)  # rounds of 8 epochs: the last two of this episode and the first two of the next
        return anomaly_detector.level_at(state, clock)

    monkeypatch.setattr(recorder, "handle_telemetry_escalation", once)
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, RUN, TelemetryLevel.NORMAL)
    looked = [
        (event["round"], event["env"], event["epoch"])
        for event in events_of(tmp_path, "EPOCH_COMPLETED")
        if event["data"]["debug"] is not None
    ]
    assert looked == [(0, 1, 6), (0, 1, 7), (1, 1, 0), (1, 1, 1)]


def test_a_closer_look_that_a_rollback_cut_short_goes_on_in_the_next_episode(tmp_path, monkeypatch):
    from esper.simic.run import recorder
    from esper.simic.telemetry import anomaly_detector

    def once(report, state, clock):
        if getattr(clock, "env", None) == 0 and (clock.round, clock.epoch) == (0, 1):
            state.windows[0] = (2, 5)
        return anomaly_detector.level_at(state, clock)

    monkeypatch.setattr(recorder, "handle_telemetry_escalation", once)
    with (
        faults(Fault(kind="nan", env_id=0, epoch=2, once=tmp_path / "once")),
        open_log(tmp_path / "run", strict=True) as hub,
    ):
        run_with(hub, replace(RUN, episode_length=6), TelemetryLevel.NORMAL)
    ends = [event["data"]["end"] for event in events_of(tmp_path / "run", "EPISODE_COMPLETED")]
    assert ends == ["rolled_back", "completed", "completed", "completed"]
    looked = [
        (event["round"], event["env"], event["epoch"])
        for event in events_of(tmp_path / "run", "EPOCH_COMPLETED")
        if event["data"]["debug"] is not None
    ]
    assert looked == [(1, 0, 0), (1, 0, 1), (1, 0, 2)], "of the epoch that was undone there is nothing to see"


def test_every_level_tells_what_it_promises(tmp_path):
    for level in (TelemetryLevel.MINIMAL, TelemetryLevel.DEBUG):
        folder = tmp_path / level.name
        with open_log(folder, strict=True) as hub:
            run_with(hub, RUN, level, escalation_epochs=0)
        reported = {TelemetryEventType(event["type"]) for event in events_of(folder)}
        assert all(EVENTS[kind].level <= level for kind in reported)
        layers = [event["data"]["layers"] for event in events_of(folder, "PPO_UPDATE_COMPLETED")]
        assert all(bool(found) == (level is TelemetryLevel.DEBUG) for found in layers)
