"""What a person sees while a model grows: a bar with the time left, and a line for everything that moves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from esper.growth.history import GrowthEpoch, SeedLife

if TYPE_CHECKING:
    from esper.growth.training import GrowthRun

LINES_WITHOUT_TERMINAL = 8
"""About so many lines of progress are printed where there is no terminal to draw a bar on."""


class GrowthProgress:
    """Progress of one run, used in a `with` block."""

    def __init__(self, epochs: int, *, verbose: bool, label: str = "growing") -> None:
        self._epochs = epochs
        self._label = label
        self._verbose = verbose
        self._console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (verbose and self._console.is_terminal),
        )
        self._task = self._bar.add_task(label, total=epochs, facts="")
        self._shown = 0

    def __enter__(self) -> GrowthProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, run: GrowthRun) -> None:
        """Says what is about to happen."""
        grower = run.grower
        self._shown = len(grower.moves)
        self._bar.update(self._task, completed=grower.epochs_done)
        sites = ", ".join(site.name for site in grower.network.sites.chosen)
        self._print(f"{type(run.model).__name__}: sites {sites}; {grower.controller_name} decides")

    def epoch(self, run: GrowthRun, entry: GrowthEpoch) -> None:
        """Shows what moved and how the model does."""
        grower = run.grower
        facts = f"{grower.scale.name} {entry.metric:.4g}  {entry.params:,} parameters"
        self._bar.update(self._task, completed=grower.epochs_done, facts=facts)
        for move in grower.moves[self._shown :]:
            self._print(f"  epoch {move.epoch + 1:3}  {move}")
        self._shown = len(grower.moves)
        if entry.rolled_back is not None:
            self._print(f"  epoch {entry.epoch + 1:3}  rolled back to the last healthy state: {entry.rolled_back}")
        if not self._console.is_terminal and grower.epochs_done % max(1, self._epochs // LINES_WITHOUT_TERMINAL) == 0:
            left = run.seconds / grower.epochs_done * (self._epochs - grower.epochs_done)
            self._print(f"{self._label}: epoch {grower.epochs_done}/{self._epochs}  {facts}  {left:.0f} s left")

    def announce_receipts(self, run: GrowthRun, twins: Sequence[tuple[SeedLife, int]]) -> None:
        """Says what receipts will cost before it is spent."""
        epochs = sum(count for _, count in twins)
        seconds = run.seconds / max(1, run.grower.epochs_done) * epochs
        self._print(f"receipts: {len(twins)} twins, {epochs} epochs, about {seconds:.0f} s")

    def stopped(self, run: GrowthRun, folder: Path | None) -> None:
        """Says what can be done with a run that was interrupted."""
        done = run.grower.epochs_done
        way = (
            "give out= next time to be able to go on"
            if folder is None
            else f"resume=True (--resume) goes on from {folder}"
        )
        self._print(f"stopped after {done} of {self._epochs} epochs; {way}")

    def say(self, line: str) -> None:
        """Shows what is being done now."""
        self._bar.update(self._task, facts=line)
        if not self._console.is_terminal:
            self._print(line)

    def _print(self, line: str) -> None:
        if self._verbose:
            self._console.print(line)
