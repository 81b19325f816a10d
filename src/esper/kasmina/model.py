"""The growing model: a host, its slots, and the passes through both. It knows no optimizer step, reward or policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprints_for, get_blueprint
from esper.kasmina.hosts import INPUT, Host
from esper.kasmina.layers import evaluating
from esper.kasmina.layout import host_layout, slot_specs
from esper.kasmina.network import GrowingNetwork, SeedOptimizer
from esper.kasmina.slot import SeedSlot
from esper.leyline import DEFAULT_LIFECYCLE, HostLayout, LifecycleConfig, SeedStage, SlotSpec

Call = Callable[..., Tensor]


class Station(NamedTuple):
    """A segment of the host and what happens after it; None where nothing does."""

    segment: Call | None
    """None for a further slot after the same segment."""
    slot_id: str | None
    extend: Call | None
    """The slot, in a pass of the whole network."""
    blended: Call | None
    """The slot with its seed switched on, in a pass of coalitions."""
    source: int | None = None
    """The segment whose output a span reads: the slot is given it too."""
    keeps: int | None = None
    """The segment that ends here, if a span reads its output."""


class MorphogeneticModel(nn.Module, GrowingNetwork):
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
        self.slots = nn.ModuleDict(
            {spec.slot_id: SeedSlot(spec, slot_topology(spec, host.topology), lifecycle) for spec in specs}
        )
        self.layout = host_layout(host, self.sample, specs, self.offered) if layout is None else layout
        self.topology_version = 0
        self.train_loss = self.val_loss = None
        self._optimizer = None

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
        return tuple(cast("Iterable[SeedSlot]", self.slots.values()))

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

    def bind(self, optimizer: SeedOptimizer) -> None:
        """From now on, seeds enter and leave this optimizer together with the model.

        Raises:
            ValueError: The optimizer does not hold all current parameters.
        """
        if not optimizer.holds(self.parameters()):
            raise ValueError(
                "the optimizer does not hold all of the model's parameters; build it from parameter_groups()"
            )
        self._optimizer = optimizer

    # ---- passes

    def places(self) -> Iterator[tuple[nn.Module | None, SeedSlot | None]]:
        """Each segment with the slot after it; further slots follow without a segment."""
        after: dict[int, list[SeedSlot]] = {}
        for slot in self.all_slots():
            after.setdefault(slot.spec.segment_idx, []).append(slot)
        for index, segment in enumerate(self.host.segments):
            first, *others = after.get(index, [None])
            yield segment, first
            yield from ((None, slot) for slot in others)

    def stations(self) -> list[Station]:
        """The way through the network as it is now."""
        found, index = [], INPUT
        for segment, slot in self.places():
            index += segment is not None
            station = Station(segment, None, None, None, keeps=index)
            if slot is not None and slot.stage is not SeedStage.DORMANT:
                source = None if slot.spec.source is None else slot.spec.source.segment_idx
                blended = slot.blended if slot.stage.is_blended else None
                station = Station(segment, slot.spec.slot_id, slot, blended, source, index)
            found.append(station)
        return _keep_what_is_read(found)

    def forward(self, x: Tensor, stations: Sequence[Station] | None = None) -> Tensor:
        """Host and seeds, each seed according to its stage.

        Args:
            x: Rows.
            stations: The way through the network, if it was prepared; it must be that of the network as it is now.
        """
        kept = {INPUT: x}
        for station in self.stations() if stations is None else stations:
            if station.segment is not None:
                x = station.segment(x)
            if station.extend is not None:
                x = station.extend(x) if station.source is None else station.extend(x, kept[station.source])
            if station.keeps is not None:
                kept[station.keeps] = x
        return x

    def forward_coalitions(
        self, x: Tensor, coalitions: Sequence[frozenset[str]], stations: Sequence[Station] | None = None
    ) -> list[Tensor]:
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
            streams = [Stream(x, {INPUT: x}, list(range(len(coalitions))))]
            for station in self.stations() if stations is None else stations:
                if station.segment is not None:
                    streams = [stream._replace(h=station.segment(stream.h)) for stream in streams]
                if station.blended is not None:
                    streams = _fork(streams, station, coalitions)
                if station.keeps is not None:
                    streams = [s._replace(kept={**s.kept, station.keeps: s.h}) for s in streams]
        outputs: list[Tensor] = [x] * len(coalitions)
        for stream in streams:
            for member in stream.members:
                outputs[member] = stream.h
        return outputs

    # ---- growth

    def sample_features(self, slot: SeedSlot) -> tuple[Tensor, Tensor]:
        """The sample's features where a slot adds to them, and where it reads them."""
        spec = slot.spec
        source = spec.segment_idx if spec.source is None else spec.source.segment_idx
        x, kept = self.sample, {INPUT: self.sample}
        with evaluating(self):
            # Seeds on the way change values only, and it is shapes and types that count here.
            for index in range(spec.segment_idx + 1):
                x = kept[index] = self.host.segments[index](x)
        return x, kept[source]


def slot_topology(spec: SlotSpec, host: str) -> str:
    """What the features are that a slot adds to: a host of images puts out rows."""
    return "mlp" if spec.source is not None and spec.source.stride is None else host


def _keep_what_is_read(stations: Sequence[Station]) -> list[Station]:
    """Leaves `keeps` only where a segment, with all its slots, ends and a span reads what it puts out."""
    read = {station.source for station in stations}
    last = {station.keeps: position for position, station in enumerate(stations)}
    return [
        station if station.keeps in read and last[station.keeps] == position else station._replace(keeps=None)
        for position, station in enumerate(stations)
    ]


class Stream(NamedTuple):
    """Coalitions that agree up to a point of the network."""

    h: Tensor
    kept: dict[int, Tensor]
    """What spans read further on."""
    members: list[int]


def _fork(streams: Sequence[Stream], station: Station, coalitions: Sequence[frozenset[str]]) -> list[Stream]:
    """Splits each stream into the coalitions that switch this seed on and those that do not."""
    assert station.blended is not None
    forked = []
    for h, kept, members in streams:
        on = [m for m in members if station.slot_id in coalitions[m]]
        off = [m for m in members if station.slot_id not in coalitions[m]]
        if on:
            source = () if station.source is None else (kept[station.source],)
            forked.append(Stream(station.blended(h, *source), kept, on))
        if off:
            forked.append(Stream(h, kept, off))
    return forked
