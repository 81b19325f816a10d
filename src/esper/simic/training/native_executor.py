"""Epochs in compiled code: a growing model becomes an operation list by running its own forward pass once.

What a slot does is all that is said twice, here and in `SeedSlot`: alpha is given at run time, and a training seed is
attached natively. Everything else is traced. The results of an env do not depend on the envs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina import MorphogeneticModel, SeedSlot
from esper.kasmina.blueprints import GAMMA_SCALE, Residual
from esper.leyline import SeedStage
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.tolaria.engine import Batches, TaskRows
from esper.tolaria.executor.arrays import Learning, Meters, Rows
from esper.tolaria.executor.program import Program, build_program
from esper.tolaria.executor.seat import Norm, Seat
from esper.tolaria.executor.trace import Trace, Traced, Unsupported
from esper.tolaria.executor.workspace import Workspace, pack

CHUNK_BYTES = 16_000_000
"""Training batches that are laid out at a time."""
VAL_ROWS = 64
"""Rows per validation pass: what fits into the cache."""
MOST_TASKS = 16
"""Tasks whose validation rows stay laid out."""
CPU = torch.device("cpu")


class NativeExecutor:
    """Runs envs whose every operation has a native one. Programs are made once per topology."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self._programs: dict[Hashable, Program | Unsupported] = {}
        self._val_rows: dict[TaskRows, list[Rows]] = {}
        """Laid out once, of the last tasks."""

    def supports(self, env: ParallelEnvState) -> bool:
        """True if every operation of the env's network is known."""
        return self.why_not(env) is None

    def why_not(self, env: ParallelEnvState) -> str | None:
        """Why the env must be left to torch; None if it can be run here."""
        if env.placement.device != CPU or env.placement.dtype is not None:
            return f"it is on {env.placement.device}, or in mixed precision"
        if env.recipe.task.batch_size < 2:
            return "its batches have one row"
        if env.recipe.objective is not None:
            return "it has a loss or metric of the user's own"
        if env.recipe.sample.dtype is not torch.float32:
            return f"its inputs are {env.recipe.sample.dtype}"
        try:
            self.programs(env)
        except Unsupported as error:
            return str(error)
        return None

    # ---- epochs

    def train(self, envs: Sequence[ParallelEnvState], batches: Batches) -> None:
        """One epoch of every env, some batches at a time."""
        epochs = [
            _Epoch(env, self._program(env, seat, _topology(env), None), seat)
            for env in envs
            for seat in (seat_of(env),)
        ]
        for rows in _chunks(batches, envs[0].recipe.task.num_classes):
            for epoch in epochs:
                with epoch.env.placement.train_timer:
                    epoch.train(self._workspace, rows)
        for epoch in epochs:
            with epoch.env.placement.train_timer:
                epoch.finish()

    def validate(self, envs: Sequence[ParallelEnvState], batches: Batches) -> None:
        """All coalitions of every env."""
        rows, found = envs[0].rows, self._val_rows
        if rows not in found:
            found[rows] = list(_chunks(batches, envs[0].recipe.task.num_classes, VAL_ROWS))
            if len(found) > MOST_TASKS:
                del found[next(iter(found))]
        for env in envs:
            with env.placement.val_timer:
                self._validate(env, found[rows])

    def _validate(self, env: ParallelEnvState, chunks: Sequence[Rows]) -> None:
        totals = np.zeros((len(env.plan.coalitions), 2))
        seat, alphas = seat_of(env), _alphas(env.model)
        program = self._program(env, seat, _topology(env), env.plan.coalitions)
        for rows in chunks:
            self._workspace.validate(program, seat, rows, scalars=alphas, totals=totals)
            env.val_rows += int(rows.counts.sum())
        env.val_losses.add_(torch.from_numpy(totals[:, 0]))
        env.val_correct.add_(torch.from_numpy(totals[:, 1]))

    # ---- programs

    def programs(self, env: ParallelEnvState) -> tuple[Program, Program]:
        """What trains the env's network as it is now, and what validates it.

        Raises:
            Unsupported: There is no such program.
        """
        seat, topology = seat_of(env), _topology(env)
        return self._program(env, seat, topology, None), self._program(env, seat, topology, env.plan.coalitions)

    def _program(
        self, env: ParallelEnvState, seat: Seat, topology: Hashable, coalitions: tuple[frozenset[str], ...] | None
    ) -> Program:
        key = (topology, coalitions, seat.shape)
        if key not in self._programs:
            try:
                self._programs[key] = _trace_model(env.model, seat, env.recipe.sample, coalitions)
            except Unsupported as error:
                self._programs[key] = error
        found = self._programs[key]
        if isinstance(found, Unsupported):
            raise found
        return found


def _topology(env: ParallelEnvState) -> Hashable:
    """All that the operations of an env's network depend on."""
    slots = [
        (slot.spec.slot_id, slot.blueprint, slot.blend.operator, slot.stage.is_blended)
        for slot in env.model.all_slots()
        if slot.stage.has_seed and slot.blend is not None
    ]
    task = env.recipe.task
    return (str(task.host), env.recipe.sample.shape[1:], task.slots, tuple(slots))


def seat_of(env: ParallelEnvState) -> Seat:
    """The env's network in flat memory; moves it there if it is not, or no longer.

    Raises:
        Unsupported: It cannot be moved.
    """
    parts = [part for slot in env.model.all_slots() for part in (slot.seed, slot.gate)]
    if env.seat is None or not env.seat.fits(parts):
        norms = [part for part in env.model.modules() if isinstance(part, Norm)]
        env.seat = Seat(env.model.parameter_groups(), norms, env.optimizer, parts)
    return env.seat


# ---- from a model to its operations


def _trace_model(
    model: MorphogeneticModel, seat: Seat, sample: Tensor, coalitions: Sequence[frozenset[str]] | None
) -> Program:
    """The program that trains a model, or that validates coalitions of its seeds."""
    slots = model.all_slots()
    meters = _training_slots(model)

    def run_slot(slot: SeedSlot, h: Traced, source: Traced | None = None) -> Traced:
        if slot.stage.is_blended:
            return h.owner.mix(h, _traced(slot.delta(h, source)), slots.index(slot))
        if slot in meters and coalitions is None:
            read = None if source is None else source.detach()
            return h.owner.attach(h, _traced(slot.delta(h.detach(), read)), meters.index(slot))
        return h

    def run_scaled(seed: Residual, y: Traced) -> Traced:
        return y.owner.scale(y, seed.gamma, GAMMA_SCALE)

    overrides: dict[Any, Callable[..., Traced]] = {
        SeedSlot.forward: run_slot,
        SeedSlot.blended: run_slot,
        Residual.scaled: run_scaled,
    }
    trace = Trace(*seat.memory(), training=coalitions is None, overrides=overrides)
    x = trace.begin(sample.shape[1:])
    with _mode(model, training=coalitions is None), torch.no_grad():
        try:
            outputs = [model(x)] if coalitions is None else model.forward_coalitions(x, coalitions)
        except Unsupported:
            raise
        except Exception as error:  # code of any module may look at values, and these tensors have none
            raise Unsupported(f"it cannot be traced ({type(error).__name__}: {error})") from error
        for row, logits in enumerate(outputs):
            trace.loss(_traced(logits), row)
    return build_program(
        trace, scalars=len(slots), meters=len(meters) if coalitions is None else 0, outputs=len(outputs)
    )


def _traced(result: Tensor) -> Traced:
    assert isinstance(result, Traced)
    return result


def _training_slots(model: MorphogeneticModel) -> list[SeedSlot]:
    return [slot for slot in model.all_slots() if slot.stage is SeedStage.TRAINING]


@contextmanager
def _mode(model: MorphogeneticModel, *, training: bool) -> Iterator[None]:
    """The model in a mode for the block. Batch norms count their batches in training mode; those counts stay."""
    before = model.training
    counts = [
        (part, part.num_batches_tracked.clone())
        for part in model.modules()
        if isinstance(part, Norm) and part.num_batches_tracked is not None
    ]
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
        for part, count in counts:
            part.num_batches_tracked = count


# ---- one epoch of one env


def _alphas(model: MorphogeneticModel) -> NDArray[np.float32]:
    return np.array([slot.alpha for slot in model.all_slots()], np.float32)


class _Epoch:
    """An env in training: what its program is given, and what it leaves behind."""

    def __init__(self, env: ParallelEnvState, program: Program, seat: Seat) -> None:
        self.env = env
        self._program = program
        self._seat = seat
        self._alphas = _alphas(env.model)
        self._slots = _training_slots(env.model)
        self._totals = np.zeros((1, 2))
        self._num_batches = 0
        self._eta = np.array([_eta(slot) for slot in self._slots], np.float32)
        self._listens = self._eta < 0
        self._readings: list[NDArray[np.float32]] = []
        names = [slot.spec.slot_id for slot in self._slots]
        self._group = np.array([names.index(name) if name in names else -1 for name in seat.names], np.int64)
        optimizer = env.optimizer
        self._learning = Learning(
            rates=np.array([optimizer.rates(name) for name in seat.names]), clip_norm=optimizer.clip_norm
        )
        seat.state.seen[:] = 0

    def train(self, workspace: Workspace, rows: Rows) -> None:
        """Some batches of the epoch."""
        readings = np.zeros((len(rows.inputs), len(self._slots), 2), np.float32)
        lifecycle = self.env.recipe.task.lifecycle
        workspace.train(
            self._program,
            self._seat,
            rows,
            scalars=self._alphas,
            totals=self._totals,
            meters=Meters(
                eta=self._eta, group=self._group, rho=lifecycle.rho, decay=lifecycle.eta_decay, readings=readings
            ),
            learning=self._learning,
        )
        self._readings.append(readings)
        self._num_batches += len(rows.inputs)
        self.env.train_rows += int(rows.counts.sum())
        if self.env.gradient_detail:
            _show_gradients(self._seat, workspace)

    def finish(self) -> None:
        """Hands totals, evidence and measurements to those who report them."""
        env, seat = self.env, self._seat
        env.train_loss_sum.add_(self._totals[0, 0])
        env.train_correct.add_(self._totals[0, 1])
        seat.publish()
        for index, name in enumerate(seat.names):
            num_seen, num_skipped = seat.state.seen[index].tolist()
            if num_seen:
                first, last = seat.state.groups[index]
                env.optimizer.note_epoch(name, torch.from_numpy(seat.state.norms[first:last].copy()), num_skipped)
        readings = torch.from_numpy(np.concatenate(self._readings))
        for index, slot in enumerate(self._slots):
            assert slot.meter is not None
            first = 1 if self._listens[index] else 0
            slot.meter.note_epoch(float(self._eta[index]), readings[first:, index, 0], readings[first:, index, 1])
        seat.count_batches(self._num_batches)


def _eta(slot: SeedSlot) -> float:
    """The step size of a training seed as compiled code takes it."""
    assert slot.meter is not None
    if slot.meter.eta is None:
        return -1.0
    eta = slot.meter.eta_value()
    return float("nan") if eta is None else eta


def _show_gradients(seat: Seat, workspace: Workspace) -> None:
    """Gives torch's parameters the gradients of the last batch, as they were before clipping."""
    seat.show_gradients(torch.from_numpy(workspace.gradients(seat).copy()))


# ---- rows


def _chunks(batches: Batches, num_classes: int, rows: int | None = None) -> Iterator[Rows]:
    """All batches, a few megabytes at a time; cut into pieces of `rows` rows if given."""
    waiting: list[tuple[Tensor, Tensor]] = []
    size = 0
    for by_device in batches:
        batch = by_device[CPU]
        step = len(batch.targets) if rows is None else rows
        waiting += zip(torch.split(batch.inputs, step), torch.split(batch.targets, step), strict=True)
        size += batch.inputs.nbytes
        if size >= CHUNK_BYTES:
            yield pack(waiting, num_classes)
            waiting, size = [], 0
    if waiting:
        yield pack(waiting, num_classes)
