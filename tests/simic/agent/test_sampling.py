"""The one choosing function: exact zeros, legality, and the distribution it claims."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import HEAD_NAMES, HEADS, OPS, NumericFailure
from esper.simic.agent.sampling import Choice, Exploration, choose
from esper.simic.agent.tamiyo_inputs import OP, Observation, one_step
from tests.simic.agent.rounds import evaluate, lived_buffer, small_agent, small_world

ALMOST_ONE = 1.0 - 2.0**-24


class OneHead:
    """Masks of a single head."""

    sampling_order = (0,)

    def __init__(self, legal_BC: Tensor) -> None:
        self.legal_BC = legal_BC
        self.num_rows = len(legal_BC)

    def legal(self, head: int, actions_BH: Tensor) -> Tensor:
        return self.legal_BC


def choose_one(logits: list[float], legal: list[bool], epsilon: float, **how: Tensor) -> Choice:
    exploration = Exploration(epsilons=(epsilon,), priors=(None,))
    return choose(lambda head, actions: torch.tensor([logits]), OneHead(torch.tensor([legal])), exploration, **how)


def mixture(logits: list[float], legal: list[bool], epsilon: float) -> list[float]:
    exps = [math.exp(logit - max(logits)) if ok else 0.0 for logit, ok in zip(logits, legal, strict=True)]
    return [
        (1 - epsilon) * e / sum(exps) + epsilon / sum(legal) if ok else 0.0 for e, ok in zip(exps, legal, strict=True)
    ]


heads_st = st.integers(2, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-8, 8, width=32), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n).filter(any),
    )
)


@given(heads_st, st.sampled_from([0.0, 0.05, 0.5]), st.floats(0.0, ALMOST_ONE, width=32))
def test_a_sample_is_legal_and_its_log_prob_is_that_of_the_mixture(
    head: tuple[list[float], list[bool]], epsilon: float, u: float
) -> None:
    logits, legal = head
    choice = choose_one(logits, legal, epsilon, uniforms_BH=torch.tensor([[u]]))
    action = int(choice.actions_BH)
    assert legal[action]
    expected = mixture(logits, legal, epsilon)[action]
    assert math.isclose(math.exp(float(choice.log_probs_BH)), expected, rel_tol=1e-4)
    evaluated = choose_one(logits, legal, epsilon, actions_BH=choice.actions_BH)
    assert torch.equal(evaluated.log_probs_BH, choice.log_probs_BH)
    assert torch.equal(evaluated.entropies_BH, choice.entropies_BH)


@given(heads_st)
def test_one_legal_choice_has_log_prob_and_entropy_exactly_zero(head: tuple[list[float], list[bool]]) -> None:
    logits, legal = head
    only = [i == legal.index(True) for i in range(len(legal))]
    choice = choose_one(logits, only, 0.3, uniforms_BH=torch.tensor([[0.7]]))
    assert float(choice.log_probs_BH) == 0.0
    assert float(choice.entropies_BH) == 0.0
    assert float(choice.prior_gaps_BH) == 0.0
    assert not bool(choice.usable_BH)


def test_samples_follow_the_mixture() -> None:
    logits, legal, num = [2.0, 0.0, -1.0, 5.0], [True, True, True, False], 20_000
    uniforms = torch.rand(num, 1, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([logits]).expand(num, -1)
    masks = OneHead(torch.tensor([legal]).expand(num, -1))
    choice = choose(lambda h, a: rows, masks, Exploration(epsilons=(0.2,), priors=(None,)), uniforms_BH=uniforms)
    shares = torch.bincount(choice.actions_BH[:, 0], minlength=4) / num
    assert torch.allclose(shares, torch.tensor(mixture(logits, legal, 0.2)), atol=0.015)


def test_greedy_takes_the_most_likely_legal_choice_and_ignores_exploration() -> None:
    choice = choose_one([1.0, 3.0, 9.0], [True, True, False], 0.9)
    assert int(choice.actions_BH) == 1
    assert math.isclose(math.exp(float(choice.log_probs_BH)), mixture([1.0, 3.0], [True, True], 0.0)[1], rel_tol=1e-5)


def test_entropy_is_a_share_and_the_prior_gap_a_distance_from_habit() -> None:
    even = choose_one([1.0, 1.0, 7.0], [True, True, False], 0.0)
    assert float(even.entropies_BH) == pytest.approx(1.0)
    assert float(even.prior_gaps_BH) == pytest.approx(0.0, abs=1e-6)
    habit = Exploration(epsilons=(0.0,), priors=((2.0, 0.0, 0.0),))
    masks = OneHead(torch.tensor([[True, True, True]]))
    at_habit = choose(lambda h, a: torch.tensor([[3.0, 1.0, 1.0]]), masks, habit)
    away = choose(lambda h, a: torch.tensor([[0.0, 0.0, 0.0]]), masks, habit)
    assert float(at_habit.prior_gaps_BH) == pytest.approx(0.0, abs=1e-6)
    assert float(away.prior_gaps_BH) > 0.1


def test_the_prior_pulls_as_hard_on_a_choice_that_is_all_but_lost() -> None:
    """Its gradient in the logits is policy - prior; that of the entropy is nothing there."""
    masks = OneHead(torch.tensor([[True, True, True, False]]))
    pulls = []
    for prior in ((0.0, 0.0, 0.0, 0.0), None):
        logits = torch.tensor([[0.0, 0.0, -40.0, 0.0]], requires_grad=True)
        choice = choose(lambda h, a, at=logits: at, masks, Exploration(epsilons=(0.0,), priors=(prior,)))
        choice.prior_gaps_BH.sum().backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        pulls.append(logits.grad[0] * math.log(3))
    assert pulls[0].tolist() == pytest.approx([0.5 - 1 / 3, 0.5 - 1 / 3, -1 / 3, 0.0], abs=1e-6)
    assert abs(float(pulls[1][2])) < 1e-12


def test_a_head_without_legal_choice_is_refused_by_name_of_row() -> None:
    with pytest.raises(ValueError, match="head 0 of row 0 has no legal choice"):
        choose_one([0.0, 0.0], [False, False], 0.1, uniforms_BH=torch.tensor([[0.5]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("how", [{}, {"uniforms_BH": torch.tensor([[0.5]])}])
def test_scores_that_are_not_numbers_choose_nothing(bad: float, how: dict[str, Tensor]) -> None:
    with pytest.raises(NumericFailure, match="head 0 of row 0 has scores that are not numbers"):
        choose_one([0.0, bad, 0.0], [False, True, True], 0.1, **how)
    fine = choose_one([bad, 1.0, 0.0], [False, True, True], 0.1, **how)
    assert int(fine.actions_BH) == 1, "scores of illegal choices mean nothing"


@pytest.mark.parametrize("how", [{}, {"uniforms_BH": torch.tensor([[0.5]])}])
def test_scores_as_low_as_masked_ones_choose_nothing(how: dict[str, Tensor]) -> None:
    with pytest.raises(NumericFailure, match="too low to be told from masked ones"):
        choose_one([0.0, -2e4, -3e4], [False, True, True], 0.1, **how)
    for high in (-900.0, 900.0, 3e4, 1e30):
        fine = choose_one([0.0, high, -3e4], [False, True, True], 0.0, **how)
        assert int(fine.actions_BH) == 1


def test_heads_an_op_does_not_use_say_exactly_nothing() -> None:
    spec = small_world()
    agent = small_agent(spec)
    rollout = lived_buffer(agent, spec, envs=8).rollout()
    relevant_OH = torch.tensor([[op in head.ops for head in HEADS] for op in OPS])
    relevant_TNH = relevant_OH[rollout.actions_TNH[..., OP]]
    silent_TNH = ~relevant_TNH | ~rollout.usable_TNH
    assert (rollout.log_probs_TNH[silent_TNH] == 0.0).all()
    assert (rollout.log_probs_TNH[~silent_TNH] < 0.0).all()
    assert (rollout.actions_TNH[~relevant_TNH] == 0).all()
    choice, _ = evaluate(agent, rollout.inputs, rollout.actions_TNH)
    assert (choice.entropies_BH[silent_TNH.flatten(0, 1)] == 0.0).all()
    assert (choice.entropies_BH[~silent_TNH.flatten(0, 1)] > 0.0).all()
    assert all((~silent_TNH)[..., head].any() for head in range(len(HEADS)))


def test_sample_and_evaluate_agree_bit_for_bit_on_the_same_inputs() -> None:
    spec = small_world()
    agent = small_agent(spec)
    rollout = lived_buffer(agent, spec, envs=8).rollout()
    memory = None
    for step in range(spec.horizon):
        masks = rollout.inputs.masks.map(lambda mask, step=step: mask[step])  # type: ignore[misc]
        seen = Observation(
            obs_ND=rollout.inputs.obs_TND[step],
            slot_obs_NSF=rollout.inputs.slot_obs_TNSF[step],
            offers_NSPK=rollout.inputs.offers_TNSPK[step],
            masks=masks,
        )
        generator = torch.Generator().manual_seed(step)
        uniforms_NH = torch.rand(seen.obs_ND.shape[0], len(HEAD_NAMES), generator=generator)
        decision = agent.act(seen, rollout.inputs.cards, memory, uniforms_NH)
        choice, values = evaluate(agent, one_step(seen, rollout.inputs.cards, memory), decision.choice.actions_BH[None])
        assert torch.equal(choice.log_probs_BH, decision.choice.log_probs_BH)
        assert torch.equal(choice.entropies_BH, decision.choice.entropies_BH)
        assert torch.equal(values, decision.values_N)
        memory = decision.state


def test_a_whole_sequence_evaluates_to_what_was_sampled_step_by_step() -> None:
    spec = small_world()
    agent = small_agent(spec)
    rollout = lived_buffer(agent, spec, envs=8).rollout()
    choice, values_B = evaluate(agent, rollout.inputs, rollout.actions_TNH)
    assert torch.allclose(choice.log_probs_BH, rollout.log_probs_TNH.flatten(0, 1), atol=1e-5)
    assert torch.allclose(values_B, rollout.values_TN.flatten(), atol=1e-5)
    assert torch.equal(choice.usable_BH, rollout.usable_TNH.flatten(0, 1))
