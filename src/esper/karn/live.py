"""A run on the screen while it trains: progress bar, figures and verdict on a terminal, one line per round elsewhere.

The screen is a backend of the hub like any other: it has a queue and a thread of its own, and whatever happens to it,
the run goes on.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from esper.karn.console import STYLES, clean, describe_payload, duration, figure
from esper.karn.diagnosis import Diagnosis, RunCondition, diagnose
from esper.karn.view import ATTENTION, RunView
from esper.leyline import BatchSummary, LoggedEvent, RunStarted, Severity, TelemetryEventType

AT_ONCE = frozenset({TelemetryEventType.WORKER_STATE_CHANGED, TelemetryEventType.EVENTS_DROPPED})
"""Warnings that are printed when they come; what else a person should act on is in the verdict of the round."""

_PLAIN = (RunCondition.ALARM, RunCondition.WARNING)
"""States that say no more than the severity does."""


class PatientFile:
    """Standard output of a long run. If it can take no more, what follows is dropped and the run goes on.

    Args:
        file: Where text goes as long as it can.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._gone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                return self._file.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._gone = True
        with suppress(OSError, ValueError):
            # What is still in the buffer would fail once more when Python ends, and change the exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())
        if not isinstance(error, BrokenPipeError):
            with suppress(OSError, ValueError):
                sys.stderr.write(f"esper: standard output cannot be written ({error}). The run goes on without it\n")


def run_console(mode: str = "auto") -> Console:
    """The console of a command that trains: nothing that happens to it ends the training.

    Args:
        mode: "rich" for a terminal, "plain" for none; any other lets standard output decide.
    """
    terminal = {"rich": True, "plain": False}.get(mode)
    return Console(file=PatientFile(sys.stdout), force_terminal=terminal)  # type: ignore[arg-type]


class RunProgress(Progress):
    """Bars, each with its figures and its verdict below, so that 80 columns are enough. Drawn on terminals only.

    Args:
        console: Where to draw.
        notice: Asked at every drawing for a line that concerns all runs; None for none.
    """

    def __init__(self, console: Console, notice: Callable[[], str | None] = lambda: None) -> None:
        self._notice = notice
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar of every run and what is known about it."""
        for task in self.tasks:
            yield self.make_tasks_table([task])
            yield from task.fields["below"]
        if (notice := self._notice()) is not None:
            yield Text(clean(notice), STYLES[Severity.WARNING])

    def is_drawing(self) -> bool:
        """True while lines written by others would be drawn over."""
        return self.console.is_terminal and self.live.is_started


class LiveConsole:
    """Shows one run.

    Args:
        progress: Where its bar goes. Runs that are trained in turns share one.
        label: Name of the bar.
        rounds: Rounds of the whole run.
        horizon: Steps of a round.
        done: Rounds that were done before, by a run that is resumed.
        opening: Lines to print first.
        quiet: True to print nothing else, not even warnings: the log has them.
    """

    name = "console"

    def __init__(
        self,
        progress: RunProgress,
        *,
        label: str,
        rounds: int,
        horizon: int,
        done: int,
        opening: Iterable[str] = (),
        quiet: bool = False,
    ) -> None:
        self._progress, self._console = progress, progress.console
        self._label, self._rounds, self._horizon, self._done = label, rounds, horizon, done
        self._opening, self._quiet = tuple(opening), quiet
        self._view: RunView | None = None
        self._figures = ""
        self._verdict: Diagnosis | None = None
        self._shown: frozenset[tuple[RunCondition, str]] = frozenset()

    def start(self) -> None:
        """Prints the opening, and draws the empty bar."""
        for line in self._opening:
            self._print(Text(line))
        if self._quiet:
            return
        self._bar = self._progress.add_task(
            self._title(self._done), total=self._rounds * self._horizon, completed=self._done * self._horizon, below=()
        )
        self._progress.start()

    def write(self, line: LoggedEvent) -> bool:
        """Takes one event; most change nothing on the screen until the next step."""
        if self._quiet:
            return False
        if self._view is None:
            self._view = RunView(last_seq=line.seq - 1)  # a resumed run does not begin at 0
        self._view.add(line)
        if isinstance(line.data, RunStarted) and line.data.backend is not None:
            self._print(Text(f"{self._label}: hosts are trained by {line.data.backend}"))
        if isinstance(line.data, BatchSummary):
            self._round(line, line.data)
            return True
        if line.severity in ATTENTION and line.type in AT_ONCE:
            self._warn(line.round, line.severity, f"{line.type.value}: {describe_payload(line.data)}")
            return True
        return False

    def tick(self, round: int, epoch: int) -> None:
        if self._quiet:
            return
        self._progress.update(
            self._bar,
            completed=round * self._horizon + epoch,
            description=self._title(min(round + 1, self._rounds)),
            below=self._below(),
        )

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        self._progress.stop()

    def _round(self, line: LoggedEvent, data: BatchSummary) -> None:
        assert line.round is not None
        assert self._view is not None
        self._figures = (
            f"committed {figure(data.committed_accuracy_pct, '.1f', ' %', missing='not measured')}  "
            f"return {data.return_mean:+.3f} ± {data.return_std:.3f}  params {data.params_ratio_mean:.2f}x  "
            f"rollbacks {data.num_rollbacks}"
        )
        findings = diagnose(self._view, None, line.wall)
        self._verdict = findings[0]
        done = line.round + 1
        self._progress.update(self._bar, completed=done * self._horizon, below=self._below())
        if not self._console.is_terminal:
            left_s = data.duration_s * (self._rounds - done)
            text = (
                f"{self._label} round {done}/{self._rounds}  {self._figures}  "
                f"{data.duration_s:.1f} s  about {duration(left_s)} left  {self._verdict.state.value}"
            )
            self._print(Text(text))
        self._show_findings(line.round, findings)

    def _show_findings(self, round_idx: int, findings: Iterable[Diagnosis]) -> None:
        """Prints what has come up since the last round; what is still the case was said before."""
        urgent = {
            (found.state, re.split("[ :]", found.why)[0]): found for found in findings if found.severity in ATTENTION
        }
        for key, found in urgent.items():
            if key not in self._shown:
                what = found.now if found.state in _PLAIN else found.headline
                self._warn(round_idx, found.severity, f"{what} ({found.why}). {found.next}")
        self._shown = frozenset(urgent)

    def _warn(self, round_idx: int | None, severity: Severity, text: str) -> None:
        at = "-" if round_idx is None else f"{round_idx + 1}/{self._rounds}"
        warning = Text(clean(f"{severity.value}: {text}"), STYLES[severity])
        self._print(Text(clean(f"{self._label} round {at}: "), "dim").append(warning))

    def _below(self) -> tuple[Text, ...]:
        accuracies = [] if self._view is None else [now.data.val_accuracy_pct for now in self._view.epochs.values()]
        now = f"now {sum(accuracies) / len(accuracies):.1f} %  " if accuracies else ""
        figures = Text(f"  {now}{self._figures}", "dim", no_wrap=True, overflow="ellipsis")
        if self._verdict is None:
            return (figures,)
        headline = clean(f"  {self._verdict.headline}")
        return figures, Text(headline, STYLES[self._verdict.severity], no_wrap=True, overflow="ellipsis")

    def _title(self, round_now: int) -> str:
        return clean(f"{self._label} {round_now}/{self._rounds}")

    def _print(self, text: Text) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
