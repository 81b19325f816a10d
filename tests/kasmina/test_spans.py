"""Spans: seeds that read one place of a host and add to a later one. Invisible at birth, like all, and like all saved,
exported and left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esper.kasmina import CNNHost, begin_epoch, export_model, export_module, load_model, save_model
from esper.leyline import IllegalOperation, SeedStage, SpanSource
from esper.tolaria.optim import GrowingOptimizer
from tests.growing import Run, bits, draw, germinate, grow_to, module_bits, randomise_seed, run_bits, start, step

SPANS = {"mlp": ("r2c0", "r3c0", "r3c1"), "cnn": ("r2c0", "r3c0", "r3c1")}
BLUEPRINT = {"mlp": "mlp.span", "cnn": "cnn.span"}


def spanned(topology: str) -> Run:
    """A slot in the middle, and spans around it."""
    return start(topology, slots=("r0c1", *SPANS[topology]))


def fully_grown(topology: str) -> Run:
    run = spanned(topology)
    grow_to(run, "r0c1", "FOSSILIZED")
    for slot_id in SPANS[topology]:
        grow_to(run, slot_id, "FOSSILIZED", BLUEPRINT[topology], blend="gated" if slot_id == "r3c0" else "linear_fast")
    for rng_seed, slot_id in enumerate(run.slot_ids):
        randomise_seed(run, slot_id, rng_seed)
    run.model.eval()
    return run


def test_a_host_names_its_spans_and_says_what_they_read() -> None:
    host = CNNHost(in_channels=1, channels=[4, 8], kernel=3, pool=[True, False], classes=10, generator=draw(1))
    assert list(host.places) == ["r0c0", "r1c0", "r2c0", "r0c1", "r2c1", "r3c0", "r3c1", "r3c2"]
    run = start("cnn", host=host, slots=["r2c0", "r3c1"], batches=[(torch.zeros(4, 1, 8, 8), torch.zeros(4).long())])
    around, to_logits = (slot.spec for slot in run.model.all_slots())
    assert around.source == SpanSource(segment_idx=-1, depth_share=0.0, channels=1, positions=64, stride=2)
    assert (around.segment_idx, around.channels, around.positions) == (1, 4, 16)
    assert to_logits.source == SpanSource(segment_idx=1, depth_share=1 / 3, channels=4, positions=16, stride=None)
    assert (to_logits.segment_idx, to_logits.channels, to_logits.positions) == (3, 10, 1)


def test_spans_are_offered_only_when_they_are_named() -> None:
    assert start("cnn").slot_ids == ("r0c0", "r1c0", "r0c1")


def test_a_seed_that_is_no_span_does_not_fit_a_span_nor_a_span_a_slot() -> None:
    run = spanned("cnn")
    for slot_id, blueprint in (("r2c0", "cnn.conv"), ("r0c1", "cnn.span")):
        assert not run.model.layout.card(slot_id, blueprint).fits
        with pytest.raises(IllegalOperation, match="fits"):
            run.model.germinate(slot_id, blueprint, "linear", rng_seed=1)


@pytest.mark.parametrize("topology", SPANS)
def test_a_training_span_leaves_the_host_alone_to_the_bit(topology: str) -> None:
    alone, grown = start(topology), spanned(topology)
    for slot_id, blend in zip(SPANS[topology], ("linear", "gated", "multiply"), strict=True):
        germinate(grown, slot_id, BLUEPRINT[topology], blend)
        step(alone)
    for _ in range(2):
        step(alone)
        step(grown)
    assert module_bits(alone.model.host) == module_bits(grown.model.host)
    for slot_id in SPANS[topology]:
        report = grown.model.report(slot_id)
        assert report.stage is SeedStage.TRAINING
        assert report.predicted_gain is not None
        assert report.residual_ratio is not None
        assert report.residual_ratio > 0


def test_a_span_reads_what_the_slot_at_its_source_puts_out() -> None:
    run = start("cnn", slots=["r0c0", "r1c0", "r2c1"])
    for slot_id, blueprint in (("r1c0", "cnn.conv"), ("r2c1", "cnn.span")):
        grow_to(run, slot_id, "FOSSILIZED", blueprint)
        randomise_seed(run, slot_id)
    run.model.eval()
    x = run.validation[0][0]
    first, pool, second, head = run.model.host.segments
    with torch.no_grad():
        read = run.model.slot("r1c0")(pool(first(x)))
        span = run.model.slot("r2c1").seed
        assert span is not None
        assert bits(run.model(x)) == bits(head(second(read) + span(read)))


@pytest.mark.parametrize("topology", SPANS)
def test_spans_come_back_from_a_file_and_go_on_to_the_bit(topology: str, tmp_path: Path) -> None:
    run = spanned(topology)
    grow_to(run, SPANS[topology][0], "HOLDING", BLUEPRINT[topology])
    germinate(run, SPANS[topology][1], BLUEPRINT[topology], "gated")
    save_model(run.model, tmp_path / "model.safetensors", optimizer=run.optimizer)
    loaded = load_model(tmp_path / "model.safetensors")
    optimizer = GrowingOptimizer(run.optimizer.spec, loaded.model.parameter_groups(), loaded.model.lifecycle.clip_norm)
    optimizer.load_named_state(loaded.optimizer_state)
    loaded.model.bind(optimizer)
    other = Run(loaded.model, optimizer, run.batches, run.validation, epochs_done=run.epochs_done)
    assert run_bits(other) == run_bits(run)
    step(run)
    step(other)
    assert run_bits(other) == run_bits(run)


@pytest.mark.parametrize("topology", SPANS)
def test_an_exported_network_has_its_spans(topology: str, tmp_path: Path) -> None:
    run = fully_grown(topology)
    x = run.validation[0][0]
    with torch.no_grad():
        expected = run.model(x)
        assert bits(export_module(run.model)(x)) == bits(expected)
    export_model(run.model, tmp_path / "net.pt2")  # compares the program with the model before it keeps the file
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    assert bits(loaded(x)) == bits(expected)
    (without,) = run.model.forward_coalitions(x, [frozenset({"r0c1"})])
    assert bits(without) != bits(expected)


def test_an_exported_onnx_file_has_its_spans(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    export_model(fully_grown("cnn").model, tmp_path / "net.onnx")  # runs it and compares before it is kept


def test_a_pruned_span_leaves_nothing_behind() -> None:
    run = spanned("mlp")
    before = module_bits(run.model)
    run.model.germinate("r3c0", "mlp.span", "linear", rng_seed=1)
    begin_epoch(run.model)
    run.model.slot("r3c0").age_epochs = 1
    run.model.prune("r3c0")
    assert module_bits(run.model) == before
    assert run.model.num_live == 0
