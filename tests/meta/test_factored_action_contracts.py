"""Whatever speaks of heads or ops by name or number speaks of the ones in the tables: a new one fails here first."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from esper.leyline import BLENDS, HEAD_NAMES, HEADS, OPS, SAMPLING_ORDER, LifecycleOp, heads_used_by
from esper.simic.agent.config import DEFAULT_OP_PRIOR, PPOConfig
from esper.simic.agent.tamiyo_inputs import BLEND, BLUEPRINT, OP, ORDER, RELEVANT_HO, SLOT
from esper.simic.agent.types import ActionDict, HeadEntropies, HeadLogProbs
from esper.simic.training.action_execution import parse_sampled_action
from tests.simic.agent.rounds import small_agent, small_world


@pytest.mark.parametrize("by_head", [ActionDict, HeadLogProbs, HeadEntropies])
def test_dicts_by_head_have_exactly_the_heads_all_required(by_head: type) -> None:
    assert tuple(get_type_hints(by_head)) == HEAD_NAMES
    assert by_head.__required_keys__ == set(HEAD_NAMES)  # type: ignore[attr-defined]


def test_head_positions_follow_the_table() -> None:
    assert HEAD_NAMES == ("slot", "blueprint", "blend", "op")
    assert (SLOT, BLUEPRINT, BLEND, OP) == (0, 1, 2, 3)
    assert tuple(HEAD_NAMES[head] for head in ORDER) == SAMPLING_ORDER == ("op", "slot", "blueprint", "blend")
    for op in OPS:
        used = tuple(head.name for i, head in enumerate(HEADS) if RELEVANT_HO[i, op])
        assert used == heads_used_by(op)


def test_the_network_has_a_scorer_of_the_right_size_for_every_head() -> None:
    spec = small_world()
    network = small_agent(spec).network
    own = network.head_parameters()
    assert tuple(own) == HEAD_NAMES
    assert all(own.values())
    ids = [id(parameter) for parameters in own.values() for parameter in parameters]
    assert len(set(ids)) == len(ids)
    assert network.op_head[-1].out_features == len(OPS)
    assert network.blend_head[-1].out_features == len(BLENDS)


def test_the_prior_speaks_of_every_op() -> None:
    assert len(DEFAULT_OP_PRIOR) == len(OPS)
    assert DEFAULT_OP_PRIOR[LifecycleOp.PRUNE] < 0.0 < DEFAULT_OP_PRIOR[LifecycleOp.ADVANCE]
    with pytest.raises(ValueError, match="op_prior"):
        PPOConfig(op_prior=(0.0,) * (len(OPS) + 1))


@pytest.mark.parametrize("op", OPS)
def test_a_choice_becomes_a_spec_with_just_what_its_op_uses(op: LifecycleOp) -> None:
    layout = small_world().layout
    spec = parse_sampled_action(4, ActionDict(slot=2, blueprint=1, blend=3, op=int(op)), layout)
    given = {"slot": spec.slot, "blueprint": spec.blueprint, "blend": spec.blend}
    wanted = {"slot": layout.slot_ids[2], "blueprint": layout.blueprints[1], "blend": tuple(BLENDS)[3]}
    assert spec.op is op
    assert given == {name: value if name in heads_used_by(op) else None for name, value in wanted.items()}
