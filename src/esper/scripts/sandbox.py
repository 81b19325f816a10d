"""`esper sandbox`: can the agent learn? Trains it in worlds whose best policy is known and compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import tyro
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from esper.evidence.sandboxes import ABLATIONS, SANDBOXES, Sandbox, SandboxResult
from esper.leyline import check_known
from esper.scripts.terminal import plain_console, progress_bar
from esper.tolaria.kinds import RAY_HELP, WORKER_KINDS, Workers

CPU_BAR_S = 60.0
"""What an agent may take on one core of its own. More is shown, for on a shared core the same work takes longer."""
CPU_LIMIT_S = 90.0
"""More than sharing explains."""


def sandbox_command(
    seeds: Annotated[int, tyro.conf.arg(help="Agents to train in each sandbox, run seeds 0, 1, ...")] = 5,
    only: Annotated[
        tuple[str, ...] | None,
        tyro.conf.arg(
            metavar="NAME ...",
            help="Sandboxes to run: decoy, coin, inert, cue, cue_blind, constant, parasite, recover.",
        ),
    ] = None,
    ablate: Annotated[
        str | None,
        tyro.conf.arg(help="Take one ingredient from the agent: uniform_prior, one_step or magnified."),
    ] = None,
    worker_kind: Annotated[
        str, tyro.conf.arg(help=f"Where the worlds run: {', '.join(WORKER_KINDS)}; the results are the same.")
    ] = "inline",
    workers: Annotated[int | None, tyro.conf.arg(help="How many; default: what the kind thinks best.")] = None,
    ray_address: Annotated[str | None, tyro.conf.arg(help=RAY_HELP)] = None,
) -> None:
    """Train the agent in small simulated worlds whose best policy is known.

    Masks, features, sampling and updates are those of a real run; only the host is a formula. Each agent plays
    greedily on episodes it has not seen. Exit code 1 says that one of them did not reach its threshold, or took more
    than 90 s of processor time; more than 60 s are marked in the table.
    """
    from esper.evidence.sandbox_training import run_sandbox

    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    options = Workers(count=1 if workers is None else workers, kind=worker_kind, ray_address=ray_address).options
    chosen = [_ablated(sandbox, ablate) for sandbox in _choose(only)]
    console = plain_console()
    results: dict[str, list[SandboxResult]] = {sandbox.name: [] for sandbox in chosen}
    with progress_bar(console, width=12) as progress:
        for sandbox in chosen:
            bar = progress.add_task(sandbox.name, total=seeds * (sandbox.first_rounds + sandbox.rounds))
            for run_seed in range(seeds):
                tick: Callable[[], None] = partial(progress.advance, bar)
                result = run_sandbox(sandbox, run_seed, tick, kind=worker_kind, workers=workers, options=options)
                results[sandbox.name].append(result)
                # Also beside a bar: whoever stops the command keeps what is done.
                console.print(_line(sandbox, result), highlight=False)
    console.print(_table(chosen, results))
    if not all(result.passed and result.cpu_s <= CPU_LIMIT_S for rows in results.values() for result in rows):
        raise SystemExit(1)


def _choose(only: Sequence[str] | None) -> tuple[Sandbox, ...]:
    known = [sandbox.name for sandbox in SANDBOXES]
    if only is None:
        return SANDBOXES
    if not only:
        raise ValueError(f"--only needs the name of a sandbox. Known: {', '.join(known)}")
    for name in only:
        check_known("sandbox", name, known)
    return tuple(sandbox for sandbox in SANDBOXES if sandbox.name in only)


def _ablated(sandbox: Sandbox, name: str | None) -> Sandbox:
    if name is None:
        return sandbox
    check_known("ablation", name, ABLATIONS)
    return replace(sandbox, config=ABLATIONS[name](sandbox.config))


def _line(sandbox: Sandbox, result: SandboxResult) -> Text:
    verdict = "passed" if result.passed else "FAILED"
    line = Text(f"{sandbox.name} {result.run_seed}: {_figure(result.reached)}, {verdict}, ")
    return line.append(_pace(result.cpu_s)).append(" CPU s")


def _pace(cpu_s: float) -> Text:
    """How long an agent took, and whether that is too long."""
    if cpu_s > CPU_LIMIT_S:
        return Text(f"{cpu_s:.0f}, over the limit of {CPU_LIMIT_S:.0f}", "red")
    return Text(f"{cpu_s:.0f}, over {CPU_BAR_S:.0f}", "yellow") if cpu_s > CPU_BAR_S else Text(f"{cpu_s:.0f}")


def _table(sandboxes: Sequence[Sandbox], results: dict[str, list[SandboxResult]]) -> Table:
    title = "Sandboxes: greedy play after training, lowest and highest agent"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("sandbox", "figure", "optimum", "random", "limit", "reached", "passed", "CPU s"):
        to_left, may_wrap = name in ("sandbox", "figure"), name in ("figure", "CPU s")
        table.add_column(name, justify="left" if to_left else "right", no_wrap=not may_wrap)
    for sandbox in sandboxes:
        rows = results[sandbox.name]
        num_passed = sum(row.passed for row in rows)
        table.add_row(
            sandbox.name,
            sandbox.measured,
            _mean([row.optimum for row in rows]),
            _mean([row.random for row in rows]),
            _threshold(sandbox, rows),
            _span([row.reached for row in rows]),
            Text(f"{num_passed} of {len(rows)}", "green" if num_passed == len(rows) else "red"),
            _pace(max(row.cpu_s for row in rows)),
        )
    return table


def _threshold(sandbox: Sandbox, rows: Sequence[SandboxResult]) -> str:
    sign = ">=" if sandbox.higher_is_better else "<="
    return f"{sign} {_mean([sandbox.limit(row.optimum) for row in rows])}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 2) + 0.0:.2f}"  # never -0.00


def _span(values: Sequence[float | None]) -> str:
    """The lowest and the highest; each agent has a line of its own above the table."""
    known = [value for value in values if value is not None]
    low, high = _figure(min(known, default=None)), _figure(max(known, default=None))
    return low if low == high else f"{low} to {high}"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _figure(sum(known) / len(known) if known else None)
