"""The life of a seed, epoch by epoch: every dwell time, every counter, and nothing outside the table."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina import EpochMeasurement, advance_active_seed, begin_epoch, end_epoch
from esper.kasmina.slot import UNMEASURED
from esper.leyline import (
    BLENDS,
    TRANSITIONS,
    BlendSpec,
    Cause,
    GradientEvidence,
    IllegalOperation,
    LifecycleOp,
    SeedStage,
    SlotTransition,
    gate_blend,
    gate_fossilize,
    gate_germinate,
    gate_prune,
)
from tests.growing import (
    LENIENT,
    ONE_BLUEPRINT,
    OPTIMIZERS,
    TOPOLOGIES,
    Run,
    assert_optimizer_matches,
    bits,
    germinate,
    grow_to,
    make_batches,
    module_bits,
    optimizer_bits,
    run_bits,
    start,
    step,
    train_batch,
    train_epoch,
)

SLOT = "r0c1"
S = SeedStage


def quick(topology: str = "mlp", **limits: object) -> Run:
    """A run of two small batches per epoch."""
    lifecycle = replace(LENIENT, **limits)  # type: ignore[arg-type]
    return start(topology, lifecycle=lifecycle, batches=make_batches(topology, 2, rows=8))


def state(run: Run, slot: str = SLOT) -> tuple[SeedStage, int, int, float]:
    report = next(r for r in run.model.reports() if r.slot_id == slot)
    return report.stage, report.epochs_in_stage, report.age_epochs, report.alpha


def names(moves: list[SlotTransition]) -> list[tuple[str, str, str]]:
    return [(move.source.name, move.target.name, move.cause.value) for move in moves]


# ---- dwell times


@pytest.mark.parametrize("blend", BLENDS.values(), ids=BLENDS)
def test_the_fastest_life_takes_the_documented_epochs(blend: BlendSpec) -> None:
    run = quick()
    moves = germinate(run, SLOT, blend=blend.name)
    assert names(moves) == [("DORMANT", "GERMINATED", "policy"), ("GERMINATED", "TRAINING", "auto")]
    assert state(run) == (S.TRAINING, 1, 1, 0.0)
    assert names(step(run, LifecycleOp.ADVANCE, SLOT)) == [("TRAINING", "BLENDING", "policy")]
    for done in range(1, blend.ramp_epochs):
        assert state(run) == (S.BLENDING, done, 1 + done, blend.alpha(done))
        moves = step(run)
    age = 1 + blend.ramp_epochs
    assert names(moves) == [("BLENDING", "HOLDING", "auto")]
    assert moves[0].epochs_in_stage == blend.ramp_epochs
    assert state(run) == (S.HOLDING, 0, age, 1.0)
    step(run)
    assert state(run) == (S.HOLDING, 1, age + 1, 1.0)
    moves = step(run, LifecycleOp.FOSSILIZE, SLOT)
    assert names(moves) == [("HOLDING", "FOSSILIZED", "policy")]
    assert (moves[0].epochs_in_stage, moves[0].age_epochs) == (1, age + 1)
    assert state(run) == (S.FOSSILIZED, 1, age + 2, 1.0)
    step(run)
    assert state(run) == (S.FOSSILIZED, 2, age + 3, 1.0)


@pytest.mark.parametrize("embargo", [1, 3, 5])
def test_an_embargo_lasts_exactly_its_epochs(embargo: int) -> None:
    run = quick(embargo=embargo)
    germinate(run, SLOT)
    moves = step(run, LifecycleOp.PRUNE, SLOT)
    assert names(moves) == [("TRAINING", "PRUNED", "policy"), ("PRUNED", "EMBARGOED", "auto")]
    assert [move.epochs_in_stage for move in moves] == [1, 1]
    for rested in range(embargo):
        assert state(run) == (S.EMBARGOED, rested, 0, 0.0)
        with pytest.raises(IllegalOperation, match="G0 refuses: stage"):
            germinate(run, SLOT)
        moves = step(run)
    assert names(moves) == [("EMBARGOED", "DORMANT", "auto")]
    assert state(run) == (S.DORMANT, 0, 0, 0.0)
    germinate(run, SLOT)
    assert state(run) == (S.TRAINING, 1, 1, 0.0)


def test_a_seed_trains_at_least_its_minimum_and_as_long_as_it_likes() -> None:
    run = quick(min_training=3)
    germinate(run, SLOT)
    for _ in range(2):
        assert not advance_active_seed(run.model, SLOT)
        with pytest.raises(IllegalOperation, match="epochs_in_stage"):
            run.model.advance(SLOT)
        step(run)
    for _ in range(4):
        assert state(run)[0] is S.TRAINING
        step(run)
    assert advance_active_seed(run.model, SLOT)
    assert run.model.slot(SLOT).stage is S.BLENDING


def test_a_recycled_slot_starts_afresh() -> None:
    run = quick(embargo=1)
    grow_to(run, SLOT, "HOLDING", blend="gated")
    assert run.model.slot(SLOT).measured.contribution_pp is not None
    step(run, LifecycleOp.PRUNE, SLOT)
    assert run.model.slot(SLOT).measured == UNMEASURED
    step(run)
    fresh, first = run.model.slot(SLOT), quick().model.slot(SLOT)
    assert fresh.facts() == first.facts() | {"num_germinations": 1}
    run.model.germinate(SLOT, "mlp.glu", "linear", rng_seed=4)
    assert fresh.facts()["eta"] is None
    assert (fresh.seed_id, fresh.epochs_in_stage, fresh.age_epochs) == (f"{SLOT}.2", 0, 0)


def test_a_blended_network_that_breaks_is_not_held() -> None:
    run = quick()
    germinate(run, SLOT)
    run.model.advance(SLOT)
    for epoch in range(5):
        begin_epoch(run.model)
        _, gradients = train_epoch(run)
        loss = math.inf if epoch < 4 else 1.0
        end_epoch(run.model, EpochMeasurement(train_loss=1.0, val_loss=loss, attributions={}, gradients=gradients))
        assert run.model.slot(SLOT).stage is (S.BLENDING if epoch < 4 else S.HOLDING)
    assert run.model.slot(SLOT).alpha == 1.0


def test_a_seed_outside_the_optimizer_is_pruned_before_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    run = quick()
    run.model.germinate(SLOT, "mlp.glu", "linear", rng_seed=1)
    monkeypatch.setattr(run.optimizer, "holds", lambda params: False)
    assert names(begin_epoch(run.model)) == [("GERMINATED", "PRUNED", "auto")]
    assert run.model.slot(SLOT).seed is None
    assert_optimizer_matches(run)


def test_evidence_not_measured_in_this_epoch_is_none() -> None:
    run = quick()
    germinate(run, SLOT)
    assert run.model.slot(SLOT).measured.predicted_gain is not None
    begin_epoch(run.model)
    end_epoch(run.model, EpochMeasurement(train_loss=1.0, val_loss=1.0, attributions={}, gradients={}))
    assert run.model.slot(SLOT).measured == UNMEASURED
    with pytest.raises(IllegalOperation, match=r"unmeasured:predicted_gain.*unmeasured:live_fraction"):
        run.model.advance(SLOT)


def test_a_contribution_counts_only_for_the_network_it_was_measured_in() -> None:
    run = quick()
    grow_to(run, SLOT, "HOLDING")
    assert gate_fossilize(run.model.report(SLOT), run.model.lifecycle).passed
    run.model.germinate("r0c2", "mlp.glu", "linear", rng_seed=1)
    with pytest.raises(IllegalOperation, match="contribution_current"):
        run.model.fossilize(SLOT)


def test_the_gradient_ratio_is_smoothed() -> None:
    run = quick()
    run.model.germinate(SLOT, "mlp.glu", "linear", rng_seed=1)
    begin_epoch(run.model)
    seen = []
    for own in (4.0, 2.0, 1.0):
        evidence = {
            name: GradientEvidence(finite=True, live_fraction=1.0, norm_per_weight=norm, health=1.0)
            for name, norm in (("host", 2.0), (SLOT, own))
        }
        end_epoch(run.model, EpochMeasurement(train_loss=1.0, val_loss=1.0, attributions={}, gradients=evidence))
        seen.append(run.model.slot(SLOT).measured.grad_ratio)
    assert seen == pytest.approx([2.0, 0.9 * 2.0 + 0.1 * 1.0, 0.9 * 1.9 + 0.1 * 0.5], rel=1e-6)


# ---- illegal moves


@pytest.mark.parametrize("source", [s for s in S if s is not S.PRUNED])
def test_moves_outside_the_table_raise_and_change_nothing(source: SeedStage) -> None:
    run = quick()
    slot = run.model.slot(SLOT)
    if source is S.GERMINATED:
        run.model.germinate(SLOT, "mlp.glu", "linear", rng_seed=1)
    elif source is not S.DORMANT:
        grow_to(run, SLOT, source.name)
    assert slot.stage is source
    before, weights = slot.facts(), module_bits(slot)
    for target in S:
        if (source, target) not in TRANSITIONS:
            with pytest.raises(IllegalOperation, match=f"no move from {source.name} to {target.name}"):
                slot.transition(target, Cause.POLICY)
    assert slot.facts() == before
    assert module_bits(slot) == weights


def test_fossils_cannot_be_pruned_by_anyone() -> None:
    run = quick()
    grow_to(run, SLOT, "FOSSILIZED")
    before = run_bits(run)
    for cause in Cause:
        with pytest.raises(IllegalOperation):
            run.model.prune(SLOT, cause)
    assert run_bits(run) == before
    assert_optimizer_matches(run)


# ---- any sequence of ops


def legal_ops(run: Run) -> list[tuple[LifecycleOp, str]]:
    model, found = run.model, []
    for slot in model.all_slots():
        slot_id = slot.spec.slot_id
        evidence = model.report(slot_id)
        card = model.layout.card(slot_id, ONE_BLUEPRINT[model.host.topology])
        verdicts = {
            LifecycleOp.GERMINATE: gate_germinate(
                slot.stage, card, "gate", model.num_live, model.param_counts().total, model.lifecycle
            ),
            LifecycleOp.ADVANCE: gate_blend(evidence, model.lifecycle),
            LifecycleOp.PRUNE: gate_prune(evidence, model.lifecycle),
            LifecycleOp.FOSSILIZE: gate_fossilize(evidence, model.lifecycle),
        }
        found += [(op, slot_id) for op, verdict in verdicts.items() if verdict.passed]
    return found


def choice(run: Run, op: LifecycleOp, blend: str) -> dict[str, str]:
    if op is not LifecycleOp.GERMINATE:
        return {}
    return {"blueprint": ONE_BLUEPRINT[run.model.host.topology], "blend": blend}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=4)
def test_any_sequence_of_legal_ops_keeps_the_books_straight(topology: str, data: st.DataObject) -> None:
    layout = start(topology).model.layout
    cards = [layout.card(slot_id, ONE_BLUEPRINT[topology]) for slot_id in layout.slot_ids]
    budget = layout.host_params + 2 * max(card.added_params("gate") for card in cards)
    run = quick(topology, max_live=2, embargo=1, param_budget=budget)
    every = [(op, slot) for slot in run.slot_ids for op in LifecycleOp if op is not LifecycleOp.WAIT]
    rng_state = torch.get_rng_state()
    for _ in range(12):
        legal = legal_ops(run)
        refused = [pair for pair in every if pair not in legal]
        if refused:
            op, slot = data.draw(st.sampled_from(refused))
            before = run_bits(run), [s.facts() for s in run.model.all_slots()], run.model.topology_version
            with pytest.raises(IllegalOperation, match=f"slot {slot}: gate"):
                step(run, op, slot, **choice(run, op, "linear_fast"))
            assert before == (run_bits(run), [s.facts() for s in run.model.all_slots()], run.model.topology_version)
        wished = data.draw(st.sampled_from([*legal, *legal, None]))
        if wished is None:
            moves = step(run)
        else:
            blend = data.draw(st.sampled_from(["linear_fast", "gated"]))
            moves = step(run, wished[0], wished[1], **choice(run, wished[0], blend))
        assert all((move.source, move.target) in TRANSITIONS for move in moves)
        assert_optimizer_matches(run)
        stages = [report.stage for report in run.model.reports()]
        assert not {S.GERMINATED, S.PRUNED} & set(stages)
        assert sum(stage.is_live for stage in stages) <= 2
        counts = run.model.param_counts()
        assert counts.total <= budget
        assert counts.total == sum(p.numel() for p in run.model.parameters())
        live = sum(slot.num_params() for slot in run.model.all_slots() if slot.stage is not S.FOSSILIZED)
        assert live + counts.committed == counts.total
        for slot in run.model.all_slots():
            assert (slot.seed is not None) == slot.stage.has_seed == bool(slot.num_params())
            assert (slot.alpha > 0) == slot.stage.is_blended
    assert torch.equal(rng_state, torch.get_rng_state())


# ---- the optimizer


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_survivors_keep_their_state_to_the_bit(optim: str) -> None:
    run = start("mlp", OPTIMIZERS[optim], batches=make_batches("mlp", 3))
    grow_to(run, "r0c0", "HOLDING")
    germinate(run, "r0c2", blend="gated")
    kept = {name: (id(p), bits(p)) for name, p in run.model.named_parameters()}
    before = optimizer_bits(run.optimizer)
    assert any(name.startswith("slots.r0c2.gate") for name in before)
    run.model.germinate("r0c1", "mlp.glu", "linear", rng_seed=1)
    assert optimizer_bits(run.optimizer) == before
    run.model.prune("r0c2")
    survivors = {name: value for name, value in before.items() if not name.startswith("slots.r0c2.")}
    assert optimizer_bits(run.optimizer) == survivors
    for name, p in run.model.named_parameters():
        if not name.startswith("slots.r0c1."):
            assert (id(p), bits(p)) == kept[name]
    run.model.prune("r0c0")
    run.model.prune("r0c1", Cause.AUTO)
    assert set(optimizer_bits(run.optimizer)) == {name for name in before if name.startswith("host.")}
    assert_optimizer_matches(run)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_gate_and_seed_move_in_the_first_blended_epoch(topology: str) -> None:
    run = quick(topology)
    slot_id = run.slot_ids[1]
    germinate(run, slot_id, blend="gated")
    before = {name: bits(p) for name, p in run.model.slot_parameters(slot_id).items()}
    step(run, LifecycleOp.ADVANCE, slot_id)
    assert run.model.slot(slot_id).alpha == 0.2
    after = {name: bits(p) for name, p in run.model.slot_parameters(slot_id).items()}
    assert {name for name in before if before[name] == after[name]} == set()
    assert run.model.slot(slot_id).measured.live_fraction == 1.0


# ---- nothing is left behind


def test_a_pruned_seed_is_garbage_collected() -> None:
    run = quick("cnn")
    grow_to(run, "r0c0", "HOLDING", blend="gated")
    slot = run.model.slot("r0c0")
    held = [weakref.ref(part) for part in (slot.seed, slot.gate, *slot.parameters()) if part is not None]
    assert len(held) > 6
    run.model.prune("r0c0")
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_a_thousand_cycles_leave_nothing_behind() -> None:
    run = quick(embargo=1)
    run.model.train()
    quiet = EpochMeasurement(train_loss=1.0, val_loss=1.0, attributions={}, gradients={})
    sizes = set()
    for cycle in range(1000):
        run.model.germinate(SLOT, "mlp.lora", "gated", rng_seed=cycle)
        begin_epoch(run.model)
        if cycle % 100 == 0:
            for batch in run.batches:
                train_batch(run, batch)
        run.model.prune(SLOT, Cause.AUTO)
        end_epoch(run.model, quiet)
        end_epoch(run.model, quiet)
        if cycle in (99, 999):
            gc.collect()
            parameters = sum(type(found) is torch.nn.Parameter for found in gc.get_objects())
            optimizer = run.optimizer
            sizes.add((parameters, len(optimizer.groups), len(optimizer.state), len(optimizer.num_skipped)))
    assert len(sizes) == 1
    assert run.model.slot(SLOT).num_germinations == 1000
    assert run.model.topology_version == 2000
