"""What every run came to, in files: rows are appended as runs end, so an interruption loses nothing that was finished.

Three files hold all that was measured: results.csv (one row per run), curves.csv (one row per run and epoch) and
topologies.jsonl (what grew where and when). Tables and figures are made from them and can be made again.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from esper.leyline import record

RESULTS, CURVES, TOPOLOGIES = "results.csv", "curves.csv", "topologies.jsonl"
OK = "ok"


@record
class RunResult:
    """One run of one arm: the committed network (host and kept seeds) after the last epoch."""

    setup: str
    """Short hash of task, data, arm settings and code: rows of different setups are never mixed."""
    arm: str
    policy_id: str
    """Start of the policy's sha256 in arms that depend on one; empty in the others."""
    run_seed: int
    status: str
    """`ok`, or `failed:` and why. A failed run keeps its place, at chance if it left no network."""
    test_accuracy_pct: float
    test_loss: float
    val_accuracy_pct: float
    val_loss: float
    host_params: int
    params: int
    """Of the committed network."""
    peak_params: int
    param_epochs: int
    """Sum over epochs of all parameters that were trained then: a proxy for work."""
    host_epochs: int
    num_wait: int
    num_germinate: int
    num_advance: int
    num_prune: int
    num_fossilize: int
    num_kept: int
    num_rollbacks: int
    topology_sha: str
    run_s: float
    """Seconds of one thread for this run alone: training, validation and controller."""
    controller_s: float
    wall_s: float
    """This run's equal share of the wall-clock of the runs it ran beside."""

    @property
    def key(self) -> tuple[str, str, int]:
        """What a run is a run of."""
        return self.arm, self.policy_id, self.run_seed

    @property
    def failed(self) -> bool:
        """True if the run did not end as it should."""
        return self.status != OK


@record
class CurvePoint:
    """One epoch of one run, on validation data."""

    arm: str
    policy_id: str
    run_seed: int
    epoch: int
    committed_accuracy_pct: float
    committed_loss: float
    total_params: int


@record
class KeptSeed:
    """A seed of the committed network."""

    slot: str
    blueprint: str
    blend: str


@record
class SeedLife:
    """One seed from planting to its end. Epochs count from 1; None: it did not come to that."""

    slot: str
    blueprint: str
    blend: str
    params: int
    planted: int
    blended: int | None
    kept: int | None
    pruned: int | None


@record
class Topology:
    """What one run grew."""

    arm: str
    policy_id: str
    run_seed: int
    host: Mapping[str, Any]
    """Kind and arguments of the host."""
    kept: tuple[KeptSeed, ...]
    lives: tuple[SeedLife, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        """What a run is a run of."""
        return self.arm, self.policy_id, self.run_seed

    @property
    def sha(self) -> str:
        """Equal for equal networks: host and kept seeds, not when they were grown."""
        facts = [self.host, [asdict(seed) for seed in self.kept]]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


# ---- files


class ResultStore:
    """The three files of one folder. What is written is on disk when the call returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (RESULTS, CURVES, TOPOLOGIES):
            _cut_torn_line(folder / name)
        self.results = {row.key: row for row in read_results(folder / RESULTS)}
        finished = self.results.keys()
        # Curves and topologies are written before the row that counts, so an interrupted run may have left some.
        self.topologies = {t.key: t for t in read_topologies(folder / TOPOLOGIES) if t.key in finished}

    def require(self, setup: str, policies: Set[str]) -> None:
        """Refuses to add to rows of another setup, or to rows of policies that were not named.

        Raises:
            ValueError: The folder holds other results.
        """
        found = {row.policy_id for row in self.results.values()} - {""}
        if other := found - policies:
            raise ValueError(
                f"{self.folder / RESULTS} holds runs of policies {', '.join(sorted(other))}; "
                "name them with --policy too, or choose another --out"
            )
        if any(row.setup != setup for row in self.results.values()):
            raise ValueError(
                f"{self.folder / RESULTS} holds results of another task, schedule or version; choose another --out"
            )

    def add(self, result: RunResult, topology: Topology, curve: Sequence[CurvePoint]) -> None:
        """Appends a finished run."""
        assert result.key == topology.key
        _append_csv(self.folder / CURVES, CurvePoint, curve)
        _append_text(self.folder / TOPOLOGIES, json.dumps(asdict(topology), sort_keys=True) + "\n")
        _append_csv(self.folder / RESULTS, RunResult, [result])
        self.results[result.key] = result
        self.topologies[topology.key] = topology


T = TypeVar("T", RunResult, CurvePoint)
_CONVERT: dict[str, Any] = {"str": str, "int": int, "float": float}


def read_results(path: Path) -> list[RunResult]:
    """The rows of a results file; none if there is no file.

    Raises:
        ValueError: It is not a results file of this version, or has a run twice.
    """
    rows = _read_csv(path, RunResult)
    if len({row.key for row in rows}) != len(rows):
        raise ValueError(f"{path} has a run twice; remove one of its rows")
    return rows


def read_curves(path: Path, finished: Iterable[tuple[str, str, int]]) -> list[CurvePoint]:
    """The epochs of finished runs, each once, in the order of the file."""
    wanted = set(finished)
    found = {(p.arm, p.policy_id, p.run_seed, p.epoch): p for p in _read_csv(path, CurvePoint)}
    return [point for key, point in found.items() if key[:3] in wanted]


def read_topologies(path: Path) -> list[Topology]:
    """What every run grew; nothing if there is no file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        facts = json.loads(line)
        kept = tuple(KeptSeed(**seed) for seed in facts.pop("kept"))
        lives = tuple(SeedLife(**life) for life in facts.pop("lives"))
        found.append(Topology(**facts, kept=kept, lives=lives))
    return found


def _read_csv(path: Path, kind: type[T]) -> list[T]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    types = {field.name: _CONVERT[str(field.type)] for field in fields(kind)}
    try:
        return [kind(**{name: convert(row[name]) for name, convert in types.items()}) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a results file of this version ({error}); choose another --out") from error


def _append_csv(path: Path, kind: type[T], rows: Sequence[T]) -> None:
    names = [field.name for field in fields(kind)]
    fresh = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if fresh:
            writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)
        _to_disk(file)


def _append_text(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        _to_disk(file)


def _cut_torn_line(path: Path) -> None:
    """A line without its end was being written when the process died: it never counted."""
    if not path.exists():
        return
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
