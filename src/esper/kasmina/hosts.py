"""Hosts: a flat list of segments and the places between them where something may grow. They know nothing about seeds.

A host's forward pass is the fold over its segments, so whoever owns the slots can run the same fold and act in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.layers import conv2d, linear, seeded
from esper.leyline import check_known, check_slot_id, record
from esper.leyline.references import load_function

TOPOLOGIES: tuple[str, ...] = ("mlp", "cnn", "transformer")
INPUT = -1
"""Index of what comes before the first segment."""
CHANNEL_AXIS: dict[str, int] = {"mlp": -1, "cnn": 1, "transformer": -1}


@record
class HostSpec:
    """A host as data: enough to build it again from a file."""

    kind: str
    """A key of the table below, or "user": what the function that `kwargs["make"]` names returns."""
    kwargs: Mapping[str, Any]
    """Plain JSON values."""

    @property
    def topology(self) -> str:
        """Which blueprints fit."""
        return str(self.kwargs["topology"]) if self.kind == "user" else self.kind


class Host(nn.Module):
    """A network as an ordered list of segments.

    Attributes:
        topology: Which blueprints fit: "mlp" (rows of features), "cnn" (images) or "transformer" (sequences).
        segments: The layers, in order.
        slots: Slot id -> index of the segment it follows, in execution order.
        spans: Slot id -> (segment whose output it reads, segment whose output it adds to); -1 is the input.
        places: The same for slots and spans together, in execution order: what is added last comes last.
        spec: How to build this host again.
    """

    def __init__(
        self,
        topology: str,
        segments: list[nn.Module],
        slots: Mapping[str, int],
        spec: HostSpec,
        spans: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        check_known("topology", topology, TOPOLOGIES)
        _check_slots(slots, len(segments))
        self.topology = topology
        self.segments = nn.ModuleList(segments)
        self.slots = dict(sorted(slots.items(), key=lambda item: item[1]))
        self.spans = dict(spans)
        # A slot comes before the spans that end with it: they are added to what it puts out.
        order = {slot_id: (index, index) for slot_id, index in self.slots.items()} | self.spans
        self.places = dict(sorted(order.items(), key=lambda item: (item[1][1], item[0] in self.spans, item[1][0])))
        self.spec = spec
        # Coalition passes share feature tensors, so no layer may overwrite its input.
        for part in self.modules():
            if getattr(part, "inplace", False) is True:
                part.inplace = False  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """The fold over the segments."""
        for segment in self.segments:
            x = segment(x)
        return x


def _check_slots(slots: Mapping[str, int], num_segments: int) -> None:
    taken: dict[int, str] = {}
    for slot_id, index in slots.items():
        check_slot_id(slot_id)
        if not 0 <= index < num_segments - 1:
            raise ValueError(
                f"slot {slot_id} follows segment {index}; a host of {num_segments} segments has slots after "
                f"segments 0..{num_segments - 2}"
            )
        if index in taken:
            raise ValueError(f"slots {taken[index]} and {slot_id} both follow segment {index}; use one of them")
        taken[index] = slot_id


# ---- rows of features


class FeatureInput(nn.Module):
    """Flattens each row and checks its length, so a wrong data set fails here with a clear message."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2:
            raise ValueError(f"expected rows of {self.features} features, got {tuple(x.shape)}")
        rows = x.flatten(1)
        if rows.shape[1] != self.features:
            raise ValueError(f"expected {self.features} features per row, got {rows.shape[1]} (input {tuple(x.shape)})")
        return rows


class MLPHost(Host):
    """Linear layers with ReLU. Slots: the input features if asked for, then one after each hidden layer.

    Spans: `r2c{i}` around hidden layer i, `r3c{i}` from the input of layer i to the logits; around all layers it widens
    a bottleneck.
    """

    def __init__(
        self, *, inputs: int, hidden: Sequence[int], classes: int, input_slot: bool, generator: torch.Generator
    ) -> None:
        segments: list[nn.Module] = [FeatureInput(inputs)]
        width = inputs
        for size in hidden:
            segments.append(nn.Sequential(linear(width, size, generator), nn.ReLU()))
            width = size
        segments.append(linear(width, classes, generator))
        after = range(0 if input_slot else 1, len(segments) - 1)
        slots = {f"r0c{column}": index for column, index in enumerate(after)}
        kwargs = {"inputs": inputs, "hidden": list(hidden), "classes": classes, "input_slot": input_slot}
        around = {f"r2c{i}": (i, i + 1) for i in range(len(hidden))}
        spans = around | {f"r3c{i}": (i, len(hidden) + 1) for i in range(len(hidden) + 1)}
        super().__init__("mlp", segments, slots, HostSpec(kind="mlp", kwargs=kwargs), spans)


# ---- images


class ImageInput(nn.Module):
    """Checks the shape of a batch of images before the first convolution sees it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise ValueError(f"expected images [rows, {self.channels}, height, width], got {tuple(x.shape)}")
        return x


class SpatialMean(nn.Module):
    """Mean over height and width."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


class CNNHost(Host):
    """Blocks of convolution, batch norm and ReLU, each followed by 2x2 max pooling where asked, then a linear head.

    Slots: `r0c{i}` after block i, `r1c{i}` after its pool. Spans: `r2c{i}` around block i and its pool, `r3c{i}` from
    the input of block i, or of the head, to the logits. `kernel` is one size for all blocks, or one for each. With
    kernel 1 it is blind: no block sees a pixel's neighbours. Batch norm stays because group norm and no norm both
    measured worse on these sizes.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        channels: Sequence[int],
        kernel: int | Sequence[int],
        pool: Sequence[bool],
        classes: int,
        generator: torch.Generator,
    ) -> None:
        if len(pool) != len(channels) or not channels:
            raise ValueError(f"pool needs one entry per block: {len(channels)} blocks, {len(pool)} entries")
        kernels = [kernel] * len(channels) if isinstance(kernel, int) else list(kernel)
        if len(kernels) != len(channels):
            raise ValueError(f"kernel needs one size, or one per block: {len(channels)} blocks, {len(kernels)} sizes")
        if any(size % 2 == 0 for size in kernels):
            raise ValueError(f"kernel must be odd, got {kernel}: an even one cannot keep the size of the image")
        segments: list[nn.Module] = []
        slots: dict[str, int] = {}
        ends = [INPUT]
        width = in_channels
        for column, (size, pooled) in enumerate(zip(channels, pool, strict=True)):
            entry = [ImageInput(in_channels)] if column == 0 else []
            segments.append(
                nn.Sequential(*entry, conv2d(width, size, kernels[column], generator), nn.BatchNorm2d(size), nn.ReLU())
            )
            slots[f"r0c{column}"] = len(segments) - 1
            if pooled:
                segments.append(nn.MaxPool2d(2))
                slots[f"r1c{column}"] = len(segments) - 1
            ends.append(len(segments) - 1)
            width = size
        segments.append(nn.Sequential(SpatialMean(), linear(width, classes, generator)))
        kwargs = {
            "in_channels": in_channels,
            "channels": list(channels),
            "kernel": kernel if isinstance(kernel, int) else kernels,
            "pool": list(pool),
            "classes": classes,
        }
        around = {f"r2c{i}": (ends[i], ends[i + 1]) for i in range(len(channels))}
        spans = around | {f"r3c{i}": (end, len(segments) - 1) for i, end in enumerate(ends)}
        super().__init__("cnn", segments, slots, HostSpec(kind="cnn", kwargs=kwargs), spans)


# ---- tokens

INIT_STD = 0.02


def normal_linear(inputs: int, outputs: int, std: float, generator: torch.Generator) -> nn.Linear:
    """A linear layer with normal weights and zero bias."""
    layer = linear(inputs, outputs, generator)
    nn.init.normal_(layer.weight, std=std, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


class TokenEmbedding(nn.Module):
    """Token plus learned position embedding."""

    def __init__(self, vocab: int, dim: int, context: int, generator: torch.Generator) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(vocab, dim).normal_(std=INIT_STD, generator=generator))
        self.position = nn.Parameter(torch.empty(context, dim).normal_(std=INIT_STD, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(f"expected integer tokens [rows, time], got {tokens.dtype} {tuple(tokens.shape)}")
        context = self.position.shape[0]
        if tokens.shape[1] > context:
            raise ValueError(f"{tokens.shape[1]} tokens do not fit the context of {context}; shorten the windows")
        try:
            embedded = F.embedding(tokens, self.token)
        except IndexError as error:
            low, high, vocab = int(tokens.min()), int(tokens.max()), self.token.shape[0]
            raise ValueError(f"tokens must be in 0..{vocab - 1}, got {low}..{high}") from error
        return embedded + self.position[: tokens.shape[1]]


class TransformerBlock(nn.Module):
    """Pre-norm causal attention and a GELU feed-forward layer, both residual."""

    def __init__(self, dim: int, heads: int, ff: int, residual_std: float, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(dim)
        self.qkv = normal_linear(dim, 3 * dim, INIT_STD, generator)
        self.attention_out = normal_linear(dim, dim, residual_std, generator)
        self.norm_ff = nn.LayerNorm(dim)
        self.ff_in = normal_linear(dim, ff * dim, INIT_STD, generator)
        self.ff_out = normal_linear(ff * dim, dim, residual_std, generator)

    def forward(self, x: Tensor) -> Tensor:
        rows, time, dim = x.shape
        heads = self.qkv(self.norm_attention(x)).view(rows, time, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, time, dim))
        out: Tensor = x + self.ff_out(F.gelu(self.ff_in(self.norm_ff(x))))
        return out


class TiedHead(nn.Module):
    """Final norm, then logits by the token embedding itself."""

    def __init__(self, token: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(token.shape[1])
        self.token = token

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.token)


class TransformerHost(Host):
    """Embedding, pre-norm blocks, tied head; logits [rows, time, vocab]. Slots: `r0c{i}` after block i.

    Initialised so that the first loss is that of a uniform guess.
    """

    def __init__(
        self, *, vocab: int, dim: int, heads: int, layers: int, ff: int, context: int, generator: torch.Generator
    ) -> None:
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads, got dim={dim}, heads={heads}")
        embedding = TokenEmbedding(vocab, dim, context, generator)
        residual_std = INIT_STD / math.sqrt(2 * layers)
        blocks = [TransformerBlock(dim, heads, ff, residual_std, generator) for _ in range(layers)]
        slots = {f"r0c{i}": i + 1 for i in range(layers)}
        kwargs = {"vocab": vocab, "dim": dim, "heads": heads, "layers": layers, "ff": ff, "context": context}
        super().__init__(
            "transformer",
            [embedding, *blocks, TiedHead(embedding.token)],
            slots,
            HostSpec(kind="transformer", kwargs=kwargs),
        )


_KINDS: dict[str, type[MLPHost] | type[CNNHost] | type[TransformerHost]] = {
    "mlp": MLPHost,
    "cnn": CNNHost,
    "transformer": TransformerHost,
}


def _user_host(spec: HostSpec, generator: torch.Generator) -> Host:
    """The user's function draws weights from torch's global generator, so that one is seeded for it."""
    where = spec.kwargs["make"]
    with seeded(int(torch.randint(2**62, (), generator=generator))):
        host = load_function(where)()
    if not isinstance(host, Host) or host.topology != spec.topology:
        found = f"a {host.topology} host" if isinstance(host, Host) else type(host).__name__
        raise ValueError(f"{where} must return a {spec.topology} host, such as one by wrap_sequential; got {found}")
    host.spec = spec
    return host


def build_host(spec: HostSpec, generator: torch.Generator) -> Host:
    """Builds a host from its description, with weights from `generator`.

    Raises:
        ValueError: Unknown kind, or arguments the kind does not take.
    """
    if spec.kind == "user":
        return _user_host(spec, generator)
    check_known("host kind", spec.kind, _KINDS)
    try:
        return _KINDS[spec.kind](**spec.kwargs, generator=generator)
    except TypeError as error:
        raise ValueError(f"host {spec.kind!r}: {error}") from error
