"""The figures of an evaluation. They need the `plots` extra; everything else works without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esper.evidence.figure_data import FigureData, GrowthLine, metric_of
from esper.evidence.manifest import Manifest
from esper.evidence.results import RunResult

FIGURES = ("frontier.png", "paired.png", "curves.png", "growth.png")
# Okabe and Ito's palette: told apart with any colour vision; arms that share a colour differ in marker and line.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
)  # fmt: skip
LOOKS: dict[str, tuple[str, str, str]] = {
    "wait_only": (BLACK, "s", "-"),
    "static_wide": (BLACK, "^", "--"),
    "static_final": (BLACK, "D", ":"),
    "schedule": (BLUE, "o", "-"),
    "periodic": (SKY, "o", "-"),
    "plateau": (SKY, "^", "--"),
    "fragrow": (PINK, "o", "-"),
    "heuristic": (GREEN, "o", "-"),
    "random": (ORANGE, "x", "--"),
    "ppo_greedy": (RED, "*", "-"),
    "ppo_sampled": (RED, "P", "--"),
}
BLUEPRINT_COLORS = (BLUE, RED, GREEN, ORANGE, PINK, SKY, BLACK, YELLOW)


def draw_figures(folder: Path, manifest: Manifest, rows: Sequence[RunResult], found: FigureData) -> bool:
    """Draws the four figures. False, and no file, if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    _frontier(folder / "frontier.png", manifest, rows, found)
    _paired(folder / "paired.png", manifest, found)
    _curves(folder / "curves.png", manifest, found)
    _growth(folder / "growth.png", manifest, found)
    return True


def _figure(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(rows, 1, figsize=(width, height), layout="constrained", sharex=rows > 1, squeeze=False)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _metric_label(manifest: Manifest, split: str) -> str:
    return f"{split} accuracy (%)" if manifest.metric == "accuracy" else f"{split} loss (nats)"


def _title(manifest: Manifest, words: str) -> str:
    return f"{manifest.task}: {words}, n = {len(manifest.run_seeds)} run seeds"


def _frontier(path: Path, manifest: Manifest, rows: Sequence[RunResult], found: FigureData) -> None:
    figure, ((axes,),) = _figure(7.5, 5)
    for point in found.frontier:
        color, marker, _ = LOOKS[point.arm]
        own = [row for row in rows if row.arm == point.arm]
        values = [metric_of(manifest, row) for row in own]
        axes.scatter([row.params for row in own], values, color=color, marker=marker, s=12, alpha=0.35, linewidths=0.8)
        bars = None
        if point.low is not None and point.high is not None:
            bars = [[point.score - point.low], [point.high - point.score]]
        axes.errorbar(
            [point.params],
            [point.score],
            yerr=bars,
            color=color,
            marker=marker,
            markersize=9,
            markeredgecolor="white" if marker not in "x" else color,
            capsize=3,
            linestyle="none",
            label=point.arm,
        )
    static = sorted((p for p in found.frontier if p.arm in ("wait_only", "static_wide")), key=lambda p: p.params)
    if len(static) > 1:
        axes.plot([p.params for p in static], [p.score for p in static], color="0.5", linestyle="--", zorder=0)
    axes.set(
        xscale="log",
        xlabel="parameters of the committed network",
        ylabel=_metric_label(manifest, "test"),
        title=_title(manifest, "size and score after the last epoch"),
    )
    axes.legend(fontsize=8)
    _save(figure, path)


def _paired(path: Path, manifest: Manifest, found: FigureData) -> None:
    figure, ((axes,),) = _figure(7.5, 1.4 + 0.35 * max(1, len(found.paired)))
    for height, point in enumerate(found.paired):
        bars = None
        if point.low is not None and point.high is not None:
            bars = [[point.mean - point.low], [point.high - point.mean]]
        axes.errorbar([point.mean], [height], xerr=bars, color=BLUE, marker="o", capsize=3, linestyle="none")
    axes.axvline(0, color="0.4", linewidth=1)
    axes.set_yticks(range(len(found.paired)), [point.label for point in found.paired])
    axes.set_ylim(max(1, len(found.paired)) - 0.5, -0.5)
    unit = "points of test accuracy" if manifest.metric == "accuracy" else "nats of test loss, turned: right is better"
    bounded = any(point.low is not None for point in found.paired)
    axes.set(xlabel=f"paired difference ({unit})", title=_title(manifest, "mean" + (", 95 % interval" * bounded)))
    _save(figure, path)


def _curves(path: Path, manifest: Manifest, found: FigureData) -> None:
    figure, ((axes,),) = _figure(7.5, 5)
    for arm in manifest.arms:
        own = [point for point in found.curves if point.arm == arm]
        if not own:
            continue
        color, _, line = LOOKS[arm]
        epochs = [point.epoch for point in own]
        axes.plot(epochs, [point.mean for point in own], color=color, linestyle=line, label=arm)
        low, high = [p.mean - p.sd for p in own], [p.mean + p.sd for p in own]
        axes.fill_between(epochs, low, high, color=color, alpha=0.08, linewidth=0)
    axes.set(
        xlabel="epoch",
        ylabel=_metric_label(manifest, "committed validation"),
        title=_title(manifest, "committed network, mean ± sd"),
    )
    axes.legend(fontsize=8)
    _save(figure, path)


def _growth(path: Path, manifest: Manifest, found: FigureData) -> None:
    """One panel per arm that planted something: every seed a line in the lane of its slot, from planting to its end."""
    arms = [arm for arm in manifest.arms if any(line.arm == arm for line in found.growth)]
    slots = sorted({line.slot for line in found.growth}, key=lambda slot: (slot[2:], slot))
    names = sorted({line.blueprint for line in found.growth})
    colors = {name: BLUEPRINT_COLORS[position % len(BLUEPRINT_COLORS)] for position, name in enumerate(names)}
    figure, panels = _figure(7.5, 1.6 + max(1, len(arms)) * (0.5 + 0.35 * len(slots)), max(1, len(arms)))
    for (axes,), arm in zip(panels, arms, strict=False):
        _lanes(axes, [line for line in found.growth if line.arm == arm], slots, colors, manifest.horizon)
        axes.set_ylabel(arm, fontsize=8)
    handles = [panels[0][0].plot([], [], color=color)[0] for color in colors.values()]
    handles += [panels[0][0].plot([], [], color="0.3", marker=marker, linestyle="none")[0] for marker in "*x"]
    panels[0][0].set_title(_title(manifest, "what grew where and when"))
    panels[-1][0].set(xlabel="epoch", xlim=(0.5, manifest.horizon + 1))
    figure.legend(handles, [*colors, "kept", "pruned"], ncols=4, fontsize=7, loc="outside lower center")
    _save(figure, path)


def _lanes(axes: Any, lines: Sequence[GrowthLine], slots: Sequence[str], colors: dict[str, str], horizon: int) -> None:
    runs = sorted({(line.policy_id, line.run_seed) for line in lines})
    for line in lines:
        # Every run has a height of its own inside the lane, so that equal lives do not hide one another.
        share = (runs.index((line.policy_id, line.run_seed)) + 0.5) / len(runs)
        height = slots.index(line.slot) + 0.8 * (share - 0.5)
        color = colors[line.blueprint]
        stop = horizon + 1 if line.pruned is None else line.pruned
        axes.plot([line.planted, stop], [height, height], color=color, linewidth=1, alpha=0.8)
        if line.kept is not None:
            axes.plot(line.kept, height, color=color, marker="*", markersize=5)
        if line.pruned is not None:
            axes.plot(line.pruned, height, color=color, marker="x", markersize=4)
    axes.set_yticks(range(len(slots)), slots, fontsize=7)
    axes.set_ylim(len(slots) - 0.5, -0.5)
