"""Coalition passes: bit-equal to passes of their own, at exactly the cost that shared prefixes leave."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.kasmina import CNNHost, Host, MLPHost, MorphogeneticModel, SeedSlot, TransformerHost, begin_epoch
from esper.leyline import BLENDS, Cause, SeedStage
from tests.growing import (
    LENIENT,
    TOPOLOGIES,
    Run,
    bits,
    draw,
    make_batches,
    module_bits,
    randomise_seed,
    start,
    tiny_host,
)

SLOTS = 5
SPANS = {"mlp with spans": "r0c1 r2c0 r2c1 r3c0 r3c1", "cnn with spans": "r0c0 r2c0 r2c1 r3c0 r3c2"}
"""Slots of hosts of two layers, some of them spans: several end, or start, at one place."""
NETWORKS = (*TOPOLOGIES, *SPANS)
Coalition = frozenset[str]


def five_slot_host(topology: str) -> Host:
    if topology == "mlp":
        return MLPHost(inputs=6, hidden=[8, 8, 8, 8], classes=4, input_slot=True, generator=draw(1))
    if topology == "cnn":
        return CNNHost(
            in_channels=1, channels=[8, 8, 8], kernel=3, pool=[True, True, False], classes=4, generator=draw(1)
        )
    return TransformerHost(vocab=11, dim=8, heads=2, layers=5, ff=2, context=6, generator=draw(1))


def grown(network: str, stages: list[str], rng_seed: int) -> Run:
    """A run with arbitrary seeds in the given stages, blended ones at arbitrary points of their ramps."""
    if network in SPANS:
        topology = network.split()[0]
        run = start(topology, host=tiny_host(topology), slots=SPANS[network].split(), lifecycle=LENIENT)
    else:
        run = start(network, host=five_slot_host(network), lifecycle=LENIENT)
    generator, layout, blends = draw(rng_seed), run.model.layout, list(BLENDS)
    for slot_id, stage in zip(run.slot_ids, stages, strict=True):
        if stage == "DORMANT":
            continue
        keys = [key for key in layout.blueprints if layout.card(slot_id, key).fits]
        pick = torch.randint(0, 10**6, (3,), generator=generator).tolist()
        run.model.germinate(slot_id, keys[pick[0] % len(keys)], blends[pick[1] % len(blends)], rng_seed=pick[2])
        randomise_seed(run, slot_id, rng_seed=pick[2])
        begin_epoch(run.model)
        slot = run.model.slot(slot_id)
        path = {"TRAINING": 0, "BLENDING": 1, "HOLDING": 2, "FOSSILIZED": 3}[stage]
        for target in (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED)[:path]:
            slot.transition(target, Cause.AUTO)
        ramps = 0 if path == 0 else 1 + pick[0] % 2 if path == 1 else 9
        for _ in range(ramps):
            slot.ramp()
    with torch.no_grad():  # running statistics of their own, so that batch norm matters
        for name, buffer in run.model.host.named_buffers():
            if "running" in name:
                buffer.add_(0.3 * torch.rand(buffer.shape, generator=generator))
    run.model.eval()
    return run


def blended_ids(model: MorphogeneticModel) -> list[str]:
    return [slot.spec.slot_id for slot in model.all_slots() if slot.stage.is_blended]


def alone(model: MorphogeneticModel, x: Tensor, on: Coalition) -> Tensor:
    """A plain forward pass with every seed outside the coalition taken out of action."""
    kept = {slot: slot.stage for slot in model.all_slots()}
    for slot in kept:
        if slot.spec.slot_id not in on:
            slot.stage = SeedStage.DORMANT
    with torch.no_grad():
        out: Tensor = model(x)
    for slot, stage in kept.items():
        slot.stage = stage
    return out


def count_calls(model: MorphogeneticModel, x: Tensor, coalitions: list[Coalition]) -> tuple[list[int], dict[str, int]]:
    calls: Counter[object] = Counter()
    hooks = [
        part.register_forward_hook(lambda module, _args, _out: calls.update([module]))
        for part in (*model.host.segments, *(s.seed for s in model.all_slots() if s.seed is not None))
    ]
    model.forward_coalitions(x, coalitions)
    for hook in hooks:
        hook.remove()
    segments = [calls[segment] for segment in model.host.segments]
    return segments, {s.spec.slot_id: calls[s.seed] for s in model.all_slots() if s.seed is not None}


def expected_calls(model: MorphogeneticModel, coalitions: list[Coalition]) -> tuple[list[int], dict[str, int]]:
    """Distinct on/off patterns before each segment, and those up to each seed that switch it on."""
    slots = list(model.all_slots())
    players = blended_ids(model)

    def patterns(before: list[SeedSlot], among: list[Coalition]) -> int:
        names = {slot.spec.slot_id for slot in before}
        return len({c & names for c in among})

    segments = [
        patterns([slot for slot in slots if slot.spec.segment_idx < index], coalitions)
        for index in range(len(model.host.segments))
    ]
    seeds = {
        slot.spec.slot_id: patterns(slots[:position], [c for c in coalitions if slot.spec.slot_id in c])
        if slot.spec.slot_id in players
        else 0
        for position, slot in enumerate(slots)
        if slot.seed is not None
    }
    return segments, seeds


stages = st.lists(
    st.sampled_from(["DORMANT", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED"]), min_size=SLOTS, max_size=SLOTS
).filter(lambda drawn: any(stage in ("BLENDING", "HOLDING", "FOSSILIZED") for stage in drawn))


@pytest.mark.parametrize("topology", NETWORKS)
@given(stages, st.data())
@settings(derandomize=True, deadline=None, max_examples=12)
def test_coalitions_equal_passes_of_their_own_at_the_shared_cost(
    topology: str, stages: list[str], data: st.DataObject
) -> None:
    run = grown(topology, stages, rng_seed=data.draw(st.integers(0, 10**6)))
    players = blended_ids(run.model)
    subsets = [frozenset(c) for n in range(len(players) + 1) for c in itertools.combinations(players, n)]
    coalitions = data.draw(st.lists(st.sampled_from(subsets), min_size=1, max_size=9, unique=True))
    x = run.validation[0][0]
    before = module_bits(run.model)
    outputs = run.model.forward_coalitions(x, coalitions)
    for coalition, out in zip(coalitions, outputs, strict=True):
        assert bits(out) == bits(alone(run.model, x, coalition))
    assert bits(run.model.forward_coalitions(x, [frozenset(players)])[0]) == bits(
        alone(run.model, x, frozenset(players))
    )
    assert count_calls(run.model, x, coalitions) == expected_calls(run.model, coalitions)
    assert module_bits(run.model) == before


@pytest.mark.parametrize("topology", NETWORKS)
def test_all_on_is_the_forward_pass_and_seeds_matter(topology: str) -> None:
    run = grown(topology, ["HOLDING", "TRAINING", "BLENDING", "DORMANT", "FOSSILIZED"], rng_seed=1)
    x = run.validation[0][0]
    everyone = frozenset(blended_ids(run.model))
    everything, nothing = run.model.forward_coalitions(x, [everyone, frozenset()])
    with torch.no_grad():
        assert bits(run.model(x)) == bits(everything)
    assert bits(everything) != bits(nothing)
    with torch.no_grad():
        assert bits(nothing) == bits(run.model.host.eval()(x))


def test_all_subsets_double_at_each_slot() -> None:
    run = grown("mlp", ["HOLDING"] * 3 + ["DORMANT"] * 2, rng_seed=2)
    subsets = [frozenset(c) for n in range(4) for c in itertools.combinations(blended_ids(run.model), n)]
    segments, seeds = count_calls(run.model, run.validation[0][0], subsets)
    assert segments == [1, 2, 4, 8, 8, 8]
    assert list(seeds.values()) == [1, 2, 4]


def test_leave_one_out_grows_by_one_stream_per_slot() -> None:
    run = grown("transformer", ["HOLDING"] * 5, rng_seed=3)
    everyone = frozenset(blended_ids(run.model))
    coalitions = [everyone, frozenset(), *(everyone - {slot_id} for slot_id in sorted(everyone))]
    segments, _ = count_calls(run.model, run.validation[0][0], coalitions)
    assert segments == [1, 1, 2, 4, 5, 6, 7]


def test_coalitions_need_eval_mode() -> None:
    run = grown("cnn", ["HOLDING"] + ["DORMANT"] * 4, rng_seed=4)
    run.model.train()
    before = module_bits(run.model)
    with pytest.raises(RuntimeError, match=r"eval mode.*model\.eval\(\)"):
        run.model.forward_coalitions(run.validation[0][0], [frozenset()])
    assert module_bits(run.model) == before


@pytest.mark.parametrize(
    ("coalitions", "message"),
    [
        ([frozenset({"r9c9"})], r"names \['r9c9'\], but blended seeds are in \['r0c0'\]"),
        ([frozenset({"r0c0", "r0c1"})], r"names \['r0c1'\]"),  # in TRAINING
        ([frozenset({"r0c0"}), frozenset(), frozenset({"r0c0"})], "listed twice"),
    ],
)
def test_bad_coalitions_are_refused(coalitions: list[Coalition], message: str) -> None:
    run = grown("mlp", ["BLENDING", "TRAINING", "DORMANT", "DORMANT", "DORMANT"], rng_seed=5)
    with pytest.raises(ValueError, match=message):
        run.model.forward_coalitions(make_batches("mlp")[0][0], coalitions)
