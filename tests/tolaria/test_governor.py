"""The governor leaves healthy hosts alone, catches broken ones within three epochs and keeps only healthy states."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import GovernorState, RollbackReason
from esper.tolaria.governor import (
    HISTORY,
    PATIENCE,
    SNAPSHOT_EVERY,
    LabelFacts,
    RollbackBudget,
    RollbackLimitReached,
    TolariaGovernor,
    Verdict,
)

DIGITS = LabelFacts(entropy=math.log(10), top_share=0.1, rows=349)


def judge(
    governor: TolariaGovernor, epoch: int, loss: float, accuracy: float = 0.9, train: float = 0.1, norm: float = 1.0
) -> Verdict:
    return governor.check(epoch=epoch, train_loss=train, val_loss=loss, val_accuracy_share=accuracy, param_norm=norm)


def started(losses: list[float] | None = None) -> TolariaGovernor:
    governor = TolariaGovernor(DIGITS)
    governor.begin(2.3)
    for epoch, loss in enumerate(losses or []):
        assert judge(governor, epoch, loss).state is GovernorState.HEALTHY
    return governor


LEARNING = [2.0, 1.4, 0.9, 0.6, 0.5, 0.42, 0.4, 0.38]


def test_a_falling_loss_is_healthy_throughout() -> None:
    started(LEARNING)


@pytest.mark.parametrize("broken", ["train", "loss", "norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_anything_not_finite_is_a_panic_at_once(broken: str, value: float) -> None:
    governor = started(LEARNING)
    verdict = judge(governor, 8, **({"loss": 0.4} | {broken: value}))  # type: ignore[arg-type]
    assert (verdict.state, verdict.reason) == (GovernorState.PANIC, RollbackReason.NONFINITE)
    assert verdict.first_epoch == 8


def test_a_host_that_forgets_everything_has_collapsed() -> None:
    verdict = judge(started(LEARNING), 8, loss=2.31, accuracy=0.11)
    assert (verdict.state, verdict.reason) == (GovernorState.PANIC, RollbackReason.COLLAPSE)


def test_a_host_that_never_learned_cannot_collapse() -> None:
    governor = started([2.29] * 8)
    assert judge(governor, 8, loss=2.31, accuracy=0.1).state is GovernorState.HEALTHY


def test_three_spikes_in_a_row_are_a_divergence_named_after_the_first() -> None:
    governor = started(LEARNING)
    states = [judge(governor, 8 + i, loss=2.0, accuracy=0.5) for i in range(PATIENCE)]
    assert [v.state for v in states] == [GovernorState.SUSPECT] * (PATIENCE - 1) + [GovernorState.PANIC]
    assert states[-1].reason is RollbackReason.DIVERGENCE
    assert {v.first_epoch for v in states} == {8}


def test_one_healthy_epoch_ends_a_streak() -> None:
    governor = started(LEARNING)
    for epoch, loss in enumerate([2.0, 2.0, 0.4, 2.0, 2.0, 0.4], start=8):
        assert judge(governor, epoch, loss, accuracy=0.5).state is not GovernorState.PANIC


def test_an_early_explosion_is_suspect_before_there_is_a_history() -> None:
    governor = started([2.0])
    assert judge(governor, 1, loss=4 * 2.31).state is GovernorState.SUSPECT
    assert judge(governor, 2, loss=3 * 2.31).state is GovernorState.HEALTHY


def test_a_loss_near_zero_may_double() -> None:
    governor = started([0.02] * 8)
    assert judge(governor, 8, loss=0.06, accuracy=0.99).state is GovernorState.HEALTHY


def test_an_untrained_host_that_is_not_finite_is_an_error_of_the_task() -> None:
    with pytest.raises(ValueError, match="untrained host has validation loss nan"):
        TolariaGovernor(DIGITS).begin(math.nan)


def test_snapshots_are_due_every_few_epochs_and_after_a_fossil() -> None:
    governor = started()
    due = []
    for epoch in range(2 * SNAPSHOT_EVERY):
        if governor.snapshot_due(judge(governor, epoch, 1.0)):
            due.append(epoch)
            governor.note_snapshot()
    assert due == [SNAPSHOT_EVERY - 1, 2 * SNAPSHOT_EVERY - 1]
    governor.note_fossilization()
    assert governor.snapshot_due(judge(governor, 10, 1.0))
    governor.note_snapshot()
    assert not governor.snapshot_due(judge(governor, 11, 1.0))


def test_a_fossil_in_a_suspect_epoch_waits_for_a_healthy_one() -> None:
    governor = started(LEARNING)
    governor.note_snapshot()
    governor.note_fossilization()
    assert not governor.snapshot_due(judge(governor, 8, 2.0, accuracy=0.5))
    assert governor.snapshot_due(judge(governor, 9, 0.4))


def test_the_count_of_rollbacks_survives_the_rollback() -> None:
    governor = started(LEARNING)
    kept = governor.memory()
    for round_idx in range(2):
        judge(governor, 8, math.nan)
        governor.restore_memory(kept)
        governor.note_rollback()
        assert governor.num_rollbacks == round_idx + 1


losses = st.lists(st.floats(0.0, 30.0) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=60)


@given(losses, st.lists(st.floats(0.0, 1.0), min_size=60, max_size=60), st.sets(st.integers(0, 59)))
def test_invariants_over_any_sequence_of_losses(
    sequence: list[float], accuracies: list[float], fossils: set[int]
) -> None:
    governor = TolariaGovernor(DIGITS)
    governor.begin(2.3)
    suspects = 0
    for epoch, (loss, accuracy) in enumerate(zip(sequence, accuracies, strict=False)):
        if epoch in fossils:
            governor.note_fossilization()
        before = governor.memory()
        verdict = judge(governor, epoch, loss, accuracy)
        after = governor.memory()
        healthy = verdict.state is GovernorState.HEALTHY
        suspects = 0 if healthy else suspects + 1
        assert healthy == (verdict.reason is None) == (verdict.first_epoch is None)
        assert (after["losses"] == [*before["losses"], loss][-HISTORY:]) == healthy
        assert len(after["losses"]) <= HISTORY
        assert all(map(math.isfinite, after["losses"]))
        assert after["streak"] == 0 or not healthy
        assert healthy or not governor.snapshot_due(verdict)
        if not math.isfinite(loss):
            assert verdict.state is GovernorState.PANIC
        if verdict.state is GovernorState.PANIC:
            assert verdict.first_epoch is not None
            assert verdict.first_epoch <= epoch
            return
        assert suspects < PATIENCE
        if governor.snapshot_due(verdict):
            governor.note_snapshot()


@given(losses, st.integers(0, 20))
def test_memory_continues_bit_for_bit_after_json(sequence: list[float], cut: int) -> None:
    one = TolariaGovernor(DIGITS)
    one.begin(2.3)
    for epoch, loss in enumerate(sequence[:cut]):
        judge(one, epoch, loss)
    other = TolariaGovernor(DIGITS)
    other.restore_memory(json.loads(json.dumps(one.memory())))
    for epoch, loss in enumerate(sequence[cut:], start=cut):
        assert repr(judge(one, epoch, loss)) == repr(judge(other, epoch, loss))


@given(st.lists(st.floats(0.3, 3.0), min_size=10, max_size=30), st.floats(0.1, 10.0))
def test_verdicts_do_not_depend_on_the_unit_of_the_loss(sequence: list[float], scale: float) -> None:
    """Twice the loss on labels of twice the entropy is the same training."""
    scaled = LabelFacts(entropy=DIGITS.entropy * scale, top_share=DIGITS.top_share, rows=DIGITS.rows)
    one, other = TolariaGovernor(DIGITS), TolariaGovernor(scaled)
    one.begin(2.3)
    other.begin(2.3 * scale)
    for epoch, loss in enumerate(sequence):
        a, b = judge(one, epoch, loss), judge(other, epoch, loss * scale)
        near_limit = a.limit is not None and math.isclose(loss, a.limit, rel_tol=1e-9)
        if near_limit:
            return
        assert a.state is b.state


def test_the_budget_of_a_run_is_a_fifth_but_at_least_eight() -> None:
    assert RollbackBudget(10).cap == 8
    assert RollbackBudget(1000).cap == 200


def test_too_many_rollbacks_stop_the_run() -> None:
    budget = RollbackBudget(40)
    budget.note_round(4, 10)
    budget.note_round(4, 10)
    with pytest.raises(RollbackLimitReached, match="9 rollbacks, the limit is 8"):
        budget.note_round(1, 10)


def test_two_rounds_in_a_row_that_mostly_roll_back_stop_the_run() -> None:
    budget = RollbackBudget(500)
    budget.note_round(6, 10)
    budget.note_round(5, 10)
    budget.note_round(6, 10)
    again = RollbackBudget(500)
    again.load_state_dict(budget.state_dict())
    with pytest.raises(RollbackLimitReached, match="two rounds in a row"):
        again.note_round(6, 10)
