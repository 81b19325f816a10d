"""What a growing network scores, with all its seeds and without some: in the user's units and on controllers' scale."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from esper.growth.coalitions import CoalitionPasses
from esper.growth.network import AttachedNetwork
from esper.growth.objective import Score
from esper.growth.validation import Evaluate, Validation
from esper.kasmina.layers import evaluating
from esper.leyline import CoalitionTable, SeedStage, attribute, coalitions_to_measure, full_coalition, record
from esper.leyline.scale import MetricScale, infer_scale


@record
class Measured:
    """One validation."""

    table: CoalitionTable
    """On the scale of controllers."""
    scores: Mapping[int, Score]
    """By the same coalitions, in the user's units."""

    @property
    def full(self) -> int:
        """The coalition of all seeds."""
        return full_coalition(len(self.table.slot_ids))


def score_untrained(model: nn.Module, evaluate: Evaluate | Validation) -> Score:
    """What a model scores before anything is done to it.

    Raises:
        ValueError: That is not a finite number.
    """
    with evaluating(model), torch.random.fork_rng():
        found = evaluate(model)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ValueError(f"evaluate must return (metric, loss), got {found!r}")
    score = Score(metric=float(found[0]), loss=float(found[1]))
    if not (math.isfinite(score.metric) and math.isfinite(score.loss)):
        raise ValueError(
            f"the model's metric is {score.metric} and its loss {score.loss} on validation data before training; "
            "finite numbers were expected. Check the data and the metric"
        )
    return score


def scale_of(evaluate: Evaluate | Validation, untrained: Score, higher_is_better: bool) -> MetricScale:
    """What the numbers mean that `evaluate` returns."""
    if isinstance(evaluate, Validation):
        return evaluate.scale(untrained)
    return infer_scale(untrained.metric, untrained.loss, higher_is_better=higher_is_better)


class Measurer:
    """Scores a growing network.

    Args:
        network: The network.
        evaluate: The user's function, or a `Validation`.
        scale: What its numbers mean.
        every_coalition: Measure all that a policy was trained to see, not only each seed switched off.
    """

    def __init__(
        self, network: AttachedNetwork, evaluate: Evaluate | Validation, scale: MetricScale, every_coalition: bool
    ) -> None:
        self.network = network
        self.scale = scale
        self._evaluate = evaluate
        self._every_coalition = every_coalition
        self._passes = CoalitionPasses(network)

    def measure(self, *, kept_too: bool = False) -> Measured:
        """Scores with all seeds, with each live one switched off, and of what is kept.

        Args:
            kept_too: Switch kept seeds off one by one as well.

        Raises:
            ValueError: The metric is not a number though the loss is.
        """
        players = [slot for slot in self.network.all_slots() if slot.stage.is_blended]
        slot_ids = tuple(slot.spec.slot_id for slot in players)
        fossils = sum(1 << i for i, slot in enumerate(players) if slot.stage is SeedStage.FOSSILIZED)
        full = full_coalition(len(players))
        if self._every_coalition:
            masks = set(coalitions_to_measure(len(players), fossils))
        else:
            switched = [i for i, slot in enumerate(players) if kept_too or slot.stage is not SeedStage.FOSSILIZED]
            masks = {full, fossils} | {full & ~(1 << player) for player in switched}
        order = [full, *sorted(masks - {full})]
        coalitions = [frozenset(s for i, s in enumerate(slot_ids) if mask >> i & 1) for mask in order]
        return self.as_measured(dict(zip(order, self._scores(coalitions), strict=True)), slot_ids)

    def _scores(self, coalitions: list[frozenset[str]]) -> list[Score]:
        # Whatever an evaluation draws, training goes on as if nobody had looked. A compiled model runs uncompiled here,
        # because every coalition would be compiled anew.
        with evaluating(self.network.model), torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
            if isinstance(self._evaluate, Validation):
                return self._evaluate.score_coalitions(self._passes, coalitions)
            scores = []
            for coalition in coalitions:
                with self.network.coalition(coalition):
                    metric, loss = self._evaluate(self.network.model)
                scores.append(Score(metric=float(metric), loss=float(loss)))
            return scores

    def as_measured(self, scores: Mapping[int, Score], slot_ids: tuple[str, ...]) -> Measured:
        """Scores by coalition, put on the scale of controllers too."""
        for score in scores.values():
            if math.isfinite(score.loss) and not math.isfinite(score.metric):
                raise ValueError(
                    f"the metric is {score.metric} on validation data though the loss is {score.loss:.4g}; it must be "
                    "a finite number for every model. Check it for divisions by 0"
                )
        table = CoalitionTable(
            slot_ids=slot_ids,
            accuracy_pct={mask: self.scale.percent(score.metric) for mask, score in sorted(scores.items())},
            loss={mask: score.loss * self.scale.nats_per_loss for mask, score in sorted(scores.items())},
        )
        return Measured(table=table, scores=scores)

    def worth(self, measured: Measured) -> dict[str, float | None]:
        """What each blended seed brings by slot, in units of the metric; positive if it helps."""
        found = attribute(measured.table, measured.table.accuracy_pct)
        sign = 1.0 if self.scale.higher_is_better else -1.0
        return {
            slot_id: None if one.contribution_pp is None else sign * self.scale.difference(one.contribution_pp)
            for slot_id, one in found.items()
        }
