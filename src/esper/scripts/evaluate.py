"""`esper evaluate`: the same hosts under different controllers, paired by run seed, on the test split.

The only code that opens the test split.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from esper.leyline import EpisodeSeed
from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    from esper.evidence.manifest import Check, Manifest
    from esper.evidence.plan import Evaluation, Request
    from esper.evidence.publish import Published
    from esper.evidence.results import RunResult
    from esper.evidence.runs import Arena, Job
    from esper.runtime.datasets import Split

EXIT_INVALID = 2


def evaluate_command(
    task: Annotated[str, tyro.conf.arg(help="What to evaluate on; `esper tasks` lists them.")] = "digits_blind",
    arms: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="What to compare with wait_only: schedule, periodic, plateau, fragrow, heuristic, random, "
            "static_final, static_wide, ppo_greedy, ppo_sampled, all, or a policy's folder. Default: fixed controllers."
        ),
    ] = (),
    seeds: Annotated[int, tyro.conf.arg(help="Paired run seeds per arm; a claim needs 20.")] = 5,
    policy: Annotated[tuple[str, ...], tyro.conf.arg(help="Runs or checkpoints of trained policies.")] = (),
    subject: Annotated[
        str | None,
        tyro.conf.arg(help="Arm whose growth is judged; default: ppo_greedy, or schedule if there is no policy."),
    ] = None,
    blueprint: Annotated[
        str | None, tyro.conf.arg(help="Seed that the schedule plants; default: one that suits the host.")
    ] = None,
    epochs: Annotated[
        int | None, tyro.conf.arg(help="Epochs of every run; default: those of the policy's training, or the task's.")
    ] = None,
    budget: Annotated[
        int | None, tyro.conf.arg(help="Most parameters a host and its seeds may have together, in every arm.")
    ] = None,
    workers: Annotated[int, tyro.conf.arg(help="Processes; the results do not depend on it.")] = 1,
    data_dir: Annotated[Path | None, tyro.conf.arg(help="Where the data lies, if not in a usual place.")] = None,
    out: Annotated[Path | None, tyro.conf.arg(help="Folder for results; default: runs/evaluate-TASK.")] = None,
    tune: Annotated[
        bool, tyro.conf.arg(help="Choose the parameters of fixed controllers on validation data, and stop there.")
    ] = False,
    tune_episodes: Annotated[int, tyro.conf.arg(help="Episodes that every tuned arm gets.")] = 64,
    tuned: Annotated[Path | None, tyro.conf.arg(help="A tuned.json whose parameters fixed controllers use.")] = None,
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
    console = plain_console()
    if from_ is not None:
        _show(console, _regenerate(from_, out), from_.parent if out is None else out)
        return
    from esper.evidence.plan import Request, prepare

    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    request = Request(
        task=task,
        arms=arms,
        num_seeds=seeds,
        policies=policy,
        subject=subject,
        blueprint=blueprint,
        epochs=epochs,
        budget=budget,
        tuned=tuned,
        data_dir=data_dir,
        folder=Path("runs") / f"evaluate-{task}" if out is None else out,
    )
    if tune:
        _tune(console, request, tune_episodes, workers)
    else:
        _show(console, _evaluate(console, prepare(request), workers), request.folder)


# ---- running


def _evaluate(console: Console, evaluation: Evaluation, workers: int) -> Published:
    from esper.evidence.manifest import write_manifest
    from esper.evidence.plan import ended, jobs
    from esper.evidence.publish import publish
    from esper.evidence.runs import Arena

    manifest = evaluation.manifest
    arena = Arena(
        evaluation.task,
        evaluation.data,
        evaluation.store,
        setup=manifest.setup,
        subject=manifest.subject,
        policies=evaluation.policies,
        settings=manifest.settings,
        workers=workers,
    )
    with arena:
        arena.check(evaluation.lineup.arms)
        evaluation.folder.mkdir(parents=True, exist_ok=True)
        write_manifest(evaluation.folder, manifest)
        missing = list(jobs(evaluation, 2 * workers))
        if missing or (_needs_controls(manifest) and not manifest.controls):
            manifest = _run(console, evaluation, arena, missing)
    write_manifest(evaluation.folder, ended(manifest))
    return publish(evaluation.folder, evaluation.folder)


def _run(console: Console, evaluation: Evaluation, arena: Arena, missing: Sequence[Job]) -> Manifest:
    """Opens the test split and plays what is missing."""
    from esper.evidence.manifest import note_test_access, write_manifest
    from esper.evidence.plan import opened

    digests = {policy_id: policy.digest() for policy_id, policy in evaluation.policies.items()}
    facts = {
        "task": evaluation.task.name,
        "test_sha256": evaluation.data.test_sha256,
        "code": evaluation.manifest.code,
        "setup": evaluation.manifest.setup,
        "policies": digests,
        "run_seeds": [evaluation.manifest.run_seeds[0], evaluation.manifest.run_seeds[-1]],
    }
    manifest = opened(evaluation.manifest, note_test_access(facts))
    test = evaluation.data.open_test()
    write_manifest(evaluation.folder, manifest)
    try:
        with _progress(console) as progress:
            bar = progress.add_task("", total=sum(len(job.seeds) for job in missing))
            for job in missing:
                progress.update(bar, description=job.arm.name)
                for done in arena.play(job, test):
                    evaluation.store.add(done.result, done.topology, done.curve)
                    progress.advance(bar)
                    if not console.is_terminal:
                        console.print(_line(done.result), highlight=False)
            progress.update(bar, description="controls")
            controls = tuple(_controls(evaluation, arena, test, digests))
    except KeyboardInterrupt:
        count = len(evaluation.store.results)
        sys.stderr.write(f"esper: {count} finished runs are in {evaluation.folder}; the same command goes on there\n")
        raise
    return replace(manifest, controls=controls)


def _needs_controls(manifest: Manifest) -> bool:
    """True where there are enough runs for a claim."""
    from esper.evidence.claims import MIN_SEEDS

    return len(manifest.run_seeds) >= MIN_SEEDS


def _controls(evaluation: Evaluation, arena: Arena, test: Split, digests: Mapping[str, str]) -> list[Check]:
    """What must hold in every evaluation that is to prove something."""
    from esper.evidence.arms import ARMS, BASELINE
    from esper.evidence.controls import same_again, still_frozen
    from esper.evidence.runs import Job
    from esper.evidence.summary import policy_ids

    if not _needs_controls(evaluation.manifest):
        return []
    name = evaluation.lineup.subject if evaluation.lineup.subject in evaluation.lineup.names else BASELINE
    policy_id = policy_ids(evaluation.manifest, name)[0]
    seed = EpisodeSeed(env_id=0, episode=0, run_seed=evaluation.manifest.run_seeds[0])
    (again,) = arena.play(Job(arm=ARMS[name], policy_id=policy_id, seeds=(seed,)), test)
    checks = [same_again(evaluation.store.results[name, policy_id, seed.run_seed], again.result)]
    if evaluation.policies:
        checks += [still_frozen(digests, evaluation.policies), *world_controls()]
    return checks


def world_controls() -> list[Check]:
    """Trains the agent in the two worlds. Takes a minute or two."""
    from esper.evidence.controls import CONTROL_WORLDS
    from esper.evidence.manifest import Check
    from esper.evidence.sandbox_training import run_sandbox
    from esper.evidence.sandboxes import SANDBOXES

    checks = []
    for name, world in CONTROL_WORLDS.items():
        (sandbox,) = (sandbox for sandbox in SANDBOXES if sandbox.name == world)
        result = run_sandbox(sandbox, run_seed=0)
        sign = ">=" if sandbox.higher_is_better else "<="
        checks.append(
            Check(
                name=name,
                passed=result.passed,
                found=f"{sandbox.measured} {'not measured' if result.reached is None else f'{result.reached:.3f}'}",
                limit=f"{sign} {sandbox.limit(result.optimum):.3f}",
            )
        )
    return checks


# ---- other ways to use the command


def _regenerate(results: Path, out: Path | None) -> Published:
    from esper.evidence.publish import publish

    if not results.is_file():
        raise ValueError(f"--from wants a results.csv, got {results}")
    return publish(results.parent, results.parent if out is None else out)


def _tune(console: Console, request: Request, episodes: int, workers: int) -> None:
    from esper.evidence.arms import TUNABLE, line_up
    from esper.evidence.host_runs import with_overrides
    from esper.evidence.tuning import tune, tuned_table
    from esper.runtime.tasks import get_task_spec, load_task_data

    spec = with_overrides(get_task_spec(request.task), epochs=request.epochs, budget=request.budget)
    lineup = line_up(request.arms or TUNABLE, has_policy=False, subject=None, can_widen=False)
    names = [name for name in lineup.names if name in TUNABLE]
    if not names:
        raise ValueError(f"nothing to tune among {', '.join(request.arms)}; these can be: {', '.join(TUNABLE)}")
    data = load_task_data(spec, request.data_dir)
    with _progress(console) as progress:
        bar = progress.add_task("tuning", total=len(names) * episodes)

        def tell(line: str, num_done: int) -> None:
            progress.update(bar, advance=num_done, description=line.split(" ", 1)[0])
            if not console.is_terminal:
                console.print(line, highlight=False)

        chosen = tune(spec, data, names, episodes=episodes, workers=workers, tell=tell)
    request.folder.mkdir(parents=True, exist_ok=True)
    path = request.folder / "tuned.json"
    path.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
    console.print(tuned_table(chosen))
    console.print(f"Saved; use it with --tuned {path}. The test split was not opened.", soft_wrap=True)


# ---- what is shown


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:>12}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _line(result: RunResult) -> str:
    failed = f", {result.status}" if result.failed else ""
    return (
        f"{result.arm} {result.run_seed}: {result.test_accuracy_pct:.2f} %, loss {result.test_loss:.4f}, "
        f"{result.params:,} parameters{failed}"
    )


def _show(console: Console, published: Published, folder: Path) -> None:
    from esper.evidence.report import is_invalid, terminal_table, verdict_line

    console.print(terminal_table(published.manifest, published.summary))
    for verdict in published.verdicts:
        console.print(verdict_line(verdict), soft_wrap=True, highlight=False)
    openings = published.manifest.test_openings
    times = "an unknown number of times" if openings is None else "once" if openings == 1 else f"{openings} times"
    console.print(f"This test split has been opened {times} on this machine.", soft_wrap=True)
    files = "results.csv (one row per run), report.md, summary.json"
    figures = ", figures" if published.drawn else "; no figures: pip install 'esper-growth[plots]'"
    console.print(f"Saved in {folder}: {files}{figures}", soft_wrap=True)
    if is_invalid(published.verdicts):
        raise SystemExit(EXIT_INVALID)
