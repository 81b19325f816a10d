"""Any model that runs its parts one after the other, as a host.

The wrapper runs the parts itself, so it first proves that this gives what the model gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.hosts import CHANNEL_AXIS, Host, HostSpec
from esper.kasmina.layers import evaluating


def wrap_sequential(
    model: nn.Module,
    slots: Mapping[str, int],
    topology: str,
    sample: Tensor,
    *,
    segments: Sequence[str] | None = None,
) -> Host:
    """Makes a host of a model by naming its growth sites.

    Args:
        model: An nn.Sequential, or a module with a `segments` list, or any module when `segments` names its parts.
        slots: Slot id -> index of the segment it follows, such as {"r0c0": 3}.
        topology: "mlp" for rows of features, "cnn" for images [rows, channels, height, width], "transformer" for
            sequences [rows, time, channels].
        sample: At least two rows of real input.
        segments: Names of submodules (dots allowed) that make up the forward pass in order.

    Raises:
        ValueError: Running the segments one after the other is not what the model does, a single row does not work,
            or a slot's output has no channel axis of constant size.
    """
    parts = _parts(model, segments)
    host = Host(topology, [part for _, part in parts], slots, HostSpec(kind="user", kwargs={}))
    if sample.shape[0] < 2:
        raise ValueError(f"sample needs at least two rows, got {sample.shape[0]}")
    with evaluating(model):
        _check_fold(model, parts, sample)
        widths = [_slot_widths(host, sample[:rows]) for rows in (1, 2)]
    for slot_id in host.slots:
        if widths[0][slot_id] != widths[1][slot_id]:
            raise ValueError(f"slot {slot_id}: channels change with the batch size: {[w[slot_id] for w in widths]}")
    return host


def _parts(model: nn.Module, names: Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    if names is not None:
        return [(name, _submodule(model, name)) for name in names]
    if isinstance(model, nn.Sequential):
        # Not named_children(), which lists a layer that is used twice only once.
        return [(name, part) for name, part in model._modules.items() if part is not None]
    listed = getattr(model, "segments", None)
    if isinstance(listed, nn.ModuleList):
        return [(f"segments.{index}", part) for index, part in enumerate(listed)]
    raise ValueError(
        f"{type(model).__name__} is no nn.Sequential and has no `segments` ModuleList; pass segments=[...] with the "
        "names of the submodules that run one after the other"
    )


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(name for name, _ in model.named_modules() if name)
        raise ValueError(f"{type(model).__name__} has no submodule {name!r}. Known: {known}") from error


def _check_fold(model: nn.Module, parts: Sequence[tuple[str, nn.Module]], sample: Tensor) -> None:
    folded = _fold(parts, sample)
    calls: list[tuple[nn.Module, object]] = []
    hooks = [
        part.register_forward_hook(lambda module, _args, out: calls.append((module, out)))
        for part in {id(part): part for _, part in parts}.values()
    ]
    try:
        expected = model(sample)
    finally:
        for hook in hooks:
            hook.remove()
    for index, (name, part) in enumerate(parts):
        if not any(part is called for called, _ in calls):
            raise ValueError(f"segment {index} ({name}) is not used by the model's own forward pass")
        if index >= len(calls) or calls[index][0] is not part or not _same(folded[index], calls[index][1]):
            raise ValueError(
                f"running the segments in order differs from the model at segment {index} ({name}); something happens "
                "between segments. Put it into a module of its own and list that too"
            )
    if len(calls) > len(parts) or not _same(folded[-1], expected):
        raise ValueError("the model does something after its last segment; put it into a module and list that too")


def _fold(parts: Sequence[tuple[str, nn.Module]], sample: Tensor) -> list[Tensor]:
    """The output of each part when every one runs on the output of the one before it."""
    outputs: list[Tensor] = []
    for index, (name, part) in enumerate(parts):
        kept = outputs[-1] if outputs else sample
        given = kept.clone()
        try:
            out = part(given)
        except (RuntimeError, ValueError, TypeError) as error:
            source = "the output of the one before it" if outputs else "the sample"
            raise ValueError(f"segment {index} ({name}) cannot run on {source}: {error}") from error
        if not _same(given, kept):
            raise ValueError(f"segment {index} ({name}) overwrites its input; segments must leave it as it is")
        if not isinstance(out, Tensor):
            raise ValueError(f"segment {index} ({name}) gives a {type(out).__name__}; segments must pass on one tensor")
        outputs.append(out)
    return outputs


def _same(left: object, right: object) -> bool:
    return isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left, right)


def _slot_widths(host: Host, x: Tensor) -> dict[str, int]:
    at = {index: slot_id for slot_id, index in host.slots.items()}
    dims = {"mlp": 2, "cnn": 4, "transformer": 3}[host.topology]
    widths = {}
    for index, segment in enumerate(host.segments):
        try:
            x = segment(x)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"the model does not run on {x.shape[0]} row(s): {error}") from error
        if index in at:
            if x.dim() != dims or not x.is_floating_point():
                raise ValueError(
                    f"slot {at[index]}: a {host.topology} slot needs a float tensor with {dims} axes, segment {index} "
                    f"gives {x.dtype} {tuple(x.shape)}"
                )
            widths[at[index]] = x.shape[CHANNEL_AXIS[host.topology]]
    return widths
