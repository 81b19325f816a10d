"""Taking a grown network out of Esper: as a plain module, as files that run without Esper, or as bare weights.

Every file is loaded back and compared on the model's own sample before it is kept.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from esper.kasmina.blueprints import Residual
from esper.kasmina.layers import evaluating
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.persist import untied, write_file
from esper.kasmina.slot import GateNetwork, SeedSlot, delta, mix
from esper.leyline import SeedStage

ONNX_TOLERANCE = 1e-4


class GrownPart(nn.Module):
    """A kept seed as an ordinary residual layer."""

    def __init__(self, seed: Residual, gate: GateNetwork | None, operator: str, alpha: float) -> None:
        super().__init__()
        self.seed = seed
        self.gate = gate
        self.operator = operator
        self.alpha = alpha

    def forward(self, h: Tensor) -> Tensor:
        return mix(h, delta(self.operator, h, self.seed(h), self.gate), self.alpha)


def export_module(model: MorphogeneticModel, *, include_live: bool = False) -> nn.Sequential:
    """A copy of the grown network without slots, in eval mode: what you would have built by hand.

    Args:
        model: The growing model; it is not changed.
        include_live: Keep blended seeds that are not fossils too, frozen at their current alpha.
    """
    parts: list[nn.Module] = []
    slot_after = {slot.spec.segment_idx: slot for slot in model.all_slots()}
    for index, segment in enumerate(model.host.segments):
        parts.append(segment)
        slot = slot_after.get(index)
        if slot is not None and _is_kept(slot, include_live):
            assert slot.seed is not None
            assert slot.blend is not None
            parts.append(GrownPart(slot.seed, slot.gate, slot.blend.operator, slot.alpha))
    # One deepcopy of the whole keeps tied weights tied.
    return copy.deepcopy(nn.Sequential(*parts)).eval()


def _is_kept(slot: SeedSlot, include_live: bool) -> bool:
    return slot.stage.is_blended if include_live else slot.stage is SeedStage.FOSSILIZED


def export_model(model: MorphogeneticModel, path: str | Path, *, include_live: bool = False) -> None:
    """Writes the grown network in the format that the ending of `path` names.

    `.pt2` loads with torch alone (`torch.export.load(path).module()`), `.onnx` with any ONNX runtime (needs the
    `onnx` extra), `.safetensors` holds the bare weights with a description of the architecture in its metadata. The
    number of rows is free, other sizes are those of the model's sample.

    Raises:
        ValueError: Another ending, or the written network does not give the model's results.
        ImportError: ONNX was asked for and its packages are not installed.
    """
    path = Path(path)
    writers: dict[str, Callable[[nn.Sequential, Tensor], bytes]] = {".pt2": _pt2, ".onnx": _onnx}
    network = export_module(model, include_live=include_live)
    _check(network, model, include_live)
    if path.suffix == ".safetensors":
        content = _weights(network, model, include_live)
    elif path.suffix in writers:
        content = writers[path.suffix](network, model.sample)
    else:
        raise ValueError(f"cannot tell the format of {path.name!r}: expected .pt2, .onnx or .safetensors")
    write_file(path, content)


def _check(network: nn.Sequential, model: MorphogeneticModel, include_live: bool) -> None:
    kept = frozenset(slot.spec.slot_id for slot in model.all_slots() if _is_kept(slot, include_live))
    with evaluating(model):
        (expected,) = model.forward_coalitions(model.sample, [kept])
        if not torch.equal(network(model.sample), expected):
            raise ValueError("the network without slots does not give the model's results")


def _pt2(network: nn.Sequential, sample: Tensor) -> bytes:
    program = torch.export.export(network, (sample,), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    content = buffer.getvalue()
    loaded = torch.export.load(io.BytesIO(content)).module()
    with torch.no_grad():
        if not torch.equal(loaded(sample), network(sample)):
            raise ValueError("the exported program does not reproduce the model's output")
    return content


def _onnx(network: nn.Sequential, sample: Tensor) -> bytes:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("ONNX export needs the optional packages: pip install 'esper-growth[onnx]'") from error
    shapes = ({0: torch.export.Dim("rows", min=1)},)
    program = torch.onnx.export(network, (sample,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: sample.numpy()})
    with torch.no_grad():
        difference = (torch.from_numpy(result) - network(sample)).abs().max().item()
    if not difference <= ONNX_TOLERANCE:
        raise ValueError(f"the ONNX program differs from the model by {difference} (limit {ONNX_TOLERANCE})")
    return bytes(content)


def _weights(network: nn.Sequential, model: MorphogeneticModel, include_live: bool) -> bytes:
    shared, tied = untied(network)
    tensors = {name: tensor.detach().contiguous() for name, tensor in shared.items()}
    kept = [slot for slot in model.all_slots() if _is_kept(slot, include_live)]
    architecture = {
        "host": {"kind": model.host.spec.kind, "kwargs": dict(model.host.spec.kwargs)},
        "grown": [
            {
                "after_segment": slot.spec.segment_idx,
                "blueprint": slot.blueprint,
                "operator": slot.blend.operator if slot.blend else None,
                "alpha": slot.alpha,
            }
            for slot in kept
        ],
        "modules": [type(part).__name__ for part in network],
        "tied": tied,
    }
    content = to_safetensors(tensors, {"architecture": json.dumps(architecture, sort_keys=True)})
    if not all(torch.equal(tensor, tensors[name]) for name, tensor in from_safetensors(content).items()):
        raise ValueError("the written weights do not read back as they were")
    return content
