"""A recorder without a run: rounds are given to it by hand."""

from types import SimpleNamespace
from typing import Any

from esper.leyline import PhaseTime
from esper.leyline.run_payloads import PHASES
from esper.runtime.tasks import TASKS
from esper.simic.run.recorder import RunRecorder
from esper.simic.telemetry.telemetry_config import TelemetryConfig
from tests.fakes import world

NO_TIME = {name: PhaseTime(wall_ms=0.0, cpu_ms=0.0) for name in PHASES}


class NoReads:
    """A policy that must not be read in detail."""


def recorder_to(
    hub: Any, *, num_rounds: int = 9, num_envs: int = 1, reads: Any = NoReads, **telemetry: Any
) -> RunRecorder:
    """A recorder of a run on `digits_blind`."""
    pool = SimpleNamespace(context=world().context, kind="inline", wanted=frozenset(), gradient_detail_envs=frozenset())
    parts: Any = SimpleNamespace(
        config=SimpleNamespace(rounds=num_rounds, envs=num_envs, groups=1),
        task=TASKS["digits_blind"],
        data=SimpleNamespace(train=()),
        pool=pool,
        reads=reads,
    )
    return RunRecorder(hub, TelemetryConfig(**telemetry), parts)
