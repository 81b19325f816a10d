"""Two envs of the same host that live the same random life, one trained by torch and one natively.

They are compared after every epoch. Where they part, torch is run against itself with inputs moved by a few millionths:
a ReLU or a maximum that is nearly a tie makes a life depend on the last bit, whoever trains it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from esper.kasmina import SeedSlot
from esper.kasmina.hosts import HostSpec
from esper.leyline import BLENDS, DEFAULT_LIFECYCLE, Cause, EpisodeSeed, OptimSpec, SeedStage, lr_factor
from esper.runtime.tasks import TaskSpec, get_task_spec, load_task_data
from esper.simic.training.env_factory import build_worker, make_worker_spec
from esper.simic.training.epoch_metrics import plan_coalitions
from esper.simic.training.native_executor import NativeExecutor
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.tolaria.batches import Batch
from esper.tolaria.engine import Executor
from tests.tolaria.worlds import torch_executor

CPU = torch.device("cpu")
HORIZON = 10
NUM_BATCHES = 2
GRADIENT_ROUNDING = 1e-4
"""Share of the largest gradient below which single precision no longer tells a gradient from 0."""


def random_task(rng: random.Random) -> TaskSpec:
    """A host of any kind the executor claims to run, with any optimizer."""
    kind = rng.choice(["mlp", "cnn", "cnn", "cnn"])
    if kind == "mlp":
        hidden = [rng.randint(3, 20) for _ in range(rng.randint(0, 2))]
        kwargs = {"inputs": 64, "hidden": hidden, "classes": 10, "input_slot": True}
        slots = tuple(f"r0c{column}" for column in range(len(hidden) + 1))
    else:
        channels = [rng.randint(2, 9) for _ in range(rng.randint(1, 3))]
        pool = [rng.random() < 0.5 for _ in channels]
        kwargs = {"in_channels": 1, "channels": channels, "kernel": rng.choice([1, 3]), "pool": pool, "classes": 10}
        slots = tuple(
            slot
            for column, pooled in enumerate(pool)
            for slot in ([f"r0c{column}", f"r1c{column}"] if pooled else [f"r0c{column}"])
        )
    adamw = OptimSpec(kind="adamw", lr=2e-3, weight_decay=0.01, momentum=0.0, schedule="cosine")
    sgd = OptimSpec(kind="sgd", lr=0.02, weight_decay=5e-3, momentum=0.9, schedule="constant")
    plain = replace(sgd, momentum=0.0)
    return replace(
        get_task_spec("digits_mlp" if kind == "mlp" else "digits_blind"),
        name=f"random_{kind}",
        host=HostSpec(kind=kind, kwargs=kwargs),
        slots=slots,
        batch_size=rng.choice([8, 16, 19, 33, 64]),
        val_samples=40,
        horizon=HORIZON,
        optimizer=rng.choice([adamw, adamw, sgd, plain]),
        lifecycle=replace(DEFAULT_LIFECYCLE, max_live=99),
    )


def open_world(task: TaskSpec):
    """A worker of the task."""
    return build_worker(make_worker_spec(task, load_task_data(task)), lambda epoch, batch: None)


class Apart(AssertionError):
    """The two envs differ by more than rounding."""

    def __init__(self, epoch: int, what: str) -> None:
        super().__init__(f"epoch {epoch}: {what}")
        self.epoch = epoch


def run_lives(task: TaskSpec, native: NativeExecutor, lives: Iterable[int], num_epochs: int = 6) -> int:
    """Lives them all and returns how many hung on the last bit."""
    worker, num_fragile = open_world(task), 0
    for rng_seed in lives:
        try:
            Life(worker, native, rng_seed).live(num_epochs)
        except Apart as error:
            if not _is_fragile(worker, rng_seed, error.epoch):
                raise
            num_fragile += 1
    return num_fragile


def _is_fragile(worker, rng_seed: int, epoch: int) -> bool:
    """True if torch, too, goes apart from itself by that epoch when its inputs are moved a little."""
    for noise in range(1, 13):
        try:
            Life(worker, torch_executor(worker), rng_seed, noise=noise).live(epoch + 1)
        except Apart:
            return True
    return False


class Life:
    """The same random life in two envs."""

    def __init__(self, worker, other: Executor[ParallelEnvState], rng_seed: int, noise: int = 0) -> None:
        self.rng = random.Random(rng_seed)
        self.noise = noise
        self.executors = (torch_executor(worker), other)
        worker.reset([EpisodeSeed(env_id=env, episode=rng_seed, run_seed=0) for env in (0, 1)])
        self.envs: tuple[ParallelEnvState, ParallelEnvState] = (worker.envs[0], worker.envs[1])
        first, second = self.envs
        second.model.load_state_dict(first.model.state_dict())
        self.task = first.recipe.task
        self.rows = worker
        self.kept: list | None = None
        self.log: list[str] = []
        for slot in first.model.all_slots():
            slot.epochs_in_stage = 0

    def live(self, num_epochs: int) -> None:
        for epoch in range(num_epochs):
            for slot_id in self.envs[0].model.slots:
                if self.rng.random() < 0.6:
                    self._move(slot_id)
            self._train(epoch)
            self._compare(epoch)
            self._undo_rounding()
            self._go_on()
            self._remember_or_return()

    # ---- one epoch

    def _move(self, slot_id: str) -> None:
        """Something legal, the same in both; no gate is asked, because tiny differences could close one of two."""
        slots = [env.model.slot(slot_id) for env in self.envs]
        stage = slots[0].stage
        if stage is SeedStage.DORMANT:
            layout = self.envs[0].model.layout
            fitting = [key for key in self.task.blueprint_keys if layout.card(slot_id, key).fits]
            if not fitting:
                return
            blueprint, blend, seed = self.rng.choice(fitting), self.rng.choice(list(BLENDS)), self.rng.randrange(2**31)
            for env in self.envs:
                env.model.germinate(slot_id, blueprint, blend, seed)
                env.model.slot(slot_id).transition(SeedStage.TRAINING, Cause.AUTO)
            self._wake(slots)
            self.log.append(f"{slot_id} {blueprint} {blend}")
            return
        targets = {
            SeedStage.TRAINING: [SeedStage.BLENDING, SeedStage.BLENDING, SeedStage.PRUNED],
            SeedStage.BLENDING: [SeedStage.HOLDING, SeedStage.PRUNED],
            SeedStage.HOLDING: [SeedStage.FOSSILIZED, SeedStage.PRUNED],
            SeedStage.PRUNED: [SeedStage.EMBARGOED],
            SeedStage.EMBARGOED: [SeedStage.DORMANT],
        }.get(stage)
        if targets is None:
            return
        target = self.rng.choice(targets)
        self.log.append(f"{slot_id} {target.name}")
        for env in self.envs:
            if target is SeedStage.PRUNED:
                env.model.prune(slot_id, Cause.AUTO)
            else:
                env.model.slot(slot_id).transition(target, Cause.AUTO)

    def _wake(self, slots: Sequence[SeedSlot]) -> None:
        """Sometimes a seed that is more than newborn, so that its inside matters at once."""
        if self.rng.random() < 0.5:
            for slot in slots:
                with torch.no_grad():
                    slot.seed.gamma.fill_(0.3)

    def _train(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        rows = self.task.batch_size
        train = [self._batch(index, rows, generator) for index in range(NUM_BATCHES)]
        val = [self._batch(index, 23, torch.Generator().manual_seed(index)) for index in range(2)]
        for env, executor in zip(self.envs, self.executors, strict=True):
            for slot in env.model.all_slots():
                if slot.stage is SeedStage.BLENDING:
                    slot.ramp()
            env.epoch = epoch
            env.plan = plan_coalitions(env.model)
            env.optimizer.set_lr_factor(lr_factor(self.task.optimizer.schedule, epoch, HORIZON))
            assert executor.supports(env), f"{executor} does not run {self.log}"
            env.begin_training()
            moved = env.env_id == 1 and self.noise > 0
            executor.train([env], (self._moved(batch, epoch) if moved else batch for batch in train))
            env.begin_validation()
            executor.validate([env], iter(val))
            env.judge(env.numbers().tolist())

    def _batch(self, index: int, rows: int, generator: torch.Generator) -> dict[torch.device, Batch]:
        shape = (rows, 1, 8, 8)
        inputs = torch.randn(shape, generator=generator)
        targets = (inputs[:, 0, :2, :2].sum((1, 2)) * 1.5 + 5).clamp(0, 9).long()
        return {CPU: Batch(index=index, inputs=inputs, targets=targets)}

    def _moved(self, batch: dict[torch.device, Batch], epoch: int) -> dict[torch.device, Batch]:
        generator = torch.Generator().manual_seed(100 * self.noise + epoch)
        inputs = batch[CPU].inputs
        return {CPU: replace(batch[CPU], inputs=inputs * (1 + 3e-6 * torch.randn(inputs.shape, generator=generator)))}

    # ---- how far apart they are

    def _compare(self, epoch: int) -> None:
        first, second = self.envs
        where = f"{self.log}"
        assert second.train_rows == first.train_rows
        assert second.val_rows == first.val_rows
        mine, other = first.metrics, second.metrics
        pairs = [(other.train_loss, mine.train_loss, 1e-3, "training loss")]
        assert other.table.loss.keys() == mine.table.loss.keys()
        pairs += [(other.table.loss[m], loss, 1e-2, f"validation loss of {m:b}") for m, loss in mine.table.loss.items()]
        seen, native = first.optimizer.finish_epoch(), second.optimizer.finish_epoch()
        assert seen.keys() == native.keys(), where
        for name, evidence in seen.items():
            assert native[name].finite == evidence.finite, f"{name}, {where}"
            pairs.append((native[name].norm_per_weight, evidence.norm_per_weight, 2e-2, f"gradient of {name}"))
        for slot, twin in zip(first.model.all_slots(), second.model.all_slots(), strict=True):
            if slot.stage is SeedStage.TRAINING:
                pairs.append((twin.meter.eta_value(), slot.meter.eta_value(), 1e-2, f"eta of {slot.spec.slot_id}"))
                found = zip(twin.meter.finish_epoch(), slot.meter.finish_epoch(), strict=True)
                pairs += [(a, b, 2e-2, f"meter of {slot.spec.slot_id}") for a, b in found]
        for value, truth, tolerance, what in pairs:
            assert (value is None) == (truth is None), f"{what}: {value} against {truth}, {where}"
            if value is not None and not math.isclose(value, truth, rel_tol=tolerance, abs_tol=1e-4):
                raise Apart(epoch, f"{what} is {value} instead of {truth}, {where}")
        self._compare_states(epoch, where)

    def _compare_states(self, epoch: int, where: str) -> None:
        states = [env.model.state_dict() | env.optimizer.named_state() for env in self.envs]
        assert states[1].keys() <= states[0].keys(), where
        for name in states[0].keys() - states[1].keys():
            assert not states[0][name].any(), f"{name}, {where}"
        sizes: dict[str, float] = {}
        for name, value in states[0].items():
            kind = name.rpartition(".")[2]
            sizes[kind] = max(sizes.get(kind, 0.0), float(value.abs().max()))
        for name, value in states[1].items():
            truth = states[0][name]
            if not value.is_floating_point() or name.endswith(".step"):
                assert torch.equal(value, truth), f"{name}, {where}"
                continue
            off = torch.where(_moved_by_rounding(name, states), 0.0, (value - truth).abs())
            far = float(off.max())
            if far > max(2e-3 * sizes[name.rpartition(".")[2]], 1e-6):
                raise Apart(epoch, f"{name} is off by {far}, {where}")

    # ---- afterwards

    def _undo_rounding(self) -> None:
        """Where Adam followed rounding, weights of both go on from the same values; all else has to stay close."""
        first, second = self.envs
        states = [env.model.state_dict() | env.optimizer.named_state() for env in self.envs]
        if any(_moved_by_rounding(name, states).any() for name in states[1]):
            second.model.load_state_dict(first.model.state_dict())

    def _go_on(self) -> None:
        for env in self.envs:
            for slot in env.model.all_slots():
                slot.epochs_in_stage += 1
                if slot.stage is SeedStage.BLENDING and slot.ramp_complete:
                    slot.transition(SeedStage.HOLDING, Cause.AUTO)

    def _remember_or_return(self) -> None:
        chance = self.rng.random()
        if chance < 0.2:
            for env in self.envs:
                env.signals = env.tracker.update(env.metrics.val_loss, env.metrics.val_accuracy_pct)
            self.kept = [env.capture() for env in self.envs]
            self.log.append("keep")
        elif chance < 0.35 and self.kept is not None:
            for env, state in zip(self.envs, self.kept, strict=True):
                env.restore(state)
            self.log.append("roll back")


def _moved_by_rounding(name: str, states: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Weights that Adam has moved although their gradient is 0 up to rounding: full steps, of either sign.

    A 1x1 convolution of one channel before a batch norm has such weights: what it scales is normalised away.
    """
    if f"{name}.exp_avg_sq" not in states[1]:
        return torch.zeros((), dtype=torch.bool)
    largest = max(float(value.max()) for key, value in states[0].items() if key.endswith(".exp_avg_sq"))
    squares = torch.stack([state[f"{name}.exp_avg_sq"] for state in states]).amax(0)
    return squares < GRADIENT_ROUNDING**2 * largest
