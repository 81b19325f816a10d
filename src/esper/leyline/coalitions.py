"""What a coalition table says about its seeds: one function per quantity, for reports, rewards and people alike.

The functions see a game: `values` maps a bitmask of enabled players to points (larger is better), players are numbered
0..n-1 as in `CoalitionTable.slot_ids`. Whatever needs a coalition that was not measured is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from esper.leyline.records import CoalitionTable
from esper.leyline.slots import Attribution

MAX_EXACT_PLAYERS = 3
"""Up to this many players every coalition is measured."""


def full_coalition(num_players: int) -> int:
    """The mask with every player enabled."""
    return (1 << num_players) - 1


def coalition_mask(table: CoalitionTable, slot_ids: Iterable[str]) -> int:
    """The mask that enables exactly these slots."""
    mask = 0
    for slot_id in slot_ids:
        mask |= 1 << table.slot_ids.index(slot_id)
    return mask


def coalitions_to_measure(num_players: int, committed: int) -> tuple[int, ...]:
    """Masks a validation pass must cover, in ascending order.

    Args:
        num_players: Seeds with alpha > 0.
        committed: Mask of the fossils among them.
    """
    full = full_coalition(num_players)
    if num_players <= MAX_EXACT_PLAYERS:
        return tuple(range(full + 1))
    leave_one_out = {full & ~(1 << player) for player in range(num_players)}
    return tuple(sorted({full, 0, committed} | leave_one_out))


def contribution(values: Mapping[int, float], num_players: int, player: int) -> float | None:
    """Leave-one-out: points lost when this player alone is switched off."""
    full = full_coalition(num_players)
    return _difference(values, full, full & ~(1 << player))


def solo(values: Mapping[int, float], player: int) -> float | None:
    """Points of this player alone over none."""
    return _difference(values, 1 << player, 0)


def interaction(values: Mapping[int, float], player: int, other: int) -> float | None:
    """Points that two players bring together beyond what each brings alone."""
    assert player != other, "a player does not interact with itself"
    one, two = 1 << player, 1 << other
    if any(mask not in values for mask in (0, one, two, one | two)):
        return None
    return values[one | two] - values[one] - values[two] + values[0]


def interaction_sum(values: Mapping[int, float], num_players: int, player: int) -> float | None:
    """Sum of a player's interactions with each other player; None if one of them was not measured."""
    pairs = [interaction(values, player, other) for other in range(num_players) if other != player]
    measured = [pair for pair in pairs if pair is not None]
    return math.fsum(measured) if len(measured) == len(pairs) else None


def shapley(values: Mapping[int, float], num_players: int) -> tuple[float, ...] | None:
    """Each player's exact Shapley value; None unless all 2^n coalitions were measured."""
    if any(mask not in values for mask in range(full_coalition(num_players) + 1)):
        return None
    return tuple(_shapley(values, num_players, player) for player in range(num_players))


def attribution(values: Mapping[int, float], num_players: int, player: int) -> Attribution:
    """What one player is worth."""
    return Attribution(
        contribution_pp=contribution(values, num_players, player),
        solo_pp=solo(values, player),
        interaction_pp=interaction_sum(values, num_players, player),
    )


def attribute(table: CoalitionTable, values: Mapping[int, float]) -> dict[str, Attribution]:
    """What each seed of the table is worth, by slot id."""
    count = len(table.slot_ids)
    return {slot_id: attribution(values, count, player) for player, slot_id in enumerate(table.slot_ids)}


def _difference(values: Mapping[int, float], mask: int, baseline: int) -> float | None:
    if mask not in values or baseline not in values:
        return None
    return values[mask] - values[baseline]


def _shapley(values: Mapping[int, float], num_players: int, player: int) -> float:
    bit = 1 << player
    terms = []
    for others in range(full_coalition(num_players) + 1):
        if not others & bit:
            size = others.bit_count()
            weight = math.factorial(size) * math.factorial(num_players - size - 1) / math.factorial(num_players)
            terms.append(weight * (values[others | bit] - values[others]))
    return math.fsum(terms)
