"""Normalizers: right statistics, exact round trips, and a scale that stays put unless samples are added."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.simic.control.normalization import MIN_REWARD_SCALE, REWARD_LIMIT, RewardNormalizer, RunningMeanStd

rewards_lists = st.lists(st.floats(-50, 50, allow_nan=False), min_size=1, max_size=40)


def filled(size: int = 3) -> RunningMeanStd:
    stats = RunningMeanStd(size)
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 7, 30):
        stats.update(torch.randn(rows, size, generator=generator) * 5 + 2)
    return stats


def test_running_mean_std_has_the_documented_keys() -> None:
    assert set(filled().state_dict()) == {"mean", "var", "count"}


def test_shapes_and_devices_are_taken_as_torch_takes_them() -> None:
    stats = RunningMeanStd(shape=(10,), device="cpu")
    assert (stats.mean.shape, stats.var.shape, stats.count.shape) == ((10,), (10,), ())


def test_a_state_dict_stays_as_it_was_taken() -> None:
    stats = filled()
    network = torch.nn.Sequential(stats)
    taken = {**stats.state_dict(), **network.state_dict()}
    before = {name: tensor.clone() for name, tensor in taken.items()}
    stats.update(torch.ones(5, 3))
    assert {*before} == {"mean", "var", "count", "0.mean", "0.var", "0.count"}
    assert all(torch.equal(taken[name], before[name]) for name in before)
    assert not torch.equal(stats.mean, before["mean"])


def test_the_limit_of_rewards_is_a_setting() -> None:
    normalizer = RewardNormalizer(clip=2.0)
    normalizer.update([1.0, -1.0])
    assert [normalizer.normalize_only(reward) for reward in (1.5, 7.0, -7.0)] == [1.5, 2.0, -2.0]
    assert normalizer.num_clipped == 2


def test_rewards_may_be_normalized_with_samples_of_more_precision() -> None:
    normalizer, rewards = RewardNormalizer(), torch.tensor([[3.0, 4.0]])
    scaled = normalizer.update_and_normalize(rewards, [3.0, 4.0])
    assert normalizer.count == 2
    assert scaled.tolist() == [pytest.approx([3.0 / math.sqrt(12.5), 4.0 / math.sqrt(12.5)])]
    other = RewardNormalizer()
    assert torch.equal(other.update_and_normalize(rewards), scaled)
    assert other.state_dict() == normalizer.state_dict()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_batches_of_any_size_give_the_statistics_of_the_whole(sizes: list[int], rng_seed: int) -> None:
    rows = torch.randn(max(sum(sizes), 1), 4, generator=torch.Generator().manual_seed(rng_seed)) * 3 - 1
    stats = RunningMeanStd(4)
    for part in rows[: sum(sizes)].split(sizes):
        stats.update(part)
    if sum(sizes) == 0:
        assert stats.count == 0
        assert torch.equal(stats.var, torch.ones(4, dtype=torch.float64))
        return
    assert np.allclose(stats.mean, rows.double().mean(0), atol=1e-9)
    assert np.allclose(stats.var, rows.double().var(0, unbiased=False), atol=1e-9)


def test_first_batch_counts_in_full() -> None:
    stats = RunningMeanStd(1)
    stats.update(torch.tensor([[100.0], [102.0]]))
    assert stats.mean.item() == 101.0
    assert stats.var.item() == 1.0


def test_updates_write_in_place() -> None:
    stats = RunningMeanStd(2)
    views = (stats.mean, stats.var, stats.count)
    stats.update(torch.ones(3, 2))
    stats.load_state_dict(filled(2).state_dict())
    assert all(now is then for now, then in zip((stats.mean, stats.var, stats.count), views, strict=True))
    assert views[0].tolist() == filled(2).mean.tolist()


def test_statistics_from_inference_rows_do_not_poison_autograd() -> None:
    stats = RunningMeanStd(2)
    with torch.inference_mode():
        rows = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    stats.update(rows)
    inputs = torch.ones(1, 2, requires_grad=True)
    stats(inputs).sum().backward()
    assert inputs.grad is not None


def test_running_mean_std_continues_bit_exactly_after_a_round_trip() -> None:
    original, resumed = filled(), RunningMeanStd(3)
    resumed.load_state_dict(original.state_dict())
    more = torch.randn(11, 3, generator=torch.Generator().manual_seed(5))
    original.update(more)
    resumed.update(more)
    assert all(torch.equal(original.state_dict()[key], resumed.state_dict()[key]) for key in ("mean", "var", "count"))


def test_normalized_rows_are_centred_scaled_and_limited() -> None:
    rows = torch.randn(5000, 2, generator=torch.Generator().manual_seed(2)) * torch.tensor([0.1, 40.0]) + 7
    stats = RunningMeanStd(2)
    stats.update(rows)
    out = stats(rows)
    assert out.dtype == rows.dtype
    assert torch.allclose(out.mean(0), torch.zeros(2), atol=1e-3)
    assert torch.allclose(out.std(0), torch.ones(2), atol=1e-2)
    assert stats(torch.tensor([[1e9, -1e9]])).tolist() == [[10.0, -10.0]]


def test_wrong_shape_or_keys_are_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch for mean"):
        filled(3).load_state_dict(filled(2).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        filled().load_state_dict({"mean": torch.zeros(3)})
    with pytest.raises(ValueError, match="expected keys mean, m2, count"):
        RewardNormalizer().load_state_dict({"mean": 0.0, "var": 1.0, "count": 0})
    with pytest.raises(ValueError, match="m2 >= 0"):
        RewardNormalizer().load_state_dict({"mean": 0.0, "m2": -1.0, "count": 2})


@given(rewards_lists)
def test_reward_statistics_match_a_direct_computation(rewards: list[float]) -> None:
    normalizer = RewardNormalizer()
    normalizer.update(rewards)
    assert set(normalizer.state_dict()) == {"mean", "m2", "count"}
    assert normalizer.count == len(rewards)
    assert math.isclose(normalizer.mean, float(np.mean(rewards)), abs_tol=1e-9)
    assert math.isclose(normalizer.m2, float(np.var(rewards) * len(rewards)), rel_tol=1e-6, abs_tol=1e-6)


@given(rewards_lists, st.lists(st.floats(-5, 5), min_size=1, max_size=10))
def test_reward_normalizer_continues_bit_exactly_through_json(first: list[float], second: list[float]) -> None:
    original, resumed = RewardNormalizer(), RewardNormalizer()
    original.update(first)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert [original.update_and_normalize(r) for r in second] == [resumed.update_and_normalize(r) for r in second]
    assert original.state_dict() == resumed.state_dict()


@given(rewards_lists, rewards_lists)
def test_the_scale_is_frozen_unless_samples_are_added(seen: list[float], round_rewards: list[float]) -> None:
    normalizer = RewardNormalizer()
    normalizer.update(seen)
    scale = normalizer.scale
    scaled = [normalizer.normalize_only(r) for r in round_rewards]
    assert normalizer.scale == scale
    assert scaled == [max(-REWARD_LIMIT, min(REWARD_LIMIT, r / scale)) for r in round_rewards]


def test_nothing_is_subtracted() -> None:
    normalizer = RewardNormalizer()
    normalizer.update([3.0, 3.0, 3.0])
    assert normalizer.normalize_only(0.0) == 0.0
    assert normalizer.normalize_only(3.0) == pytest.approx(1.0)
    assert normalizer.normalize_only(-3.0) == -normalizer.normalize_only(3.0)


def test_small_rewards_are_not_magnified_beyond_the_least_scale() -> None:
    normalizer = RewardNormalizer()
    assert normalizer.normalize_only(0.5) == 0.5
    for size in (0.0, 1e-9, 0.01):
        normalizer.update([size, -size])
        assert normalizer.normalize_only(0.5) == 0.5 / MIN_REWARD_SCALE
    normalizer.update([100.0])
    assert normalizer.normalize_only(0.5) < 0.5


def test_limited_rewards_are_counted() -> None:
    normalizer = RewardNormalizer()
    normalizer.update([1.0, -1.0])
    assert normalizer.normalize_only(50.0) == REWARD_LIMIT
    assert normalizer.normalize_only(-50.0) == -REWARD_LIMIT
    assert normalizer.num_clipped == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_a_reward_that_would_leave_no_scale_is_refused_whole(bad: float) -> None:
    normalizer = RewardNormalizer()
    normalizer.update([1.0, -2.0])
    before = normalizer.state_dict()
    with pytest.raises(ValueError, match="expected rewards whose squares are finite"):
        normalizer.update([3.0, bad, 4.0])
    assert normalizer.state_dict() == before
    with pytest.raises(ValueError, match="expected rewards whose squares are finite"):
        RewardNormalizer().update([bad])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_not_limited_but_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="expected a finite reward, got"):
        RewardNormalizer().normalize_only(bad)


def test_many_rewards_at_once_are_scaled_limited_and_counted_like_single_ones() -> None:
    one_by_one, at_once = RewardNormalizer(), RewardNormalizer()
    for normalizer in (one_by_one, at_once):
        normalizer.update([1.0, -1.0])
    rewards = torch.tensor([[0.5, -20.0], [30.0, 10.0]])
    singles = [one_by_one.normalize_only(reward) for reward in rewards.flatten().tolist()]
    assert at_once.normalize_only(rewards).flatten().tolist() == singles == [0.5, -10.0, 10.0, 10.0]
    assert at_once.num_clipped == one_by_one.num_clipped == 2
