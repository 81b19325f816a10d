"""The study of one controller for many hosts: frozen policies, rules and searches on the held-out tasks of the nursery.

Every task is an evaluation of its own, in a folder of its own, so nothing that is finished is played twice. Rules are
tuned once, on draws of the training families; searches get the held-out task itself. The report is made from the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from esper.evidence.arms import BASELINE, GREEDY, SAMPLED, SEARCHES, TUNABLE, EvaluationRequest, get_arm
from esper.evidence.decisions import worth_of_decisions
from esper.evidence.draws import DrawnHosts, mean_gain, rule_on_all, validation_hosts, waiting_runs
from esper.evidence.evaluation import play_missing
from esper.evidence.manifest import code_version
from esper.evidence.many_tasks import COLUMNS, estimate, profile, score_runs, verdicts
from esper.evidence.plan import policy_id, prepare
from esper.evidence.results import ResultStore
from esper.evidence.search import BLENDS_TRIED, Tried
from esper.evidence.studies import HeldOutOptions
from esper.evidence.tuning import SEEDS_PER_SETTING, TUNED_FORMAT, best_setting, candidates, tune, write_tuned
from esper.evidence.usual import UsualSeed, usual_schedule, usual_seeds
from esper.leyline import record
from esper.leyline.files import write_atomic
from esper.leyline.rng import TUNING_RUN_SEEDS
from esper.runtime.datasets import find_data
from esper.runtime.nursery import HeldOut, heldout_list
from esper.runtime.tasks import TaskSpec, get_task_spec, load_task_data
from esper.simic.client import FrozenPolicy
from esper.simic.rewards.types import loss_points
from esper.simic.run.run_state import load_policy
from esper.simic.training.backend import choose_backend
from esper.simic.training.config import IMITATED_RULE
from esper.simic.training.env_factory import task_layout
from esper.tamiyo.controller import Setting
from esper.tamiyo.rules import PLACES
from esper.tamiyo.schedule import schedule_json
from esper.tolaria.kinds import Workers

TUNING_DRAWS = 2_000_000
"""Draws of the training families from this number on tune the rules."""
MAX_SETTINGS = 6
"""Of each rule, the default among them."""
# As in tuning on one task, without what depends on it: blueprints, and intervals that follow the horizon.
RULE_GRIDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "schedule": {"blend": BLENDS_TRIED, "gap": (1, 3), "fill": (False, True)},
    "largest": {"place": PLACES, "blend": BLENDS_TRIED, "max_live": (1, 2, 3)},
    "periodic": {"every_epochs": (6, 1, 2), "blend": ("linear", "linear_fast")},
    "plateau": {"min_gain": (0.01, 0.001, 0.05), "patience": (4, 2), "blend": ("linear", "linear_fast")},
    "fragrow": {"max_interval": (20.0, 5.0, 10.0), "blend": ("linear", "linear_fast")},
    "heuristic": {"plateau_epochs": (0, 1, 3), "audition_epochs": (3, 1, 5), "blend": BLENDS_TRIED},
}
CLOCK_ONLY = "clock_only"
"""The arm of policies that see time and budget only, played greedily."""
USUAL = "usual"
"""The arm that plays what a policy usually does on validation draws, the same on every task, without looking."""
POLICY_ARMS = (GREEDY, SAMPLED, "open_loop", "random")
ROWS, TUNED, REPORT, HABITS = "rows.csv", "tuned.json", "report.md", "habits.json"
THRESHOLDS = tuple(step / 20 for step in range(-20, 21))

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalPlan:
    """How much of the study is to be run."""

    folder: Path
    policies: tuple[str, ...]
    """Checkpoints or folders of trained policies; without any, rules and searches alone."""
    clock_only: tuple[str, ...]
    """The same of policies that see time and budget only."""
    options: HeldOutOptions
    workers: Workers | int


def run_universal(plan: UniversalPlan, log: Log) -> str:
    """Plays what is missing, writes rows, report and figures, and returns the report.

    Raises:
        ValueError: A policy that should see time and budget only sees more.
    """
    for place in plan.clock_only:
        if load_policy(place).agent.shape.seen_columns is None:
            raise ValueError(f"{place} sees everything; a {CLOCK_ONLY} policy is trained with --sees clock")
    plan.folder.mkdir(parents=True, exist_ok=True)
    tuned, options = plan.folder / TUNED, plan.options
    if options.tuning_tasks and not tuned.is_file():
        write_tuned(tuned, tune_rules(range(TUNING_DRAWS, TUNING_DRAWS + options.tuning_tasks), plan.workers, log))
    habits = habits_of(plan, log)
    for row in chosen_tasks(options.tasks):
        if not find_data(row.task.data, options.data_dir).found:
            log(f"{row.task.name}: {row.task.data} is not on this machine; left out")
            continue
        judge_on(plan, row, tuned if tuned.is_file() else None, habits, log)
    return publish_universal(plan.folder)


def chosen_tasks(count: int) -> list[HeldOut]:
    """So many rows of the held-out list, spread evenly over it, so that every kind keeps its share."""
    rows = heldout_list()
    count = min(count, len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]


@record
class Habits:
    """What a policy does on validation draws, and what its decisions are worth there."""

    usual: tuple[UsualSeed, ...]
    decisions: Mapping[str, float]
    """Points over waiting with one decision left to a rule, by decision."""


def habits_of(plan: UniversalPlan, log: Log) -> dict[str, Habits]:
    """The habits of every policy, by policy id. They are written down and not found out twice."""
    place = plan.folder / HABITS
    if not place.is_file():
        found = {}
        for path in plan.policies:
            policy = load_policy(path)
            name = policy_id(policy)
            with validation_hosts(plan.workers) as hosts:
                seeds = usual_seeds(FrozenPolicy(policy.agent, run_seed=0, greedy=True), hosts)
                log(f"{name} usually plants {len(seeds)} seeds")
                worth = worth_of_decisions(policy.agent, hosts, log)
            found[name] = Habits(usual=seeds, decisions=worth)
        write_atomic(place, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return msgspec.json.decode(place.read_bytes(), type=dict[str, Habits])


def judge_on(plan: UniversalPlan, row: HeldOut, tuned: Path | None, habits: Mapping[str, Habits], log: Log) -> None:
    """Plays what is missing of one task."""
    task, folder = row.task, task_folder(plan.folder, row.task.name)
    arms = (BASELINE, *TUNABLE, *(POLICY_ARMS if plan.policies else ("random",)))
    request = EvaluationRequest(
        task=task.name,
        arms=arms,
        seeds=plan.options.task_seeds,
        policy=plan.policies,
        tuned=tuned,
        data_dir=plan.options.data_dir,
        out=folder,
    )
    _play(request, plan.workers, log)
    if plan.clock_only:
        alone = replace(request, arms=(GREEDY,), policy=plan.clock_only, out=folder / CLOCK_ONLY)
        _play(alone, plan.workers, log)
    for policy, habit in habits.items():
        place = folder / f"{USUAL}-{policy}"
        if not (place / TUNED).is_file():
            write_tuned(place / TUNED, _usual_on(task, habit.usual, plan))
        _play(_of_schedules(request, place, SEARCHES[:1]), plan.workers, log)
    for episodes in plan.options.search:
        place = folder / f"search-{episodes}"
        if not (place / TUNED).is_file():
            log(f"{task.name}: searching with {episodes} episodes")
            write_tuned(place / TUNED, _search(task, episodes, plan))
        _play(_of_schedules(request, place, SEARCHES), plan.workers, log)


def _of_schedules(request: EvaluationRequest, place: Path, arms: tuple[str, ...]) -> EvaluationRequest:
    """Plays the schedules of a tuned.json."""
    return replace(request, arms=arms, policy=(), subject=arms[0], tuned=place / TUNED, out=place)


def _usual_on(task: TaskSpec, seeds: Sequence[UsualSeed], plan: UniversalPlan) -> dict[str, Any]:
    """The usual seeds on one task, in the form of a schedule that was found; no episode was played for it."""
    layout = task_layout(task, load_task_data(task, plan.options.data_dir))
    setting = Setting(layout=layout, lifecycle=task.lifecycle, run_seed=0)
    entries = schedule_json(usual_schedule(seeds, setting, task.horizon))
    found = {"chosen": {"entries": entries}, "score": None, "episodes": 0, "training_macs": 0}
    return _tuned(task.name, "what the policy usually does on validation draws", {SEARCHES[0]: found})


def _search(task: TaskSpec, episodes: int, plan: UniversalPlan) -> dict[str, Any]:
    data = load_task_data(task, plan.options.data_dir)
    return tune(
        task,
        data,
        [get_arm(name) for name in SEARCHES],
        episodes=SEEDS_PER_SETTING,
        search_episodes=episodes,
        workers=plan.workers,
        backend=choose_backend("auto", task, data).name,
    )


def _play(request: EvaluationRequest, workers: Workers | int, log: Log) -> None:
    evaluation = prepare(request)
    log(f"{request.task}: {', '.join(evaluation.lineup.names)}")
    play_missing(evaluation, workers=workers)


def task_folder(folder: Path, name: str) -> Path:
    """Where the runs of a task are."""
    return folder / name.replace(":", "-")


# ---- rules


def tune_rules(numbers: Sequence[int], workers: Workers | int, log: Log) -> dict[str, Any]:
    """The setting of every rule with the highest mean gain over waiting on draws of the training families.

    Settings that name a blueprint are left out: tasks offer different ones. Returns the content of a tuned.json.
    """
    arms: dict[str, Any] = {}
    with DrawnHosts(numbers, seeds=1, workers=workers) as hosts:
        waiting = waiting_runs(hosts)
        for name in TUNABLE:
            log(f"tuning {name} on {len(hosts.names)} draws of the nursery")
            tried = [
                Tried(params, [mean_gain(hosts.run(rule_on_all(name, params)), waiting)])
                for params in rule_settings(name)
            ]
            episodes = len(tried) * len(hosts.seeds)
            cost = {"asked_episodes": episodes, "episodes": episodes, "training_macs": None}
            arms[name] = {**best_setting(tried, max(tried, key=lambda one: one.mean)), **cost}
    return _tuned(f"{len(hosts.names)} draws of the nursery", "mean gain over waiting on controller-validation", arms)


def _tuned(task: str, metric: str, arms: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a tuned.json whose settings do not come from the task they are played on."""
    unknown = dict.fromkeys(("data_sha256", "horizon", "budget", "rows", "backend"))
    about = {"format": TUNED_FORMAT, "code": code_version(), "task": task, "first_seed": TUNING_RUN_SEEDS.start}
    return {**about, **unknown, "metric": metric, "arms": arms}


def rule_settings(name: str) -> list[dict[str, Any]]:
    """Some settings of a rule that make sense on any task, the default first."""
    grid = RULE_GRIDS[name]
    every = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return candidates(name, every, MAX_SETTINGS)


# ---- rows and report


def collect_rows(folder: Path) -> pd.DataFrame:
    """All runs of a study in one table; see `many_tasks.COLUMNS`."""
    rows: list[tuple[Any, ...]] = []
    for held_out in heldout_list():
        place, task = task_folder(folder, held_out.task.name), held_out.task
        for source in sorted([place, place / CLOCK_ONLY, *place.glob(f"{USUAL}-*"), *place.glob("search-*")]):
            if not source.is_dir():
                continue
            kind, _, number = source.name.partition("-")
            episodes = int(number) if kind == "search" else 0
            store = ResultStore(source)
            for run in store.results.values():
                if source != place and run.arm not in (GREEDY, *SEARCHES):
                    continue  # waiting and what else was added: the same runs as in the task's own folder
                arm = kind if kind in (CLOCK_ONLY, USUAL) else run.arm
                points = (
                    run.test_accuracy_pct if task.metric == "accuracy" else loss_points(run.test_loss, task.chance_loss)
                )
                ratio = run.params / run.host_params
                kept = " ".join(seed.blueprint for seed in store.topologies[run.key].kept)
                policy = number if kind == USUAL else run.policy_id
                facts = (task.name, held_out.why, arm, policy, run.run_seed)
                rows.append((*facts, points, ratio, episodes, kept))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def publish_universal(folder: Path) -> str:
    """Makes rows.csv, report.md and the figures again from what was played."""
    rows = collect_rows(folder)
    write_atomic(folder / ROWS, rows.to_csv(index=False, float_format="%.6f").encode())
    report = report_text(rows)
    if (folder / HABITS).is_file():
        report += decisions_text(msgspec.json.decode((folder / HABITS).read_bytes(), type=dict[str, Habits]))
    write_atomic(folder / REPORT, report.encode())
    draw(rows, folder)
    return report


def report_text(rows: pd.DataFrame) -> str:
    """The study in words and tables. The same rows give the same bytes.

    Raises:
        ValueError: Nothing was played yet.
    """
    if rows.empty:
        raise ValueError("there are no runs yet; run `esper study universal`")
    scored = score_runs(rows)
    arms = [arm for arm in _order(scored) if arm not in SEARCHES]
    lines = ["# One controller for many hosts", "", _size(scored), ""]
    if GREEDY in arms:
        found = verdicts(scored, GREEDY, TUNABLE, (CLOCK_ONLY, USUAL, "open_loop"))
        words = {True: "yes", False: "NO", None: "not measured"}
        lines += ["| claim | holds | found |", "|---|---|---|"]
        lines += [f"| {verdict.claim} | {words[verdict.holds]} | {verdict.found} |" for verdict in found] + [""]
    lines += ["Interquartile mean over tasks: 0 is waiting, 1 the best network known on a task.", ""]
    lines += ["| arm | score | 95 % interval | points over waiting | parameters |", "|---|---:|---|---:|---:|"]
    for arm in arms:
        own, figure = scored[scored.arm == arm], estimate(scored, arm)
        gain, size = (own.points - own.waiting).mean(), own.params_ratio.mean()
        lines.append(
            f"| {arm} | {figure.value:.3f} | [{figure.low:.3f}, {figure.high:.3f}] | {gain:+.2f} | {size:.2f}x |"
        )
    lines += ["", *_search_lines(scored), "## Task by task", "", *_task_lines(scored, arms)]
    return "\n".join(lines) + "\n"


def decisions_text(habits: Mapping[str, Habits]) -> str:
    """What the decisions of the policies are worth, on validation draws of the training families."""
    table = pd.DataFrame({policy: habit.decisions for policy, habit in habits.items()}).T
    lines = ["", "## Which decision matters", ""]
    lines += [f"Points over waiting on validation draws, with a decision left to the rule {IMITATED_RULE!r}.", ""]
    lines += [f"| policy | {' | '.join(table.columns)} |", "|---|" + "---:|" * len(table.columns)]
    for name, row in [*table.iterrows(), ("mean", table.mean())]:
        lines.append(f"| {name} | {' | '.join(f'{gain:+.2f}' for gain in row)} |")
    return "\n".join(lines) + "\n"


def _size(scored: pd.DataFrame) -> str:
    policies = scored[scored.arm == GREEDY].policy_id.nunique()
    return (
        f"{len(scored):,} runs on {scored.task.nunique()} held-out tasks ({scored[scored.saturated].task.nunique()} "
        f"with less than a point to gain), {scored.run_seed.nunique()} run seeds, {policies} policies. Test split."
    )


def _order(scored: pd.DataFrame) -> list[str]:
    means = scored.groupby("arm").score.mean()
    return sorted(means.index, key=lambda arm: -means[arm])


def _search_lines(scored: pd.DataFrame) -> list[str]:
    """Searches with every number of episodes, each beside the policy on the tasks that were searched so."""
    lines = ["| search on the task itself | episodes | tasks | points over waiting | policy, unseen |"]
    lines += ["|---|---:|---:|---:|---:|"]
    gains = scored.assign(gain=scored.points - scored.waiting)
    for (arm, episodes), own in gains[gains.arm.isin(SEARCHES)].groupby(["arm", "episodes"]):
        tasks = own.task.unique()
        unseen = gains[(gains.arm == GREEDY) & gains.task.isin(tasks)].gain
        words = "" if unseen.empty else f"{unseen.mean():+.2f}"
        lines.append(f"| {arm} | {episodes} | {len(tasks)} | {own.gain.mean():+.2f} | {words} |")
    return [*lines, ""] if len(lines) > 2 else []


def _task_lines(scored: pd.DataFrame, arms: Sequence[str]) -> list[str]:
    table = (scored.points - scored.waiting).groupby([scored.task, scored.arm]).mean().unstack()
    waiting = scored.groupby("task").waiting.mean()
    names = sorted(table.index, key=lambda name: int(name.partition(":")[2]))
    lines = [f"| task | what it is | waiting | {' | '.join(arms)} |", "|---|---|---:|" + "---:|" * len(arms)]
    for name in names:
        cells = ["" if pd.isna(gain := table.loc[name].get(arm)) else f"{gain:+.1f}" for arm in arms]
        lines.append(f"| {name} | {get_task_spec(name).description} | {waiting[name]:.1f} | {' | '.join(cells)} |")
    return lines


def draw(rows: pd.DataFrame, folder: Path) -> None:
    """Performance profile, break-even curve and what grew where, if the `plots` extra is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    from esper.evidence.figures import LOOKS, save_figure

    scored = score_runs(rows)
    figure = Figure(figsize=(18, 4.5), layout="constrained")
    left, right, grown = figure.subplots(1, 3)
    _draw_kept(scored, GREEDY if GREEDY in set(scored.arm) else "largest", grown)
    for arm in (arm for arm in _order(scored) if arm not in SEARCHES):
        color, _, line = LOOKS[arm]
        left.plot(THRESHOLDS, profile(scored, arm, THRESHOLDS), color=color, linestyle=line, label=arm)
    left.set(xlabel="score", ylabel="share of runs with at least this score", title="Performance profile")
    left.legend(fontsize=7)
    _draw_break_even(scored, right)
    save_figure(figure, folder / "universal.png")


def _draw_break_even(scored: pd.DataFrame, axes: Any) -> None:
    """All on the same tasks: those with something to gain that were searched with every number of episodes."""
    from esper.evidence.figures import LOOKS

    searched = scored[scored.arm.isin(SEARCHES) & ~scored.saturated]
    tried = searched.groupby("task").episodes.nunique()
    tasks = tried[tried == searched.episodes.nunique()].index
    same = scored[scored.task.isin(tasks)]
    gains = same.points - same.waiting
    for search in SEARCHES:
        curve = gains[same.arm == search].groupby(same.episodes).mean()
        color, marker, line = LOOKS[search]
        axes.plot(curve.index, curve.to_numpy(), color=color, marker=marker, linestyle=line, label=search)
    for arm in (GREEDY, "largest"):
        if (same.arm == arm).any():
            color, _, line = LOOKS[arm]
            axes.axhline(gains[same.arm == arm].mean(), color=color, linestyle=line, label=f"{arm}, no episode")
    axes.set(xscale="log", xlabel="episodes on the task", ylabel="points over waiting")
    axes.set_title(f"Break-even, {len(tasks)} tasks")
    axes.set_xticks(episodes := sorted(searched.episodes.unique()), [str(number) for number in episodes])
    axes.minorticks_off()
    if len(tasks):
        axes.legend(fontsize=7)


def kept_by_host(scored: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Seeds kept per run: one row per kind of host, one column per blueprint. Restraint and choice in one table."""
    own = scored[scored.arm == arm]
    families = {row.task.name: row.family.split("/") for row in heldout_list()}
    hosts = own.task.map(lambda name: families[name][2] if families[name][1] == "cnn" else families[name][1])
    hosts = hosts.where(~own.saturated, "nothing to gain")
    seeds = pd.DataFrame({"host": hosts, "kept": own.kept.str.split()}).explode("kept").dropna()
    runs = hosts.value_counts()
    counts = pd.crosstab(seeds.host, seeds.kept).reindex(runs.index, fill_value=0)
    return counts.div(runs, axis=0).sort_index()


def _draw_kept(scored: pd.DataFrame, arm: str, axes: Any) -> None:
    from esper.evidence.figures import BLUEPRINT_COLORS

    table = kept_by_host(scored, arm)
    bottom = [0.0] * len(table)
    for column, name in enumerate(table.columns):
        again, color = divmod(column, len(BLUEPRINT_COLORS))
        look = {"color": BLUEPRINT_COLORS[color], "hatch": "//" * again, "edgecolor": "white"}
        axes.bar(table.index, table[name], bottom=bottom, label=name, **look)
        bottom = [low + high for low, high in zip(bottom, table[name], strict=True)]
    axes.set(ylabel="seeds kept per run", title=f"What {arm} keeps, by kind of host")
    if len(table.columns):
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
