"""Modes, weights and calibration: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from esper.leyline import DEFAULT_LIFECYCLE
from esper.simic.rewards import (
    DEFAULT_MODE,
    MODES,
    Calibration,
    RewardConfig,
    RewardWeights,
    calibrate,
    check_mode,
    default_gamma,
    get_mode,
    uncalibrated,
)
from esper.simic.rewards.modes import TermKind

CONFIG = RewardConfig(
    horizon=20,
    gamma=0.995,
    calibration=uncalibrated("contribution", 10),
    lifecycle=DEFAULT_LIFECYCLE,
    loss_ref=math.log(10),
)


def test_the_modes_are_these_seven_and_every_one_prices_a_rollback() -> None:
    assert list(MODES) == ["shaped", "simplified", "basic", "basic_plus", "sparse", "minimal", "escrow"]
    assert DEFAULT_MODE in MODES
    assert all(mode.terms[-1].name == "rollback" for mode in MODES.values())


@pytest.mark.parametrize("mode", MODES)
def test_stage_prior_and_credit_are_the_only_neutral_terms(mode: str) -> None:
    neutral = {term.name for term in MODES[mode].terms if term.kind is TermKind.NEUTRAL}
    outcome = {term.name for term in MODES[mode].terms if term.kind is TermKind.OUTCOME}
    assert neutral <= {"pbrs", "credit"}
    assert outcome == {"terminal", "size", "rollback"}


def test_prior_and_credit_form_a_two_by_two_design() -> None:
    has = {
        name: tuple(term in {t.name for t in MODES[name].terms} for term in ("pbrs", "credit"))
        for name in ("minimal", "simplified", "escrow", "shaped")
    }
    assert list(has.values()) == [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("mode", MODES)
def test_modes_that_pay_for_commits_need_a_reference_curve(mode: str) -> None:
    if mode in ("basic", "basic_plus"):
        with pytest.raises(ValueError, match=f"{mode}.*calibrate.*shaped"):
            check_mode(mode, CONFIG)
    else:
        check_mode(mode, CONFIG)


def test_an_unknown_mode_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'dense'.*shaped.*escrow"):
        get_mode("dense")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 0}, "horizon must be at least 1"),
        ({"gamma": 0.0}, r"gamma must be in \(0, 1\], got 0.0"),
        ({"gamma": 1.01}, "gamma"),
        ({"loss_ref": 0.0}, "loss_ref must be above 0"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)  # type: ignore[arg-type]


def test_a_reference_curve_of_another_horizon_is_refused() -> None:
    calibration = Calibration(family="loss", floor=1.0, ceiling=2.0, reference=(0.0,) * 20)
    with pytest.raises(ValueError, match=r"horizon \+ 1 = 21 values, got 20"):
        replace(CONFIG, calibration=calibration)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("weight", RewardWeights.__record_fields__)  # type: ignore[attr-defined]
def test_a_weight_must_be_a_price(weight: str, value: float) -> None:
    with pytest.raises(ValueError, match=weight):
        RewardWeights(**{weight: value})


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="contribution, loss, got 'accuracy'"):
        Calibration(family="accuracy", floor=0.0, ceiling=1.0, reference=None)


def test_calibration_takes_means_over_run_seeds() -> None:
    curves = [[10.0, 50.0 + seed] for seed in range(5)]
    found = calibrate("contribution", curves, [90.0] * 4 + [95.0])
    assert found.reference == (10.0, 52.0)
    assert found.floor == 52.0
    assert found.ceiling == 91.0
    assert found.span == 39.0


def test_a_saturated_host_keeps_a_span_of_five_points() -> None:
    assert calibrate("loss", [[90.0]] * 5, [90.5] * 5).span == 5.0
    assert calibrate("loss", [[90.0]] * 5, [80.0] * 5).span == 5.0


def test_too_few_or_unequal_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        calibrate("loss", [[1.0]] * 4, [1.0] * 5)
    with pytest.raises(ValueError, match="differ in length"):
        calibrate("loss", [[1.0]] * 4 + [[1.0, 2.0]], [1.0] * 5)


def test_without_calibration_the_scale_runs_from_chance_to_perfection() -> None:
    assert (uncalibrated("contribution", 10).floor, uncalibrated("contribution", 10).span) == (10.0, 90.0)
    assert (uncalibrated("loss", 10).floor, uncalibrated("loss", 10).span) == (0.0, 100.0)


@pytest.mark.parametrize("horizon", [1, 40, 70, 71, 200, 1000])
def test_the_default_discount_keeps_the_end_in_sight(horizon: int) -> None:
    assert 0.0 < default_gamma(horizon) <= 1.0
    assert default_gamma(horizon) ** horizon >= 0.7
