"""Verdicts, fail-closed: a claim holds only if nothing is missing, everything was checked and every bound says so.

Order: INVALID, NOT LEARNED, CONTROL FAILED, then BETTER, NO DIFFERENCE or WORSE from the intervals; too few run seeds
are NOT EVIDENCE whatever else holds, unless runs are missing. No verdict is ever taken from the best of several arms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

from esper.evidence import limits
from esper.evidence.arms import BASELINE, SEARCHES, get_arm
from esper.evidence.manifest import CheckResult, EvaluationManifest
from esper.evidence.summary import Summary, bar_of
from esper.leyline import record

SATURATED_TASKS = ("digits_saturated", "digits_mlp")
"""Tasks on which waiting is the right answer."""
FIXED_RULES = ("random", "schedule", "largest", "periodic", "plateau", "fragrow")


Sizes = Callable[[Summary, str], list[CheckResult]]


class ClaimOutcome(str, Enum):
    """What became of a claim."""

    INVALID = "INVALID"
    NOT_EVIDENCE = "NOT EVIDENCE"
    NOT_LEARNED = "NOT LEARNED"
    CONTROL_FAILED = "CONTROL FAILED"
    BETTER = "BETTER"
    NO_DIFFERENCE = "NO DIFFERENCE"
    WORSE = "WORSE"


def _cheaper_than(rival: str) -> Sizes:
    def cheaper(summary: Summary, subject: str) -> list[CheckResult]:
        own, static = (summary.mean(arm, "training_macs") for arm in (subject, rival))
        if own is None or static is None:
            return []
        limit = f"< {static:,.0f}"
        return [CheckResult(name="training MACs", passed=own < static, found=f"{own:,.0f}", limit=limit)]

    return cheaper


def _hardly_grown(summary: Summary, subject: str) -> list[CheckResult]:
    own, host = (summary.mean(arm, "params") for arm in (subject, BASELINE))
    if own is None or host is None:
        return []
    ratio, most = own / host, limits.MAX_GROWTH
    return [CheckResult(name="parameters over host", passed=ratio <= most, found=f"{ratio:.3f}", limit=f"<= {most}")]


@record
class Claim:
    """One statement about the subject."""

    letter: str
    words: str
    margins_pp: dict[str, float]
    """Arm -> points by which the subject may be below it; with 0 it must be above."""
    learned: bool
    """True for a statement about a learned policy: its learning is checked too."""
    sizes: Sizes = lambda summary, subject: []
    """Conditions on parameters and costs."""


@record
class ClaimVerdict:
    """The outcome of a claim, and why."""

    letter: str
    words: str
    outcome: ClaimOutcome
    reasons: tuple[str, ...]


def claims_of(manifest: EvaluationManifest) -> list[Claim]:
    """The claims that this evaluation is about: none where fixed controllers are merely put side by side."""
    learned = get_arm(manifest.subject).learned
    if manifest.metric != "accuracy" or not (learned or any(get_arm(name).static for name in manifest.arms)):
        return []
    above_rules = dict.fromkeys(FIXED_RULES, 0.0)
    above_all = {**above_rules, "heuristic": 0.0}
    above_searches = {**above_all, **dict.fromkeys(SEARCHES, 0.0)}
    bar = bar_of(manifest)
    growing = {BASELINE: 0.0, bar: limits.STATIC_MARGIN_PP}
    waiting = {BASELINE: limits.MARGIN_PP}
    if manifest.task in SATURATED_TASKS:
        words = "knows when not to grow"
        return [Claim(letter="E", words=words, margins_pp=waiting, learned=learned, sizes=_hardly_grown)]
    words = "growing pays"
    claims = [Claim(letter="A", words=words, margins_pp=growing, learned=learned, sizes=_cheaper_than(bar))]
    if learned and any(policy["task"] != manifest.task for policy in manifest.policies):
        transfer = {BASELINE: 0.0, **above_all}
        claims.append(Claim(letter="D", words="it transfers", margins_pp=transfer, learned=True))
    elif learned:
        claims.append(Claim(letter="B", words="deciding well helps", margins_pp=above_rules, learned=True))
        claims.append(Claim(letter="C", words="learning to decide helps", margins_pp=above_searches, learned=True))
    return claims


def judge_claims(manifest: EvaluationManifest, summary: Summary) -> list[ClaimVerdict]:
    """A verdict for every claim."""
    missing = Counter(arm for arm, _, _ in summary.missing)
    controls = _failed(manifest.controls) if manifest.controls else ["no control was run"]
    verdicts = []
    for claim in claims_of(manifest):
        obstacles = [
            (ClaimOutcome.INVALID, [f"{count} runs of {arm} are missing" for arm, count in missing.items()]),
            (ClaimOutcome.NOT_EVIDENCE, _too_little(claim, manifest)),
            (ClaimOutcome.INVALID, _gaps(claim, manifest)),
            (ClaimOutcome.NOT_LEARNED, _failed(manifest.learning_checks) if claim.learned else []),
            (ClaimOutcome.CONTROL_FAILED, controls),
        ]
        found = next((obstacle for obstacle in obstacles if obstacle[1]), None)
        outcome, reasons = found or _from_intervals(claim, summary, manifest.subject)
        verdicts.append(ClaimVerdict(letter=claim.letter, words=claim.words, outcome=outcome, reasons=tuple(reasons)))
    return verdicts


def _too_little(claim: Claim, manifest: EvaluationManifest) -> list[str]:
    few = []
    if len(manifest.run_seeds) < limits.MIN_SEEDS:
        few.append(f"{len(manifest.run_seeds)} paired run seeds, a claim needs {limits.MIN_SEEDS}")
    if claim.learned and 1 < len(manifest.policies) < limits.MIN_POLICIES:
        few.append(f"{len(manifest.policies)} policies, a claim about their training needs {limits.MIN_POLICIES}")
    return few


def _gaps(claim: Claim, manifest: EvaluationManifest) -> list[str]:
    """What was never run or looked at. Without it nothing can be said, whatever the rest seems to say."""
    gaps = [f"{name} was not run" for name in (manifest.subject, *claim.margins_pp) if name not in manifest.arms]
    if claim.learned:
        unread = [check for check in manifest.learning_checks if check.passed is None]
        gaps += [f"{check.name}: not checked: {check.found}" for check in unread]
        if not manifest.learning_checks:
            gaps.append("learning checks: not checked: no log")
    return gaps


def _failed(checks: Sequence[CheckResult]) -> list[str]:
    words = {None: "not checked", False: "failed"}
    return [f"{c.name} {words[c.passed]}: {c.found} (limit {c.limit})" for c in checks if c.passed is not True]


def _from_intervals(claim: Claim, summary: Summary, subject: str) -> tuple[ClaimOutcome, list[str]]:
    better, worse, reasons = True, False, []
    for arm, margin in claim.margins_pp.items():
        found = summary.subject_minus(arm)
        assert found is not None, "missing arms make a claim invalid"
        better = better and found.low is not None and found.low > -margin
        worse = worse or (found.high is not None and found.high < -margin)
        bounds = "(no interval)" if found.low is None else f"[{found.low:+.2f}, {found.high:+.2f}]"
        reasons.append(f"{arm} {found.mean:+.2f} {bounds}")
    for check in claim.sizes(summary, subject):
        better = better and check.passed is True
        reasons.append(f"{check.name} {check.found} (required {check.limit})")
    return ClaimOutcome.WORSE if worse else ClaimOutcome.BETTER if better else ClaimOutcome.NO_DIFFERENCE, reasons
