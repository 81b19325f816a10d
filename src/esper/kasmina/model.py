"""The growing model: a host, its slots, and the passes through both. It knows no optimizer step, reward or policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import Residual, blueprints_for, get_blueprint
from esper.kasmina.hosts import Host
from esper.kasmina.layers import evaluating, generator_for
from esper.kasmina.layout import host_layout, slot_specs
from esper.kasmina.slot import GateNetwork, SeedSlot, delta
from esper.leyline import (
    DEFAULT_LIFECYCLE,
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
    gate_blend,
    gate_fossilize,
    gate_germinate,
    gate_prune,
    get_blend,
    record,
)


class ModelOptimizer(Protocol):
    """What a model asks of its optimizer: keep exactly its parameters, one group per seed, with state by name."""

    def add_group(self, name: str, params: Mapping[str, nn.Parameter]) -> None:
        """Starts to train these parameters."""

    def remove_group(self, name: str) -> None:
        """Forgets a group and all state of its parameters; a name it does not know is already forgotten."""

    def holds(self, params: Iterable[nn.Parameter]) -> bool:
        """True if every one of these parameters is trained."""

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


class MorphogeneticModel(nn.Module):
    """A host with slots in which seeds germinate, train behind it, blend in, and are kept or pruned.

    Args:
        host: The network to grow.
        sample: At least two rows of real input; the first two are kept to probe new seeds.
        lifecycle: Limits of growth.
        slots: The slots to offer; all of the host's if None.
        blueprints: The blueprints to offer; all of the host's topology if None.
        layout: What was measured before on a model of the same host, slots and blueprints; None measures it now.
    """

    def __init__(
        self,
        host: Host,
        sample: Tensor,
        lifecycle: LifecycleConfig = DEFAULT_LIFECYCLE,
        *,
        slots: Sequence[str] | None = None,
        blueprints: Sequence[str] | None = None,
        layout: HostLayout | None = None,
    ) -> None:
        super().__init__()
        if sample.shape[0] < 2:
            raise ValueError(f"sample needs at least two rows, got {sample.shape[0]}")
        self.host = host
        self.lifecycle = lifecycle
        self.sample: Tensor
        self.register_buffer(
            "sample", sample[:2].clone(), persistent=False
        )  # a buffer, so that it moves with the model
        self.offered = tuple(blueprints_for(host.topology) if blueprints is None else blueprints)
        for key in self.offered:
            get_blueprint(key)
        names = host.slots if slots is None else slots
        specs = slot_specs(host, self.sample, names) if layout is None else layout.slots
        self.slots = nn.ModuleDict({spec.slot_id: SeedSlot(spec, host.topology, lifecycle) for spec in specs})
        self._slot_after: list[SeedSlot | None] = [None] * len(host.segments)
        for spec in specs:
            self._slot_after[spec.segment_idx] = self.slot(spec.slot_id)
        self.layout = host_layout(host, self.sample, specs, self.offered) if layout is None else layout
        self.topology_version = 0
        self.train_loss: float | None = None
        self.val_loss: float | None = None
        self._optimizer: ModelOptimizer | None = None
        self._penalty_unread = False

    # ---- structure

    def slot(self, slot_id: str) -> SeedSlot:
        """Looks a slot up; ValueError with the known ids if there is none."""
        if slot_id not in self.slots:
            raise ValueError(f"unknown slot {slot_id!r}. Known: {', '.join(self.slots)}")
        slot = self.slots[slot_id]
        assert isinstance(slot, SeedSlot)
        return slot

    def all_slots(self) -> tuple[SeedSlot, ...]:
        """The slots in execution order."""
        return tuple(self.slot(slot_id) for slot_id in self.slots)

    def host_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of the host by name, tied ones once."""
        return {f"host.{name}": p for name, p in self.host.named_parameters()}

    def slot_parameters(self, slot_id: str) -> dict[str, nn.Parameter]:
        """Every parameter of a slot's seed and gate by name."""
        return {f"slots.{slot_id}.{name}": p for name, p in self.slot(slot_id).named_parameters()}

    def parameter_groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """All parameters by group: "host", then one group per occupied slot, named by its id."""
        groups = {"host": self.host_parameters()}
        for slot in self.all_slots():
            if slot.stage.has_seed:
                groups[slot.spec.slot_id] = self.slot_parameters(slot.spec.slot_id)
        return groups

    def bind(self, optimizer: ModelOptimizer) -> None:
        """From now on, seeds enter and leave this optimizer together with the model.

        Raises:
            ValueError: The optimizer does not hold all current parameters.
        """
        if not optimizer.holds(self.parameters()):
            raise ValueError(
                "the optimizer does not hold all of the model's parameters; build it from parameter_groups()"
            )
        self._optimizer = optimizer

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
        host = sum(p.numel() for p in self.host.parameters())
        fossils = sum(slot.num_params() for slot in self.all_slots() if slot.stage is SeedStage.FOSSILIZED)
        total = host + sum(slot.num_params() for slot in self.all_slots())
        return ParamCounts(host=host, committed=host + fossils, total=total)

    @property
    def num_live(self) -> int:
        """Seeds that are neither committed nor gone, those of this step included."""
        return sum(slot.stage.is_live or slot.stage is SeedStage.GERMINATED for slot in self.all_slots())

    # ---- passes

    def forward(self, x: Tensor) -> Tensor:
        """Host and seeds, each seed according to its stage."""
        for segment, slot in zip(self.host.segments, self._slot_after, strict=True):
            x = segment(x)
            if slot is not None and slot.stage is not SeedStage.DORMANT:
                x = slot(x)
        self._penalty_unread = self.training
        return x

    def penalty(self) -> Tensor | None:
        """What training seeds add to the loss of the last training pass; None if no seed is ready to train.

        Add it before backward: `(loss + penalty).backward()`. It reaches seed parameters only. Reading clears it.

        Raises:
            RuntimeError: It was read already, or there was no training pass.
        """
        if not self._penalty_unread:
            raise RuntimeError("penalty() belongs to one training forward pass and is read once after it")
        self._penalty_unread = False
        parts = [part for slot in self.all_slots() if (part := slot.take_penalty()) is not None]
        return torch.stack(parts).sum() if parts else None

    def forward_coalitions(self, x: Tensor, coalitions: Sequence[frozenset[str]]) -> list[Tensor]:
        """Outputs with only the named slots' seeds switched on, at their current alpha; one output per coalition.

        Coalitions that agree up to a point of the network share the computation up to there. Every result is bit-equal
        to a pass of its own.

        Raises:
            RuntimeError: The model is in training mode.
            ValueError: A coalition is listed twice or names a slot without a blended seed.
        """
        if self.training:
            raise RuntimeError("forward_coalitions needs eval mode: batch norm would move. Call model.eval() first")
        blended = {slot.spec.slot_id for slot in self.all_slots() if slot.stage.is_blended}
        for coalition in coalitions:
            if not coalition <= blended:
                raise ValueError(
                    f"coalition names {sorted(coalition - blended)}, but blended seeds are in {sorted(blended)}"
                )
        if len(set(coalitions)) != len(coalitions):
            raise ValueError("a coalition is listed twice; list each once and look the result up")
        with torch.inference_mode():
            streams: list[tuple[Tensor, list[int]]] = [(x, list(range(len(coalitions))))]
            for segment, slot in zip(self.host.segments, self._slot_after, strict=True):
                streams = [(segment(h), members) for h, members in streams]
                if slot is not None and slot.stage.is_blended:
                    streams = _fork(streams, slot, coalitions)
        outputs: list[Tensor] = [x] * len(coalitions)
        for out, members in streams:
            for member in members:
                outputs[member] = out
        return outputs

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
        self._require(
            slot_id, gate_germinate(slot.stage, card, self.num_live, self.param_counts().total, self.lifecycle)
        )
        before = slot.facts()
        try:
            h = self._features_after(slot.spec.segment_idx)
            seed, gate = build_seed(slot.spec, self.host.topology, blueprint, blend, rng_seed, h.device, h.dtype)
            _probe(h, seed, gate, card, blend_spec.operator)
            move = slot.plant(seed, gate, blueprint, blend_spec)
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

    def _features_after(self, segment_idx: int) -> Tensor:
        """The sample's features where a slot would read them."""
        x = self.sample
        with evaluating(self):
            for index in range(segment_idx + 1):
                x = self.host.segments[index](x)
                slot = self._slot_after[index]
                if slot is not None and index < segment_idx:
                    x = slot(x)
        return x

    # ---- reports

    def reports(self) -> tuple[SlotReport, ...]:
        """One record per slot, in execution order."""
        return tuple(self.report(slot_id) for slot_id in self.slots)

    def report(self, slot_id: str) -> SlotReport:
        """A slot as it is now, with all that the gates may know about it."""
        slot = self.slot(slot_id)
        seeded = slot.stage.has_seed
        return SlotReport(
            **asdict(slot.measured),
            slot_id=slot_id,
            seed_id=slot.seed_id if seeded else None,
            blueprint=slot.blueprint,
            blend=None if slot.blend is None else slot.blend.name,
            params=slot.num_params(),
            stage=slot.stage,
            epochs_in_stage=slot.epochs_in_stage,
            age_epochs=slot.age_epochs,
            alpha=slot.alpha,
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
) -> tuple[Residual, GateNetwork | None]:
    """Makes the module of a seed, and its gate where the blend asks for one. The draws are the same on every device."""
    generator = generator_for(rng_seed)
    seed = get_blueprint(blueprint).build(spec.channels, generator).to(device, dtype)
    gated = get_blend(blend).operator == "gate"
    return seed, GateNetwork(spec.channels, topology, generator).to(device, dtype) if gated else None


def _probe(h: Tensor, seed: Residual, gate: GateNetwork | None, card: BlueprintCard, operator: str) -> None:
    """Checks on real features that the seed starts as an exact identity and costs what its card says."""
    with torch.no_grad():
        d = delta(operator, h, seed(h), gate)
    if d.shape != h.shape or d.dtype != h.dtype or d.device != h.device:
        raise ValueError(
            f"features are {h.dtype} {tuple(h.shape)} on {h.device}, "
            f"the seed gives {d.dtype} {tuple(d.shape)} on {d.device}"
        )
    if not bool((d == 0).all()):
        raise ValueError("the seed does not start as an identity")
    params = sum(p.numel() for p in seed.parameters())
    if params != card.params:
        raise ValueError(f"the seed has {params} parameters, its card says {card.params}")


def _fork(
    streams: Sequence[tuple[Tensor, list[int]]], slot: SeedSlot, coalitions: Sequence[frozenset[str]]
) -> list[tuple[Tensor, list[int]]]:
    """Splits each stream into the coalitions that switch this seed on and those that do not."""
    forked = []
    for h, members in streams:
        on = [m for m in members if slot.spec.slot_id in coalitions[m]]
        off = [m for m in members if slot.spec.slot_id not in coalitions[m]]
        if on:
            forked.append((slot.blended(h), on))
        if off:
            forked.append((h, off))
    return forked
