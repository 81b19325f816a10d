"""A run directory with small checkpoints in it, for tests."""

from __future__ import annotations

from pathlib import Path

from esper.simic.training.checkpoint import SavedCheckpoint, save_checkpoint
from esper.simic.training.manifest import CheckpointFacts
from esper.simic.training.run_dir import RunDir, create_run


def facts(index: int, *, score: float | None = None, run_id: str = "run") -> CheckpointFacts:
    return CheckpointFacts(
        run_id=run_id,
        attempt=0,
        round=index,
        epoch=None,
        next_seq=10 * index,
        score=score,
        config={"gamma": 0.99, "envs": 4},
        identity={"python": "3.11"},
    )


def contents(index: int) -> dict[str, bytes]:
    return {
        "policy.safetensors": bytes(8) + b"{" + bytes([index % 256]) * 400,
        "state.json": b'{"rounds": %d}' % index,
        "envs/000.json": b"{}" * (index + 1),
        "envs/000.safetensors": b"",
    }


def no_sleep(seconds: float) -> None:
    assert seconds > 0


def save(run: RunDir, index: int, *, score: float | None = None) -> SavedCheckpoint:
    return save_checkpoint(
        run, kind="round", index=index, files=contents(index), facts=facts(index, score=score), sleep=no_sleep
    )


def run_with(folder: Path, *indices: int) -> RunDir:
    run = create_run(folder, "run")
    for index in indices:
        save(run, index)
    return run


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())
