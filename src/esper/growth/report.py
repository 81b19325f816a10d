"""A growth as one HTML file and as a picture: the curve of the metric above the life of each seed.

The picture needs the extra `plots`.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.evidence.growth_plot import draw_stages
from esper.growth.result import SEED_COLUMNS
from esper.karn.charts import BLUE, VERMILION, new_chart, svg_of
from esper.karn.page import render_page
from esper.leyline.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from esper.growth.result import GrowthResult


def make_growth_report(result: GrowthResult) -> str:
    """The page.

    Raises:
        ImportError: Jinja2 is not installed.
    """
    try:
        svg = svg_of(_draw(result))
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


def save_growth(result: GrowthResult, path: Path) -> None:
    """Writes the picture in the format that the ending of `path` names.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: It knows no such format.
    """
    picture = BytesIO()
    _draw(result).savefig(picture, format=path.suffix.removeprefix(".") or "png", dpi=150)
    write_atomic(path, picture.getvalue())


def _draw(result: GrowthResult) -> Figure:
    sites = [site.name for site in result.sites.chosen]
    figure = new_chart(3.6 + 0.3 * len(sites))
    curves, stages = figure.subplots(2, 1, sharex=True, height_ratios=[4, 0.5 + 0.4 * len(sites)])
    _draw_curve(curves, result)
    lives = zip(*(entry.stages for entry in result.history), strict=True)
    draw_stages(stages, dict(zip(sites, lives, strict=True)))
    return figure


def _draw_curve(axes: Any, result: GrowthResult) -> None:
    epochs = [entry.epoch + 1 for entry in result.history]
    metrics = [entry.metric for entry in result.history]
    axes.plot([0, *epochs], [result.untrained.metric, *metrics], color=VERMILION, label="with all its seeds")
    kept = [float("nan") if entry.committed_metric is None else entry.committed_metric for entry in result.history]
    axes.plot(epochs, kept, color=BLUE, linestyle="--", label="with what is kept")
    for entry in result.history:
        if entry.rolled_back is not None:
            axes.axvline(entry.epoch + 1, color="black", linestyle=":", linewidth=1)
    model = type(result.model).__name__
    axes.set(
        ylabel=f"validation {result.scale.name}",
        title=f"{model}: {result.host_params:,} parameters grown to {result.params:,}",
    )
    axes.legend()
