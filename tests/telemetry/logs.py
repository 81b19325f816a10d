"""Small runs with a log, and what the log says."""

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import torch

from esper.leyline import TelemetryLevel
from esper.nissa import TelemetryHub
from esper.simic.run.recorder import open_recorder
from esper.simic.run.run_state import STATE_FILE, run_files
from esper.simic.run.session import RunStart
from esper.simic.telemetry.telemetry_config import TelemetryConfig
from esper.simic.training.vectorized import open_trainer
from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer
from tests.integration.kills import lines
from tests.nissa.events import open_hub
from tests.simic.training.runs import timeless


def open_log(folder: Path, **options) -> TelemetryHub:
    return open_hub(folder, run_id="r", **options)


def run_with(hub, config, level: TelemetryLevel, *, keep=None, **telemetry):
    """Trains, and returns what must not depend on telemetry."""
    chosen = TelemetryConfig(level=level, **telemetry)
    record = partial(open_recorder, RunStart(config=config), hub, chosen, None)
    seed_generators()
    with open_trainer(config, record, sink=hub) as trainer:
        trainer.run()
        if keep is not None:
            keep.append(trainer)
    return outcome_of(trainer)


def seed_generators() -> None:
    """Gives the generators of the process a known state. Training draws from its own, keyed ones; nobody may draw
    here."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def outcome_of(trainer: VectorizedPPOTrainer) -> dict[str, object]:
    """Weights, optimizer, counters, normalisers, history and generators of a finished run, without clocks and what
    the log remembers."""
    files: dict[str, object] = dict(run_files(trainer))
    state = json.loads(files.pop(STATE_FILE))
    for own in ("log", "history"):
        state.pop(own)
    for machine in ("workers", "worker_kind", "level", "checkpoint_s"):
        state["config"].pop(machine)
    history = [timeless(summary) for summary in trainer.history]
    return {**files, "state": state, "history": history, "generators": generator_states()}


def generator_states() -> tuple[object, ...]:
    """Of the process: Python's, numpy's, torch's."""
    numpy_state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpy_state["key"].tolist(), numpy_state["pos"], torch.get_rng_state().tolist()


def events_of(folder: Path, *kinds: str) -> list[dict]:
    return [event for event in lines(folder) if not kinds or event["type"] in kinds]
