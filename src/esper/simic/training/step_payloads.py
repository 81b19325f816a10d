"""Records of the loop as records of the log: what the agent thought, how an episode ended. Nothing is measured here."""

from __future__ import annotations

import math
from typing import Literal, cast

from esper.leyline import HEAD_NAMES, ActionSpec, EpisodeCompleted, HeadDecision, heads_used_by
from esper.simic.agent.ppo import Decision
from esper.simic.telemetry.records import Decision as DecisionRecord
from esper.simic.training.accounts import EpisodeStats


def decision_record(decision: Decision, env: int, spec: ActionSpec) -> DecisionRecord:
    """What the agent knew when it chose for one env."""
    log_probs: dict[str, float] = dict(decision.log_probs(env))  # type: ignore[arg-type]
    entropies: dict[str, float | None] = dict(decision.entropies(env))  # type: ignore[arg-type]
    num_legal = dict(zip(HEAD_NAMES, decision.num_legal_NH[env].tolist(), strict=True))
    used = heads_used_by(spec.op)
    heads = {
        head: HeadDecision(
            choice=spec.op.name if head == "op" else str(getattr(spec, head)),
            prob_share=math.exp(log_probs[head]),
            entropy_share=entropies[head],
            num_legal=num_legal[head],
            probs=None,
        )
        for head in used
    }
    return DecisionRecord(
        forced=all(num_legal[head] == 1 for head in used),
        value=float(decision.values_N[env]),
        log_prob=math.fsum(log_probs.values()),
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
