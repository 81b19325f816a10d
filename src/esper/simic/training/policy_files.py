"""A trained policy, taken out of its run: for playing, not for training on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from esper.leyline import CheckpointError, ModelFileError
from esper.leyline.rundir import CHECKPOINTS_DIR
from esper.simic.agent.files import FACTS_FILE, POLICY_FILE
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training.checkpoint import LoadedCheckpoint, load_checkpoint, newest_valid
from esper.simic.training.config import TrainingConfig
from esper.simic.training.run_dir import open_run
from esper.simic.training.run_state import read_run_files


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """A policy with what must be known about its training before it may be judged."""

    agent: PPOAgent
    config: TrainingConfig
    checkpoint: Path
    run_id: str
    rounds: int
    host_epochs: int
    """Host epochs its training took."""
    training_s: float
    """Wall time of its rounds."""
    policy_sha256: str
    """Over the weights and statistics it plays with."""

    @property
    def trained_run_seeds(self) -> frozenset[int]:
        """Run seeds whose hosts it has seen."""
        return frozenset({self.config.seed})


def load_policy(path: str | Path) -> LoadedPolicy:
    """Takes the policy out of a run directory (its newest valid checkpoint) or out of one checkpoint.

    Raises:
        ValueError: There is no such run or checkpoint.
        CheckpointError: Nothing in it is valid, or it holds no learned policy.
    """
    place = Path(path)
    if place.absolute().parent.name == CHECKPOINTS_DIR:
        return _policy(load_checkpoint(place))
    loaded, _ = newest_valid(open_run(place), check=lambda found: read_run_files(found.files))
    return _policy(loaded)


def _policy(loaded: LoadedCheckpoint) -> LoadedPolicy:
    try:
        state = read_run_files(loaded.files)
    except ModelFileError as error:
        raise CheckpointError(f"{loaded.path}: {error}") from error
    if state.agent is None:
        raise CheckpointError(f"{loaded.path} is of a run of {state.config.controller!r}, which learned no policy")
    return LoadedPolicy(
        agent=state.agent,
        config=state.config,
        checkpoint=loaded.path,
        run_id=loaded.facts.run_id,
        rounds=len(state.history),
        host_epochs=state.counters["num_env_steps"],
        training_s=sum(summary.duration_s for summary in state.history),
        policy_sha256=policy_sha256(loaded.files[POLICY_FILE], loaded.files[FACTS_FILE]),
    )


def policy_sha256(*parts: bytes) -> str:
    """One hash over the files of a policy."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
