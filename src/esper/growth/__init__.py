"""Growing any model of the user's: sites, slots on them, the user's optimizer, and what came of it."""

from esper.growth.comparison import Comparison, compare, compare_task
from esper.growth.exporting import load_grown
from esper.growth.grower import Grower
from esper.growth.result import GrowthResult
from esper.growth.run import grow
from esper.growth.sites import Site, Sites, find_sites
from esper.growth.validation import Validation
from esper.leyline.scale import MetricScale

__all__ = [
    "Comparison",
    "Grower",
    "GrowthResult",
    "MetricScale",
    "Site",
    "Sites",
    "Validation",
    "compare",
    "compare_task",
    "find_sites",
    "grow",
    "load_grown",
]
