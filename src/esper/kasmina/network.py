"""The verbs of growth over the slots of a network: plant, advance, keep, prune, report. Subclasses know the network.

It knows no forward pass, optimizer step, reward or policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import Residual, get_blueprint
from esper.kasmina.layers import evaluating, generator_for
from esper.kasmina.slot import GateNetwork, SeedSlot, delta
from esper.leyline import (
    BlueprintCard,
    Cause,
    GateResult,
    GerminationError,
    HostLayout,
    IllegalOperation,
    LifecycleConfig,
    SeedStage,
    SlotReport,
    SlotSpec,
    SlotTransition,
    as_keywords,
    gate_blend,
    gate_fossilize,
    gate_germinate,
    gate_prune,
    get_blend,
    record,
)

CPU = torch.device("cpu")


class SeedOptimizer(Protocol):
    """What a growing network asks of its optimizer: one group per seed, in and out."""

    def add_group(self, name: str, params: Mapping[str, nn.Parameter]) -> None:
        """Starts to train these parameters."""

    def remove_group(self, name: str) -> None:
        """Forgets a group and all state of its parameters; a name it does not know is already forgotten."""

    def holds(self, params: Iterable[nn.Parameter]) -> bool:
        """True if every one of these parameters is trained."""


class ModelOptimizer(SeedOptimizer, Protocol):
    """An optimizer that can be saved with its model: it keeps exactly its parameters, with state by name."""

    def named_state(self) -> dict[str, Tensor]:
        """State tensors by "<parameter>.<entry>"."""

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes state back."""


@record
class ParamCounts:
    """Parameters by owner. Tied tensors count once, frozen ones count too."""

    host: int
    committed: int
    """Host and fossils: the network that would be delivered now."""
    total: int


class GrowingNetwork(ABC):
    """A network with slots in which seeds germinate, train behind it, blend in, and are kept or pruned."""

    lifecycle: LifecycleConfig
    layout: HostLayout
    topology_version: int
    train_loss: float | None
    val_loss: float | None
    _optimizer: SeedOptimizer | None

    # ---- what a network must offer

    @abstractmethod
    def slot(self, slot_id: str) -> SeedSlot:
        """Looks a slot up; ValueError with the known ids if there is none."""

    @abstractmethod
    def all_slots(self) -> tuple[SeedSlot, ...]:
        """The slots in execution order."""

    @abstractmethod
    def host_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of the host by name, tied ones once."""

    @abstractmethod
    def slot_parameters(self, slot_id: str) -> dict[str, nn.Parameter]:
        """Every parameter of a slot's seed and gate by name."""

    @abstractmethod
    def sample_features(self, slot: SeedSlot) -> tuple[Tensor, Tensor]:
        """Features of real input, of the kind its seeds are to have: those a slot adds to and those it reads."""

    # ---- structure

    def adopt_group(self, slot_id: str) -> None:
        """Tells the bound optimizer, if any, to train a slot's seed."""
        if self._optimizer is not None:
            self._optimizer.add_group(slot_id, self.slot_parameters(slot_id))

    def drop_group(self, slot_id: str) -> None:
        """Tells the bound optimizer, if any, to forget a slot's seed."""
        if self._optimizer is not None:
            self._optimizer.remove_group(slot_id)

    def param_counts(self) -> ParamCounts:
        """Counts parameters by owner."""
        host = sum(p.numel() for p in self.host_parameters().values())
        fossils = sum(slot.num_params() for slot in self.all_slots() if slot.stage is SeedStage.FOSSILIZED)
        total = host + sum(slot.num_params() for slot in self.all_slots())
        return ParamCounts(host=host, committed=host + fossils, total=total)

    @property
    def num_live(self) -> int:
        """Seeds that are neither committed nor gone, those of this step included."""
        return sum(slot.stage.is_live or slot.stage is SeedStage.GERMINATED for slot in self.all_slots())

    # ---- growth

    def germinate(self, slot_id: str, blueprint: str, blend: str, rng_seed: int) -> SlotTransition:
        """Plants a seed. Either all of it happens or nothing does.

        Args:
            slot_id: An empty slot.
            blueprint: Key such as "cnn.conv".
            blend: Name of a row of BLENDS.
            rng_seed: Seeds the weights of the new module.

        Raises:
            ValueError: Unknown slot, blueprint or blend.
            RuntimeError: No optimizer is bound.
            IllegalOperation: The gate refuses: the slot is taken, the blueprint does not fit, or a limit is reached.
            GerminationError: The module could not be built, does not start as an identity, or could not be attached.
        """
        slot = self.slot(slot_id)
        card = self.layout.card(slot_id, blueprint)
        blend_spec = get_blend(blend)
        if self._optimizer is None:
            raise RuntimeError("no optimizer would train the seed; call model.bind(optimizer) first")
        live, params = self.num_live, self.param_counts().total
        self._require(slot_id, gate_germinate(slot.stage, card, blend_spec.operator, live, params, self.lifecycle))
        before = slot.facts()
        try:
            h, read = self.sample_features(slot)
            seed, gate = build_seed(slot.spec, slot.topology, blueprint, blend, rng_seed, CPU, h.dtype)
            _probe(h, read, seed, gate, card, blend_spec.operator)
            gate = None if gate is None else gate.to(h.device)
            move = slot.plant(seed.to(h.device), gate, blueprint, blend_spec)
            self.adopt_group(slot_id)
        except Exception as error:
            slot.set_facts(before, None, None)
            raise GerminationError(f"slot {slot_id}, blueprint {blueprint}: {error}") from error
        self.topology_version += 1
        return move

    def advance(self, slot_id: str) -> SlotTransition:
        """Starts blending a trained seed in. IllegalOperation if its gate refuses."""
        self._require(slot_id, gate_blend(self.report(slot_id), self.lifecycle))
        return self.slot(slot_id).transition(SeedStage.BLENDING, Cause.POLICY)

    def fossilize(self, slot_id: str) -> SlotTransition:
        """Keeps a held seed for good. IllegalOperation if its gate refuses."""
        self._require(slot_id, gate_fossilize(self.report(slot_id), self.lifecycle))
        return self.slot(slot_id).transition(SeedStage.FOSSILIZED, Cause.POLICY)

    def prune(self, slot_id: str, cause: Cause = Cause.POLICY) -> SlotTransition:
        """Removes a live seed at once. IllegalOperation if its gate refuses; only the policy is gated."""
        if cause is Cause.POLICY:
            self._require(slot_id, gate_prune(self.report(slot_id), self.lifecycle))
        move = self.slot(slot_id).transition(SeedStage.PRUNED, cause)
        self.drop_group(slot_id)
        self.topology_version += 1
        return move

    def _require(self, slot_id: str, result: GateResult) -> None:
        if not result.passed:
            raise IllegalOperation(f"slot {slot_id}: gate {result.gate.value} refuses: {result.reasons}")

    # ---- reports

    def reports(self) -> tuple[SlotReport, ...]:
        """One record per slot, in execution order."""
        return tuple(self.report(slot_id) for slot_id in self.layout.slot_ids)

    def report(self, slot_id: str) -> SlotReport:
        """A slot as it is now, with all that the gates may know about it."""
        slot = self.slot(slot_id)
        seeded = slot.stage.has_seed
        return SlotReport(
            **as_keywords(slot.measured),
            **slot.occupant(),
            seed_id=slot.seed_id if seeded else None,
            stage=slot.stage,
            ramp_complete=slot.ramp_complete,
            probe_passed=slot.probe_passed,
            in_optimizer=self._optimizer.holds(slot.parameters()) if seeded and self._optimizer is not None else None,
            train_loss=self.train_loss,
            val_loss=self.val_loss,
            topology_version=self.topology_version,
        )


def build_seed(
    spec: SlotSpec,
    topology: str,
    blueprint: str,
    blend: str,
    rng_seed: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    version: int | None = None,
) -> tuple[Residual, GateNetwork | None]:
    """Makes the module of a seed, and its gate where the blend asks for one. The draws are the same on every device.

    `version` is that of the seed in a file; ValueError if seeds are built otherwise now.
    """
    generator = generator_for(rng_seed)
    seed = get_blueprint(blueprint, version).build(spec, generator).to(device, dtype)
    gated = get_blend(blend).operator == "gate"
    return seed, GateNetwork(spec.channels, topology, generator).to(device, dtype) if gated else None


def rebuild_seed(
    slot: SeedSlot, facts: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[Residual, GateNetwork | None]:
    """New modules for a slot whose facts say that it held a seed; their weights are to be loaded."""
    names, version = (facts["blueprint"], facts["blend"]), facts.get("blueprint_version", 1)
    return build_seed(slot.spec, slot.topology, *names, 0, device, dtype, version=version)


def _probe(
    h: Tensor, read: Tensor, seed: Residual, gate: GateNetwork | None, card: BlueprintCard, operator: str
) -> None:
    """Checks, on features like these, that the seed starts as an exact identity and costs what its card says.

    The features are drawn on the CPU, where the seed still is: the answer is needed now, and to wait for the device
    would hold up every other host on it.
    """
    x, source = (torch.randn(like.shape, generator=generator_for(0), dtype=h.dtype) for like in (h, read))
    with evaluating(seed):  # the statistics of a norm must not move
        d = delta(operator, x, seed(source), gate)
    if d.shape != x.shape or d.dtype != x.dtype:
        raise ValueError(f"features are {x.dtype} {tuple(x.shape)}, the seed gives {d.dtype} {tuple(d.shape)}")
    if not bool((d == 0).all()):
        raise ValueError("the seed does not start as an identity")
    params = sum(p.numel() for p in seed.parameters())
    if params != card.params:
        raise ValueError(f"the seed has {params} parameters, its card says {card.params}")
