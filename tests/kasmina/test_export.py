"""A grown network leaves Esper as a plain module, as files that run without Esper, and as bare weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import esper.kasmina.export as export_code
from esper.kasmina import export_model, export_module
from esper.leyline import SeedStage
from tests.growing import TOPOLOGIES, Run, bits, germinate, grow_to, make_batches, randomise_seed, run_bits, start

BLEND_OF = {"mlp": "gated", "cnn": "multiply", "transformer": "linear_fast"}


def grown(topology: str) -> Run:
    """A fossil, a seed half blended in and one that still trains behind the host."""
    run = start(topology, batches=make_batches(topology, 2, rows=8))
    fossil, blending, training = run.slot_ids
    grow_to(run, fossil, "FOSSILIZED", blend=BLEND_OF[topology])
    germinate(run, training)
    grow_to(run, blending, "BLENDING", blend="linear")
    for rng_seed, slot_id in enumerate(run.slot_ids):
        randomise_seed(run, slot_id, rng_seed)
    assert [slot.stage for slot in run.model.all_slots()] == [S.FOSSILIZED, S.BLENDING, S.TRAINING]
    run.model.eval()
    return run


S = SeedStage


def committed(run: Run, x: torch.Tensor) -> torch.Tensor:
    return run.model.forward_coalitions(x, [frozenset({run.slot_ids[0]})])[0]


def everything(run: Run, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = run.model(x)
    return out


# ---- the plain module


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_plain_module_is_the_committed_network(topology: str) -> None:
    run = grown(topology)
    x = run.validation[0][0]
    before = dict(run_bits(run))
    plain, live = export_module(run.model), export_module(run.model, include_live=True)
    counts = run.model.param_counts()
    with torch.no_grad():
        assert bits(plain(x)) == bits(committed(run, x))
        assert bits(live(x)) == bits(everything(run, x))
        assert bits(plain(x)) != bits(live(x))
    assert sum(p.numel() for p in plain.parameters()) == counts.committed
    assert sum(p.numel() for p in live.parameters()) == counts.committed + run.model.slot(run.slot_ids[1]).num_params()
    assert not any(part.training for part in plain.modules())
    assert len(plain) == len(run.model.host.segments) + 1
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert run_bits(run) == before


def test_tied_weights_stay_tied() -> None:
    plain = export_module(grown("transformer").model)
    names = [name for name, _ in plain.named_parameters(remove_duplicate=False) if name.endswith("token")]
    assert len(names) == 2
    assert plain.get_parameter(names[0]) is plain.get_parameter(names[1])


def test_an_inert_fossil_changes_no_bit() -> None:
    run = start("cnn", blueprints=["cnn.inert"])
    grow_to(run, "r0c0", "FOSSILIZED", "cnn.inert")
    run.model.eval()
    x = run.validation[0][0]
    with torch.no_grad():
        assert bits(run.model(x)) == bits(run.model.host(x)) == bits(export_module(run.model)(x))


# ---- files that run elsewhere

WITHOUT_ESPER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
try:
    import esper
except ImportError:
    pass
else:
    sys.exit("esper is importable here, so this proves nothing")
folder = Path(sys.argv[1])
for path in sorted(folder.glob("*.pt2")):
    x, expected = torch.load(path.with_suffix(".io"), weights_only=True)
    program = torch.export.load(path)
    run = program.module()
    same = torch.equal(run(x), expected)
    close = all(torch.allclose(run(x[:rows]), expected[:rows], atol=1e-5) for rows in (1, 2, 5))
    stored = {p.untyped_storage().data_ptr(): p.numel() for p in run.parameters()}  # tied names share storage
    print(path.stem, same, close, sum(stored.values()))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Path]]:
    folder = tmp_path_factory.mktemp("programs")
    made = {}
    for topology in TOPOLOGIES:
        run, path = grown(topology), folder / f"{topology}.pt2"
        export_model(run.model, path, include_live=topology == "cnn")
        made[topology] = (run, path)
    return made


def test_a_program_runs_where_esper_is_not_installed(programs: dict[str, tuple[Run, Path]], tmp_path: Path) -> None:
    expected = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for topology, (run, path) in programs.items():
        x = run.validation[0][0]
        out = everything(run, x) if topology == "cnn" else committed(run, x)
        torch.save((x, out.clone()), path.with_suffix(".io"))
        plain = export_module(run.model, include_live=topology == "cnn")
        expected[topology] = ["True", "True", str(sum(p.numel() for p in plain.parameters()))]
    torch.set_num_threads(threads)
    # -S and an own search path: site packages without any editable install of this project.
    site = str(Path(torch.__file__).parent.parent)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": site, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    folder = str(next(iter(programs.values()))[1].parent)
    done = subprocess.run(
        [sys.executable, "-S", "-c", WITHOUT_ESPER, folder],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()} == expected


def test_an_onnx_file_gives_the_same_results(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run, path = grown("cnn"), tmp_path / "net.onnx"
    export_model(run.model, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for rows in (1, 7):
        x = run.validation[0][0][:rows]
        (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert torch.allclose(torch.from_numpy(out), committed(run, x), atol=1e-4)


def test_onnx_without_its_packages_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install 'esper-growth\[onnx\]'"):
        export_model(start("mlp").model, tmp_path / "net.onnx")
    assert os.listdir(tmp_path) == []


# ---- bare weights


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_weights_rebuild_the_network_from_their_description(topology: str, tmp_path: Path) -> None:
    run, path = grown(topology), tmp_path / "net.safetensors"
    export_model(run.model, path)
    with safe_open(str(path), framework="pt") as opened:
        architecture = json.loads(opened.metadata()["architecture"])
    weights = load_file(path)
    slot = run.model.slot(run.slot_ids[0])
    assert architecture["host"] == {"kind": topology, "kwargs": dict(run.model.host.spec.kwargs)}
    assert architecture["grown"] == [
        {
            "after_segment": slot.spec.segment_idx,
            "reads_segment": slot.spec.segment_idx,
            "blueprint": slot.blueprint,
            "operator": slot.blend.operator if slot.blend else None,
            "alpha": 1.0,
        }
    ]
    plain = export_module(run.model)
    blank = export_module(run.model)
    with torch.no_grad():
        for tensor in blank.state_dict().values():
            tensor.zero_()
    blank.load_state_dict(weights | {name: weights[source] for name, source in architecture["tied"].items()})
    x = run.validation[0][0]
    with torch.no_grad():
        assert bits(blank(x)) == bits(plain(x))
    floats = sum(weights[name].numel() for name, _ in plain.named_parameters())
    assert floats == run.model.param_counts().committed


# ---- nothing wrong is kept


def test_an_unknown_ending_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'net\.bin': expected \.pt2, \.onnx or \.safetensors"):
        export_model(start("mlp").model, tmp_path / "net.bin")


@pytest.mark.parametrize("ending", ["pt2", "safetensors"])
def test_a_network_that_differs_from_the_model_is_not_kept(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = grown("mlp")
    path = tmp_path / f"net.{ending}"
    path.write_bytes(b"the old one")
    build = export_code.export_module

    def wrong(*args: object, **kwargs: object) -> nn.Sequential:
        network = build(*args, **kwargs)  # type: ignore[arg-type]
        with torch.no_grad():
            next(network.parameters()).add_(1e-3)
        return network

    monkeypatch.setattr(export_code, "export_module", wrong)
    with pytest.raises(ValueError, match="does not give the model's results"):
        export_model(run.model, path)
    assert path.read_bytes() == b"the old one"
    assert os.listdir(tmp_path) == [path.name]


def test_exporting_draws_nothing_and_changes_nothing(tmp_path: Path) -> None:
    run = grown("mlp")
    run.model.train()
    before, state = dict(run_bits(run)), torch.get_rng_state()
    export_model(run.model, tmp_path / "net.safetensors")
    assert run_bits(run) == before
    assert run.model.training
    assert torch.equal(state, torch.get_rng_state())
