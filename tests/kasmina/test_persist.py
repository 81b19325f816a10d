"""Saving and rebuilding a growing model: exact at every stage, in a fresh process, and never half a load."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch import nn

from esper.kasmina import Host, ModelState, capture, load_model, restore, save_model, wrap_sequential
from esper.kasmina.layers import seeded
from esper.kasmina.persist import _digest, decode_facts, encode_facts
from esper.leyline import LifecycleOp, ModelFileError, SeedStage
from esper.tolaria.optim import GrowingOptimizer
from tests.growing import (
    LENIENT,
    OPTIMIZERS,
    TOPOLOGIES,
    Run,
    assert_optimizer_matches,
    bits,
    germinate,
    grow_to,
    make_batches,
    run_bits,
    start,
    step,
)

STAGES = [stage.name for stage in SeedStage]
MID_STEP = ("GERMINATED", "PRUNED")
S = SeedStage


def at_stage(topology: str, stage: str, optim: str = "adamw") -> Run:
    """A run with a fossil or a rested slot beside the slot in question."""
    run = start(topology, OPTIMIZERS[optim], batches=make_batches(topology, 2, rows=8))
    slot = run.slot_ids[1]
    if stage == "GERMINATED":
        step(run)
        run.model.germinate(slot, _blueprint(topology), "gated", rng_seed=3)
    elif stage == "PRUNED":
        germinate(run, slot, blend="gated")
        run.model.prune(slot)
    elif stage != "DORMANT":
        grow_to(run, slot, stage, blend="gated")
    assert run.model.slot(slot).stage.name == stage
    return run


def _blueprint(topology: str) -> str:
    return {"mlp": "mlp.glu", "cnn": "cnn.conv", "transformer": "transformer.attention"}[topology]


def rebuilt(path: Path, run: Run, host_factory: Callable[[], Host] | None = None) -> Run:
    """The saved run, from its file, as a new process would build it."""
    loaded = load_model(path, host_factory=host_factory)
    optimizer = GrowingOptimizer(run.optimizer.spec, loaded.model.parameter_groups(), loaded.model.lifecycle.clip_norm)
    optimizer.load_named_state(loaded.optimizer_state)
    loaded.model.bind(optimizer)
    epochs = loaded.extra["epochs_done"]
    return Run(loaded.model, optimizer, run.batches, run.validation, epochs_done=epochs)


def facts(run: Run) -> dict[str, Any]:
    model = run.model
    return {
        "slots": [slot.facts() for slot in model.all_slots()],
        "reports": model.reports(),
        "version": model.topology_version,
        "losses": (model.train_loss, model.val_loss),
        "mode": model.training,
    }


def two_more_steps(run: Run) -> str:
    """Continues a run, growing elsewhere, and digests all of it."""
    step(run)
    germinate(run, run.slot_ids[2])
    digest = hashlib.sha256()
    for name, value in sorted(run_bits(run).items()):
        digest.update(name.encode() + value)
    digest.update(repr([slot.facts() for slot in run.model.all_slots()]).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_rebuilt_model_is_and_goes_on_as_the_original(topology: str, stage: str, tmp_path: Path) -> None:
    run = at_stage(topology, stage, "sgd" if topology == "cnn" else "adamw")
    path = tmp_path / "model.safetensors"
    save_model(run.model, path, optimizer=run.optimizer, extra={"epochs_done": run.epochs_done})
    again = rebuilt(path, run)
    assert run_bits(again) == run_bits(run)
    assert facts(again) == facts(run)
    assert_optimizer_matches(again)
    assert two_more_steps(again) == two_more_steps(run)
    assert_optimizer_matches(again)


CONTINUE = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.growing import start, make_batches, OPTIMIZERS
from tests.kasmina.test_persist import rebuilt, two_more_steps
for path in sorted(Path(sys.argv[1]).iterdir()):
    topology, stage, optim = path.stem.split("-")
    like = start(topology, OPTIMIZERS[optim], batches=make_batches(topology, 2, rows=8))
    print(path.stem, two_more_steps(rebuilt(path, like)))
"""


def fresh_process(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment)


def test_a_fresh_process_goes_on_to_the_bit(tmp_path: Path) -> None:
    expected = {}
    for topology, stage, optim in [
        *(("mlp", stage, "adamw") for stage in STAGES),
        ("cnn", "TRAINING", "adamw"),
        ("cnn", "BLENDING", "sgd"),
        ("transformer", "TRAINING", "sgd"),
        ("transformer", "FOSSILIZED", "adamw"),
    ]:
        run = at_stage(topology, stage, optim)
        name = f"{topology}-{stage}-{optim}"
        save_model(
            run.model, tmp_path / f"{name}.safetensors", optimizer=run.optimizer, extra={"epochs_done": run.epochs_done}
        )
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        expected[name] = two_more_steps(run)
        torch.set_num_threads(threads)
    done = fresh_process(CONTINUE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert dict(line.split() for line in done.stdout.splitlines()) == expected


def test_a_slot_that_once_held_a_seed_is_saved_as_empty(tmp_path: Path) -> None:
    run = start("mlp")
    grow_to(run, "r0c1", "EMBARGOED")
    while run.model.slot("r0c1").stage is not S.DORMANT:
        step(run)
    save_model(run.model, tmp_path / "m.safetensors")
    loaded = load_model(tmp_path / "m.safetensors")
    assert loaded.model.slot("r0c1").facts() == run.model.slot("r0c1").facts()
    assert loaded.model.slot("r0c1").num_germinations == 1
    assert loaded.optimizer_state == {}


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    run = start("transformer")
    path = tmp_path / "m.safetensors"
    save_model(run.model, path)
    with safe_open(str(path), framework="pt") as opened:
        names = [name for name in opened.keys() if name.endswith("token")]  # noqa: SIM118
    assert names == ["host.segments.0.token"]
    host = load_model(path).model.host
    assert host.segments[0].token is host.segments[-1].token


def test_everything_that_matters_is_saved(tmp_path: Path) -> None:
    run = start("cnn", blueprints=["cnn.conv", "cnn.inert"])
    germinate(run, "r0c0", "cnn.inert")
    run.model.val_loss, run.model.train_loss = math.inf, math.nan
    path = tmp_path / "m.safetensors"
    extra = {"task": "digits", "scores": [1.5, -math.inf, None], "nested": {"yes": True}}
    save_model(run.model, path, extra=extra)
    loaded = load_model(path)
    assert loaded.extra == extra
    assert loaded.model.lifecycle == LENIENT
    assert loaded.model.offered == ("cnn.conv", "cnn.inert")
    assert loaded.model.layout == run.model.layout
    assert loaded.model.val_loss == math.inf
    assert loaded.model.train_loss is not None
    assert math.isnan(loaded.model.train_loss)
    assert bits(loaded.model.sample) == bits(run.model.sample)


def test_a_double_precision_model_comes_back_as_one(tmp_path: Path) -> None:
    run = start("mlp")
    run.model.double()
    run.model.germinate("r0c1", "mlp.glu", "gated", rng_seed=1)
    save_model(run.model, tmp_path / "m.safetensors")
    again = load_model(tmp_path / "m.safetensors").model
    assert {p.dtype for p in again.parameters()} == {torch.float64}
    assert {n: bits(t) for n, t in again.state_dict().items()} == {
        n: bits(t) for n, t in run.model.state_dict().items()
    }


def test_saving_and_loading_draw_nothing(tmp_path: Path) -> None:
    run = at_stage("mlp", "BLENDING")
    state = torch.get_rng_state()
    save_model(run.model, tmp_path / "m.safetensors", optimizer=run.optimizer)
    load_model(tmp_path / "m.safetensors")
    assert torch.equal(state, torch.get_rng_state())


# ---- damaged files


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    run = at_stage("mlp", "TRAINING")
    path = tmp_path_factory.mktemp("saved") / "m.safetensors"
    save_model(run.model, path, optimizer=run.optimizer)
    return path.read_bytes()


def refuse(path: Path, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        load_model(path)
    assert path.name in str(caught.value)


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_is_noticed(saved: bytes, tmp_path: Path, data: st.DataObject) -> None:
    where = data.draw(st.integers(0, 8 * len(saved) - 1))
    damaged = bytearray(saved)
    damaged[where // 8] ^= 1 << where % 8
    path = tmp_path / "m.safetensors"
    path.write_bytes(damaged)
    refuse(path, r"damaged|is a pickle|not one written")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_noticed(saved: bytes, share: float, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(saved[: int(share * len(saved))])
    refuse(path, "damaged or not a safetensors file")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_is_never_opened(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(pickle.dumps({"weights": [1, 2, 3]}, protocol=protocol))
    refuse(path, "is a pickle file; Esper reads safetensors files only")


def test_a_torch_file_is_never_opened(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "m.pt")
    refuse(tmp_path / "m.pt", "is a pickle file")


def test_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(to_safetensors({"weight": torch.zeros(3)}))
    refuse(path, "not one written by Esper's save_model")
    path.write_text("hello, this is a text file")
    refuse(path, "damaged or not a safetensors file")
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "missing.safetensors")


@pytest.mark.parametrize("start_bytes", [b"PK", b"\x80\x02", b"\x80\x04"], ids=["zip", "pickle2", "pickle4"])
def test_a_file_whose_length_looks_like_a_pickle_is_read(start_bytes: bytes, tmp_path: Path) -> None:
    """The first bytes of a safetensors file are the length of its header, which can be any number."""
    run, path = start("mlp"), tmp_path / "m.safetensors"
    save_model(run.model, path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    padding = (int.from_bytes(start_bytes, "little") - length) % 65536
    for fine_tuning in range(-64, 64):
        save_model(run.model, path, extra={"note": "x" * (padding + fine_tuning)})
        if path.read_bytes()[:2] == start_bytes:
            break
    assert path.read_bytes()[:2] == start_bytes
    assert "note" in load_model(path).extra


# ---- well-formed files that do not fit


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def rewrite(saved: bytes, path: Path, change: Change) -> None:
    """Changes a file and seals it again, so that only its meaning is wrong."""
    path.write_bytes(saved)
    with safe_open(str(path), framework="pt") as opened:
        recorded = decode_facts(opened.metadata()["esper"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(recorded, tensors)
    text = encode_facts(recorded)
    path.write_bytes(to_safetensors(tensors, {"esper": text, "sha256": _digest(text, tensors)}))


CHANGES: dict[str, tuple[Change, str]] = {
    "blueprint": (lambda f, t: f["slots"]["r0c1"].update(blueprint="mlp.magic"), "unknown blueprint 'mlp.magic'"),
    "other blueprint": (lambda f, t: f["slots"]["r0c1"].update(blueprint="mlp.lora"), "slots.r0c1.seed"),
    "older seed": (
        lambda f, t: f["slots"]["r0c1"].update(blueprint_version=0),
        "'mlp.mlp_small' was saved in version 0, and this Esper builds version 2",
    ),
    "blend": (lambda f, t: f["slots"]["r0c1"].update(blend="fade"), "unknown blend 'fade'"),
    "ungated blend": (lambda f, t: f["slots"]["r0c1"].update(blend="linear"), "slots.r0c1.gate"),
    "stage": (lambda f, t: f["slots"]["r0c1"].update(stage="ASLEEP"), "ASLEEP"),
    "empty stage": (lambda f, t: f["slots"]["r0c1"].update(stage="DORMANT"), "belongs to nothing"),
    "slot": (lambda f, t: f["slots"].update(r9c9=f["slots"].pop("r0c2")), "r9c9"),
    "missing slot": (lambda f, t: f["slots"].pop("r0c1"), "belongs to nothing"),
    "host kind": (lambda f, t: f["host"].update(kind="rnn"), "unknown host kind 'rnn'"),
    "host size": (lambda f, t: f["host"]["kwargs"].update(hidden=[8, 9]), "host.segments"),
    "host argument": (lambda f, t: f["host"]["kwargs"].update(depth=3), "depth"),
    "host text": (lambda f, t: f.update(host="mlp"), "m.safetensors: "),
    "slots of another kind": (lambda f, t: f.update(slots=[1]), "m.safetensors: "),
    "slot of another kind": (lambda f, t: f["slots"].update(r0c1=3), "m.safetensors: "),
    "no format": (lambda f, t: f.pop("format"), "format None"),
    "format": (lambda f, t: f.update(format=99), "format 99, this version of Esper reads format 1"),
    "limit": (lambda f, t: f["lifecycle"].update(rho=-1.0), "rho must be"),
    "unknown limit": (lambda f, t: f["lifecycle"].update(patience=3), "patience"),
    "missing limit": (lambda f, t: f["lifecycle"].pop("rho"), "rho"),
    "missing fact": (lambda f, t: f.pop("topology_version"), "topology_version"),
    "missing counter": (lambda f, t: f["slots"]["r0c1"].pop("age_epochs"), "age_epochs"),
    "dropped weight": (lambda f, t: t.pop("host.segments.1.0.weight"), "'host.segments.1.0.weight' is missing"),
    "dropped seed": (lambda f, t: t.pop("slots.r0c1.seed.gamma"), "'slots.r0c1.seed.gamma' is missing"),
    "dropped sample": (lambda f, t: t.pop("sample"), "sample"),
    "extra weight": (lambda f, t: t.update({"host.more": torch.zeros(2)}), "'host.more' belongs to nothing"),
    "extra state": (lambda f, t: t.update({"optimizer.host.more.step": torch.zeros(())}), "belongs to nothing"),
    "shape": (lambda f, t: t.update({"host.segments.1.0.bias": torch.zeros(3)}), r"\(3,\), the architecture needs"),
    "type": (lambda f, t: t.update({"host.segments.3.bias": torch.zeros(4).double()}), "torch.float64"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_does_not_fit_names_the_first_offender(name: str, saved: bytes, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    path = tmp_path / "m.safetensors"
    rewrite(saved, path, lambda f, t: None)
    load_model(path)
    rewrite(saved, path, change)
    refuse(path, message)


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "null", "{", '{"$float": [1]}', '{"a": {"$float": "much"}}'])
def test_facts_that_nobody_wrote_are_refused(text: str, tmp_path: Path) -> None:
    path, tensors = tmp_path / "m.safetensors", {"a": torch.zeros(1)}
    path.write_bytes(to_safetensors(tensors, {"esper": text, "sha256": _digest(text, tensors)}))
    refuse(path, "its facts are")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    refuse(tmp_path / "m.safetensors", "is not a file")


# ---- writing


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = start("mlp"), tmp_path / "m.safetensors"
    save_model(run.model, path)
    before = path.read_bytes()
    step(run)

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match="no space"):
                save_model(run.model, path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == [path.name]
    save_model(run.model, path)
    assert path.read_bytes() != before


def test_a_saved_file_has_the_usual_permissions(tmp_path: Path) -> None:
    run, path = start("mlp"), tmp_path / "m.safetensors"
    save_model(run.model, path)
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        save_model(start("mlp").model, tmp_path / "nowhere" / "m.safetensors")


# ---- hosts of your own


def my_host() -> Host:
    with seeded(5):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return wrap_sequential(model, {"r0c0": 1}, "mlp", make_batches("mlp")[0][0])


def test_a_wrapped_model_is_rebuilt_by_its_factory(tmp_path: Path) -> None:
    run = start("mlp", host=my_host())
    grow_to(run, "r0c0", "BLENDING", "mlp.glu", "gated")
    path = tmp_path / "m.safetensors"
    save_model(run.model, path, optimizer=run.optimizer, extra={"epochs_done": run.epochs_done})
    refuse(path, "pass host_factory")
    again = rebuilt(path, run, my_host)
    assert run_bits(again) == run_bits(run)
    step(again)
    step(run)
    assert run_bits(again) == run_bits(run)


def test_a_factory_that_builds_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_model(start("mlp", host=my_host()).model, path)

    def wider() -> Host:
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
        return wrap_sequential(model, {"r0c0": 1}, "mlp", make_batches("mlp")[0][0])

    def elsewhere() -> Host:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        return wrap_sequential(model, {"r0c1": 1}, "mlp", make_batches("mlp")[0][0])

    for factory, message in ((wider, r"host\.segments\.0\.weight"), (elsewhere, "unknown slots")):
        with pytest.raises(ModelFileError, match=message):
            load_model(path, host_factory=factory)


# ---- restoring in place


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("stage", [s for s in STAGES if s not in MID_STEP])
def test_restore_undoes_growth_pruning_and_damage_to_the_bit(stage: str, optim: str) -> None:
    run, twin = at_stage("mlp", stage, optim), at_stage("mlp", stage, optim)
    state = capture(run.model, run.optimizer)
    before, known = dict(run_bits(run)), facts(run)
    epochs = run.epochs_done
    if S[stage].is_live:
        step(run, LifecycleOp.PRUNE, "r0c1")
    grow_to(run, "r0c0", "FOSSILIZED", "mlp.lora")
    germinate(run, "r0c2", blend="multiply")
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(math.nan)
    restore(run.model, state, run.optimizer)
    assert run_bits(run) == before
    assert facts(run) == known
    assert_optimizer_matches(run)
    run.epochs_done = epochs
    assert two_more_steps(run) == two_more_steps(twin)


def test_restore_keeps_the_identity_of_host_parameters() -> None:
    run = at_stage("cnn", "HOLDING")
    state = capture(run.model, run.optimizer)
    before = [id(p) for p in run.model.host.parameters()]
    step(run)
    restore(run.model, state, run.optimizer)
    assert [id(p) for p in run.model.host.parameters()] == before


def test_a_captured_state_does_not_follow_the_model() -> None:
    run = at_stage("mlp", "TRAINING")
    state = capture(run.model, run.optimizer)
    kept = {name: bits(tensor) for name, tensor in state.tensors.items()}
    text = encode_facts(state.facts)
    step(run, LifecycleOp.ADVANCE, "r0c1")
    assert {name: bits(tensor) for name, tensor in state.tensors.items()} == kept
    assert encode_facts(state.facts) == text


@pytest.mark.parametrize("wrong", ["topology", "width", "slots", "tensor", "optimizer"])
def test_a_state_of_another_network_is_refused_whole(wrong: str) -> None:
    run = at_stage("mlp", "BLENDING")
    germinate(run, "r0c2")
    before, known = dict(run_bits(run)), facts(run)
    if wrong == "topology":
        other = at_stage("cnn", "TRAINING")
        state = capture(other.model, other.optimizer)
    elif wrong == "width":
        host = wrap_sequential(
            nn.Sequential(nn.Identity(), nn.Linear(6, 9), nn.Linear(9, 8), nn.Linear(8, 4)),
            {"r0c0": 0, "r0c1": 1, "r0c2": 2},
            "mlp",
            make_batches("mlp")[0][0],
        )
        other = start("mlp", host=host)
        state = capture(other.model, other.optimizer)
    elif wrong == "slots":
        other = start("mlp", host=my_host())
        state = capture(other.model, other.optimizer)
    elif wrong == "tensor":
        whole = capture(at_stage("mlp", "TRAINING").model, at_stage("mlp", "TRAINING").optimizer)
        tensors = {n: t for n, t in whole.tensors.items() if n != "slots.r0c1.seed.gamma"}
        state = ModelState(facts=whole.facts, tensors=tensors)
    else:
        state = capture(at_stage("mlp", "TRAINING").model)
    with pytest.raises(ModelFileError):
        restore(run.model, state, run.optimizer)
    assert run_bits(run) == before
    assert facts(run) == known
    assert_optimizer_matches(run)


def test_a_sample_in_another_memory_order_can_be_saved(tmp_path: Path) -> None:
    run = start("cnn", OPTIMIZERS["sgd"])
    run.model.sample = run.model.sample.repeat(1, 3, 1, 1).contiguous(memory_format=torch.channels_last)
    assert all(tensor.is_contiguous() for tensor in capture(run.model).tensors.values())


def test_facts_are_plain_json() -> None:
    run = at_stage("mlp", "TRAINING")
    text = encode_facts(capture(run.model, run.optimizer).facts)
    assert decode_facts(text) == json.loads(text)
