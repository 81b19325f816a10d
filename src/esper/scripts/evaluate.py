"""`esper evaluate`: the same hosts under different controllers, paired by run seed, on the test split."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from esper.evidence.arms import EvaluationRequest
from esper.leyline import ExitCode
from esper.leyline.files import sole_user
from esper.scripts.terminal import plain_console, progress_bar
from esper.tolaria.kinds import AUTO, RAY_HELP, WORKER_KINDS, Workers

if TYPE_CHECKING:
    from esper.evidence.publication import Published
    from esper.evidence.results import RunResult

KIND_HELP = f"Where hosts are trained: {', '.join((AUTO, *(name for name in WORKER_KINDS if name != 'simulated')))}."


def evaluate_command(
    request: Annotated[EvaluationRequest, tyro.conf.arg(name="")],
    workers: Annotated[int, tyro.conf.arg(help="Workers; the results do not depend on it.")] = 1,
    worker_kind: Annotated[str, tyro.conf.arg(help=KIND_HELP)] = AUTO,
    ray_address: Annotated[str | None, tyro.conf.arg(help=RAY_HELP)] = None,
    tune: Annotated[
        bool, tyro.conf.arg(help="Choose the parameters of fixed controllers on validation data, and stop there.")
    ] = False,
    tune_episodes: Annotated[int, tyro.conf.arg(help="Episodes that every tuned arm gets.")] = 64,
    search_episodes: Annotated[
        int, tyro.conf.arg(help="Episodes that search_random and search_tpe get with --tune; a policy had 960.")
    ] = 960,
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
    from esper.evidence.statistics import require_libraries

    require_libraries()
    if from_ is not None:
        _regenerate(from_, request.out)
        return
    if request.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {request.seeds}")
    place = Workers(count=workers, kind=worker_kind, ray_address=ray_address)
    if tune:
        _tune(request, tune_episodes, search_episodes, place)
    else:
        _evaluate(request, place)


def _evaluate(request: EvaluationRequest, workers: Workers) -> None:
    from esper.evidence.evaluation import run_evaluation
    from esper.evidence.plan import prepare

    console = plain_console()
    with sole_user(request.folder), progress_bar(console, width=12) as progress:
        evaluation = prepare(request)
        bar = progress.add_task("", total=None)

        def show(name: str, total: int, result: RunResult | None) -> None:
            progress.update(bar, description=name, total=total, advance=result is not None)
            if result is not None and not console.is_terminal:
                console.print(_line(result), highlight=False)

        published = run_evaluation(evaluation, workers=workers, on_run=show)
    _show(console, published, request.folder)


def _regenerate(results: Path, out: Path | None) -> None:
    from esper.evidence.publication import publish

    if not results.is_file():
        raise ValueError(f"--from wants a results.csv, got {results}")
    folder = results.parent if out is None else out
    _show(plain_console(), publish(results.parent, folder), folder)


def _tune(request: EvaluationRequest, episodes: int, search_episodes: int, workers: Workers) -> None:
    from esper.evidence.plan import frontier_budgets, request_task
    from esper.evidence.tuning import load_tuned, tunable_arms, tune, tuned_table, write_tuned
    from esper.runtime.tasks import load_task_data
    from esper.simic.training.backend import choose_backend

    task, console = request_task(request), plain_console()
    arms, path = tunable_arms(request.arms, frontier_budgets(request)), request.folder / "tuned.json"
    data = load_task_data(task, request.data_dir)
    with progress_bar(console, width=12) as progress:
        bar = progress.add_task("tuning", total=sum(search_episodes if arm.searched else episodes for arm in arms))

        def show(line: str, num_done: int) -> None:
            progress.update(bar, advance=num_done, description=line.split(" ", 1)[0])
            if not console.is_terminal:
                console.print(line, highlight=False)

        backend = choose_backend(request.backend, task, data).name
        chosen = tune(
            task,
            data,
            arms,
            episodes=episodes,
            search_episodes=search_episodes,
            workers=workers,
            backend=backend,
            before=load_tuned(path) if path.is_file() else None,
            on_setting=show,
            on_arm=lambda content: write_tuned(path, content),
        )
    write_tuned(path, chosen)
    console.print(tuned_table(chosen))
    console.print(f"Saved; use it with --tuned {path}. The test split was not opened.", soft_wrap=True)


def _line(result: RunResult) -> str:
    failed = f", {result.status}" if result.failed else ""
    return (
        f"{result.arm} {result.run_seed}: {result.test_accuracy_pct:.2f} %, loss {result.test_loss:.4f}, "
        f"{result.params:,} parameters{failed}"
    )


def _show(console: Console, published: Published, folder: Path) -> None:
    from esper.evidence.claims import ClaimOutcome
    from esper.evidence.publication import terminal_table, verdict_line

    console.print(terminal_table(published.manifest, published.summary))
    for verdict in published.verdicts:
        console.print(verdict_line(verdict), soft_wrap=True, highlight=False)
    openings = published.manifest.test_openings
    times = "an unknown number of times" if openings is None else "once" if openings == 1 else f"{openings} times"
    console.print(f"This test split has been opened {times} on this machine.", soft_wrap=True)
    files = "results.csv (one row per run), report.html, report.md, summary.json"
    figures = ", figures" if published.drawn else "; no figures: pip install 'esper-growth[plots]'"
    console.print(f"Saved in {folder}: {files}{figures}", soft_wrap=True)
    if any(verdict.outcome is ClaimOutcome.INVALID for verdict in published.verdicts):
        raise SystemExit(int(ExitCode.USAGE))
