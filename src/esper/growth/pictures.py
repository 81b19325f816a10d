"""The picture of a growth: the curve of the metric above the life of each seed. Needs the extra `plots`."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.evidence.growth_plot import draw_stages
from esper.karn.charts import BLUE, VERMILION, new_chart, svg_of
from esper.leyline.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from esper.growth.result import GrowthResult


def growth_svg(result: GrowthResult) -> str:
    """The picture as SVG text."""
    return svg_of(_draw(result))


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
