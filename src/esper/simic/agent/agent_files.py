"""An agent as bytes: safetensors for tensors, JSON for the rest, nothing pickled. Others decide where bytes go.

Optimizer state is stored by parameter name. Anything missing, extra or of another shape is refused before anything is
changed, so a load happens whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from esper.leyline import ModelFileError

FORMAT_VERSION = 2
POLICY_FILE = "policy.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
FACTS_FILE = "agent.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def pack(network: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> dict[str, bytes]:
    """The three files of an agent, by name."""
    moments = {
        f"{name}:{moment}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in network.named_parameters()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }
    text = json.dumps({"format": FORMAT_VERSION, **facts}, allow_nan=False, indent=1)
    return {
        POLICY_FILE: save_tensors({name: tensor.contiguous() for name, tensor in network.state_dict().items()}),
        OPTIMIZER_FILE: save_tensors(moments),
        FACTS_FILE: text.encode(),
    }


def write_files(directory: str | Path, files: Mapping[str, bytes]) -> None:
    """Writes the files of an agent into a directory, which is made if needed."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def read_files(directory: str | Path) -> dict[str, bytes]:
    """Those files of an agent that are there."""
    paths = [Path(directory) / name for name in (POLICY_FILE, OPTIMIZER_FILE, FACTS_FILE)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def read_facts(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The JSON part.

    Raises:
        ModelFileError: A file is missing, is no JSON, or has another format version.
    """
    for name in (POLICY_FILE, OPTIMIZER_FILE, FACTS_FILE):
        if name not in files:
            raise ModelFileError(f"agent: {name} is missing. Expected {POLICY_FILE}, {OPTIMIZER_FILE} and {FACTS_FILE}")
    try:
        facts = json.loads(files[FACTS_FILE])
    except ValueError as error:
        raise ModelFileError(f"{FACTS_FILE}: not JSON ({error}); the file is damaged or not an agent's") from error
    version = facts.pop("format", None) if isinstance(facts, dict) else None
    if version != FORMAT_VERSION:
        raise ModelFileError(f"{FACTS_FILE}: format {version}; this release reads format {FORMAT_VERSION}")
    return dict(facts)


def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a record with its lists as tuples, which JSON does not know."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def unpack_(network: nn.Module, optimizer: torch.optim.Optimizer, files: Mapping[str, bytes]) -> None:
    """Loads weights, statistics and optimizer moments.

    Raises:
        ModelFileError: A tensor is missing, unexpected or of another shape. Nothing was changed.
    """
    weights = _tensors(files, POLICY_FILE)
    _compare(POLICY_FILE, weights, {name: tensor.shape for name, tensor in network.state_dict().items()})
    moments = _tensors(files, OPTIMIZER_FILE)
    if moments:
        shapes = {
            f"{name}:{moment}": torch.Size(()) if moment == "step" else parameter.shape
            for name, parameter in network.named_parameters()
            for moment in _MOMENTS
        }
        _compare(OPTIMIZER_FILE, moments, shapes)
    network.load_state_dict(weights)
    for name, parameter in network.named_parameters():
        if moments:
            optimizer.state[parameter] = {moment: moments[f"{name}:{moment}"] for moment in _MOMENTS}


def _tensors(files: Mapping[str, bytes], name: str) -> dict[str, Tensor]:
    try:
        return load_tensors(files[name])
    except (SafetensorError, ValueError) as error:
        raise ModelFileError(f"{name}: not a safetensors file ({error}); Esper reads nothing else") from error


def _compare(file: str, found: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        raise ModelFileError(f"{file}: missing {missing[:3] or 'nothing'}, unexpected {extra[:3] or 'nothing'}")
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ModelFileError(f"{file}: {name} has shape {tuple(found[name].shape)}, expected {tuple(shape)}")
