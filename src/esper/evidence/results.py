"""Files of what was measured: rows are appended as runs end, so an interruption loses nothing that was finished.

results.csv has one row per run, curves.csv one per run and epoch, topologies.jsonl what grew where and when. Tables,
reports and figures are made from them and can be made again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from esper.evidence.host_runs import PlantedSeed
from esper.evidence.static_networks import SeedChoice
from esper.leyline import record
from esper.leyline.files import append_durable, cut_torn_line, loads_json, read_regular

RESULTS, CURVES, TOPOLOGIES = "results.csv", "curves.csv", "topologies.jsonl"
MAX_BYTES = 2**28
"""A larger file is none of them and is not read."""
OK = "ok"
KEY = ["arm", "policy_id", "run_seed"]
"""Columns that name a run."""

RunKey = tuple[str, str, int]


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
    """`ok`, or `failed:` and why. A failed run keeps its place, with the scores of guessing if it left no network."""
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
    training_macs: int
    """Multiply-accumulates of all training, forward and backward, of the network as it was in each epoch."""
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
    def key(self) -> RunKey:
        """Arm, policy and run seed."""
        return self.arm, self.policy_id, self.run_seed

    @property
    def failed(self) -> bool:
        """True if the run did not end as it should."""
        return self.status != OK


RESULT_COLUMNS: dict[str, str] = {field.name: str(field.type) for field in fields(RunResult)}
CURVE_COLUMNS = {
    **dict.fromkeys(["arm", "policy_id"], "str"),
    **dict.fromkeys(["run_seed", "epoch"], "int"),
    **dict.fromkeys(["committed_accuracy_pct", "committed_loss"], "float"),
    "total_params": "int",
}
"""Every epoch of every run, on validation data."""


@record
class Topology:
    """What one run grew."""

    arm: str
    policy_id: str
    run_seed: int
    host: Mapping[str, Any]
    """Kind and arguments of the host."""
    kept: tuple[SeedChoice, ...]
    lives: tuple[PlantedSeed, ...]
    """Every seed that was planted; its epochs count from 1 in files, as those of curves do."""

    @property
    def key(self) -> RunKey:
        """Arm, policy and run seed."""
        return self.arm, self.policy_id, self.run_seed

    @property
    def sha(self) -> str:
        """Equal for equal networks: host and kept seeds, not when they were grown."""
        facts = [self.host, [asdict(seed) for seed in self.kept]]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def shift_epochs(lives: Iterable[PlantedSeed], by: int) -> tuple[PlantedSeed, ...]:
    """Seeds with their epochs counted from another number: by 1 for files, back by -1."""
    moments = ("planted", "blended", "kept", "pruned")
    return tuple(
        replace(seed, **{name: epoch + by for name in moments if (epoch := getattr(seed, name)) is not None})
        for seed in lives
    )


class ResultStore:
    """The three files of one folder. What is written is on disk when the call returns.

    The caller is the only process that writes there (`sole_user`).

    Raises:
        ValueError: A file is not of this version or damaged, or they do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (RESULTS, CURVES, TOPOLOGIES):
            cut_torn_line(folder / name, MAX_BYTES)
        rows = (RunResult(**row) for row in read_results(folder / RESULTS).to_dict("records"))
        self.results = {row.key: row for row in rows}
        # Curves and topologies are written before the row that counts, so an interrupted run may have left some.
        self.topologies = {t.key: t for t in read_topologies(folder / TOPOLOGIES, self.results.keys())}
        if lost := self.results.keys() - self.topologies.keys():
            arm, _, run_seed = min(lost)
            raise ValueError(
                f"{folder / TOPOLOGIES} lacks {len(lost)} runs of {RESULTS}, such as {arm} {run_seed}. Put the file "
                f"back, or remove those rows of {RESULTS}, and they run again"
            )

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

    def add(self, result: RunResult, topology: Topology, curve: pd.DataFrame) -> None:
        """Appends a finished run; the curve has CURVE_COLUMNS."""
        assert result.key == topology.key
        _append_csv(self.folder / CURVES, curve[list(CURVE_COLUMNS)])
        written = {**asdict(topology), "lives": [asdict(seed) for seed in shift_epochs(topology.lives, 1)]}
        append_durable(self.folder / TOPOLOGIES, f"{json.dumps(written, sort_keys=True)}\n".encode())
        _append_csv(self.folder / RESULTS, pd.DataFrame([asdict(result)]))
        self.results[result.key] = result
        self.topologies[topology.key] = topology


def read_results(path: Path) -> pd.DataFrame:
    """The rows of a results file; none if there is no file.

    Raises:
        ValueError: It is not a results file of this version, or has a run twice.
    """
    rows = _read_csv(path, RESULT_COLUMNS)
    if rows.duplicated(KEY).any():
        raise ValueError(f"{path} has a run twice; remove one of its rows")
    return rows


def read_curves(path: Path, finished: Iterable[RunKey]) -> pd.DataFrame:
    """The epochs of finished runs, each once."""
    rows = _read_csv(path, CURVE_COLUMNS).drop_duplicates([*KEY, "epoch"], keep="last")
    wanted = set(finished)
    return rows[[key in wanted for key in zip(*(rows[name] for name in KEY), strict=True)]]


def read_topologies(path: Path, finished: Iterable[RunKey]) -> list[Topology]:
    """What every finished run grew; nothing if there is no file.

    Raises:
        ValueError: A line is damaged.
    """
    lines = _read(path).splitlines()
    wanted, found = set(finished), []
    for number, line in enumerate(lines, start=1):
        try:
            read = msgspec.convert(loads_json(line), Topology)
            found.append(replace(read, lives=shift_epochs(read.lives, -1)))
        except ValueError as error:
            raise ValueError(
                f"{path} line {number} is damaged ({error}). Remove it, and the row of its run from {RESULTS}"
            ) from error
    return [topology for topology in found if topology.key in wanted]


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_BYTES)
    except FileNotFoundError:
        return b""


def _read_csv(path: Path, types: Mapping[str, str]) -> pd.DataFrame:
    if not (content := _read(path)):
        return pd.DataFrame(columns=list(types))
    try:
        # All text first: pandas would take an absent last field for a number that was not measured.
        text = pd.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False, index_col=False)
        return text[list(types)].astype(types)
    except (KeyError, OverflowError, ValueError) as error:
        raise ValueError(f"{path} is not a results file of this version ({error}); choose another --out") from error


def _append_csv(path: Path, rows: pd.DataFrame) -> None:
    header = not path.exists() or path.stat().st_size == 0
    append_durable(path, rows.to_csv(index=False, header=header, lineterminator="\n").encode())
