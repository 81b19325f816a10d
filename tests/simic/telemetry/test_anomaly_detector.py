"""Alarms: every row speaks just beyond its limit and not before, on change only, and survives a checkpoint."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from esper.leyline import THRESHOLDS, EpochReport, SeedStage, Severity, Threshold
from esper.leyline.thresholds import GRAD_MIN_HISTORY, LOSS_MIN_HISTORY, MIN_RATE_EPISODES, MIN_USABLE
from esper.simic.telemetry.anomaly_detector import AnomalyDetector, Finding
from esper.simic.telemetry.readings import EnvContext, UpdateInputs, wait_share
from tests.fakes import germinate, play, script_chooser, world
from tests.simic.telemetry.updates import inputs, op_stats

MAKERS: dict[str, Callable[[float], UpdateInputs]] = {
    "num_nonfinite": lambda v: inputs(gradient_stats__num_nonfinite=math.ceil(v)),
    "kl_over_target": lambda v: inputs(approx_kl=v * 0.02, target_kl=0.02),
    "approx_kl": lambda v: inputs(approx_kl=v),
    "clip_fraction": lambda v: inputs(clip_fraction=v),
    "ratio_max": lambda v: inputs(ratio_max=v),
    "ratio_min": lambda v: inputs(ratio_min=v),
    "entropy_share": lambda v: inputs(head_entropies__slot=v),
    "value_nrmse": lambda v: inputs(value_nrmse=v),
    "return_corr": lambda v: inputs(return_corr=v),
    "grad_norm_over_clip": lambda v: inputs(gradient_stats__grad_norm=v * 0.5),
    "lstm_saturated_share": lambda v: inputs(lstm__saturated_share=v),
    "lstm_c_rms": lambda v: inputs(lstm__c_rms=v),
    "lstm_h_rms": lambda v: inputs(lstm__h_rms=v),
    "observation_outlier_share": lambda v: inputs(observations__outlier_share=v),
    "observation_clipped_share": lambda v: inputs(observations__clipped_share=v),
    "observation_drift": lambda v: inputs(observations__drift=v),
    "decision_share": lambda v: inputs(decision_share=v),
    "rollbacks_per_100_episodes": lambda v: inputs(num_rollbacks_total=v, num_episodes_total=100),
    "shaping_share": lambda v: inputs(shaping_share=v),
    "grad_drift": lambda v: inputs(gradient_stats__grad_norm=0.4 * math.exp(v)),
    "wait_share": lambda v: inputs(op_stats(wait=round(v * 10**6), other=10**6 - round(v * 10**6))),
}
OTHERWISE = {"skipped_updates"}


def test_every_row_of_the_update_is_tested() -> None:
    rows = {name for name, row in THRESHOLDS.items() if row.checked == "update"}
    assert rows == {*MAKERS, *OTHERWISE}


def warm(detector: AnomalyDetector, updates: int = 25) -> None:
    for index in range(updates):
        assert not detector.check_all(inputs(), index).findings


def check(detector: AnomalyDetector, given: UpdateInputs, times: int = 1) -> list[Finding]:
    found: list[Finding] = []
    for _ in range(times):
        found += detector.check_all(given, 99).findings
    return found


def around(row: Threshold, limit: float) -> tuple[float, float]:
    """Values just on the good and just on the bad side, further apart than rounding in the readings."""
    gap = 1e-5 * max(abs(limit), 1e-9)
    return (limit + gap, limit - gap) if row.direction == "below" else (limit - gap, limit + gap)


LIMITS = [
    (name, severity)
    for name in MAKERS
    for severity, limit in (
        (Severity.WARNING, THRESHOLDS[name].warn),
        (Severity.CRITICAL, THRESHOLDS[name].critical),
    )
    if limit is not None
]


@pytest.mark.parametrize(("name", "severity"), LIMITS)
def test_a_row_speaks_just_beyond_its_limit(name: str, severity: Severity) -> None:
    row = THRESHOLDS[name]
    limit = row.limit_of(severity)
    good, bad = around(row, limit)
    quiet, loud = AnomalyDetector(), AnomalyDetector()
    warm(quiet)
    warm(loud)
    assert not [f for f in check(quiet, MAKERS[name](good), 5) if f.data.kind == name and f.severity is severity]
    (found,) = [f for f in check(loud, MAKERS[name](bad), row.num_consecutive) if f.data.kind == name]
    assert (found.data.state, found.severity, found.data.limit) == ("entered", severity, limit)
    assert found.data.num_consecutive == row.num_consecutive
    assert found.data.metric == ("entropy_share:slot" if name == "entropy_share" else name)


@pytest.mark.parametrize("name", ["approx_kl", "entropy_share"])
def test_patient_rows_wait_for_a_run_of_bad_values(name: str) -> None:
    row = THRESHOLDS[name]
    assert row.warn is not None
    bad, detector = MAKERS[name](row.warn / 2), AnomalyDetector()
    warm(detector)
    assert not check(detector, bad, 2)
    assert not check(detector, inputs())
    assert not check(detector, bad, 2)
    assert [f.data.state for f in check(detector, bad)] == ["entered"]


def test_skipped_updates_are_counted_in_a_row() -> None:
    detector = AnomalyDetector()
    skipped = inputs(performed=False)
    reported = [[(f.data.state, f.severity, f.data.value) for f in check(detector, skipped)] for _ in range(4)]
    assert reported == [[("entered", Severity.WARNING, 1.0)], [], [("worsened", Severity.CRITICAL, 3.0)], []]
    assert [f.data.state for f in check(detector, inputs())] == ["cleared"]
    assert [f.data.value for f in check(detector, skipped)] == [1.0]


def test_an_update_that_looked_at_nothing_clears_no_alarm() -> None:
    detector = AnomalyDetector()
    assert "num_nonfinite" in {f.data.kind for f in check(detector, inputs(gradient_stats__num_nonfinite=2))}
    skipped = inputs(performed=False, observations=None, lstm=None)
    assert "num_nonfinite" not in {f.data.kind for f in check(detector, skipped)}
    assert [f.data.state for f in check(detector, inputs()) if f.data.kind == "num_nonfinite"] == ["cleared"]


def test_warm_up_silences_all_rows_but_the_marked_ones() -> None:
    awful: dict[str, Any] = {
        "clip_fraction": 0.9,
        "value_nrmse": 9.0,
        "return_corr": -1.0,
        "ratio_max": 9.0,
        "gradient_stats__num_nonfinite": 1,
    }
    detector = AnomalyDetector()
    first = {f.data.kind for f in check(detector, inputs(**awful), 5)}
    assert first == {"ratio_max", "num_nonfinite"}
    sixth = {f.data.kind for f in check(detector, inputs(**awful))}
    assert sixth == {"clip_fraction", "value_nrmse"}
    assert not check(detector, inputs(**awful), 14)
    assert {f.data.kind for f in check(detector, inputs(**awful))} == {"return_corr"}


def test_an_alarm_is_reported_on_change_only_and_clears_with_a_margin() -> None:
    detector = AnomalyDetector()
    warm(detector)
    story = [0.31, 0.4, 0.6, 0.7, 0.4, 0.31, 0.29, 0.25, 0.21, 0.19, 0.1, 0.35]
    reported = [[f.data.state for f in check(detector, inputs(clip_fraction=v))] for v in story]
    assert reported == [["entered"], [], ["worsened"], [], [], [], [], [], [], ["cleared"], [], ["entered"]]


def test_what_is_not_a_number_is_critical_and_named_first() -> None:
    detector = AnomalyDetector()
    warm(detector)
    found = check(detector, inputs(total_loss=math.nan, ratio_max=math.inf, clip_fraction=math.nan))
    assert [f.data.kind for f in found] == ["num_nonfinite", "clip_fraction", "ratio_max"]
    assert {f.severity for f in found} == {Severity.CRITICAL}
    assert found[0].data.value == 2.0


@pytest.mark.parametrize("part", ["gradient_stats", "lstm", "observations"])
def test_whatever_is_not_a_number_is_counted(part: str) -> None:
    (found,) = check(AnomalyDetector(), inputs(**{f"{part}__num_nonfinite": 3}))
    assert (found.data.kind, found.data.value, found.severity) == ("num_nonfinite", 3.0, Severity.CRITICAL)


def test_what_was_not_measured_neither_raises_nor_clears() -> None:
    detector = AnomalyDetector()
    warm(detector)
    nothing = inputs(clip_fraction=None, approx_kl=None, lstm=None, observations=None, decision_share=None)
    assert [f.data.kind for f in check(detector, inputs(clip_fraction=0.4))] == ["clip_fraction"]
    assert not check(detector, nothing, 5)
    assert [f.data.state for f in check(detector, inputs(clip_fraction=0.1))] == ["cleared"]


def test_heads_with_few_decisions_are_not_judged() -> None:
    for usable, expected in ((MIN_USABLE - 1, []), (MIN_USABLE, ["entropy_share:op"])):
        detector = AnomalyDetector()
        warm(detector)
        bad = inputs(head_entropies__op=0.01, heads__op__num_usable=usable)
        assert [f.data.metric for f in check(detector, bad, 3)] == expected


def test_a_controller_that_does_not_learn_is_judged_by_what_it_does_to_hosts() -> None:
    fixed = replace(inputs(op_stats(wait=9, other=0), shaping_share=1.0, num_rollbacks_total=50), metrics=None)
    detector = AnomalyDetector()
    assert [f.data.kind for f in check(detector, fixed)] == ["rollbacks_per_100_episodes", "shaping_share"]
    assert not check(detector, fixed, 30), "and never for waiting or for updates it does not make"


def test_rates_and_drift_need_enough_history() -> None:
    few = inputs(num_rollbacks_total=20, num_episodes_total=MIN_RATE_EPISODES - 1)
    enough = inputs(num_rollbacks_total=20, num_episodes_total=MIN_RATE_EPISODES)
    assert not check(AnomalyDetector(), few)
    assert [f.data.kind for f in check(AnomalyDetector(), enough)] == ["rollbacks_per_100_episodes"]
    for updates, expected in ((GRAD_MIN_HISTORY - 1, []), (GRAD_MIN_HISTORY, ["grad_drift"])):
        detector = AnomalyDetector()
        warm(detector, updates)
        assert [f.data.kind for f in check(detector, inputs(gradient_stats__grad_norm=0.01))] == expected


def test_wait_share_is_among_free_decisions() -> None:
    assert wait_share(op_stats(wait=3, other=1, forced=100)) == 0.75
    assert wait_share(op_stats(wait=0, other=0, forced=7)) is None
    assert wait_share(None) is None


def test_a_checkpoint_changes_nothing() -> None:
    rng = random.Random(3)
    story = [
        inputs(
            clip_fraction=rng.choice([0.1, 0.25, 0.4, 0.6, math.nan]),
            head_entropies__op=rng.choice([0.02, 0.07, 0.5]),
            gradient_stats__grad_norm=rng.choice([0.4, 0.01, 5.0]),
            performed=rng.random() < 0.5,
        )
        for _ in range(60)
    ]
    plain, resumed = AnomalyDetector(), AnomalyDetector()
    for given in story:
        expected = plain.check_all(given, 0)
        assert repr(resumed.check_all(given, 0)) == repr(expected)
        saved = json.loads(json.dumps(resumed.state_dict(), allow_nan=False))
        resumed = AnomalyDetector()
        resumed.load_state_dict(saved)


# ---- per env


def epoch_of(env: int, epoch: int, episode: int = 0) -> EnvContext:
    return EnvContext(round=episode, episode=episode, env=env, epoch=epoch)


def report_with(stage: SeedStage = SeedStage.TRAINING, val_loss: float = 1.0, **slot_fields: Any) -> EpochReport:
    """A report of a host whose first slot holds a seed."""
    last = play(world(2), script_chooser([(0, germinate("r0c0", "good"))]))[-1].after
    first = replace(last.slots[0], stage=stage, grad_health=1.0, grad_ratio=1.0)
    return replace(last, val_loss=val_loss, slots=(replace(first, **slot_fields), *last.slots[1:]))


@pytest.mark.parametrize(("field", "kind"), [("grad_health", "seed_grad_health"), ("grad_ratio", "seed_grad_ratio")])
def test_sick_and_dormant_seeds(field: str, kind: str) -> None:
    row = THRESHOLDS[kind]
    for limit, severity in ((row.warn, Severity.WARNING), (row.critical, Severity.CRITICAL)):
        if limit is None:
            continue
        good, bad = around(row, limit)
        detector = AnomalyDetector()
        calm = report_with(**{field: good})
        found = [f for f in detector.check_all(calm, epoch_of(0, 1)).findings if f.severity is severity]
        assert not found
        sick, detector = report_with(**{field: bad}), AnomalyDetector()
        reported = [
            detector.check_all(sick, epoch_of(0, epoch)).findings for epoch in range(1, 1 + row.num_consecutive)
        ]
        assert not any(reported[:-1])
        assert [(f.data.metric, f.severity) for f in reported[-1]] == [(f"{kind}:r0c0", severity)]


def test_a_jump_of_the_loss_is_reported_before_the_governor_acts() -> None:
    detector = AnomalyDetector()
    for epoch in range(LOSS_MIN_HISTORY):
        assert not detector.check_all(report_with(), epoch_of(0, epoch)).findings
    calm = report_with(val_loss=1.99)
    assert not detector.check_all(calm, epoch_of(0, 7)).findings
    jump = report_with(val_loss=2.01)
    (found,) = detector.check_all(jump, epoch_of(0, 8)).findings
    assert (found.data.kind, found.data.state, found.severity) == ("val_loss_ratio", "entered", Severity.WARNING)
    broken = report_with(val_loss=math.nan)
    assert not detector.check_all(broken, epoch_of(0, 9)).findings  # open already, and it has one severity


def test_alarms_of_an_env_end_with_their_seed_or_host() -> None:
    sick = report_with(grad_health=0.1)
    for later, ctx, why in (
        (report_with(stage=SeedStage.FOSSILIZED), epoch_of(0, 2), "the seed is gone or kept"),
        (report_with(), epoch_of(0, 0, episode=1), "a new host began"),
    ):
        detector = AnomalyDetector()
        assert detector.check_all(sick, epoch_of(0, 1)).raised
        assert not detector.check_all(sick, epoch_of(0, 1)).findings
        report = detector.check_all(later, ctx)
        assert [(f.data.state, f.data.detail) for f in report.findings] == [("cleared", why)]
        assert not report.raised


def test_a_new_host_is_not_measured_by_the_old_one() -> None:
    detector = AnomalyDetector()
    for epoch in range(LOSS_MIN_HISTORY + 1):
        detector.check_all(report_with(val_loss=0.1), epoch_of(0, epoch))
    untrained = report_with(val_loss=2.3)
    for epoch in range(4):
        assert not detector.check_all(untrained, epoch_of(0, epoch, episode=1)).findings


def test_a_loss_that_is_no_number_is_no_part_of_what_is_usual() -> None:
    detector = AnomalyDetector()
    losses = [1.0] * LOSS_MIN_HISTORY + [math.inf, math.inf, math.nan, math.nan]
    for epoch, loss in enumerate(losses):
        found = detector.check_all(report_with(val_loss=loss), epoch_of(0, epoch)).findings
        assert bool(found) == (epoch == LOSS_MIN_HISTORY), "reported once"
    (cleared,) = detector.check_all(report_with(val_loss=1.0), epoch_of(0, len(losses))).findings
    assert (cleared.data.kind, cleared.data.state, cleared.data.value) == ("val_loss_ratio", "cleared", 1.0)
    json.dumps(detector.state_dict(), allow_nan=False)


def test_a_checkpoint_between_epochs_changes_nothing() -> None:
    rng = random.Random(4)
    plain, resumed = AnomalyDetector(), AnomalyDetector()
    num_reported = 0
    for step in range(80):
        stage = rng.choice([SeedStage.TRAINING, SeedStage.TRAINING, SeedStage.FOSSILIZED])
        report = report_with(stage, val_loss=rng.choice([1.0, 1.1, 5.0]), grad_health=rng.choice([1.0, 0.5, 0.1]))
        ctx = epoch_of(step % 2, (step // 2) % 10, episode=step // 20)
        expected = plain.check_all(report, ctx)
        assert resumed.check_all(report, ctx) == expected
        num_reported += len(expected.findings)
        saved = json.loads(json.dumps(resumed.state_dict(), allow_nan=False))
        resumed = AnomalyDetector()
        resumed.load_state_dict(saved)
    assert num_reported > 20


def test_envs_have_alarms_of_their_own() -> None:
    detector = AnomalyDetector()
    sick = report_with(grad_health=0.1)
    assert detector.check_all(sick, epoch_of(0, 1)).raised
    assert detector.check_all(sick, epoch_of(1, 1)).raised
    calm = report_with()
    assert [f.data.state for f in detector.check_all(calm, epoch_of(0, 2)).findings] == ["cleared"]
    assert not detector.check_all(sick, epoch_of(1, 2)).findings
