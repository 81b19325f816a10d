"""How a training run looks when it is over: its first and last rounds, and two runs side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from esper.leyline import BatchSummary
from esper.simic.training.dual_ab import PairedRounds


def outcome_table(history: Sequence[BatchSummary], envs: int) -> Table:
    """The first and the last rounds of a run side by side; seeds are counted per episode."""
    tenth = max(1, len(history) // 10)
    table = _table("First and last rounds", "rounds", "accuracy", "return", "params", "planted", "kept", "removed")
    for label, part in ((f"first {tenth}", history[:tenth]), (f"last {tenth}", history[-tenth:])):
        counts = [sum(row.num_ops[op] for row in part) for op in ("GERMINATE", "FOSSILIZE", "PRUNE")]
        table.add_row(label, *_means(part), *(f"{count / (len(part) * envs):.1f}" for count in counts))
    return table


def comparison_table(names: Sequence[str], found: PairedRounds) -> Table:
    """Both sides, and the paired difference over the last tenth of the rounds."""
    last = max(1, len(found.pairs) // 10)
    table = _table(f"Last {last} rounds, same hosts on both sides", "side", "accuracy", "return", "params")
    for name, history in zip(names, found.histories, strict=True):
        table.add_row(name, *_means(history[-last:]))
    differences = found.differences_pp(last)
    shown = f"{statistics.fmean(differences):+.2f}" if differences else "not measured"
    spread = f" ± {statistics.stdev(differences):.2f}" if len(differences) > 1 else ""
    table.add_section()
    table.add_row(f"{names[1]} - {names[0]}", f"{shown}{spread}", f"{len(differences)} pairs", "")
    return table


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=f"{title} (validation, exploring)", title_justify="left")
    table.add_column(first)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _means(rounds: Sequence[BatchSummary]) -> tuple[str, str, str]:
    """Committed accuracy, return and growth over some rounds."""
    committed = [row.committed_accuracy_pct for row in rounds if row.committed_accuracy_pct is not None]
    return (
        f"{statistics.fmean(committed):.1f} %" if committed else "not measured",
        f"{statistics.fmean(row.return_mean for row in rounds):+.3f}",
        f"{statistics.fmean(row.params_ratio_mean for row in rounds):.2f}x",
    )
