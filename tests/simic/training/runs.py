"""Tiny training runs on the bundled digits, shared by tests."""

from esper.simic.training.config import TrainingConfig
from esper.simic.training.vectorized_trainer import Recorder

TINY = TrainingConfig(
    task="digits_mlp", rounds=2, envs=2, episode_length=4, minibatches=2, calibration_runs=0, worker_kind="inline"
)


class Listening(Recorder):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.steps, self.rounds, self.checkpoints = [], [], []

    def __call__(self, parts):
        self._client = parts.client
        return self

    def stored(self, before, specs, after):
        self.steps.append(self._client.last_step)

    def round_ends(self, round_idx, summary, metrics, episodes, phases):
        self.rounds.append((summary, metrics, episodes))

    def checkpoint(self, trainer, *, last):
        self.checkpoints.append((trainer.next_round, last))


def timeless(summary):
    """A summary without what depends on the machine."""
    from dataclasses import replace

    return replace(summary, duration_s=0.0)
