"""The pictures of a report, as SVG text. Draws what it is given; needs the extra `runs`.

Figures are made without pyplot, so nothing here touches a display or a global figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from io import BytesIO
from itertools import cycle
from typing import TYPE_CHECKING, Any

from esper.karn.console import clean
from esper.karn.history import RunHistory, SeedTimeline
from esper.leyline import HEAD_NAMES, SeedStage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinguishable with any colour vision.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
)  # fmt: skip
TIMELINE_COLORS = {
    SeedStage.GERMINATED.name: "#999999",
    SeedStage.TRAINING.name: YELLOW,
    SeedStage.BLENDING.name: SKY,
    SeedStage.HOLDING.name: PINK,
    SeedStage.FOSSILIZED.name: GREEN,
}
HEAD_COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION)
WIDTH = 9.0
ROUND, EPOCHS = "round", "epochs of the env since the run began"
COUNTS = (ROUND, EPOCHS)
"""Axes on which there is nothing between two whole numbers."""
MAX_DRAWN = 1e100
MAX_TIMELINE_ROWS = 12
MAX_TIMELINE_EPISODES = 12


def learning_chart(history: RunHistory) -> str | None:
    """Accuracy, loss and return by round; None if no round was completed."""
    if not history.rounds:
        return None
    figure = new_chart(6.8)
    accuracy, losses, returns = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 2])
    x = [number for number, _ in history.rounds]
    rounds = [data for _, data in history.rounds]
    worst, best = [r.accuracy_worst_pct for r in rounds], [r.accuracy_best_pct for r in rounds]
    _band(accuracy, x, worst, best, BLUE, "worst to best env")
    _line(accuracy, x, [r.accuracy_mean_pct for r in rounds], BLUE, "mean over envs")
    _line(accuracy, x, [r.rolling_accuracy_pct for r in rounds], ORANGE, "mean of ten rounds")
    _line(accuracy, x, [r.committed_accuracy_pct for r in rounds], GREEN, "committed network")
    accuracy.set(ylabel="validation accuracy (%)")
    accuracy.legend(loc="best")
    _losses(losses, set(x), history)
    low, high = [r.return_mean - r.return_std for r in rounds], [r.return_mean + r.return_std for r in rounds]
    _band(returns, x, low, high, VERMILION, "deviation over envs")
    _line(returns, x, [r.return_mean for r in rounds], VERMILION, "mean over envs")
    returns.set(xlabel=ROUND, ylabel="return")
    returns.legend(loc="best")
    return svg_of(figure)


def _losses(axes: Any, completed: Set[int], history: RunHistory) -> None:
    """What the hosts of each round ended with: for tasks that are judged by their loss, the curve that matters."""
    ends: dict[int, list[float]] = {}
    for at, done in history.episodes:
        if at in completed:
            ends.setdefault(at, []).append(done.final_loss)
    rounds, losses = list(ends), ends.values()
    _band(axes, rounds, [max(loss) for loss in losses], [min(loss) for loss in losses], PINK, "worst to best env")
    _line(axes, rounds, [sum(loss) / len(loss) for loss in losses], PINK, "mean over envs")
    axes.set(ylabel="validation loss")
    axes.legend(loc="best")


def outcome_chart(history: RunHistory) -> str | None:
    """Final accuracy of every episode against its parameters; None if no episode has both."""
    points = [
        (done.params_ratio, done.final_accuracy_pct, at)
        for at, done in history.episodes
        if done.final_accuracy_pct is not None
    ]
    if not points:
        return None
    figure = new_chart(3.8)
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    ratios, accuracies, rounds = zip(*points, strict=True)
    dots = axes.scatter(
        _drawable(ratios), _drawable(accuracies), c=rounds, cmap="viridis", s=24, alpha=0.8, linewidth=0
    )
    axes.set(xlabel="parameters, times the host's own", ylabel="final validation accuracy (%)")
    figure.colorbar(dots, ax=axes, label=ROUND, ticks=MaxNLocator(integer=True, min_n_ticks=1))
    return svg_of(figure)


def timeline_chart(history: RunHistory) -> str | None:
    """Stages of the seeds of the newest episodes, one row per env and slot; None if nothing was planted."""
    epochs = history.starts[-1].epochs_per_episode if history.starts else None
    if not history.seeds or not epochs:
        return None
    newest = max(seed.episode for seed in history.seeds)
    first = max(newest - MAX_TIMELINE_EPISODES + 1, 0)
    seeds = [seed for seed in history.seeds if seed.episode >= first]
    rows = sorted({(seed.env, seed.birth.slot_id) for seed in seeds})[:MAX_TIMELINE_ROWS]
    figure = new_chart(1.0 + 0.32 * len(rows))
    axes = figure.subplots()
    for seed in seeds:
        if (seed.env, seed.birth.slot_id) in rows:
            _draw_seed(axes, rows.index((seed.env, seed.birth.slot_id)), seed, seed.episode * epochs)
    for episode in range(first, newest + 2):
        axes.axvline(episode * epochs, color="black", linewidth=0.4)
    axes.set_yticks(range(len(rows)), [clean(f"env {env}  {slot_id}") for env, slot_id in rows])
    axes.set(xlabel=EPOCHS, xlim=(first * epochs, (newest + 1) * epochs), ylim=(len(rows) - 0.4, -0.6))
    handles = [axes.barh(-9, 0, color=color) for color in TIMELINE_COLORS.values()]
    words = [name.lower() for name in TIMELINE_COLORS]
    axes.legend(handles, words, ncols=len(words), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return svg_of(figure)


def _draw_seed(axes: Any, row: int, seed: SeedTimeline, begin: int) -> None:
    for span in seed.spans:
        if span.stage in TIMELINE_COLORS:
            width = max(span.stop - span.start, 0.25)
            axes.barh(row, width, left=begin + span.start, height=0.7, color=TIMELINE_COLORS[span.stage])
    if seed.spans[-1].stage == SeedStage.PRUNED.name:
        axes.plot([begin + seed.spans[-1].stop], [row], marker="x", color=VERMILION, markersize=5)


def policy_chart(history: RunHistory) -> str | None:
    """Health of the learner by round; None if there was no update."""
    if not history.updates:
        return None
    x = [number for number, _ in history.updates]
    updates = [metrics for _, metrics in history.updates]
    panels: dict[str, dict[str, list[float | None]]] = {
        "KL (nats)": {"KL": [u["approx_kl"] for u in updates], "target": [u["target_kl"] for u in updates]},
        "entropy (share)": {head: [u["head_entropies"][head] for u in updates] for head in HEAD_NAMES},
        "losses": {"policy": [u["policy_loss"] for u in updates], "value": [u["value_loss"] for u in updates]},
        "critic": {
            "value error / deviation": [u["value_nrmse"] for u in updates],
            "explained variance": [u["explained_variance"] for u in updates],
        },
        "clipped (share)": {"clipped": [u["clip_fraction"] for u in updates]},
        "gradient norm": {
            "largest": [u["gradient_stats"]["max_grad"] for u in updates],
            "clipped at": [u["gradient_stats"]["clip_norm"] for u in updates],
        },
    }
    figure = new_chart(6.6)
    grid = figure.subplots(3, 2, sharex=True)
    for axes, (label, curves) in zip(grid.flat, panels.items(), strict=True):
        for (name, values), color in zip(curves.items(), cycle(HEAD_COLORS), strict=False):
            _line(axes, x, values, color, name)
        axes.set(ylabel=label)
        if len(curves) > 1:
            axes.legend(loc="best", fontsize=7)
    for axes in grid[2]:
        axes.set(xlabel=ROUND)
    return svg_of(figure)


def _band(axes: Any, x: Sequence[int], low: Sequence[float], high: Sequence[float], color: str, label: str) -> None:
    """The range around a curve; that of a single round has no width, so its edge is drawn."""
    edge = 6.0 if len(x) == 1 else 0.0
    axes.fill_between(x, _drawable(low), _drawable(high), color=color, alpha=0.15, linewidth=edge, label=label)


def _line(axes: Any, x: Sequence[int], values: Iterable[float | None], color: str, label: str) -> None:
    """One curve; what was not measured is a gap, and a single point is still seen."""
    y = _drawable(values)
    axes.plot(x, y, color=color, label=clean(label), linewidth=1.4, marker="." if len(y) < 30 else None, markersize=4)


def _drawable(values: Iterable[float | None]) -> list[float]:
    """Gaps for what was not measured, and for what only damage or divergence brings: no axis can be that long."""
    return [float("nan") if value is None or abs(value) > MAX_DRAWN else value for value in values]


def new_chart(height: float) -> Figure:
    """An empty picture of the usual width; ImportError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the charts of a report need matplotlib: pip install 'esper-growth[runs]'") from None
    return Figure(figsize=(WIDTH, height), layout="constrained")


def svg_of(figure: Figure) -> str:
    """A finished picture as SVG text, the same each time."""
    from matplotlib import rc_context
    from matplotlib.text import Text
    from matplotlib.ticker import MaxNLocator

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_xlabel() in COUNTS:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for text in figure.findobj(Text):  # names of slots and heads are names: a dollar sign begins no formula
        text.set_parse_math(False)
    out = BytesIO()
    # The salt makes the ids inside the picture the same each time; text stays text and uses the reader's fonts.
    with rc_context({"svg.hashsalt": "esper", "svg.fonttype": "none", "text.parse_math": False}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue().decode()
