"""Tolaria runs hosts: batches, optimizers, devices, workers. It knows no policy, no reward and no seed.

Names load on first use, so importing the package loads no torch.
"""

from importlib import import_module

_HOMES = {
    "CUDATimer": "runtime",
    "EnginePool": "pool",
    "SharedBatchIterator": "batches",
    "TolariaGovernor": "governor",
    "VectorizedEngine": "engine",
}

__all__ = ["CUDATimer", "EnginePool", "SharedBatchIterator", "TolariaGovernor", "VectorizedEngine"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
