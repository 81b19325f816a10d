"""Taking a grown network out of Esper: as a plain module, as files that run without Esper, or as bare weights.

Every file is loaded back and compared on the model's own sample before it is kept.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from esper.kasmina.blueprints import Residual
from esper.kasmina.hosts import INPUT
from esper.kasmina.layers import evaluating
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.persist import untied, write_file
from esper.kasmina.slot import GateNetwork, SeedSlot, delta, mix
from esper.leyline import SeedStage

ONNX_TOLERANCE = 1e-4


class GrownNetwork(nn.Sequential):
    """Parts one after the other, some of which also read what an earlier one put out.

    Args:
        parts: In order.
        sources: Position of a part -> position of the part it reads besides; -1 for the input.
    """

    def __init__(self, parts: Sequence[nn.Module], sources: Mapping[int, int]) -> None:
        super().__init__(*parts)
        self.sources = dict(sources)

    def forward(self, x: Tensor) -> Tensor:
        kept = {INPUT: x}
        for position, part in enumerate(self):
            x = part(x, kept[self.sources[position]]) if position in self.sources else part(x)
            if position in self.sources.values():
                kept[position] = x
        return x


class GrownPart(nn.Module):
    """A kept seed as an ordinary residual layer."""

    def __init__(self, seed: Residual, gate: GateNetwork | None, operator: str, alpha: float) -> None:
        super().__init__()
        self.seed = seed
        self.gate = gate
        self.operator = operator
        self.alpha = alpha

    def forward(self, h: Tensor, source: Tensor | None = None) -> Tensor:
        residual = self.seed(h if source is None else source)
        return mix(h, delta(self.operator, h, residual, self.gate), self.alpha)


def export_module(model: MorphogeneticModel, *, include_live: bool = False) -> nn.Sequential:
    """A copy of the grown network without slots, in eval mode: what you would have built by hand.

    Args:
        model: The growing model; it is not changed.
        include_live: Keep blended seeds that are not fossils too, frozen at their current alpha.
    """
    parts: list[nn.Module] = []
    sources: dict[int, int] = {}
    ends = {INPUT: INPUT}
    index = INPUT
    for segment, slot in model.places():
        if segment is not None:
            index += 1
            parts.append(segment)
        if slot is not None and _is_kept(slot, include_live):
            assert slot.seed is not None
            assert slot.blend is not None
            if slot.spec.source is not None:
                sources[len(parts)] = ends[slot.spec.source.segment_idx]
            parts.append(GrownPart(slot.seed, slot.gate, slot.blend.operator, slot.alpha))
        ends[index] = len(parts) - 1
    # One deepcopy of the whole keeps tied weights tied.
    return copy.deepcopy(GrownNetwork(parts, sources)).eval()


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
    check_ending(path)
    network = export_module(model, include_live=include_live)
    _check(network, model, include_live)
    if path.suffix == ".safetensors":
        content = _weights(network, model, include_live)
    else:
        content = to_program(path.suffix, network, (model.sample,), ({0: torch.export.Dim("rows", min=1)},))
    write_file(path, content)


def _check(network: nn.Sequential, model: MorphogeneticModel, include_live: bool) -> None:
    kept = frozenset(slot.spec.slot_id for slot in model.all_slots() if _is_kept(slot, include_live))
    with evaluating(model):
        (expected,) = model.forward_coalitions(model.sample, [kept])
        if not torch.equal(network(model.sample), expected):
            raise ValueError("the network without slots does not give the model's results")


def check_ending(path: Path) -> None:
    """Refuses a path whose ending names no format, with a ValueError."""
    if path.suffix not in (".pt2", ".onnx", ".safetensors"):
        raise ValueError(f"cannot tell the format of {path.name!r}: expected .pt2, .onnx or .safetensors")


def to_program(ending: str, network: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> bytes:
    """A network as a `.pt2` or `.onnx` program, loaded back and compared; results are a tensor or a mapping of some.

    Raises:
        ValueError: The program gives other results.
        ImportError: ONNX was asked for and its packages are not installed.
    """
    return _pt2(network, inputs, shapes) if ending == ".pt2" else _onnx(network, inputs, shapes)


def _pt2(network: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> bytes:
    program = torch.export.export(network, inputs, dynamic_shapes=shapes)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    content = buffer.getvalue()
    loaded = torch.export.load(io.BytesIO(content)).module()
    with torch.no_grad():
        pairs = zip(_outputs(loaded(*inputs)), _outputs(network(*inputs)), strict=True)
        if not all(torch.allclose(found, wanted, rtol=0.0, atol=0.0, equal_nan=True) for found, wanted in pairs):
            raise ValueError("the exported program does not reproduce the model's output")
    return content


def _onnx(network: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> bytes:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("ONNX export needs the optional packages: pip install 'esper-growth[onnx]'") from error
    program = torch.onnx.export(network, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    feeds = {entry.name: tensor.numpy() for entry, tensor in zip(session.get_inputs(), inputs, strict=True)}
    with torch.no_grad():
        expected = _outputs(network(*inputs))
    for found, wanted in zip(session.run(None, feeds), expected, strict=True):
        difference = (torch.from_numpy(found) - wanted).abs().max().item()
        if not difference <= ONNX_TOLERANCE:
            raise ValueError(f"the ONNX program differs from the model by {difference} (limit {ONNX_TOLERANCE})")
    return content


def _outputs(output: Tensor | Mapping[str, Tensor]) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output.values())


def _weights(network: nn.Sequential, model: MorphogeneticModel, include_live: bool) -> bytes:
    shared, tied = untied(network)
    tensors = {name: tensor.detach().contiguous() for name, tensor in shared.items()}
    kept = [slot for slot in model.all_slots() if _is_kept(slot, include_live)]
    architecture = {
        "host": asdict(model.host.spec),
        "grown": [
            {
                "after_segment": slot.spec.segment_idx,
                "reads_segment": slot.spec.segment_idx if slot.spec.source is None else slot.spec.source.segment_idx,
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
