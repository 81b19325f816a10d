"""Who is suspected of being paid for damage, and from which point on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from esper.leyline import ActionSpec, LifecycleOp, RewardHackingSuspected, Severity
from esper.leyline.thresholds import MIN_COMMON_GAIN_PP, RANSOM_IMPROVEMENT_PP
from esper.simic.rewards import suspicions
from esper.simic.rewards.suspicion import ROWS, over_attribution, ransomware, severity_of
from esper.simic.telemetry.readings import EnvContext
from esper.simic.telemetry.report_events import SuspicionWatch
from esper.tamiyo.simulation import SimulationSpec
from tests.fakes import act_on, germinate, play, script_chooser, world
from tests.simic.rewards.pricing import ledgers, make_config
from tests.simic.telemetry.updates import ListSink

HORIZON = 30
PARASITE = [
    (0, germinate("r0c0", "parasite")),
    (1, act_on(LifecycleOp.ADVANCE, "r0c0")),
    (8, act_on(LifecycleOp.FOSSILIZE, "r0c0")),
]
GOOD = [(8, germinate("r0c0", "good")), (9, act_on(LifecycleOp.ADVANCE, "r0c0"))]


def hostage_world(harm_pp: float) -> SimulationSpec:
    """A world whose parasite costs that much and makes the host depend on it."""
    spec = world(horizon=HORIZON)
    parasite = next(blueprint for blueprint in spec.blueprints if blueprint.name == "parasite")
    harmful = replace(parasite, gain_pp=(-harm_pp,) * len(spec.slot_ids))
    return replace(spec, blueprints=tuple(harmful if b is parasite else b for b in spec.blueprints))


def signs(
    plan: list[tuple[int, ActionSpec]], *, harm_pp: float = 3.0, reference: bool = True
) -> list[tuple[RewardHackingSuspected, ...]]:
    """What is seen in each epoch."""
    spec = hostage_world(harm_pp)
    config = make_config(spec, reference=reference)
    steps = play(spec, script_chooser(plan))
    memory = ledgers(steps, config)[1:]
    return [suspicions(step.after, m, config) for step, m in zip(steps, memory, strict=True)]


def patterns(found: list[tuple[RewardHackingSuspected, ...]]) -> list[set[str]]:
    return [{sign.pattern for sign in epoch} for epoch in found]


def test_a_parasite_is_suspected_of_both_patterns_and_a_good_seed_of_none() -> None:
    found = signs(PARASITE)
    assert {(sign.pattern, severity_of(sign)) for sign in found[-1]} == {
        ("ransomware", Severity.CRITICAL),
        ("attribution_ratio", Severity.WARNING),
    }
    assert patterns(signs(GOOD))[-1] == set()
    assert patterns(signs([])) == [set()] * HORIZON


def test_a_hostage_is_seen_for_as_long_as_it_is_held() -> None:
    held = ["ransomware" in epoch for epoch in patterns(signs(PARASITE))]
    assert sum(held) > 20
    assert held == sorted(held), "once seen, it is seen until the end"


def test_a_parasite_is_reported_of_once_in_its_episode() -> None:
    watch, sink = SuspicionWatch(), ListSink()
    for epoch, found in enumerate(signs(PARASITE)):
        watch.emit(sink, EnvContext(round=0, episode=0, env=0, epoch=epoch), found)
    assert sorted(data.pattern for data in sink.of("REWARD_HACKING_SUSPECTED")) == ["attribution_ratio", "ransomware"]
    assert all(event.epoch is not None and event.epoch < HORIZON // 2 for event in sink.events)


def test_a_host_hardly_below_waiting_is_nobodys_hostage() -> None:
    """The curve of waiting is a mean: half of all hosts are a little below it."""
    assert "ransomware" not in set().union(*patterns(signs(PARASITE, harm_pp=0.5)))


def test_without_a_reference_curve_nobody_can_be_called_a_ransomer() -> None:
    assert "ransomware" not in set().union(*patterns(signs(PARASITE, reference=False)))


@pytest.mark.parametrize(("beyond", "expected"), [(0.01, 1), (-0.01, 0)])
def test_limits_of_ransomware(beyond: float, expected: int) -> None:
    contribution_pp = ROWS["ransomware"].limit_of(Severity.CRITICAL)
    assert len(ransomware({"r0c0": contribution_pp}, RANSOM_IMPROVEMENT_PP - beyond)) == expected
    assert len(ransomware({"r0c0": contribution_pp + beyond}, RANSOM_IMPROVEMENT_PP - 1)) == expected


@pytest.mark.parametrize("together", [0.001, 0.5 * MIN_COMMON_GAIN_PP, -3.0])
def test_a_tiny_common_gain_makes_no_ratio_large(together: float) -> None:
    limit = ROWS["attribution_ratio"].limit_of(Severity.WARNING) * MIN_COMMON_GAIN_PP
    assert over_attribution({"r0c0": 0.5 * limit, "r0c1": 0.49 * limit}, together) == ()
    (sign,) = over_attribution({"r0c0": 0.49 * limit, "r0c1": 0.52 * limit, "r0c2": -limit}, together)
    assert (sign.slot_id, sign.improvement_pp) == ("r0c1", together)
    assert sign.ratio == pytest.approx(1.01 * limit / MIN_COMMON_GAIN_PP)
