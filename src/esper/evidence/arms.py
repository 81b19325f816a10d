"""What an evaluation is asked to be, and its arms: what they need from one another, in which order they run.

Names only, and light: the command line reads this before torch is loaded. How an arm is played is in runs.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from esper.leyline import record

BASELINE = "wait_only"
GREEDY, SAMPLED = "ppo_greedy", "ppo_sampled"


@record
class Arm:
    """One way to train the hosts of a task."""

    name: str
    description: str
    learned: bool = False
    """True for the frozen policy itself."""
    tunable: bool = False
    """True if `--tune` has something to choose."""
    needs_sampled: bool = False
    """True if, given a policy, it depends on what the policy's samples did."""
    rebuilds: bool = False
    """True if it trains a fixed network made after what the subject grew on the same run seed."""


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(name=BASELINE, description="the host, left alone"),
        Arm(name="schedule", description="a declared list of ops", tunable=True),
        Arm(name="periodic", description="plants every so many epochs", tunable=True),
        Arm(name="plateau", description="plants when the validation loss stops falling", tunable=True),
        Arm(name="fragrow", description="plants the less often the more the host overfits", tunable=True),
        Arm(name="heuristic", description="auditions blueprints behind a settled host", tunable=True),
        Arm(name=GREEDY, description="the frozen policy, most likely choice", learned=True),
        Arm(name=SAMPLED, description="the frozen policy, sampled", learned=True),
        Arm(name="random", description="random ops, at the policy's rate if there is one", needs_sampled=True),
        Arm(name="static_final", description="what the subject grew, from scratch for all epochs", rebuilds=True),
        Arm(name="static_wide", description="the host widened to what the subject grew", rebuilds=True),
    )
}
ALIASES: Mapping[str, str] = {
    "wait": BASELINE,
    "static-final": "static_final",
    "wide": "static_wide",
    "static-wide": "static_wide",
    "ppo-greedy": GREEDY,
    "ppo-sampled": SAMPLED,
}
DEFAULT_ARMS = (BASELINE, "schedule", "periodic", "plateau", "fragrow", "heuristic")
TUNABLE = tuple(arm.name for arm in ARMS.values() if arm.tunable)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """The flags of `esper evaluate` that say what is compared; what is written below each is its help."""

    task: str = "digits_blind"
    """What to evaluate on; `esper tasks` lists them."""
    arms: tuple[str, ...] = ()
    """What to compare with wait_only: schedule, periodic, plateau, fragrow, heuristic, random, static_final,
    static_wide, ppo_greedy, ppo_sampled, all, or a policy's folder. Default: fixed controllers."""
    seeds: int = 5
    """Paired run seeds per arm; a claim needs 20."""
    policy: tuple[str, ...] = ()
    """Runs or checkpoints of trained policies."""
    subject: str | None = None
    """Arm whose growth is judged; default: ppo_greedy, or schedule if there is no policy."""
    blueprint: str | None = None
    """Seed that the schedule plants; default: one that suits the host."""
    epochs: int | None = None
    """Epochs of every run; default: those of the policy's training, or the task's."""
    budget: int | None = None
    """Most parameters a host and its seeds may have together, in every arm."""
    tuned: Path | None = None
    """A tuned.json whose parameters fixed controllers use."""
    data_dir: Path | None = None
    """Where the data lies, if not in a usual place."""
    out: Path | None = None
    """Folder for results; default: runs/evaluate-TASK."""

    @property
    def folder(self) -> Path:
        """Where results are."""
        return Path("runs") / f"evaluate-{self.task}" if self.out is None else self.out


@record
class Lineup:
    """The arms of one evaluation, in an order in which each finds what it needs."""

    arms: tuple[Arm, ...]
    subject: str
    """Whose growth is judged: the claims are about it and the static arms rebuild its networks."""
    notes: tuple[str, ...]
    """What was added or left out without being asked."""

    @property
    def names(self) -> tuple[str, ...]:
        """The arms by name."""
        return tuple(arm.name for arm in self.arms)


def line_up(asked: Sequence[str], *, has_policy: bool, subject: str | None, can_widen: bool) -> Lineup:
    """Turns what the user asked for into arms that can run.

    Args:
        asked: Names, aliases or `all`; commas separate too.
        has_policy: Whether there is a policy to play.
        subject: Whose growth is judged; None takes the greedy policy, or the schedule where there is none.
        can_widen: Whether the host has a width.

    Raises:
        ValueError: An unknown arm, or one that cannot run here.
    """
    words = [word for entry in asked for word in entry.split(",") if word]
    everything = "all" in words
    judged = _name(subject) if subject is not None else GREEDY if has_policy else "schedule"
    if ARMS[judged].rebuilds or judged == BASELINE:
        raise ValueError(f"--subject must be an arm that grows, got {judged!r}")
    chosen = {_name(word) for word in words if word != "all"}
    notes = []
    if everything:
        chosen |= {arm.name for arm in ARMS.values() if has_policy or not arm.learned}
    if not can_widen and everything:
        chosen.discard("static_wide")
        notes.append("static_wide was left out: the host has no width to change.")
    if not can_widen and "static_wide" in chosen:
        raise ValueError("static_wide: this host cannot be widened, for it has no hidden layer; leave the arm out")
    needed = {judged} if has_policy or any(ARMS[name].rebuilds for name in chosen) else set()
    if has_policy and any(ARMS[name].needs_sampled for name in chosen | needed):
        needed.add(SAMPLED)
    notes += [f"{name} was added: other arms depend on it." for name in sorted(needed - chosen)]
    chosen |= needed | {BASELINE}
    if "random" in chosen and not has_policy:
        notes.append("random is uniform over what is legal: there is no policy whose rate of ops it could match.")
    learned = sorted(name for name in chosen if ARMS[name].learned)
    if learned and not has_policy:
        raise ValueError(f"{', '.join(learned)} need a trained policy; pass --policy RUN")
    return Lineup(arms=tuple(arm for arm in ARMS.values() if arm.name in chosen), subject=judged, notes=tuple(notes))


def _name(word: str) -> str:
    name = ALIASES.get(word, word)
    if name not in ARMS:
        close = get_close_matches(word, [*ARMS, *ALIASES], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown arm {word!r}. Known: {', '.join(ARMS)}, all.{hint}")
    return name
