"""What every host is: a flat list of segments and the places between them where something may grow.

A host knows nothing about seeds. Its forward pass is the fold over its segments, so whoever owns the slots can run
the same fold and act in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from esper.leyline import check_slot_id, record

TOPOLOGIES: tuple[str, ...] = ("mlp", "cnn", "transformer")
CHANNEL_AXIS: dict[str, int] = {"mlp": -1, "cnn": 1, "transformer": -1}


@record
class HostSpec:
    """A host as data: enough to build it again from a file."""

    kind: str
    kwargs: Mapping[str, Any]
    """Plain JSON values."""


class Host(nn.Module):
    """A network as an ordered list of segments.

    Attributes:
        topology: Which blueprints fit: "mlp" (rows of features), "cnn" (images) or "transformer" (sequences).
        segments: The layers, in order.
        slots: Slot id -> index of the segment it follows, in execution order.
        spec: How to build this host again.
    """

    def __init__(self, topology: str, segments: list[nn.Module], slots: Mapping[str, int], spec: HostSpec) -> None:
        super().__init__()
        if topology not in TOPOLOGIES:
            raise ValueError(f"unknown topology {topology!r}. Known: {', '.join(TOPOLOGIES)}")
        _check_slots(slots, len(segments))
        self.topology = topology
        self.segments = nn.ModuleList(segments)
        self.slots = dict(sorted(slots.items(), key=lambda item: item[1]))
        self.spec = spec
        # Coalition passes share feature tensors, so no layer may overwrite its input.
        for part in self.modules():
            if getattr(part, "inplace", False) is True:
                part.inplace = False  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """The fold over the segments."""
        for segment in self.segments:
            x = segment(x)
        return x


def _check_slots(slots: Mapping[str, int], num_segments: int) -> None:
    taken: dict[int, str] = {}
    for slot_id, index in slots.items():
        check_slot_id(slot_id)
        if not 0 <= index < num_segments - 1:
            raise ValueError(
                f"slot {slot_id} follows segment {index}; a host of {num_segments} segments has slots after "
                f"segments 0..{num_segments - 2}"
            )
        if index in taken:
            raise ValueError(f"slots {taken[index]} and {slot_id} both follow segment {index}; use one of them")
        taken[index] = slot_id
