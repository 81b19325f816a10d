"""Esper grows neural networks while they train.

    import esper
    result = esper.grow(model, train, val, budget=20_000, epochs=20)

Everything here is loaded when it is first used, so that `import esper` alone needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.growth import Grower, GrowthResult, MetricScale, Validation, compare, find_sites, grow, load_grown

__version__ = version("esper-growth")
__all__ = [
    "Grower",
    "GrowthResult",
    "MetricScale",
    "Validation",
    "__version__",
    "compare",
    "find_sites",
    "grow",
    "load_grown",
]


if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name in ("hf", "lightning", "sklearn"):
            return import_module(f"esper.{name}")
        if name in __all__:
            import esper.growth

            return getattr(esper.growth, name)
        raise AttributeError(f"module 'esper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
