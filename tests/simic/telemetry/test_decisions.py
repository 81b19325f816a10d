"""Records of the log: how unusual an observation was, and where."""

import math

import pytest
import torch

from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.tamiyo_inputs import make_observation
from esper.simic.client import network_shape
from esper.simic.telemetry.decisions import seen_by_policy
from esper.tamiyo.features import GLOBAL_COLUMNS, SLOT_COLUMNS
from tests.simic.agent.rounds import SMALL

SLOTS = ("r0c0", "r0c1")
GLOBAL_VALUE = next(i for i, column in enumerate(GLOBAL_COLUMNS) if column.normalised)
VALUE = next(i for i, column in enumerate(SLOT_COLUMNS) if column.normalised)
FLAG = next(i for i, column in enumerate(SLOT_COLUMNS) if not column.normalised)
NUM_NORMALISED = sum(c.normalised for c in GLOBAL_COLUMNS) + len(SLOTS) * sum(c.normalised for c in SLOT_COLUMNS)


def deviations(slot: int, column: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Three envs that are as usual, but for one figure of the second."""
    agent = PPOAgent(network_shape(("mlp.lora",)), SMALL, run_seed=0)
    rows = torch.zeros(3, len(GLOBAL_COLUMNS)), torch.zeros(3, len(SLOTS), len(SLOT_COLUMNS))
    rows[1][1, slot, column] = value
    for norm, usual in ((agent.network.obs_norm, rows[0]), (agent.network.slot_norm, rows[1][0])):
        norm.stats.update(torch.stack([torch.full_like(usual[0], -1.0), torch.full_like(usual[0], 1.0)]))
    observation = make_observation(rows[0].tolist(), rows[1].tolist(), (), ())
    return agent.deviations(observation)


@pytest.mark.parametrize(
    ("value", "outliers", "clipped"), [(4.9, 0, 0), (5.1, 1, 0), (-9.9, 1, 0), (10.1, 1, 1), (math.inf, 1, 1)]
)
def test_unusual_columns_are_counted_and_the_worst_is_named(value, outliers, clipped):
    seen = seen_by_policy(*deviations(1, VALUE, value), (0, 1), SLOTS)
    assert set(seen) == {0, 1}
    assert (seen[0].outlier_share, seen[0].max_deviation) == (0.0, 0.0)
    assert seen[1].worst_column == f"r0c1.{SLOT_COLUMNS[VALUE].name}"
    assert seen[1].outlier_share == pytest.approx(outliers / NUM_NORMALISED)
    assert seen[1].clipped_share == pytest.approx(clipped / NUM_NORMALISED)
    assert seen[1].num_nonfinite == (0 if math.isfinite(value) else 1)
    if math.isfinite(value):
        assert seen[1].max_deviation == pytest.approx(abs(value), rel=1e-5)


def test_what_is_no_number_is_named_before_everything_else():
    far_ND, far_NSF = deviations(0, VALUE, math.nan)
    far_ND[1, GLOBAL_VALUE] = 30.0
    seen = seen_by_policy(far_ND, far_NSF, (1,), SLOTS)[1]
    assert (seen.num_nonfinite, seen.worst_column) == (1, f"r0c0.{SLOT_COLUMNS[VALUE].name}")


def test_flags_are_never_unusual():
    seen = seen_by_policy(*deviations(0, FLAG, 100.0), (1,), SLOTS)[1]
    assert (seen.outlier_share, seen.max_deviation) == (0.0, 0.0)
