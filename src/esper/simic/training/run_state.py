"""A run at a round boundary, as files and back: all that its exact continuation needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from esper.leyline import BatchSummary, ModelFileError
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import SimicClient
from esper.simic.rewards import Calibration
from esper.simic.training.calibration import calibration_from
from esper.simic.training.config import LEARNED, TrainingConfig, config_from_json

if TYPE_CHECKING:
    from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run between two rounds."""

    config: TrainingConfig
    counters: dict[str, Any]
    history: tuple[BatchSummary, ...]
    calibration: Calibration | None
    reward_scale: dict[str, float] | None
    """None for a fixed controller, which has no agent either."""
    agent: PPOAgent | None
    log_state: dict[str, Any] | None


def run_files(trainer: VectorizedPPOTrainer, log_state: dict[str, Any] | None = None) -> dict[str, bytes]:
    """The run as files: tensors as safetensors, everything else as JSON.

    Args:
        trainer: Between two rounds.
        log_state: What the alarms remember; None where nobody watches.
    """
    learner = trainer.client if isinstance(trainer.client, SimicClient) else None
    state = {
        "config": json.loads(trainer.config.to_json()),
        "counters": trainer.counters(),
        "history": [asdict(summary) for summary in trainer.history],
        "calibration": None if trainer.calibration is None else asdict(trainer.calibration),
        "reward_scale": None if learner is None else learner.scale.state_dict(),
        "log": log_state,
    }
    files = {STATE_FILE: (json.dumps(state, indent=1, allow_nan=False) + "\n").encode()}
    return files if learner is None else files | learner.agent.to_files()


def read_run_files(files: Mapping[str, bytes]) -> RunState:
    """Reads what `run_files` made.

    Raises:
        ModelFileError: A file is missing or does not describe a run of this release.
    """
    if STATE_FILE not in files:
        raise ModelFileError(f"{STATE_FILE} is missing: not a checkpoint of a training run")
    try:
        state = json.loads(files[STATE_FILE])
        config = config_from_json(json.dumps(state["config"]), STATE_FILE)
        return RunState(
            config=config,
            counters=state["counters"],
            history=tuple(BatchSummary(**row) for row in state["history"]),
            calibration=None if state["calibration"] is None else calibration_from(state["calibration"]),
            reward_scale=state["reward_scale"],
            log_state=state["log"],
            agent=PPOAgent.from_files(files) if config.controller == LEARNED else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{STATE_FILE}: not the state of a training run of this release ({error})") from error
