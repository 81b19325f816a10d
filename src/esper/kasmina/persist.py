"""Saving a growing model and building it again: architecture and lifecycle as JSON, weights as safetensors, one file.

The same two parts serve as the state that a rollback returns to. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from esper.kasmina.blueprints import Residual
from esper.kasmina.hosts import Host, HostSpec, build_host
from esper.kasmina.layers import generator_for
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.network import ModelOptimizer, rebuild_seed
from esper.kasmina.slot import GateNetwork
from esper.leyline import LifecycleConfig, ModelFileError, SeedStage, record
from esper.leyline.files import write_atomic

FORMAT = 1
OPTIMIZER_PREFIX = "optimizer."
SAMPLE = "sample"


@record
class ModelState:
    """A model as data: `facts` are JSON values, `tensors` are copies."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@record
class LoadedModel:
    """A model built from a file, and what was saved with it."""

    model: MorphogeneticModel
    optimizer_state: Mapping[str, Tensor]
    """For `load_named_state` of an optimizer over `model.parameter_groups()`; empty if none was saved."""
    extra: Mapping[str, Any]


def capture(
    model: MorphogeneticModel, optimizer: ModelOptimizer | None = None, extra: Mapping[str, Any] | None = None
) -> ModelState:
    """Copies everything that determines how the model goes on: weights, lifecycle, measurements, optimizer state."""
    tensors, aliases = untied(model)
    if optimizer is not None:
        tensors |= {OPTIMIZER_PREFIX + name: tensor for name, tensor in optimizer.named_state().items()}
    tensors = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    tensors[SAMPLE] = model.sample.clone(memory_format=torch.contiguous_format)
    facts = {
        "format": FORMAT,
        "host": asdict(model.host.spec),
        "topology": model.host.topology,
        "lifecycle": asdict(model.lifecycle),
        "blueprints": list(model.offered),
        "topology_version": model.topology_version,
        "train_loss": model.train_loss,
        "val_loss": model.val_loss,
        "training": model.training,
        "slots": {slot.spec.slot_id: slot.facts() for slot in model.all_slots()},
        "aliases": aliases,
        "has_optimizer": optimizer is not None,
        "extra": dict(extra or {}),
    }
    return ModelState(facts=facts, tensors=tensors)


def untied(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a module with shared ones once, and (other name -> first name) for those."""
    first: dict[int, str] = {}
    tensors, aliases = {}, {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) == name:
            tensors[name] = tensor
        else:
            aliases[name] = first[id(tensor)]
    return tensors, aliases


def restore(model: MorphogeneticModel, state: ModelState, optimizer: ModelOptimizer | None = None) -> None:
    """Puts a model of the same host back into a captured state, whatever has grown or gone since.

    Parameters of the host keep their identity; seeds are built anew from their blueprints. A bound optimizer follows.

    Raises:
        ModelFileError: The state belongs to another architecture. Nothing has changed.
    """
    facts, weights = state.facts, _weights(state)
    if optimizer is not None and not facts["has_optimizer"]:
        raise ModelFileError("the state was captured without an optimizer, so it cannot restore one")
    seeds = _rebuild_seeds(model, state)
    _check_weights(_architecture(model, seeds), weights, optimizer_part(state))
    for slot in model.all_slots():
        slot_id = slot.spec.slot_id
        model.drop_group(slot_id)
        slot.set_facts(facts["slots"][slot_id], *seeds[slot_id])
        if slot.stage.has_seed:
            model.adopt_group(slot_id)
    model.load_state_dict(weights)
    if optimizer is not None:
        optimizer.load_named_state(optimizer_part(state))
    model.topology_version = facts["topology_version"]
    model.train_loss, model.val_loss = facts["train_loss"], facts["val_loss"]
    model.train(facts["training"])


def optimizer_part(state: ModelState) -> dict[str, Tensor]:
    """The optimizer's share of a captured state."""
    return {
        name.removeprefix(OPTIMIZER_PREFIX): tensor
        for name, tensor in state.tensors.items()
        if name.startswith(OPTIMIZER_PREFIX)
    }


def _weights(state: ModelState) -> dict[str, Tensor]:
    """The model's share of a captured state, tied tensors under all their names."""
    weights = {n: t for n, t in state.tensors.items() if n != SAMPLE and not n.startswith(OPTIMIZER_PREFIX)}
    return weights | {name: weights[source] for name, source in state.facts["aliases"].items() if source in weights}


Seeds = dict[str, tuple[Residual | None, GateNetwork | None]]


def _rebuild_seeds(model: MorphogeneticModel, state: ModelState) -> Seeds:
    """New modules for every slot that held a seed; their weights come later."""
    recorded = state.facts["slots"]
    if set(recorded) != set(model.slots):
        raise ModelFileError(f"the state has slots {', '.join(recorded)}; the model has {', '.join(model.slots)}")
    seeds: Seeds = {}
    for slot in model.all_slots():
        slot_id = slot.spec.slot_id
        facts, gamma = recorded[slot_id], state.tensors.get(f"slots.{slot_id}.seed.gamma")
        seeds[slot_id] = (None, None)
        if SeedStage[facts["stage"]].has_seed:
            dtype = torch.float32 if gamma is None else gamma.dtype
            seeds[slot_id] = rebuild_seed(slot, facts, model.sample.device, dtype)
    return seeds


def _architecture(model: MorphogeneticModel, seeds: Seeds) -> dict[str, Tensor]:
    """Every tensor, by name, of the host with these seeds in its slots."""
    tensors = {f"host.{name}": tensor for name, tensor in model.host.state_dict().items()}
    for slot_id, (seed, gate) in seeds.items():
        for kind, part in (("seed", seed), ("gate", gate)):
            if part is not None:
                tensors |= {f"slots.{slot_id}.{kind}.{name}": t for name, t in part.state_dict().items()}
    return tensors


def _check_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        if name not in weights:
            raise ModelFileError(f"tensor {name!r} is missing")
        found = weights[name]
        if (tensor.shape, tensor.dtype) != (found.shape, found.dtype):
            raise ModelFileError(
                f"tensor {name!r} is {found.dtype} {tuple(found.shape)}, "
                f"the architecture needs {tensor.dtype} {tuple(tensor.shape)}"
            )
    extra = [name for name in weights if name not in own]
    extra += [OPTIMIZER_PREFIX + name for name in optimizer if name.rpartition(".")[0] not in own]
    if extra:
        raise ModelFileError(f"tensor {extra[0]!r} belongs to nothing in this architecture")


# ---- files


def save_model(
    model: MorphogeneticModel,
    path: str | Path,
    *,
    optimizer: ModelOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the model, grown parts and all, to one safetensors file.

    Args:
        model: In any stage of growth.
        path: Target file; an existing one is replaced in one step.
        optimizer: Saved too, so that training can go on to the bit.
        extra: JSON values of your own, such as the task's name.
    """
    state = capture(model, optimizer, extra)
    facts = encode_facts(state.facts)
    metadata = {"esper": facts, "sha256": _digest(facts, state.tensors)}
    write_file(Path(path), to_safetensors(dict(state.tensors), metadata))


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file in one step; a missing folder is named."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: there is no folder {path.parent}")
    write_atomic(path, content)


def load_model(path: str | Path, *, host_factory: Callable[[], Host] | None = None) -> LoadedModel:
    """Builds a saved model again, in a fresh process if need be.

    Args:
        path: A file written by `save_model`.
        host_factory: Needed for hosts made by `wrap_sequential`: builds the same host, weights do not matter.

    Raises:
        FileNotFoundError: There is no such file.
        ModelFileError: The file is damaged, of another kind, or does not fit this code.
    """
    path = Path(path)
    state = _read(path)
    try:
        model = build(state, host_factory)
    except KeyError as error:
        raise ModelFileError(f"{path.name}: entry {error} is missing or unknown") from error
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelFileError(f"{path.name}: {error}") from error
    return LoadedModel(model=model, optimizer_state=optimizer_part(state), extra=state.facts["extra"])


def build(state: ModelState, host_factory: Callable[[], Host] | None = None) -> MorphogeneticModel:
    """Makes a new model from a captured state."""
    facts = state.facts
    spec = HostSpec(kind=facts["host"]["kind"], kwargs=facts["host"]["kwargs"])
    if spec.kind == "user":
        if host_factory is None:
            raise ModelFileError("the host is a wrapped model of your own; pass host_factory=... to build it again")
        host = host_factory()
    else:
        dtypes = (t.dtype for n, t in state.tensors.items() if n.startswith("host.") and t.is_floating_point())
        host = build_host(spec, generator_for(0)).to(next(dtypes, torch.float32))
    model = MorphogeneticModel(
        host,
        state.tensors[SAMPLE],
        LifecycleConfig(**facts["lifecycle"]),
        slots=list(facts["slots"]),
        blueprints=facts["blueprints"],
    )
    restore(model, state)
    return model


def _read(path: Path) -> ModelState:
    if path.exists() and not path.is_file():  # a pipe would be waited for, a device has no end
        raise ModelFileError(f"{path.name} is not a file")
    with path.open("rb") as file:
        start = file.read(2)
    try:
        with safe_open(str(path), framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (a file handle, not a dict)
    except SafetensorError as error:
        # Asked only now: the first bytes of a safetensors file are a length, which may look like anything.
        if start == b"PK" or start[:1] == b"\x80":
            raise ModelFileError(f"{path.name} is a pickle file; Esper reads safetensors files only") from error
        raise ModelFileError(f"{path.name} is damaged or not a safetensors file: {error}") from error
    if "esper" not in metadata or "sha256" not in metadata:
        raise ModelFileError(f"{path.name} is a safetensors file, but not one written by Esper's save_model")
    if _digest(metadata["esper"], tensors) != metadata["sha256"]:
        raise ModelFileError(f"{path.name} is damaged: its content does not match its sha256")
    try:
        facts = decode_facts(metadata["esper"])
    except ModelFileError as error:
        raise ModelFileError(f"{path.name}: {error}") from error
    if facts.get("format") != FORMAT:
        found = facts.get("format")
        raise ModelFileError(f"{path.name} has format {found}, this version of Esper reads format {FORMAT}")
    return ModelState(facts=facts, tensors=tensors)


def _digest(facts: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous().cpu()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def encode_facts(facts: Mapping[str, Any]) -> str:
    """Canonical JSON. Numbers that are not finite, which JSON does not have, become tagged strings."""
    return json.dumps(_tag(facts), sort_keys=True, allow_nan=False, separators=(",", ":"))


def decode_facts(text: str) -> dict[str, Any]:
    """Reads what `encode_facts` wrote.

    Raises:
        ModelFileError: It is something else.
    """
    try:
        facts = json.loads(text, object_hook=lambda found: float(found["$float"]) if "$float" in found else found)
    except (RecursionError, TypeError, ValueError) as error:
        raise ModelFileError(f"its facts are no JSON ({error})") from error
    if not isinstance(facts, dict):
        raise ModelFileError(f"its facts are a {type(facts).__name__}; expected an object")
    return facts


def _tag(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, Mapping):
        return {key: _tag(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_tag(entry) for entry in value]
    return value
