"""The observation: what a policy sees of one env, as rows of scale-free floats. Knows no tensors and no network.

Four tables say what the columns are, in order; the rows are made from the same tables. A measured quantity has two
columns, its value and a flag; what was not measured reads 0 with flag 0. Values are to be normalised by running
statistics, flags and one-hots are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from esper.leyline import (
    BLENDS,
    MIXING,
    OPS,
    ActionMasks,
    ActionOutcome,
    BlueprintCard,
    EpochReport,
    FeatureContext,
    GovernorState,
    HostLayout,
    LifecycleOp,
    SeedStage,
    SlotReport,
    SlotSpec,
    TrainingSignals,
    record,
)

RECENT_DELTAS = 4
"""Changes between the five recent accuracies that the signals carry."""
POINTS = 10.0
"""Contributions are shown in units of this many points."""

SMALLEST_SHARE = 1.0 / 64.0
"""Seeds that take less than this of the room left are all alike in doublings."""

_UNMEASURED = (0.0, 0.0)
"""Value and flag of a quantity that is not known."""

View = TypeVar("View")


@record
class EnvView:
    """One env at one moment: the state, and the transition that led to it (None at reset)."""

    report: EpochReport
    signals: TrainingSignals
    slots: tuple[SlotReport, ...]
    masks: ActionMasks
    previous: EpochReport | None
    outcome: ActionOutcome | None
    context: FeatureContext


@record
class SlotView:
    """One slot of an env view."""

    env: EnvView
    position: int
    slot: SlotReport
    spec: SlotSpec
    previous: SlotReport | None
    card: BlueprintCard | None
    """Card of the seed in the slot; None in an empty slot."""


@record
class Column:
    """One float of an observation row."""

    name: str
    normalised: bool
    """True for values that running statistics rescale, False for flags and one-hots."""


@record
class Feature(Generic[View]):
    """One quantity: one column, or two (value and measured flag) if it may be missing."""

    name: str
    read: Callable[[View], float | None]
    normalised: bool
    may_be_missing: bool

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns this quantity fills."""
        value = Column(name=self.name, normalised=self.normalised)
        flag = Column(name=f"{self.name}_measured", normalised=False)
        return (value, flag) if self.may_be_missing else (value,)


def _value(name: str, read: Callable[[View], float]) -> Feature[View]:
    return Feature(name=name, read=read, normalised=True, may_be_missing=False)


def _measured(name: str, read: Callable[[View], float | None]) -> Feature[View]:
    return Feature(name=name, read=read, normalised=True, may_be_missing=True)


def _flag(name: str, read: Callable[[View], float]) -> Feature[View]:
    return Feature(name=name, read=read, normalised=False, may_be_missing=False)


def symlog(x: float) -> float:
    """Sign-keeping log1p: near identity for small values, logarithmic for large ones."""
    return math.copysign(math.log1p(abs(x)), x)


def _change(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


def _relative_loss(view: EnvView, loss: float | None) -> float | None:
    return None if loss is None else symlog(loss / math.log(view.context.num_classes))


def _score(view: EnvView, accuracy_pct: float) -> float:
    """A uniform guess reads 0, everything right reads 1."""
    chance_pct = 100.0 / view.context.num_classes
    return (accuracy_pct - chance_pct) / (100.0 - chance_pct)


def _loss_change(view: EnvView, now: float | None, before: float | None) -> float | None:
    return _change(_relative_loss(view, now), _relative_loss(view, before))


def _accuracy_delta(back: int) -> Callable[[EnvView], float | None]:
    def read(view: EnvView) -> float | None:
        recent = view.signals.recent_accuracies_pct
        if len(recent) < back + 2:
            return None
        return _score(view, recent[-1 - back]) - _score(view, recent[-2 - back])

    return read


def _generalisation_gap(view: EnvView) -> float | None:
    train = view.report.train_accuracy_pct
    return None if train is None else _score(view, train) - _score(view, view.report.val_accuracy_pct)


def _committed_minus_current(view: EnvView) -> float | None:
    committed = view.report.committed_accuracy_pct
    return None if committed is None else _score(view, committed) - _score(view, view.report.val_accuracy_pct)


def _budget_left(view: EnvView) -> float | None:
    budget = view.context.lifecycle.param_budget
    return None if budget is None else (budget - view.report.total_params) / budget


def _log2(count: int | None) -> float | None:
    return None if count is None else math.log2(count)


def _budget_log2(view: EnvView) -> float | None:
    budget = view.context.lifecycle.param_budget
    return None if budget is None else math.log2(budget / view.report.host_params)


def _room(view: EnvView) -> int | None:
    """Parameters that may still be added; None without a budget."""
    budget = view.context.lifecycle.param_budget
    return None if budget is None else max(0, budget - view.report.total_params)


def _empty_slots(view: EnvView) -> float:
    slots = view.slots
    return sum(slot.stage is SeedStage.DORMANT for slot in slots) / len(slots)


def _last_op(op: LifecycleOp) -> Callable[[EnvView], float]:
    return lambda view: float(view.outcome is not None and view.outcome.op is op)


GLOBAL_FEATURES: tuple[Feature[EnvView], ...] = (
    _value("time_share", lambda v: v.report.epochs_done / v.signals.horizon),
    _value("time_left_share", lambda v: 1.0 - v.report.epochs_done / v.signals.horizon),
    _value("val_score", lambda v: _score(v, v.report.val_accuracy_pct)),
    *(_measured(f"val_score_delta_{back}", _accuracy_delta(back)) for back in range(RECENT_DELTAS)),
    _measured("train_loss", lambda v: _relative_loss(v, v.report.train_loss)),
    _measured(
        "train_loss_delta",
        lambda v: _loss_change(v, v.report.train_loss, None if v.previous is None else v.previous.train_loss),
    ),
    _measured("val_loss", lambda v: _relative_loss(v, v.report.val_loss)),
    _measured(
        "val_loss_delta",
        lambda v: _loss_change(v, v.report.val_loss, None if v.previous is None else v.previous.val_loss),
    ),
    _measured("generalisation_gap", _generalisation_gap),
    _value("plateau_share", lambda v: v.signals.plateau_epochs / v.signals.horizon),
    _flag("stable", lambda v: float(v.signals.stable)),
    _measured("committed_minus_current", _committed_minus_current),
    _value("size_log2", lambda v: math.log2(v.report.total_params / v.report.host_params)),
    _measured("budget_left_share", _budget_left),
    _measured("budget_log2", _budget_log2),
    _value("host_params_log2", lambda v: math.log2(v.report.host_params)),
    _value("classes_log2", lambda v: math.log2(v.context.num_classes)),
    _measured("train_rows_log2", lambda v: _log2(v.context.train_rows)),
    _measured("steps_per_epoch_log2", lambda v: _log2(v.context.steps_per_epoch)),
    _value("horizon_log2", lambda v: math.log2(v.signals.horizon)),
    _value("live_share", lambda v: v.report.num_live / v.context.lifecycle.max_live),
    _value("empty_slots_share", _empty_slots),
    *(_flag(f"last_op_{op.name.lower()}", _last_op(op)) for op in OPS),
    _flag("last_op_applied", lambda v: float(v.outcome is not None and v.outcome.applied)),
    _flag("governor_suspect", lambda v: float(v.report.governor_state is not GovernorState.HEALTHY)),
)


def _points(value_pp: float | None) -> float | None:
    return None if value_pp is None else value_pp / POINTS


def _in_stage(stage: SeedStage) -> Callable[[SlotView], float]:
    return lambda view: float(view.slot.stage is stage)


def _mixes(kind: str) -> Callable[[SlotView], float]:
    return lambda view: float(view.card is not None and view.card.mixing == kind)


def _ramp_left(view: SlotView) -> float:
    if view.slot.stage is not SeedStage.BLENDING or view.slot.blend is None:
        return 0.0
    return 1.0 - view.slot.epochs_in_stage / BLENDS[view.slot.blend].ramp_epochs


def _contribution_change(view: SlotView) -> float | None:
    before = view.previous
    if before is None or before.seed_id != view.slot.seed_id:
        return None
    return _change(_points(view.slot.contribution_pp), _points(before.contribution_pp))


def _gate_open(op: LifecycleOp) -> Callable[[SlotView], float]:
    return lambda view: float(view.env.masks.slot_by_op[op][view.position])


def _host_mixes(side: str, kind: str) -> Callable[[SlotView], float]:
    return lambda view: float(getattr(view.spec, f"mixing_{side}") == kind)


def _legal_cards(view: SlotView) -> list[BlueprintCard]:
    cards = view.env.context.layout.cards[view.position]
    return [card for card, legal in zip(cards, view.env.masks.blueprint_by_slot[view.position], strict=True) if legal]


def _may_plant(kind: str) -> Callable[[SlotView], float]:
    return lambda view: float(any(card.mixing == kind for card in _legal_cards(view)))


def _largest_seed(view: SlotView) -> float | None:
    shares = [card.params_ratio for card in _legal_cards(view)]
    return math.log1p(max(shares)) if shares else None


SLOT_FEATURES: tuple[Feature[SlotView], ...] = (
    *(_flag(f"stage_{stage.name.lower()}", _in_stage(stage)) for stage in SeedStage),
    _value("alpha", lambda v: v.slot.alpha),
    _value("epochs_in_stage_share", lambda v: v.slot.epochs_in_stage / v.env.signals.horizon),
    _value("age_share", lambda v: v.slot.age_epochs / v.env.signals.horizon),
    _value("ramp_left_share", _ramp_left),
    _value("seed_params", lambda v: 0.0 if v.card is None else math.log1p(v.card.params_ratio)),
    _value("seed_macs", lambda v: 0.0 if v.card is None else math.log1p(v.card.macs_ratio)),
    *(_flag(f"seed_mixing_{kind}", _mixes(kind)) for kind in MIXING),
    _flag("seed_nonlinear", lambda v: float(v.card is not None and v.card.nonlinear)),
    _measured("contribution", lambda v: _points(v.slot.contribution_pp)),
    _measured("contribution_change", _contribution_change),
    _measured("solo", lambda v: _points(v.slot.solo_pp)),
    _measured("interaction", lambda v: _points(v.slot.interaction_pp)),
    _measured("predicted_gain", lambda v: _relative_loss(v.env, v.slot.predicted_gain)),
    _measured("residual_ratio", lambda v: v.slot.residual_ratio),
    _measured("grad_ratio", lambda v: None if v.slot.grad_ratio is None else symlog(v.slot.grad_ratio)),
    _measured("live_fraction", lambda v: v.slot.live_fraction),
    _flag("may_advance", _gate_open(LifecycleOp.ADVANCE)),
    _flag("may_fossilize", _gate_open(LifecycleOp.FOSSILIZE)),
    _value("depth_share", lambda v: v.spec.depth_share),
    _value("channels_log2", lambda v: math.log2(v.spec.channels)),
    _value("positions_log2", lambda v: math.log2(v.spec.positions)),
    *(_flag(f"host_mixing_{side}_{kind}", _host_mixes(side, kind)) for side in ("before", "after") for kind in MIXING),
    *(_flag(f"may_plant_{kind}", _may_plant(kind)) for kind in MIXING),
    _measured("largest_seed", _largest_seed),
    _measured("span_source_depth", lambda v: v.spec.source_depth_share),
)


def _card_mixes(kind: str) -> Callable[[BlueprintCard], float]:
    return lambda card: float(card.mixing == kind)


CARD_FEATURES: tuple[Feature[BlueprintCard], ...] = (
    _value("params", lambda card: math.log1p(card.params_ratio)),
    _value("macs", lambda card: math.log1p(card.macs_ratio)),
    *(_flag(f"mixing_{kind}", _card_mixes(kind)) for kind in MIXING),
    _flag("nonlinear", lambda card: float(card.nonlinear)),
    _flag("fits", lambda card: float(card.fits)),
)

GLOBAL_COLUMNS: tuple[Column, ...] = tuple(column for feature in GLOBAL_FEATURES for column in feature.columns)
SLOT_COLUMNS: tuple[Column, ...] = tuple(column for feature in SLOT_FEATURES for column in feature.columns)
OFFER_COLUMNS: tuple[Column, ...] = (
    Column(name="room_share", normalised=False),
    Column(name="room_share_log", normalised=False),
    Column(name="room_share_measured", normalised=False),
)
"""Share of the room left in the budget that a seed would take, plain and in doublings from 1 (reads 0) down."""
CARD_COLUMNS: tuple[Column, ...] = tuple(column for feature in CARD_FEATURES for column in feature.columns)
SEES: Mapping[str, tuple[str, ...] | None] = {
    "all": None,
    "clock": (
        "time_share",
        "time_left_share",
        "horizon_log2",
        "budget_left_share",
        "budget_left_share_measured",
        "budget_log2",
        "budget_log2_measured",
    ),
}
"""What a policy may look at: everything, or these global columns beside the names of the blueprints, as a schedule that
is written down beforehand does. Legality is no observation: both are held to it."""


def global_row(view: EnvView) -> tuple[float, ...]:
    """What is true of the env as a whole, by `GLOBAL_COLUMNS`."""
    return _row(GLOBAL_FEATURES, view)


def slot_rows(view: EnvView) -> tuple[tuple[float, ...], ...]:
    """One row per slot in execution order, by `SLOT_COLUMNS`."""
    return tuple(_row(SLOT_FEATURES, _slot_view(view, position)) for position in range(len(view.slots)))


def card_rows(layout: HostLayout) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """`[slot][blueprint]` rows by `CARD_COLUMNS`. They never change, so a run needs them once."""
    return tuple(tuple(_row(CARD_FEATURES, card) for card in cards) for cards in layout.cards)


def offer_rows(view: EnvView) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """`[slot][blueprint]` rows by `OFFER_COLUMNS`: what changes about a card while a network grows."""
    room = _room(view)
    return tuple(tuple(_offer(card, room) for card in cards) for cards in view.context.layout.cards)


def _offer(card: BlueprintCard, room: int | None) -> tuple[float, ...]:
    if room is None or not card.fits:
        return (0.0,) * len(OFFER_COLUMNS)
    share = min(1.0, card.added_params("add") / max(1, room))
    return (share, math.log2(max(share, SMALLEST_SHARE)) / math.log2(SMALLEST_SHARE), 1.0)


def _row(features: tuple[Feature[View], ...], view: View) -> tuple[float, ...]:
    """The floats of all columns. One plain loop, for it runs over every slot of every env in every step."""
    row: list[float] = []
    for feature in features:
        value = feature.read(view)
        if not feature.may_be_missing:
            assert value is not None, f"{feature.name} is always known"
            row.append(value)
        elif value is None or not math.isfinite(value):
            # A number that is not finite was not measured either: it must not reach a network.
            row += _UNMEASURED
        else:
            row += (value, 1.0)
    return tuple(row)


def _slot_view(view: EnvView, position: int) -> SlotView:
    slot = view.slots[position]
    layout = view.context.layout
    return SlotView(
        env=view,
        position=position,
        slot=slot,
        spec=layout.slots[position],
        previous=None if view.previous is None else view.previous.slots[position],
        card=None if slot.blueprint is None else layout.card(slot.slot_id, slot.blueprint),
    )
