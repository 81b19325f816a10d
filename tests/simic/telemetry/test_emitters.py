"""Emitters: what goes in comes out under the right type, ids and severity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from esper.leyline import (
    THRESHOLDS,
    ActionOutcome,
    AnomalyDebug,
    BatchSummary,
    ChoiceStats,
    HeadDecision,
    LifecycleOp,
    RewardHackingSuspected,
    Severity,
    TelemetryEventType,
    make_event,
    wait,
)
from esper.simic.rewards.types import RewardComponentsTelemetry
from esper.simic.telemetry.anomaly_detector import AnomalyDetector, AnomalyReport
from esper.simic.telemetry.emitters import (
    Decision,
    check_performance_degradation,
    emit_action_distribution,
    emit_anomaly_diagnostics,
    emit_batch_completed,
    emit_cf_unavailable,
    emit_last_action,
    emit_mask_hit_rates,
    emit_ppo_update_event,
    emit_reward_summary,
    emit_throughput,
    emit_with_env_context,
)
from esper.simic.telemetry.readings import EnvContext
from tests.fakes import germinate
from tests.karn.logs import episode_completed, profile
from tests.nissa.events import decode, log_path, open_hub
from tests.simic.agent.rounds import lived_buffer, small_agent, small_world
from tests.simic.telemetry.test_debug_telemetry import layer
from tests.simic.telemetry.updates import ListSink, inputs, metrics, op_stats

CTX = EnvContext(round=3, episode=3, env=1, epoch=4)
SUMMARY = BatchSummary(
    num_episodes_total=16,
    num_env_steps_total=80,
    accuracy_mean_pct=80.0,
    accuracy_best_pct=85.0,
    accuracy_worst_pct=75.0,
    rolling_accuracy_pct=79.0,
    committed_accuracy_pct=None,
    params_ratio_mean=1.2,
    return_mean=1.5,
    return_std=0.5,
    num_rollbacks=1,
    num_ops={"WAIT": 6, "GERMINATE": 3, "FOSSILIZE": 1},
    update_performed=True,
    duration_s=2.5,
)
HIDDEN = RewardHackingSuspected(
    pattern="ransomware", slot_id="r0c0", contribution_pp=2.0, improvement_pp=-1.0, ratio=None
)


def outcome(op: LifecycleOp, slot: str | None, applied: bool = True) -> ActionOutcome:
    return ActionOutcome(env_id=1, op=op, slot=slot, applied=applied)


def test_ids_are_filled_into_events_of_an_outbox() -> None:
    sink = ListSink()
    bare = make_event(TelemetryEventType.REWARD_HACKING_SUSPECTED, HIDDEN, Severity.CRITICAL, env=1)
    emit_with_env_context(sink, bare, CTX)
    (event,) = sink.events
    assert (event.round, event.episode, event.env, event.epoch) == (3, 3, 1, 4)
    assert event.severity is Severity.CRITICAL
    with pytest.raises(ValueError, match="already has env 1"):
        emit_with_env_context(sink, bare, replace(CTX, env=2))


def test_a_round() -> None:
    sink = ListSink()
    emit_batch_completed(sink, 7, SUMMARY)
    assert sink.events[0].round == 7
    assert sink.of("ROUND_COMPLETED") == [SUMMARY]


def test_an_action_with_its_reasons_and_its_pay() -> None:
    sink = ListSink()
    head = HeadDecision(prob_share=0.6, entropy_share=0.9, num_legal=2, probs=None)
    decision = Decision(value=0.3, log_prob=-0.5, heads={"slot": head})
    pay = RewardComponentsTelemetry(amounts={"gain": 1.0, "rent": -0.25, "rollback": 0.0})
    spec = germinate("r0c0", "good", env_id=1)
    emit_last_action(sink, CTX, spec, outcome(spec.op, spec.slot), decision, pay, reward_scaled=0.1)
    (data,) = sink.of("ACTION_TAKEN")
    assert (data.op, data.slot_id, data.blueprint, data.blend) == ("GERMINATE", "r0c0", "good", "linear_fast")
    assert (data.ok, data.forced, data.value, data.log_prob) == (True, False, 0.3, -0.5)
    assert data.heads == {"slot": head}
    assert (data.reward_raw, data.reward_scaled) == (0.75, 0.1)
    assert sum(data.components.values()) == data.reward_raw
    assert "rollback" not in data.components


def test_an_action_of_a_fixed_controller_has_no_reasons() -> None:
    sink = ListSink()
    emit_last_action(sink, CTX, wait(1), outcome(LifecycleOp.WAIT, None, applied=False), None, None)
    (data,) = sink.of("ACTION_TAKEN")
    assert (data.op, data.ok, data.value, data.heads, data.reward_raw, data.components) == (
        "WAIT",
        False,
        None,
        {},
        None,
        {},
    )


def test_outcomes_profiles_and_missing_coalitions() -> None:
    sink = ListSink()
    emit_reward_summary(sink, CTX, episode_completed())
    emit_cf_unavailable(sink, CTX, "no seed is blended")
    emit_throughput(sink, 3, profile())
    assert sink.of("EPISODE_COMPLETED") == [episode_completed()]
    (missing,) = sink.of("COALITION_MEASURED")
    assert (missing.rows, missing.strategy, missing.unavailable) == ((), None, "no seed is blended")
    assert sink.of("PROFILE_MEASURED") == [profile()]


def test_choices_by_head() -> None:
    sink = ListSink()
    slots = ChoiceStats(head="slot", choices={}, num_decisions=0, num_forced=0)
    emit_action_distribution(sink, 3, op_stats())
    emit_mask_hit_rates(sink, 3, [slots])
    assert [data.head for data in sink.of("CHOICE_STATS")] == ["op", "slot"]
    with pytest.raises(AssertionError, match="op head"):
        emit_action_distribution(sink, 3, slots)
    with pytest.raises(AssertionError, match="emit_action_distribution"):
        emit_mask_hit_rates(sink, 3, [op_stats()])


def test_a_real_update_reaches_the_log_as_it_was(tmp_path: Path) -> None:
    spec = small_world()
    agent = small_agent(spec)
    real = agent.update(lived_buffer(agent, spec))
    with open_hub(tmp_path, strict=True) as hub:
        emit_ppo_update_event(hub, 5, real, [layer("lstm.weight", 1.0)])
    (line,) = log_path(tmp_path).read_bytes().splitlines(keepends=True)
    event = decode(line)
    data = event.data
    assert event.round == 5
    assert event.severity is Severity.INFO
    assert data.metrics["performed"]  # type: ignore[attr-defined]
    for name, value in real.items():
        assert data.metrics[name] == value, name  # type: ignore[attr-defined]
    assert data.layers[0].name == "lstm.weight"  # type: ignore[attr-defined]


def test_a_skipped_update_is_reported_as_a_warning() -> None:
    sink = ListSink()
    emit_ppo_update_event(sink, 5, metrics(performed=False, skip_reason="no data", lstm=None, observations=None))
    (data,) = sink.of("PPO_UPDATE_COMPLETED")
    assert sink.events[0].severity is Severity.WARNING
    found = [data.metrics[name] for name in ("performed", "skip_reason", "lstm", "observations")]
    assert found == [False, "no data", None, None]
    assert data.layers is None


def test_alarms_carry_their_severity_and_raised_ones_the_bundle() -> None:
    sink, detector = ListSink(), AnomalyDetector()
    bundle = AnomalyDebug(layers=None, stability=None, ratios=(3.0,), num_ratios_out_of_range=1)
    bad, worse = (1.5 * THRESHOLDS["ratio_max"].limit_of(s) for s in (Severity.WARNING, Severity.CRITICAL))
    for ratio in (1.0, bad, worse, 1.0):
        report = detector.check_all(inputs(ratio_max=ratio), 2)
        emit_anomaly_diagnostics(sink, report, 2, bundle)
    reported = sink.of("ANOMALY_DETECTED")
    assert [(data.state, data.kind, data.value) for data in reported] == [
        ("entered", "ratio_max", bad),
        ("worsened", "ratio_max", worse),
        ("cleared", "ratio_max", 1.0),
    ]
    assert [event.severity for event in sink.events] == [Severity.WARNING, Severity.CRITICAL, Severity.INFO]
    assert [data.debug for data in reported] == [bundle, bundle, None]
    assert sink.events[0].env is None
    findings = AnomalyDetector().check_all(inputs(ratio_max=9.0), 2).findings
    emit_anomaly_diagnostics(sink, AnomalyReport(findings=findings), CTX)
    assert (sink.events[-1].env, sink.events[-1].epoch) == (1, 4)


@pytest.mark.parametrize(
    ("current", "baseline", "expected"),
    [(95.0, 100.0, False), (94.9, 100.0, True), (100.0, 50.0, False), (-1.06, -1.0, True), (-1.04, -1.0, False)],
)
def test_degradation_is_relative(current: float, baseline: float, expected: bool) -> None:
    degraded, delta = check_performance_degradation(current, baseline)
    assert degraded is expected
    assert delta == current - baseline
