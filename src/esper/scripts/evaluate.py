"""`esper evaluate`: the same hosts under different controllers, paired by run seed, on the test split.

The only code that opens the test split.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from esper.leyline import EpisodeSeed

if TYPE_CHECKING:
    from esper.runtime.datasets import Dataset
    from esper.runtime.tasks import TaskSpec
    from esper.scripts.evidence.arms import Lineup
    from esper.scripts.evidence.manifest import Check, Manifest
    from esper.scripts.evidence.policies import Policy
    from esper.scripts.evidence.publish import Published
    from esper.scripts.evidence.results import ResultStore, RunResult
    from esper.scripts.evidence.runs import Arena, Job

# Run seeds of evaluations start here; training and tuning of controllers use lower ones.
FIRST_SEED = 20_000
EXIT_INVALID = 2


def evaluate_command(
    task: Annotated[str, tyro.conf.arg(help="What to evaluate on; `esper tasks` lists them.")] = "digits_blind",
    arms: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="What to compare with wait_only: schedule, periodic, plateau, fragrow, heuristic, random, static_final, "
            "static_wide, ppo_greedy, ppo_sampled, all, or a folder with a policy. Default: the fixed controllers."
        ),
    ] = (),
    seeds: Annotated[int, tyro.conf.arg(help="Paired run seeds per arm; a claim needs 20.")] = 5,
    policy: Annotated[
        tuple[str, ...], tyro.conf.arg(help="Run directories or checkpoints of trained policies.")
    ] = (),
    subject: Annotated[
        str | None,
        tyro.conf.arg(help="Arm whose growth is judged; default: ppo_greedy, or schedule if there is no policy."),
    ] = None,
    blueprint: Annotated[
        str | None, tyro.conf.arg(help="Seed that the schedule plants; default: one that suits the host.")
    ] = None,
    budget: Annotated[
        int | None, tyro.conf.arg(help="Most parameters a host and its seeds may have together, in every arm.")
    ] = None,
    workers: Annotated[int, tyro.conf.arg(help="Processes; the results do not depend on it.")] = 1,
    data_dir: Annotated[Path | None, tyro.conf.arg(help="Where the data lies, if not in a usual place.")] = None,
    out: Annotated[Path | None, tyro.conf.arg(help="Folder for results; default: runs/evaluate-TASK.")] = None,
    tune: Annotated[
        bool, tyro.conf.arg(help="Choose the parameters of the fixed controllers on validation data, and stop there.")
    ] = False,
    tune_episodes: Annotated[int, tyro.conf.arg(help="Episodes that every tuned arm gets.")] = 64,
    tuned: Annotated[Path | None, tyro.conf.arg(help="A tuned.json whose parameters the fixed controllers use.")] = None,
    from_: Annotated[
        Path | None,
        tyro.conf.arg(name="from", help="A results.csv: make its report and figures again, run nothing."),
    ] = None,
) -> None:
    """Compare controllers on the same hosts, on the test split.

    All arms of a pair share initial weights, batches, optimizer, number of epochs and parameter budget; `wait_only`,
    which leaves the host alone, is always among them. What counts is the committed network (host and kept seeds)
    after the last epoch, never the best epoch. Finished runs are written at once; a second start with the same --out
    goes on where the first one stopped.

    Exit code 0 says that the evaluation is complete, whatever came out; 2 that it must not be used as evidence.
    """
    console = Console()
    if from_ is not None:
        _show(console, _regenerate(from_, out), from_.parent if out is None else out)
        return
    from esper.runtime.tasks import get_task_spec, load_task_data
    from esper.scripts.host_runs import with_overrides

    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    spec = with_overrides(get_task_spec(task), epochs=None, budget=budget)
    folder = Path("runs") / f"evaluate-{spec.name}" if out is None else out
    if tune:
        _tune(console, spec, load_task_data(spec, data_dir), arms, folder, tune_episodes, workers)
        return
    evaluation = _prepare(spec, load_task_data(spec, data_dir), arms, seeds, policy, subject, blueprint, tuned, folder)
    published = _evaluate(console, evaluation, workers)
    _show(console, published, folder)


# ---- what is to be done


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation, ready to run."""

    task: TaskSpec
    data: Dataset
    lineup: Lineup
    run_seeds: tuple[int, ...]
    policies: Mapping[str, Policy]
    settings: Mapping[str, Mapping[str, Any]]
    tuning: Mapping[str, Any] | None
    folder: Path
    store: ResultStore
    setup: str
    before: Manifest | None
    """Of an earlier start with the same folder."""


def _prepare(
    spec: TaskSpec,
    data: Dataset,
    asked: Sequence[str],
    num_seeds: int,
    sources: Sequence[str],
    subject: str | None,
    blueprint: str | None,
    tuned: Path | None,
    folder: Path,
) -> Evaluation:
    from esper.scripts.evidence.arms import ARMS, DEFAULT_ARMS, line_up
    from esper.scripts.evidence.manifest import MANIFEST, code_version, read_manifest
    from esper.scripts.evidence.policies import check_apart, load_policies
    from esper.scripts.evidence.results import ResultStore
    from esper.scripts.evidence.starts import can_widen
    from esper.scripts.evidence.statistics import MIN_PAIRS, require_libraries
    from esper.scripts.evidence.tuning import read_tuned

    names, places = _names_and_places(asked, sources)
    policies = load_policies(places)
    store = ResultStore(folder)
    # Whatever was started stays in the table.
    started = [name for name in ARMS if any(row.arm == name for row in store.results.values())]
    default = DEFAULT_ARMS if not policies else (*DEFAULT_ARMS, "ppo_greedy", "random")
    lineup = line_up(
        [*(names or default), *started],
        has_policy=bool(policies),
        subject=subject,
        can_widen=can_widen(spec.host),
    )
    before = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    count = max(num_seeds, 0 if before is None or not store.results else len(before.run_seeds))
    run_seeds = tuple(range(FIRST_SEED, FIRST_SEED + count))
    check_apart(policies, run_seeds)
    if count >= MIN_PAIRS:
        require_libraries()
    chosen = None if tuned is None else read_tuned(tuned, spec)
    settings = {} if chosen is None else {name: dict(found) for name, found in chosen.settings.items()}
    if blueprint is not None:
        settings["schedule"] = {**settings.get("schedule", {}), "blueprint": blueprint}
    facts = f"{spec} {data.sha256} {sorted(settings.items())} {lineup.subject} {code_version()}"
    setup = hashlib.sha256(facts.encode()).hexdigest()[:12]
    store.require(setup, {policy.policy_id for policy in policies})
    return Evaluation(
        task=spec,
        data=data,
        lineup=lineup,
        run_seeds=run_seeds,
        policies={found.policy_id: found for found in policies},
        settings=settings,
        tuning=None if chosen is None else chosen.facts,
        folder=folder,
        store=store,
        setup=setup,
        before=before,
    )


def _names_and_places(asked: Sequence[str], sources: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Arms by name, and folders with policies; a folder among the arms is a policy to be played greedily."""
    from esper.scripts.evidence.arms import ALIASES, ARMS, GREEDY

    names: list[str] = []
    places = [Path(place) for entry in sources for place in entry.split(",") if place]
    for word in (word for entry in asked for word in entry.split(",") if word):
        if word in ARMS or word in ALIASES or word == "all" or not Path(word).is_dir():
            names.append(word)
        else:
            places.append(Path(word))
            names.append(GREEDY)
    return names, places


# ---- running


def _evaluate(console: Console, evaluation: Evaluation, workers: int) -> Published:
    from esper.scripts.evidence.manifest import write_manifest
    from esper.scripts.evidence.publish import publish
    from esper.scripts.evidence.runs import Arena

    arena = Arena(
        evaluation.task,
        evaluation.data,
        evaluation.store,
        setup=evaluation.setup,
        subject=evaluation.lineup.subject,
        policies=evaluation.policies,
        settings=evaluation.settings,
        workers=workers,
    )
    with arena:
        arena.check(evaluation.lineup.arms)
        evaluation.folder.mkdir(parents=True, exist_ok=True)
        manifest = _begin(evaluation)
        write_manifest(evaluation.folder, manifest)
        jobs = list(_jobs(evaluation, manifest, 2 * workers))
        if jobs:
            manifest = _run(console, evaluation, arena, manifest, jobs)
    write_manifest(evaluation.folder, _ended(manifest))
    return publish(evaluation.folder, evaluation.folder)


def _run(
    console: Console, evaluation: Evaluation, arena: Arena, manifest: Manifest, jobs: Sequence[Job]
) -> Manifest:
    from esper.scripts.evidence.manifest import note_test_access, write_manifest

    digests = {policy_id: policy.digest() for policy_id, policy in evaluation.policies.items()}
    openings = note_test_access(
        {
            "task": evaluation.task.name,
            "test_sha256": evaluation.data.test_sha256,
            "code": manifest.code,
            "setup": evaluation.setup,
            "policies": digests,
            "run_seeds": [evaluation.run_seeds[0], evaluation.run_seeds[-1]],
        }
    )
    test = evaluation.data.open_test()
    last = replace(manifest.sessions[-1], opened_test=True)
    manifest = replace(manifest, test_openings=openings, sessions=(*manifest.sessions[:-1], last))
    write_manifest(evaluation.folder, manifest)
    total = sum(len(job.seeds) for job in jobs)
    try:
        with _progress(console) as progress:
            bar = progress.add_task("", total=total)
            for job in jobs:
                progress.update(bar, description=job.arm.name)
                for done in arena.play(job, test):
                    evaluation.store.add(done.result, done.topology, done.curve)
                    progress.advance(bar)
                    if not console.is_terminal:
                        console.print(_line(done.result), highlight=False)
            progress.update(bar, description="controls")
            controls = _controls(evaluation, arena, manifest, test, digests)
    except KeyboardInterrupt:
        done_now = len(evaluation.store.results)
        sys.stderr.write(f"esper: {done_now} finished runs are in {evaluation.folder}; the same command goes on there\n")
        raise
    return replace(manifest, controls=tuple(controls))


def _jobs(evaluation: Evaluation, manifest: Manifest, size: int) -> Iterator[Job]:
    """What is still to be run, arm by arm, in groups that run side by side."""
    from esper.scripts.evidence.runs import Job
    from esper.scripts.evidence.summary import policy_ids

    for arm in evaluation.lineup.arms:
        for policy_id in policy_ids(manifest, arm.name):
            # A run seed keeps its env id, so that its host is the same in every arm.
            missing = [
                EpisodeSeed(env_id=number, episode=0, run_seed=run_seed)
                for number, run_seed in enumerate(evaluation.run_seeds)
                if (arm.name, policy_id, run_seed) not in evaluation.store.results
            ]
            for start in range(0, len(missing), size):
                yield Job(arm=arm, policy_id=policy_id, seeds=tuple(missing[start : start + size]))


def _controls(
    evaluation: Evaluation, arena: Arena, manifest: Manifest, test: Any, digests: Mapping[str, str]
) -> list[Check]:
    """What must hold in every evaluation that is to prove something; none where too few runs can prove anything."""
    from esper.scripts.evidence.arms import ARMS, BASELINE
    from esper.scripts.evidence.claims import MIN_SEEDS
    from esper.scripts.evidence.controls import same_again, still_frozen, world_controls
    from esper.scripts.evidence.runs import Job
    from esper.scripts.evidence.summary import policy_ids

    if len(evaluation.run_seeds) < MIN_SEEDS:
        return []
    name = evaluation.lineup.subject if evaluation.lineup.subject in manifest.arms else BASELINE
    policy_id = policy_ids(manifest, name)[0]
    seed = EpisodeSeed(env_id=0, episode=0, run_seed=evaluation.run_seeds[0])
    (again,) = arena.play(Job(arm=ARMS[name], policy_id=policy_id, seeds=(seed,)), test)
    checks = [same_again(evaluation.store.results[name, policy_id, seed.run_seed], again.result)]
    if evaluation.policies:
        checks += [still_frozen(digests, evaluation.policies), *world_controls()]
    return checks


# ---- the manifest of this start


def _begin(evaluation: Evaluation) -> Manifest:
    from esper.runtime.tasks import count_host_params
    from esper.scripts.evidence.gates import learning_gates
    from esper.scripts.evidence.manifest import (
        SCHEMA_VERSION,
        Manifest,
        Session,
        code_version,
        machine,
        now,
        versions,
    )

    before, spec, data = evaluation.before, evaluation.task, evaluation.data
    kept = before if before is not None and before.setup == evaluation.setup else None
    session = Session(argv=("esper", *sys.argv[1:]), started=now(), ended=None, opened_test=False)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        setup=evaluation.setup,
        code=code_version(),
        task=spec.name,
        description=spec.description,
        metric=spec.metric,
        horizon=spec.horizon,
        num_classes=spec.num_classes,
        budget=spec.lifecycle.param_budget,
        host_params=count_host_params(spec),
        data=data.description,
        data_sha256=data.sha256,
        test_sha256=data.test_sha256,
        num_test=data.num_test,
        run_seeds=evaluation.run_seeds,
        arms=evaluation.lineup.names,
        subject=evaluation.lineup.subject,
        settings=evaluation.settings,
        tuning=evaluation.tuning,
        policies=tuple({"policy_id": key, **policy.facts} for key, policy in evaluation.policies.items()),
        gates=tuple(check for policy in evaluation.policies.values() for check in learning_gates(policy)),
        controls=() if kept is None else kept.controls,
        notes=evaluation.lineup.notes,
        versions=versions(),
        machine=machine(),
        sessions=(*(() if kept is None else kept.sessions), session),
        test_openings=None if kept is None else kept.test_openings,
    )


def _ended(manifest: Manifest) -> Manifest:
    from esper.scripts.evidence.manifest import now

    last = replace(manifest.sessions[-1], ended=now())
    return replace(manifest, sessions=(*manifest.sessions[:-1], last))


# ---- other ways to use the command


def _regenerate(results: Path, out: Path | None) -> Published:
    from esper.scripts.evidence.publish import publish

    if not results.is_file():
        raise ValueError(f"--from wants a results.csv, got {results}")
    return publish(results.parent, results.parent if out is None else out)


def _tune(
    console: Console, spec: TaskSpec, data: Dataset, asked: Sequence[str], folder: Path, episodes: int, workers: int
) -> None:
    from esper.scripts.evidence.arms import TUNABLE, line_up
    from esper.scripts.evidence.tuning import tune, tuned_table

    lineup = line_up(asked or TUNABLE, has_policy=False, subject=None, can_widen=False)
    names = [name for name in lineup.names if name in TUNABLE]
    if not names:
        raise ValueError(f"nothing to tune among {', '.join(asked)}; arms with parameters are {', '.join(TUNABLE)}")
    with _progress(console) as progress:
        bar = progress.add_task("tuning", total=len(names) * episodes)

        def tell(line: str, num_done: int) -> None:
            progress.update(bar, advance=num_done, description=line.split(" ", 1)[0])
            if not console.is_terminal:
                console.print(line, highlight=False)

        chosen = tune(spec, data, names, episodes=episodes, workers=workers, tell=tell)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tuned.json"
    path.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
    console.print(tuned_table(chosen))
    console.print(f"Saved in {path}; use it with --tuned {path}. The test split was not opened.", soft_wrap=True)


# ---- what is shown


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _line(result: RunResult) -> str:
    failed = f", {result.status}" if result.failed else ""
    return (
        f"{result.arm} {result.run_seed}: {result.test_accuracy_pct:.2f} %, loss {result.test_loss:.4f}, "
        f"{result.params:,} parameters{failed}"
    )


def _show(console: Console, published: Published, folder: Path) -> None:
    from esper.scripts.evidence.report import is_invalid, terminal_table, verdict_line

    console.print(terminal_table(published.manifest, published.summary))
    for verdict in published.verdicts:
        console.print(verdict_line(verdict), soft_wrap=True, highlight=False)
    files = "results.csv (one row per run), report.md, summary.json"
    figures = ", figures" if published.drawn else "; no figures: pip install 'esper[plots]'"
    console.print(f"Saved in {folder}: {files}{figures}", soft_wrap=True)
    if is_invalid(published.verdicts):
        raise SystemExit(EXIT_INVALID)
