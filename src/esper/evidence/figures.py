"""The figures of an evaluation: what they show as tables, and as pictures, which need the `plots` extra."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd

from esper.evidence import limits
from esper.evidence.arms import SAMPLED, get_arm
from esper.evidence.manifest import EvaluationManifest
from esper.evidence.results import KEY, Topology, shift_epochs
from esper.evidence.statistics import paired_difference
from esper.evidence.summary import Summary, exact_mean, metric_column
from esper.karn.charts import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, VERMILION, YELLOW
from esper.leyline.files import write_atomic

# Colour, marker, line: arms that share a colour differ in the others.
LOOKS: dict[str, tuple[str, str, str]] = {
    "wait_only": (BLACK, "s", "-"),
    "static_wide": (BLACK, "^", "--"),
    "static_final": (BLACK, "D", ":"),
    "schedule": (BLUE, "o", "-"),
    "largest": (BLUE, "^", "--"),
    "periodic": (SKY, "o", "-"),
    "plateau": (SKY, "^", "--"),
    "fragrow": (PINK, "o", "-"),
    "heuristic": (GREEN, "o", "-"),
    "search_random": (YELLOW, "^", "--"),
    "search_tpe": (YELLOW, "o", "-"),
    "random": (ORANGE, "x", "--"),
    "ppo_greedy": (VERMILION, "*", "-"),
    "ppo_sampled": (VERMILION, "P", "--"),
    "open_loop": (VERMILION, "v", ":"),
    "clock_only": (VERMILION, "s", "-."),
    "usual": (ORANGE, "v", ":"),
    "gromo": (PINK, "^", "--"),
}
STATIC_LOOK = (BLACK, "v", "-.")
"""Of the points of the static frontier."""
BLUEPRINT_COLORS = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, BLACK, YELLOW)

Tables = dict[str, pd.DataFrame]
"""What each figure shows, by name: frontier, compute, paired, mean_curves, growth."""


def look(arm: str) -> tuple[str, str, str]:
    """Colour, marker and line of an arm."""
    return STATIC_LOOK if get_arm(arm).budget is not None else LOOKS[arm]


def figure_tables(
    manifest: EvaluationManifest,
    summary: Summary,
    rows: pd.DataFrame,
    curves: pd.DataFrame,
    topologies: Sequence[Topology],
) -> Tables:
    """What is to be drawn."""
    return {
        "frontier": pd.DataFrame(
            [_frontier_point(manifest, arm, rows[rows["arm"] == arm]) for arm in summary.means.index]
        ),
        "compute": _compute_table(manifest, summary),
        "paired": _paired_table(manifest, summary),
        "mean_curves": _mean_curves(manifest, curves),
        "growth": _growth_table(manifest, topologies),
    }


def _frontier_point(manifest: EvaluationManifest, arm: str, own: pd.DataFrame) -> dict[str, Any]:
    """An arm among size and score: the mean over its runs, with its interval where there are enough."""
    values = own[metric_column(manifest)].tolist()
    found = paired_difference(values) if len(values) >= limits.MIN_PAIRS else None
    return {
        "arm": arm,
        "params": exact_mean(own["params"]),
        "score": statistics.fmean(values),
        "low": None if found is None else found.low,
        "high": None if found is None else found.high,
        "num_runs": len(own),
    }


def _compute_table(manifest: EvaluationManifest, summary: Summary) -> pd.DataFrame:
    """Every arm's score, what one run of it cost, and what was spent before that run could be made."""
    names = ["arm", "score", "run_macs", "before_macs", "total_macs"]
    rows = []
    for arm, mean in summary.means.iterrows():
        before = _macs_before(manifest, summary, str(arm))
        macs = mean["training_macs"]
        total = None if before is None else before + macs
        rows.append((arm, mean[metric_column(manifest)], macs, before, total))
    return pd.DataFrame(rows, columns=names)


def _macs_before(manifest: EvaluationManifest, summary: Summary, arm: str) -> float | None:
    """Tuning or search of a fixed arm, as counted; a policy's training, by its host epochs and what one costs here.

    None: not known, which is so for arms that copy what another one grew.
    """
    row = get_arm(arm)
    if row.learned or row.replays:
        macs, epochs = (summary.mean(SAMPLED, name) for name in ("training_macs", "host_epochs"))
        if macs is None or not epochs:
            macs, epochs = (summary.mean(arm, name) for name in ("training_macs", "host_epochs"))
        spent = statistics.fmean(policy["host epochs"] for policy in manifest.policies)
        return spent * macs / epochs if macs is not None and epochs else None
    if row.rebuilds:
        return None
    tuning = {} if manifest.tuning is None else manifest.tuning.get("training MACs", {})
    macs = tuning.get(arm, 0)
    return None if macs is None else float(macs)


def _paired_table(manifest: EvaluationManifest, summary: Summary) -> pd.DataFrame:
    pairs = summary.subject_against if get_arm(manifest.subject).learned else summary.against_baseline
    names = ["mean", "low", "high", "num_pairs"]
    return pd.DataFrame(
        [{"label": f"{p.first} - {p.second}", **{n: getattr(p.difference, n) for n in names}} for p in pairs],
        columns=["label", *names],
    )


def _spread(values: pd.Series) -> float:
    """NaN where a network had diverged."""
    return statistics.pstdev(values.tolist()) if all(map(math.isfinite, values)) else math.nan


def _mean_curves(manifest: EvaluationManifest, curves: pd.DataFrame) -> pd.DataFrame:
    """Every arm's committed network at every epoch, on validation data."""
    column = "committed_accuracy_pct" if manifest.metric == "accuracy" else "committed_loss"
    known = curves[curves["arm"].isin(manifest.arms) & curves["epoch"].between(1, manifest.horizon)]
    values = known.groupby(["arm", "epoch"])[column]
    found = values.agg(mean=exact_mean, sd=_spread, num_runs="size").reset_index()
    return found.sort_values(["arm", "epoch"], key=lambda by: by.map(manifest.arms.index) if by.name == "arm" else by)


def _growth_table(manifest: EvaluationManifest, topologies: Sequence[Topology]) -> pd.DataFrame:
    """Every seed that was planted, arm by arm."""
    names = ["slot", "blueprint", "params", "planted", "blended", "kept", "pruned"]
    known = [topology for topology in topologies if topology.arm in manifest.arms]
    known.sort(key=lambda t: (manifest.arms.index(t.arm), t.policy_id, t.run_seed))
    rows = [(*t.key, *(getattr(seed, name) for name in names)) for t in known for seed in shift_epochs(t.lives, 1)]
    whole = dict.fromkeys(["blended", "kept", "pruned"], "Int64")  # whole numbers, even beside unmeasured ones
    return pd.DataFrame(rows, columns=[*KEY, *names]).astype(whole)


# ---- drawing


def draw_figures(folder: Path, manifest: EvaluationManifest, rows: pd.DataFrame, tables: Tables) -> bool:
    """Draws the figures. False, and no file, if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    _draw_frontier(folder / "frontier.png", manifest, rows, tables["frontier"])
    _draw_compute(folder / "compute.png", manifest, tables["compute"])
    _draw_paired(folder / "paired.png", manifest, tables["paired"])
    _draw_curves(folder / "curves.png", manifest, tables["mean_curves"])
    _draw_growth(folder / "growth.png", manifest, tables["growth"])
    return True


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """An empty figure and its axes by row and column; ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    size = (width, height)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", sharex=rows > 1, squeeze=False)


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure: equal figures give equal bytes."""
    import matplotlib.pyplot as plt

    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130, metadata={"Software": None})
    plt.close(figure)
    write_atomic(path, picture.getvalue(), durable=False)


def metric_label(manifest: EvaluationManifest, split: str) -> str:
    """What an axis shows."""
    return f"{split} accuracy (%)" if manifest.metric == "accuracy" else f"{split} loss (nats)"


def _title(manifest: EvaluationManifest, words: str) -> str:
    return f"{manifest.task}: {words}, n = {len(manifest.run_seeds)} run seeds"


def _bars(mean: float, low: float | None, high: float | None) -> list[list[float]] | None:
    return None if pd.isna(low) or low is None or high is None else [[mean - low], [high - mean]]


def _draw_frontier(path: Path, manifest: EvaluationManifest, rows: pd.DataFrame, points: pd.DataFrame) -> None:
    figure, ((axes,),) = new_figure(7.5, 5)
    for point in points.itertuples():
        color, marker, _ = look(point.arm)
        own = rows[rows["arm"] == point.arm]
        axes.scatter(
            own["params"], own[metric_column(manifest)], color=color, marker=marker, s=12, alpha=0.35, linewidths=0.8
        )
        axes.errorbar(
            [point.params],
            [point.score],
            yerr=_bars(point.score, point.low, point.high),
            color=color,
            marker=marker,
            markersize=9,
            markeredgecolor="white" if marker not in "x" else color,
            capsize=3,
            linestyle="none",
            label=point.arm,
        )
    plain = [get_arm(arm).budget is not None for arm in points["arm"]]
    static = points[plain].sort_values("params", kind="stable")
    if len(static) > 1:
        axes.plot(static["params"], static["score"], color="0.5", linestyle="--", zorder=0)
    axes.set(
        xscale="log",
        xlabel="parameters of the committed network",
        ylabel=metric_label(manifest, "test"),
        title=_title(manifest, "size and score after the last epoch"),
    )
    axes.legend(fontsize=8)
    save_figure(figure, path)


def _draw_compute(path: Path, manifest: EvaluationManifest, points: pd.DataFrame) -> None:
    """One point per arm whose whole cost is known, a line back to what its run alone costs."""
    figure, ((axes,),) = new_figure(7.5, 5)
    for point in points[points["total_macs"].notna()].itertuples():
        color, marker, _ = look(point.arm)
        axes.plot([point.run_macs, point.total_macs], [point.score] * 2, color=color, linewidth=1, alpha=0.6)
        axes.plot([point.total_macs], [point.score], color=color, marker=marker, linestyle="none", label=point.arm)
    axes.set(
        xscale="log",
        xlabel="multiply-accumulates of training: one run (left end), all that led to it (marker)",
        ylabel=metric_label(manifest, "test"),
        title=_title(manifest, "score and whole cost"),
    )
    axes.legend(fontsize=8)
    save_figure(figure, path)


def _draw_paired(path: Path, manifest: EvaluationManifest, points: pd.DataFrame) -> None:
    count = max(1, len(points))
    figure, ((axes,),) = new_figure(7.5, 1.4 + 0.35 * count)
    for point in points.itertuples():
        bars = _bars(point.mean, point.low, point.high)
        axes.errorbar([point.mean], [point.Index], xerr=bars, color=BLUE, marker="o", capsize=3, linestyle="none")
    axes.axvline(0, color="0.4", linewidth=1)
    axes.set_yticks(range(len(points)), points["label"])
    axes.set_ylim(count - 0.5, -0.5)
    unit = "points of test accuracy" if manifest.metric == "accuracy" else "nats of test loss, turned: right is better"
    words = "mean, 95 % interval" if points["low"].notna().any() else "mean"
    axes.set(xlabel=f"paired difference ({unit})", title=_title(manifest, words))
    save_figure(figure, path)


def _draw_curves(path: Path, manifest: EvaluationManifest, curves: pd.DataFrame) -> None:
    figure, ((axes,),) = new_figure(7.5, 5)
    for arm, own in curves.groupby("arm", sort=False):
        color, _, line = look(str(arm))
        axes.plot(own["epoch"], own["mean"], color=color, linestyle=line, label=arm)
        low, high = own["mean"] - own["sd"], own["mean"] + own["sd"]
        axes.fill_between(own["epoch"], low, high, color=color, alpha=0.08, linewidth=0)
    axes.set(
        xlabel="epoch",
        ylabel=metric_label(manifest, "committed validation"),
        title=_title(manifest, "committed network, mean ± sd"),
    )
    axes.legend(fontsize=8)
    save_figure(figure, path)


def _draw_growth(path: Path, manifest: EvaluationManifest, seeds: pd.DataFrame) -> None:
    """One panel per arm that planted something: every seed a line in the row of its slot, from planting to its end."""
    arms = list(seeds["arm"].unique())
    slots = sorted(seeds["slot"].unique(), key=lambda slot: (slot[2:], slot))
    names = sorted(seeds["blueprint"].unique())
    colors = {name: BLUEPRINT_COLORS[position % len(BLUEPRINT_COLORS)] for position, name in enumerate(names)}
    figure, panels = new_figure(7.5, 1.6 + max(1, len(arms)) * (0.5 + 0.35 * len(slots)), max(1, len(arms)))
    for (axes,), arm in zip(panels, arms, strict=False):
        _draw_seeds(axes, seeds[seeds["arm"] == arm], slots, colors, manifest.horizon)
        axes.set_ylabel(arm, fontsize=8)
    handles = [panels[0][0].plot([], [], color=color)[0] for color in colors.values()]
    handles += [panels[0][0].plot([], [], color="0.3", marker=marker, linestyle="none")[0] for marker in "*x"]
    panels[0][0].set_title(_title(manifest, "what grew where and when"))
    panels[-1][0].set(xlabel="epoch", xlim=(0.5, manifest.horizon + 1))
    figure.legend(handles, [*colors, "kept", "pruned"], ncols=4, fontsize=7, loc="outside lower center")
    save_figure(figure, path)


def _draw_seeds(axes: Any, seeds: pd.DataFrame, slots: Sequence[str], colors: dict[str, str], horizon: int) -> None:
    runs = sorted(set(zip(seeds["policy_id"], seeds["run_seed"], strict=True)))
    for seed in seeds.itertuples():
        # Every run has a height of its own inside the row, so that equal seeds do not hide one another.
        share = (runs.index((seed.policy_id, seed.run_seed)) + 0.5) / len(runs)
        height = slots.index(seed.slot) + 0.8 * (share - 0.5)
        color = colors[seed.blueprint]
        stop = horizon + 1 if pd.isna(seed.pruned) else seed.pruned
        axes.plot([seed.planted, stop], [height, height], color=color, linewidth=1, alpha=0.8)
        if not pd.isna(seed.kept):
            axes.plot(seed.kept, height, color=color, marker="*", markersize=5)
        if not pd.isna(seed.pruned):
            axes.plot(seed.pruned, height, color=color, marker="x", markersize=4)
    axes.set_yticks(range(len(slots)), slots, fontsize=7)
    axes.set_ylim(len(slots) - 0.5, -0.5)
