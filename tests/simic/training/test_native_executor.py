"""The native executor behind the engine: memory shared with torch, the same bits beside any env, faults as in torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint
from esper.leyline import BLENDS, Cause, EpisodeSeed, SeedStage
from esper.simic.training import native_executor
from esper.simic.training.epoch_metrics import plan_coalitions
from esper.simic.training.native_executor import NativeExecutor, seat_of
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.tolaria.batches import Batch
from esper.tolaria.runtime import Placement
from tests.simic.training.lives import CPU, open_world
from tests.tolaria.worlds import tiny_task, torch_executor

NATIVE = NativeExecutor()


@pytest.fixture(scope="module")
def worker():
    return open_world(replace(tiny_task("digits_conv"), slots=("r0c0", "r1c0", "r2c0", "r0c1", "r3c1")))


@pytest.fixture(scope="module")
def mlp_worker():
    return open_world(replace(tiny_task("digits_mlp"), slots=("r0c0", "r0c1", "r2c0", "r3c0")))


def env_of(worker, env_id: int = 0) -> ParallelEnvState:
    worker.reset([EpisodeSeed(env_id=env_id, episode=0, run_seed=0)])
    return worker.envs[env_id]


def plant(env: ParallelEnvState, slot_id: str, blueprint: str, stage: SeedStage, blend: str = "linear") -> None:
    env.model.germinate(slot_id, blueprint, blend, 5)
    slot = env.model.slot(slot_id)
    for target in (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING):
        slot.transition(target, Cause.AUTO)
        if target is SeedStage.BLENDING:
            slot.ramp()
        if target is stage:
            break
    with torch.no_grad():
        slot.seed.gamma.fill_(0.2)
    env.plan = plan_coalitions(env.model)


def batches(count: int = 3, rows: int = 24, seed: int = 0) -> Iterator[dict[torch.device, Batch]]:
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        inputs = torch.randn(rows, 1, 8, 8, generator=generator)
        targets = torch.randint(0, 10, (rows,), generator=generator)
        yield {CPU: Batch(index=index, inputs=inputs, targets=targets)}


def epoch(executor, envs: list[ParallelEnvState], rows: list[dict[torch.device, Batch]] | None = None) -> None:
    """One epoch as the engine does it, up to the numbers."""
    for env in envs:
        env.epoch = 0 if env.epoch is None else env.epoch + 1
        assert executor.supports(env)
        env.begin_training()
    executor.train(envs, iter(list(batches()) if rows is None else rows))
    for env in envs:
        env.begin_validation()
    executor.validate(envs, batches(2, 40, seed=9))
    for env in envs:
        env.judge(env.numbers().tolist())


def state(env: ParallelEnvState) -> dict[str, Tensor]:
    own = env.model.state_dict() | env.optimizer.named_state() | {"numbers": env.numbers()}
    return {name: value.clone() for name, value in own.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


# ---- every row of the table of blueprints


@pytest.mark.parametrize("operator", sorted({blend.operator for blend in BLENDS.values()}))
@pytest.mark.parametrize("key", [key for key, row in BLUEPRINTS.items() if row.topology in ("cnn", "mlp")])
def test_every_blueprint_and_blend_runs_natively(worker, mlp_worker, key, operator):
    env = env_of(worker if BLUEPRINTS[key].topology == "cnn" else mlp_worker)
    blend = next(name for name, row in BLENDS.items() if row.operator == operator)
    slots = [slot_id for slot_id in env.model.slots if BLUEPRINTS[key].fits_in(env.model.slot(slot_id).spec)]
    if not slots:
        pytest.skip("fits nowhere in this host")
    for slot_id, stage in zip(slots, (SeedStage.TRAINING, SeedStage.BLENDING), strict=False):
        if env.model.layout.card(slot_id, key).fits:
            plant(env, slot_id, key, stage, blend)
    assert NATIVE.why_not(env) is None


# ---- independence


def test_an_env_does_not_depend_on_those_beside_it(worker):
    def fresh() -> list[ParallelEnvState]:
        worker.reset([EpisodeSeed(env_id=env_id, episode=0, run_seed=0) for env_id in range(3)])
        envs = [worker.envs[env_id] for env_id in range(3)]
        plant(envs[1], "r0c0", "cnn.se", SeedStage.TRAINING)
        plant(envs[2], "r0c1", "cnn.se", SeedStage.HOLDING, "gated")
        return envs

    together = fresh()
    for _ in range(2):
        epoch(NativeExecutor(), together)
    backwards = fresh()
    alone = NativeExecutor()
    for _ in range(2):
        for env in reversed(backwards):
            epoch(alone, [env])
    for first, second in zip(together, backwards, strict=True):
        assert same(state(first), state(second))


def test_how_many_batches_are_laid_out_at_a_time_changes_no_bit(worker, monkeypatch):
    results = []
    for size in (16_000_000, 1):
        monkeypatch.setattr(native_executor, "CHUNK_BYTES", size)
        env = env_of(worker)
        plant(env, "r0c0", "cnn.se", SeedStage.TRAINING)
        epoch(NativeExecutor(), [env])
        results.append(state(env))
    assert same(*results)


def test_a_restored_env_goes_on_to_the_same_bits(worker):
    env = env_of(worker)
    plant(env, "r0c0", "cnn.se", SeedStage.TRAINING)
    plant(env, "r1c0", "cnn.norm" if "cnn.norm" in BLUEPRINTS else "cnn.norm_bn", SeedStage.BLENDING)
    epoch(NATIVE, [env])
    env.signals = env.tracker.update(1.0, 50.0)
    kept = env.capture()
    epoch(NATIVE, [env])
    truth = state(env)
    env.model.prune("r1c0", Cause.AUTO)
    env.plan = plan_coalitions(env.model)
    epoch(NATIVE, [env])
    env.restore(kept)
    assert not same(state(env), truth)
    epoch(NATIVE, [env])
    assert same(state(env), truth)


def test_torch_sees_and_changes_the_memory_that_is_trained(worker):
    env = env_of(worker)
    epoch(NATIVE, [env])
    seat = seat_of(env)
    assert seat_of(env) is seat
    weight = env.model.host.segments[0][1].weight
    assert weight.data_ptr() == seat.params.ctypes.data
    with torch.no_grad():
        weight.zero_()
    assert not seat.params[: weight.numel()].any()
    epoch(torch_executor(worker), [env])
    assert seat_of(env) is seat, "torch has trained it in place"


def test_gradients_in_detail_are_those_of_the_last_batch_before_clipping(worker):
    found = {}
    for executor in (torch_executor(worker), NATIVE):
        env = env_of(worker)
        plant(env, "r0c0", "cnn.se", SeedStage.HOLDING)
        env.gradient_detail = True
        epoch(executor, [env])
        found[executor] = {layer.name: layer for layer in env.layer_gradients}
    first, second = found.values()
    assert first.keys() == second.keys()
    assert len(first) > 5
    for name, layer in first.items():
        assert second[name].norm == pytest.approx(layer.norm, rel=1e-2, abs=1e-5)
        assert second[name].num_elements == layer.num_elements


# ---- numbers that are none


def broken(inputs: Tensor) -> list[dict[torch.device, Batch]]:
    rows = list(batches())
    rows[1] = {CPU: Batch(index=1, inputs=inputs.expand(24, 1, 8, 8).clone(), targets=rows[1][CPU].targets)}
    return rows


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_no_numbers_make_a_panic_as_in_torch(worker, value):
    for executor in (torch_executor(worker), NATIVE):
        env = env_of(worker)
        epoch(executor, [env])
        env.epoch += 1
        env.begin_training()
        executor.train([env], iter(broken(torch.tensor(value))))
        env.begin_validation()
        executor.validate([env], batches(2, 40, seed=9))
        verdict = env.judge(env.numbers().tolist())
        assert verdict.reason is not None
        assert verdict.reason.value == "nonfinite", executor


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_seed_is_left_out_and_counted_as_in_torch(worker, value):
    seen = []
    for executor in (torch_executor(worker), NATIVE):
        env = env_of(worker)
        plant(env, "r0c0", "cnn.se", SeedStage.TRAINING)
        epoch(executor, [env])  # the first batch only listens
        env.optimizer.finish_epoch()
        before = copy.deepcopy(env.model.slot("r0c0").seed.state_dict())
        with torch.no_grad():
            env.model.slot("r0c0").seed.body.squeeze.weight[0, 0] = value
        epoch(executor, [env])
        evidence = env.optimizer.finish_epoch()
        after = env.model.slot("r0c0").seed.state_dict()
        unchanged = all(torch.equal(v, after[k]) for k, v in before.items() if k != "body.squeeze.weight")
        seen.append((evidence["r0c0"].finite, evidence["host"].finite, env.optimizer.num_skipped, unchanged))
        assert math.isfinite(env.metrics.train_loss)
    assert seen[0] == seen[1] == (False, True, {"r0c0": 3}, True)


def test_a_seed_behind_features_without_gradient_waits_as_in_torch(worker):
    """A head of zeros sends no gradient, so there is no eta; the seed is left out and its meter says nothing."""
    found = []
    for executor in (torch_executor(worker), NATIVE):
        env = env_of(worker)
        plant(env, "r0c1", "cnn.se", SeedStage.TRAINING)
        with torch.no_grad():
            env.model.host.segments[-1][1].weight.zero_()
        env.optimizer.set_lr_factor(0.0)
        env.optimizer.lr = 0.0
        epoch(executor, [env])
        slot = env.model.slot("r0c1")
        evidence = env.optimizer.finish_epoch()["r0c1"]
        found.append((slot.meter.eta_value(), slot.meter.only_listened, slot.meter.finish_epoch(), evidence.finite))
    assert found[0] == found[1] == (None, True, (None, None), False)


def test_targets_that_are_no_class_are_refused(worker):
    env = env_of(worker)
    env.epoch = 0
    env.begin_training()
    inputs, targets = torch.zeros(8, 1, 8, 8), torch.full((8,), 10)
    with pytest.raises(
        ValueError, match=r"targets must be in 0\.\.9, got 0\.\.10|targets must be in 0\.\.9, got 10\.\.10"
    ):
        NATIVE.train([env], iter([{CPU: Batch(index=0, inputs=inputs, targets=targets)}]))


# ---- what is left to torch


class Flipped(nn.Module):
    """An operation that has no native one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


def test_a_blueprint_without_a_native_operation_is_left_to_torch(worker, monkeypatch):
    row = BLUEPRINTS["cnn.se"]
    body = lambda *args: Flipped()  # noqa: E731
    env = env_of(worker)
    plant(env, "r0c0", "cnn.se", SeedStage.TRAINING)
    assert NATIVE.supports(env)
    env.model.slot("r0c0").seed.body = Flipped()
    env.model.slot("r0c0").blueprint = "cnn.flipped"
    monkeypatch.setitem(BLUEPRINTS, "cnn.flipped", Blueprint(**{**fields_of(row), "key": "cnn.flipped", "body": body}))
    assert not NATIVE.supports(env)
    assert NATIVE.why_not(env) == "torch operator aten.flip.default"
    env.model.prune("r0c0", Cause.AUTO)
    assert NATIVE.supports(env)


def fields_of(row: Blueprint) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def test_other_devices_and_mixed_precision_are_left_to_torch(worker):
    env = env_of(worker)
    assert NATIVE.supports(env)
    env.placement = Placement(CPU, dtype=torch.bfloat16)
    assert "mixed precision" in NATIVE.why_not(env)


def test_programs_are_made_once_per_topology(worker, monkeypatch):
    made = []
    real = native_executor._trace_model
    monkeypatch.setattr(native_executor, "_trace_model", lambda *args: made.append(1) or real(*args))
    executor = NativeExecutor()
    worker.reset([EpisodeSeed(env_id=env_id, episode=0, run_seed=0) for env_id in range(3)])
    envs = [worker.envs[env_id] for env_id in range(3)]
    for env in envs:
        plant(env, "r0c0", "cnn.se", SeedStage.BLENDING)
    for _ in range(3):
        epoch(executor, envs)
        for env in envs:
            env.model.slot("r0c0").ramp()
    assert len(made) == 2, "one to train and one to validate, whatever alpha is"
