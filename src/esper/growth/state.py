"""A growing network, its optimizers and what a grower remembers as data: for a rollback, and for going on elsewhere.

Everything is plain values and tensors, so that `torch.load(..., weights_only=True)` reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from esper.growth.history import GrowthEpoch, GrowthMove
from esper.growth.measuring import Measured
from esper.growth.network import AttachedNetwork
from esper.growth.objective import Score
from esper.growth.optimizers import UserOptimizers
from esper.growth.slot import SiteSlot, decode_tensor, encode_tensor
from esper.growth.tracing import SLOT
from esper.kasmina.blueprints import Residual
from esper.kasmina.network import rebuild_seed
from esper.kasmina.slot import GateNetwork
from esper.leyline import ActionOutcome, ActionSpec, EpochReport, ModelFileError, SeedStage, TrainingSignals, record
from esper.leyline.scale import MetricScale
from esper.tolaria.governor import GovernorMemory

FORMAT = 1
"""Of a grower's state."""
T = TypeVar("T")


def capture_growth(network: AttachedNetwork, optimizers: UserOptimizers) -> dict[str, Any]:
    """Copies all that decides how the network goes on: weights, topology, measurements, state of the optimizers."""
    facts = {
        "slots": {slot.spec.slot_id: slot.facts() for slot in network.all_slots()},
        "seed_order": list(optimizers.seed_order),
        "topology_version": network.topology_version,
        "train_loss": network.train_loss,
        "val_loss": network.val_loss,
        "gradients": optimizers.readings(),
    }
    with optimizers.whole():
        states = [_copied(optimizer.state_dict()) for optimizer in optimizers.optimizers]
    return {
        "facts": encode_tensor(facts),
        "model": {name: _copied(value) for name, value in network.model.state_dict().items()},
        "optimizers": states,
    }


def restore_growth(
    network: AttachedNetwork, optimizers: UserOptimizers, state: Mapping[str, Any], *, with_settings: bool
) -> None:
    """Puts a network and its optimizers back into a captured state, whatever has grown or gone since.

    Parameters of the model keep their identity; seeds are built anew from their blueprints.

    Args:
        network: Over the same model, with the same sites.
        optimizers: Built as those that were captured.
        state: What `capture_growth` returned.
        with_settings: False leaves learning rates and other settings as they are: a rollback does not turn back time.

    Raises:
        ModelFileError: The state belongs to another model or other sites. Nothing has changed.
    """
    facts = check_growth(network, optimizers, state)
    wanted = [(slot, facts["slots"][slot.spec.slot_id]) for slot in network.all_slots()]
    seeds = [seed_from_facts(network.model, slot, own, state["model"]) for slot, own in wanted]
    for (slot, own), seed in zip(wanted, seeds, strict=True):
        network.drop_group(slot.spec.slot_id)
        slot.set_facts(own, *seed)
    for slot_id in facts["seed_order"]:
        network.adopt_group(slot_id)
    network.model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers.optimizers, state["optimizers"], strict=True):
        _load_optimizer(optimizer, saved, with_settings)
    optimizers.set_readings(facts["gradients"])
    network.topology_version = facts["topology_version"]
    network.train_loss, network.val_loss = facts["train_loss"], facts["val_loss"]


def check_growth(network: AttachedNetwork, optimizers: UserOptimizers, state: Mapping[str, Any]) -> dict[str, Any]:
    """Refuses a state of another model, of other sites or other optimizers. Returns its facts.

    Raises:
        ModelFileError: It does not fit.
    """
    if not {"facts", "model", "optimizers"} <= state.keys():
        raise ModelFileError(f"this is no state of a growing network: it has only {', '.join(map(str, state))}")
    facts = decode_tensor(state["facts"])
    ours = {slot.spec.slot_id: slot.site.name for slot in network.all_slots()}
    theirs = {slot_id: slot["site"]["name"] for slot_id, slot in facts["slots"].items()}
    if ours != theirs:
        raise ModelFileError(f"the state is of a model with sites {_listed(theirs)}; this one has {_listed(ours)}")
    host = {name: tensor for name, tensor in network.model.state_dict().items() if SLOT not in name.split(".")}
    for name, tensor in host.items():
        found = state["model"].get(name)
        if not isinstance(found, Tensor) or found.shape != tensor.shape:
            shape = "missing" if found is None else f"of shape {tuple(found.shape)}"
            raise ModelFileError(f"tensor {name!r} is {shape} in the state; the model needs {tuple(tensor.shape)}")
    if len(state["optimizers"]) != len(optimizers.optimizers):
        raise ModelFileError(
            f"the state has {len(state['optimizers'])} optimizers, this run has {len(optimizers.optimizers)}"
        )
    return facts


def _listed(sites: Mapping[str, str]) -> str:
    return ", ".join(sites.values())


def seed_from_facts(
    model: nn.Module, slot: SiteSlot, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Residual | None, GateNetwork | None]:
    """New modules for a slot that held a seed; their weights are to be loaded."""
    if not SeedStage[facts["stage"]].has_seed:
        return None, None
    gamma = f"{slot.site.name}.{SLOT}.seed.gamma"
    if gamma not in tensors:
        raise ModelFileError(f"a seed has grown after {slot.site.name}, but its weight {gamma} is missing")
    module = model.get_submodule(slot.site.name)
    device = next((param.device for param in (*module.parameters(), *model.parameters())), torch.device("cpu"))
    return rebuild_seed(slot, facts, device, tensors[gamma].dtype)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], with_settings: bool) -> None:
    groups = saved["param_groups"]
    if not with_settings:
        now = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        groups = [{**settings, "params": group["params"]} for settings, group in zip(now, groups, strict=True)]
    optimizer.load_state_dict({**saved, "param_groups": groups})


def _copied(value: Any) -> Any:
    """A deep copy; tensors in the memory order they have, because kernels of optimizers walk both without looking."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(entry) for entry in value)
    return copy.deepcopy(value)


# ---- the grower


@record
class RollbackState:
    """What goes back with the network in a rollback."""

    governor: GovernorMemory
    tracker: dict[str, Any]
    signals: TrainingSignals
    measured: Measured
    """Of the epoch that is returned to."""


@record
class GrowerState:
    """What a grower must remember besides the network."""

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


def pack_record(made: Any) -> Tensor:
    """A record as a tensor, which every kind of checkpoint can hold."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(made)), dtype=torch.uint8)


def unpack_record(packed: Tensor, kind: type[T]) -> T:
    """Reads what `pack_record` wrote."""
    return msgspec.msgpack.decode(bytes(packed.cpu().numpy()), type=kind)


def read_grower_state(state: Mapping[str, Any]) -> GrowerState:
    """What a saved grower remembered; ModelFileError if it is none, or of another format."""
    try:
        found = unpack_record(state["books"], GrowerState)
    except (KeyError, AttributeError, msgspec.MsgspecError) as error:
        raise ModelFileError(f"this is not the state_dict of a Grower: {error}") from error
    if found.format != FORMAT:
        raise ModelFileError(f"the state has format {found.format}, this release reads format {FORMAT}")
    return found
