"""After an alarm more is told: in exactly the window that was promised, at any level but OFF."""

from __future__ import annotations

import json

import pytest

from esper.leyline import AnomalyDetected, Severity, TelemetryEventType, TelemetryLevel
from esper.simic.telemetry.anomaly_detector import (
    AnomalyReport,
    EscalationState,
    Finding,
    carry_window,
    handle_telemetry_escalation,
    level_at,
)
from esper.simic.telemetry.emitters import apply_slot_telemetry
from esper.simic.telemetry.readings import EnvContext
from esper.simic.telemetry.telemetry_config import TelemetryConfig, enabled

T = 10
DEBUG, NORMAL = TelemetryLevel.DEBUG, TelemetryLevel.NORMAL


def report(state: str = "entered") -> AnomalyReport:
    data = AnomalyDetected(
        kind="clip_fraction",
        metric="clip_fraction",
        state=state,  # type: ignore[arg-type]
        value=0.4,
        limit=0.3,
        num_consecutive=1,
        detail="",
    )
    return AnomalyReport(findings=(Finding(data, Severity.WARNING),))


CALM = AnomalyReport(findings=())


def at(round_idx: int, epoch: int, env: int = 0) -> EnvContext:
    return EnvContext(round=round_idx, episode=round_idx, env=env, epoch=epoch)


def escalation(epochs: int = 5, **changes: object) -> EscalationState:
    config = TelemetryConfig(escalation_epochs=epochs, **changes)  # type: ignore[arg-type]
    return EscalationState.of(config, epochs_per_episode=T)


def debugged(state: EscalationState, env: int = 0, rounds: int = 8) -> list[int]:
    """Epochs of the run, counted through, that are told at DEBUG in one env."""
    return [r * T + e for r in range(rounds) for e in range(T) if level_at(state, at(r, e, env)) is DEBUG]


def debugged_updates(state: EscalationState) -> list[int]:
    return [r for r in range(8) if level_at(state, r) is DEBUG]


@pytest.mark.parametrize("clock", [at(1, 3), at(1, 8), at(1, 9)])
def test_an_alarm_of_an_env_covers_its_next_epochs_across_episodes(clock: EnvContext) -> None:
    state = escalation(5)
    assert handle_telemetry_escalation(report(), state, clock) is DEBUG
    now = clock.round * T + clock.epoch
    assert debugged(state) == list(range(now + 1, now + 6))
    assert debugged(state, env=1) == []
    assert debugged_updates(state) == []


@pytest.mark.parametrize(("epochs", "covered"), [(5, 10), (10, 10), (14, 14), (25, 25)])
def test_an_alarm_of_the_policy_covers_the_next_round_and_its_update(epochs: int, covered: int) -> None:
    state = escalation(epochs)
    assert handle_telemetry_escalation(report(), state, 1) is DEBUG
    for env in (0, 3):
        assert debugged(state, env) == list(range(2 * T, 2 * T + covered))
    assert debugged_updates(state) == list(range(2, 2 + covered // T))


@pytest.mark.parametrize(("ended", "left"), [(4, 4), (6, 2), (8, 0)])
def test_epochs_that_an_early_end_left_out_are_made_up_for_in_the_next_episode(ended: int, left: int) -> None:
    state = escalation(5)
    handle_telemetry_escalation(report(), state, at(1, 3))
    carry_window(state, at(1, ended))
    played = [epoch for epoch in debugged(state) if epoch <= T + ended or epoch >= 2 * T]
    assert played == ([*range(2 * T, 2 * T + left)] if left else [*range(T + 4, T + 9)])


def test_an_alarm_in_the_last_epoch_of_an_early_end_covers_the_next_episode() -> None:
    state = escalation(3)
    handle_telemetry_escalation(report(), state, at(1, 4))
    carry_window(state, at(1, 4))
    assert debugged(state) == [2 * T, 2 * T + 1, 2 * T + 2]


def test_a_usual_end_and_other_envs_keep_their_windows() -> None:
    state = escalation(5)
    handle_telemetry_escalation(report(), state, at(1, 7))
    before = debugged(state)
    carry_window(state, at(1, T - 1))
    carry_window(state, at(1, 8, env=1))
    assert debugged(state) == before


def test_a_second_alarm_lengthens_the_window() -> None:
    state = escalation(5)
    handle_telemetry_escalation(report(), state, at(0, 2))
    handle_telemetry_escalation(report("worsened"), state, at(0, 4))
    assert debugged(state) == list(range(3, 10))
    handle_telemetry_escalation(report(), state, at(3, 0))
    assert debugged(state) == list(range(31, 36))


def test_quiet_checks_and_cleared_alarms_open_nothing() -> None:
    state = escalation()
    assert handle_telemetry_escalation(CALM, state, at(0, 0)) is NORMAL
    assert handle_telemetry_escalation(report("cleared"), state, at(0, 0)) is NORMAL
    handle_telemetry_escalation(report(), state, at(0, 0))
    levels = [handle_telemetry_escalation(CALM, state, at(0, epoch)) for epoch in range(1, 8)]
    assert levels == [DEBUG] * 4 + [NORMAL] * 3


def test_asking_changes_nothing() -> None:
    state = escalation()
    handle_telemetry_escalation(report(), state, at(0, 0))
    before = json.dumps(state.state_dict())
    assert debugged(state) == debugged(state)
    assert json.dumps(state.state_dict()) == before


@pytest.mark.parametrize("changes", [{"level": TelemetryLevel.OFF}, {"epochs": 0}])
def test_off_and_unwanted_never_escalate(changes: dict[str, object]) -> None:
    state = escalation(**changes)
    for clock in (at(0, 0), 0):
        assert handle_telemetry_escalation(report(), state, clock) is state.level
    assert debugged(state) == []


def test_windows_survive_a_checkpoint() -> None:
    state, resumed = escalation(), escalation()
    handle_telemetry_escalation(report(), state, at(2, 9, env=1))
    handle_telemetry_escalation(report(), state, 4)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    for env in (0, 1):
        assert debugged(resumed, env) == debugged(state, env) != []


def test_windows_are_not_taken_over_where_none_may_open() -> None:
    state = escalation()
    handle_telemetry_escalation(report(), state, at(2, 9))
    for never in (escalation(level=TelemetryLevel.OFF), escalation(epochs=0)):
        never.load_state_dict(state.state_dict())
        assert debugged(never) == []


class Workers:
    wanted: frozenset[TelemetryEventType] = frozenset()
    gradient_detail_envs: frozenset[int] = frozenset()


def test_workers_learn_what_is_wanted_and_of_which_envs_more() -> None:
    workers, state = Workers(), escalation(level=TelemetryLevel.MINIMAL)
    apply_slot_telemetry(workers, state, [at(2, 3, env=0), at(2, 3, env=1)])
    assert (workers.wanted, workers.gradient_detail_envs) == (enabled(TelemetryLevel.MINIMAL), frozenset())
    assert TelemetryEventType.EPOCH_COMPLETED not in workers.wanted
    assert TelemetryEventType.SEED_PRUNED in workers.wanted
    handle_telemetry_escalation(report(), state, at(2, 3, env=1))
    apply_slot_telemetry(workers, state, [at(2, 4, env=0), at(2, 4, env=1)])
    assert (workers.wanted, workers.gradient_detail_envs) == (enabled(TelemetryLevel.DEBUG), frozenset({1}))
    handle_telemetry_escalation(report(), state, 2)
    apply_slot_telemetry(workers, state, [at(3, 0, env=0), at(3, 0, env=1)])
    assert workers.gradient_detail_envs == {0, 1}


def test_rollbacks_are_reported_even_where_nothing_is_logged() -> None:
    workers = Workers()
    apply_slot_telemetry(workers, escalation(level=TelemetryLevel.OFF), [at(0, 0)])
    assert (workers.wanted, workers.gradient_detail_envs) == ({TelemetryEventType.GOVERNOR_STATE_CHANGED}, frozenset())
