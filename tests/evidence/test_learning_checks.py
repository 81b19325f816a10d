"""Learning checks read a log, pass on a sound one and name what is wrong with any other."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from esper.evidence.learning_checks import check_training
from esper.leyline import (
    HEAD_NAMES,
    EpisodeCompleted,
    HeadEntropies,
    PPOUpdateCompleted,
    PPOUpdateMetrics,
    TelemetryEventType,
)
from tests.karn.logs import LogWriter, ended, episode_completed, head_update, ppo_update, seal, started

T = TelemetryEventType
ROUNDS, ENVS = 10, 40


def measured(update: PPOUpdateCompleted, **fields: object) -> PPOUpdateCompleted:
    """The update with other metrics."""
    return replace(update, metrics=cast(PPOUpdateMetrics, {**update.metrics, **fields}))


class Story:
    """A training run that learned, to be spoilt by a test before it is written."""

    def __init__(self) -> None:
        self.slot_ids: tuple[str, ...] = ("r0c0", "r0c1")
        self.updates = [self._update() for _ in range(ROUNDS)]
        self.episodes = [
            episode_completed(end="completed", return_raw=n / 100 + 0.1 * (n % 7)) for n in range(ROUNDS * ENVS)
        ]
        self.lost_after: int | None = None
        self.has_end = True

    @staticmethod
    def _update() -> PPOUpdateCompleted:
        entropies = HeadEntropies(slot=0.7, blueprint=0.7, blend=0.7, op=0.7)
        heads = {name: head_update() for name in HEAD_NAMES}
        plain = ppo_update(heads=heads, head_entropies=entropies, target_kl=0.03)
        return measured(plain, explained_variance=0.5, value_nrmse=0.5, return_corr=0.7, approx_kl=0.01)

    def change_head(self, rounds: range, head: str, **fields: object) -> None:
        for number in rounds:
            update = self.updates[number]
            heads = {**update.metrics["heads"], head: replace(update.metrics["heads"][head], **fields)}  # type: ignore[arg-type]
            self.updates[number] = measured(update, heads=heads)

    def change_entropy(self, rounds: range, head: str, share: float | None) -> None:
        for number in rounds:
            entropies = cast(HeadEntropies, {**self.updates[number].metrics["head_entropies"], head: share})
            self.updates[number] = measured(self.updates[number], head_entropies=entropies)

    def change_episode(self, number: int, **fields: object) -> None:
        self.episodes[number] = replace(self.episodes[number], **fields)  # type: ignore[arg-type]

    def write(self, folder: Path) -> None:
        log = LogWriter(folder)
        log.emit(T.RUN_STARTED, started(slot_ids=self.slot_ids))
        for number, update in enumerate(self.updates):
            for env in range(ENVS):
                episode: EpisodeCompleted = self.episodes[ENVS * number + env]
                log.emit(T.EPISODE_COMPLETED, episode, round=number, episode=number, env=env, epoch=9)
            log.emit(T.PPO_UPDATE_COMPLETED, update, round=number)
            log.seq += number == self.lost_after
        if self.has_end:
            log.emit(T.RUN_ENDED, ended())
        seal(folder)


def failed(story: Story, folder: Path) -> list[str]:
    story.write(folder)
    return [check.name for check in check_training(folder) if check.passed is not True]


def test_a_sound_log_passes_every_check(tmp_path: Path) -> None:
    assert failed(Story(), tmp_path) == []


def _no_rise(story: Story) -> None:
    for number in range(ROUNDS * ENVS):
        story.change_episode(number, return_raw=0.1 * (number % 7))


def _blind_critic(story: Story) -> None:
    for number in (8, 9):
        update = story.updates[number]
        story.updates[number] = measured(update, explained_variance=0.1)


def _unrelated_critic(story: Story) -> None:
    poor = {"explained_variance": None, "value_nrmse": 1.0, "return_corr": 0.2}
    story.updates = [measured(update, **poor) for update in story.updates]


def _kl(story: Story, value: float) -> None:
    for number in range(3):
        update = story.updates[number]
        story.updates[number] = measured(update, approx_kl=value)


def _rollbacks(story: Story) -> None:
    for number in range(9):
        story.change_episode(number, end="rolled_back")


def _skipped(story: Story) -> None:
    story.updates[0] = measured(story.updates[0], performed=False)


def _lost_event(story: Story) -> None:
    story.lost_after = 4


def _unused(story: Story, head: str) -> None:
    story.change_head(range(10), head, num_usable=0)
    story.change_entropy(range(10), head, None)


def _no_end(story: Story) -> None:
    story.has_end = False


@pytest.mark.parametrize(
    ("breaks", "names"),
    [
        (_no_rise, ["return of the last tenth above the first"]),
        (_blind_critic, ["explained variance, median of the last fifth"]),
        (_unrelated_critic, ["correlation of values and returns"]),
        (lambda story: story.change_head(range(2), "blend", grad_norm=0.0), ["gradient of head blend"]),
        (lambda story: story.change_head(range(2), "slot", grad_norm=math.nan), ["gradient of head slot"]),
        (
            lambda story: _unused(story, "blueprint"),
            ["gradient of head blueprint", "entropy of head blueprint, lowest of the first half"],
        ),
        (
            lambda story: story.change_entropy(range(3, 4), "op", 0.04),
            ["entropy of head op, lowest of the first half"],
        ),
        (lambda story: _kl(story, 1e-5), ["approximate KL"]),
        (lambda story: _kl(story, 0.091), ["approximate KL"]),
        (lambda story: _kl(story, math.nan), ["approximate KL"]),
        (_rollbacks, ["rollbacks per 100 episodes"]),
        (_skipped, ["skipped updates"]),
        (_lost_event, ["event log"]),
        (_no_end, ["event log"]),
    ],
)
def test_one_thing_wrong_fails_one_check(breaks: Callable[[Story], None], names: list[str], tmp_path: Path) -> None:
    story = Story()
    breaks(story)
    assert failed(story, tmp_path) == names


def test_a_collapse_late_in_training_is_no_lack_of_exploration(tmp_path: Path) -> None:
    story = Story()
    story.change_entropy(range(5, 10), "op", 0.01)
    assert failed(story, tmp_path) == []


def test_with_one_slot_there_is_no_slot_to_choose(tmp_path: Path) -> None:
    story = Story()
    _unused(story, "slot")
    assert failed(story, tmp_path / "two") == [
        "gradient of head slot",
        "entropy of head slot, lowest of the first half",
    ]
    story.slot_ids = ("r0c0",)
    assert failed(story, tmp_path / "one") == []


def test_what_is_not_there_is_not_checked_rather_than_passed(tmp_path: Path) -> None:
    (check,) = check_training(tmp_path)
    assert (check.passed, check.found) == (None, "no log")
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    (check,) = check_training(tmp_path)
    assert (check.passed, check.found) == (None, "0 episodes and 0 updates in the log")
    log.emit(T.EPISODE_COMPLETED, episode_completed(), round=0, episode=0, env=0, epoch=9)
    log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(), round=0)
    first = check_training(tmp_path)[0]
    assert (first.passed, first.found) == (None, "1 episodes, 100 needed")
