"""What a run's bits depend on besides its config: versions, processor, threads."""

from __future__ import annotations

import platform
from collections.abc import Mapping

Identity = Mapping[str, str | int | bool]
NOT_PROMISED = "bitwise equality not promised"
"""The words for a resume whose identity differs."""


def identity() -> dict[str, str | int | bool]:
    """This process; the run adds what it decides itself, such as executor, device kind and precision."""
    import torch

    from esper import __version__

    return {
        "esper": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def identity_differences(stored: Identity, present: Identity) -> tuple[str, ...]:
    """What has changed, one line each, such as "torch 2.12.0 -> 2.13.0"; empty: the bits can be the same."""
    keys = sorted(stored.keys() | present.keys())
    return tuple(
        f"{key} {stored.get(key, 'unknown')} -> {present.get(key, 'unknown')}"
        for key in keys
        if key not in stored or key not in present or stored[key] != present[key]
    )
