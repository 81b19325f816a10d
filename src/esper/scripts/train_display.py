"""How a training run looks while it runs: a bar with an ETA on a terminal, one line per round elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from esper.leyline import BatchSummary
from esper.simic.client import StepFacts
from esper.simic.training.accounts import EpisodeStats


class TrainingDisplay:
    """Shows a run; used in a `with` block. It reads and never decides.

    Args:
        console: Where to.
        rounds: Rounds of the whole run.
        horizon: Steps of a round.
        done: Rounds that were done before, by a run that is resumed.
    """

    def __init__(self, console: Console, *, label: str, rounds: int, horizon: int, done: int) -> None:
        self.console = console
        self.rounds = rounds
        self.horizon = horizon
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=not self._live,
        )
        self._bar = self._progress.add_task(label, total=rounds * horizon, completed=done * horizon, facts="")
        self._latest = ""

    def __enter__(self) -> TrainingDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, facts: StepFacts) -> None:
        """One step of every env is done."""
        mean = sum(report.val_accuracy_pct for report in facts.after.reports) / len(facts.after.reports)
        self._progress.update(self._bar, advance=1, facts=f"now {mean:5.1f} %  {self._latest}")

    def round(self, summary: BatchSummary, episodes: Sequence[EpisodeStats]) -> None:
        """A round is complete."""
        committed = summary.committed_accuracy_pct
        shown = "not measured" if committed is None else f"{committed:5.1f} %"
        self._latest = f"last round {shown}, return {summary.return_mean:+.3f}, {summary.params_ratio_mean:.2f}x params"
        if not self._live:
            left_s = summary.duration_s * (self.rounds - summary.round_idx - 1)
            self.console.print(
                f"round {summary.round_idx + 1}/{self.rounds}  committed {shown}  return {summary.return_mean:+.3f} "
                f"± {summary.return_std:.3f}  params {summary.params_ratio_mean:.2f}x  rollbacks "
                f"{summary.num_rollbacks}  {summary.duration_s:.1f} s  about {left_s / 60:.0f} min left",
                highlight=False,
                soft_wrap=True,
            )


def outcome_table(history: Sequence[BatchSummary]) -> Table:
    """First, best and last rounds of a run side by side."""
    table = Table(title="What was learned (validation, exploring)", title_justify="left")
    for name in ("rounds", "committed accuracy", "return", "params", "planted", "kept", "removed"):
        table.add_column(name, justify="left" if name == "rounds" else "right")
    tenth = max(1, len(history) // 10)
    for label, part in ((f"first {tenth}", history[:tenth]), (f"last {tenth}", history[-tenth:])):
        committed = [row.committed_accuracy_pct for row in part if row.committed_accuracy_pct is not None]
        episodes = sum(sum(row.num_ops.values()) for row in part)
        counts = [sum(row.num_ops[op] for row in part) for op in ("GERMINATE", "FOSSILIZE", "PRUNE")]
        table.add_row(
            label,
            f"{sum(committed) / len(committed):.1f} %" if committed else "not measured",
            f"{sum(row.return_mean for row in part) / len(part):+.3f}",
            f"{sum(row.params_ratio_mean for row in part) / len(part):.2f}x",
            *(f"{100 * count / max(1, episodes):.1f} % of steps" for count in counts),
        )
    return table
