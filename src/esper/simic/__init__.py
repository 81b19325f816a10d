"""Simic: trains the controller. Rewards, the agent, the loop; it knows no streams and no views."""

from importlib import import_module

_HOMES = {
    "ParallelEnvState": "training.parallel_env_state",
    "train_ppo_vectorized": "training.vectorized",
}

__all__ = ["ParallelEnvState", "train_ppo_vectorized"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
