"""Several evaluations of one task at different budgets, as one table and one picture: what growing costs and brings.

Which rule stands for the rules at a budget is decided by its validation score in tuning, never by test results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from esper.evidence.arms import GREEDY, SEARCHES, TUNABLE
from esper.evidence.figures import metric_label, new_figure, save_figure
from esper.evidence.manifest import EvaluationManifest
from esper.evidence.publication import difference_words, load_rows
from esper.evidence.summary import Summary, bar_of, metric_column, summarise
from esper.karn.charts import BLACK, BLUE, GREEN, VERMILION
from esper.leyline.files import write_atomic

LOOKS = {
    "plain network": (BLACK, "v", "--"),
    "best rule": (BLUE, "^", "-"),
    "best search": (GREEN, "o", "-"),
    "policy": (VERMILION, "*", "-"),
}
GROUPS = {"best rule": TUNABLE, "best search": SEARCHES, "policy": (GREEDY,)}
"""What is compared with the plain network at every budget; one arm stands for each."""


def publish_frontier(folders: Sequence[Path], out: Path) -> pd.DataFrame:
    """Writes frontier.csv, frontier.md and, where matplotlib is installed, frontier.png.

    Args:
        folders: One evaluation each, of the same task.
        out: Where to write.
    """
    loaded = [load_rows(folder) for folder in folders]
    table = pd.DataFrame([row for manifest, rows in loaded for row in _points(manifest, summarise(manifest, rows))])
    manifest = loaded[0][0]
    write_atomic(out / "frontier.csv", table.to_csv(index=False, lineterminator="\n").encode())
    write_atomic(out / "frontier.md", _list(manifest, table).encode())
    _draw(out / "frontier.png", manifest, table)
    return table


def _points(manifest: EvaluationManifest, summary: Summary) -> list[dict[str, Any]]:
    """The plain network, the host alone, and the arms that stand for rules and searches at one budget."""
    bar = bar_of(manifest)
    chosen = {"plain network": bar, **{name: _best(manifest, arms) for name, arms in GROUPS.items()}}
    return [
        _point(manifest, summary, name, arm)
        for name, arm in chosen.items()
        if arm is not None and arm in summary.means.index
    ]


def _best(manifest: EvaluationManifest, arms: Sequence[str]) -> str | None:
    """The arm with the best validation score in tuning; the only one where there is no choice."""
    run = [arm for arm in arms if arm in manifest.arms]
    scores = {} if manifest.tuning is None else manifest.tuning["scores"]
    return max(run, key=lambda arm: scores.get(arm, float("-inf")), default=None)


def _point(manifest: EvaluationManifest, summary: Summary, name: str, arm: str) -> dict[str, Any]:
    mean, sd = summary.means.loc[arm], summary.sds.loc[arm]
    column = metric_column(manifest)
    found = summary.minus_static(arm)
    return {
        "budget": manifest.budget,
        "what": name,
        "arm": arm,
        "val": mean[column.replace("test", "val")],
        "test": mean[column],
        "test_sd": sd[column],
        "params": mean["params"],
        "training_macs": mean["training_macs"],
        "num_runs": int(summary.num_runs[arm]),
        "difference": None if found is None else found.mean,
        "low": None if found is None else found.low,
        "high": None if found is None else found.high,
        "words": "" if found is None else difference_words(found, "+.2f" if manifest.metric == "accuracy" else "+.3f"),
    }


def _list(manifest: EvaluationManifest, table: pd.DataFrame) -> str:
    unit, form = ("%", ".2f") if manifest.metric == "accuracy" else ("nats", ".3f")
    lines = [
        f"| at most | what | arm | validation ({unit}) | test ({unit}) | parameters | training GMACs | grown - plain |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in table.itertuples():
        test = f"{row.test:{form}} ± {row.test_sd:{form}}"
        cells = (f"{row.budget:,}", row.what, row.arm, f"{row.val:{form}}", test, f"{row.params:,.0f}")
        lines.append(f"| {' | '.join(cells)} | {row.training_macs / 1e9:,.3g} | {row.words} |")
    return "\n".join(lines) + "\n"


def _draw(path: Path, manifest: EvaluationManifest, table: pd.DataFrame) -> None:
    """Score over parameters, and score over training cost, one line for each group."""
    try:
        picture, ((left, right),) = new_figure(11, 4.5, columns=2)
    except ImportError:
        return
    for axes, column, label in (
        (left, "params", "parameters of the final network"),
        (right, "training_macs", "multiply-accumulates of one training"),
    ):
        for what, own in table.groupby("what", sort=False):
            color, marker, line = LOOKS[str(what)]
            error = own["test_sd"] / own["num_runs"] ** 0.5
            axes.errorbar(
                own[column], own["test"], yerr=error, fmt=f"{marker}{line}", color=color, capsize=3, label=what
            )
        axes.set(xscale="log", xlabel=label, ylabel=metric_label(manifest, "test"))
    left.legend(fontsize=8)
    title = f"{manifest.task}: {manifest.horizon} epochs, {len(manifest.run_seeds)} paired run seeds per point"
    picture.suptitle(f"{title}; bars: standard error")
    save_figure(picture, path)
