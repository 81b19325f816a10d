"""What the user gives to be grown, checked before anything is touched: one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from esper.growth.sites import DEFAULT_SITES, Forward, Sites, find_sites
from esper.leyline import BLENDS, LifecycleConfig
from esper.tamiyo.controller import life_epochs


def check_model(model: nn.Module) -> None:
    """Refuses what cannot be grown.

    Raises:
        ValueError: The model is wrapped or compiled in a way that would run seeds wrongly.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if _num_processes() > 1:
        raise ValueError(
            f"growing in {_num_processes()} processes is not supported: seeds would drift apart; train in one process"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"{type(model).__name__} runs the model in a way that seeds cannot follow; pass model.module and train that"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("a scripted model cannot change; pass the module it was made from")
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters, so there is nothing to train")


def usable_device(device: str | torch.device) -> torch.device:
    """The device, if tensors can be put there."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:  # torch has no type of its own for it
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error


def _num_processes() -> int:
    """Of this training."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def with_budget(lifecycle: LifecycleConfig, budget: int | None, model: nn.Module) -> LifecycleConfig:
    """The limits of growth with a budget; ValueError if it leaves no room beside the model."""
    if budget is None:
        return lifecycle
    if not isinstance(budget, int):
        raise ValueError(f"budget must be a whole number of parameters or None, got {budget!r}")
    params = sum(param.numel() for param in model.parameters())
    if budget <= params:
        raise ValueError(
            f"budget={budget:,} leaves no room: the model has {params:,} parameters, and the budget counts them; give "
            "more, or None for no limit"
        )
    return replace(lifecycle, param_budget=budget)


def check_epochs(epochs: int, lifecycle: LifecycleConfig) -> None:
    """Refuses a run in which no seed could live to be kept."""
    if not isinstance(epochs, int):
        raise ValueError(f"epochs must be a whole number, got {epochs!r}")
    shortest = min(life_epochs(lifecycle, blend) for blend in BLENDS) + 1
    if epochs < shortest:
        raise ValueError(f"epochs={epochs} is less than the shortest life of a seed; give at least {shortest}")


def choose_sites(model: nn.Module, sample: Any, sites: str | int | Sequence[str], forward: Forward) -> Sites:
    """The sites that the user asked for: how many, by name, or the usual number."""
    if isinstance(sites, int):
        return find_sites(model, sample, sites, forward=forward)
    if sites == "auto":
        return find_sites(model, sample, DEFAULT_SITES, forward=forward)
    names = [sites] if isinstance(sites, str) else list(sites)
    if not names:
        raise ValueError('sites names no submodule; give names, how many, or "auto"')
    return find_sites(model, sample, names=names, forward=forward)


def listed(given: Any) -> list[Any]:
    """One or several, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
