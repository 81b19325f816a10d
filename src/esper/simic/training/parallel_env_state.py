"""One env: a growing host with its optimizer, its memory and the running totals of the epoch. It knows no other env.

What is needed to go on to the bit is one `ModelState`: the model and its optimizer, with what the env remembers as its
extra. The governor's last healthy state is one, and a snapshot for another process holds two: now and last healthy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from esper.kasmina import HostSpec, ModelState, MorphogeneticModel, ParamCounts, build_host, capture, restore
from esper.kasmina.flat import flat_stations
from esper.kasmina.layers import generator_for
from esper.kasmina.model import Station
from esper.kasmina.persist import build, decode_facts, encode_facts
from esper.leyline import (
    ActionSpec,
    Attribution,
    EnvSnapshot,
    FeatureContext,
    GovernorState,
    LayerGradientStats,
    RollbackReason,
    SeedStage,
    SlotTally,
    SlotTransition,
    TelemetryEvent,
    TelemetryEventType,
    TrainingSignals,
    record,
)
from esper.runtime.tasks import TaskSpec
from esper.simic.telemetry.debug_telemetry import LayerGradients
from esper.simic.training.epoch_metrics import (
    PARAM_NORM,
    TRAIN_CORRECT,
    TRAIN_LOSS,
    VALIDATION,
    CoalitionPlan,
    EpochMetrics,
    measure,
    most_coalitions,
    plan_coalitions,
    read_metrics,
    write_metrics,
)
from esper.simic.training.own_objective import OwnObjective
from esper.tamiyo.tracker import SignalTracker
from esper.tolaria.engine import EngineEnv, TaskRows
from esper.tolaria.executor.seat import Seat
from esper.tolaria.governor import LabelFacts, Verdict
from esper.tolaria.optim import GrowingOptimizer

SNAPSHOT_VERSION = 5


@record
class EnvRecipe:
    """What all envs of a task share in a worker."""

    task: TaskSpec
    context: FeatureContext
    rollback_ends_episode: bool
    """True where controllers are trained; False where the product is the host and training goes on."""
    rows: TaskRows
    sample: Tensor
    """Two rows as hosts are fed them."""
    labels: LabelFacts
    objective: OwnObjective | None
    """None: classes and cross-entropy."""


@dataclass(slots=True, kw_only=True, eq=False)
class ParallelEnvState(EngineEnv):
    """One env between and during steps."""

    recipe: EnvRecipe
    model: MorphogeneticModel
    optimizer: GrowingOptimizer
    tracker: SignalTracker
    seat: Seat | None = None
    """The network in the memory of the native executor, if it was ever there."""
    rollback_reason: RollbackReason | None = None
    metrics: EpochMetrics | None = None
    signals: TrainingSignals | None = None
    plan: CoalitionPlan = field(init=False)
    _stations: list[Station] | None = None
    _training: bool = False
    kept: ModelState | None = None
    """The last healthy state."""
    state: GovernorState = GovernorState.HEALTHY
    """What the last report said of the host's health."""
    wanted: frozenset[TelemetryEventType] = frozenset()
    action: ActionSpec | None = None
    """What was done in the present epoch."""
    seeds_removed: tuple[str, ...] = ()
    """What the last rollback undid."""
    on_move: Callable[[SlotTransition], None] = field(init=False)
    outbox: list[TelemetryEvent] = field(default_factory=list)
    layer_gradients: tuple[LayerGradientStats, ...] = ()
    """Of the last batch, if asked for."""
    _counts: ParamCounts | None = None
    _readers: list[tuple[int, Callable[[Sequence[float]], None]]] = field(default_factory=list)
    """Who gets how many of the numbers back, in order."""
    _param_norm: float = math.nan
    _scaler_state: list[float] | None = None
    train_rows: int = 0
    val_rows: int = 0
    totals: Tensor = field(init=False)
    """Sums over the batches of an epoch: they stay on the device until the one read of the step."""
    train_loss_sum: Tensor = field(init=False)
    train_correct: Tensor = field(init=False)
    val_losses: Tensor = field(init=False)
    val_correct: Tensor = field(init=False)
    tallies: dict[str, SlotTally] = field(init=False)
    """What each slot has seen in this episode."""
    _earlier_gain_pp: dict[str, float] = field(default_factory=dict)
    """By slot: what the seeds before its present one brought."""

    def __post_init__(self) -> None:
        self.plan = plan_coalitions(self.model)
        self.init_accumulators(tuple(self.model.slots))

    # ---- totals of the epoch and of the episode

    def init_accumulators(self, slots: Sequence[str]) -> None:
        """Makes room for the coalitions that seeds in these slots can form, and starts what is counted by slot."""
        self.tallies = {slot_id: SlotTally(num_germinated=0, num_fossilized=0) for slot_id in slots}
        columns = VALIDATION + 2 * most_coalitions(len(slots))
        self.totals = torch.zeros(columns, dtype=torch.float64, device=self.placement.device)
        self.train_loss_sum = self.totals[TRAIN_LOSS]
        self.train_correct = self.totals[TRAIN_CORRECT]
        self.zero_accumulators()

    def zero_accumulators(self) -> None:
        """Starts the totals of an epoch anew, for the current plan of coalitions. Tallies last for the episode."""
        self.totals.zero_()
        self.train_rows = self.val_rows = 0
        pairs = self.totals[VALIDATION : VALIDATION + 2 * len(self.plan.masks)].view(-1, 2)
        self.val_losses, self.val_correct = pairs[:, 0], pairs[:, 1]

    def begin_training(self) -> None:
        """Before the first batch of an epoch."""
        self.zero_accumulators()
        self._stations, self._training = None, True

    def begin_validation(self) -> None:
        """After the last batch: notes the size of the weights, which shows whether they are finite."""
        with torch.no_grad():
            norms = torch._foreach_norm([*self.optimizer.parameters()])
            self.totals[PARAM_NORM] = torch.stack(norms).sum()
        self._stations, self._training = None, False

    def stations(self) -> list[Station]:
        """The way through the model in the present pass, with the model in its mode; made when torch needs it."""
        if self._stations is None:
            self.model.train(self._training)
            self._stations = flat_stations(self.model)
        return self._stations

    def numbers(self) -> Tensor:
        """The totals, and what optimizer, seeds, loss scaler and a close look at the gradients have to say."""
        found: list[tuple[Tensor, Callable[[Sequence[float]], None]]] = [(self.totals, self._take_totals)]
        if self.optimizer.has_unread:
            found.append((self.optimizer.numbers(), self.optimizer.take))
        meters = [slot.meter for slot in self.model.all_slots() if slot.meter is not None]
        found += [(meter.numbers(), meter.take) for meter in meters if meter.has_unread]
        if self.placement.scaler is not None:
            found.append((self.placement.scaler.numbers(), self._take_scaler))
        self.layer_gradients = ()
        if self.gradient_detail and self.epoch is not None:
            layers = LayerGradients(self.model, self.optimizer.clip_factors())
            found.append((layers.numbers(), partial(self._take_gradients, layers)))
        self._readers = [(len(row), take) for row, take in found]
        return torch.cat([row for row, _ in found])

    def _take_totals(self, values: Sequence[float]) -> None:
        self.metrics = measure(self.plan, values, train_rows=self.train_rows, val_rows=self.val_rows)
        self._param_norm = values[PARAM_NORM]

    def _take_scaler(self, values: Sequence[float]) -> None:
        self._scaler_state = list(values)

    def _take_gradients(self, layers: LayerGradients, values: Sequence[float]) -> None:
        self.layer_gradients = layers.stats(values)

    def judge(self, values: Sequence[float]) -> Verdict:
        """Turns the numbers into the epoch's metrics and evidence, and asks the governor about them."""
        rest = iter(values)
        for count, take in self._readers:
            take(list(islice(rest, count)))
        metrics = self.metrics
        assert metrics is not None
        if self.epoch is None:
            return self.governor.begin(metrics.val_loss)
        assert metrics.train_loss is not None
        return self.governor.check(
            epoch=self.epoch,
            train_loss=metrics.train_loss,
            val_loss=metrics.val_loss,
            val_accuracy_share=metrics.val_accuracy_pct / 100.0,
            param_norm=self._param_norm,
        )

    def reported_state(self, verdict: Verdict) -> GovernorState:
        """The verdict, but panic as long as the host recovers from a rollback: no ops until then."""
        return GovernorState.PANIC if self.governor.recovery_left > 0 else verdict.state

    def seed_name(self, seed_id: str) -> str:
        """The name of a seed in the whole run."""
        return f"{self.env_id}.{self.episode}.{seed_id}"

    def param_counts(self) -> ParamCounts:
        """Parameters by owner; counted again only after something moved."""
        if self._counts is None:
            self._counts = self.model.param_counts()
        return self._counts

    def note_move(self, move: SlotTransition) -> None:
        """A slot changed: tells the log, and looks again at what depends on it."""
        self._counts = None
        self.plan = plan_coalitions(self.model)
        tally = self.tallies[move.slot_id]
        if move.target is SeedStage.GERMINATED:
            self._earlier_gain_pp[move.slot_id] = tally.contribution_gain_pp or 0.0
            self.tallies[move.slot_id] = replace(tally, num_germinated=tally.num_germinated + 1)
        elif move.target is SeedStage.FOSSILIZED:
            self.tallies[move.slot_id] = replace(tally, num_fossilized=tally.num_fossilized + 1)
        self.on_move(move)

    def note_attributions(self, attributions: Mapping[str, Attribution]) -> None:
        """Tallies what the seeds are worth now, by slot; what was not measured leaves a tally as it is."""
        for slot_id, found in attributions.items():
            if found.contribution_pp is not None:
                # A network that starts with seeds has none that germinated.
                gain = self._earlier_gain_pp.get(slot_id, 0.0) + found.contribution_pp
                self.tallies[slot_id] = replace(self.tallies[slot_id], contribution_gain_pp=gain)

    # ---- going back

    def capture(self) -> ModelState:
        """Everything that decides how the env goes on, copied on its device."""
        return capture(self.model, self.optimizer, self._saved_facts())

    def restore(self, state: ModelState) -> None:
        """Returns to a captured state. Seeds born since are gone, seeds lost since are back."""
        restore(self.model, state, self.optimizer)
        self._counts = None
        facts = state.facts["extra"]
        self.epoch = facts["epoch"]
        self.metrics = read_metrics(facts["metrics"])
        self.signals = _read_signals(facts["signals"])
        self.tracker.load_state_dict(facts["tracker"])
        self.governor.restore_memory(facts["governor"])
        self.tallies = {slot_id: SlotTally(**facts["tallies"][slot_id]) for slot_id in self.tallies}
        self._earlier_gain_pp = dict(facts["earlier_gain_pp"])
        if self.placement.scaler is not None:
            self.placement.scaler.load(facts["scaler"])
        self.plan = plan_coalitions(self.model)

    def keep(self) -> None:
        """Remembers this healthy state for a rollback."""
        self.governor.note_snapshot()
        self.kept = self.capture()

    def roll_back(self, verdict: Verdict) -> int | None:
        """Returns to the last healthy state in the present epoch; ends the episode where the recipe says so.

        Returns:
            The epoch whose end was restored; None for the untrained host.
        """
        assert self.kept is not None
        assert self.epoch is not None
        now, before, counted = self.epoch, self._seed_names(), self.tallies
        self.restore(self.kept)
        # Points go back with the host; that a seed was planted stays true, as it does for the ops of the episode.
        self.tallies = {
            slot_id: replace(counted[slot_id], contribution_gain_pp=tally.contribution_gain_pp)
            for slot_id, tally in self.tallies.items()
        }
        self.seeds_removed = tuple(name for name in before if name not in self._seed_names())
        restored, self.epoch = self.epoch, now
        self.governor.note_rollback()
        self.rollback_reason = verdict.reason
        return restored

    def _seed_names(self) -> list[str]:
        return [self.seed_name(slot.seed_id) for slot in self.model.reports() if slot.seed_id is not None]

    def _saved_facts(self) -> dict[str, Any]:
        assert self.metrics is not None, "an env has facts from its first report on"
        assert self.signals is not None
        return {
            "epoch": self.epoch,
            "metrics": write_metrics(self.metrics),
            "signals": asdict(self.signals),
            "tracker": self.tracker.state_dict(),
            "governor": self.governor.memory(),
            "tallies": {slot_id: asdict(tally) for slot_id, tally in self.tallies.items()},
            "earlier_gain_pp": dict(self._earlier_gain_pp),
            "scaler": self._scaler_state,
        }

    # ---- moving to another process

    def pack(self) -> EnvSnapshot:
        """The whole env as bytes, the last healthy state included."""
        states = {"now": self.capture(), "kept": self.kept}
        meta = {
            "seed": asdict(self.seed),
            "task": self.recipe.task.name,
            "terminal": self.terminal,
            "state": self.state.value,
            "rollback_reason": None if self.rollback_reason is None else self.rollback_reason.value,
            "num_rollbacks": self.governor.num_rollbacks,
            "recovery_left": self.governor.recovery_left,
            "states": {name: None if state is None else state.facts for name, state in states.items()},
        }
        tensors = {
            f"{name}/{key}": tensor.cpu()  # sync: a snapshot leaves the device
            for name, state in states.items()
            if state is not None
            for key, tensor in state.tensors.items()
        }
        return EnvSnapshot(
            version=SNAPSHOT_VERSION,
            env_id=self.env_id,
            meta_json=encode_facts(meta),
            tensors=to_safetensors(tensors),
        )

    def unpack(self, snapshot: EnvSnapshot) -> None:
        """Continues a packed env in place of this one, which must be fresh and of the same task.

        Raises:
            ValueError: The snapshot is of another version or task.
        """
        meta = read_snapshot(snapshot)
        if meta["task"] != self.recipe.task.name:
            raise ValueError(f"expected a snapshot of task {self.recipe.task.name!r}, got {meta['task']!r}")
        tensors = from_safetensors(snapshot.tensors)
        states = {
            name: None
            if facts is None
            else ModelState(facts=facts, tensors=_part(tensors, name, self.placement.device))
            for name, facts in meta["states"].items()
        }
        assert states["now"] is not None
        self.restore(states["now"])
        self.kept = states["kept"]
        self.terminal = meta["terminal"]
        self.state = GovernorState(meta["state"])
        reason = meta["rollback_reason"]
        self.rollback_reason = None if reason is None else RollbackReason(reason)
        self.governor.num_rollbacks = meta["num_rollbacks"]
        self.governor.recovery_left = meta["recovery_left"]


def read_snapshot(snapshot: EnvSnapshot) -> dict[str, Any]:
    """The facts of a packed env.

    Raises:
        ValueError: It was packed by another version.
    """
    if snapshot.version != SNAPSHOT_VERSION:
        raise ValueError(f"expected an env snapshot of version {SNAPSHOT_VERSION}, got {snapshot.version}")
    return decode_facts(snapshot.meta_json)


def model_of(snapshot: EnvSnapshot, host: HostSpec) -> MorphogeneticModel:
    """The network of a packed env as a model of its own, on the CPU. `host` is that of its task."""
    facts = read_snapshot(snapshot)["states"]["now"]
    tensors = _part(from_safetensors(snapshot.tensors), "now", torch.device("cpu"))
    return build(ModelState(facts=facts, tensors=tensors), partial(build_host, host, generator_for(0)))


def _part(tensors: Mapping[str, Tensor], name: str, device: torch.device) -> dict[str, Tensor]:
    prefix = f"{name}/"
    return {key.removeprefix(prefix): t.to(device) for key, t in tensors.items() if key.startswith(prefix)}


def _read_signals(found: Mapping[str, Any]) -> TrainingSignals:
    return TrainingSignals(**{**found, "recent_accuracies_pct": tuple(found["recent_accuracies_pct"])})
