"""The table of moves is the documented one, and the properties of stages agree with it."""

from __future__ import annotations

import pytest

from esper.leyline import (
    TRANSITIONS,
    Cause,
    LifecycleOp,
    SeedEnded,
    SeedGerminated,
    SeedStage,
    SeedStageChanged,
    SlotTransition,
    TelemetryEventType,
    transition_event,
)

S = SeedStage

DOCUMENTED = {
    (S.DORMANT, S.GERMINATED): LifecycleOp.GERMINATE,
    (S.GERMINATED, S.TRAINING): None,
    (S.GERMINATED, S.PRUNED): None,
    (S.TRAINING, S.BLENDING): LifecycleOp.ADVANCE,
    (S.TRAINING, S.PRUNED): LifecycleOp.PRUNE,
    (S.BLENDING, S.HOLDING): None,
    (S.BLENDING, S.PRUNED): LifecycleOp.PRUNE,
    (S.HOLDING, S.FOSSILIZED): LifecycleOp.FOSSILIZE,
    (S.HOLDING, S.PRUNED): LifecycleOp.PRUNE,
    (S.PRUNED, S.EMBARGOED): None,
    (S.EMBARGOED, S.DORMANT): None,
}


def test_the_table_holds_exactly_the_documented_moves() -> None:
    assert {pair: move.op for pair, move in TRANSITIONS.items()} == DOCUMENTED
    assert all((move.source, move.target) == pair for pair, move in TRANSITIONS.items())


def test_stage_numbers_are_permanent() -> None:
    names = ["DORMANT", "GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED", "EMBARGOED"]
    assert [(stage.name, stage.value) for stage in SeedStage] == list(zip(names, range(8), strict=True))


def test_fossils_stay_and_every_other_stage_has_a_way_on() -> None:
    leavable = {source for source, _ in TRANSITIONS}
    assert set(SeedStage) - leavable == {S.FOSSILIZED}


def test_live_stages_are_those_an_op_can_prune() -> None:
    prunable = {source for (source, target), move in TRANSITIONS.items() if target is S.PRUNED and move.op is not None}
    assert {stage for stage in SeedStage if stage.is_live} == prunable


def test_blended_stages_are_those_after_advance() -> None:
    assert {stage for stage in SeedStage if stage.is_blended} == {S.BLENDING, S.HOLDING, S.FOSSILIZED}
    assert {stage for stage in SeedStage if stage.has_seed} == {
        S.GERMINATED,
        S.TRAINING,
        S.BLENDING,
        S.HOLDING,
        S.FOSSILIZED,
    }


@pytest.mark.parametrize(("source", "target"), DOCUMENTED)
def test_every_move_becomes_one_event_of_its_kind(source: SeedStage, target: SeedStage) -> None:
    gone = source in (S.PRUNED, S.EMBARGOED)
    move = SlotTransition(
        slot_id="r0c1",
        seed_id="r0c1.2",
        source=source,
        target=target,
        cause=Cause.AUTO,
        alpha=0.25,
        epochs_in_stage=3,
        age_epochs=9,
        blueprint=None if gone else "cnn.conv",
        blend=None if gone else "linear",
        params=70,
        contribution_pp=1.5,
    )
    event = transition_event(move, episode=4, env=5, epoch=6)
    assert (event.round, event.episode, event.env, event.epoch) == (None, 4, 5, 6)
    data = event.data
    if target is S.GERMINATED:
        assert event.type is TelemetryEventType.SEED_GERMINATED
        assert isinstance(data, SeedGerminated)
        assert (data.blueprint, data.blend, data.params) == ("cnn.conv", "linear", 70)
    elif target in (S.FOSSILIZED, S.PRUNED):
        assert event.type.value == f"SEED_{target.name}"
        assert isinstance(data, SeedEnded)
        assert (data.epochs_total, data.contribution_pp, data.params) == (9, 1.5, 70)
    else:
        assert event.type is TelemetryEventType.SEED_STAGE_CHANGED
        assert isinstance(data, SeedStageChanged)
        assert (data.from_stage, data.to_stage, data.alpha_share, data.epochs_in_stage) == (
            source.name,
            target.name,
            0.25,
            3,
        )
    assert (data.seed_id, data.slot_id) == ("r0c1.2", "r0c1")
