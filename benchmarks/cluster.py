"""`esper bench cluster`: what messages between machines cost, and how far a run scales with such messages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from benchmarks.figures_file import check_out, write_figures
from esper.scripts.terminal import plain_console


def bench_cluster_command(
    task: Annotated[str, tyro.conf.arg(help="Whose hosts are trained.")] = "digits_blind",
    envs: Annotated[int, tyro.conf.arg(help="Hosts side by side.")] = 16,
    workers: Annotated[int, tyro.conf.arg(help="Real workers of each kind.")] = 2,
    steps: Annotated[int, tyro.conf.arg(help="Steps measured with each kind, in turns.")] = 20,
    backend: Annotated[str, tyro.conf.arg(help="What trains the hosts: auto, native or torch.")] = "auto",
    ray_address: Annotated[
        str | None, tyro.conf.arg(help="Cluster to measure; default: one on this machine, for this benchmark.")
    ] = None,
    most: Annotated[int, tyro.conf.arg(help="Workers of the largest simulated cluster; 0 for none.")] = 1_000,
    hosts: Annotated[int, tyro.conf.arg(help="Hosts of a round in the simulated clusters.")] = 4_000,
    epochs: Annotated[int, tyro.conf.arg(help="Epochs of a simulated episode.")] = 5,
    spread: Annotated[float, tyro.conf.arg(help="Log deviation of the time that equal work takes a worker.")] = 0.1,
    out: Annotated[Path | None, tyro.conf.arg(help="File for the figures as JSON.")] = None,
) -> None:
    """Measure workers in processes and in a Ray cluster in turns, then rehearse whole rounds of large clusters.

    The rehearsal runs the real parent (policy, masks, rewards, messages, update) over simulated workers that sleep as
    long as the measured messages and host epochs take. Sleep is counted and not waited for, and what this process
    computes counts in CPU seconds, so a busy machine does not change the result.
    """
    from benchmarks.cluster_figures import measure_transports, rehearse, show

    check_out(out)
    if not 0 <= most <= hosts:
        raise ValueError(f"--most must be in 0..{hosts} (at most one worker per host), got {most}")
    console = plain_console()
    with console.status(Text(f"{task}: {envs} hosts on {workers} workers of each kind")):
        figures = measure_transports(task, envs, workers, steps, backend, ray_address)
    sizes = sorted({count for count in (1, 4, 16, 64, 250, 1_000, most) if 0 < count <= most})
    figures["rehearsals"] = []
    for count in sizes:
        with console.status(Text(f"{hosts:,} simulated hosts on {count:,} workers")):
            figures["rehearsals"].append(rehearse(figures, count, hosts, epochs, spread))
    show(console, figures)
    if out is not None:
        write_figures(out, figures)
        console.print(f"written: {out}", soft_wrap=True)
