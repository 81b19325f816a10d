"""Taking a grown model out of Esper: as a program that runs without it, or as weights that say what has grown.

Every file is loaded back and compared on real rows before it is kept.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from esper.growth.objective import TARGET_KEYS
from esper.growth.sites import Site
from esper.growth.slot import FACTS, SiteSlot, decode_tensor, extend_output
from esper.growth.state import seed_from_facts
from esper.growth.structure import num_rows, tensors
from esper.growth.tracing import SLOT
from esper.kasmina.export import check_ending, to_program
from esper.kasmina.layers import evaluating
from esper.kasmina.persist import untied, write_file
from esper.leyline import DEFAULT_LIFECYCLE, ModelFileError


class _Plain(nn.Module):
    """A model whose outputs are plain tensors, because the types of libraries are not known where a program runs."""

    def __init__(self, model: nn.Module, names: tuple[str, ...] | None) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: Tensor) -> Any:
        output = self.model(*inputs) if self.names is None else self.model(**dict(zip(self.names, inputs, strict=True)))
        if isinstance(output, Tensor):
            return output
        found = {".".join(map(str, path)): tensor for path, tensor in tensors(output)}
        return next(iter(found.values())) if len(found) == 1 else found


def export_grown(model: nn.Module, sample: Any, path: str | Path) -> None:
    """Writes a grown model in the format that the ending of `path` names.

    `.pt2` loads with torch alone (`torch.export.load(path).module()`), `.onnx` with any ONNX runtime (needs the `onnx`
    extra), `.safetensors` holds weights for `load_grown`. Programs take the inputs of the sample, without targets; the
    number of rows is free, other sizes are those of the sample.

    Raises:
        ValueError: Another ending, or the model cannot be written like that.
        ImportError: ONNX was asked for and its packages are not installed.
    """
    path = Path(path)
    check_ending(path)
    if path.suffix == ".safetensors":
        write_file(path, weights_of(model))
        return
    names, inputs = _inputs(sample)
    with evaluating(model), _without_cache(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's exporters about themselves
        content = to_program(path.suffix, _Plain(model, names).eval(), inputs, _row_shapes(inputs))
    write_file(path, content)


def _inputs(sample: Any) -> tuple[tuple[str, ...] | None, tuple[Tensor, ...]]:
    """(names, tensors) of a batch without its target; no names where they are positional."""
    given = sample
    if isinstance(given, tuple | list):
        given = given[0] if len(given) <= 2 else tuple(given[:-1])
    if isinstance(given, Mapping):
        found = {name: value for name, value in given.items() if name not in TARGET_KEYS and isinstance(value, Tensor)}
        return tuple(found), tuple(found.values())
    return None, tuple(given) if isinstance(given, tuple | list) else (given,)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Language models of Hugging Face hand out caches for generation, which no program can hold."""
    config = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    try:
        if before is not None:
            config.use_cache = False  # type: ignore[union-attr]
        yield
    finally:
        if before is not None:
            config.use_cache = before  # type: ignore[union-attr]


def _row_shapes(inputs: tuple[Tensor, ...]) -> tuple[tuple[Any, ...]]:
    rows, size = torch.export.Dim("rows", min=1), num_rows(inputs)
    # One entry for all inputs together, because forward takes them as *inputs.
    return (tuple({0: rows} if tensor.dim() and tensor.shape[0] == size else {} for tensor in inputs),)


# ---- weights


def weights_of(model: nn.Module) -> bytes:
    """All weights of a model as a safetensors file, with what has grown in it."""
    shared, _ = untied(model)
    return to_safetensors({name: tensor.detach().contiguous() for name, tensor in shared.items()})


def load_grown(model: nn.Module, weights: str | Path | Mapping[str, Tensor]) -> nn.Module:
    """Puts what has grown into a fresh model of the same class, and loads its weights.

    Args:
        model: As the model was before it was grown; it is changed and returned.
        weights: A state_dict of the grown model; or a file: one written by `GrowthResult.save`, by
            `torch.save(model.state_dict(), path)`, or a checkpoint of Lightning; or a folder that a model of Hugging
            Face was saved in.

    Raises:
        FileNotFoundError: There is no such file.
        ModelFileError: The weights are not those of a grown model of this class. The model is as it was.
    """
    found = dict(weights) if isinstance(weights, Mapping) else _read(Path(weights))
    attached: list[tuple[nn.Module, torch.utils.hooks.RemovableHandle]] = []
    try:
        for key in [key for key in found if key.endswith(f".{SLOT}.{FACTS}")]:
            name = key.removesuffix(f".{SLOT}.{FACTS}")
            attached.append(_regrow(model, name, found[key], found))
        _check_weights(model, found)
        model.load_state_dict(found, strict=False)
    except BaseException as error:
        for module, handle in attached:
            handle.remove()
            module._modules.pop(SLOT, None)
        if isinstance(error, ModelFileError) or not isinstance(error, Exception):
            raise
        raise ModelFileError(
            f"what has grown is not described as it should be ({type(error).__name__}: {error})"
        ) from error
    return model


def _check_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Refuses weights that are not those of the model; tied ones may be there once."""
    own = model.state_dict(keep_vars=True)
    given = {id(own[name]) for name in weights if name in own}
    lacking = [name for name, tensor in own.items() if id(tensor) not in given and not name.endswith(f"{SLOT}.{FACTS}")]
    unknown = [name for name in weights if name not in own]
    if lacking or unknown:
        raise ModelFileError(
            f"the weights do not fit {type(model).__name__}: missing {', '.join(lacking[:3]) or 'nothing'}, unknown "
            f"{', '.join(unknown[:3]) or 'nothing'}"
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape and not name.endswith(f"{SLOT}.{FACTS}"):
            raise ModelFileError(
                f"the weights do not fit {type(model).__name__}: {name} is {tuple(tensor.shape)} and should be "
                f"{tuple(own[name].shape)}"
            )


def _regrow(
    model: nn.Module, name: str, packed: Tensor, weights: Mapping[str, Tensor]
) -> tuple[nn.Module, torch.utils.hooks.RemovableHandle]:
    facts = decode_tensor(packed)
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise ModelFileError(
            f"something has grown after {name!r}, which {type(model).__name__} does not have"
        ) from error
    if SLOT in module._modules:
        raise ModelFileError(f"{name!r} has grown already; load the weights into a fresh model")
    recorded = facts["site"]
    site = Site(**{**recorded, "path": tuple(recorded["path"]), "axes": tuple(recorded["axes"])})
    slot = SiteSlot(site, site.slot_spec(facts["slot_id"]), DEFAULT_LIFECYCLE)
    slot.train(module.training)
    slot.set_facts(facts, *seed_from_facts(model, slot, facts, weights))
    module.add_module(SLOT, slot)
    return module, module.register_forward_hook(extend_output)


def _read(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        path = path / "model.safetensors"
    if path.exists() and not path.is_file():  # a pipe would be waited for, a device has no end
        raise ModelFileError(f"{path.name} is not a file")
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        try:
            found = from_safetensors(content)
        except SafetensorError as error:
            raise ModelFileError(f"{path.name} is damaged or not a safetensors file: {error}") from error
        return found
    try:
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is wrong with the file, torch has a type for it
        raise ModelFileError(f"{path.name} holds no weights that can be read safely: {error}") from error
    state = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else None
    if not isinstance(state, Mapping):
        raise ModelFileError(f"{path.name} holds no state_dict")
    return dict(state)
