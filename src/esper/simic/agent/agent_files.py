"""An agent as bytes: safetensors for tensors, JSON for the rest, nothing pickled. Others decide where bytes go.

Optimizer state is stored by parameter name. Anything missing, extra or of another shape is refused before anything is
changed, so a load happens whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from esper.leyline import ModelFileError, NumericFailure
from esper.leyline.files import loads_json, read_regular, write_atomic

FORMAT_VERSION = 3
POLICY_FILE = "policy.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
FACTS_FILE = "agent.json"
MAX_FILE_BYTES = 2**31
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_NOT_NEGATIVE = (".count", ".var", ":step", ":exp_avg_sq")
"""Ends of names of tensors that count, or are sums of squares."""
T = TypeVar("T")


def pack_agent(network: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> dict[str, bytes]:
    """The three files of an agent, by name.

    Raises:
        NumericFailure: A tensor holds numbers that are not finite; nothing could go on from it.
    """
    weights = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    # Before its first step Adam has no moments; they are written as the zeros it begins with, so that a file without
    # them is one that lost them.
    moments = {name: tensor.new_zeros(tensor.shape) for name, tensor in _moments_like(network).items()} | {
        f"{name}:{moment}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in network.named_parameters()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }
    if bad := [name for name, tensor in (weights | moments).items() if not _is_finite(tensor)]:
        raise NumericFailure(
            f"the policy has diverged: {bad[0]} and {len(bad) - 1} other tensors are not finite or too large to go on. "
            "Lower the learning rate, or look at the rewards of the last rounds"
        )
    text = json.dumps({"format": FORMAT_VERSION, **facts}, allow_nan=False, indent=1)
    return {
        POLICY_FILE: save_tensors(weights),
        OPTIMIZER_FILE: save_tensors(moments),
        FACTS_FILE: text.encode(),
    }


def write_files(directory: str | Path, files: Mapping[str, bytes]) -> None:
    """Writes the files of an agent into a directory, which is made if needed."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomic(folder / name, content)


def read_files(directory: str | Path) -> dict[str, bytes]:
    """Those files of an agent that are there."""
    paths = [Path(directory) / name for name in (POLICY_FILE, OPTIMIZER_FILE, FACTS_FILE)]
    return {path.name: read_regular(path, MAX_FILE_BYTES) for path in paths if path.exists()}


def read_facts(files: Mapping[str, bytes], expected: Set[str]) -> dict[str, Any]:
    """The JSON part.

    Raises:
        ModelFileError: A file is missing, is no JSON, has another format version, or other keys than expected.
    """
    for name in (POLICY_FILE, OPTIMIZER_FILE, FACTS_FILE):
        if name not in files:
            raise ModelFileError(f"agent: {name} is missing. Expected {POLICY_FILE}, {OPTIMIZER_FILE} and {FACTS_FILE}")
    try:
        facts = loads_json(files[FACTS_FILE])
    except ValueError as error:
        raise ModelFileError(f"{FACTS_FILE}: not JSON ({error}); the file is damaged or not an agent's") from error
    version = facts.pop("format", None) if isinstance(facts, dict) else None
    if version != FORMAT_VERSION:
        raise ModelFileError(f"{FACTS_FILE}: format {version}; this release reads format {FORMAT_VERSION}")
    if other := sorted(facts.keys() ^ expected):
        raise ModelFileError(
            f"{FACTS_FILE}: does not describe an agent of this release ({other[0]!r} missing or extra)"
        )
    return dict(facts)


def exactly(values: Any, kind: type[T]) -> T:
    """A record from its JSON: each field is there and of its type, and nothing else is.

    Raises:
        ValueError: It is something else.
    """
    expected = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict) or values.keys() != expected:
        raise ValueError(f"expected the fields of {kind.__name__}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def count(value: Any) -> int:
    """A number of JSON that counts something.

    Raises:
        ValueError: It is not a whole number of at least 0.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number of at least 0, got {value!r}")
    return value


def unpack_(network: nn.Module, optimizer: torch.optim.Optimizer, files: Mapping[str, bytes]) -> None:
    """Loads weights, statistics and optimizer moments.

    Raises:
        ModelFileError: A tensor is missing, unexpected, of another shape or type, or not finite. Nothing was changed.
    """
    weights = read_tensors(files, POLICY_FILE)
    _compare(POLICY_FILE, weights, network.state_dict())
    moments = read_tensors(files, OPTIMIZER_FILE)
    _compare(OPTIMIZER_FILE, moments, _moments_like(network))
    network.load_state_dict(weights)
    for name, parameter in network.named_parameters():
        optimizer.state[parameter] = {moment: moments[f"{name}:{moment}"] for moment in _MOMENTS}


def _moments_like(network: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}:{moment}": parameter.new_empty(()) if moment == "step" else parameter
        for name, parameter in network.named_parameters()
        for moment in _MOMENTS
    }


def read_tensors(files: Mapping[str, bytes], name: str) -> dict[str, Tensor]:
    """The tensors of one file.

    Raises:
        ModelFileError: It is no safetensors file.
    """
    try:
        return load_tensors(files[name])
    except (SafetensorError, ValueError) as error:
        raise ModelFileError(f"{name}: not a safetensors file ({error}); Esper reads nothing else") from error


def _is_finite(tensor: Tensor) -> bool:
    """In the network's own arithmetic: squares of weights, and statistics in single precision."""
    return bool(torch.isfinite(tensor.float() if tensor.dtype == torch.float64 else tensor.square()).all())


def _compare(file: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        raise ModelFileError(f"{file}: missing {missing[:3] or 'nothing'}, unexpected {extra[:3] or 'nothing'}")
    for name, like in expected.items():
        tensor, shape = found[name], tuple(like.shape)
        if tensor.shape != like.shape:
            raise ModelFileError(f"{file}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.dtype != like.dtype:
            raise ModelFileError(f"{file}: {name} is of {tensor.dtype}, expected {like.dtype}")
        if not _is_finite(tensor):
            raise ModelFileError(f"{file}: {name} holds numbers that are not finite")
        if name.endswith(_NOT_NEGATIVE) and bool((tensor < 0).any()):
            raise ModelFileError(f"{file}: {name} is negative")
