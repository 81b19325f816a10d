"""Verdicts are as planted, and every gap closes them."""

from dataclasses import replace

import pytest

from esper.evidence.claims import ClaimOutcome, ClaimVerdict, judge_claims
from esper.evidence.manifest import CheckResult, EvaluationManifest
from esper.evidence.results import RunResult
from tests.evidence.made_up import POLICY, manifest, rows, summary

RULES = ["schedule", "largest", "periodic", "plateau", "fragrow", "heuristic"]
SEARCHES = ["search_random", "search_tpe"]
ARMS = ["wait_only", *RULES, *SEARCHES, "ppo_greedy", "ppo_sampled", "random", "static_200"]
WELL = {**dict.fromkeys(ARMS, 80.0), "ppo_greedy": 84.0, "static_200": 83.5}


def verdicts(found: EvaluationManifest, made: list[RunResult]) -> dict[str, ClaimVerdict]:
    return {verdict.letter: verdict for verdict in judge_claims(found, summary(found, made))}


def outcomes(found: EvaluationManifest, made: list[RunResult]) -> dict[str, ClaimOutcome]:
    return {letter: verdict.outcome for letter, verdict in verdicts(found, made).items()}


def test_a_policy_that_beats_every_arm_is_better() -> None:
    found = manifest(ARMS)
    assert outcomes(found, rows(found, WELL)) == dict.fromkeys("ABC", ClaimOutcome.BETTER)


@pytest.mark.parametrize("arm", ["wait_only", "random", "fragrow", "heuristic", "search_tpe"])
def test_one_arm_that_is_as_good_takes_the_claim_away(arm: str) -> None:
    found = manifest(ARMS)
    seen = outcomes(found, rows(found, {**WELL, arm: 84.0}))
    touched = {"wait_only": "A", "random": "BC", "fragrow": "BC", "heuristic": "C", "search_tpe": "C"}[arm]
    assert {letter for letter, outcome in seen.items() if outcome is not ClaimOutcome.BETTER} == set(touched)


def test_an_arm_that_is_better_makes_the_policy_worse() -> None:
    found = manifest(ARMS)
    assert outcomes(found, rows(found, {**WELL, "plateau": 90.0}))["B"] is ClaimOutcome.WORSE


def test_equal_arms_differ_in_nothing() -> None:
    found = manifest(ARMS)
    seen = outcomes(found, rows(found, dict.fromkeys(ARMS, 80.0)))
    assert set(seen.values()) == {ClaimOutcome.NO_DIFFERENCE}


def test_growing_may_be_a_little_below_the_best_plain_network_of_its_size_but_not_more() -> None:
    found = manifest(ARMS)
    assert outcomes(found, rows(found, {**WELL, "static_200": 84.1}, noise=0.1))["A"] is ClaimOutcome.BETTER
    assert outcomes(found, rows(found, {**WELL, "static_200": 84.6}, noise=0.1))["A"] is ClaimOutcome.WORSE


def test_growing_must_train_for_less_than_the_best_plain_network_of_its_size() -> None:
    found = manifest(ARMS)
    made = [replace(row, training_macs=9_000_000) for row in rows(found, WELL)]
    assert outcomes(found, made)["A"] is ClaimOutcome.NO_DIFFERENCE


@pytest.mark.parametrize("arm", ["wait_only", "random", "ppo_greedy"])
def test_one_missing_row_makes_everything_invalid(arm: str) -> None:
    found = manifest(ARMS)
    made = rows(found, WELL)
    lost = next(row for row in made if row.arm == arm)
    made.remove(lost)
    seen = verdicts(found, made)
    assert {verdict.outcome for verdict in seen.values()} == {ClaimOutcome.INVALID}
    assert f"1 runs of {arm} are missing" in seen["A"].reasons


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm not in ("ppo_greedy", "ppo_sampled")])
def test_a_claim_without_one_of_its_control_arms_is_invalid(arm: str) -> None:
    found = manifest([name for name in ARMS if name != arm])
    seen = verdicts(found, rows(found, WELL))
    assert any(verdict.outcome is ClaimOutcome.INVALID for verdict in seen.values())
    assert all(
        f"{arm} was not run" in verdict.reasons for verdict in seen.values() if verdict.outcome is ClaimOutcome.INVALID
    )


def test_learning_checks_and_controls_come_before_any_interval() -> None:
    failed = CheckResult(name="x", passed=False, found="bad", limit="good")
    unread = CheckResult(name="x", passed=None, found="no log", limit="good")
    seen = summary(manifest(ARMS), rows(manifest(ARMS), WELL))

    def outcome(**checks: object) -> ClaimOutcome:
        found = manifest(ARMS, **checks)  # type: ignore[arg-type]
        return next(verdict.outcome for verdict in judge_claims(found, seen) if verdict.letter == "C")

    assert outcome(learning_checks=(failed,)) is ClaimOutcome.NOT_LEARNED
    assert outcome(controls=(failed,)) is ClaimOutcome.CONTROL_FAILED
    assert outcome(controls=(unread,)) is ClaimOutcome.CONTROL_FAILED
    assert outcome(controls=()) is ClaimOutcome.CONTROL_FAILED
    assert outcome(learning_checks=(failed,), controls=(failed,)) is ClaimOutcome.NOT_LEARNED


def test_a_policy_without_a_log_has_no_valid_claim() -> None:
    unread = CheckResult(name="learning checks", passed=None, found="no log", limit="all passed")
    for checks in ((unread,), ()):
        found = manifest(ARMS, learning_checks=checks)
        verdict = verdicts(found, rows(found, WELL))["B"]
        assert verdict.outcome is ClaimOutcome.INVALID
        assert "not checked: no log" in verdict.reasons[0]


def test_fewer_than_twenty_seeds_are_not_evidence() -> None:
    found = manifest(ARMS, num_seeds=19)
    assert set(outcomes(found, rows(found, WELL)).values()) == {ClaimOutcome.NOT_EVIDENCE}


def test_two_policies_are_neither_one_policy_nor_a_method() -> None:
    pair = tuple({**POLICY, "policy_id": name} for name in "ab")
    found = manifest(ARMS, policies=pair)
    assert outcomes(found, rows(found, WELL))["C"] is ClaimOutcome.NOT_EVIDENCE
    five = manifest(ARMS, policies=tuple({**POLICY, "policy_id": name} for name in "abcde"))
    assert outcomes(five, rows(five, WELL))["C"] is ClaimOutcome.BETTER


def test_another_task_than_the_trained_one_is_a_claim_of_transfer() -> None:
    found = manifest(ARMS, task="fashion_blind")
    seen = outcomes(found, rows(found, WELL))
    assert seen == {"A": ClaimOutcome.BETTER, "D": ClaimOutcome.BETTER}


def test_on_a_saturated_host_not_growing_is_the_claim() -> None:
    arms = ["wait_only", "ppo_greedy"]
    found = manifest(arms, task="digits_saturated")
    made = rows(found, dict.fromkeys(arms, 95.0), noise=0.2)
    assert outcomes(found, made) == {"E": ClaimOutcome.NO_DIFFERENCE}, "it doubled its parameters for nothing"
    lean = [replace(row, params=105 if row.arm == "ppo_greedy" else 100) for row in made]
    assert outcomes(found, lean) == {"E": ClaimOutcome.BETTER}
    harmed = [replace(row, test_accuracy_pct=90.0 if row.arm == "ppo_greedy" else 95.0) for row in lean]
    assert outcomes(found, harmed) == {"E": ClaimOutcome.WORSE}


def test_fixed_controllers_side_by_side_claim_nothing() -> None:
    found = manifest(["wait_only", "schedule", "periodic"], subject="schedule", learning_checks=())
    assert outcomes(found, rows(found, WELL)) == {}
    static = manifest(["wait_only", "schedule", "static_200"], subject="schedule", learning_checks=())
    assert set(outcomes(static, rows(static, WELL))) == {"A"}


def test_without_a_budget_there_is_no_bar_to_reach() -> None:
    found = manifest(ARMS, budget=None)
    verdict = verdicts(found, rows(found, WELL))["A"]
    assert verdict.outcome is ClaimOutcome.INVALID
    assert "static_frontier was not run" in verdict.reasons


def test_a_task_measured_by_its_loss_is_reported_not_claimed() -> None:
    found = manifest(ARMS, metric="loss")
    assert outcomes(found, rows(found, WELL)) == {}
    difference = summary(found, rows(found, WELL)).subject_minus("wait_only")
    assert difference is not None
    assert difference.mean == pytest.approx(4 / 40, abs=0.02), "a smaller loss is a gain"
