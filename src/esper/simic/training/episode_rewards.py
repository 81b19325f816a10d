"""Prices every step of a round and sums up its episodes. Knows reports and rewards, no policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from esper.leyline import (
    ActionExecutionResult,
    ActionOutcome,
    EpisodeCompleted,
    EpochReport,
    LifecycleOp,
    NumericFailure,
    RewardHackingSuspected,
    RewardProtocol,
    SeedStage,
    record,
)
from esper.simic.rewards import (
    Ledger,
    RewardComponentsTelemetry,
    RewardConfig,
    RewardInputs,
    advance_ledger,
    check_mode,
    compute_components,
    open_ledger,
    suspicions,
)
from esper.simic.rewards.types import committed_points


@record
class StepReward:
    """One priced transition."""

    components: RewardComponentsTelemetry
    suspicions: tuple[RewardHackingSuspected, ...] = ()
    ledger: Ledger | None = None
    """What the price of the next transition depends on."""


class Pricing(Protocol):
    """What a transition is worth."""

    def price(
        self, ledger: Ledger | None, before: EpochReport, outcome: ActionOutcome, after: EpochReport
    ) -> StepReward:
        """Prices (s, a, s'). `ledger` is that of the transition before; None at the start of an episode."""


@record
class ModePricing:
    """A reward mode and what its terms need."""

    mode: str
    config: RewardConfig

    def __post_init__(self) -> None:
        check_mode(self.mode, self.config)

    def price(
        self, ledger: Ledger | None, before: EpochReport, outcome: ActionOutcome, after: EpochReport
    ) -> StepReward:
        """Prices (s, a, s')."""
        earlier = open_ledger(before, self.config) if ledger is None else ledger
        later = advance_ledger(earlier, outcome, after, self.config)
        inputs = RewardInputs(
            before=before,
            outcome=outcome,
            after=after,
            ledger=earlier,
            ledger_after=later,
            config=self.config,
        )
        return StepReward(
            components=compute_components(self.mode, inputs),
            suspicions=() if after.rollback_reason is not None else suspicions(after, later, self.config),
            ledger=later,
        )


@record
class TaskPricing:
    """The same mode and prices on whatever task an env plays, each from chance to no error."""

    mode: str
    config_of: Callable[[str], RewardConfig]
    """By name of the task."""

    def of(self, task: str) -> ModePricing:
        """The pricing of one task."""
        return ModePricing(mode=self.mode, config=self.config_of(task))


@dataclass(slots=True)
class _Episode:
    """One env's episode so far."""

    pricing: Pricing
    last: EpochReport
    best_accuracy_pct: float
    num_epochs: int = 0
    step: StepReward | None = None
    components: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)


class EpisodeRewards:
    """Prices the steps of a round and sums up its episodes, for any controller."""

    def __init__(self, pricing: Pricing | TaskPricing) -> None:
        self.pricing = pricing
        self._episodes: dict[int, _Episode] = {}

    def begin(self, state: ActionExecutionResult) -> None:
        """Starts a round."""
        self._episodes = {
            report.env_id: _Episode(
                pricing=self.pricing.of(context.task) if isinstance(self.pricing, TaskPricing) else self.pricing,
                last=report,
                best_accuracy_pct=report.val_accuracy_pct,
            )
            for report, context in zip(state.reports, state.contexts, strict=True)
        }

    def compute_reward(self, before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> float:
        """Prices the next transition of its env's episode and adds it there.

        Raises:
            NumericFailure: A term is not finite. Nothing was added.
        """
        episode = self._episodes[before.env_id]
        step = episode.pricing.price(None if episode.step is None else episode.step.ledger, before, outcome, after)
        for term, amount in step.components.amounts.items():
            if not math.isfinite(amount):
                raise NumericFailure(
                    f"env {after.env_id}, episode {after.episode}, epoch {after.epochs_done}: expected a finite "
                    f"reward, got {amount} from its term {term!r}. Nothing was learned from it; look at the host's "
                    "metrics of that epoch and at the weight of that term"
                )
        episode.step, episode.last = step, after
        episode.num_epochs += 1
        episode.best_accuracy_pct = max(episode.best_accuracy_pct, after.val_accuracy_pct)
        episode.components.update(step.components.amounts)
        episode.ops[outcome.op.name] += outcome.applied
        return step.components.total

    def last_step(self, env_id: int) -> StepReward:
        """The transition of an env that was priced last."""
        step = self._episodes[env_id].step
        assert step is not None
        return step

    def final_score(self, env_id: int) -> float | None:
        """What the env delivers after its last epoch: 0 for a guess, 1 for no error; None if it was not measured."""
        episode = self._episodes[env_id]
        assert isinstance(episode.pricing, ModePricing), "other prices have no scale of scores"
        config = episode.pricing.config
        points = committed_points(episode.last, config) if episode.last.terminal else None
        return None if points is None else (points - config.calibration.floor) / config.calibration.span

    def episodes(self) -> tuple[EpisodeCompleted, ...]:
        """The round's finished episodes, in env order."""
        return tuple(_completed(episode) for episode in self._episodes.values())


def price_step(
    rewards: RewardProtocol, before: ActionExecutionResult, after: ActionExecutionResult
) -> list[float | None]:
    """The reward of each env; None where the episode was over before, or its worker was lost."""
    return [
        None
        if earlier.terminal or later.env_id in after.truncated_bootstrap_targets
        else rewards.compute_reward(earlier, outcome, later)
        for earlier, outcome, later in zip(before.reports, after.outcomes, after.reports, strict=True)
    ]


def _completed(episode: _Episode) -> EpisodeCompleted:
    last, ops = episode.last, episode.ops
    end: Literal["completed", "rolled_back", "worker_lost"]
    if not last.terminal:  # what followed was not priced
        end = "worker_lost"
    elif last.rollback_reason is not None:
        end = "rolled_back"
    else:
        end = "completed"
    germinated, fossilized = ops[LifecycleOp.GERMINATE.name], ops[LifecycleOp.FOSSILIZE.name]
    # A seed that fails its probe leaves without an op. What a rollback undid is still a seed without an end.
    alive = germinated - fossilized - ops[LifecycleOp.PRUNE.name] if end == "rolled_back" else last.num_live
    return EpisodeCompleted(
        end=end,
        num_epochs=episode.num_epochs,
        final_accuracy_pct=last.val_accuracy_pct,
        best_accuracy_pct=episode.best_accuracy_pct,
        committed_accuracy_pct=last.committed_accuracy_pct,
        final_loss=last.val_loss,
        params_added=last.total_params - last.host_params,
        params_ratio=last.total_params / last.host_params,
        num_germinated=germinated,
        num_fossilized=fossilized,
        num_pruned=germinated - fossilized - alive,
        num_alive=alive,
        num_contributing_fossils=num_contributing_fossils(last),
        return_raw=sum(episode.components.values()),
        components_sum=dict(episode.components),
        num_ops={op.name: ops[op.name] for op in LifecycleOp},
        slots=last.tallies,
    )


def num_contributing_fossils(report: EpochReport) -> int | None:
    """Fossils with a positive contribution; None if that of one was not measured."""
    worth = [slot.contribution_pp for slot in report.slots if slot.stage is SeedStage.FOSSILIZED]
    measured = [gain for gain in worth if gain is not None]
    return sum(gain > 0.0 for gain in measured) if len(measured) == len(worth) else None


def total_ops(episodes: Iterable[EpisodeCompleted]) -> dict[str, int]:
    """How often each op was carried out in these episodes."""
    total: Counter[str] = Counter()
    for episode in episodes:
        total.update(episode.num_ops)
    return {op.name: total[op.name] for op in LifecycleOp}
