"""Where a model can grow: after which of its submodules, on which tensor of their output, and as what kind of features.

A site is judged by what the model computes on a sample, never by its source code. Three passes in eval mode: two with
different numbers of rows show which axis counts rows; one with gradients from the data shows what the output depends
on, and which outputs all of it passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from esper.growth.dataflow import DataFlow
from esper.growth.structure import Path, first_rows, map_tensors, num_rows, pick, put, tensors
from esper.growth.tracing import SLOT, Call, trace
from esper.kasmina.layers import evaluating
from esper.leyline import SlotSpec, record

MIN_CHANNELS = 4
"""Narrower features have next to nothing that a seed could work with."""
PROBE_ROWS = 8
DEFAULT_SITES = 3
DEPTH_BONUS = 0.05
"""How much nearer to the wanted depth a row of plain features must be to be preferred to an image or a sequence."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Forward = Callable[[nn.Module, Any], Any]
"""(model, batch) -> output."""


@record
class Site:
    """A place where a model can grow."""

    name: str
    """Of the submodule whose output is extended, as in `model.named_modules()`."""
    path: Path
    """To the tensor inside that output; empty if the output is a tensor."""
    kind: str
    """"cnn", "transformer" or "mlp": images, sequences or rows of features."""
    axes: tuple[int, ...]
    """Axes of the tensor in the order its kind has them: [rows, channels, height, width], [rows, time, channels] or
    [rows, channels]."""
    channels: int
    positions: int
    """Values per channel and row."""
    order: int
    """Layers that have run before the one that reaches this site."""
    depth_share: float
    """The same as a share of all layers: 0 after the first, 1 after the last."""
    is_block: bool
    """True if the submodule is made of others."""
    is_listed: bool
    """True if it is a block in a list of modules: the unit that models repeat."""
    ends_layer: bool
    """False if a norm, an activation or a dropout of the same layer follows."""
    is_cut: bool
    """True if the inputs it depends on reach the output through here alone; False if a shortcut leads around it."""

    def slot_spec(self, slot_id: str, mixing_before: str | None = None, mixing_after: str | None = None) -> SlotSpec:
        """A slot here, as controllers see it."""
        return SlotSpec(
            slot_id=slot_id,
            segment_idx=self.order,
            channels=self.channels,
            positions=self.positions,
            depth_share=self.depth_share,
            mixing_before=mixing_before,
            mixing_after=mixing_after,
        )

    def canonical(self, features: Tensor) -> Tensor:
        """The features with their axes in the order of their kind."""
        return features if self.axes == tuple(range(len(self.axes))) else features.permute(self.axes)

    def original(self, features: Tensor) -> Tensor:
        """Back to the order of axes that the model uses."""
        if self.axes == tuple(range(len(self.axes))):
            return features
        return features.permute([self.axes.index(axis) for axis in range(len(self.axes))])


@record
class Sites:
    """Where a model would grow, where else it could, and why not elsewhere. Prints as a table."""

    chosen: tuple[Site, ...]
    """In execution order."""
    others: tuple[Site, ...]
    """In execution order; any of them can be chosen by name."""
    passed_over: Mapping[str, str]
    """Submodule -> why nothing can grow there."""

    def __str__(self) -> str:
        shown = [site for site in (*self.chosen, *self.others) if site in self.chosen or site.is_cut]
        width = max([len("site"), *(len(site.name) for site in shown)]) + 2
        lines = [f"  {'site':<{width}}{'kind':<13}{'channels':>9}{'positions':>11}{'depth':>7}"]
        lines += [
            f"{'*' if site in self.chosen else ' '} {site.name:<{width}}{site.kind:<13}{site.channels:>9,}"
            f"{site.positions:>11,}{site.depth_share:>7.0%}" + ("" if site.is_cut else "  (a shortcut leads around it)")
            for site in sorted(shown, key=lambda site: site.order)
        ]
        around = sum(not site.is_cut for site in self.others)
        return "\n".join(
            [
                *lines,
                "* would be used; others can be named",
                f"not listed: {around} behind a shortcut that leads around them, {len(self.passed_over)} passed over",
            ]
        )


def find_sites(
    model: nn.Module,
    sample: Any,
    k: int = DEFAULT_SITES,
    *,
    names: Sequence[str] | None = None,
    forward: Forward | None = None,
) -> Sites:
    """Finds where a model can grow. The model is not changed.

    Blocks come before single layers, and places that everything passes through before those that a shortcut leads
    around; the chosen ones are spread over the depth of the model.

    Args:
        model: Any module.
        sample: A batch as the model is trained on: at least two rows, one per sample along the first axis.
        k: How many sites to choose.
        names: Choose these submodules instead; in patterns such as "layer*.0" a star
            stands for anything but a dot.
        forward: Runs the model on a batch; by default `model(x)` for a tensor or (x, target), `model(**batch)` for a
            dict.

    Raises:
        ValueError: The model cannot be grown, or one of the names cannot be a site. The message says why.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1 site, got {k}")
    search = _Search(model, sample, forward or call_model)
    found, passed_over = search.candidates()
    if not found:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(passed_over.items())[:8])
        raise ValueError(
            f"found no place to grow in {type(model).__name__} ({reasons or 'it has no submodules'}). "
            "A site needs features [rows, channels], [rows, time, channels] or [rows, channels, height, width] with "
            f"at least {MIN_CHANNELS} channels, and layers with weights after it"
        )
    chosen = _spread(found, k) if names is None else _named(found, passed_over, search.aliases, names)
    others = tuple(site for site in found if site not in chosen)
    return Sites(chosen=chosen, others=others, passed_over=passed_over)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Runs a model on a batch by the usual conventions: the last entry of a tuple is the target and is left out."""
    inputs = batch
    if isinstance(batch, tuple | list):
        inputs = batch[0] if len(batch) <= 2 else tuple(batch[:-1])
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


# ---- choosing


def _spread(found: Sequence[Site], k: int) -> tuple[Site, ...]:
    pool = [site for site in found if site.is_cut] or list(found)
    # An image of one pixel is a row of features, which the model will make of it soon.
    pool = [site for site in pool if site.ends_layer and (site.kind, site.positions) != ("cnn", 1)] or pool
    for better in ([site for site in pool if site.is_listed], [site for site in pool if site.is_block]):
        if len(better) >= k:
            pool = better
            break
    chosen: list[Site] = []
    for position in range(min(k, len(pool))):
        wanted = (position + 1) / (k + 1)
        rest = [site for site in pool if site not in chosen]
        # Where pixels or tokens can be mixed, a seed has more to do.
        chosen.append(min(rest, key=lambda s: abs(s.depth_share - wanted) - (0 if s.kind == "mlp" else DEPTH_BONUS)))
    return tuple(site for site in found if site in chosen)


def _named(
    found: Sequence[Site], passed_over: Mapping[str, str], aliases: Mapping[str, str], names: Sequence[str]
) -> tuple[Site, ...]:
    by_name = {site.name: site for site in found}
    wanted: set[str] = set()
    for pattern in names:
        matches = [name for name in (*by_name, *aliases) if _matches(name, pattern)]
        if not matches:
            refused = [f"{name}: {why}" for name, why in passed_over.items() if _matches(name, pattern)]
            why = "; ".join(refused[:4]) or f"the model calls no submodule {pattern!r}"
            raise ValueError(f"cannot grow after {pattern!r} ({why}). Possible: {', '.join(by_name)}")
        wanted.update(aliases.get(name, name) for name in matches)
    return tuple(site for site in found if site.name in wanted)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern fits a name, part by part: a star does not reach over a dot."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


# ---- searching


@dataclass(slots=True, eq=False)
class _Output:
    """One tensor that a submodule gives, while the sites are searched."""

    path: Path
    shape: torch.Size
    rows_axis: int | None
    """The axis whose size follows the number of rows; None if there is none, or several."""
    node: Node
    """Where its gradient would arrive."""


class _Search:
    """Three passes over a sample, and what they say about every submodule."""

    def __init__(self, model: nn.Module, sample: Any, forward: Forward) -> None:
        self.model = model
        self.forward = forward
        rows = num_rows(sample)
        if rows < 2:
            raise ValueError(f"the sample needs at least two rows, got {rows}")
        self.sample = first_rows(sample, min(PROBE_ROWS, rows))
        self.aliases: dict[str, str] = {}
        """Submodule -> the site that gives the same tensor."""

    def candidates(self) -> tuple[list[Site], dict[str, str]]:
        """Every possible site in execution order, and why other submodules are none."""
        calls, smaller = self._two_sizes()
        graph, outputs = self._gradients(smaller)
        found: list[tuple[Call, Site]] = []
        passed_over: dict[str, str] = {}
        counts: dict[str, int] = {}
        for call in calls:
            counts[call.name] = counts.get(call.name, 0) + 1
        leaves = sorted((call for call in calls if call.is_leaf), key=lambda call: call.end)
        last = max((leaf.end for leaf in leaves if _has_own_weights(leaf.module)), default=0)
        for position, call in sorted(enumerate(calls), key=lambda item: item[1].end):
            if not call.name:
                continue
            inside = [leaf for leaf in leaves if leaf is call or call.encloses(leaf)]
            refusal = _refusal(call, counts[call.name], inside, last)
            site = refusal or self._site(call, outputs[position], leaves, graph)
            if isinstance(site, str):
                passed_over[call.name] = site
            else:
                self._add(found, passed_over, call, site)
        return [site for _, site in found], passed_over

    def _two_sizes(self) -> tuple[list[Call], list[Call]]:
        """The calls of a pass, and of one with a row less."""
        fewer = first_rows(self.sample, num_rows(self.sample) - 1)
        with evaluating(self.model):
            calls = trace(self.model, lambda: self.forward(self.model, self.sample))
            smaller = trace(self.model, lambda: self.forward(self.model, fewer))
        if [call.name for call in calls] != [call.name for call in smaller]:
            raise ValueError(
                f"{type(self.model).__name__} does not call the same submodules in the same order in every pass (in "
                "eval mode); make its order of calls fixed, or grow a submodule of it whose order is"
            )
        return calls, smaller

    def _gradients(self, smaller: Sequence[Call]) -> tuple[DataFlow, list[list[_Output]]]:
        """A pass in which gradients come from the data alone: every output of every submodule is a node of its own."""
        by_start = {call.start: position for position, call in enumerate(smaller)}
        outputs: list[list[_Output]] = [[] for _ in smaller]
        result: Any = None

        def renew(call: Call) -> Any:
            position = by_start[call.start]
            for path, tensor in list(tensors(call.output)):
                axis = _rows_axis(tensor, smaller[position].output, path)
                if not tensor.is_floating_point() or (axis is None and not tensor.requires_grad):
                    continue
                # A copy: of an alias (nn.Identity, dropout) too, and one that may be overwritten.
                fresh = _source(tensor) if not tensor.requires_grad else tensor.clone()
                assert fresh.grad_fn is not None
                outputs[position].append(_Output(path, tensor.shape, axis, fresh.grad_fn))
                call.output = put(call.output, path, fresh)
            return call.output

        def run() -> None:
            nonlocal result
            batch = map_tensors(self.sample, lambda t: _source(t) if t.is_floating_point() else t)
            result = self.forward(self.model, batch)

        with _data_gradients(self.model):
            trace(self.model, run, renew)
        return DataFlow([tensor.grad_fn for tensor in main_outputs(result) if tensor.grad_fn is not None]), outputs

    def _site(self, call: Call, outputs: Sequence[_Output], leaves: Sequence[Call], graph: DataFlow) -> Site | str:
        """The site after a call, or why there is none."""
        # Of the layer itself, or of the last one inside or before it whose type says where its channels are.
        known = (_channel_hint(leaf.module) for leaf in reversed(leaves) if leaf.end <= call.end)
        hint = next((found for found in known if found is not None), None)
        order = sum(leaf.end <= call.end for leaf in leaves) - 1
        certain = hint is not None and hint == _channel_hint(call.module)
        why = "no features that the output depends on"
        for output in outputs:
            if output.rows_axis is None or not graph.reaches(output.node):
                continue
            features = _classify(output.shape, output.rows_axis, hint, certain)
            if features is None:
                why = f"features of shape {list(output.shape)} are no rows, sequences or images"
                continue
            kind, axes = features
            channels = output.shape[axes[1] if kind == "cnn" else axes[-1]]
            if channels < MIN_CHANNELS:
                why = f"{channels} channels"
                continue
            return Site(
                name=call.name,
                path=output.path,
                kind=kind,
                axes=axes,
                channels=channels,
                positions=output.shape.numel() // (channels * output.shape[output.rows_axis]),
                order=order,
                depth_share=order / max(1, len(leaves) - 1),
                is_block=not call.is_leaf,
                is_listed=not call.is_leaf and isinstance(self._parent(call.name), CONTAINERS),
                ends_layer=not call.is_leaf or not _continues(call, leaves[order + 1 : order + 2]),
                is_cut=graph.is_cut(output.node),
            )
        return why

    def _parent(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])

    def _add(self, found: list[tuple[Call, Site]], passed_over: dict[str, str], call: Call, site: Site) -> None:
        """Adds a site. Of two calls, one inside the other, that give the same tensor, the better unit stays."""
        given = pick(call.output, site.path)
        for position, (inner, other) in enumerate(found):
            if call.encloses(inner) and pick(inner.output, other.path) is given:
                if other.is_listed or (other.is_block and not site.is_listed):
                    passed_over[site.name] = f"gives the same tensor as {other.name}"
                    self.aliases[site.name] = other.name
                    return
                passed_over[other.name] = f"gives the same tensor as {site.name}"
                self.aliases = {name: site.name if to == other.name else to for name, to in self.aliases.items()}
                self.aliases[other.name] = site.name
                # A seed after the one is a seed after the other, so what holds of either holds of both.
                site = replace(site, is_cut=site.is_cut or other.is_cut)
                del found[position]
                break
        found.append((call, site))


def _refusal(call: Call, times: int, inside: Sequence[Call], last: int) -> str | None:
    """Why nothing can grow after a call, as far as it can be told without looking at its output."""
    if times > 1:
        return f"called {times} times in one pass"
    if SLOT in call.module._modules:
        return "has grown already"
    if isinstance(call.module, CONTAINERS):
        return "a container; name its last part"
    if any(leaf.end == last for leaf in inside):
        return "holds the last layer with weights"
    if call.end > last:
        return "no layer with weights follows"
    return None


def _continues(call: Call, following: Sequence[Call]) -> bool:
    """True if what runs next only treats each value of a layer's output: norms, activations, dropout."""
    if not following:
        return False
    shapes = [[tensor.shape for _, tensor in tensors(output)] for output in (call.output, following[0].output)]
    weights = following[0].module.parameters(recurse=False)
    return shapes[0] == shapes[1] and all(weight.dim() < 2 for weight in weights)


def _has_own_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _rows_axis(tensor: Tensor, smaller: Any, path: Path) -> int | None:
    """The one axis that became shorter when a row was left out."""
    try:
        other = pick(smaller, path)
    except LookupError:
        return None
    if not isinstance(other, Tensor) or other.dim() != tensor.dim():
        return None
    changed = [axis for axis in range(tensor.dim()) if tensor.shape[axis] != other.shape[axis]]
    return changed[0] if len(changed) == 1 else None


def _source(tensor: Tensor) -> Tensor:
    """A copy from which gradients start, that may be overwritten in place."""
    return tensor.detach().requires_grad_().clone()


@contextmanager
def _data_gradients(model: nn.Module) -> Iterator[None]:
    """Eval mode with gradients, but not of parameters: what depends on them alone is a constant."""
    modes = [(part, part.training) for part in model.modules()]
    wanted = [(param, param.requires_grad) for param in model.parameters()]
    model.eval()
    try:
        for param, _ in wanted:
            param.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for param, requires_grad in wanted:
            param.requires_grad_(requires_grad)
        for part, mode in modes:
            part.training = mode


def main_outputs(output: Any) -> list[Tensor]:
    """The tensors of a model's output that training depends on: its loss if it has one, else what it predicts."""
    if isinstance(output, Mapping):
        key = "loss" if output.get("loss") is not None else next(iter(output), None)
        output = None if key is None else output[key]
    return [tensor for _, tensor in tensors(output) if tensor.is_floating_point()]


# ---- what features are


def _channel_hint(module: nn.Module) -> tuple[int, int] | None:
    """(axis, size) of the channels that a layer of a known type gives."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return 1, module.out_channels
    if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm):
        return 1, module.num_features
    if isinstance(module, nn.GroupNorm):
        return 1, module.num_channels
    if isinstance(module, nn.Linear):
        return -1, module.out_features
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return -1, module.normalized_shape[-1]
    if isinstance(module, nn.Embedding):
        return -1, module.embedding_dim
    if isinstance(module, nn.RNNBase):
        return -1, module.hidden_size * (2 if module.bidirectional else 1)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # GPT-2's own linear layer
        return -1, cast(int, module.nf)
    return None


def _classify(
    shape: torch.Size, rows: int, hint: tuple[int, int] | None, certain: bool
) -> tuple[str, tuple[int, ...]] | None:
    """(kind, axes in the order of that kind), or None for features of no known kind.

    Args:
        shape: Of the features.
        rows: Their axis of rows.
        hint: (axis, size) of the channels of the layer they come from.
        certain: True if they are that layer's own output, not rearranged by anything after it.
    """
    if len(shape) == 2 and rows == 0:
        return "mlp", (0, 1)
    if len(shape) == 3 and rows < 2:
        first = rows == 0 and hint is not None and hint == (1, shape[1])
        if first and (certain or shape[2] != shape[1]):
            return "transformer", (0, 2, 1)
        return "transformer", (rows, 1 - rows, 2)
    if len(shape) == 4 and rows == 0:
        last = hint is not None and hint[1] == shape[3] and (shape[1] != shape[3] or (certain and hint[0] == -1))
        return "cnn", (0, 3, 1, 2) if last else (0, 1, 2, 3)
    return None
