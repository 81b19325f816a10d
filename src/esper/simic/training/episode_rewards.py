"""The books of a round: every step priced, every episode summed up. Knows reports and rewards, no policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from esper.leyline import (
    ActionExecutionResult,
    ActionOutcome,
    EpisodeCompleted,
    EpochReport,
    HostLayout,
    LifecycleOp,
    SeedStage,
    record,
)
from esper.simic.rewards import (
    HackingSuspicion,
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


@record
class Pricing:
    """How transitions are paid: a reward mode and what its terms need."""

    mode: str
    config: RewardConfig
    layout: HostLayout

    def __post_init__(self) -> None:
        check_mode(self.mode, self.config)


@record
class StepAccount:
    """One env's finished step. None in place of one means that its episode was over before."""

    components: RewardComponentsTelemetry
    suspicions: tuple[HackingSuspicion, ...]


@dataclass(slots=True)
class _Book:
    """What is noted about one env's running episode."""

    ledger: Ledger
    last: EpochReport
    best_accuracy_pct: float
    num_epochs: int = 0
    end: Literal["completed", "rolled_back", "worker_lost"] = "completed"
    components: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)


class EpisodeAccounts:
    """Prices the steps of a round and sums up its episodes, for any controller."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._books: list[_Book] = []

    def begin(self, state: ActionExecutionResult) -> None:
        """Opens the books of a round."""
        self._books = [
            _Book(
                ledger=open_ledger(report, self.pricing.config), last=report, best_accuracy_pct=report.val_accuracy_pct
            )
            for report in state.reports
        ]

    def compute(self, env: int, before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> StepAccount:
        """Prices one transition of the env at this position; notes nothing."""
        config, ledger = self.pricing.config, self._books[env].ledger
        ledger_after = advance_ledger(ledger, outcome, after, config)
        inputs = RewardInputs(
            before=before,
            outcome=outcome,
            after=after,
            ledger=ledger,
            ledger_after=ledger_after,
            layout=self.pricing.layout,
            config=config,
        )
        found = () if after.rollback_reason is not None else suspicions(after, ledger_after, config)
        return StepAccount(components=compute_components(self.pricing.mode, inputs), suspicions=found)

    def book(self, before: ActionExecutionResult, after: ActionExecutionResult) -> tuple[StepAccount | None, ...]:
        """Prices and notes one step of every env."""
        rows = zip(before.reports, after.outcomes, after.reports, strict=True)
        return tuple(
            self._book_env(env, earlier, outcome, later, lost=later.env_id in after.truncated_bootstrap_targets)
            for env, (earlier, outcome, later) in enumerate(rows)
        )

    def _book_env(
        self, env: int, before: EpochReport, outcome: ActionOutcome, after: EpochReport, *, lost: bool
    ) -> StepAccount | None:
        book = self._books[env]
        if before.terminal:
            return None
        if lost:
            book.end = "worker_lost"
            return None
        account = self.compute(env, before, outcome, after)
        book.ledger = advance_ledger(book.ledger, outcome, after, self.pricing.config)
        book.last = after
        book.num_epochs += 1
        book.best_accuracy_pct = max(book.best_accuracy_pct, after.val_accuracy_pct)
        book.components.update(account.components.amounts)
        book.ops[outcome.op.name] += outcome.applied
        if after.terminal and after.rollback_reason is not None:
            book.end = "rolled_back"
        return account

    def episodes(self) -> tuple[EpisodeCompleted, ...]:
        """The episodes as they stand, in env order."""
        return tuple(_close(book) for book in self._books)


def _close(book: _Book) -> EpisodeCompleted:
    last, ops = book.last, book.ops
    germinated, fossilized = ops[LifecycleOp.GERMINATE.name], ops[LifecycleOp.FOSSILIZE.name]
    # A seed that fails its probe leaves without an op. What a rollback undid is still a seed without an end.
    undone = book.end == "rolled_back"
    alive = germinated - fossilized - ops[LifecycleOp.PRUNE.name] if undone else last.num_live
    return EpisodeCompleted(
        end=book.end,
        num_epochs=book.num_epochs,
        final_accuracy_pct=last.val_accuracy_pct,
        best_accuracy_pct=book.best_accuracy_pct,
        committed_accuracy_pct=last.committed_accuracy_pct,
        final_loss=last.val_loss,
        params_added=last.total_params - last.host_params,
        params_ratio=last.total_params / last.host_params,
        num_germinated=germinated,
        num_fossilized=fossilized,
        num_pruned=germinated - fossilized - alive,
        num_alive=alive,
        num_contributing_fossils=num_contributing_fossils(last),
        return_raw=sum(book.components.values()),
        components_sum=dict(book.components),
        num_ops={op.name: ops[op.name] for op in LifecycleOp},
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
