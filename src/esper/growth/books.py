"""What a grower must remember besides the network, as records that are saved and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from esper.growth.history import GrowthEpoch, GrowthMove
from esper.growth.measuring import Measured
from esper.growth.objective import Score
from esper.leyline import (
    ActionOutcome,
    ActionSpec,
    EpochReport,
    ModelFileError,
    TrainingSignals,
    record,
)
from esper.leyline.scale import MetricScale
from esper.tolaria.governor import GovernorMemory

FORMAT = 1
"""Of a grower's state."""


@record
class KeptBooks:
    """What goes back with the network in a rollback."""

    governor: GovernorMemory
    tracker: dict[str, Any]
    signals: TrainingSignals
    measured: Measured
    """Of the epoch that is returned to."""


@record
class GrowerBooks:
    """What a grower must remember besides the network, as it is saved."""

    format: int
    epochs: int
    seed: int
    epoch: int | None
    in_epoch: bool
    reports: tuple[EpochReport, ...]
    """From reset on."""
    outcomes: tuple[ActionOutcome, ...]
    specs: tuple[ActionSpec, ...]
    history: tuple[GrowthEpoch, ...]
    moves: tuple[GrowthMove, ...]
    untrained: Score
    scale: MetricScale
    tracker: dict[str, Any]
    governor: GovernorMemory
    num_rollbacks: int
    recovery_left: int


def pack_books(books: Any) -> Tensor:
    """Books as a tensor, which every kind of checkpoint can hold."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(books)), dtype=torch.uint8)


def unpack_books(packed: Tensor, kind: Any) -> Any:
    """Reads what `pack_books` wrote."""
    return msgspec.msgpack.decode(bytes(packed.cpu().numpy()), type=kind)


def read_books(state: Mapping[str, Any]) -> GrowerBooks:
    """The books in a saved state of a grower; ModelFileError if it is none, or of another format."""
    try:
        books = unpack_books(state["books"], GrowerBooks)
    except (KeyError, AttributeError, msgspec.MsgspecError) as error:
        raise ModelFileError(f"this is not the state_dict of a Grower: {error}") from error
    assert isinstance(books, GrowerBooks)
    if books.format != FORMAT:
        raise ModelFileError(f"the state has format {books.format}, this release reads format {FORMAT}")
    return books
