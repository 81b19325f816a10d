"""What each mode makes worth doing: the table of a toy host, and orderings that must hold on random ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from esper.leyline import EpochReport, derive_seed
from esper.simic.rewards import FAMILY_NAMES, MODES
from esper.tamiyo.simulation import SimulationSpec
from tests.fakes import Step, play, script_chooser
from tests.simic.rewards.pricing import discounted_return, make_config
from tests.simic.rewards.toys import HOLD, KEEP, PLANS, PRUNE, life, live, toy

# Discounted return of the scripted lives at the default weights: horizon 60, gamma 0.995, span 15 points.
TABLE_MODES = ("shaped", "simplified", "basic", "basic_plus", "sparse", "minimal", "escrow")
TABLE: dict[str, tuple[float, ...]] = {
    "pair kept": (0.662, 0.668, 0.730, 0.787, 0.699, 0.668, 0.664),
    "good kept early": (0.453, 0.459, 0.564, 0.563, 0.474, 0.459, 0.454),
    "good kept late": (0.449, 0.452, 0.544, 0.546, 0.466, 0.452, 0.451),
    "wait": (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    "last-minute germination": (-0.009, -0.009, -0.009, -0.009, 0.0, -0.009, -0.009),
    "bad pruned while blending": (-0.023, -0.018, -0.019, -0.019, 0.0, -0.018, -0.019),
    "good pruned from holding": (-0.032, -0.020, -0.022, -0.022, 0.0, -0.020, -0.022),
    "inert kept": (-0.043, -0.037, -0.042, -0.042, -0.022, -0.037, -0.042),
    "one of the pair kept": (-0.045, -0.034, -0.034, -0.025, 0.001, -0.034, -0.037),
    "parasite kept": (-0.068, -0.062, -0.066, -0.066, -0.047, -0.062, -0.066),
    "cycling": (-0.091, -0.090, -0.091, -0.091, 0.0, -0.090, -0.091),
    "oscillating": (-0.115, -0.079, -0.081, -0.081, -0.023, -0.079, -0.081),
    "oversized kept": (-0.176, -0.142, -0.167, -0.167, -0.126, -0.142, -0.172),
    "bad kept": (-0.341, -0.335, -0.339, -0.370, -0.319, -0.335, -0.339),
    "good held": (-0.418, -0.412, -0.416, -0.416, -0.397, -0.412, -0.416),
    "crash": (-1.66, -1.65, -1.55, -1.58, -1.64, -1.65, -1.66),
}
# The table was made for a lifecycle with two more paid ADVANCE ops per life (0.004 each life) and for other pauses
# between the two seeds of a pair, which moves only what basic pays at a commit.
TOLERANCE = 0.03
DISTINCT = 0.01
"""Rows of the table that differ by more than this must come out in the same order."""


@pytest.fixture(scope="module")
def toy_lives() -> dict[str, list[Step]]:
    return {name: live(toy(), name) for name in PLANS}


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_the_incentive_table_is_reproduced(toy_lives: dict[str, list[Step]], mode: str, family: str) -> None:
    config = make_config(toy(), family=family)
    column = TABLE_MODES.index(mode)
    expected = {name: row[column] for name, row in TABLE.items()}
    found = {name: discounted_return(mode, toy_lives[name], toy(), config) for name in TABLE}
    assert found == pytest.approx(expected, abs=TOLERANCE)
    for better, worse in itertools.permutations(TABLE, 2):
        if expected[better] > expected[worse] + DISTINCT:
            assert found[better] > found[worse], f"{better} must be worth more than {worse}"


# (better, worse, slack): better > worse - slack, on every toy.
ORDERINGS: tuple[tuple[str, str, float], ...] = (
    ("good kept early", "good kept late", 0.01),
    ("good kept late", "wait", 0.0),
    ("pair kept", "wait", 0.0),
    ("pair kept", "one of the pair kept", 0.0),
    ("wait", "cycling", 0.0),
    ("wait", "oscillating", 0.0),
    ("wait", "last-minute germination", 0.0),
    ("wait", "good held", 0.0),
    ("wait", "bad held", 0.0),
    ("wait", "good pruned from holding", 0.0),
    ("wait", "bad pruned while blending", 0.0),
    ("wait", "parasite pruned", 0.0),
    ("wait", "parasite kept", 0.0),
    ("wait", "inert kept", 0.0),
    ("wait", "oversized kept", 0.0),
    ("bad pruned while blending", "bad kept", 0.0),
    ("parasite pruned", "parasite kept", 0.0),
    ("bad pruned while blending", "bad held", 0.0),
    *((name, "crash", 0.0) for name in PLANS if name != "crash"),
)


def random_toy(index: int) -> SimulationSpec:
    rng = random.Random(derive_seed(0, None, None, None, f"toy:{index}"))
    return toy(
        good_pp=rng.uniform(3.0, 15.0),
        harm_pp=rng.uniform(2.0, 10.0),
        dependence_pp=rng.uniform(2.0, 12.0),
        parasite_pp=rng.uniform(5.0, 20.0),
        params=round(1000 * rng.uniform(0.05, 1.0)),
        host_epochs=rng.uniform(4.0, 10.0),
        noise_pp=rng.uniform(0.1, 1.0),
    )


def expected_end(noisy: list[Step], quiet: list[Step]) -> list[Step]:
    """The noisy episode with the committed metric of its last epoch at its expectation."""
    last: EpochReport = quiet[-1].after
    after = replace(
        noisy[-1].after, committed_accuracy_pct=last.committed_accuracy_pct, committed_loss=last.committed_loss
    )
    return [*noisy[:-1], replace(noisy[-1], after=after)]


def violations(index: int, modes: list[str], *, reference: bool) -> list[str]:
    spec = random_toy(index)
    quiet = replace(spec, noise_pp=0.0)
    lives = {name: expected_end(live(spec, name), live(quiet, name)) for name in PLANS}
    found = []
    for mode, family in itertools.product(modes, FAMILY_NAMES):
        config = make_config(spec, family=family, reference=reference)
        worth = {name: discounted_return(mode, steps, spec, config) for name, steps in lives.items()}
        found += [
            f"toy {index}, {mode}, {family}: {better} {worth[better]:.4f} against {worse} {worth[worse]:.4f}"
            for better, worse, slack in ORDERINGS
            if not worth[better] > worth[worse] - slack
        ]
    return found


NOT_SPARSE = [mode for mode in MODES if mode != "sparse"]
NEUTRAL_OR_FREE = ["shaped", "simplified", "minimal", "escrow"]


@pytest.mark.parametrize("index", range(10))
def test_required_orderings_hold_on_random_toys(index: int) -> None:
    assert violations(index, NOT_SPARSE, reference=True) == []


@pytest.mark.parametrize("index", range(10, 13))
def test_modes_that_pay_no_bonus_keep_the_orderings_without_a_reference_curve(index: int) -> None:
    assert violations(index, NEUTRAL_OR_FREE, reference=False) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_required_orderings_hold_on_two_hundred_random_toys() -> None:
    found = [line for index in range(200) for line in violations(index, NOT_SPARSE, reference=True)]
    # The bonus of basic is paid in one noisy epoch, which can tip early against late: 1 toy of 200, in both families.
    assert [line for line in found if "basic," not in line or "good kept early" not in line] == []
    assert len(found) <= 2, "\n".join(found)


HOLLOW = life("left", 5, KEEP, "r0c0") + life("right", 6, PRUNE, "r0c1", hold=HOLD + 2)
"""One of a pair is kept while the other still makes it look good; then the other is pruned."""


def test_a_commit_that_is_hollowed_out_later_pays_only_where_commits_are_paid_for() -> None:
    """The known weakness of the bonus: it stays small against keeping both, and the drip takes most of it back."""
    spec = toy()
    config = make_config(spec)
    steps = play(spec, script_chooser(HOLLOW))
    worth = {mode: discounted_return(mode, steps, spec, config) for mode in NOT_SPARSE}
    assert [mode for mode in NOT_SPARSE if worth[mode] > 0.0] == ["basic", "basic_plus"]
    assert worth["basic_plus"] < 0.5 * worth["basic"]
    assert worth["basic"] < 0.1 * discounted_return("basic", live(spec, "pair kept"), spec, config)


def test_sparse_pays_for_nothing_but_the_outcome(toy_lives: dict[str, list[Step]]) -> None:
    config = make_config(toy())
    for name in ("wait", "cycling", "last-minute germination"):
        assert discounted_return("sparse", toy_lives[name], toy(), config) == pytest.approx(0.0, abs=1e-12)
