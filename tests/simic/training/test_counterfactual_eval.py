"""The coalition table equals one pass per coalition, and everything said about seeds can be read from it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from esper.kasmina import BLUEPRINTS, HostSpec
from esper.leyline import BLENDS, CoalitionTable, SeedStage, attribute, wait
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.simic.training.counterfactual_eval import points
from esper.simic.training.epoch_metrics import (
    VALIDATION,
    measure,
    most_coalitions,
    plan_coalitions,
    read_metrics,
    write_metrics,
)
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.simic.training.rollout import episode_seeds
from tests.tolaria.worlds import OPEN_GATES, act, engine, tiny_task

BLUEPRINT = {"mlp": "mlp.mlp", "cnn": "cnn.conv", "transformer": "transformer.conv_causal"}
MLP_5 = HostSpec(kind="mlp", kwargs={"inputs": 64, "hidden": [12, 12, 12, 12], "classes": 10, "input_slot": True})
CNN_5 = HostSpec(
    kind="cnn",
    kwargs={"in_channels": 1, "channels": [4, 4, 4], "kernel": 3, "pool": [True, True, False], "classes": 10},
)
LM_3 = HostSpec(kind="transformer", kwargs={"vocab": 256, "dim": 16, "heads": 2, "layers": 3, "ff": 2, "context": 64})


def host_task(topology: str) -> TaskSpec:
    if topology == "mlp":
        return tiny_task("digits_mlp", host=MLP_5, slots=tuple(f"r0c{i}" for i in range(5)))
    if topology == "cnn":
        return tiny_task("digits_conv", host=CNN_5, slots=("r0c0", "r1c0", "r0c1", "r1c1", "r0c2"))
    small = {"samples_per_epoch": 64, "batch_size": 32, "val_samples": 20, "val_chunk_rows": 16}
    return tiny_task("pydoc_lm", host=LM_3, slots=("r0c0", "r0c1", "r0c2"), **small)


def grown(topology: str, num_seeds: int, blend: str) -> ParallelEnvState:
    """An env with this many blended seeds, the first of them kept."""
    task = replace(host_task(topology), horizon=12, lifecycle=replace(OPEN_GATES, max_live=5))
    worker = engine(task)
    worker.reset(episode_seeds(7, 3, 1))
    env = worker.envs[0]
    for slot in task.slots[:num_seeds]:
        worker.step([act(0, "GERMINATE", slot, BLUEPRINT[topology], blend)])
        worker.step([act(0, "ADVANCE", slot)])
    if num_seeds:
        env.model.slot(task.slots[0]).stage = SeedStage.FOSSILIZED
        env.plan = plan_coalitions(env.model)
    worker.step([wait(0)])
    return env


CASES = [
    *itertools.product(("mlp", "cnn"), range(6), ("linear",)),
    *itertools.product(("transformer",), range(4), ("linear",)),
    *itertools.product(("mlp", "cnn", "transformer"), (3,), ("gated", "multiply")),
]


@pytest.mark.parametrize(("topology", "num_seeds", "blend"), CASES)
def test_the_table_equals_one_pass_per_coalition(topology: str, num_seeds: int, blend: str) -> None:
    env = grown(topology, num_seeds, blend)
    table = env.metrics.table  # type: ignore[union-attr]
    assert len(table.slot_ids) == num_seeds
    expected_masks = 2**num_seeds if num_seeds <= 3 else num_seeds + 3
    assert len(table.accuracy_pct) == len(table.loss) == expected_masks
    for mask, accuracy in table.accuracy_pct.items():
        on = {slot for i, slot in enumerate(table.slot_ids) if mask >> i & 1}
        loss, correct, rows = one_pass(env, env.rows.val[0].in_order(), on)
        assert accuracy == 100.0 * correct / rows
        assert table.loss[mask] == pytest.approx(loss / rows, rel=1e-6)


def one_pass(env: ParallelEnvState, batches: object, on: set[str]) -> tuple[float, int, int]:
    """Validates with the other seeds taken out of the forward pass by hand."""
    model = env.model.eval()
    off = [slot for slot in model.all_slots() if slot.stage.is_blended and slot.spec.slot_id not in on]
    stages = [slot.stage for slot in off]
    for slot in off:
        slot.stage = SeedStage.DORMANT
    loss, correct, rows = 0.0, 0, 0
    with torch.no_grad():
        for batch in batches:  # type: ignore[attr-defined]
            logits = model(batch.inputs).flatten(0, -2)
            targets = batch.targets.flatten()
            loss += F.cross_entropy(logits, targets, reduction="sum").item()
            correct += int((logits.argmax(-1) == targets).sum())
            rows += targets.numel()
    for slot, stage in zip(off, stages, strict=True):
        slot.stage = stage
    return loss, correct, rows


def test_every_blend_has_an_operator_that_was_tried() -> None:
    tried = {BLENDS[blend].operator for _, _, blend in CASES}
    assert tried == {blend.operator for blend in BLENDS.values()}
    assert {BLUEPRINTS[name].topology for name in BLUEPRINT.values()} == {topology for topology, _, _ in CASES}


def test_the_plan_starts_with_all_seeds_and_lists_each_coalition_once() -> None:
    env = grown("mlp", 5, "linear")
    plan = plan_coalitions(env.model)
    assert plan.coalitions[0] == frozenset(plan.slot_ids)
    assert len(set(plan.masks)) == len(plan.masks) == most_coalitions(5)
    assert frozenset({plan.slot_ids[0]}) in plan.coalitions, "the committed network"
    assert frozenset() in plan.coalitions


def test_sums_are_divided_by_rows_not_by_batches() -> None:
    env = grown("cnn", 0, "linear")
    values = [0.0] * len(env.totals)
    values[VALIDATION], values[VALIDATION + 1] = 30.0, 45.0
    metrics = measure(env.plan, values, train_rows=0, val_rows=90)
    assert (metrics.val_loss, metrics.val_accuracy_pct) == (30.0 / 90, 50.0)
    assert (metrics.train_loss, metrics.train_accuracy_pct) == (None, None)


def test_a_lone_seed_is_worth_the_whole_gain() -> None:
    table = make_table(1, {0: 50.0, 1: 80.0})
    (seed,) = attribute(table, table.accuracy_pct).values()
    assert (seed.contribution_pp, seed.solo_pp, seed.interaction_pp) == (30.0, 30.0, 0.0)


def test_what_was_not_measured_is_none() -> None:
    table = make_table(4, {0b1111: 90.0, 0b0000: 50.0, 0b0111: 80.0, 0b1011: 85.0, 0b1101: 88.0, 0b1110: 89.0})
    worth = attribute(table, table.accuracy_pct)
    assert worth["r0c3"].contribution_pp == 10.0
    assert worth["r0c3"].solo_pp is None
    assert worth["r0c3"].interaction_pp is None


def make_table(count: int, values: dict[int, float]) -> CoalitionTable:
    slots = tuple(f"r0c{i}" for i in range(count))
    return CoalitionTable(slot_ids=slots, accuracy_pct=values, loss=dict.fromkeys(values, 1.0))


def test_points_are_accuracy_or_the_way_from_knowing_nothing() -> None:
    images, text = get_task_spec("digits_mlp"), get_task_spec("pydoc_lm")
    chance = text.chance_loss
    table = CoalitionTable(slot_ids=("r0c0",), accuracy_pct={0: 10.0, 1: 60.0}, loss={0: chance, 1: 0.5 * chance})
    assert points(images, table) == {0: 10.0, 1: 60.0}
    assert points(text, table) == {0: 0.0, 1: pytest.approx(50.0)}
    worse = CoalitionTable(slot_ids=(), accuracy_pct={0: 0.0}, loss={0: 9 * chance})
    assert points(text, worse) == {0: -100.0}


def test_metrics_survive_json() -> None:
    env = grown("cnn", 3, "linear")
    assert env.metrics is not None
    assert read_metrics(write_metrics(env.metrics)) == env.metrics
