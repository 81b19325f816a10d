"""A run at a round boundary, as files and back: all that its exact continuation needs, and the policy in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import msgspec

from esper.kasmina import BLUEPRINTS
from esper.leyline import BatchSummary, CheckpointError, LifecycleOp, ModelFileError, NumericFailure, Severity
from esper.leyline.files import loads_json
from esper.leyline.rundir import CHECKPOINTS_DIR
from esper.nissa import complain
from esper.runtime.tasks import get_task_spec
from esper.simic.agent.agent_files import FACTS_FILE, POLICY_FILE
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import SimicClient, check_columns
from esper.simic.control.normalization import RewardNormalizer
from esper.simic.rewards import Calibration, default_gamma
from esper.simic.run.checkpoint import LoadedCheckpoint, load_checkpoint, newest_valid
from esper.simic.run.pretrained import card_folder, load_pretrained
from esper.simic.run.run_dir import open_run
from esper.simic.telemetry.anomaly_detector import AnomalyDetector
from esper.simic.training.config import (
    LEARNED,
    NURSERY,
    PRETRAINED,
    TrainingConfig,
    config_from_json,
    preset,
    with_overrides,
)
from esper.tamiyo.controllers import CONTROLLERS

if TYPE_CHECKING:
    from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer

STATE_FILE = "state.json"
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Rollbacks(TypedDict):
    num_total: _Count
    bad_rounds: _Count


class _Counters(TypedDict):
    next_round: _Count
    num_env_steps: _Count
    num_skipped: _Count
    rollbacks: _Rollbacks


class _Detector(TypedDict):
    alarms: list[tuple[int, str, _Count, Severity | None, str]]
    grad_norms: list[float]
    val_losses: list[tuple[int, list[float]]]
    num_updates: _Count
    num_skipped: _Count


class _Escalation(TypedDict):
    windows: list[tuple[int, int, int]]


class _Log(TypedDict):
    detector: _Detector
    escalation: _Escalation
    num_rollbacks: _Count
    rolling: list[float]


class RunFacts(TypedDict):
    """What the file holds."""

    config: dict[str, Any]
    counters: _Counters
    history: tuple[BatchSummary, ...]
    calibration: Calibration | None
    reward_scale: dict[str, float] | None
    """None for a fixed controller."""
    log: _Log | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run between two rounds."""

    config: TrainingConfig
    facts: RunFacts
    agent: PPOAgent | None
    """None for a fixed controller."""

    @property
    def history(self) -> tuple[BatchSummary, ...]:
        """The rounds so far."""
        return self.facts["history"]


def run_files(trainer: VectorizedPPOTrainer, log_state: dict[str, Any] | None = None) -> dict[str, bytes]:
    """A run between two rounds as files: tensors as safetensors, everything else, the alarms' memory too, as JSON.

    Raises:
        NumericFailure: A number in it is not finite, or the policy can no longer choose.
    """
    learner = trainer.client if isinstance(trainer.client, SimicClient) else None
    if learner is not None:
        learner.check_policy()
    state = {
        "config": json.loads(trainer.config.to_json()),
        "counters": trainer.counters(),
        "history": [asdict(summary) for summary in trainer.history],
        "calibration": None if trainer.calibration is None else asdict(trainer.calibration),
        "reward_scale": None if learner is None else learner.scale.state_dict(),
        "log": log_state,
    }
    try:
        files = {STATE_FILE: (json.dumps(state, indent=1, allow_nan=False) + "\n").encode()}
    except ValueError as error:
        raise NumericFailure("a number of the run's state is not finite; look at the rewards it was paid") from error
    return files if learner is None else files | learner.agent.to_files()


def read_run_files(files: Mapping[str, bytes]) -> RunState:
    """Reads what `run_files` made.

    Raises:
        ModelFileError: A file is missing or does not describe a run of this release.
    """
    if STATE_FILE not in files:
        raise ModelFileError(f"{STATE_FILE} is missing: not a checkpoint of a training run")
    try:
        state = loads_json(files[STATE_FILE])
        facts = msgspec.convert(state, RunFacts)
        config = config_from_json(json.dumps(facts["config"]), STATE_FILE)
        # What a reader leaves out, fills in or rounds was not written by this release.
        if json.loads(msgspec.json.encode(facts)) != state or json.loads(config.to_json()) != facts["config"]:
            raise ValueError("a field is missing, unknown or not of its type")
        agent = PPOAgent.load(files) if config.controller == LEARNED else None
        found = RunState(config=config, facts=facts, agent=agent)
        _check_together(found)
        return found
    except ModelFileError:
        raise
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ModelFileError(f"{STATE_FILE}: not the state of a training run of this release ({error})") from error


def _check_together(state: RunState) -> None:
    """Refuses parts that are not of one run, which would show only rounds later."""
    config, facts = state.config, state.facts
    rounds = facts["counters"]["next_round"]
    task = get_task_spec(config.task, by_a_file=True)
    if len(state.history) != rounds or rounds > config.rounds:
        raise ValueError(f"{rounds} of {config.rounds} rounds done, but {len(state.history)} summaries")
    ops = LifecycleOp.__members__.keys()
    if any(summary.num_ops.keys() != ops or min(summary.num_ops.values()) < 0 for summary in state.history):
        raise ValueError(f"a round that does not count each of {', '.join(ops)}")
    horizon = task.horizon if config.episode_length is None else config.episode_length
    reference = None if facts["calibration"] is None else facts["calibration"].reference
    if reference is not None and len(reference) != horizon + 1:
        raise ValueError(f"a reference of {len(reference)} points for {horizon} epochs")
    if state.agent is not None:
        check_columns(state.agent.shape)
        names = state.agent.shape.blueprints
        if unknown := [name for name in names if name not in BLUEPRINTS or names.count(name) > 1]:
            raise ValueError(
                f"blueprint {unknown[0]!r} is unknown here, or there twice. Known: {', '.join(BLUEPRINTS)}"
            )
        RewardNormalizer().load_state_dict(facts["reward_scale"] or {})
        if state.agent.run_seed != config.seed:
            raise ValueError(f"seed {config.seed}, but the agent's is {state.agent.run_seed}")
        gamma = default_gamma(horizon) if config.gamma is None else config.gamma
        wanted = replace(
            config.ppo_config(episode_length=horizon, gamma=gamma),
            schedule_steps=state.agent.config.schedule_steps,  # that of the number of rounds it began with
        )
        if state.agent.config != wanted:
            raise ValueError("the agent's configuration is not the run's")
    elif config.controller not in CONTROLLERS:
        raise ValueError(f"unknown controller {config.controller!r}")
    if facts["log"] is not None:
        AnomalyDetector().load_state_dict(facts["log"]["detector"])


def read_own(run_id: str, found: LoadedCheckpoint) -> RunState:
    """The same, of a checkpoint that has to be one of this run.

    Raises:
        ModelFileError: It is of another run or round, or `read_run_files` refuses it.
    """
    if found.facts.run_id != run_id:
        raise ModelFileError(f"it is of run {found.facts.run_id}; expected a round of {run_id}")
    state = read_run_files(found.files)
    if len(state.history) != found.facts.index:
        raise ModelFileError(f"{STATE_FILE} is of round {len(state.history)}; expected {found.facts.index}")
    return state


# ---- the policy alone


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """A policy taken out of its run to be played, with what must be known about its training before it is judged."""

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

    "pretrained" is the policy that comes with Esper.
    Says on stderr which newer checkpoints of a run cannot be used; one of another run is never taken for its own.

    Raises:
        ValueError: There is no such run or checkpoint.
        CheckpointError: Nothing in it is valid, or it holds no learned policy.
    """
    place = Path(path)
    if str(path) == PRETRAINED:
        return _shipped_policy()
    if place.absolute().parent.name == CHECKPOINTS_DIR:
        loaded = load_checkpoint(place)
        try:
            state = read_run_files(loaded.files)
        except ModelFileError as error:
            raise CheckpointError(f"{loaded.path}: {error}") from error
    else:
        run = open_run(place)
        loaded, state, rejected = newest_valid(run, partial(read_own, run.run_id))
        for one in rejected:
            complain(f"{run.path}: {one.name} rejected: {one.reason}. Using {loaded.path.name}")
    if state.agent is None:
        raise CheckpointError(f"{loaded.path} is of a run of {state.config.controller!r}, which learned no policy")
    parts = (hashlib.sha256(loaded.files[name]).digest() for name in (POLICY_FILE, FACTS_FILE))
    return LoadedPolicy(
        agent=state.agent,
        config=state.config,
        checkpoint=loaded.path,
        run_id=loaded.facts.run_id,
        rounds=len(state.history),
        host_epochs=state.facts["counters"]["num_env_steps"],
        training_s=sum(summary.duration_s for summary in state.history),
        policy_sha256=hashlib.sha256(b"".join(parts)).hexdigest(),
    )


def _shipped_policy() -> LoadedPolicy:
    agent, card = load_pretrained()
    parts = (hashlib.sha256(card_folder().joinpath(name).read_bytes()).digest() for name in (POLICY_FILE, FACTS_FILE))
    return LoadedPolicy(
        agent=agent,
        config=with_overrides(preset(NURSERY), {"seed": card.run_seed}),
        checkpoint=Path(str(card_folder())),
        run_id=PRETRAINED,
        rounds=card.rounds,
        host_epochs=card.host_epochs,
        training_s=3600 * card.cpu_hours,
        policy_sha256=hashlib.sha256(b"".join(parts)).hexdigest(),
    )
