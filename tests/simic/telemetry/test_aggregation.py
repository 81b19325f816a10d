"""Several updates as one: each field by its reducer, and nothing that was not measured becomes 0."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest

from esper.leyline import HEAD_NAMES
from esper.simic.telemetry import aggregation
from esper.simic.telemetry.aggregation import aggregate_ppo_metrics
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
        ("env_steps", [10, 20, 30], 60),
        ("num_rewards_clipped", [1, None, 2], 3),
        ("policy_loss", [1.0, None, 3.0], 2.0),
        ("approx_kl", [None, None, None], None),
        *((name, [1.0, None, 5.0], 3.0) for name in MEANS),
        ("ratio_min", [0.9, 0.5, None], 0.5),
        ("ratio_max", [1.1, 3.0, None], 3.0),
        ("learning_rate", [3.0, 2.0, 1.0], 1.0),
        ("gradient_stats__norm_max", [1.0, 9.0, None], 9.0),
        ("gradient_stats__norm_mean", [1.0, 3.0, None], 2.0),
        ("gradient_stats__num_nonfinite", [1, 0, 2], 3),
        ("heads__op__num_usable", [1, 2, 3], 6),
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
        merged = merged[part]
    assert merged == expected


def test_heads_are_weighted_by_their_usable_steps() -> None:
    merged = aggregate_ppo_metrics(
        [
            metrics(heads__op__num_usable=30, heads__op__kl=1.0, head_entropies__op=0.2),
            metrics(heads__op__num_usable=10, heads__op__kl=5.0, head_entropies__op=0.6),
            metrics(heads__op__num_usable=0, heads__op__kl=None, head_entropies__op=None),
        ]
    )
    assert merged["heads"]["op"]["kl"] == 2.0
    assert merged["head_entropies"]["op"] == pytest.approx(0.3)


def test_a_part_measured_once_is_kept() -> None:
    merged = aggregate_ppo_metrics([metrics(lstm=None), metrics(lstm__c_rms=7.0), metrics(lstm=None)])
    assert merged["lstm"] is not None
    assert merged["lstm"]["c_rms"] == 7.0


def test_every_head_is_there() -> None:
    merged = aggregate_ppo_metrics([metrics(), metrics()])
    assert tuple(merged["heads"]) == tuple(merged["head_entropies"]) == HEAD_NAMES


def test_nothing_cannot_be_aggregated() -> None:
    with pytest.raises(ValueError, match="at least one"):
        aggregate_ppo_metrics([])


def test_a_field_without_a_reducer_fails_at_import() -> None:
    class Grown(TypedDict):
        norm_mean: float
        brand_new: float

    with pytest.raises(AssertionError, match="brand_new"):
        aggregation._require_reducers(Grown, {"norm_mean": aggregation._mean})
