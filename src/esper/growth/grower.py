"""Growing a model inside the user's own training loop.

Order of one epoch: `begin_epoch` (the controller decides, its op is carried out), the user trains, `end_epoch` (seeds
are switched off one by one on validation data, the governor judges, everything is booked).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from esper.evidence import limits
from esper.growth.arguments import check_epochs, check_model, choose_sites, listed, with_budget
from esper.growth.controllers import Controller, choose_controller
from esper.growth.history import GrowthEpoch, GrowthMove
from esper.growth.measuring import Measured, Measurer, scale_of, score_untrained
from esper.growth.network import AttachedNetwork
from esper.growth.objective import Score
from esper.growth.optimizers import UserOptimizers
from esper.growth.result import GrowthResult, grown_result
from esper.growth.sites import Forward, call_model
from esper.growth.state import (
    FORMAT,
    GrowerState,
    RollbackState,
    capture_growth,
    check_growth,
    pack_record,
    read_grower_state,
    restore_growth,
    unpack_record,
)
from esper.growth.validation import Evaluate, Validation
from esper.kasmina import EpochMeasurement, apply_op, begin_epoch, end_epoch
from esper.leyline import (
    DEFAULT_LIFECYCLE,
    PROTOCOL_VERSION,
    ActionExecutionResult,
    ActionOutcome,
    ActionSpec,
    Cause,
    EpochReport,
    FeatureContext,
    GovernorState,
    LifecycleConfig,
    ModelFileError,
    PolicyProtocol,
    RollbackReason,
    SeedStage,
    SlotTransition,
    StepResult,
    TrainingSignals,
    attribute,
    coalition_mask,
    derive_seed,
)
from esper.leyline.scale import MetricScale
from esper.tamiyo.masks import observe
from esper.tamiyo.tracker import SignalTracker
from esper.tolaria.governor import LabelFacts, TolariaGovernor, Verdict

ASSUMED_ROWS = 1000
"""Validation rows where they are not known; only how far chance may lift a guess depends on it."""


class Grower:
    """Grows a model while somebody else trains it.

        grower = Grower(model, sample, optimizer, evaluate, epochs=20, budget=20_000)
        for epoch in grower:
            train_one_epoch(model, optimizer)
            grower.end_epoch()
        net = grower.finish().model

    The model stays the user's object. Seeds that train do not change a bit of it; seeds that are blended in do.

    Args:
        model: Any module, on the device and in the precision it is trained with.
        sample: A batch as the model is fed with, at least two rows.
        optimizer: The one that trains the model, or several. Seeds enter and leave it.
        evaluate: (model) -> (metric, loss) on validation data, or a `Validation`, which is cheaper. It is called with
            the model in eval mode and without gradients, with seeds switched off one by one.
        epochs: Epochs to come.
        budget: Most parameters the model and its seeds may have together; None for no limit.
        controller: Who decides: a rule's name, the folder of a trained run, or an object; None for the default rule.
        controller_params: Parameters of a rule.
        sites: "auto", how many, or names and patterns of submodules after which seeds may grow.
        scheduler: The learning-rate scheduler of the optimizer, or several; seeds then get groups of their own.
        scaler: The gradient scaler of mixed precision.
        forward: (model, batch) -> output; by default `model(inputs)` or `model(**batch)`.
        higher_is_better: Direction of the metric that `evaluate` returns; a `Validation` knows its own.
        scale: What that metric means, where it cannot be told from its first value.
        lifecycle: Limits of growth; `budget` sets its budget.
        blueprints: What may be planted; None for all that fit.
        rollback: Keep the last healthy state in memory, and go back to it when training diverges.
        seed: Decides the weights of new seeds and the draws of random controllers.

    Raises:
        ValueError: Something cannot work. The message says what to do; the model is as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        evaluate: Evaluate | Validation,
        *,
        epochs: int,
        budget: int | None = None,
        controller: Controller = None,
        controller_params: Mapping[str, Any] | None = None,
        sites: str | int | Sequence[str] = "auto",
        scheduler: Any | Sequence[Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        forward: Forward | None = None,
        higher_is_better: bool = True,
        scale: MetricScale | None = None,
        lifecycle: LifecycleConfig = DEFAULT_LIFECYCLE,
        blueprints: Sequence[str] | None = None,
        rollback: bool = True,
        seed: int = 0,
    ) -> None:
        check_model(model)
        self._finished = False
        self.model = model
        self.epochs = epochs
        self.seed = seed
        self._rollback = rollback
        lifecycle = with_budget(lifecycle, budget, model)
        check_epochs(epochs, lifecycle)
        if forward is None:
            forward = evaluate.objective.forward if isinstance(evaluate, Validation) else call_model
        untrained = score_untrained(model, evaluate)
        self.scale = scale or scale_of(evaluate, untrained, higher_is_better)
        found = choose_sites(model, sample, sites, forward)
        self.network = AttachedNetwork(
            model,
            sample,
            found,
            forward,
            lifecycle,
            blueprints=blueprints,
            nats_per_loss=self.scale.nats_per_loss,
        )
        try:
            self.optimizers = UserOptimizers(
                self.network, listed(optimizer), listed(scheduler), scaler, on_step=self._note_step
            )
            self.network.bind(self.optimizers)
            self.scaler = scaler
            every_coalition = self._choose_controller(controller, controller_params or {})
            self._measurer = Measurer(self.network, evaluate, self.scale, every_coalition)
            self._begin(untrained)
        except BaseException:
            self._release()
            raise

    def _choose_controller(self, controller: Controller, params: Mapping[str, Any]) -> bool:
        """Decides who decides. True if that one was trained to see every coalition."""
        chosen = choose_controller(
            controller,
            self.network.layout,
            self.network.lifecycle,
            epochs=self.epochs,
            seed=self.seed,
            num_classes=self.scale.classes,
            params=params,
        )
        self.controller_name = chosen.name
        self._controller: PolicyProtocol = chosen.policy
        return chosen.needs_every_coalition

    def _begin(self, untrained: Score) -> None:
        entropy = math.log(self.scale.classes)
        labels = LabelFacts(entropy=entropy, top_share=1.0 / self.scale.classes, rows=ASSUMED_ROWS)
        self._governor = TolariaGovernor(labels)
        self._tracker = SignalTracker(self.epochs)
        self._signals: TrainingSignals
        self._kept: dict[str, Any] | None = None
        self._resumed_inside = False
        self._began_at = 0.0
        self.epoch: int | None = None
        """The present epoch, from 0; None before the first."""
        self.in_epoch = False
        """True between `begin_epoch` and `end_epoch`."""
        self.history: list[GrowthEpoch] = []
        self.moves: list[GrowthMove] = []
        self.untrained = untrained
        """What the model scored before the first epoch."""
        self._specs: list[ActionSpec] = []
        self._outcomes: list[ActionOutcome] = []
        measured = self._measurer.as_measured({0: untrained}, ())
        verdict = self._governor.begin(measured.table.loss[0])
        self._signals = self._tracker.update(measured.table.loss[0], measured.table.accuracy_pct[0])
        self._reports = [self._report(measured, verdict, None, None, None)]
        self._state = self._observe(self._reports[0], None)
        self._controller.begin(self._state)
        if self._rollback:
            self._keep(measured)

    # ---- the loop

    def __iter__(self) -> Iterator[int]:
        """The epochs that are left. `end_epoch` must be called in each."""
        while self.epochs_done < self.epochs:
            if not self._resumed_inside:
                if self.in_epoch:
                    raise RuntimeError("end_epoch() was not called; call it once after training each epoch")
                self.begin_epoch()
            self._resumed_inside = False
            assert self.epoch is not None
            yield self.epoch

    @property
    def epochs_done(self) -> int:
        """Epochs that have ended."""
        return 0 if self.epoch is None else self.epoch + (not self.in_epoch)

    def begin_epoch(self) -> list[GrowthMove]:
        """Asks the controller and carries its op out. Returns what moved.

        Raises:
            RuntimeError: The last epoch has not ended, or there is none left.
        """
        self._require_open()
        if self.in_epoch:
            raise RuntimeError("begin_epoch() was called twice; call end_epoch() after training the epoch")
        if self.epochs_done >= self.epochs:
            raise RuntimeError(f"all {self.epochs} epochs are over; call finish()")
        seen = len(self.moves)
        self.epoch = self.epochs_done
        (spec,) = self._controller.act(self._state)
        self._carry_out(spec)
        self.in_epoch = True
        self._began_at = time.perf_counter()
        return self.moves[seen:]

    def _carry_out(self, spec: ActionSpec) -> None:
        assert self.epoch is not None
        rng_seed = derive_seed(self.seed, 0, 0, self.epoch, f"seed:{spec.slot}")
        move = apply_op(self.network, spec, rng_seed)
        for moved in ([] if move is None else [move]) + begin_epoch(self.network):
            self._note(moved)
        if move is not None and move.target is SeedStage.FOSSILIZED:
            self._governor.note_fossilization()
        self._specs.append(spec)
        self._outcomes.append(ActionOutcome(env_id=0, op=spec.op, slot=spec.slot, applied=True))

    def end_epoch(self, *, train_loss: float | None = None, train_metric: float | None = None) -> GrowthEpoch:
        """Validates with seeds switched off one by one, judges and books the epoch.

        Args:
            train_loss: Mean loss of the epoch; without it the validation loss says how large losses are.
            train_metric: The metric on training data; only some rules look at it.

        Raises:
            RuntimeError: No epoch has begun, or the optimizer made no step in it.
            ValueError: The metric is not a number though the loss is, or training diverges again and again.
        """
        self._require_open()
        if not self.in_epoch:
            raise RuntimeError("end_epoch() was called without begin_epoch(); iterate over the grower or call both")
        if not self.optimizers.num_steps:
            raise RuntimeError(
                f"epoch {self.epoch} ended without a step of the optimizer; train the model between begin_epoch() and "
                "end_epoch() with the optimizer that was given"
            )
        trained_s = time.perf_counter() - self._began_at
        start = time.perf_counter()
        measured = self._measurer.measure()
        validated_s = time.perf_counter() - start
        verdict = self._judge(measured, train_loss)
        rolled_back = verdict.reason if verdict.state is GovernorState.PANIC and self._kept is not None else None
        self.in_epoch = False
        if rolled_back is None:
            self._book(measured, train_loss)
        else:
            measured = self._roll_back(rolled_back)
        report = self._report(measured, verdict, rolled_back, train_loss, train_metric)
        self._reports.append(report)
        after = self._observe(report, self._outcomes[-1])
        self._controller.store(self._state, after)
        self._state = after
        entry = self._entry(report, measured, train_loss, trained_s, validated_s)
        self.history.append(entry)
        if self._rollback and rolled_back is None and self._governor.snapshot_due(verdict):
            self._keep(measured)
        return entry

    def finish(self) -> GrowthResult:
        """Takes out what was not kept and lets go of the optimizer. The model is then the grown network.

        Raises:
            RuntimeError: An epoch has not ended, or the grower has finished already.
        """
        self._require_open()
        if self.in_epoch:
            raise RuntimeError("finish() was called inside an epoch; call end_epoch() first")
        for slot in self.network.all_slots():
            if slot.stage.is_live:
                self._note(self.network.prune(slot.spec.slot_id, Cause.AUTO))
        measured = self._measurer.measure(kept_too=True)
        self._release()
        return grown_result(self, measured.scores[measured.full], self._measurer.worth(measured))

    def abandon(self) -> None:
        """Lets go without a result: seeds that are not kept are taken out, the model stays as it is trained.

        For the end of a run that failed or was stopped. Nothing happens after `finish`.
        """
        if not self._finished:
            for slot in self.network.all_slots():
                if slot.stage.has_seed and slot.stage is not SeedStage.FOSSILIZED:
                    self.network.prune(slot.spec.slot_id, Cause.AUTO)
            self._release()

    def _release(self) -> None:
        self._finished = True
        self.network.detach()
        if hasattr(self, "optimizers"):
            self.optimizers.close()

    def _require_open(self) -> None:
        if self._finished:
            raise RuntimeError("the grower has finished; make a new one to grow on")

    def _note_step(self) -> None:
        if not self.in_epoch:
            raise RuntimeError(
                "the optimizer made a step outside an epoch of the grower; call begin_epoch() before training, "
                "end_epoch() after it and finish() in the end"
            )

    def _note(self, move: SlotTransition) -> None:
        epoch = 0 if self.epoch is None else self.epoch
        self.moves.append(GrowthMove(epoch=epoch, site=self.network.slot(move.slot_id).site.name, move=move))

    # ---- judging and booking

    def _judge(self, measured: Measured, train_loss: float | None) -> Verdict:
        assert self.epoch is not None
        loss = measured.table.loss[measured.full]
        with torch.no_grad():
            norms = torch._foreach_norm([param.detach().float() for param in self.model.parameters()])
            norm = float(torch.stack([value.cpu() for value in norms]).sum()) if norms else 0.0
        return self._governor.check(
            epoch=self.epoch,
            train_loss=loss if train_loss is None else train_loss * self.scale.nats_per_loss,
            val_loss=loss,
            val_accuracy_share=measured.table.accuracy_pct[measured.full] / 100.0,
            param_norm=norm,
        )

    def _book(self, measured: Measured, train_loss: float | None) -> None:
        table = measured.table
        full = measured.full
        moves = end_epoch(
            self.network,
            EpochMeasurement(
                train_loss=table.loss[full] if train_loss is None else train_loss * self.scale.nats_per_loss,
                val_loss=table.loss[full],
                attributions=attribute(table, table.accuracy_pct),
                gradients=self.optimizers.finish_epoch(),
            ),
        )
        for move in moves:
            self._note(move)
        self._signals = self._tracker.update(table.loss[full], table.accuracy_pct[full])

    def _report(
        self,
        measured: Measured,
        verdict: Verdict,
        rolled_back: RollbackReason | None,
        train_loss: float | None,
        train_metric: float | None,
    ) -> EpochReport:
        table, counts = measured.table, self.network.param_counts()
        full = measured.full
        fossils = [s.spec.slot_id for s in self.network.all_slots() if s.stage is SeedStage.FOSSILIZED]
        committed = coalition_mask(table, [slot_id for slot_id in fossils if slot_id in table.slot_ids])
        recovering = self._governor.recovery_left > 0
        return EpochReport(
            env_id=0,
            episode=0,
            epoch=self.epoch,
            train_loss=None if train_loss is None else train_loss * self.scale.nats_per_loss,
            train_accuracy_pct=None if train_metric is None else self.scale.percent(train_metric),
            val_loss=table.loss[full],
            val_accuracy_pct=table.accuracy_pct[full],
            committed_accuracy_pct=table.accuracy_pct.get(committed),
            committed_loss=table.loss.get(committed),
            coalitions=table,
            slots=self.network.reports(),
            signals=self._signals,
            host_params=counts.host,
            total_params=counts.total,
            committed_params=counts.committed,
            governor_state=GovernorState.PANIC if recovering else verdict.state,
            rollback_reason=rolled_back,
            terminal=self.epochs_done >= self.epochs,
            events=(),
            train_ms=0.0,
            val_ms=0.0,
        )

    def _observe(self, report: EpochReport, outcome: ActionOutcome | None) -> ActionExecutionResult:
        context = FeatureContext(
            task="",
            layout=self.network.layout,
            lifecycle=self.network.lifecycle,
            num_classes=self.scale.classes,
            train_rows=None,
            steps_per_epoch=None,
        )
        return observe(
            StepResult(
                protocol_version=PROTOCOL_VERSION,
                outcomes={} if outcome is None else {0: outcome},
                reports={0: report},
                contexts={0: context},
            )
        )

    def _entry(
        self, report: EpochReport, measured: Measured, train_loss: float | None, train_s: float, validate_s: float
    ) -> GrowthEpoch:
        assert self.epoch is not None
        slot_ids = measured.table.slot_ids
        kept = [s.slot_id for s in report.slots if s.stage is SeedStage.FOSSILIZED and s.slot_id in slot_ids]
        committed = measured.scores.get(coalition_mask(measured.table, kept))
        score = measured.scores[measured.full]
        return GrowthEpoch(
            epoch=self.epoch,
            train_loss=train_loss,
            metric=score.metric,
            loss=score.loss,
            committed_metric=None if committed is None else committed.metric,
            committed_loss=None if committed is None else committed.loss,
            params=report.total_params,
            committed_params=report.committed_params,
            stages=tuple(slot.stage for slot in report.slots),
            rolled_back=None if report.rollback_reason is None else report.rollback_reason.value,
            learning_rate=float(self.optimizers.optimizers[0].param_groups[0]["lr"]),
            train_s=train_s,
            validate_s=validate_s,
        )

    # ---- going back

    def _keep(self, measured: Measured) -> None:
        """Remembers this healthy state for a rollback."""
        self._governor.note_snapshot()
        saved = RollbackState(
            governor=self._governor.memory(),
            tracker=self._tracker.state_dict(),
            signals=self._signals,
            measured=measured,
        )
        self._kept = {**capture_growth(self.network, self.optimizers), "books": pack_record(saved)}

    def _roll_back(self, reason: RollbackReason) -> Measured:
        """Returns to the last healthy state in the present epoch. Learning rates are those of the present."""
        assert self._kept is not None
        restore_growth(self.network, self.optimizers, self._kept, with_settings=False)
        self.optimizers.finish_epoch()
        saved = unpack_record(self._kept["books"], RollbackState)
        self._governor.restore_memory(saved.governor)
        self._governor.note_rollback()
        self._tracker.load_state_dict(saved.tracker)
        self._signals = saved.signals
        if self._governor.num_rollbacks > limits.MAX_ROLLBACKS:
            raise ValueError(
                f"training diverged {self._governor.num_rollbacks} times (last: {reason.value}, epoch {self.epoch}); "
                "the model is in its last healthy state. Lower the learning rate, clip gradients, or look for NaN in "
                "the training data"
            )
        return saved.measured

    # ---- going on elsewhere

    @property
    def decisions(self) -> tuple[ActionSpec, ...]:
        """What the controller decided, epoch by epoch."""
        return tuple(self._specs)

    @contextmanager
    def decided_by(self, controller: PolicyProtocol) -> Iterator[None]:
        """Lets another controller decide for the block; the state must be turned to one that it would have led to."""
        own, self._controller = self._controller, controller
        try:
            yield
        finally:
            self._controller = own

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how growth goes on: model, seeds, optimizers, schedulers, and what was seen.

        It holds plain values and tensors; save it with `torch.save`. Draws of your own (dropout, order of data) come
        from generators of your own.
        """
        self._require_open()
        saved = GrowerState(
            format=FORMAT,
            epochs=self.epochs,
            seed=self.seed,
            epoch=self.epoch,
            in_epoch=self.in_epoch,
            reports=tuple(self._reports),
            outcomes=tuple(self._outcomes),
            specs=tuple(self._specs),
            history=tuple(self.history),
            moves=tuple(self.moves),
            untrained=self.untrained,
            scale=self.scale,
            tracker=self._tracker.state_dict(),
            governor=self._governor.memory(),
            num_rollbacks=self._governor.num_rollbacks,
            recovery_left=self._governor.recovery_left,
        )
        with self.optimizers.whole():
            schedulers = [scheduler.state_dict() for scheduler in self.optimizers.schedulers]
        return {
            "books": pack_record(saved),
            **capture_growth(self.network, self.optimizers),
            "schedulers": schedulers,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "kept": self._kept,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a saved grower was. This one must be new and made with the same arguments.

        Raises:
            ModelFileError: The state is of another model, of other sites or another run. Nothing has changed.
        """
        if self.epoch is not None:
            raise RuntimeError("load_state_dict() needs a new grower; this one has begun")
        self.turn_to(state)

    def turn_to(self, state: Mapping[str, Any]) -> None:
        """Returns to a saved state, of this grower or of one like it, whatever has happened since.

        Raises:
            ModelFileError: The state is of another model, of other sites or another run. Nothing has changed.
        """
        self._require_open()
        saved = read_grower_state(state)
        if (saved.epochs, saved.seed) != (self.epochs, self.seed):
            raise ModelFileError(
                f"the state is of a run of {saved.epochs} epochs with seed {saved.seed}, this one has {self.epochs} "
                f"and {self.seed}; make the grower with the same arguments"
            )
        check_growth(self.network, self.optimizers, state)
        last = self._decide_again(saved)
        for slot in self.network.all_slots():
            slot.nats_per_loss = saved.scale.nats_per_loss
        restore_growth(self.network, self.optimizers, state, with_settings=True)
        for scheduler, own in zip(self.optimizers.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.scale, self.untrained = saved.scale, saved.untrained
        self.epoch, self.in_epoch = saved.epoch, saved.in_epoch
        self.history, self.moves = list(saved.history), list(saved.moves)
        self._reports, self._outcomes, self._specs = list(saved.reports), list(saved.outcomes), list(saved.specs)
        self._signals, self._state = saved.reports[-1].signals, last
        self._tracker.load_state_dict(saved.tracker)
        self._governor.restore_memory(saved.governor)
        self._governor.num_rollbacks, self._governor.recovery_left = saved.num_rollbacks, saved.recovery_left
        self._kept = state["kept"]
        self._resumed_inside = saved.in_epoch
        self._began_at = time.perf_counter()

    def _decide_again(self, saved: GrowerState) -> ActionExecutionResult:
        """Shows the controller all it has seen, so that it knows what it knew. Returns the last state it saw."""
        outcomes: list[ActionOutcome | None] = [None, *saved.outcomes[: len(saved.reports) - 1]]
        states = [self._observe(report, outcome) for report, outcome in zip(saved.reports, outcomes, strict=True)]
        self._controller.begin(states[0])
        for epoch, spec in enumerate(saved.specs):
            (again,) = self._controller.act(states[epoch])
            if again != spec:
                self._controller.begin(self._state)
                raise ModelFileError(
                    f"the controller decided {spec.op.name} in epoch {epoch} and would now decide {again.op.name}; use "
                    f"the controller of the saved run (this one is {self.controller_name!r})"
                )
            if epoch + 1 < len(states):
                self._controller.store(states[epoch], states[epoch + 1])
        return states[-1]
