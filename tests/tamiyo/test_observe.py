"""From a worker's answer to what a controller may know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from esper.leyline import wait
from esper.tamiyo.masks import masks, observe
from esper.tamiyo.simulation import SimulatedWorker
from tests.fakes import germinate, seeds, world


def test_everything_is_in_env_order_and_masks_follow_the_reports() -> None:
    spec = world()
    worker = SimulatedWorker(spec)
    worker.reset(seeds(3))
    result = worker.step([wait(2), germinate("r0c1", "good", env_id=1), wait(0)])
    shuffled = replace(result, reports=dict(reversed(result.reports.items())))
    state = observe(shuffled)
    assert [report.env_id for report in state.reports] == [0, 1, 2]
    assert [outcome.env_id for outcome in state.outcomes] == [0, 1, 2]
    for i, report in enumerate(state.reports):
        assert state.post_action_signals[i] == report.signals
        assert state.post_action_slot_reports[i] == report.slots
        assert state.post_action_masks[i] == masks(report, spec.layout, spec.lifecycle)
    assert not state.truncated_bootstrap_targets


def test_at_reset_there_are_no_outcomes() -> None:
    spec = world()
    assert observe(SimulatedWorker(spec).reset(seeds(2))).outcomes == ()


def test_a_missing_outcome_is_a_defect() -> None:
    spec = world()
    worker = SimulatedWorker(spec)
    worker.reset(seeds(2))
    result = worker.step([wait(0), wait(1)])
    with pytest.raises(KeyError):
        observe(replace(result, outcomes={0: result.outcomes[0]}))
