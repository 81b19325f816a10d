"""Blends start at 0, end at exactly 1 and never fall; heads and ops fit together."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import (
    BLENDS,
    CURVES,
    HEAD_NAMES,
    HEADS,
    OPERATORS,
    SAMPLING_ORDER,
    ActionSpec,
    BlendSpec,
    LifecycleOp,
    get_blend,
    heads_used_by,
    wait,
)

DOCUMENTED_BLENDS = {
    "linear_fast": ("add", "linear", 3),
    "linear": ("add", "linear", 5),
    "sigmoid": ("add", "sigmoid", 5),
    "sigmoid_slow": ("add", "sigmoid", 8),
    "gated": ("gate", "linear", 5),
    "multiply": ("multiply", "linear", 5),
}


def test_the_table_starts_with_the_documented_blends_in_order() -> None:
    rows = [(name, (blend.operator, blend.curve, blend.ramp_epochs)) for name, blend in BLENDS.items()]
    assert rows[: len(DOCUMENTED_BLENDS)] == list(DOCUMENTED_BLENDS.items())


@pytest.mark.parametrize("blend", BLENDS.values(), ids=BLENDS)
def test_a_ramp_rises_from_zero_to_exactly_one(blend: BlendSpec) -> None:
    ramp = [blend.alpha(done) for done in range(blend.ramp_epochs + 1)]
    assert ramp[0] == 0.0
    assert ramp[-1] == 1.0
    assert all(later > earlier for earlier, later in itertools.pairwise(ramp))
    assert blend.alpha(blend.ramp_epochs + 7) == 1.0
    assert blend.operator in OPERATORS
    assert blend.curve in CURVES


@given(st.sampled_from(sorted(CURVES)), st.floats(0.5, 40.0), st.integers(1, 50))
def test_any_curve_is_monotone_and_bounded(curve: str, steepness: float, epochs: int) -> None:
    blend = BlendSpec(name="x", operator="add", curve=curve, steepness=steepness, ramp_epochs=epochs)
    ramp = [blend.alpha(done) for done in range(epochs + 1)]
    assert ramp[0] == 0.0
    assert ramp[-1] == 1.0
    assert all(0.0 <= earlier <= later <= 1.0 for earlier, later in itertools.pairwise(ramp))


@pytest.mark.parametrize("steepness", [12.0, 6.0])
def test_the_sigmoid_is_the_rescaled_logistic(steepness: float) -> None:
    def logistic(t: float) -> float:
        return 1.0 / (1.0 + math.exp(-steepness * (t - 0.5)))

    for t in (0.1, 0.25, 0.5, 0.8):
        expected = (logistic(t) - logistic(0.0)) / (logistic(1.0) - logistic(0.0))
        assert CURVES["sigmoid"](t, steepness) == pytest.approx(expected, abs=1e-12)


def test_an_unknown_blend_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown blend 'fade'\. Known: linear_fast, linear"):
        get_blend("fade")


def test_heads_are_stored_and_sampled_in_their_orders() -> None:
    assert HEAD_NAMES == ("slot", "blueprint", "blend", "op")
    assert SAMPLING_ORDER == ("op", "slot", "blueprint", "blend")
    assert sorted(head.sampling_position for head in HEADS) == [0, 1, 2, 3]


def test_ops_use_the_heads_they_need() -> None:
    assert heads_used_by(LifecycleOp.WAIT) == ("op",)
    assert heads_used_by(LifecycleOp.GERMINATE) == ("slot", "blueprint", "blend", "op")
    for op in (LifecycleOp.ADVANCE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE):
        assert heads_used_by(op) == ("slot", "op")


@pytest.mark.parametrize("op", LifecycleOp)
@pytest.mark.parametrize("slot", [None, "r0c0"])
@pytest.mark.parametrize("blueprint", [None, "cnn.conv"])
@pytest.mark.parametrize("blend", [None, "linear"])
def test_a_spec_takes_exactly_the_heads_its_op_uses(
    op: LifecycleOp, slot: str | None, blueprint: str | None, blend: str | None
) -> None:
    given_heads = {n for n, v in (("slot", slot), ("blueprint", blueprint), ("blend", blend)) if v is not None}
    if given_heads == set(heads_used_by(op)) - {"op"}:
        ActionSpec(env_id=0, op=op, slot=slot, blueprint=blueprint, blend=blend)
    else:
        with pytest.raises(ValueError, match=f"{op.name} (needs|takes no)"):
            ActionSpec(env_id=0, op=op, slot=slot, blueprint=blueprint, blend=blend)


def test_waiting_is_a_legal_spec() -> None:
    assert wait(3) == ActionSpec(env_id=3, op=LifecycleOp.WAIT, slot=None, blueprint=None, blend=None)
