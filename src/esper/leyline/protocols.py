"""Who talks to whom: the few verbs each side must offer. Documented by the loops that call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from esper.leyline.records import (
    ActionExecutionResult,
    ActionOutcome,
    ActionSpec,
    EnvSnapshot,
    EpisodeSeed,
    EpochReport,
    FeatureContext,
    StepResult,
)
from esper.leyline.telemetry import TelemetryEvent, TelemetryEventType


class PolicyProtocol(Protocol):
    """A controller: rules, a schedule, random draws or a learned policy.

    Called as `begin(state)`, then per step `specs = act(state)` and `store(state, after)`.
    """

    def begin(self, state: ActionExecutionResult) -> None:
        """Starts a round of episodes from their reset state."""

    def act(self, state: ActionExecutionResult) -> Sequence[ActionSpec]:
        """Returns one spec per env, in env order, inside the masks of `state`."""

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """Takes note of a finished step."""


class RewardProtocol(Protocol):
    """Prices one transition."""

    def compute_reward(self, before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> float:
        """Reward of (s, a, s') after the epoch that followed the action."""


class Worker(Protocol):
    """Owner of a contiguous range of envs: a loop, a process or a remote actor."""

    protocol_version: int

    @property
    def contexts(self) -> Mapping[str, FeatureContext]:
        """The tasks that it was made for, by name. A seed may name another that it can find by itself."""

    def reset(self, seeds: Sequence[EpisodeSeed]) -> StepResult:
        """Builds fresh hosts of the tasks that the seeds name, validates them untrained and reports."""

    def step(
        self,
        specs: Sequence[ActionSpec],
        wanted: frozenset[TelemetryEventType],
        gradient_detail_envs: frozenset[int] = frozenset(),
    ) -> StepResult:
        """Applies one op per env, trains one epoch, validates, reports.

        `wanted` are the events to report, `gradient_detail_envs` the envs whose gradients are described tensor by
        tensor. Neither changes what is trained.
        """

    def snapshot(self) -> Mapping[int, EnvSnapshot]:
        """Whole envs by env id."""

    def restore(self, snapshots: Mapping[int, EnvSnapshot]) -> Mapping[int, FeatureContext]:
        """Continues from snapshots and says what they are of.

        The next step gives the bits the original would have given.
        """


class EventSink(Protocol):
    """Anything that accepts events."""

    def emit(self, event: TelemetryEvent) -> None:
        """Takes an event without blocking."""
