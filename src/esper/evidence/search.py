"""Searches for a schedule: the rivals of a learned policy. They know a space of schedules and what each one scored.

Both searches draw from the same space. Scores come from a function, so nothing here runs a host or opens data.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from esper.evidence.static_networks import SeedChoice
from esper.leyline import BlueprintCard, LifecycleOp, derive_seed, get_blend, record
from esper.tamiyo.controller import Setting, life_epochs
from esper.tamiyo.schedule import ScheduleEntry

HALVING = 3
"""Of the schedules of a rung, one in so many goes on, with so many times the run seeds."""
TPE_SEEDS = 4
"""Run seeds of a schedule that TPE asks about."""
FINALISTS = 36
"""Of those tried, so many share the last episodes, so that luck does not choose among the best."""
FINAL_RUNGS = 3
"""Rungs of the final; each has as many episodes and a third of the finalists of the one before."""
PARENTS = 3
"""So many of the best so far have neighbours tried."""
WARM_SEEDS = 3
"""Most seeds of a schedule that a search begins with."""
BLENDS_TRIED = ("linear_fast", "linear", "sigmoid")
MAX_EXTRA_TRAINING = 2
"""Most epochs that a seed may train behind the host beyond the fewest allowed."""

Choose = Callable[[str, Sequence[Any]], Any]
"""(name of the choice, its options) -> one of them."""
Candidate = TypeVar("Candidate")
"""What is judged: a schedule of a search, a setting of a rule."""
Schedule = tuple[ScheduleEntry, ...]
Score = Callable[[Candidate, Sequence[int]], Sequence[float]]
"""(candidate, numbers of run seeds) -> its score on each; higher is better."""


@record
class SeedWish(SeedChoice):
    """A seed that a schedule would like to grow."""

    start: int
    extra_training: int


def draw_schedule(setting: Setting, horizon: int, choose: Choose) -> tuple[ScheduleEntry, ...]:
    """A schedule from the space: for every slot what to plant, if anything, when, and how it is blended in."""
    layout, wishes = setting.layout, []
    for slot_id in layout.slot_ids:
        fitting = [card.blueprint for card in layout.fitting(slot_id)]
        blueprint = choose(f"{slot_id} blueprint", [None, *fitting])
        blend = choose(f"{slot_id} blend", BLENDS_TRIED)
        start = choose(f"{slot_id} start", range(max(1, horizon * 3 // 4)))
        extra = choose(f"{slot_id} extra training", range(MAX_EXTRA_TRAINING + 1))
        if blueprint is not None:
            wishes.append(SeedWish(slot=slot_id, blueprint=blueprint, blend=blend, start=start, extra_training=extra))
    return make_schedule(setting, horizon, _affordable(setting, sorted(wishes, key=lambda wish: wish.start)))


def warm_starts(setting: Setting, horizon: int) -> list[dict[str, Any]]:
    """What rules would do, as choices of the space: any seed at once, the largest that still fit after it.

    Both searches try these first, those that use most of the budget foremost.
    """
    layout, latest, found = setting.layout, max(1, horizon * 3 // 4) - 1, []
    cards = [(slot, card) for slot in layout.slot_ids for card in layout.fitting(slot)]
    for first in cards:
        room, seeds, rest = setting.room, list[tuple[str, BlueprintCard]](), [first]
        while rest and len(seeds) < WARM_SEEDS:
            seeds.append(max(rest, key=lambda pair: pair[1].params))
            room -= seeds[-1][1].added_params("add")
            taken = {slot for slot, _ in seeds}
            rest = [(slot, card) for slot, card in cards if slot not in taken and card.added_params("add") <= room]
        if setting.room >= first[1].added_params("add"):
            choices: dict[str, Any] = {f"{slot} blueprint": card.blueprint for slot, card in seeds}
            choices |= {f"{slot} start": min(latest, 2 * place) for place, (slot, _) in enumerate(seeds)}
            found.append((sum(card.params for _, card in seeds), choices))
    return [choices for _, choices in sorted(found, key=lambda pair: -pair[0])]


def all_choices(setting: Setting, horizon: int, some: Mapping[str, Any]) -> dict[str, Any]:
    """Every choice of a schedule that makes some of them: the others are the first option."""
    made: dict[str, Any] = {}

    def choose(name: str, options: Sequence[Any]) -> Any:
        return made.setdefault(name, some.get(name, options[0]))

    draw_schedule(setting, horizon, choose)
    return made


def neighbour(setting: Setting, horizon: int, choices: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same choices, but for the blueprint of one slot."""
    changed, made = f"{rng.choice(setting.layout.slot_ids)} blueprint", dict(choices)

    def choose(name: str, options: Sequence[Any]) -> Any:
        if name == changed:
            made[name] = rng.choice([option for option in options if option != choices[name]])
        return made[name]

    draw_schedule(setting, horizon, choose)
    return made


def _affordable(setting: Setting, wishes: Sequence[SeedWish]) -> list[SeedWish]:
    """Those for which the budget has room, first come first served."""
    room, found = setting.room, []
    for wish in wishes:
        params = setting.layout.card(wish.slot, wish.blueprint).added_params(get_blend(wish.blend).operator)
        if params <= room:
            room -= params
            found.append(wish)
    return found


def make_schedule(setting: Setting, horizon: int, wishes: Sequence[SeedWish]) -> tuple[ScheduleEntry, ...]:
    """The ops of these seeds, one per epoch: what would fall on a taken epoch comes later.

    Where time does not suffice for all, the last seeds are left out.
    """
    wanted = []
    for wish in wishes:
        advance = wish.start + setting.lifecycle.min_training + wish.extra_training
        keep = wish.start + life_epochs(setting.lifecycle, wish.blend) + wish.extra_training
        wanted += [
            (wish.start, LifecycleOp.GERMINATE, wish.slot, wish.blueprint, wish.blend),
            (advance, LifecycleOp.ADVANCE, wish.slot, None, None),
            (keep, LifecycleOp.FOSSILIZE, wish.slot, None, None),
        ]
    entries: list[ScheduleEntry] = []
    for epoch, op, slot, blueprint, blend in sorted(wanted, key=lambda entry: (entry[0], -int(entry[1]))):
        free = epoch if not entries else max(epoch, entries[-1].epoch + 1)
        entries.append(ScheduleEntry(epoch=free, op=op, slot=slot, blueprint=blueprint, blend=blend))
    if entries and entries[-1].epoch >= horizon:
        return make_schedule(setting, horizon, wishes[:-1])
    return tuple(entries)


# ---- what a search keeps


@dataclass(slots=True)
class Tried(Generic[Candidate]):
    """A candidate and its scores so far, by number of run seed."""

    what: Candidate
    scores: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Over run seeds."""
        return statistics.fmean(self.scores)

    def judge(self, score: Score[Candidate], num_seeds: int) -> None:
        """Plays it on the run seeds up to a number that it has not seen."""
        self.scores += score(self.what, range(len(self.scores), num_seeds))


def judge_again(tried: Sequence[Tried[Candidate]], episodes: int, score: Score[Candidate]) -> list[Tried[Candidate]]:
    """A third of the episodes for the best, a third for the best third of those, and so on once more.

    Returns those of the last rung, best first.
    """
    found, count = list(tried), max(1, min(FINALISTS, len(tried), episodes // TPE_SEEDS))
    for rung in range(FINAL_RUNGS):
        number = min(count, max(2, count // HALVING**rung))
        found = sorted(found, key=lambda one: -one.mean)[:number]
        for one in found:
            one.judge(score, len(one.scores) + episodes // FINAL_RUNGS // number)
    return sorted(found, key=lambda one: -one.mean)


def search_random(setting: Setting, horizon: int, episodes: int, score: Score[Schedule]) -> list[Tried[Schedule]]:
    """Warm starts and random schedules by successive halving: many on one run seed, the best third on three, and so on.

    Returns the schedules of the last rung, best first.
    """
    rng = random.Random(derive_seed(setting.run_seed, None, None, None, "search_random"))
    rungs = list(halving_rungs(episodes))
    warm = [all_choices(setting, horizon, some) for some in warm_starts(setting, horizon)[: rungs[0][0] // 2]]
    chosen: list[Choose] = [partial(_given, choices) for choices in warm]
    chosen += [lambda name, options: rng.choice(options)] * (rungs[0][0] - len(warm))
    tried = [Tried(what=draw_schedule(setting, horizon, choose)) for choose in chosen]
    for count, num_seeds in rungs:
        tried = tried[:count]
        for one in tried:
            one.judge(score, num_seeds)
        tried.sort(key=lambda one: -one.mean)
    return tried


def halving_rungs(episodes: int) -> Iterator[tuple[int, int]]:
    """(schedules, run seeds of each) by rung. All of them together play at most so many episodes."""
    rungs = 1
    while HALVING**rungs <= episodes // (rungs + 1):
        rungs += 1
    # A rung costs what its schedules have not played yet; the sum falls short of the episodes, never beyond.
    shares = [1.0] + [1.0 - 1.0 / HALVING] * (rungs - 1)
    first = int(episodes / sum(shares))
    for rung in range(rungs):
        yield max(1, first // HALVING**rung), HALVING**rung


def search_tpe(setting: Setting, horizon: int, episodes: int, score: Score[Schedule]) -> list[Tried[Schedule]]:
    """Warm starts, then in turn what Optuna's TPE proposes and a neighbour of the best, four run seeds each.

    The best share the episodes that are left, two fifths or more, and so are not chosen by luck.
    Returns those that were judged on most run seeds, best first.
    """
    require_optuna()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = derive_seed(setting.run_seed, None, None, None, "search_tpe") % 2**32
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True))
    proposals = max(1, 3 * episodes // 5 // TPE_SEEDS)
    warm, rng = warm_starts(setting, horizon)[: (proposals + 1) // 2], random.Random(seed)
    for some in warm:
        study.enqueue_trial(all_choices(setting, horizon, some))
    tried: dict[str, Tried[Schedule]] = {}
    judged: list[tuple[float, dict[str, Any]]] = []
    for number in range(proposals):
        if number >= len(warm) and number % 2:
            best = sorted(judged, key=lambda pair: -pair[0])[:PARENTS]
            study.enqueue_trial(neighbour(setting, horizon, rng.choice(best)[1], rng))
        trial = study.ask()
        entries = draw_schedule(setting, horizon, partial(_suggest, trial))
        one = tried.setdefault(str(entries), Tried(what=entries))
        one.judge(score, TPE_SEEDS)
        study.tell(trial, one.mean)
        judged.append((one.mean, trial.params))
    left = episodes - sum(len(one.scores) for one in tried.values())  # what is proposed twice is played once
    return judge_again(list(tried.values()), left, score)


def _given(choices: Mapping[str, Any], name: str, options: Sequence[Any]) -> Any:
    return choices[name]


def _suggest(trial: Any, name: str, options: Sequence[Any]) -> Any:
    if isinstance(options, range):
        return trial.suggest_int(name, options.start, options.stop - 1)
    return trial.suggest_categorical(name, list(options))


def require_optuna() -> None:
    """Refuses to search by TPE where Optuna is missing.

    Raises:
        ValueError: It is.
    """
    if find_spec("optuna") is None:
        raise ValueError("search_tpe needs Optuna: pip install 'esper-growth[search]', or leave the arm out")


SEARCH: Mapping[str, Callable[[Setting, int, int, Score[Schedule]], list[Tried[Schedule]]]] = {
    "search_random": search_random,
    "search_tpe": search_tpe,
}
"""By arm."""
