"""Two known answers: where a seed with sight must help a blind host, and where no seed can."""

from __future__ import annotations

import pytest
import torch

from esper.leyline import BLENDS, DEFAULT_LIFECYCLE, LifecycleOp, SeedStage
from tests.growing import (
    ADAMW,
    Run,
    blind_host,
    grow_to,
    module_bits,
    num_correct,
    optimizer_bits,
    start,
    step,
    striped_batches,
)

EPOCHS = 20


def blind_run(blueprints: list[str] | None = None) -> Run:
    run = start(
        "cnn", ADAMW, DEFAULT_LIFECYCLE, host=blind_host(), blueprints=blueprints, batches=striped_batches(6, 32)
    )
    run.validation = striped_batches(4, 32, rng_seed=99)
    return run


def accuracy_pct(run: Run) -> float:
    run.model.eval()
    with torch.no_grad():
        correct = sum(num_correct(run.model(x), y) for x, y in run.validation)
    return 100.0 * correct / sum(len(y) for _, y in run.validation)


def after_growing(blueprint: str | None) -> float:
    run = blind_run()
    if blueprint is not None:
        grow_to(run, "r0c0", "HOLDING", blueprint)
    while run.epochs_done < EPOCHS:
        step(run)
    return accuracy_pct(run)


def test_only_a_seed_that_sees_neighbours_helps_a_blind_host() -> None:
    waiting, pointwise, conv = (after_growing(blueprint) for blueprint in (None, "cnn.pointwise", "cnn.conv"))
    assert conv - waiting > 40.0
    assert conv - pointwise > 40.0


def test_the_audition_tells_sight_from_blindness() -> None:
    """The forecast of two training epochs, with the host untouched, ranks the blueprints as growing them would."""
    gains = {}
    for blueprint in ("cnn.pointwise", "cnn.norm", "cnn.conv", "cnn.conv_deep"):
        run = blind_run()
        grow_to(run, "r0c0", "TRAINING", blueprint)
        for _ in range(4):
            step(run)
        gain = run.model.reports()[0].predicted_gain
        assert gain is not None
        gains[blueprint] = gain
    assert min(gains["cnn.conv"], gains["cnn.conv_deep"]) > 3 * max(gains["cnn.pointwise"], gains["cnn.norm"], 1e-4)


@pytest.mark.parametrize("blend", ["linear_fast", "gated", "multiply"])
def test_an_inert_seed_passes_every_gate_and_changes_no_bit(blend: str) -> None:
    waiting, inert = blind_run(), blind_run(["cnn.inert"])
    grow_to(inert, "r0c0", "HOLDING", "cnn.inert", blend)
    step(inert, LifecycleOp.FOSSILIZE, "r0c0")
    step(inert)
    while waiting.epochs_done < inert.epochs_done:
        step(waiting)
    assert inert.epochs_done == BLENDS[blend].ramp_epochs + 3
    slot = inert.model.slot("r0c0")
    assert slot.stage is SeedStage.FOSSILIZED
    assert slot.measured.contribution_pp == 0.0
    assert slot.measured.live_fraction is not None
    assert slot.measured.live_fraction >= 0.5
    assert module_bits(inert.model.host) == module_bits(waiting.model.host)
    assert optimizer_bits(inert.optimizer, "host.") == optimizer_bits(waiting.optimizer)
    assert inert.model.val_loss == waiting.model.val_loss
