"""Records of the loop as records of the log: what the agent thought, how an episode ended. Nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from esper.leyline import (
    BLENDS,
    HEAD_NAMES,
    OPS,
    ActionSpec,
    HeadDecision,
    HostLayout,
    SeenByPolicy,
    heads_used_by,
)
from esper.simic.agent.ppo import PolicyOutput
from esper.simic.agent.ppo_update import OUTLIER
from esper.simic.control.normalization import OBSERVATION_LIMIT
from esper.simic.telemetry.records import Decision, brief, brief_or_none
from esper.tamiyo.features import GLOBAL_COLUMNS, SLOT_COLUMNS

NOTHING_SEEN: Mapping[int, SeenByPolicy] = {}


def decision_records(
    decision: PolicyOutput,
    specs: Sequence[ActionSpec],
    layout: HostLayout,
    detailed: Sequence[int] = (),
    seen: Mapping[int, SeenByPolicy] = NOTHING_SEEN,
) -> list[Decision]:
    """What the agent knew when it chose, for every env. Tensors are read once for all of them.

    Args:
        decision: The agent's.
        specs: What it means, one per env.
        layout: Names of slots and blueprints.
        detailed: Positions of envs whose probabilities are all recorded.
        seen: What some of them decided on, by position.
    """
    rows = zip(
        specs,
        cast(list[Mapping[str, float]], decision.log_probs()),
        decision.entropies_NH.tolist(),
        decision.num_legal_NH.tolist(),
        decision.values_N.tolist(),
        strict=True,
    )
    probs = dict(zip(detailed, _probs(decision, detailed, layout), strict=True)) if detailed else {}
    return [_decision(*row, probs.get(env, {}), seen.get(env)) for env, row in enumerate(rows)]


def seen_by_policy(
    far_ND: Tensor, far_NSF: Tensor, envs: Sequence[int], slot_ids: Sequence[str]
) -> dict[int, SeenByPolicy]:
    """How unusual the observations of some envs were, by position; from deviations per env and column."""
    names = [column.name for column in GLOBAL_COLUMNS]
    names += [f"{slot_id}.{column.name}" for slot_id in slot_ids for column in SLOT_COLUMNS]
    told = [column.normalised for column in (*GLOBAL_COLUMNS, *(SLOT_COLUMNS * len(slot_ids)))]
    far_NC = torch.cat([far_ND, far_NSF.flatten(1)], dim=1)
    rows = far_NC[list(envs)].tolist()  # sync: at level DEBUG only
    return {env: _seen(list(compress(zip(names, row, strict=True), told))) for env, row in zip(envs, rows, strict=True)}


def _seen(columns: Sequence[tuple[str, float]]) -> SeenByPolicy:
    odd = [name for name, far in columns if not math.isfinite(far)]
    finite = [column for column in columns if math.isfinite(column[1])]
    farthest, worst = max(finite, key=itemgetter(1), default=("", None))
    return SeenByPolicy(
        outlier_share=brief(sum(far > OUTLIER for _, far in columns) / len(columns)),
        clipped_share=brief(sum(far > OBSERVATION_LIMIT for _, far in columns) / len(columns)),
        num_nonfinite=len(odd),
        max_deviation=brief_or_none(worst),
        worst_column=odd[0] if odd else farthest,
    )


def _probs(decision: PolicyOutput, envs: Sequence[int], layout: HostLayout) -> list[dict[str, dict[str, float]]]:
    """For some envs, head by head, the probability of every legal choice."""
    names = {"op": [op.name for op in OPS], "slot": layout.slot_ids, "blueprint": layout.blueprints, "blend": BLENDS}
    told: list[dict[str, dict[str, float]]] = [{} for _ in envs]
    for head, distribution in zip(HEAD_NAMES, decision.distributions, strict=True):
        rows = zip(distribution.probs_BC()[envs].tolist(), distribution.legal_BC[envs].tolist(), strict=True)
        for heads, (found, legal) in zip(told, rows, strict=True):
            heads[head] = {name: brief(share) for name, share, ok in zip(names[head], found, legal, strict=True) if ok}
    return told


def _decision(
    spec: ActionSpec,
    log_probs: Mapping[str, float],
    entropies: list[float],
    num_legal: list[int],
    value: float,
    probs: Mapping[str, Mapping[str, float]],
    seen: SeenByPolicy | None,
) -> Decision:
    used = [(head, row) for row, head in enumerate(HEAD_NAMES) if num_legal[row] > 1 and head in heads_used_by(spec.op)]
    heads: dict[str, HeadDecision] = {
        head: HeadDecision(
            prob_share=brief(math.exp(log_probs[head])),
            entropy_share=brief(entropies[row]),
            num_legal=num_legal[row],
            probs=probs.get(head),
        )
        for head, row in used
    }
    return Decision(
        value=brief(value),
        log_prob=brief(math.fsum(log_probs.values())),
        heads=heads,
        seen=seen,
    )
