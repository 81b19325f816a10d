"""`esper compare`: should this model be grown at all?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from esper.scripts.terminal import plain_console, print_stderr

if TYPE_CHECKING:
    from esper.growth import Comparison


def compare_command(
    what: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(
            metavar="TASK|FILE.py:FUNCTION",
            help="A bundled task, as `esper tasks` lists them, or a function that returns your model.",
        ),
    ],
    data: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FILE.py:FUNCTION",
            help="For your own model: a function that returns (train, validation) or (train, validation, test).",
        ),
    ] = None,
    wider: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FILE.py:FUNCTION",
            help="A function of a factor that returns your model so many times as wide; default: yours with width=.",
        ),
    ] = None,
    controller: Annotated[
        str | None,
        tyro.conf.arg(help="Who decides what grows: a rule, or for your own model the folder of a trained run."),
    ] = None,
    sites: Annotated[tuple[str, ...], tyro.conf.arg(help="Submodules after which something may grow.")] = (),
    seeds: Annotated[int, tyro.conf.arg(help="Runs of every arm; from three on there are intervals.")] = 3,
    seed: Annotated[int, tyro.conf.arg(help="The first seed.")] = 0,
    epochs: Annotated[
        int | None, tyro.conf.arg(help="Epochs of every arm; default: the task's own, 20 for your own model.")
    ] = None,
    budget: Annotated[int | None, tyro.conf.arg(help="Most parameters of the grown model; default: no limit.")] = None,
    batch_size: Annotated[int, tyro.conf.arg(help="Rows of a batch, if your data is not cut yet.")] = 64,
    lr: Annotated[float, tyro.conf.arg(help="Learning rate of every arm; it falls along a cosine.")] = 1e-3,
    out: Annotated[Path | None, tyro.conf.arg(help="A text file for the table too.")] = None,
) -> None:
    """Say whether a model of your own, or the host of a bundled task, should be grown.

    Trains, for the same epochs on the same batches with the same optimizer: your model grown, left alone, the grown
    network built at once, and a wider model of the same size. Shows what each scores on test data, or on validation
    data if there is no other, its parameters and what its training cost, and a plain verdict. It costs about four runs
    per seed.
    """
    from esper.growth import compare
    from esper.leyline.references import load_function
    from esper.scripts.own_model import OwnModel, adamw_maker, checked_model, cosine, width_maker

    if data is None:
        if ":" in what:
            raise ValueError(f"{what} is a model of your own: give --data FILE.py:FUNCTION too")
        _show(_compare_task(what, controller, seeds, seed, epochs, budget), out)
        return
    if ":" not in what:
        raise ValueError(
            f"--data goes with a model of your own, FILE.py:FUNCTION; {what!r} is none. A task brings its own"
        )
    num_epochs = 20 if epochs is None else epochs
    own = OwnModel(model=what, data=data, seed=seed)
    train, val, test = own.make_data()
    found = compare(
        lambda: checked_model(load_function(what)(), what),
        train,
        val,
        wider=width_maker(own, wider),
        seeds=seeds,
        on_arm=print_stderr,
        test=test,
        budget=budget,
        epochs=num_epochs,
        controller=controller,
        sites=list(sites) or "auto",
        optimizer=adamw_maker(lr),
        scheduler=cosine(num_epochs),
        batch_size=batch_size,
        seed=seed,
    )
    _show(found, out)


def _compare_task(
    name: str, controller: str | None, seeds: int, seed: int, epochs: int | None, budget: int | None
) -> Comparison:
    from esper.evidence.host_runs import task_with
    from esper.growth import compare_task
    from esper.runtime.tasks import load_task_data

    task = task_with(name, epochs=epochs, budget=budget)
    options = {} if controller is None else {"controller": controller}
    return compare_task(task, load_task_data(task), seeds=seeds, seed=seed, on_arm=print_stderr, **options)


def _show(found: Comparison, out: Path | None) -> None:
    from esper.leyline.files import write_atomic

    plain_console(soft_wrap=True, highlight=False).print(str(found))
    if out is not None:
        write_atomic(out, f"{found}\n".encode())
