"""`esper bench engine`: what the engine costs beside plain PyTorch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.figures_file import check_out, write_figures
from esper.scripts.terminal import plain_console


def bench_engine_command(
    *,
    task: str = "digits_conv",
    envs: int = 8,
    workers: int | None = None,
    steps: int = 30,
    samples: int | None = None,
    backends_only: bool = False,
    data_dir: Path | None = None,
    out: Path | None = None,
) -> None:
    """Measure the engine against plain PyTorch loops: same hosts, batches and validation, same processes, in turns.

    First both backends and plain loops train hosts without seeds, with three kept ones and with a mix of stages, in
    one process and in turns; that table is in CPU time, and says how far compiled code is from the speed of matrix
    products. The rest is about torch.

    Every step is done twice, once by plain loops and once by the engine under a controller that only waits, and the
    two must reach the same losses. Then seeds grow until three are alive, to show what seeds and the measuring of
    coalitions cost. Steps that other processes disturbed are dropped and counted.

    Args:
        task: Whose host and data to use. digits_mlp gets a second hidden layer, so that three seeds fit.
        envs: Hosts trained side by side.
        workers: Processes; as many as there are usable cores if not given.
        steps: Epochs measured on each side.
        samples: Training rows per epoch; the task's own number if not given.
        backends_only: Stop after the table of backends.
        data_dir: Where the task's data is.
        out: File to write all figures to, as JSON.
    """
    from benchmarks.backends import backends_table, compare_backends
    from benchmarks.engine_figures import bench_task, run_bench, show
    from esper.runtime.tasks import load_task_data
    from esper.simic.training.env_factory import make_worker_spec
    from esper.tolaria.runtime import usable_cores

    check_out(out)
    spec = bench_task(task, samples, steps)
    count = min(envs, usable_cores() if workers is None else workers)
    console = plain_console()
    with tempfile.TemporaryDirectory(prefix="esper-bench-") as scratch:
        data = load_task_data(spec, data_dir)
        workers_spec = make_worker_spec(spec, data, scratch=Path(scratch))
        with console.status(f"{spec.name}: both backends and plain loops"):
            backends = compare_backends(workers_spec, envs, max(3, steps // 3))
        console.print(backends_table(spec.name, backends))
        figures = {} if backends_only else run_bench(workers_spec, envs, count, steps, console)
    if figures:
        show(console, figures)
    figures["backends"] = backends
    if out is not None:
        write_figures(out, figures)
        console.print(f"written: {out}", soft_wrap=True)
