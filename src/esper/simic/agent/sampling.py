"""Masked, factored, autoregressive choice: one function samples in the rollout and evaluates in the update.

Knows heads only by position. Later heads may depend on earlier choices, through the logits and through the masks.
A head with exactly one legal choice has log-probability 0.0 and entropy 0.0, exactly; a head that does not matter
for the choices so far is such a head, because its mask then allows choice 0 alone.
"""

# B rows (envs, or steps x envs), H heads, C choices of one head

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from esper.leyline import NumericFailure

# Finite even in bfloat16, and far enough down that exp() of it is exactly 0 in float32.
MASKED_LOGIT = -1e4

LogitsFn = Callable[[int, Tensor], Tensor]
"""(head, actions_BH so far) -> logits_BC."""


class HeadMasks(Protocol):
    """What is legal, head by head."""

    @property
    def num_rows(self) -> int:
        """B."""

    @property
    def sampling_order(self) -> tuple[int, ...]:
        """Heads by position, in the order they are chosen."""

    def legal(self, head: int, actions_BH: Tensor) -> Tensor:
        """`[B, C]` booleans given the choices so far; choice 0 alone where the head does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """How choices stray from the logits. Mixing leaves every head a gradient, which a hard floor does not."""

    epsilons: tuple[float, ...]
    """Per head: weight of the uniform distribution over legal choices. Greedy choices ignore it."""
    priors: tuple[tuple[float, ...] | None, ...]
    """Per head: logits of the prior of its KL penalty; None for a head with an entropy bonus instead."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What one head draws from. Entries of illegal choices mean nothing."""

    legal_BC: Tensor
    num_legal_B: Tensor
    log_policy_BC: Tensor
    log_mixed_BC: Tensor
    """With the exploration mixed in."""

    def probs_BC(self) -> Tensor:
        """The probabilities drawn by, in double precision; 0 where illegal."""
        return self.log_mixed_BC.double().exp() * self.legal_BC


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One factored action per row and what is known about its distribution. Columns are heads in storage order."""

    actions_BH: Tensor
    log_probs_BH: Tensor
    entropies_BH: Tensor
    """Entropy of the policy as a share of its maximum, ln(legal choices)."""
    prior_gaps_BH: Tensor
    """KL penalty on the same scale: KL(prior, policy) over the legal choices, or 1 - entropy share without a prior."""
    num_legal_BH: Tensor
    distributions: tuple[Distribution, ...]
    """Per head, in storage order: what the choice was drawn from."""

    @property
    def usable_BH(self) -> Tensor:
        """True where the head had something to choose."""
        return self.num_legal_BH > 1


def join_choices(choices: Sequence[Choice], order_B: Tensor) -> Choice:
    """The rows of several choices as one, in another order. Where a head has fewer choices, illegal ones fill up."""

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(choice, name) for choice in choices])[order_B]

    by_head = zip(*(choice.distributions for choice in choices), strict=True)
    return Choice(
        actions_BH=rows("actions_BH"),
        log_probs_BH=rows("log_probs_BH"),
        entropies_BH=rows("entropies_BH"),
        prior_gaps_BH=rows("prior_gaps_BH"),
        num_legal_BH=rows("num_legal_BH"),
        distributions=tuple(_join_distributions(head, order_B) for head in by_head),
    )


def _join_distributions(found: Sequence[Distribution], order_B: Tensor) -> Distribution:
    width = max(one.legal_BC.shape[1] for one in found)

    def rows(name: str, fill: float) -> Tensor:
        tensors = [getattr(one, name) for one in found]
        wide = [torch.nn.functional.pad(rows_BC, (0, width - rows_BC.shape[1]), value=fill) for rows_BC in tensors]
        return torch.cat(wide)[order_B]

    return Distribution(
        legal_BC=rows("legal_BC", False),
        num_legal_B=torch.cat([one.num_legal_B for one in found])[order_B],
        log_policy_BC=rows("log_policy_BC", MASKED_LOGIT),
        log_mixed_BC=rows("log_mixed_BC", MASKED_LOGIT),
    )


def choose(
    logits_fn: LogitsFn,
    masks: HeadMasks,
    exploration: Exploration,
    *,
    actions_BH: Tensor | None = None,
    uniforms_BH: Tensor | None = None,
) -> Choice:
    """Evaluates the given actions; or samples by uniform numbers in [0, 1); or, without both, takes the most likely.

    Rollout and update of a round must use the same `exploration`.

    Raises:
        ValueError: A head has no legal choice.
        NumericFailure: A head's scores are not numbers. Evaluation looks for neither: it judges what was acted on.
    """
    assert actions_BH is None or uniforms_BH is None, "either evaluate or sample"
    order = masks.sampling_order
    greedy = actions_BH is None and uniforms_BH is None
    chosen_BH = torch.zeros(masks.num_rows, len(order), dtype=torch.long) if actions_BH is None else actions_BH
    distributions: dict[int, Distribution] = {}
    described: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    for head in order:
        legal_BC = masks.legal(head, chosen_BH)
        logits_BC = logits_fn(head, chosen_BH).float()
        epsilon = 0.0 if greedy else exploration.epsilons[head]
        distribution = _mix(logits_BC, legal_BC, epsilon)
        if actions_BH is None:
            _check_possible(head, distribution)
            uniforms_B = None if uniforms_BH is None else uniforms_BH[:, head]
            chosen_BH[:, head] = _pick(distribution, uniforms_B)
        distributions[head] = distribution
        described[head] = _describe(distribution, chosen_BH[:, head], exploration.priors[head])
    columns = zip(*(described[head] for head in sorted(order)), strict=True)
    log_probs_BH, entropies_BH, prior_gaps_BH, num_legal_BH = (torch.stack(column, dim=1) for column in columns)
    return Choice(
        actions_BH=chosen_BH,
        log_probs_BH=log_probs_BH,
        entropies_BH=entropies_BH,
        prior_gaps_BH=prior_gaps_BH,
        num_legal_BH=num_legal_BH,
        distributions=tuple(distributions[head] for head in sorted(order)),
    )


def _mix(logits_BC: Tensor, legal_BC: Tensor, epsilon: float) -> Distribution:
    """Logs of (1 - epsilon) * softmax over legal + epsilon * uniform over legal."""
    num_legal_B = legal_BC.sum(dim=-1)
    log_policy_BC = torch.log_softmax(logits_BC.masked_fill(~legal_BC, MASKED_LOGIT), dim=-1)
    log_mixed_BC = log_policy_BC
    if epsilon > 0.0:
        log_uniform_B1 = math.log(epsilon) - torch.log(num_legal_B.float())[:, None]
        log_mixed_BC = torch.logaddexp(log_policy_BC + math.log1p(-epsilon), log_uniform_B1)
    return Distribution(legal_BC, num_legal_B, log_policy_BC, log_mixed_BC)


def _pick(distribution: Distribution, uniforms_B: Tensor | None) -> Tensor:
    if uniforms_B is None:
        return distribution.log_policy_BC.argmax(dim=-1)
    # In double precision u * total < total for every u < 1, so the first bin above it exists and is a legal one:
    # illegal choices have width 0.
    edges_BC = distribution.probs_BC().cumsum(dim=-1)
    return (edges_BC <= uniforms_B.double()[:, None] * edges_BC[:, -1:]).sum(dim=-1)


def _describe(
    distribution: Distribution, actions_B: Tensor, prior: tuple[float, ...] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, entropy share and prior gap of the chosen actions, and the number of legal ones."""
    num_legal_B, log_policy_BC = distribution.num_legal_B, distribution.log_policy_BC
    has_choice_B = num_legal_B > 1
    log_prob_B = distribution.log_mixed_BC.gather(1, actions_B[:, None])[:, 0]
    scale_B = torch.log(num_legal_B.clamp(min=2).float())
    policy_BC = log_policy_BC.exp()
    entropy_B = -(policy_BC * log_policy_BC).sum(dim=-1) / scale_B
    prior_gap_B = 1.0 - entropy_B
    if prior is not None:
        logits_BC = torch.tensor(prior, device=policy_BC.device).expand_as(policy_BC)
        log_prior_BC = torch.log_softmax(logits_BC.masked_fill(~distribution.legal_BC, MASKED_LOGIT), dim=-1)
        # The gradient in the logits is policy - prior, which is there even at probability 0. That of the entropy, of
        # the KL the other way round and of the reward vanish with the probability: an op once lost would stay lost.
        prior_gap_B = (log_prior_BC.exp() * (log_prior_BC - log_policy_BC)).sum(dim=-1) / scale_B
    zero = torch.zeros((), device=log_prob_B.device)
    return (
        torch.where(has_choice_B, log_prob_B, zero),
        torch.where(has_choice_B, entropy_B, zero),
        torch.where(has_choice_B, prior_gap_B, zero),
        num_legal_B,
    )


def _check_possible(head: int, distribution: Distribution) -> None:
    """Scores that are not numbers would pass for a choice: of choice 0, whatever the masks say.

    So would legal scores that are as low as masked ones.
    """
    empty_B = distribution.num_legal_B == 0
    # One NaN, or an infinite score, makes NaN of the whole row, which no comparison holds for.
    distinct_BC = distribution.legal_BC | (distribution.log_policy_BC < MASKED_LOGIT / 2)
    lost_B = distribution.log_policy_BC[:, 0].isnan() | ~distinct_BC.all(dim=-1)
    impossible_B = empty_B | lost_B
    if not bool(impossible_B.any()):  # sync: rides with the read of the sampled actions; CPU policies pay nothing
        return
    row = int(impossible_B.nonzero()[0])
    if bool(empty_B[row]):
        raise ValueError(f"head {head} of row {row} has no legal choice; masks must leave every head at least one")
    raise NumericFailure(
        f"head {head} of row {row} has scores that are not numbers, or too low to be told from masked ones; the "
        "policy's weights or its observation are not finite, or far too large. Go back to an earlier checkpoint, or "
        "look at that observation"
    )
