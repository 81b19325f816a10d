"""Records of the loop as records of the log: what the agent thought, how an episode ended. Nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

from esper.leyline import HEAD_NAMES, ActionSpec, EpisodeCompleted, HeadDecision, heads_used_by
from esper.simic.agent.ppo import Decision
from esper.simic.telemetry.records import Decision as DecisionRecord
from esper.simic.training.accounts import EpisodeStats


def decision_records(decision: Decision, specs: Sequence[ActionSpec]) -> list[DecisionRecord]:
    """What the agent knew when it chose, for every env. Tensors are read once for all of them."""
    rows = zip(
        specs,
        decision.log_probs_NH.tolist(),
        decision.entropies_NH.tolist(),
        decision.num_legal_NH.tolist(),
        decision.values_N.tolist(),
        strict=True,
    )
    return [_decision(*row) for row in rows]


def _decision(
    spec: ActionSpec, log_probs: list[float], entropies: list[float], num_legal: list[int], value: float
) -> DecisionRecord:
    used = [(head, HEAD_NAMES.index(head)) for head in heads_used_by(spec.op)]
    heads = {
        head: HeadDecision(
            choice=spec.op.name if head == "op" else str(getattr(spec, head)),
            prob_share=math.exp(log_probs[row]),
            entropy_share=entropies[row] if num_legal[row] > 1 else None,
            num_legal=num_legal[row],
            probs=None,
        )
        for head, row in used
    }
    return DecisionRecord(
        forced=all(num_legal[row] == 1 for _, row in used),
        value=value,
        log_prob=math.fsum(log_probs),
        heads=heads,
    )


def episode_completed(stats: EpisodeStats) -> EpisodeCompleted:
    """The outcome of an episode."""
    return EpisodeCompleted(
        end=cast(Literal["completed", "rolled_back", "worker_lost"], stats.end),
        num_epochs=stats.num_epochs,
        final_accuracy_pct=stats.final_accuracy_pct,
        best_accuracy_pct=stats.best_accuracy_pct,
        committed_accuracy_pct=stats.committed_accuracy_pct,
        final_loss=stats.final_loss,
        params_added=stats.params_added,
        params_ratio=stats.params_ratio,
        num_germinated=stats.num_germinated,
        num_fossilized=stats.num_fossilized,
        num_pruned=stats.num_pruned,
        num_alive=stats.num_alive,
        num_contributing_fossils=stats.num_contributing_fossils,
        return_raw=stats.return_raw,
        components_sum=stats.components_sum,
        num_ops=stats.num_ops,
    )
