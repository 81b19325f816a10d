"""A causal transformer over tokens as a host, initialised so that its first loss is that of a uniform guess."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.hosts.base import Host, HostSpec
from esper.kasmina.layers import linear

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
    """Embedding, pre-norm blocks, tied head; logits [rows, time, vocab]. Slots: `r0c{i}` after block i."""

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
