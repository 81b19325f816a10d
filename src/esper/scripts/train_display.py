"""How a training run looks while it runs: a bar with an ETA on a terminal, one line per round elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from esper.leyline import BatchSummary
from esper.simic.client import StepFacts
from esper.simic.training.accounts import EpisodeStats
from esper.simic.training.dual_ab import Comparison


def progress_bars(console: Console) -> Progress:
    """Bars with facts and an ETA; used in a `with` block. Nothing is drawn where there is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class TrainingDisplay:
    """Shows one run as a bar. It reads and never decides.

    Args:
        progress: Where its bar goes.
        label: Name of the bar.
        rounds: Rounds of the whole run.
        horizon: Steps of a round.
        done: Rounds that were done before, by a run that is resumed.
    """

    def __init__(self, progress: Progress, *, label: str, rounds: int, horizon: int, done: int) -> None:
        self.rounds = rounds
        self._label = label
        self._progress = progress
        self._bar = progress.add_task(label, total=rounds * horizon, completed=done * horizon, facts="")
        self._latest = ""

    def step(self, facts: StepFacts) -> None:
        """One step of every env is done."""
        mean = sum(report.val_accuracy_pct for report in facts.after.reports) / len(facts.after.reports)
        self._progress.update(self._bar, advance=1, facts=f"now {mean:5.1f} %  {self._latest}")

    def round(self, summary: BatchSummary, episodes: Sequence[EpisodeStats]) -> None:
        """A round is complete."""
        committed = summary.committed_accuracy_pct
        shown = "not measured" if committed is None else f"{committed:5.1f} %"
        self._latest = f"last round {shown}, return {summary.return_mean:+.3f}, {summary.params_ratio_mean:.2f}x params"
        console = self._progress.console
        if not console.is_terminal:
            left_s = summary.duration_s * (self.rounds - summary.round_idx - 1)
            console.print(
                f"{self._label} round {summary.round_idx + 1}/{self.rounds}  committed {shown}  "
                f"return {summary.return_mean:+.3f} ± {summary.return_std:.3f}  "
                f"params {summary.params_ratio_mean:.2f}x  rollbacks {summary.num_rollbacks}  "
                f"{summary.duration_s:.1f} s  about {left_s / 60:.0f} min left",
                highlight=False,
                soft_wrap=True,
            )


def outcome_table(history: Sequence[BatchSummary], envs: int) -> Table:
    """The first and the last rounds of a run side by side; seeds are counted per episode."""
    table = Table(title="First and last rounds (validation, exploring)", title_justify="left")
    for name in ("rounds", "accuracy", "return", "params", "planted", "kept", "removed"):
        table.add_column(name, justify="left" if name == "rounds" else "right")
    tenth = max(1, len(history) // 10)
    for label, part in ((f"first {tenth}", history[:tenth]), (f"last {tenth}", history[-tenth:])):
        committed = [row.committed_accuracy_pct for row in part if row.committed_accuracy_pct is not None]
        episodes = len(part) * envs
        counts = [sum(row.num_ops[op] for row in part) for op in ("GERMINATE", "FOSSILIZE", "PRUNE")]
        table.add_row(
            label,
            f"{sum(committed) / len(committed):.1f} %" if committed else "not measured",
            f"{sum(row.return_mean for row in part) / len(part):+.3f}",
            f"{sum(row.params_ratio_mean for row in part) / len(part):.2f}x",
            *(f"{count / episodes:.1f}" for count in counts),
        )
    return table


def comparison_table(names: Sequence[str], found: Comparison) -> Table:
    """Both sides, and the paired difference over the last tenth of the rounds."""
    last = max(1, len(found.histories[0]) // 10)
    table = Table(title=f"Last {last} rounds, same hosts on both sides (validation, exploring)", title_justify="left")
    for name in ("side", "accuracy", "return", "params"):
        table.add_column(name, justify="left" if name == "side" else "right")
    for name, history in zip(names, found.histories, strict=True):
        part = history[-last:]
        committed = [row.committed_accuracy_pct for row in part if row.committed_accuracy_pct is not None]
        table.add_row(
            name,
            f"{statistics.fmean(committed):.1f} %" if committed else "not measured",
            f"{statistics.fmean(row.return_mean for row in part):+.3f}",
            f"{statistics.fmean(row.params_ratio_mean for row in part):.2f}x",
        )
    differences = found.differences_pp(last)
    spread = f" ± {statistics.stdev(differences):.2f}" if len(differences) > 1 else ""
    table.add_section()
    table.add_row(
        f"{names[1]} - {names[0]}", f"{statistics.fmean(differences):+.2f}{spread}", f"{len(differences)} pairs", ""
    )
    return table
