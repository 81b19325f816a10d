"""A run directory with small checkpoints in it, for tests."""

from __future__ import annotations

from pathlib import Path

from esper.simic.run.checkpoint import (
    CheckpointFacts,
    LoadedCheckpoint,
    Rejection,
    SavedCheckpoint,
    newest_valid,
    save_checkpoint,
)
from esper.simic.run.run_dir import RunDir, create_run


def facts(index: int, *, score: float | None = None, run_id: str = "run") -> CheckpointFacts:
    return CheckpointFacts(
        index=index,
        run_id=run_id,
        attempt=0,
        next_seq=10 * index,
        score=score,
        identity={"python": "3.11"},
    )


def contents(index: int) -> dict[str, bytes]:
    return {
        "policy.safetensors": bytes(8) + b"{" + bytes([index % 256]) * 400,
        "state.json": b'{"rounds": %d}' % index,
        "agent.json": b"{}" * (index + 1),
        "empty.safetensors": b"",
    }


def no_sleep(seconds: float) -> None:
    assert seconds > 0


def save(run: RunDir, index: int, *, score: float | None = None) -> SavedCheckpoint:
    return save_checkpoint(run, facts(index, score=score), contents(index), sleep=no_sleep)


def run_with(folder: Path, *indices: int) -> RunDir:
    run = create_run(folder, "run")
    for index in indices:
        save(run, index)
    return run


def newest(run: RunDir) -> tuple[LoadedCheckpoint, tuple[Rejection, ...]]:
    """The newest valid checkpoint, whatever it holds, and the newer ones that are not."""
    loaded, _, rejected = newest_valid(run, lambda found: None)
    return loaded, rejected


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())
