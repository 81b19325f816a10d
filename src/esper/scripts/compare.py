"""`esper compare`: should this model be grown at all?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from esper.scripts.own_model import OwnModel, Place, TrainingFlags, checked_model, width_maker
from esper.scripts.terminal import plain_console, print_stderr

if TYPE_CHECKING:
    from esper.growth import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareFlags:
    """The flags of `esper compare`; what is written below each is its help."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TASK|FILE.py:FUNCTION")]
    """A bundled task, as `esper tasks` lists them, or a function that returns your model."""
    wider: Place = None
    """A function of a factor that returns your model so many times as wide; default: yours with width=."""
    controller: str | None = None
    """Who decides what grows: a rule, or for your own model the folder of a trained run."""
    seeds: int = 3
    """Runs of every arm; from three on there are intervals."""
    out: Path | None = None
    """A text file for the table too."""


def compare_command(
    flags: Annotated[CompareFlags, tyro.conf.arg(name="")], how: Annotated[TrainingFlags, tyro.conf.arg(name="")]
) -> None:
    """Say whether a model of your own, or the host of a bundled task, should be grown.

    Trains, for the same epochs on the same batches with the same optimizer: your model grown, left alone, the grown
    network built at once, and a wider model of the same size. Shows what each scores on test data, or on validation
    data if there is no other, its parameters and what its training cost, and a plain verdict. It costs about four runs
    per seed.
    """
    is_own = ":" in flags.what
    if is_own and how.data is None:
        raise ValueError(f"{flags.what} is a model of your own: give --data FILE.py:FUNCTION too")
    if not is_own and how.data is not None:
        raise ValueError(
            f"--data goes with a model of your own, FILE.py:FUNCTION; {flags.what!r} is none. A task brings its own"
        )
    _show(_compare_own(flags, how) if is_own else _compare_task(flags, how), flags.out)


def _compare_own(flags: CompareFlags, how: TrainingFlags) -> Comparison:
    from esper.growth import compare
    from esper.leyline.references import load_function

    assert how.data is not None
    own = OwnModel(model=flags.what, data=how.data, seed=how.seed)
    train, val, test = own.make_data()
    return compare(
        lambda: checked_model(load_function(own.model)(), own.model),
        train,
        val,
        wider=width_maker(own, flags.wider),
        seeds=flags.seeds,
        on_arm=print_stderr,
        test=test,
        controller=flags.controller,
        **how.arguments(),
    )


def _compare_task(flags: CompareFlags, how: TrainingFlags) -> Comparison:
    from esper.evidence.host_runs import task_with
    from esper.growth import compare_task
    from esper.runtime.tasks import load_task_data

    task = task_with(flags.what, epochs=how.epochs, budget=how.budget)
    options = {} if flags.controller is None else {"controller": flags.controller}
    data = load_task_data(task)
    return compare_task(task, data, seeds=flags.seeds, seed=how.seed, on_arm=print_stderr, **options)


def _show(found: Comparison, out: Path | None) -> None:
    from esper.leyline.files import write_atomic

    plain_console(soft_wrap=True, highlight=False).print(str(found))
    if out is not None:
        write_atomic(out, f"{found}\n".encode())
