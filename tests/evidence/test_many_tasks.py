"""Results on many tasks: scores by hand, intervals that find what was planted, and break-even on known curves."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from esper.evidence.many_tasks import COLUMNS, break_even, estimate, profile, score_runs, verdicts


def runs(
    gain: dict[str, Callable[[int], float]], *, tasks: int = 12, seeds: int = 3, noise: float = 0.2, policies: int = 1
) -> pd.DataFrame:
    """Tasks on which waiting scores 50 and the best arm gains 10; the last quarter has nothing to gain."""
    rng, rows = np.random.default_rng(1), []
    for task in range(tasks):
        full = task >= tasks * 3 // 4
        for seed in range(seeds):
            luck = rng.normal(scale=noise)
            rows.append((f"t{task:02}", f"k{task % 2}", "wait_only", "", seed, 50 + luck, 1.0, 0, ""))
            for arm, points in gain.items():
                for policy in range(policies if arm.startswith("ppo") else 1):
                    own = 0.0 if full else points(task) + rng.normal(scale=noise)
                    name = f"p{policy}" if arm.startswith("ppo") else ""
                    rows.append((f"t{task:02}", f"k{task % 2}", arm, name, seed, 50 + luck + own, 1.0, 0, ""))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def test_a_score_is_the_share_of_the_best_known_gain() -> None:
    rows = runs({"half": lambda t: 5.0, "best": lambda t: 10.0, "worse": lambda t: -30.0}, noise=0.0)
    scored = score_runs(rows).groupby(["saturated", "arm"]).score.mean()
    assert scored[False, "wait_only"] == 0.0
    assert scored[False, "half"] == pytest.approx(0.5)
    assert scored[False, "best"] == 1.0
    assert scored[False, "worse"] == -1.0, "cut off"
    assert scored[True, "best"] == 0.0


def test_where_nothing_can_be_gained_only_losses_count() -> None:
    rows = runs({"grows": lambda t: 10.0}, noise=0.0)
    rows.loc[(rows.task == "t11") & (rows.arm == "grows"), "points"] -= 0.4
    scored = score_runs(rows)
    assert scored[(scored.task == "t11") & (scored.arm == "grows")].score.tolist() == pytest.approx([-0.4] * 3)


def test_a_run_without_a_waiting_twin_is_refused() -> None:
    rows = runs({"a": lambda t: 1.0})
    with pytest.raises(ValueError, match="no wait_only run"):
        score_runs(rows[~((rows.arm == "wait_only") & (rows.run_seed == 1))])


def test_the_middle_half_of_the_tasks_counts() -> None:
    rows = runs({"arm": lambda t: 10.0 if t < 2 else 2.0, "best": lambda t: 10.0}, noise=0.0, seeds=1)
    assert estimate(score_runs(rows), "arm").value == pytest.approx(0.2)


def test_a_missing_run_is_named() -> None:
    scored = score_runs(runs({"a": lambda t: 1.0}))
    with pytest.raises(ValueError, match="runs of a  are missing on t03"):
        estimate(scored[~((scored.task == "t03") & (scored.arm == "a") & (scored.run_seed == 2))], "a")


def test_a_planted_lead_is_found_and_equal_arms_are_not_told_apart() -> None:
    rows = runs(
        {"ppo": lambda t: 8.0, "rule": lambda t: 5.0, "same": lambda t: 5.0, "best": lambda t: 10.0}, policies=5
    )
    scored = score_runs(rows)
    lead, tie = estimate(scored, "ppo", "rule"), estimate(scored, "rule", "same")
    assert lead.low > 0.0
    assert lead.low < lead.value < lead.high
    assert tie.low < 0.0 < tie.high
    assert estimate(scored, "ppo", "rule") == lead, "the same numbers give the same interval"


def test_a_lead_of_one_policy_in_two_is_no_lead() -> None:
    rows = runs({"ppo": lambda t: 5.0, "rule": lambda t: 5.0, "best": lambda t: 10.0}, policies=2, noise=0.01)
    rows.loc[rows.policy_id == "p1", "points"] += 4.0
    assert estimate(score_runs(rows), "ppo", "rule").low <= 0.0 + 0.05


def test_a_profile_falls_from_all_to_none() -> None:
    scored = score_runs(runs({"half": lambda t: 5.0, "best": lambda t: 10.0}, noise=0.0))
    shares = profile(scored, "half", [-1.0, 0.0, 0.4, 0.6, 1.0])
    assert shares == [1.0, 1.0, 0.75, 0.0, 0.0]


@pytest.mark.parametrize(
    ("curve", "wanted", "expected"),
    [
        ({4: 52.0, 16: 54.0, 64: 58.0}, 56.0, 32.0),
        ({4: 57.0, 64: 58.0}, 56.0, 4.0),
        ({4: 52.0, 64: 54.0}, 56.0, math.inf),
        ({4: 54.0, 16: 53.0, 64: 56.0}, 56.0, 64.0),
    ],
    ids=["between", "at once", "never", "worse in between"],
)
def test_break_even_on_known_curves(curve: dict[int, float], wanted: float, expected: float) -> None:
    rows = [("t", "k", "wait_only", "", 0, 50.0, 1.0, 0, ""), ("t", "k", "ppo", "p", 0, wanted, 1.0, 0, "")]
    rows += [("t", "k", "search_tpe", "", 0, value, 1.0, episodes, "") for episodes, value in curve.items()]
    found = break_even(score_runs(pd.DataFrame(rows, columns=list(COLUMNS))), "ppo", "search_tpe")
    assert found["t"] == pytest.approx(expected)


def test_a_task_that_was_not_searched_to_the_end_says_nothing_of_break_even() -> None:
    rows = []
    for task, most in (("long", 64), ("short", 16)):
        rows += [(task, "k", "wait_only", "", 0, 50.0, 1.0, 0, ""), (task, "k", "ppo", "p", 0, 60.0, 1.0, 0, "")]
        rows += [
            (task, "k", "search_tpe", "", 0, 55.0, 1.0, episodes, "") for episodes in (4, 16, 64) if episodes <= most
        ]
    assert set(break_even(score_runs(pd.DataFrame(rows, columns=list(COLUMNS))), "ppo", "search_tpe")) == {"long"}


def test_verdicts_say_what_was_planted_and_what_is_missing() -> None:
    rows = runs(
        {"ppo": lambda t: 9.0, "rule": lambda t: 5.0, "other": lambda t: 2.0, "best": lambda t: 10.0}, policies=5
    )
    found = {
        v.claim.split(":")[0] + v.claim[-9:]: v
        for v in verdicts(score_runs(rows), "ppo", ["rule", "other"], ["blink", "open"])
    }
    by_claim = {name[:2]: verdict for name, verdict in found.items()}
    assert by_claim["D1"].holds is True
    assert "minus rule" in by_claim["D1"].found
    assert by_claim["D2"].holds is None
    assert by_claim["D3"].holds is True
    assert by_claim["D4"].holds is None
    rows.loc[(rows.arm == "ppo") & (rows.task >= "t09"), "params_ratio"] = 1.5
    greedy = verdicts(score_runs(rows), "ppo", ["rule"], ["blink", "open"])
    assert [v.holds for v in greedy if v.claim.startswith("D3")] == [False]
