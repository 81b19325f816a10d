"""A slot: the place in a host where one seed at a time lives. It knows its seed's stage, never why it changed.

A seed's residual r changes the features x to x + alpha * d(x, r), with d by the blend's operator. The features keep
weight 1 at every alpha, so the layers before the slot keep their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from esper.kasmina.blueprints import Residual, get_blueprint
from esper.kasmina.layers import linear
from esper.kasmina.objective import SeedMeter, attach
from esper.leyline import (
    TRANSITIONS,
    BlendSpec,
    Cause,
    IllegalOperation,
    LifecycleConfig,
    SeedStage,
    SlotMeasurement,
    SlotSpec,
    SlotTransition,
    get_blend,
)


def gate_width(channels: int) -> int:
    """Hidden width of the gate network."""
    return max(4, channels // 4)


def gate_params(channels: int) -> int:
    """Parameters of the gate network."""
    width = gate_width(channels)
    return channels * width + 2 * width + 1


class GateNetwork(nn.Module):
    """One opening in (0, 1) per row, or per token from that token alone."""

    def __init__(self, channels: int, topology: str, generator: torch.Generator) -> None:
        super().__init__()
        self.over_space = topology == "cnn"
        width = gate_width(channels)
        self.inner = linear(channels, width, generator)
        self.outer = linear(width, 1, generator)

    def forward(self, x: Tensor) -> Tensor:
        features = x.mean(dim=(2, 3)) if self.over_space else x
        opening = torch.sigmoid(self.outer(F.gelu(self.inner(features))))
        return opening[:, :, None, None] if self.over_space else opening


def delta(operator: str, x: Tensor, residual: Tensor, gate: GateNetwork | None) -> Tensor:
    """What is added to x at alpha 1."""
    if operator == "add":
        return residual
    if operator == "gate":
        assert gate is not None
        out: Tensor = gate(x) * residual
        return out
    assert operator == "multiply", operator
    # The total factor stays within [0.5, 1.5]: features are scaled, never cut.
    return 0.5 * x * torch.tanh(residual)


def mix(x: Tensor, d: Tensor, alpha: float) -> Tensor:
    """The output of a slot."""
    return x + d if alpha == 1.0 else x + alpha * d


UNMEASURED = SlotMeasurement(**{field.name: None for field in fields(SlotMeasurement)})


class SeedSlot(nn.Module):
    """Holds at most one seed and mixes its output into the host's features.

    The output is h, bit for bit, while the slot is empty or its seed is in TRAINING, and h + alpha * d(h) from
    BLENDING on.
    """

    def __init__(self, spec: SlotSpec, topology: str, config: LifecycleConfig) -> None:
        super().__init__()
        self.spec = spec
        self.topology = topology
        self.config = config
        self.num_germinations = 0
        self.stage = SeedStage.DORMANT
        self.epochs_in_stage = 0
        self._forget_seed()

    def _forget_seed(self) -> None:
        self.seed: Residual | None = None
        self.gate: GateNetwork | None = None
        self.blueprint: str | None = None
        self.blend: BlendSpec | None = None
        self.alpha = 0.0
        self.ramp_done = 0
        self.age_epochs = 0
        self.probe_passed: bool | None = None
        self.measured = UNMEASURED
        self.meter: SeedMeter | None = None

    # ---- forward

    def forward(self, h: Tensor, source: Tensor | None = None) -> Tensor:
        """Mixes the seed into the features according to its stage. A span reads `source`."""
        if has_torch_function_unary(h):
            return handle_torch_function(SeedSlot.forward, (h,), self, h, source)
        if self.stage.is_blended:
            return self.blended(h, source)
        if self.stage is SeedStage.TRAINING and self.training and torch.is_grad_enabled():
            return self.train_behind(h, source, run=self.delta)
        return h

    def blended(self, h: Tensor, source: Tensor | None = None) -> Tensor:
        """The features with the seed at its current alpha."""
        if has_torch_function_unary(h):
            return handle_torch_function(SeedSlot.blended, (h,), self, h, source)
        return mix(h, self.delta(h, source), self.alpha)

    def delta(self, h: Tensor, source: Tensor | None = None) -> Tensor:
        """What the seed would add at alpha 1."""
        assert self.seed is not None
        assert self.blend is not None
        return delta(self.blend.operator, h, self.seed(h if source is None else source), self.gate)

    def train_behind(self, h: Tensor, source: Tensor | None = None, *, run: Callable[..., Tensor]) -> Tensor:
        """The features as they are, with the seed attached to their gradient. `run` computes its delta."""
        assert self.meter is not None
        rows = h.shape[0] * h.shape[1] if self.topology == "transformer" else h.shape[0]
        read = [features.detach() for features in (h, source) if features is not None]
        for features in read:
            if not features.is_contiguous():
                # Torch crashes in the backward pass of a group norm whose channels-last input asks for no gradient.
                features.requires_grad_()
        return attach(h, run(*read), self.meter, rows)

    # ---- life

    def plant(self, seed: Residual, gate: GateNetwork | None, blueprint: str, blend: BlendSpec) -> SlotTransition:
        """Puts a new seed into the slot: DORMANT to GERMINATED."""
        self.num_germinations += 1
        self.seed, self.gate = seed, gate
        self.blueprint, self.blend = blueprint, blend
        self.probe_passed = True
        self.meter = self.make_meter()
        return self.transition(SeedStage.GERMINATED, Cause.POLICY)

    def make_meter(self) -> SeedMeter:
        """What measures a new seed."""
        return SeedMeter(self.config.rho, self.config.eta_decay)

    def transition(self, target: SeedStage, cause: Cause) -> SlotTransition:
        """Makes one legal move and returns its record.

        Raises:
            IllegalOperation: The move is not in the table. Nothing has changed.
        """
        if (self.stage, target) not in TRANSITIONS:
            raise IllegalOperation(f"slot {self.spec.slot_id}: no move from {self.stage.name} to {target.name}")
        move = SlotTransition(
            **self.occupant(),
            seed_id=self.seed_id,
            source=self.stage,
            target=target,
            cause=cause,
            contribution_pp=self.measured.contribution_pp,
        )
        self.stage = target
        self.epochs_in_stage = 0
        if target is SeedStage.PRUNED:
            self._forget_seed()
        return move

    def occupant(self) -> dict[str, Any]:
        """What reports and moves say alike of the seed that lives here."""
        return {
            "slot_id": self.spec.slot_id,
            "blueprint": self.blueprint,
            "blend": None if self.blend is None else self.blend.name,
            "params": self.num_params(),
            "epochs_in_stage": self.epochs_in_stage,
            "age_epochs": self.age_epochs,
            "alpha": self.alpha,
        }

    @property
    def seed_id(self) -> str:
        """Names the seed that lives here, or the last one that did: slot and number of its germination."""
        return f"{self.spec.slot_id}.{self.num_germinations}"

    def ramp(self) -> None:
        """One epoch further along the blend curve."""
        assert self.blend is not None
        self.ramp_done = min(self.ramp_done + 1, self.blend.ramp_epochs)
        self.alpha = self.blend.alpha(self.ramp_done)

    @property
    def ramp_complete(self) -> bool:
        """True when alpha has reached 1."""
        return self.blend is not None and self.ramp_done >= self.blend.ramp_epochs

    def num_params(self) -> int:
        """Parameters of the seed and its gate, frozen ones included."""
        return sum(p.numel() for p in self.parameters())

    # ---- state as plain data

    def facts(self) -> dict[str, Any]:
        """Everything about the slot but its weights, as JSON values."""
        return {
            "stage": self.stage.name,
            "blueprint": self.blueprint,
            "blueprint_version": None if self.blueprint is None else get_blueprint(self.blueprint).version,
            "blend": None if self.blend is None else self.blend.name,
            "alpha": self.alpha,
            "ramp_done": self.ramp_done,
            "epochs_in_stage": self.epochs_in_stage,
            "age_epochs": self.age_epochs,
            "num_germinations": self.num_germinations,
            "probe_passed": self.probe_passed,
            "eta": None if self.meter is None else self.meter.eta_value(),
            "params": self.num_params(),
            "measured": asdict(self.measured),
        }

    def set_facts(self, facts: dict[str, Any], seed: Residual | None, gate: GateNetwork | None) -> None:
        """Puts the slot into a recorded state, with modules built from the recorded names."""
        self._forget_seed()
        self.seed, self.gate = seed, gate
        self.stage = SeedStage[facts["stage"]]
        self.blueprint = facts["blueprint"]
        self.blend = None if facts["blend"] is None else get_blend(facts["blend"])
        self.alpha = facts["alpha"]
        self.ramp_done = facts["ramp_done"]
        self.epochs_in_stage = facts["epochs_in_stage"]
        self.age_epochs = facts["age_epochs"]
        self.num_germinations = facts["num_germinations"]
        self.probe_passed = facts["probe_passed"]
        self.measured = SlotMeasurement(**facts["measured"])
        if seed is not None:
            self.meter = self.make_meter()
            if facts["eta"] is not None:
                self.meter.eta = torch.tensor(facts["eta"], dtype=torch.float32, device=seed.gamma.device)
                self.meter.take([facts["eta"]])
