"""Tiny hosts, made-up data and one plain epoch loop, shared by the tests of the growing model.

The loop does what an engine would do, in the documented order, with nothing left out: op, begin_epoch, training,
validation with coalitions, end_epoch. Everything random comes from a keyed generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import (
    CNNHost,
    EpochMeasurement,
    Host,
    MLPHost,
    MorphogeneticModel,
    TransformerHost,
    apply_op,
    begin_epoch,
    end_epoch,
)
from esper.leyline import (
    DEFAULT_LIFECYCLE,
    ActionSpec,
    Attribution,
    GradientEvidence,
    LifecycleConfig,
    LifecycleOp,
    OptimSpec,
    SlotTransition,
    derive_seed,
)
from esper.tolaria.optim import GrowingOptimizer

TOPOLOGIES = ("mlp", "cnn", "transformer")
CLASSES = 4
VOCAB = 11
TIME = 6
Batch = tuple[Tensor, Tensor]

LENIENT: LifecycleConfig = replace(
    DEFAULT_LIFECYCLE,
    harm_tolerance=1e6,
    max_residual_ratio=1e6,
    min_live_fraction=0.0,
    min_contribution=-1000.0,
    max_live=5,
)
"""Gates that any finite measurement opens, so that a test decides what happens."""

ADAMW = OptimSpec(kind="adamw", lr=1e-2, weight_decay=1e-2, momentum=0.0, schedule="constant")
SGD = OptimSpec(kind="sgd", lr=0.05, weight_decay=5e-4, momentum=0.9, schedule="constant")
OPTIMIZERS = {"adamw": ADAMW, "sgd": SGD}

ONE_BLUEPRINT = {"mlp": "mlp.mlp_small", "cnn": "cnn.conv", "transformer": "transformer.attention"}


def draw(rng_seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(rng_seed)


def tiny_host(topology: str, rng_seed: int = 1) -> Host:
    """A host with three slots, in a few hundred parameters."""
    generator = draw(rng_seed)
    if topology == "mlp":
        return MLPHost(inputs=6, hidden=[8, 8], classes=CLASSES, input_slot=True, generator=generator)
    if topology == "cnn":
        return CNNHost(
            in_channels=1, channels=[8, 8], kernel=1, pool=[True, False], classes=CLASSES, generator=generator
        )
    return TransformerHost(vocab=VOCAB, dim=8, heads=2, layers=3, ff=2, context=TIME, generator=generator)


def make_batches(topology: str, count: int = 4, rows: int = 16, rng_seed: int = 2) -> list[Batch]:
    """Learnable data: targets follow from the inputs, with some noise."""
    generator = draw(rng_seed)
    return [_batch(topology, rows, generator) for _ in range(count)]


def _batch(topology: str, rows: int, generator: torch.Generator) -> Batch:
    if topology == "mlp":
        x = torch.randn(rows, 6, generator=generator)
        return x, (x[:, 0] > 0).long() * 2 + (x[:, 1] * x[:, 2] > 0).long()
    if topology == "cnn":
        x = torch.rand(rows, 1, 6, 6, generator=generator)
        step = x[:, 0, :, 1:] - x[:, 0, :, :-1]
        return x, (step.mean(dim=(1, 2)) > 0).long() * 2 + (x.mean(dim=(1, 2, 3)) > 0.5).long()
    x = torch.randint(0, VOCAB, (rows, TIME), generator=generator)
    before = torch.cat([x[:, :1], x[:, :-1]], dim=1)
    return x, (x + before) % VOCAB


def blind_host(rng_seed: int = 12) -> Host:
    """A host that sees no pixel's neighbours."""
    return CNNHost(
        in_channels=1, channels=[8, 8], kernel=1, pool=[False, False], classes=CLASSES, generator=draw(rng_seed)
    )


def striped_batches(count: int = 4, rows: int = 24, rng_seed: int = 11) -> list[Batch]:
    """Stripes in two directions and two widths under noise: all classes have the same pixels, only neighbours tell."""
    generator = draw(rng_seed)
    stripes = torch.stack([torch.arange(8) % 2, torch.arange(8) // 2 % 2]).float()
    templates = torch.stack([s.expand(8, 8) for s in stripes] + [s[:, None].expand(8, 8) for s in stripes])
    batches = []
    for _ in range(count):
        y = torch.randint(0, CLASSES, (rows,), generator=generator)
        noise = 0.3 * torch.randn(rows, 8, 8, generator=generator)
        batches.append(((templates[y] + noise)[:, None], y))
    return batches


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def num_correct(logits: Tensor, targets: Tensor) -> int:
    return int((logits.argmax(-1) == targets).sum())


@dataclass
class Run:
    """One growing network with its optimizer and its data."""

    model: MorphogeneticModel
    optimizer: GrowingOptimizer
    batches: list[Batch]
    validation: list[Batch]
    epochs_done: int = 0

    @property
    def slot_ids(self) -> tuple[str, ...]:
        return self.model.layout.slot_ids


def start(
    topology: str,
    optim: OptimSpec = ADAMW,
    lifecycle: LifecycleConfig = LENIENT,
    *,
    host: Host | None = None,
    slots: Sequence[str] | None = None,
    blueprints: Sequence[str] | None = None,
    batches: list[Batch] | None = None,
) -> Run:
    made = make_batches(topology) if batches is None else batches
    own_host = tiny_host(topology) if host is None else host
    model = MorphogeneticModel(own_host, made[0][0], lifecycle, slots=slots, blueprints=blueprints)
    optimizer = GrowingOptimizer(optim, model.parameter_groups(), lifecycle.clip_norm)
    model.bind(optimizer)
    return Run(model=model, optimizer=optimizer, batches=made, validation=make_batches(topology, 2, rng_seed=3))


def train_batch(run: Run, batch: Batch) -> float:
    """Forward, backward, clipped update; returns the loss."""
    run.optimizer.zero_grad()
    loss = loss_of(run.model(batch[0]), batch[1])
    loss.backward()
    run.optimizer.step()
    return loss.item()


def train_epoch(run: Run) -> tuple[float, dict[str, GradientEvidence]]:
    run.model.train()
    losses = [train_batch(run, batch) for batch in run.batches]
    return sum(losses) / len(losses), run.optimizer.finish_epoch()


def validate(run: Run) -> tuple[float, dict[str, Attribution]]:
    """Loss of the whole network, and what is lost without each blended seed."""
    run.model.eval()
    blended = frozenset(s.spec.slot_id for s in run.model.all_slots() if s.stage.is_blended)
    coalitions = [blended, *(blended - {slot_id} for slot_id in sorted(blended))]
    correct, loss, rows = [0] * len(coalitions), 0.0, 0
    for x, y in run.validation:
        outputs = run.model.forward_coalitions(x, coalitions)
        correct = [done + num_correct(out, y) for done, out in zip(correct, outputs, strict=True)]
        loss += loss_of(outputs[0], y).item() * y.numel()
        rows += y.numel()
    points = [100.0 * done / rows for done in correct]
    worth = {
        slot_id: Attribution(contribution_pp=points[0] - without, solo_pp=None, interaction_pp=None)
        for slot_id, without in zip(sorted(blended), points[1:], strict=True)
    }
    return loss / rows, worth


def seed_key(run: Run, slot_id: str) -> int:
    return derive_seed(7, 0, 0, run.epochs_done, f"seed:{slot_id}")


def step(run: Run, op: LifecycleOp = LifecycleOp.WAIT, slot: str | None = None, **choice: str) -> list[SlotTransition]:
    """One whole step; returns the moves it made, in order."""
    spec = ActionSpec(env_id=0, op=op, slot=slot, blueprint=choice.get("blueprint"), blend=choice.get("blend"))
    move = apply_op(run.model, spec, 0 if slot is None else seed_key(run, slot))
    moves = [] if move is None else [move]
    moves += begin_epoch(run.model)
    train_loss, gradients = train_epoch(run)
    val_loss, worth = validate(run)
    moves += end_epoch(
        run.model,
        EpochMeasurement(train_loss=train_loss, val_loss=val_loss, attributions=worth, gradients=gradients),
    )
    run.epochs_done += 1
    return moves


def germinate(run: Run, slot: str, blueprint: str | None = None, blend: str = "linear_fast") -> list[SlotTransition]:
    key = ONE_BLUEPRINT[run.model.host.topology] if blueprint is None else blueprint
    return step(run, LifecycleOp.GERMINATE, slot, blueprint=key, blend=blend)


def grow_to(run: Run, slot: str, stage: str, blueprint: str | None = None, blend: str = "linear_fast") -> None:
    """Takes one slot from DORMANT to a stage by the fastest legal way."""
    germinate(run, slot, blueprint, blend)
    if stage == "TRAINING":
        return
    if stage in ("PRUNED", "EMBARGOED"):
        step(run, LifecycleOp.PRUNE, slot)
        return
    step(run, LifecycleOp.ADVANCE, slot)
    while stage != "BLENDING" and run.model.slot(slot).stage.name == "BLENDING":
        step(run)
    if stage == "FOSSILIZED":
        step(run, LifecycleOp.FOSSILIZE, slot)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def module_bits(module: nn.Module) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in module.state_dict().items()}


def optimizer_bits(optimizer: GrowingOptimizer, prefix: str = "") -> dict[str, bytes]:
    return {name: bits(t) for name, t in optimizer.named_state().items() if name.startswith(prefix)}


def run_bits(run: Run) -> Mapping[str, bytes]:
    """Everything trained: weights, buffers and optimizer state."""
    return module_bits(run.model) | {f"optimizer.{k}": v for k, v in optimizer_bits(run.optimizer).items()}


def assert_optimizer_matches(run: Run) -> None:
    """The optimizer trains exactly the model's parameters, each once, and keeps state of no other."""
    held = [id(p) for p in run.optimizer.parameters()]
    own = [id(p) for p in run.model.parameters()]
    assert sorted(held) == sorted(own)
    assert {id(p) for p in run.optimizer.state} <= set(own)
    assert list(run.optimizer.groups)[:1] == ["host"]


def randomise_seed(run: Run, slot_id: str, rng_seed: int = 5, scale: float = 0.3) -> None:
    """Gives a seed arbitrary weights, gamma included, so that it does something."""
    generator = draw(rng_seed)
    with torch.no_grad():
        for parameter in run.model.slot_parameters(slot_id).values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
