"""The reward modes: named tuples of terms. The reward is the sum of a mode's terms and nothing is added elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial

from esper.leyline import check_known, record
from esper.simic.rewards import terms
from esper.simic.rewards.types import RewardComponentsTelemetry, RewardConfig, RewardInputs

PLUS_NOW_SHARE = 0.3
"""Share of the commit payment that basic_plus pays at once."""


class TermKind(str, Enum):
    """What a term does to the sum over an episode."""

    OUTCOME = "outcome"
    NEUTRAL = "neutral"
    """Cancels over every episode: it only anticipates the outcome."""
    PRICED = "priced"


@record
class Term:
    """One summand of a reward."""

    name: str
    kind: TermKind
    compute: Callable[[RewardInputs], float]


@record
class RewardMode:
    """A reward: what it is for and what it adds up."""

    name: str
    description: str
    terms: tuple[Term, ...]
    needs_reference: bool
    """True where a calibrated curve of a waiting host is required."""


TERMINAL = Term(name="terminal", kind=TermKind.OUTCOME, compute=terms.terminal)
SIZE = Term(name="size", kind=TermKind.OUTCOME, compute=terms.size)
PBRS = Term(name="pbrs", kind=TermKind.NEUTRAL, compute=terms.pbrs)
CREDIT = Term(name="credit", kind=TermKind.NEUTRAL, compute=terms.credit)
RENT = Term(name="rent", kind=TermKind.PRICED, compute=terms.rent)
SHOCK = Term(name="shock", kind=TermKind.PRICED, compute=terms.shock)
ACTION = Term(name="action", kind=TermKind.PRICED, compute=terms.action)
COMMIT = Term(name="commit", kind=TermKind.PRICED, compute=partial(terms.commit, now_share=1.0))
COMMIT_NOW = Term(name="commit", kind=TermKind.PRICED, compute=partial(terms.commit, now_share=PLUS_NOW_SHARE))
DRIP = Term(name="drip", kind=TermKind.PRICED, compute=partial(terms.drip, now_share=PLUS_NOW_SHARE))
ROLLBACK = Term(name="rollback", kind=TermKind.OUTCOME, compute=terms.rollback)

_REFERENCE_TERMS = frozenset({"commit", "drip"})


def _mode(name: str, description: str, *chosen: Term) -> RewardMode:
    names = {term.name for term in chosen}
    return RewardMode(
        name=name,
        description=description,
        terms=(*chosen, ROLLBACK),
        needs_reference=bool(names & _REFERENCE_TERMS),
    )


MODES: dict[str, RewardMode] = {
    mode.name: mode
    for mode in (
        _mode("shaped", "outcome, stage prior and measured credit", TERMINAL, SIZE, PBRS, CREDIT, RENT, SHOCK, ACTION),
        _mode("simplified", "outcome and stage prior", TERMINAL, SIZE, PBRS, ACTION),
        _mode("basic", "outcome, stage prior and a bonus at commit", TERMINAL, SIZE, PBRS, RENT, ACTION, COMMIT),
        _mode(
            "basic_plus",
            "as basic, but most of the bonus is paid while the fossil keeps contributing",
            TERMINAL,
            SIZE,
            PBRS,
            RENT,
            ACTION,
            COMMIT_NOW,
            DRIP,
        ),
        _mode("sparse", "outcome only", TERMINAL, SIZE),
        _mode("minimal", "outcome and the price of churn", TERMINAL, SIZE, ACTION),
        _mode(
            "escrow",
            "measured credit as an advance on the outcome, settled in full at the end",
            TERMINAL,
            SIZE,
            CREDIT,
            RENT,
            ACTION,
        ),
    )
}
DEFAULT_MODE = "shaped"


def get_mode(name: str) -> RewardMode:
    """Looks a reward mode up; ValueError with the known names if there is none."""
    check_known("reward mode", name, MODES)
    return MODES[name]


def check_mode(name: str, config: RewardConfig) -> None:
    """Refuses a mode that cannot be computed under a configuration, before a run starts.

    Raises:
        ValueError: The mode is unknown, or needs a reference curve that was not calibrated.
    """
    if get_mode(name).needs_reference and config.calibration.reference is None:
        able = ", ".join(mode.name for mode in MODES.values() if not mode.needs_reference)
        raise ValueError(
            f"reward mode {name!r} needs a calibrated reference curve and this task has none; "
            f"calibrate it, or choose one of {able}"
        )


def compute_components(mode: str, inputs: RewardInputs) -> RewardComponentsTelemetry:
    """Prices one transition. No memory: equal inputs give equal floats."""
    return RewardComponentsTelemetry(amounts={term.name: term.compute(inputs) for term in get_mode(mode).terms})
