"""What an evaluation is asked to be, and its arms: what they need from one another, in which order they run.

Names only, and light: the command line reads this before torch is loaded. How an arm is played is in runs.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from esper.leyline import check_known, record

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
    searched: bool = False
    """True if it plays a schedule that `--tune` has searched for."""
    replays: bool = False
    """True if it plays what the greedy policy did most often, without looking."""
    budget: int | None = None
    """Most parameters of the plain network that it trains; None for arms of another kind."""
    outside: bool = False
    """True if another library grows the network."""

    @property
    def static(self) -> bool:
        """True if it trains a network that is fixed from the first epoch."""
        return self.rebuilds or self.budget is not None


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(name=BASELINE, description="the host, left alone"),
        Arm(name="schedule", description="a declared list of ops", tunable=True),
        Arm(name="largest", description="plants the largest seed that fits, one after the other", tunable=True),
        Arm(name="periodic", description="plants every so many epochs", tunable=True),
        Arm(name="plateau", description="plants when the validation loss stops falling", tunable=True),
        Arm(name="fragrow", description="plants the less often the more the host overfits", tunable=True),
        Arm(name="heuristic", description="auditions blueprints behind the host", tunable=True),
        Arm(name="search_random", description="best of many random schedules, by halving", searched=True),
        Arm(name="search_tpe", description="best schedule found by Optuna's TPE", searched=True),
        Arm(name=GREEDY, description="the frozen policy, most likely choice", learned=True),
        Arm(name=SAMPLED, description="the frozen policy, sampled", learned=True),
        Arm(name="open_loop", description="what the policy did most often, replayed without looking", replays=True),
        Arm(name="random", description="random ops, at the policy's rate if there is one", needs_sampled=True),
        Arm(name="gromo", description="an MLP that the library gromo grows", outside=True),
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
DEFAULT_ARMS = (BASELINE, "schedule", "largest", "periodic", "plateau", "fragrow", "heuristic")
FRONTIER = "static_frontier"
"""Stands for one arm per budget: the best plain network of at most so many parameters."""
SEARCHES = tuple(arm.name for arm in ARMS.values() if arm.searched)
TUNABLE = tuple(arm.name for arm in ARMS.values() if arm.tunable)


def static_arm(budget: int) -> Arm:
    """The arm of one point of the static frontier."""
    words = f"the best plain network of at most {budget:,} parameters"
    return Arm(name=f"static_{budget}", description=words, tunable=True, budget=budget)


def get_arm(name: str) -> Arm:
    """An arm by its full name, points of the static frontier included.

    Raises:
        ValueError: There is none of that name.
    """
    found = re.fullmatch(r"static_([1-9][0-9]{0,17})", name)
    if found is None:
        check_known("arm", name, ARMS)
    return ARMS[name] if found is None else static_arm(int(found[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """The flags of `esper evaluate` that say what is compared; what is written below each is its help."""

    task: str = "digits_blind"
    """What to evaluate on; `esper tasks` lists them."""
    arms: tuple[str, ...] = ()
    """What to compare with wait_only: schedule, largest, periodic, plateau, fragrow, heuristic, search_random,
    search_tpe, random, static_final, static_wide, static_frontier, gromo, ppo_greedy, ppo_sampled, open_loop, all,
    or a policy's folder. Default: fixed controllers."""
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
    budgets: tuple[int, ...] = ()
    """Sizes at which static_frontier trains a plain network; default: --budget alone."""
    rows: int | None = None
    """Training rows per epoch; default: the task's."""
    tuned: Path | None = None
    """A tuned.json whose parameters fixed controllers use."""
    backend: str = "auto"
    """What trains hosts: native (compiled), torch, or auto: native where every network of the task allows it."""
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


def line_up(
    asked: Sequence[str],
    *,
    has_policy: bool,
    subject: str | None,
    can_widen: bool,
    budgets: Sequence[int] = (),
    found: Collection[str] = SEARCHES,
    no_gromo: str | None = None,
) -> Lineup:
    """Turns what the user asked for into arms that can run.

    Args:
        asked: Names, aliases or `all`; commas separate too.
        has_policy: Whether there is a policy to play.
        subject: Whose growth is judged; None takes the greedy policy, or the schedule where there is none.
        can_widen: Whether the host has a width.
        budgets: Sizes of the static frontier.
        found: Searches that have found a schedule.
        no_gromo: Why the outside library cannot run here; None if it can.

    Raises:
        ValueError: An unknown arm, or one that cannot run here.
    """
    judged = _name(subject) if subject is not None else GREEDY if has_policy else "schedule"
    if get_arm(judged).static or get_arm(judged).outside or judged == BASELINE:
        raise ValueError(f"--subject must be an arm that grows, got {judged!r}")
    words = [word for entry in asked for word in entry.split(",") if word]
    chosen = {_name(word) for word in words if word not in ("all", FRONTIER)}
    if FRONTIER in words and not budgets:
        raise ValueError(f"{FRONTIER} needs sizes: pass --budgets, or --budget for one")
    notes: list[str] = []
    if "all" in words:
        chosen |= {arm.name for arm in ARMS.values() if has_policy or not (arm.learned or arm.replays)}
        notes += _leave_out(chosen, found, no_gromo, can_widen)
    if "all" in words or FRONTIER in words:
        chosen |= {static_arm(budget).name for budget in budgets}
    needed = _needed(chosen, judged, has_policy)
    notes += [f"{name} was added: other arms depend on it." for name in sorted(needed - chosen)]
    chosen |= needed | {BASELINE}
    if "random" in chosen and not has_policy:
        notes.append("random is uniform over what is legal: there is no policy whose rate of ops it could match.")
    _refuse_impossible(chosen, has_policy, found, no_gromo, can_widen)
    return Lineup(arms=tuple(sorted(map(get_arm, chosen), key=_order)), subject=judged, notes=tuple(notes))


def _leave_out(chosen: set[str], found: Collection[str], no_gromo: str | None, can_widen: bool) -> list[str]:
    """Takes out of all arms those that cannot run, and says why."""
    lost = [name for name in SEARCHES if name not in found]
    why = {
        f"{' and '.join(lost)} were left out: there is no schedule from a search.": lost,
        f"gromo was left out: {no_gromo}.": [] if no_gromo is None else ["gromo"],
        "static_wide was left out: the host has no width to change.": [] if can_widen else ["static_wide"],
    }
    chosen.difference_update(*why.values())
    return [words for words, names in why.items() if names]


def _needed(chosen: set[str], subject: str, has_policy: bool) -> set[str]:
    """Arms that others depend on."""
    needed = {subject} if has_policy or any(get_arm(name).rebuilds for name in chosen) else set()
    if has_policy and any(get_arm(name).needs_sampled for name in chosen | needed):
        needed.add(SAMPLED)
    if has_policy and any(get_arm(name).replays for name in chosen | needed):
        needed.add(GREEDY)
    return needed


def _refuse_impossible(
    chosen: set[str], has_policy: bool, found: Collection[str], no_gromo: str | None, can_widen: bool
) -> None:
    if no_gromo is not None and "gromo" in chosen:
        raise ValueError(f"gromo cannot run: {no_gromo}")
    if not can_widen and "static_wide" in chosen:
        raise ValueError("static_wide: this host cannot be widened, for it has no hidden layer; leave the arm out")
    arms = sorted(map(get_arm, chosen), key=_order)
    learned = [arm.name for arm in arms if arm.learned or arm.replays]
    if learned and not has_policy:
        raise ValueError(f"{', '.join(learned)} need a trained policy; pass --policy RUN")
    if lost := [arm.name for arm in arms if arm.searched and arm.name not in found]:
        raise ValueError(f"{', '.join(lost)} need a schedule from a search; make one with --tune and pass --tuned")


def _order(arm: Arm) -> tuple[int, int]:
    """In the order of the table; the frontier last, by size."""
    return (len(ARMS), arm.budget) if arm.budget is not None else (list(ARMS).index(arm.name), 0)


def _name(word: str) -> str:
    name = ALIASES.get(word, word)
    try:
        return get_arm(name).name
    except ValueError:
        close = get_close_matches(word, [*ARMS, *ALIASES, FRONTIER], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown arm {word!r}. Known: {', '.join(ARMS)}, {FRONTIER}, all.{hint}") from None
