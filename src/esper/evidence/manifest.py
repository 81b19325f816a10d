"""What an evaluation was: task, data, arms, policies, checks, machine. Everything a report says that no row says.

Also the record of who opened the test split: one line per opening, in one file per user, so that looking twice shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import esper
from esper.leyline import record
from esper.leyline.files import loads_json, read_regular, write_atomic

MANIFEST = "manifest.json"
TEST_ACCESS = "test_access.jsonl"
MAX_MANIFEST_BYTES = 2**24
EVALUATION_FORMAT = 2
"""Of manifest.json and summary.json. Format 1 called the learning checks gates; it is still read."""


@record
class CheckResult:
    """One condition of a claim, with what was found and what was required."""

    name: str
    passed: bool | None
    """None: not checked; `found` says why. A claim needs True."""
    found: str
    limit: str


@record
class EvaluationSession:
    """One start of the command on this folder."""

    argv: tuple[str, ...]
    started: str
    ended: str | None
    """None: interrupted."""
    opened_test: bool


@record
class EvaluationManifest:
    """The facts of an evaluation that all its runs share."""

    schema_version: int
    setup: str
    code: str
    task: str
    description: str
    metric: str
    horizon: int
    num_classes: int
    budget: int | None
    host_params: int
    data: str
    data_sha256: str
    test_sha256: str
    num_test: int
    run_seeds: tuple[int, ...]
    arms: tuple[str, ...]
    subject: str
    settings: Mapping[str, Mapping[str, Any]]
    """Parameters of fixed arms, where they are not the defaults."""
    tuning: Mapping[str, Any] | None
    """How they were chosen; None: they are the defaults."""
    policies: tuple[Mapping[str, Any], ...]
    learning_checks: tuple[CheckResult, ...]
    controls: tuple[CheckResult, ...]
    notes: tuple[str, ...]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    sessions: tuple[EvaluationSession, ...]
    backend: str = "torch"
    """What trained the hosts, with its version; rows of two backends are never paired."""
    test_openings: int | None
    """How often this test split was opened on this machine, this time included; None: the record is not writable."""

    @property
    def policy_ids(self) -> tuple[str, ...]:
        """The policies of this evaluation."""
        return tuple(policy["policy_id"] for policy in self.policies)

    def save(self, folder: Path) -> None:
        """Replaces manifest.json in one step."""
        write_atomic(folder / MANIFEST, (json.dumps(asdict(self), indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> EvaluationManifest:
        """Reads what `save` wrote.

        Raises:
            ValueError: There is none, or it is of another version.
        """
        path = folder / MANIFEST
        try:
            facts = loads_json(read_regular(path, MAX_MANIFEST_BYTES))
            if facts["schema_version"] == 1:
                facts |= {"schema_version": EVALUATION_FORMAT, "learning_checks": facts.pop("gates")}
            if facts["schema_version"] != EVALUATION_FORMAT:
                raise ValueError(f"format {facts['schema_version']}, this version of Esper reads {EVALUATION_FORMAT}")
            return msgspec.convert(facts, cls)
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing; a results file is read together with the manifest beside it"
            ) from None
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a manifest of this version: {error}") from error


def code_version() -> str:
    """The package's version and a hash over its source files: equal for equal code."""
    root = Path(esper.__file__).parent
    total = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        total.update(f"{file.relative_to(root).as_posix()}\n".encode() + file.read_bytes())
    return f"{esper.__version__}+{total.hexdigest()[:10]}"


def package_versions() -> dict[str, str]:
    """The packages that figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "pandas", "arch", "scipy", "statsmodels", "matplotlib"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Where it ran, as far as it matters for times and bits."""
    return {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def note_test_access(facts: Mapping[str, Any]) -> int | None:
    """Appends one opening and returns how many there now are of the same test split; None if it cannot be written.

    There is one file per user: results may lie anywhere, and bundled data lies where nobody may write.

    Args:
        facts: Must hold `test_sha256`.
    """
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    path = Path(state) / "esper" / TEST_ACCESS
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = not path.exists() or not (before := path.read_bytes()) or before.endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            line = json.dumps({"time": now(), **facts}, sort_keys=True)
            file.write(f"{line}\n" if whole else f"\n{line}\n")  # half a line is what a crash left
            file.flush()
            os.fsync(file.fileno())
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        sys.stderr.write(f"esper: this opening of the test split is not on record: {path}: {error}\n")
        return None
    wanted = f'"test_sha256": "{facts["test_sha256"]}"'
    return sum(wanted in line for line in lines)
