"""Records are frozen, keyword-only and survive the pipe between processes unchanged; names and keys are checked."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import esper.leyline
from esper.leyline import (
    DEFAULT_LIFECYCLE,
    MIXING,
    BlueprintCard,
    HostLayout,
    SlotConfig,
    SlotMeasurement,
    SlotReport,
    SlotSpec,
    check_slot_id,
    derive_seed,
)

RECORDS = {name: made for name, made in vars(esper.leyline).items() if isinstance(made, type) and is_dataclass(made)}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_every_record_is_frozen_slotted_and_requires_all_its_fields(record: type) -> None:
    assert record.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert not hasattr(record.__new__(record), "__dict__")
    with pytest.raises(TypeError, match=r"keyword-only|missing"):
        record()
    for field in fields(record):
        assert field.kw_only, field.name


def test_a_record_pickles_and_copies_to_an_equal_one() -> None:
    config = replace(DEFAULT_LIFECYCLE, rho=0.7, param_budget=99)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    with pytest.raises(FrozenInstanceError):
        config.rho = 0.1  # type: ignore[misc]


def test_a_record_with_parents_pickles_all_fields() -> None:
    values = {field.name: f"<{field.name}>" for field in fields(SlotReport)}
    report = SlotReport(**values)  # type: ignore[arg-type]
    back = pickle.loads(pickle.dumps(report))
    assert back == report
    assert back.slot_id == "<slot_id>"
    assert {field.name for field in fields(SlotMeasurement)} < set(values)


# ---- slots


@given(st.integers(0, 99), st.integers(0, 99))
def test_row_and_column_make_a_slot_id(row: int, column: int) -> None:
    assert check_slot_id(f"r{row}c{column}") == f"r{row}c{column}"


@pytest.mark.parametrize("bad", ["", "r0", "c0r0", "r00c0", "r0c01", "R0C0", "r0c0 ", "r-1c0", "r0c0\n", "r1\u0663c0"])
def test_malformed_slot_ids_are_named(bad: str) -> None:
    with pytest.raises(ValueError, match="malformed slot id"):
        check_slot_id(bad)


def test_slot_lists_refuse_duplicates() -> None:
    with pytest.raises(ValueError, match="duplicate slot ids: r0c0, r0c0"):
        SlotConfig(slot_ids=("r0c0", "r0c0"))
    with pytest.raises(ValueError, match="malformed"):
        SlotConfig(slot_ids=("r0c0", "left"))


def _layout() -> HostLayout:
    def card(blueprint: str, params: int) -> BlueprintCard:
        return BlueprintCard(
            blueprint=blueprint,
            params=params,
            params_ratio=0.1,
            macs=1,
            macs_ratio=0.1,
            mixing=MIXING[0],
            nonlinear=True,
            gate_params=5,
            fits=True,
        )

    slots = tuple(
        SlotSpec(
            slot_id=name, segment_idx=i, channels=4, positions=1, depth_share=0.5, mixing_before=None, mixing_after=None
        )
        for i, name in enumerate(("r0c9", "r0c10"))
    )
    cards = tuple(tuple(card(name, 10 * s + b) for b, name in enumerate(("x", "y"))) for s in range(2))
    return HostLayout(topology="mlp", host_params=9, host_macs=9, slots=slots, blueprints=("x", "y"), cards=cards)


def test_a_layout_looks_cards_up_by_slot_and_blueprint() -> None:
    layout = _layout()
    assert layout.slot_ids == ("r0c9", "r0c10")
    assert layout.slot_position("r0c10") == 1
    assert layout.card("r0c10", "y").params == 11
    assert layout.card("r0c10", "y").added_params("gate") == 16
    assert layout.card("r0c10", "y").added_params("add") == 11
    with pytest.raises(ValueError, match=r"unknown slot 'r0c1'\. Known: r0c9, r0c10"):
        layout.card("r0c1", "y")
    with pytest.raises(ValueError, match=r"unknown blueprint 'z'\. Known: x, y"):
        layout.card("r0c9", "z")


# ---- random keys


def test_keys_are_the_same_in_every_process_and_version() -> None:
    assert derive_seed(1, None, 0, 3, "order") == 256593362389720210
    assert derive_seed(0, 0, None, None, "init") == 3014192308331870260


parts = st.one_of(st.none(), st.integers(0, 50))
keys = st.tuples(st.integers(0, 50), parts, parts, parts, st.sampled_from(["order", "augment", "seed:r0c1"]))


@given(keys, keys)
def test_different_keys_give_different_seeds(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    seeds = [derive_seed(*key) for key in (left, right)]  # type: ignore[arg-type]
    assert (seeds[0] == seeds[1]) == (left == right)
    assert all(0 <= seed < 2**63 for seed in seeds)
