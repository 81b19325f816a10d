"""Mixed precision on the CPU: every blueprint in both number types, and the loss scaler through its whole life.

The number types are those of `amp`, which the commands refuse on a CPU because it gains nothing there: everything is
tested but the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from esper.kasmina import BLUEPRINTS, MorphogeneticModel, begin_epoch
from esper.kasmina.flat import flat_stations
from esper.kasmina.model import Station
from esper.leyline import SeedStage, wait
from esper.simic.training.batch_ops import process_train_batch
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.simic.training.rollout import episode_seeds
from esper.tolaria import engine as engine_module
from esper.tolaria.batches import Batch
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.optim import GrowingOptimizer
from esper.tolaria.runtime import Placement
from tests.growing import TOPOLOGIES, Run, make_batches, module_bits, run_bits, start
from tests.tolaria import worlds
from tests.tolaria.worlds import engine, spoil_weights

CPU = torch.device("cpu")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
both = pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)


@dataclass
class Recipe:
    """What a training batch asks of what envs share."""

    objective: None = None


@dataclass
class Env:
    """What a training batch asks of an env."""

    model: MorphogeneticModel
    optimizer: GrowingOptimizer
    placement: Placement
    recipe: Recipe = field(default_factory=Recipe)
    train_loss_sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    train_correct: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    train_rows: int = 0

    def stations(self) -> list[Station]:
        return flat_stations(self.model)


def train(run: Run, placement: Placement, epochs: int = 1) -> float:
    """Mean training loss of some epochs."""
    env = Env(run.model, run.optimizer, placement)
    run.model.train()
    for _ in range(epochs):
        for index, (inputs, targets) in enumerate(run.batches):
            process_train_batch(env, Batch(index=index, inputs=inputs, targets=targets))  # type: ignore[arg-type]
    return float(env.train_loss_sum) / env.train_rows


def planted(topology: str, *blueprints: str) -> Run:
    spans, batches = None, make_batches(topology)
    if any(BLUEPRINTS[key].span for key in blueprints):
        spans = ["r2c0"]
    if any(key.startswith("cnn.span_net") for key in blueprints):  # to the logits, from images that can be pooled twice
        spans = ["r3c0"]
        batches = [(functional.interpolate(images, size=8), targets) for images, targets in batches]
    run = start(topology, slots=spans, blueprints=list(blueprints) or None, batches=batches)
    for slot_id, blueprint in zip(run.slot_ids, blueprints, strict=False):
        run.model.germinate(slot_id, blueprint, "linear_fast", rng_seed=3)
    begin_epoch(run.model)
    return run


# ---- number types


@both
@pytest.mark.parametrize("blueprint", BLUEPRINTS)
def test_every_blueprint_trains_and_blends(blueprint: str, dtype: torch.dtype) -> None:
    run, full = (planted(blueprint.partition(".")[0], blueprint) for _ in range(2))
    slot, placement = run.model.slot(run.slot_ids[0]), Placement(CPU, dtype=dtype)
    before = module_bits(slot)
    loss, expected = train(run, placement, 2), train(full, Placement(CPU), 2)
    assert loss == pytest.approx(expected, rel=0.05)
    assert module_bits(slot) != before
    assert all(parameter.dtype is torch.float32 for parameter in run.model.parameters())
    assert slot.meter is not None
    assert full.model.slot(run.slot_ids[0]).meter is not None
    eta = full.model.slot(run.slot_ids[0]).meter.eta_value()  # type: ignore[union-attr]
    assert slot.meter.eta_value() == pytest.approx(eta, rel=0.1)
    gain, ratio = slot.meter.finish_epoch()
    assert gain is not None
    assert ratio is not None
    assert math.isfinite(gain)
    assert all(evidence.finite for evidence in run.optimizer.finish_epoch().values())
    slot.stage, slot.alpha = SeedStage.BLENDING, 0.5
    blended = module_bits(slot)
    assert math.isfinite(train(run, placement))
    assert module_bits(slot) != blended
    assert run.optimizer.num_skipped == {}


@both
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_training_seed_does_not_change_the_host(topology: str, dtype: torch.dtype) -> None:
    first = next(key for key in BLUEPRINTS if key.startswith(f"{topology}."))
    alone, grown = start(topology), planted(topology, first)
    assert train(alone, Placement(CPU, dtype=dtype)) == train(grown, Placement(CPU, dtype=dtype))
    assert module_bits(alone.model.host) == module_bits(grown.model.host)


def test_losses_are_computed_in_full_precision() -> None:
    run = planted("mlp")
    env = Env(run.model, run.optimizer, Placement(CPU, dtype=torch.bfloat16))
    inputs, targets = run.batches[0]
    run.model.train()
    with env.placement.autocast():
        logits = run.model(inputs)
    assert logits.dtype is torch.bfloat16
    expected = torch.nn.functional.cross_entropy(logits.float(), targets)
    process_train_batch(env, Batch(index=0, inputs=inputs, targets=targets))  # type: ignore[arg-type]
    assert float(env.train_loss_sum) / env.train_rows == pytest.approx(expected.item(), rel=1e-6)


# ---- the loss scaler


def scaled() -> Placement:
    return Placement(CPU, dtype=torch.float16)


def test_only_fp16_scales_the_loss() -> None:
    assert Placement(CPU).scaler is None
    assert Placement(CPU, dtype=torch.bfloat16).scaler is None
    assert scaled().scaler is not None


def test_an_overflow_leaves_the_host_as_it_was_and_halves_the_scale() -> None:
    run, placement = start("mlp"), scaled()
    assert placement.scaler is not None
    train(run, placement)
    placement.scaler.scale.fill_(1e38)
    before, run.batches = run_bits(run), run.batches[:1]
    train(run, placement)
    assert run_bits(run) == before
    assert placement.scaler.scale.item() == pytest.approx(5e37)
    placement.scaler.scale.fill_(1024.0)
    train(run, placement)
    assert run_bits(run) != before
    assert placement.scaler.scale.item() == 1024.0
    run.optimizer.finish_epoch()
    assert run.optimizer.num_skipped == {"host": 1}


def test_a_broken_seed_neither_stops_the_host_nor_lowers_the_scale() -> None:
    run, placement = planted("mlp", "mlp.glu"), scaled()
    alone, other = start("mlp"), scaled()
    with torch.no_grad():
        run.model.slot(run.slot_ids[0]).get_parameter("seed.gamma").fill_(math.nan)
    train(run, placement, 2)
    train(alone, other, 2)
    assert module_bits(run.model.host) == module_bits(alone.model.host)
    assert placement.scaler is not None
    assert placement.scaler.scale.item() == 65536.0
    run.optimizer.finish_epoch()
    assert run.optimizer.num_skipped == {run.slot_ids[0]: 2 * len(run.batches) - 1}, "it only listens to the first"


def test_the_scale_doubles_after_two_thousand_good_updates() -> None:
    scaler = scaled().scaler
    assert scaler is not None
    for _ in range(2000):
        assert scaler.scale.item() == 65536.0
        scaler.update(torch.zeros(()))
    assert scaler.scale.item() == 131072.0


# ---- in the engine


@pytest.fixture
def fp16_engine(monkeypatch: pytest.MonkeyPatch) -> VectorizedEngine[ParallelEnvState]:
    monkeypatch.setattr(engine_module, "make_placement", lambda device, amp: scaled())
    return engine()


def scale(worker: VectorizedEngine[ParallelEnvState]) -> float:
    scaler = worker.envs[0].placement.scaler
    assert scaler is not None
    return scaler.scale.item()


def test_the_scale_travels_with_a_snapshot(fp16_engine: VectorizedEngine[ParallelEnvState]) -> None:
    worker = fp16_engine
    worker.reset(episode_seeds(7, 3, 1))
    worker.envs[0].placement.scaler.scale.fill_(1e38)  # type: ignore[union-attr]
    worker.step([wait(0)])
    moved, packed = scale(worker), worker.snapshot()
    assert moved < 1e38
    seen = [worlds.facts(worker.step([wait(0)])) for _ in range(2)]
    end = worlds.digest(worker)
    worker.restore(packed)
    assert scale(worker) == pytest.approx(moved)
    assert [worlds.facts(worker.step([wait(0)])) for _ in range(2)] == seen
    assert worlds.digest(worker) == end


def test_a_rollback_restores_the_scale(fp16_engine: VectorizedEngine[ParallelEnvState]) -> None:
    worker = fp16_engine
    worker.reset(episode_seeds(7, 3, 1))
    kept = scale(worker)
    worker.envs[0].placement.scaler.scale.fill_(8.0)  # type: ignore[union-attr]
    spoil_weights(worker.envs[0])
    (report,) = worker.step([wait(0)]).reports.values()
    assert report.rollback_reason is not None
    assert scale(worker) == kept
