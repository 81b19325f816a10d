"""The policy network: one shared encoder for slots, a trunk with memory, and scores for whatever slots there are.

Nothing in it depends on how many slots or blueprints a host offers, so a policy trained on one host runs on another.
It knows no rules of legality and no meaning of features.
"""

# T steps, N envs, B = T x N rows, S slots, P blueprints, D global features, F slot features, C card features,
# K offer features, E encoding, W width, H heads

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from esper.leyline import BLENDS, OPS
from esper.simic.agent.policy import (
    ForwardPass,
    ValueHead,
    empty_linear,
    empty_lstm,
    initialize_,
    scale_output_,
    unroll,
    zero_state,
)
from esper.simic.agent.tamiyo_inputs import BLEND, BLUEPRINT, OP, SLOT, Cards, TamiyoInputs
from esper.simic.control.normalization import RunningMeanStd

ENCODING = 64
EMBEDDING = 16
CONSTANT = 1e-12
"""Variance of a column that never changed, up to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """What a network is built for. Saved beside the weights, because columns and names must mean the same later."""

    global_columns: tuple[str, ...]
    global_normalised: tuple[bool, ...]
    slot_columns: tuple[str, ...]
    slot_normalised: tuple[bool, ...]
    card_columns: tuple[str, ...]
    offer_columns: tuple[str, ...]
    blueprints: tuple[str, ...]
    """Blueprints with an embedding of their own. Others are judged by their card alone."""
    seen_columns: tuple[str, ...] | None
    """Global columns that reach the network; slots, cards and offers then do not. None: it sees everything."""


class ColumnNorm(nn.Module):
    """Normalises the columns that carry values and leaves flags and one-hots alone.

    A value that was the same in all of training has taught nothing. It reads 0 on every host, not as a huge deviation.
    """

    normalised: Tensor

    def __init__(self, normalised: tuple[bool, ...]) -> None:
        super().__init__()
        self.stats = RunningMeanStd(len(normalised))
        self.register_buffer("normalised", torch.tensor(normalised), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of any leading shape."""
        taught = torch.where(self.stats.var > CONSTANT, self.stats(rows), 0.0)
        return torch.where(self.normalised, taught, rows)

    def deviations(self, rows: Tensor) -> Tensor:
        """Distance from the mean in standard deviations, without a limit; 0 in columns that are left alone."""
        far = (rows.double() - self.stats.mean).abs() / self.stats.std
        return torch.where(self.normalised, far, torch.zeros_like(far))


class TamiyoNetwork(nn.Module):
    """Policy and state value over factored lifecycle actions."""

    seen_D: Tensor | None

    def __init__(self, shape: NetworkShape, *, width: int, op_prior: tuple[float, ...], generator: torch.Generator):
        super().__init__()
        self.obs_norm = ColumnNorm(shape.global_normalised)
        self.slot_norm = ColumnNorm(shape.slot_normalised)
        num_slot, num_card = len(shape.slot_columns), len(shape.card_columns)
        self.slot_encoder = nn.Sequential(
            empty_linear(num_slot, ENCODING), nn.SiLU(), empty_linear(ENCODING, ENCODING), nn.SiLU()
        )
        self.obs_encoder = nn.Sequential(empty_linear(len(shape.global_columns), ENCODING), nn.SiLU())
        self.trunk = nn.Sequential(empty_linear(3 * ENCODING, width), nn.LayerNorm(width), nn.SiLU())
        self.memory = empty_lstm(width, width)
        self.value = ValueHead(width, ENCODING)
        self.op_head = nn.Sequential(empty_linear(width, ENCODING), nn.SiLU(), empty_linear(ENCODING, len(OPS)))
        self.op_embedding = nn.Parameter(torch.empty(len(OPS), EMBEDDING))
        self.slot_query = nn.Sequential(
            empty_linear(width + EMBEDDING, ENCODING), nn.SiLU(), empty_linear(ENCODING, ENCODING)
        )
        self.slot_key = empty_linear(ENCODING, ENCODING)
        self.blueprint_embedding = nn.Parameter(torch.empty(len(shape.blueprints), EMBEDDING))
        self.card_encoder = empty_linear(num_card + EMBEDDING, ENCODING)
        self.offer_encoder = empty_linear(len(shape.offer_columns), ENCODING)
        self.blueprint_context = empty_linear(width + ENCODING, ENCODING)
        self.blueprint_score = nn.Sequential(nn.SiLU(), empty_linear(ENCODING, 1))
        self.blend_head = nn.Sequential(
            empty_linear(width + ENCODING, ENCODING), nn.SiLU(), empty_linear(ENCODING, len(BLENDS))
        )
        seen, columns = shape.seen_columns, shape.global_columns
        seen_D = None if seen is None else torch.tensor([name in seen for name in columns])
        self.register_buffer("seen_D", seen_D, persistent=False)
        self._initialize(op_prior, generator)

    @torch.no_grad()
    def _initialize(self, op_prior: tuple[float, ...], generator: torch.Generator) -> None:
        initialize_(self, generator)
        for head in (self.op_head, self.slot_query, self.blueprint_score, self.blend_head):
            output = head[-1]
            assert isinstance(output, nn.Linear)
            scale_output_(output, 0.01, generator)
            if head is self.op_head:
                output.bias.copy_(torch.tensor(op_prior))
        scale_output_(self.value.out, 1.0, generator)
        for embedding in (self.op_embedding, self.blueprint_embedding):
            nn.init.normal_(embedding, std=1.0, generator=generator)

    def forward(self, inputs: TamiyoInputs) -> ForwardPass:
        """Runs T steps of N envs."""
        obs_TND, slot_obs_TNSF = self.obs_norm(inputs.obs_TND), self.slot_norm(inputs.slot_obs_TNSF)
        offers_TNSPK, cards = inputs.offers_TNSPK, inputs.cards
        if self.seen_D is not None:
            obs_TND = torch.where(self.seen_D, obs_TND, 0.0)
            slot_obs_TNSF, offers_TNSPK = torch.zeros_like(slot_obs_TNSF), torch.zeros_like(offers_TNSPK)
            cards = replace(cards, rows_SPC=torch.zeros_like(cards.rows_SPC))
        slots_TNSE = self.slot_encoder(slot_obs_TNSF)
        pooled = [self.obs_encoder(obs_TND), slots_TNSE.mean(dim=2), slots_TNSE.amax(dim=2)]
        trunk_TNW = self.trunk(torch.cat(pooled, dim=-1))
        state = inputs.state if inputs.state is not None else zero_state(self.memory, trunk_TNW.shape[1])
        memory_TNW, state = unroll(self.memory, trunk_TNW, state, inputs.starts_TN)
        trunk_BW = (trunk_TNW + memory_TNW).flatten(0, 1)
        return ForwardPass(
            logits_fn=partial(
                self._logits,
                trunk_BW,
                slots_TNSE.flatten(0, 1),
                self._encode_cards(cards),
                offers_TNSPK.flatten(0, 1),
            ),
            masks=inputs.masks.map(lambda mask: mask.flatten(0, 1)),
            values_B=self.value(trunk_BW),
            memory_TNW=memory_TNW,
            state=state,
        )

    def head_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The weights that serve one head alone, in storage order."""
        return {
            "slot": [*self.slot_query.parameters(), *self.slot_key.parameters()],
            "blueprint": [
                *self.offer_encoder.parameters(),
                *self.blueprint_context.parameters(),
                *self.blueprint_score.parameters(),
            ],
            "blend": [*self.blend_head.parameters()],
            "op": [*self.op_head.parameters()],
        }

    def _encode_cards(self, cards: Cards) -> Tensor:
        # Id 0 is a blueprint the network was not built with: judged by its card alone.
        table = torch.cat([torch.zeros_like(self.blueprint_embedding[:1]), self.blueprint_embedding])
        embedded_PE = table[cards.blueprint_ids_P]
        rows_SPC = torch.cat([cards.rows_SPC, embedded_PE.expand(len(cards.rows_SPC), -1, -1)], dim=-1)
        encoded: Tensor = self.card_encoder(rows_SPC)
        return encoded

    def _logits(
        self,
        trunk_BW: Tensor,
        slots_BSE: Tensor,
        cards_SPE: Tensor,
        offers_BSPK: Tensor,
        head: int,
        actions_BH: Tensor,
    ) -> Tensor:
        logits: Tensor
        slots_B = actions_BH[:, SLOT]
        if head == OP:
            logits = self.op_head(trunk_BW)
        elif head == SLOT:
            op_BE = self.op_embedding[actions_BH[:, OP]]
            query_BE = self.slot_query(torch.cat([trunk_BW, op_BE], dim=-1))
            logits = (self.slot_key(slots_BSE) @ query_BE[:, :, None])[:, :, 0]
        elif head == BLUEPRINT:
            rows_B = torch.arange(len(slots_B), device=slots_B.device)
            context_BE = self.blueprint_context(torch.cat([trunk_BW, slots_BSE[rows_B, slots_B]], dim=-1))
            offers_BPE = self.offer_encoder(offers_BSPK[rows_B, slots_B])
            logits = self.blueprint_score(context_BE[:, None] + cards_SPE[slots_B] + offers_BPE)[:, :, 0]
        else:
            assert head == BLEND, f"no scorer for head {head}"
            card_BE = cards_SPE[slots_B, actions_BH[:, BLUEPRINT]]
            logits = self.blend_head(torch.cat([trunk_BW, card_BE], dim=-1))
        return logits
