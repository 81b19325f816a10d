"""How a training run looks when it is over: its first and last rounds, and two runs side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from esper.leyline import BatchSummary
from esper.simic.training.dual_ab import PairedRounds


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


def comparison_table(names: Sequence[str], found: PairedRounds) -> Table:
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
