"""Small runs with a log, and what the log says."""

from pathlib import Path

from esper.leyline import TelemetryLevel
from esper.nissa import TelemetryHub, begin_attempt
from esper.simic.telemetry.telemetry_config import TelemetryConfig
from esper.simic.training.recorder import NoDisplay, Origin, RunRecorder
from esper.simic.training.run_state import STATE_FILE, run_files
from esper.simic.training.vectorized import AgentReads, open_trainer
from esper.simic.training.vectorized_trainer import NeverStop
from tests.integration.kills import lines
from tests.simic.training.runs import timeless


def open_log(folder: Path, **options) -> TelemetryHub:
    manifest = begin_attempt(folder, run_id="r")
    return TelemetryHub(folder, run_id="r", attempt=manifest.attempts[-1].attempt, first_seq=0, **options)


def run_with(hub, config, level: TelemetryLevel, *, keep=None, **telemetry):
    """Trains, and returns what must not depend on telemetry: weights, optimizer, history."""
    chosen = TelemetryConfig(level=level, **telemetry)
    recorder = RunRecorder(hub, chosen, keeper=None, display=NoDisplay(), origin=Origin(), reads=AgentReads)
    with open_trainer(config, recorder, NeverStop()) as trainer:
        trainer.run()
        files = run_files(trainer)
        if keep is not None:
            keep.append(trainer)
    weights = {name: content for name, content in files.items() if name != STATE_FILE}
    return weights, [timeless(summary) for summary in trainer.history]


def events_of(folder: Path, *kinds: str) -> list[dict]:
    return [event for event in lines(folder) if not kinds or event["type"] in kinds]
