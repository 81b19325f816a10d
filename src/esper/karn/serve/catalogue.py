"""What a folder holds: its runs with a few facts each, and its evaluations. Reads the ends of logs, not all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from esper.karn.codec import LineError, NewerSchema, decode_line
from esper.karn.process import Heartbeat, ProcessState, read_heartbeat
from esper.karn.replay import file_size, is_run
from esper.leyline import BatchSummary, LoggedEvent, RunEnded, RunStarted, record
from esper.leyline.files import loads_json, open_regular, read_regular
from esper.leyline.rundir import event_files

MAX_DEPTH = 4
"""Folders below the served one that are searched: a study keeps its runs three levels down."""
MAX_FOUND = 2_000
MAX_VISITED = 20_000
"""Runs that are listed, and folders that are looked into to find them."""
HEAD_BYTES = 1 << 16
TAIL_BYTES = 1 << 18
MAX_TAIL_BYTES = 1 << 23
"""Read from the beginning of a log, from its end, and at most from its end if no round ended there."""
EVALUATION_FILE = "summary.json"
MAX_EVALUATION_BYTES = 20_000_000


@record
class RunSummary:
    """A run in one row. None where the log does not say, or could not be read."""

    id: str
    """The folder, relative to the served one."""
    run: str | None = None
    group: str | None = None
    task: str | None = None
    controller: str | None = None
    state: str
    """running, completed, failed, interrupted, died, elsewhere, empty, or unreadable."""
    note: str | None = None
    """Why it failed or cannot be read."""
    num_rounds_done: int | None = None
    num_rounds: int | None = None
    accuracy_pct: float | None = None
    """Of the last round, of the networks that would be delivered; all blended seeds where that was not measured."""
    best_accuracy_pct: float | None = None
    return_mean: float | None = None
    started_wall: float | None = None
    last_wall: float | None = None
    log_bytes: int = 0


@record
class EvaluationSummary:
    """An evaluation in one row."""

    id: str
    task: str | None = None
    subject: str | None = None
    num_seeds: int | None = None
    num_arms: int | None = None
    best_arm: str | None = None
    outcome: str | None = None
    """Verdicts of its claims, in its own words."""
    written_wall: float


@record
class Found:
    """What lies below a folder, newest first."""

    runs: tuple[RunSummary, ...]
    evaluations: tuple[EvaluationSummary, ...]
    cut: bool
    """True if there is more than is listed."""


class Catalogue:
    """Finds runs and evaluations below a folder. Ids are looked up here, so no request can name another path.

    Args:
        root: The folder that is served; it may itself be a run.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder; expected a run directory, or a folder with runs inside")
        self.root = root
        self._runs: dict[str, Path] = {}
        self._evaluations: dict[str, Path] = {}
        self._known: dict[str, tuple[tuple[int, ...], RunSummary]] = {}

    def look(self) -> Found:
        """Searches the folder and describes what is there. What did not change is not read again."""
        runs: dict[str, Path] = {}
        evaluations: dict[str, Path] = {}
        cut = False
        for path, kind in _search(self.root):
            if len(runs) + len(evaluations) >= MAX_FOUND:
                cut = True
                break
            name = path.relative_to(self.root).as_posix()
            (runs if kind == "run" else evaluations)[path.resolve().name if name == "." else name] = path
        self._runs, self._evaluations = runs, evaluations
        self._known = {name: known for name, known in self._known.items() if name in runs}
        return Found(
            runs=tuple(sorted((self._summary(name) for name in runs), key=lambda run: (-_when(run), run.id))),
            evaluations=tuple(
                sorted((_evaluation(name, path) for name, path in evaluations.items()), key=lambda e: -e.written_wall)
            ),
            cut=cut,
        )

    def run_dir(self, name: str) -> Path | None:
        """Where a listed run is; None if there is none of that name."""
        if name not in self._runs:
            self.look()
        return self._runs.get(name)

    def evaluation_dir(self, name: str) -> Path | None:
        """Where a listed evaluation is; None if there is none of that name."""
        if name not in self._evaluations:
            self.look()
        return self._evaluations.get(name)

    def _summary(self, name: str) -> RunSummary:
        path = self._runs[name]
        found = read_heartbeat(path, time.time())
        heartbeat = found if isinstance(found, Heartbeat) else None
        state = _stamp(path, heartbeat)
        if name not in self._known or self._known[name][0] != state:
            self._known[name] = (state, summarise_run(name, path, heartbeat))
        return self._known[name][1]


def _when(run: RunSummary) -> float:
    return run.started_wall or run.last_wall or 0.0


def _stamp(path: Path, heartbeat: Heartbeat | None) -> tuple[int, ...]:
    """Changes when the log has grown, or the process came or went."""
    process = -1 if heartbeat is None else list(ProcessState).index(heartbeat.process)
    try:
        return (process, *(file_size(file.path) for file in event_files(path)))
    except ValueError:
        return (process,)


def _search(root: Path) -> Iterator[tuple[Path, str]]:
    """Runs and evaluations, in the order of their paths. Nothing inside a run is searched, and no link is followed."""
    waiting, num_visited = [(root, 0)], 0
    while waiting and num_visited < MAX_VISITED:
        folder, depth = waiting.pop()
        num_visited += 1
        if _looks_like_run(folder):
            yield folder, "run"
            continue
        if (folder / EVALUATION_FILE).is_file() and (folder / "results.csv").is_file():
            yield folder, "evaluation"
        if depth < MAX_DEPTH:
            try:
                with os.scandir(folder) as entries:
                    names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
            except OSError:  # not ours to read
                continue
            waiting += [(folder / name, depth + 1) for name in sorted(names, reverse=True)]


def _looks_like_run(folder: Path) -> bool:
    try:
        return is_run(folder)
    except ValueError:  # one of another format, or with links inside: listed as unreadable
        return True


def summarise_run(name: str, path: Path, heartbeat: Heartbeat | None) -> RunSummary:
    """Describes a run by the first and the last lines of its log."""
    try:
        files = event_files(path)
        first = next(_events(_read(files[0].path, 0, HEAD_BYTES)), None) if files else None
        last_round, ended, last = _find_end(files[-1].path) if files else (None, None, None)
        if last_round is None and len(files) > 1:  # resumed, and no round has ended since
            before, *_ = _find_end(files[-2].path)
            last_round = before if before is not None and before.seq < files[-1].first_seq else None
    except (OSError, ValueError) as error:
        return RunSummary(id=name, state="unreadable", note=str(error))
    if first is None and any(file_size(file.path) for file in files):
        return RunSummary(id=name, state="unreadable", note="its log does not begin with an event")
    begun = first.data if first is not None and isinstance(first.data, RunStarted) else None
    summary = None if last_round is None else last_round.data
    assert summary is None or isinstance(summary, BatchSummary)
    final = None if ended is None or not isinstance(ended.data, RunEnded) else ended.data
    accuracy = None
    if summary is not None:
        known = summary.committed_accuracy_pct
        accuracy = summary.accuracy_mean_pct if known is None else known
    failure = None if final is None or final.error_type is None else f"{final.error_type}: {final.error_message}"
    return RunSummary(
        id=name,
        run=None if first is None else first.run,
        group=None if first is None else first.group,
        task=None if begun is None else begun.task,
        controller=None if begun is None else begun.controller,
        state=_state(final, heartbeat, empty=first is None),
        note=failure,
        num_rounds_done=None if last_round is None or last_round.round is None else last_round.round + 1,
        num_rounds=None if begun is None else begun.num_rounds,
        accuracy_pct=accuracy,
        best_accuracy_pct=None if final is None else final.best_accuracy_pct,
        return_mean=None if summary is None else summary.return_mean,
        started_wall=None if first is None else first.wall,
        last_wall=None if last is None else last.wall,
        log_bytes=sum(file_size(file.path) for file in files),
    )


def _state(ended: RunEnded | None, heartbeat: Heartbeat | None, *, empty: bool) -> str:
    if ended is not None:
        return ended.status
    if heartbeat is None or heartbeat.process is ProcessState.GONE:
        return "empty" if empty else "died"
    return "running" if heartbeat.process is ProcessState.ALIVE else "elsewhere"


def _find_end(path: Path) -> tuple[LoggedEvent | None, LoggedEvent | None, LoggedEvent | None]:
    """The last round, the end marker and the last event of a log; None for each that is not near its end."""
    size, length = file_size(path), TAIL_BYTES
    while True:
        last_round = ended = last = None
        for event in _events(_read(path, max(size - length, 0), length)):
            last = event
            if isinstance(event.data, BatchSummary):
                last_round = event
            elif isinstance(event.data, RunEnded | RunStarted):
                ended = event if isinstance(event.data, RunEnded) else None
        if last_round is not None or length >= min(size, MAX_TAIL_BYTES):
            return last_round, ended, last
        length *= 4


def _read(path: Path, start: int, length: int) -> bytes:
    """The whole lines within a part of a file."""
    with open(open_regular(path), "rb") as file:
        file.seek(max(start - 1, 0))
        found = file.read(length + 1)
    begin = 0 if start == 0 else found.find(b"\n") + 1
    return found[begin : found.rfind(b"\n") + 1]


def _events(lines: bytes) -> Iterator[LoggedEvent]:
    for line in lines.splitlines(keepends=True):
        try:
            yield decode_line(line)
        except NewerSchema:
            raise
        except LineError:
            continue


# ---- evaluations


class _Arm(msgspec.Struct):
    num_runs: int


class _Verdict(msgspec.Struct):
    letter: str
    words: str
    outcome: str


class EvaluationFacts(msgspec.Struct):
    """The part of an evaluation's summary that a list shows; arms come best first."""

    task: str
    subject: str
    num_seeds: int
    arms: dict[str, _Arm]
    verdicts: list[_Verdict] = []


def _evaluation(name: str, path: Path) -> EvaluationSummary:
    file = path / EVALUATION_FILE
    try:
        facts = msgspec.convert(loads_json(read_regular(file, MAX_EVALUATION_BYTES)), EvaluationFacts)
        written = file.stat().st_mtime
    except (OSError, ValueError, msgspec.ValidationError) as error:
        return EvaluationSummary(id=name, outcome=f"cannot be read: {error}", written_wall=0.0)
    return EvaluationSummary(
        id=name,
        task=facts.task,
        subject=facts.subject,
        num_seeds=facts.num_seeds,
        num_arms=len(facts.arms),
        best_arm=next(iter(facts.arms), None),
        outcome="; ".join(f"{one.words}: {one.outcome}" for one in facts.verdicts) or None,
        written_wall=written,
    )
