"""Verdicts, fail-closed: a claim holds only if nothing is missing, everything was checked and every bound says so.

Order: INVALID, NOT LEARNED, CONTROL FAILED, then BETTER, NO DIFFERENCE or WORSE from the intervals; too few run seeds
are NOT EVIDENCE whatever else holds, unless runs are missing. No verdict is ever taken from the best of several arms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

from esper.evidence.arms import ARMS, BASELINE
from esper.evidence.manifest import Check, Manifest
from esper.evidence.statistics import MIN_POLICIES, Comparison
from esper.evidence.summary import Summary
from esper.leyline import record

MIN_SEEDS = 20
"""Paired run seeds that a claim needs."""
MARGIN_PP = 0.5
"""Points by which "not worse" may be worse."""
MAX_GROWTH = 1.1
"""Parameters of a network that had no reason to grow, as a multiple of its host's."""
SATURATED = ("digits_saturated", "digits_mlp")
"""Tasks on which waiting is the right answer."""
RULES = ("random", "schedule", "periodic", "plateau", "fragrow")


class Outcome(str, Enum):
    """What became of a claim."""

    INVALID = "INVALID"
    NOT_EVIDENCE = "NOT EVIDENCE"
    NOT_LEARNED = "NOT LEARNED"
    CONTROL_FAILED = "CONTROL FAILED"
    BETTER = "BETTER"
    NO_DIFFERENCE = "NO DIFFERENCE"
    WORSE = "WORSE"


@record
class Requirement:
    """The subject against one arm: by how much it must be above, or may be below."""

    arm: str
    margin_pp: float


@record
class Claim:
    """One statement about the subject."""

    letter: str
    words: str
    requirements: tuple[Requirement, ...]
    learned: bool
    """True for a statement about a learned policy: its learning is checked too."""
    sizes: Callable[[Summary, str], list[Check]]
    """Conditions on parameters."""


@record
class Verdict:
    """The outcome of a claim, and why."""

    letter: str
    words: str
    outcome: Outcome
    reasons: tuple[str, ...]


def _no_sizes(summary: Summary, subject: str) -> list[Check]:
    return []


def _fewer_param_epochs(summary: Summary, subject: str) -> list[Check]:
    own, static = summary.arm(subject), summary.arm("static_final")
    if own is None or static is None:
        return []
    mine, theirs = own.figures["param_epochs"].mean, static.figures["param_epochs"].mean
    return [Check(name="parameter-epochs", passed=mine < theirs, found=f"{mine:,.0f}", limit=f"< {theirs:,.0f}")]


def _hardly_grown(summary: Summary, subject: str) -> list[Check]:
    own, host = summary.arm(subject), summary.arm(BASELINE)
    if own is None or host is None:
        return []
    ratio = own.figures["params"].mean / host.figures["params"].mean
    return [Check(name="parameters over host", passed=ratio <= MAX_GROWTH, found=f"{ratio:.3f}", limit="<= 1.1")]


def _above(*arms: str) -> tuple[Requirement, ...]:
    return tuple(Requirement(arm=arm, margin_pp=0.0) for arm in arms)


def claims_of(manifest: Manifest) -> list[Claim]:
    """The claims that this evaluation is about: none where fixed controllers are merely put side by side."""
    learned = ARMS[manifest.subject].learned
    if manifest.metric != "accuracy" or not (learned or any(ARMS[name].rebuilds for name in manifest.arms)):
        return []
    if manifest.task in SATURATED:
        stays = (Requirement(arm=BASELINE, margin_pp=MARGIN_PP),)
        words = "knows when not to grow"
        return [Claim(letter="E", words=words, requirements=stays, learned=learned, sizes=_hardly_grown)]
    fair = (*_above(BASELINE, "static_wide"), Requirement(arm="static_final", margin_pp=MARGIN_PP))
    claims = [Claim(letter="A", words="growing helps", requirements=fair, learned=learned, sizes=_fewer_param_epochs)]
    if not learned:
        return claims
    if any(policy["task"] != manifest.task for policy in manifest.policies):
        needs = _above(BASELINE, *RULES, "heuristic")
        return [*claims, Claim(letter="D", words="it transfers", requirements=needs, learned=True, sizes=_no_sizes)]
    return [
        *claims,
        Claim(letter="B", words="deciding well helps", requirements=_above(*RULES), learned=True, sizes=_no_sizes),
        Claim(
            letter="C",
            words="learning to decide helps",
            requirements=_above(*RULES, "heuristic"),
            learned=True,
            sizes=_no_sizes,
        ),
    ]


def judge(manifest: Manifest, summary: Summary) -> list[Verdict]:
    """A verdict for every claim."""
    return [_judge(claim, manifest, summary) for claim in claims_of(manifest)]


def _judge(claim: Claim, manifest: Manifest, summary: Summary) -> Verdict:
    steps = [
        (Outcome.INVALID, _missing_runs(summary)),
        (Outcome.NOT_EVIDENCE, _too_little(claim, manifest)),
        (Outcome.INVALID, _gaps(claim, manifest)),
        (Outcome.NOT_LEARNED, _failed(manifest.gates) if claim.learned else []),
        (Outcome.CONTROL_FAILED, _failed(manifest.controls) if manifest.controls else ["no control was run"]),
    ]
    for outcome, reasons in steps:
        if reasons:
            return _verdict(claim, outcome, reasons)
    return _from_intervals(claim, summary, manifest.subject)


def _missing_runs(summary: Summary) -> list[str]:
    counts = Counter(arm for arm, _, _ in summary.missing)
    return [f"{count} runs of {arm} are missing" for arm, count in counts.items()]


def _gaps(claim: Claim, manifest: Manifest) -> list[str]:
    """What was never run or looked at. Without it nothing can be said, whatever the rest seems to say."""
    needed = [manifest.subject, *(requirement.arm for requirement in claim.requirements)]
    gaps = [f"{name} was not run" for name in needed if name not in manifest.arms]
    if claim.learned:
        gaps += [f"{gate.name}: not checked: {gate.found}" for gate in manifest.gates if gate.passed is None]
        if not manifest.gates:
            gaps.append("learning gates: not checked: no log")
    return gaps


def _failed(checks: Sequence[Check]) -> list[str]:
    words = {None: "not checked", False: "failed"}
    return [f"{c.name} {words[c.passed]}: {c.found} (limit {c.limit})" for c in checks if c.passed is not True]


def _too_little(claim: Claim, manifest: Manifest) -> list[str]:
    few = []
    if len(manifest.run_seeds) < MIN_SEEDS:
        few.append(f"{len(manifest.run_seeds)} paired run seeds, a claim needs {MIN_SEEDS}")
    if claim.learned and 1 < len(manifest.policies) < MIN_POLICIES:
        few.append(f"{len(manifest.policies)} policies, a claim about their training needs {MIN_POLICIES}")
    return few


def _from_intervals(claim: Claim, summary: Summary, subject: str) -> Verdict:
    better, worse, reasons = True, False, []
    for requirement in claim.requirements:
        found = summary.subject_minus(requirement.arm)
        assert found is not None, "missing arms make a claim invalid"
        better = better and found.low is not None and found.low > -requirement.margin_pp
        worse = worse or (found.high is not None and found.high < -requirement.margin_pp)
        reasons.append(_difference(requirement, found))
    for check in claim.sizes(summary, subject):
        better = better and check.passed is True
        reasons.append(f"{check.name} {check.found} (required {check.limit})")
    outcome = Outcome.WORSE if worse else Outcome.BETTER if better else Outcome.NO_DIFFERENCE
    return _verdict(claim, outcome, reasons)


def _difference(requirement: Requirement, found: Comparison) -> str:
    if found.low is None or found.high is None:
        return f"{requirement.arm} {found.mean:+.2f} (no interval)"
    return f"{requirement.arm} {found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def _verdict(claim: Claim, outcome: Outcome, reasons: Sequence[str]) -> Verdict:
    return Verdict(letter=claim.letter, words=claim.words, outcome=outcome, reasons=tuple(reasons))
