"""A controller's decisions as records of the log: what it knew at a step, and counts by head over a round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from esper.leyline import (
    BLENDS,
    HEAD_NAMES,
    OPS,
    SAMPLING_ORDER,
    ActionMasks,
    ActionOutcome,
    ActionSpec,
    ChoiceCount,
    ChoiceStats,
    HeadDecision,
    HostLayout,
    SeenByPolicy,
    heads_used_by,
)
from esper.simic.agent.ppo import PolicyOutput
from esper.simic.agent.ppo_update import OUTLIER
from esper.simic.control.normalization import OBSERVATION_LIMIT
from esper.simic.telemetry.emitters import Decision, brief, brief_or_none
from esper.tamiyo.features import GLOBAL_COLUMNS, SLOT_COLUMNS

NOTHING_SEEN: Mapping[int, SeenByPolicy] = {}


def decision_records(
    decision: PolicyOutput,
    specs: Sequence[ActionSpec],
    layouts: Sequence[HostLayout],
    detailed: Sequence[int] = (),
    seen: Mapping[int, SeenByPolicy] = NOTHING_SEEN,
) -> list[Decision]:
    """What the agent knew when it chose, for every env. Tensors are read once for all of them.

    `detailed` are the positions of envs whose probabilities are all recorded, `seen` what some of them decided on.
    """
    rows = zip(
        specs,
        cast(list[Mapping[str, float]], decision.log_probs()),
        decision.choice.entropies_BH.tolist(),
        decision.choice.num_legal_BH.tolist(),
        decision.values_N.tolist(),
        strict=True,
    )
    probs = dict(zip(detailed, _probs(decision, detailed, layouts), strict=True)) if detailed else {}
    return [_decision(*row, probs.get(env, {}), seen.get(env)) for env, row in enumerate(rows)]


def seen_by_policy(
    far_ND: Tensor, far_NSF: Tensor, envs: Sequence[int], slot_ids: Sequence[str]
) -> dict[int, SeenByPolicy]:
    """How unusual the observations of some envs were, by position; from deviations per env and column."""
    names = [column.name for column in GLOBAL_COLUMNS]
    names += [f"{slot_id}.{column.name}" for slot_id in slot_ids for column in SLOT_COLUMNS]
    normalised = [column.normalised for column in (*GLOBAL_COLUMNS, *(SLOT_COLUMNS * len(slot_ids)))]
    far_NC = torch.cat([far_ND, far_NSF.flatten(1)], dim=1)
    rows = far_NC[list(envs)].tolist()  # sync: at level DEBUG only
    return {
        env: _seen(list(compress(zip(names, row, strict=True), normalised)))
        for env, row in zip(envs, rows, strict=True)
    }


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


def _probs(
    decision: PolicyOutput, envs: Sequence[int], layouts: Sequence[HostLayout]
) -> list[dict[str, dict[str, float]]]:
    """For some envs, head by head, the probability of every legal choice."""
    names = [_choice_names(layouts[env]) for env in envs]
    found_in: list[dict[str, dict[str, float]]] = [{} for _ in envs]
    for head, distribution in zip(HEAD_NAMES, decision.choice.distributions, strict=True):
        rows = zip(distribution.probs_BC()[envs].tolist(), distribution.legal_BC[envs].tolist(), strict=True)
        for heads, own, (found, legal) in zip(found_in, names, rows, strict=True):
            # Beside hosts with more slots or blueprints a row is longer than the choices; what is beyond is illegal.
            heads[head] = {name: brief(share) for name, share, ok in zip(own[head], found, legal, strict=False) if ok}
    return found_in


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


def _choice_names(layout: HostLayout) -> dict[str, tuple[str, ...]]:
    """The choices of each head, in the order of its masks."""
    ops = tuple(op.name for op in OPS)
    return {"op": ops, "slot": layout.slot_ids, "blueprint": layout.blueprints, "blend": tuple(BLENDS)}


class ChoiceCounter:
    """The counts of one round. Give it every decision of every env, then take the statistics."""

    def __init__(self) -> None:
        self._noted: list[tuple[ActionMasks, ActionSpec, ActionOutcome, HostLayout]] = []

    def begin(self) -> None:
        """Starts a round."""
        self._noted = []

    def add(self, masks: ActionMasks, spec: ActionSpec, outcome: ActionOutcome, layout: HostLayout) -> None:
        """Notes one decision, under the masks it was made with. Counting waits until somebody asks."""
        self._noted.append((masks, spec, outcome, layout))

    def stats(self) -> list[ChoiceStats]:
        """The counts of every head in sampling order, that of the op first."""
        # By identity: envs of a task share their layout, and comparing whole layouts would cost more than counting.
        names = {id(layout): _choice_names(layout) for *_, layout in self._noted}
        return [self._count(head, {key: own[head] for key, own in names.items()}) for head in SAMPLING_ORDER]

    def _count(self, head: str, names: Mapping[int, Sequence[str]]) -> ChoiceStats:
        """The counts of one head; choices that were never legal are left out."""
        legal, chosen, ok = Counter[str](), Counter[str](), Counter[str]()
        num_forced = 0
        for masks, spec, outcome, layout in self._noted:
            if head in heads_used_by(spec.op):
                row = self._row(head, masks, spec, layout)
                legal.update(compress(names[id(layout)], row))
                choice = spec.op.name if head == "op" else getattr(spec, head)
                chosen[choice] += 1
                ok[choice] += outcome.applied
                num_forced += sum(row) == 1
        return ChoiceStats(
            head=head,
            choices={
                name: ChoiceCount(num_legal=legal[name], num_chosen=chosen[name], num_ok=ok[name])
                for name in dict.fromkeys(chain.from_iterable(names.values()))
                if legal[name]
            },
            num_decisions=chosen.total(),
            num_forced=num_forced,
        )

    def _row(self, head: str, masks: ActionMasks, spec: ActionSpec, layout: HostLayout) -> Sequence[bool]:
        """What was legal for a head, given what was chosen before it."""
        if head == "op":
            return masks.op
        if head == "slot":
            return masks.slot_by_op[spec.op]
        if head == "blend":
            return masks.blend
        assert spec.slot is not None, f"{spec.op.name} chooses a blueprint without a slot"
        return masks.blueprint_by_slot[layout.slot_position(spec.slot)]
