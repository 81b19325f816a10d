"""Tamiyo's observations and masks as tensors. The rows come from tamiyo's feature tables; this module stacks them."""

# T steps, N envs, B = T x N rows, S slots, P blueprints, O ops, L blends, D global features, F slot features,
# C card features, K offer features, H heads

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES, HEADS, OPS, SAMPLING_ORDER, ActionMasks
from esper.simic.agent.policy import LSTMState

SLOT, BLUEPRINT, BLEND, OP = (HEAD_NAMES.index(name) for name in ("slot", "blueprint", "blend", "op"))
ORDER: tuple[int, ...] = tuple(HEAD_NAMES.index(name) for name in SAMPLING_ORDER)
# [H, O]: does the head matter for the op?
RELEVANT_HO = torch.tensor([[op in head.ops for op in OPS] for head in HEADS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """What each blueprint would cost and do in each slot. One per layout, shared by all envs and steps."""

    rows_SPC: Tensor
    blueprint_ids_P: Tensor
    """Row of each blueprint in the network's embedding table; 0 for a blueprint it was not built with."""


def make_cards(rows: Sequence[Sequence[Sequence[float]]], blueprints: Sequence[str], known: Sequence[str]) -> Cards:
    """Stacks the card rows of a layout for a network that was built with the blueprints `known`."""
    ids = [known.index(name) + 1 if name in known else 0 for name in blueprints]
    return Cards(rows_SPC=torch.tensor(rows, dtype=torch.float32), blueprint_ids_P=torch.tensor(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class TamiyoMasks:
    """Legal choices. The leading axes are `[N]` or `[T, N]`; `legal` answers for rows `[B]`."""

    op_NO: Tensor
    slot_NOS: Tensor
    blueprint_NSP: Tensor
    blend_NL: Tensor

    @property
    def num_rows(self) -> int:
        """B."""
        return self.op_NO.shape[0]

    @property
    def sampling_order(self) -> tuple[int, ...]:
        """Op, slot, blueprint, blend."""
        return ORDER

    def legal(self, head: int, actions_BH: Tensor) -> Tensor:
        """Legal choices of one head given the earlier ones; choice 0 alone where the op does not use the head."""
        if head == OP:
            return self.op_NO
        rows_B = torch.arange(self.num_rows, device=actions_BH.device)
        if head == SLOT:
            legal_BC = self.slot_NOS[rows_B, actions_BH[:, OP]]
        elif head == BLUEPRINT:
            legal_BC = self.blueprint_NSP[rows_B, actions_BH[:, SLOT]]
        else:
            legal_BC = self.blend_NL
        relevant_B = RELEVANT_HO.to(actions_BH.device)[head, actions_BH[:, OP]]
        first_C = torch.arange(legal_BC.shape[1], device=legal_BC.device) == 0
        return torch.where(relevant_B[:, None], legal_BC, first_C)

    def map(self, change: Callable[[Tensor], Tensor]) -> TamiyoMasks:
        """The same change of leading axes applied to every mask."""
        return TamiyoMasks(
            op_NO=change(self.op_NO),
            slot_NOS=change(self.slot_NOS),
            blueprint_NSP=change(self.blueprint_NSP),
            blend_NL=change(self.blend_NL),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """N envs at one moment, raw: the network normalises, with statistics that stay fixed for a round."""

    obs_ND: Tensor
    slot_obs_NSF: Tensor
    offers_NSPK: Tensor
    masks: TamiyoMasks


def make_observation(
    global_rows: Sequence[Sequence[float]],
    slot_rows: Sequence[Sequence[Sequence[float]]],
    offer_rows: Sequence[Sequence[Sequence[Sequence[float]]]],
    masks: Sequence[ActionMasks],
) -> Observation:
    """Stacks the rows and masks of N envs."""
    return Observation(
        obs_ND=torch.tensor(global_rows, dtype=torch.float32),
        slot_obs_NSF=torch.tensor(slot_rows, dtype=torch.float32),
        offers_NSPK=torch.tensor(offer_rows, dtype=torch.float32),
        masks=TamiyoMasks(
            op_NO=torch.tensor([mask.op for mask in masks]),
            slot_NOS=torch.tensor([mask.slot_by_op for mask in masks]),
            blueprint_NSP=torch.tensor([mask.blueprint_by_slot for mask in masks]),
            blend_NL=torch.tensor([mask.blend for mask in masks]),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvGroup:
    """Envs of one layout at one moment."""

    envs_G: Tensor
    """Their positions among all envs."""
    observation: Observation
    cards: Cards


@dataclass(frozen=True, slots=True, kw_only=True)
class TamiyoInputs:
    """T steps of N envs of one layout, as the network takes them."""

    obs_TND: Tensor
    slot_obs_TNSF: Tensor
    offers_TNSPK: Tensor
    masks: TamiyoMasks
    cards: Cards
    state: LSTMState | None
    """LSTM state before the first step; None where episodes start there."""
    starts_TN: Tensor | None
    """Steps before which the LSTM state is cleared; None for none."""

    def select(self, envs: Tensor) -> Self:
        """The sequences of some envs."""
        chosen = self.map(lambda tensor: tensor[:, envs])
        return replace(
            chosen,
            state=None if self.state is None else (self.state[0][:, envs], self.state[1][:, envs]),
            starts_TN=None if self.starts_TN is None else self.starts_TN[:, envs],
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same change of leading axes applied to observations and masks."""
        return replace(
            self,
            obs_TND=change(self.obs_TND),
            slot_obs_TNSF=change(self.slot_obs_TNSF),
            offers_TNSPK=change(self.offers_TNSPK),
            masks=self.masks.map(change),
        )

    def parts(self, envs: Tensor) -> list[tuple[Tensor, TamiyoInputs]]:
        """The sequences of some envs: one part, because they have one layout."""
        return [(envs, self.select(envs))]

    def tensors(self) -> list[Tensor]:
        """Observations and masks."""
        masks = self.masks
        legal = [masks.op_NO, masks.slot_NOS, masks.blueprint_NSP, masks.blend_NL]
        return [self.obs_TND, self.slot_obs_TNSF, self.offers_TNSPK, *legal]

    def forgetful(self) -> Self:
        """The same where every step is the first of its episode."""
        return replace(self, starts_TN=torch.ones(self.obs_TND.shape[:2], dtype=torch.bool))

    def rows(self, valid_TN: Tensor) -> tuple[Tensor, Tensor]:
        """What was seen on valid steps, of envs and of slots."""
        return self.obs_TND[valid_TN], self.slot_obs_TNSF[valid_TN].flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedInputs:
    """T steps of envs of several layouts: slots and blueprints differ in number, so they cannot be one tensor."""

    groups: tuple[tuple[Tensor, TamiyoInputs], ...]
    """The positions of envs of one layout, and their steps."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same change of leading axes applied to every group."""
        return replace(self, groups=tuple((envs_G, inputs.map(change)) for envs_G, inputs in self.groups))

    def parts(self, envs: Tensor) -> list[tuple[Tensor, TamiyoInputs]]:
        """The sequences of some envs, layout by layout."""
        found = [((envs[:, None] == envs_G).nonzero(), inputs) for envs_G, inputs in self.groups]
        return [(envs[at[:, 0]], inputs.select(at[:, 1])) for at, inputs in found if len(at)]

    def tensors(self) -> list[Tensor]:
        """Observations and masks of all groups."""
        return [tensor for _, inputs in self.groups for tensor in inputs.tensors()]

    def forgetful(self) -> Self:
        """The same where every step is the first of its episode."""
        return replace(self, groups=tuple((envs_G, inputs.forgetful()) for envs_G, inputs in self.groups))

    def rows(self, valid_TN: Tensor) -> tuple[Tensor, Tensor]:
        """What was seen on valid steps, of envs and of slots."""
        found = [inputs.rows(valid_TN[:, envs_G]) for envs_G, inputs in self.groups]
        return torch.cat([obs_BD for obs_BD, _ in found]), torch.cat([slots_BF for _, slots_BF in found])


RolloutInputs = TamiyoInputs | MixedInputs


def step_of(groups: Sequence[EnvGroup]) -> RolloutInputs:
    """A moment of all envs, as it is stored."""
    steps = tuple((group.envs_G, one_step(group.observation, group.cards, None)) for group in groups)
    return steps[0][1] if len(steps) == 1 else MixedInputs(groups=steps)


def one_step(observation: Observation, cards: Cards, state: LSTMState | None) -> TamiyoInputs:
    """A moment as a sequence of length one."""
    return TamiyoInputs(
        obs_TND=observation.obs_ND[None],
        slot_obs_TNSF=observation.slot_obs_NSF[None],
        offers_TNSPK=observation.offers_NSPK[None],
        masks=observation.masks.map(lambda mask: mask[None]),
        cards=cards,
        state=state,
        starts_TN=None,
    )
