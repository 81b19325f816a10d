"""The network: indifferent to the order and number of slots, to unknown blueprints, and to the global generator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.evidence.sandbox_training import play_episodes
from esper.leyline import LifecycleOp
from esper.simic.agent.policy import unroll, zero_state
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.tamiyo_inputs import BLEND, BLUEPRINT, OP, SLOT, Cards, TamiyoInputs, TamiyoMasks, make_cards
from esper.simic.agent.tamiyo_network import EMBEDDING, ColumnNorm
from esper.simic.client import FrozenPolicy, network_shape
from esper.tamiyo.features import GLOBAL_COLUMNS, SEES, SLOT_COLUMNS
from esper.tamiyo.simulation import SimulatedBlueprint
from tests.fakes import seeds
from tests.simic.agent.rounds import growth, learn, lived_buffer, play_round, small_agent, small_world


def test_permuting_slots_permutes_slot_scores_and_leaves_op_and_value_alone() -> None:
    spec = small_world()
    agent = small_agent(spec)
    # Learn a little first: fresh output layers are too small to tell anything apart.
    for episode in range(3):
        learn(play_round(agent, spec, episode=episode))
    inputs = lived_buffer(agent, spec, envs=4).rollout().inputs
    order = torch.tensor([2, 0, 1])
    plain, moved = agent.network(inputs), agent.network(_permuted(inputs, order))
    rows = len(plain.values_B)
    actions = torch.zeros(rows, 4, dtype=torch.long)
    actions[:, OP] = 1
    assert torch.allclose(moved.values_B, plain.values_B, atol=1e-5)
    assert torch.allclose(moved.logits_fn(OP, actions), plain.logits_fn(OP, actions), atol=1e-5)
    slots = plain.logits_fn(SLOT, actions).detach()
    assert torch.allclose(moved.logits_fn(SLOT, actions), slots[:, order], atol=1e-5)
    assert float((slots - slots[:, order]).abs().max()) > 1e-3
    there = actions.clone()
    there[:, SLOT] = 2
    assert torch.allclose(moved.logits_fn(BLUEPRINT, actions), plain.logits_fn(BLUEPRINT, there), atol=1e-5)


def _permuted(inputs: TamiyoInputs, order: Tensor) -> TamiyoInputs:
    masks = TamiyoMasks(
        op_NO=inputs.masks.op_NO,
        slot_NOS=inputs.masks.slot_NOS[..., order],
        blueprint_NSP=inputs.masks.blueprint_NSP[..., order, :],
        blend_NL=inputs.masks.blend_NL,
    )
    cards = Cards(rows_SPC=inputs.cards.rows_SPC[order], blueprint_ids_P=inputs.cards.blueprint_ids_P)
    slots, offers = inputs.slot_obs_TNSF[:, :, order], inputs.offers_TNSPK[:, :, order]
    return replace(inputs, slot_obs_TNSF=slots, offers_TNSPK=offers, masks=masks, cards=cards)


def _with_a_slot_more(inputs: TamiyoInputs, like: int) -> TamiyoInputs:
    """The same host with another slot at its end, seen as the one at position `like` is at reset."""
    num_slots = inputs.slot_obs_TNSF.shape[2]
    order = torch.tensor([*range(num_slots), like])
    wider = _permuted(inputs, order)
    wider.slot_obs_TNSF[:, :, num_slots] = inputs.slot_obs_TNSF[0, :, like]
    return wider


def test_an_empty_slot_more_changes_nothing_but_the_pools() -> None:
    spec = small_world()
    agent = small_agent(spec)
    learn(play_round(agent, spec))
    inputs = lived_buffer(agent, spec, envs=4).rollout().inputs
    three, four = agent.network(inputs), agent.network(_with_a_slot_more(inputs, like=1))
    old_trunk_BW, old_slots_BSE, _, _ = three.logits_fn.args  # type: ignore[attr-defined]
    trunk_BW, slots_BSE, cards_SPE, offers_BSPK = four.logits_fn.args  # type: ignore[attr-defined]
    assert torch.allclose(slots_BSE[:, :3], old_slots_BSE, atol=1e-6)
    assert not torch.equal(trunk_BW, old_trunk_BW), "the pools see it"
    actions = torch.zeros(len(trunk_BW), 4, dtype=torch.long)
    actions[:, OP] = LifecycleOp.GERMINATE
    for slot in range(3):
        actions[:, SLOT] = slot
        for head in (OP, SLOT, BLUEPRINT, BLEND):
            before = three.logits_fn(head, actions)
            after = agent.network._logits(old_trunk_BW, slots_BSE, cards_SPE, offers_BSPK, head, actions)
            assert torch.allclose(after[:, : before.shape[1]], before, atol=1e-6)


def test_more_slots_that_all_look_alike_look_like_one_of_them() -> None:
    spec = small_world()
    agent = small_agent(spec)
    learn(play_round(agent, spec))
    inputs = lived_buffer(agent, spec, envs=4).rollout().inputs
    alike = _permuted(inputs, torch.tensor([1, 1, 1]))
    three, four = agent.network(alike), agent.network(_permuted(inputs, torch.tensor([1, 1, 1, 1])))
    actions = torch.zeros(len(three.values_B), 4, dtype=torch.long)
    assert torch.allclose(four.values_B, three.values_B, atol=1e-5)
    assert torch.allclose(four.logits_fn(OP, actions), three.logits_fn(OP, actions), atol=1e-5)


def test_each_part_of_an_action_knows_the_parts_before_it() -> None:
    spec = small_world()
    agent = small_agent(spec)
    inputs = lived_buffer(agent, spec, envs=4).rollout().inputs
    # A blueprint costs another share in every slot, as on real hosts.
    rows_SPC = inputs.cards.rows_SPC + torch.arange(3.0)[:, None, None]
    forward = agent.network(replace(inputs, cards=replace(inputs.cards, rows_SPC=rows_SPC)))
    for head, earlier in ((SLOT, OP), (BLUEPRINT, SLOT), (BLEND, SLOT), (BLEND, BLUEPRINT)):
        first = torch.zeros(len(forward.values_B), 4, dtype=torch.long)
        other = first.clone()
        other[:, earlier] = 1
        assert (forward.logits_fn(head, first) - forward.logits_fn(head, other)).abs().max().item() > 1e-5


@torch.no_grad()
def test_a_blueprint_the_network_was_not_built_with_is_judged_by_its_card_alone() -> None:
    agent = small_agent(small_world())
    known = agent.shape.blueprints
    card = [0.1 * column for column in range(len(agent.shape.card_columns))]
    cards = make_cards([[card, card, card]], ("stranger", known[1], known[0]), known)
    assert cards.blueprint_ids_P.tolist() == [0, 2, 1]
    before = agent.network._encode_cards(cards)[0]
    assert len({tuple(row.tolist()) for row in before}) == 3, "equal cards, but two of them are known by name"
    expected = agent.network.card_encoder(torch.cat([torch.tensor(card), torch.zeros(EMBEDDING)]))
    assert torch.allclose(before[0], expected, atol=1e-6)
    agent.network.blueprint_embedding.add_(1.0)
    after = agent.network._encode_cards(cards)[0]
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    assert not torch.equal(after[2], before[2])


def test_values_are_normalised_and_flags_stay_what_they_are() -> None:
    norm = ColumnNorm((True, False))
    rows = torch.tensor([[3.0, 0.0], [5.0, 1.0], [7.0, 1.0]])
    norm.stats.update(rows)
    seen = norm(rows)
    assert seen[:, 1].tolist() == [0.0, 1.0, 1.0]
    assert seen[:, 0].tolist() == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5], abs=1e-5)
    network = small_agent(small_world()).network
    flags = [[column.normalised for column in columns] for columns in (GLOBAL_COLUMNS, SLOT_COLUMNS)]
    assert [network.obs_norm.normalised.tolist(), network.slot_norm.normalised.tolist()] == flags
    assert all(0 < sum(own) < len(own) for own in flags)


def test_a_value_that_never_changed_in_training_reads_zero_on_any_host() -> None:
    norm = ColumnNorm((True, True))
    norm.stats.update(torch.tensor([[9.97, 1.0], [9.97, 2.0], [9.97, 4.0]]))
    assert norm(torch.tensor([14.0, 2.0]))[0].item() == 0.0
    assert norm(torch.tensor([9.97, 9.0]))[1].item() > 1.0


def test_the_share_of_the_room_left_decides_between_blueprints() -> None:
    spec = small_world()
    agent = small_agent(spec)
    inputs = lived_buffer(agent, spec, envs=4).rollout().inputs
    offers = torch.rand(inputs.offers_TNSPK.shape, generator=torch.Generator().manual_seed(0))
    actions = torch.zeros(inputs.obs_TND.shape[0] * 4, 4, dtype=torch.long)
    plain, offered = agent.network(inputs), agent.network(replace(inputs, offers_TNSPK=offers))
    assert torch.equal(offered.logits_fn(OP, actions), plain.logits_fn(OP, actions))
    moved = offered.logits_fn(BLUEPRINT, actions) - plain.logits_fn(BLUEPRINT, actions)
    assert (moved - moved[:, :1]).abs().max().item() > 1e-4


def test_a_policy_that_goes_by_the_clock_sees_time_and_budget_only() -> None:
    """Whatever else changes, it scores every head the same; the masks are not its to see through."""
    spec = small_world()
    agent = small_agent(spec)
    rollout = lived_buffer(agent, spec, envs=4).rollout()
    inputs, actions = rollout.inputs, rollout.actions_TNH.flatten(0, 1)
    assert isinstance(inputs, TamiyoInputs)
    noise = torch.Generator().manual_seed(0)
    columns = agent.shape.global_columns

    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + torch.randn(tensor.shape, generator=noise)

    clock = [columns.index(name) for name in SEES["clock"] or ()]
    elsewhere = noisy(inputs.obs_TND)
    elsewhere[..., clock] = inputs.obs_TND[..., clock]
    later = inputs.obs_TND.clone()
    later[..., clock] += 1.0
    others = replace(
        inputs,
        obs_TND=elsewhere,
        slot_obs_TNSF=noisy(inputs.slot_obs_TNSF),
        offers_TNSPK=noisy(inputs.offers_TNSPK),
        cards=replace(inputs.cards, rows_SPC=noisy(inputs.cards.rows_SPC)),
    )
    clock_only = PPOAgent(network_shape(spec.layout.blueprints, "clock"), agent.config, run_seed=0)
    for learner, blind in ((agent, False), (PPOAgent.load(clock_only.to_files()), True)):
        stats = learner.network.obs_norm.stats
        stats.update(inputs.obs_TND.flatten(0, 1))
        plain, changed = learner.network(inputs), learner.network(others)
        assert torch.equal(plain.values_B, changed.values_B) is blind
        for head in range(4):
            same = torch.equal(plain.logits_fn(head, actions), changed.logits_fn(head, actions))
            assert same is blind, (head, blind)
        assert not torch.equal(plain.values_B, learner.network(replace(inputs, obs_TND=later)).values_B)


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_a_policy_made_for_three_slots_runs_and_learns_with_others(num_slots: int) -> None:
    agent = small_agent(small_world(3))
    learn(play_round(agent, small_world(3)))
    other = small_world(num_slots)
    stranger = SimulatedBlueprint(name="stranger", gain_pp=(1.0,) * num_slots)
    other = replace(other, blueprints=(*other.blueprints, stranger))
    for greedy in (True, False):
        policy = FrozenPolicy(agent, run_seed=0, greedy=greedy)
        assert len(play_episodes(other, policy, growth, seeds(4))) == 4
    assert learn(play_round(agent, other))["performed"]


@torch.no_grad()
def test_a_memory_begins_by_keeping_and_a_policy_by_hardly_preferring_anything() -> None:
    network = small_agent(small_world()).network
    for name, parameter in network.memory.named_parameters():
        gates = parameter.chunk(4)
        if name.startswith("weight"):
            assert all(torch.allclose(gate @ gate.T, torch.eye(16), atol=1e-5) for gate in gates)
        else:
            assert [gate.unique().tolist() for gate in gates] == [[0], [float("bias_ih" in name)], [0], [0]]
    outputs = [network.op_head[-1], network.slot_query[-1], network.blueprint_score[-1], network.blend_head[-1]]
    assert all(float(torch.linalg.matrix_norm(output.weight, 2)) == pytest.approx(0.01) for output in outputs)
    assert float(torch.linalg.matrix_norm(network.value.out.weight, 2)) == pytest.approx(1.0)


def test_an_agent_draws_nothing_from_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    spec = small_world()
    learn(play_round(small_agent(spec), spec))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_memory_the_past_does_not_matter() -> None:
    spec = small_world()
    for memory in (True, False):
        agent = small_agent(spec, memory=memory)
        inputs = lived_buffer(agent, spec).rollout().inputs
        changed = replace(inputs, obs_TND=inputs.obs_TND.clone())
        changed.obs_TND[0] += 1.0
        first, second = (
            agent.network(agent._with_memory(rows)).values_B.reshape(spec.horizon, -1) for rows in (inputs, changed)
        )
        assert not torch.equal(first[0], second[0])
        assert torch.equal(first[1:], second[1:]) is not memory


def test_memory_is_cleared_where_episodes_start_in_the_middle() -> None:
    generator = torch.Generator().manual_seed(0)
    lstm = nn.LSTM(3, 5, device="meta").to_empty(device="cpu")
    for parameter in lstm.parameters():
        nn.init.normal_(parameter, generator=generator)
    inputs_TND = torch.randn(9, 4, 3, generator=generator)
    starts_TN = torch.rand(9, 4, generator=generator) < 0.3
    state = (torch.randn(1, 4, 5, generator=generator), torch.randn(1, 4, 5, generator=generator))
    packed_TNW, _ = unroll(lstm, inputs_TND, state, starts_TN)
    for env in range(4):
        memory = tuple(part[:, env : env + 1] for part in state)
        for step in range(9):
            if starts_TN[step, env]:
                memory = zero_state(lstm, 1)
            output, memory = lstm(inputs_TND[step : step + 1, env : env + 1], memory)
            assert torch.allclose(output[0, 0], packed_TNW[step, env], atol=1e-6)
