"""Several updates as one: each field by its reducer, and nothing that was not measured becomes 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest

from esper.leyline import HEAD_NAMES, HeadUpdate, LSTMHealth, ObservationHealth
from esper.simic.agent import GradientStats, HeadEntropies, PPOUpdateMetrics
from esper.simic.telemetry.aggregation import REDUCERS, aggregate_ppo_metrics
from tests.simic.telemetry.updates import metrics

MEANS = (
    "value_loss", "entropy_loss", "total_loss", "approx_kl", "clip_fraction", "ratio_mean", "explained_variance",
    "value_nrmse", "return_corr", "return_mean", "return_std", "advantage_mean", "advantage_std", "decision_share",
)  # fmt: skip


def test_one_update_stands_for_itself() -> None:
    assert aggregate_ppo_metrics([metrics()]) == metrics()
    bare = metrics(lstm=None, observations=None, approx_kl=None, head_entropies__slot=None)
    assert aggregate_ppo_metrics([bare]) == bare


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("performed", [False, True, False], True),
        ("kl_stopped", [False, False, False], False),
        ("skip_reason", ["a", None, None], "a"),
        ("num_optimizer_steps", [1, 2, 4], 7),
        ("env_steps", [10, 10, 10], 10),
        ("num_rewards_clipped", [2, None, 2], 2),
        ("policy_loss", [1.0, None, 3.0], 2.0),
        ("approx_kl", [None, None, None], None),
        *((name, [1.0, None, 5.0], 3.0) for name in MEANS),
        ("ratio_min", [0.9, 0.5, None], 0.5),
        ("ratio_max", [1.1, 3.0, None], 3.0),
        ("learning_rate", [3.0, 2.0, 1.0], 1.0),
        ("gradient_stats__max_grad", [1.0, 9.0, None], 9.0),
        ("gradient_stats__grad_norm", [1.0, 3.0, None], 2.0),
        ("gradient_stats__num_nonfinite", [1, 0, 2], 3),
        ("gradient_stats__min_grad", [1.0, 0.2, None], 0.2),
        ("heads__op__num_usable", [3, 3, 3], 3),
        ("heads__op__grad_state", ["ok", "nonfinite", "ok"], "nonfinite"),
        ("heads__op__grad_norm", [None, 2.0, 4.0], 3.0),
        ("lstm__num_nonfinite", [1, 1, 1], 3),
        ("lstm__h_rms", [0.1, 0.2, 0.3], pytest.approx(0.2)),
        ("lstm", [None, None, None], None),
        ("observations__drift", [0.0, 1.0, 2.0], 1.0),
        ("target_kl", [1.0, 1.0, 2.0], 2.0),
    ],
)
def test_each_field_has_its_reducer(field: str, values: list[Any], expected: Any) -> None:
    merged: Any = aggregate_ppo_metrics([metrics(**{field: value}) for value in values])
    for part in field.split("__"):
        merged = merged[part] if isinstance(merged, dict) else getattr(merged, part)
    assert merged == expected


def test_heads_are_averaged_where_they_were_measured() -> None:
    merged = aggregate_ppo_metrics(
        [
            metrics(heads__op__kl=1.0, head_entropies__op=0.2),
            metrics(heads__op__kl=5.0, head_entropies__op=0.6),
            metrics(heads__op__kl=None, head_entropies__op=None),
        ]
    )
    assert merged["heads"]["op"].kl == 3.0
    assert merged["head_entropies"]["op"] == pytest.approx(0.4)


def test_a_part_measured_once_is_kept() -> None:
    merged = aggregate_ppo_metrics([metrics(lstm=None), metrics(lstm__c_rms=7.0), metrics(lstm=None)])
    assert merged["lstm"] is not None
    assert merged["lstm"].c_rms == 7.0


def test_every_head_is_there() -> None:
    merged = aggregate_ppo_metrics([metrics(), metrics()])
    assert tuple(merged["heads"]) == tuple(merged["head_entropies"]) == HEAD_NAMES


def test_nothing_cannot_be_aggregated() -> None:
    with pytest.raises(ValueError, match="at least one"):
        aggregate_ppo_metrics([])


@pytest.mark.parametrize("record", [PPOUpdateMetrics, GradientStats, HeadUpdate, LSTMHealth, ObservationHealth])
def test_whatever_cannot_be_averaged_has_a_reducer(record: type) -> None:
    """A count or a flag as a mean would be no count or flag any more."""
    numbers = {float, float | None, GradientStats, HeadEntropies, Mapping[str, HeadUpdate]}
    parts = {LSTMHealth | None, ObservationHealth | None}
    others = {name for name, hint in get_type_hints(record).items() if hint not in numbers | parts}
    assert others <= set(REDUCERS)
