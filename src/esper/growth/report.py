"""One HTML file about a growth: what grew, what it brought, and how it came about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from esper.growth.pictures import growth_svg
from esper.growth.result import SEED_COLUMNS
from esper.karn.page import render_page

if TYPE_CHECKING:
    from esper.growth.result import GrowthResult


def make_growth_report(result: GrowthResult) -> str:
    """The page.

    Raises:
        ImportError: Jinja2 is not installed.
    """
    try:
        svg = growth_svg(result)
    except ImportError:
        svg = None
    comparison = result.comparison
    return render_page(
        Path(__file__).with_name("report.html.j2"),
        {},
        title=f"{type(result.model).__name__}, grown",
        subtitle=f"{len(result.history)} epochs, {result.controller} decided",
        headline=result.headline,
        notes=[] if comparison is None else [comparison.verdict()],
        outcome=result.outcome(),
        svg=svg,
        seed_columns=SEED_COLUMNS,
        seeds=result.seed_rows(),
        tables=[] if comparison is None else [comparison.section()],
        moves=[(entry.epoch + 1, str(entry)) for entry in result.moves],
        sites=str(result.sites),
        model_name=type(result.model).__name__,
        model=str(result.model),
    )
