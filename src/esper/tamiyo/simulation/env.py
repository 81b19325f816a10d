"""One simulated episode: ops, epochs and validations in the order of the real thing, through the real gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from esper.leyline import (
    BLENDS,
    TRANSITIONS,
    ActionOutcome,
    ActionSpec,
    Attribution,
    Cause,
    CoalitionTable,
    EpisodeSeed,
    EpochReport,
    GovernorState,
    HostLayout,
    IllegalOperation,
    LifecycleOp,
    RollbackReason,
    SeedStage,
    SlotReport,
    SlotTransition,
    TelemetryEventType,
    as_keywords,
    attribution,
    coalition_mask,
    full_coalition,
    gate_germinate,
    gate_hold,
    record,
    transition_event,
)
from esper.tamiyo.masks import SEED_GATES
from esper.tamiyo.simulation.world import (
    SimulatedSlot,
    SimulationSpec,
    draw_gain,
    loss_of,
    measure_coalitions,
    train_slot,
)
from esper.tamiyo.tracker import SignalTracker

SNAPSHOT_EVERY = 5
"""Epochs between the healthy states a rollback can return to."""
TARGET_STAGE: Mapping[LifecycleOp, SeedStage] = {
    move.op: move.target for move in TRANSITIONS.values() if move.op is not None
}

NOT_BLENDED = Attribution(contribution_pp=None, solo_pp=None, interaction_pp=None)


@record
class _Saved:
    """What a rollback brings back."""

    slots: tuple[SimulatedSlot, ...]
    topology_version: int
    report: EpochReport


class SimulatedEnv:
    """One episode of one simulated host. `report` is its current state."""

    def __init__(self, spec: SimulationSpec, layout: HostLayout, seed: EpisodeSeed) -> None:
        self.spec = spec
        self.layout = layout
        self.seed = seed
        stage = SeedStage.EMBARGOED if spec.opens_epoch else SeedStage.DORMANT
        self.slots = [SimulatedSlot(slot_id=slot_id, stage=stage) for slot_id in spec.slot_ids]
        self.epoch: int | None = None
        self.topology_version = 0
        self.tracker = SignalTracker(spec.horizon)
        self.moves: list[SlotTransition] = []
        self.report = self._validate(frozenset())
        self.saved = self._save()

    def step(self, action: ActionSpec, wanted: frozenset[TelemetryEventType]) -> ActionOutcome:
        """One op, one epoch, one validation. An env whose episode is over stays as it is.

        Raises:
            IllegalOperation: The op's gate is closed.
        """
        if self.report.terminal:
            self.report = replace(self.report, events=())
            return _outcome(action, applied=False)
        self.moves = []
        self.epoch = self.report.epochs_done
        outcome = self._apply(action)
        self._begin_epoch()
        self.slots = [train_slot(self.spec, slot) for slot in self.slots]
        self.report = self._validate(wanted)
        if self.epoch == self.spec.rollback_epoch:
            self._roll_back()
        elif self.report.epochs_done % SNAPSHOT_EVERY == 0 or action.op is LifecycleOp.FOSSILIZE:
            self.saved = self._save()
        return outcome

    def _apply(self, action: ActionSpec) -> ActionOutcome:
        if action.op is LifecycleOp.WAIT:
            return _outcome(action, applied=True)
        assert action.slot is not None
        position = self.layout.slot_position(action.slot)
        before = self.slots[position]
        self._check_gate(action, position)
        if action.op is LifecycleOp.GERMINATE:
            self.slots[position] = self._planted(before, action)
        self._move(position, TARGET_STAGE[action.op], Cause.POLICY)
        if action.op is LifecycleOp.PRUNE:
            self.slots[position] = SimulatedSlot(
                slot_id=before.slot_id,
                stage=SeedStage.PRUNED,
                num_germinated=before.num_germinated,
                scar_pp=before.scar_pp + before.lean_pp,
            )
        self.topology_version += action.op in (LifecycleOp.GERMINATE, LifecycleOp.PRUNE)
        return _outcome(action, applied=True)

    def _check_gate(self, action: ActionSpec, position: int) -> None:
        slot, config = self.report.slots[position], self.spec.lifecycle
        if action.op is LifecycleOp.GERMINATE:
            assert action.blueprint is not None
            card = self.layout.card(slot.slot_id, action.blueprint)
            assert action.blend is not None
            operator = BLENDS[action.blend].operator
            live, params = self.report.num_live, self.report.total_params
            verdict = gate_germinate(slot.stage, card, operator, live, params, config)
        else:
            verdict = SEED_GATES[action.op](slot, config)
        if not verdict.passed:
            raise IllegalOperation(f"{action.op.name} in {slot.slot_id} ({slot.stage.name}): {verdict.reasons}")

    def _planted(self, slot: SimulatedSlot, action: ActionSpec) -> SimulatedSlot:
        assert self.epoch is not None
        assert action.blueprint is not None
        slot = replace(slot, num_germinated=slot.num_germinated + 1)
        return replace(
            slot,
            seed_id=self._seed_id(slot),
            blueprint=action.blueprint,
            blend=action.blend,
            params=self.spec.blueprint(action.blueprint).params,
            gain_pp=draw_gain(self.spec, self.seed, self.epoch, slot.slot_id, action.blueprint),
        )

    def _seed_id(self, slot: SimulatedSlot) -> str:
        """The seed that lives here, or the last one that did."""
        return f"{self.seed.env_id}.{self.seed.episode}.{slot.slot_id}.{slot.num_germinated - 1}"

    def _begin_epoch(self) -> None:
        for position, slot in enumerate(self.slots):
            if slot.stage is SeedStage.GERMINATED:
                self._move(position, SeedStage.TRAINING, Cause.AUTO)
            elif slot.stage is SeedStage.BLENDING:
                assert slot.blend is not None
                done = slot.ramp_done + 1
                self.slots[position] = replace(slot, ramp_done=done, alpha=BLENDS[slot.blend].alpha(done))

    def _validate(self, wanted: frozenset[TelemetryEventType]) -> EpochReport:
        table = measure_coalitions(self.spec, self.seed, self.epoch, self.slots)
        if self.epoch is not None:
            self._end_epoch(table)
        return self._make_report(table, wanted)

    def _end_epoch(self, table: CoalitionTable) -> None:
        for position, slot in enumerate(self.slots):
            age = slot.age_epochs + (slot.seed_id is not None)
            slot = replace(slot, epochs_in_stage=slot.epochs_in_stage + 1, age_epochs=age)
            self.slots[position] = slot
            if slot.stage is SeedStage.PRUNED:
                self._move(position, SeedStage.EMBARGOED, Cause.AUTO)
            elif slot.stage is SeedStage.EMBARGOED and self._may_open(slot):
                self._move(position, SeedStage.DORMANT, Cause.AUTO)
            elif (
                slot.stage is SeedStage.BLENDING
                and gate_hold(self._slot_report(slot, table), self.spec.lifecycle).passed
            ):
                self._move(position, SeedStage.HOLDING, Cause.AUTO)

    def _may_open(self, slot: SimulatedSlot) -> bool:
        """A slot that had no seed yet is closed since the start."""
        return slot.epochs_in_stage >= (self.spec.lifecycle.embargo if slot.num_germinated else self.spec.opens_epoch)

    def _move(self, position: int, target: SeedStage, cause: Cause) -> None:
        slot = self.slots[position]
        if (slot.stage, target) not in TRANSITIONS:
            raise IllegalOperation(f"{slot.slot_id} cannot move from {slot.stage.name} to {target.name}")
        self.moves.append(
            SlotTransition(
                **slot.occupant(),
                seed_id=self._seed_id(slot),
                source=slot.stage,
                target=target,
                cause=cause,
                contribution_pp=self.report.slots[position].contribution_pp,
            )
        )
        self.slots[position] = replace(slot, stage=target, epochs_in_stage=0)

    def _save(self) -> _Saved:
        return _Saved(slots=tuple(self.slots), topology_version=self.topology_version, report=self.report)

    def _roll_back(self) -> None:
        self.slots = list(self.saved.slots)
        self.topology_version = self.saved.topology_version
        self.report = replace(
            self.saved.report,
            epoch=self.epoch,
            governor_state=GovernorState.PANIC,
            rollback_reason=RollbackReason.DIVERGENCE,
            terminal=True,
            events=self.report.events,
        )

    def _make_report(self, table: CoalitionTable, wanted: frozenset[TelemetryEventType]) -> EpochReport:
        full = full_coalition(len(table.slot_ids))
        fossils = [slot for slot in self.slots if slot.stage is SeedStage.FOSSILIZED]
        committed = coalition_mask(table, [slot.slot_id for slot in fossils])
        epochs_done = 0 if self.epoch is None else self.epoch + 1
        train_accuracy = self._train_accuracy(table)
        events = (
            transition_event(move, episode=self.seed.episode, env=self.seed.env_id, epoch=self.epoch)
            for move in self.moves
        )
        return EpochReport(
            env_id=self.seed.env_id,
            episode=self.seed.episode,
            epoch=self.epoch,
            train_loss=None if train_accuracy is None else loss_of(self.spec, train_accuracy),
            train_accuracy_pct=train_accuracy,
            val_loss=table.loss[full],
            val_accuracy_pct=table.accuracy_pct[full],
            committed_accuracy_pct=table.accuracy_pct[committed],
            committed_loss=table.loss[committed],
            coalitions=table,
            slots=tuple(self._slot_report(slot, table) for slot in self.slots),
            signals=self.tracker.update(table.loss[full], table.accuracy_pct[full]),
            host_params=self.spec.host_params,
            total_params=self.spec.host_params + sum(slot.params for slot in self.slots),
            committed_params=self.spec.host_params + sum(slot.params for slot in fossils),
            governor_state=GovernorState.HEALTHY,
            rollback_reason=None,
            terminal=epochs_done == self.spec.horizon,
            events=tuple(event for event in events if event.type in wanted),
            train_ms=0.0,
            val_ms=0.0,
        )

    def _train_accuracy(self, table: CoalitionTable) -> float | None:
        if self.epoch is None:
            return None
        ahead_pp = self.spec.gap_pp * (self.epoch + 1) / self.spec.horizon
        return min(100.0, table.accuracy_pct[full_coalition(len(table.slot_ids))] + ahead_pp)

    def _slot_report(self, slot: SimulatedSlot, table: CoalitionTable) -> SlotReport:
        train_accuracy = self._train_accuracy(table)
        seeded, auditions = slot.stage.has_seed, slot.stage is SeedStage.TRAINING
        plays = slot.slot_id in table.slot_ids
        worth = (
            attribution(table.accuracy_pct, len(table.slot_ids), table.slot_ids.index(slot.slot_id))
            if plays
            else NOT_BLENDED
        )
        return SlotReport(
            **slot.occupant(),
            seed_id=slot.seed_id,
            stage=slot.stage,
            ramp_complete=slot.blend is not None and slot.ramp_done >= BLENDS[slot.blend].ramp_epochs,
            probe_passed=None,
            in_optimizer=True if seeded else None,
            train_loss=None if train_accuracy is None else loss_of(self.spec, train_accuracy),
            val_loss=table.loss[full_coalition(len(table.slot_ids))],
            predicted_gain=self.spec.blueprint(str(slot.blueprint)).predicted_gain if auditions else None,
            residual_ratio=0.1 if auditions else None,
            gradients_finite=True if seeded else None,
            live_fraction=1.0 if seeded else None,
            **as_keywords(worth),
            contribution_alpha=slot.alpha if plays else None,
            contribution_topology=self.topology_version if plays else None,
            topology_version=self.topology_version,
            grad_health=None,
            grad_ratio=1.0 if seeded else None,
        )


def _outcome(action: ActionSpec, *, applied: bool) -> ActionOutcome:
    return ActionOutcome(env_id=action.env_id, op=action.op, slot=action.slot, applied=applied)
