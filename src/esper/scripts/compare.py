"""`esper compare`: should this model be grown at all?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from esper.scripts.terminal import plain_console, print_stderr


def compare_command(
    model: Annotated[str, tyro.conf.arg(metavar="FILE.py:FUNCTION", help="A function that returns your model.")],
    data: Annotated[
        str,
        tyro.conf.arg(
            metavar="FILE.py:FUNCTION", help="A function that returns (train, validation) or (train, validation, test)."
        ),
    ],
    wider: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FILE.py:FUNCTION",
            help="A function of a factor that returns your model so many times as wide; default: --model with width=.",
        ),
    ] = None,
    controller: Annotated[
        str | None, tyro.conf.arg(help="Who decides what grows: a rule, or the folder of a trained run.")
    ] = None,
    sites: Annotated[tuple[str, ...], tyro.conf.arg(help="Submodules after which something may grow.")] = (),
    seeds: Annotated[int, tyro.conf.arg(help="Runs of every arm; from three on there are intervals.")] = 3,
    seed: Annotated[int, tyro.conf.arg(help="The first seed.")] = 0,
    epochs: Annotated[int, tyro.conf.arg(help="Epochs of every arm.")] = 20,
    budget: Annotated[int | None, tyro.conf.arg(help="Most parameters of the grown model; default: no limit.")] = None,
    batch_size: Annotated[int, tyro.conf.arg(help="Rows of a batch, if your data is not cut yet.")] = 64,
    lr: Annotated[float, tyro.conf.arg(help="Learning rate of every arm; it falls along a cosine.")] = 1e-3,
    out: Annotated[Path | None, tyro.conf.arg(help="A text file for the table too.")] = None,
) -> None:
    """Say whether a model of your own should be grown.

    Trains, for the same epochs on the same batches with the same optimizer: your model grown, left alone, the grown
    network built at once, and a wider model of the same size. Shows what each scores on test data, or on validation
    data if there is no other, its parameters and what its training cost, and a plain verdict. It costs about four runs
    per seed.
    """
    from esper.growth import compare
    from esper.leyline.files import write_atomic
    from esper.scripts.own_model import OwnModel, adamw, checked_model, cosine, load_function, width_maker

    own = OwnModel(model=model, data=data, seed=seed)
    train, val, test = own.make_data()
    found = compare(
        lambda: checked_model(load_function(model)(), model),
        train,
        val,
        wider=width_maker(own, wider),
        seeds=seeds,
        on_arm=print_stderr,
        test=test,
        budget=budget,
        epochs=epochs,
        controller=controller,
        sites=list(sites) or "auto",
        optimizer=adamw(lr),
        scheduler=cosine(epochs),
        batch_size=batch_size,
        seed=seed,
    )
    plain_console(soft_wrap=True, highlight=False).print(str(found))
    if out is not None:
        write_atomic(out, f"{found}\n".encode())
