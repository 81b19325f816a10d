"""`grow`: trains and grows a model on the user's data, from the first batch to the report."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from esper.growth.arguments import check_model, usable_device
from esper.growth.comparison import GROWN, Wider, check_comparable, copies_of, make_comparison, rivals, trained
from esper.growth.controllers import Controller
from esper.growth.data import Data
from esper.growth.objective import Loss, Metric
from esper.growth.progress import GrowthProgress
from esper.growth.receipts import make_receipts, planned_twins
from esper.growth.result import GrowthResult
from esper.growth.sites import Forward
from esper.growth.training import GrowthRun, GrowthSettings, MakeOptimizer, MakeScheduler
from esper.growth.validation import device_of
from esper.leyline import LifecycleOp, ModelFileError
from esper.leyline.files import open_regular, write_atomic
from esper.leyline.scale import MetricScale

CHECKPOINT = "checkpoint.pt"
"""File of an unfinished run in its folder."""


def grow(
    model: nn.Module,
    train: Data,
    val: Data,
    *,
    test: Data = None,
    budget: int | None,
    epochs: int,
    loss: Loss | None = None,
    metric: Metric | None = None,
    higher_is_better: bool = True,
    scale: MetricScale | None = None,
    controller: Controller = None,
    controller_params: Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    scheduler: Any | MakeScheduler | None = None,
    sites: str | int | Sequence[str] = "auto",
    batch_size: int = 64,
    forward: Forward | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    receipts: bool | int = False,
    compare: bool = False,
    wider: Wider | None = None,
    verbose: bool = True,
) -> GrowthResult:
    """Trains a model and grows it while it trains.

        result = esper.grow(model, (x, y), (val_x, val_y), budget=20_000, epochs=20)
        print(result.table())

    The model is trained in place; same arguments, same bits. For your own training loop there is `Grower`.

    Args:
        model: Any module.
        train: Tensors or arrays (inputs, target), with several inputs (inputs..., target); a dict of them; a Dataset,
            also of Hugging Face; a DataLoader; or a list of batches.
        val: Validation data, in the same forms. What grows is decided on it, so the final word is that of `test`.
        test: Data that decides nothing, for the final score; in the same forms.
        budget: Most parameters the model and what grows in it may have together; None for no limit.
        epochs: Passes over the training data.
        loss: (output, target) -> mean loss. By default the model's own, cross-entropy for integer targets, or mean
            squared error.
        metric: (output, target) -> number, over all validation rows. By default accuracy in percent, R², or the loss
            per token.
        higher_is_better: Direction of `metric`.
        scale: What `metric` means, where its best value cannot be told from its first one.
        controller: Who decides what grows: a rule's name, the folder of a trained run, or an object with begin, act and
            store; None for the default rule.
        controller_params: Parameters of a rule.
        optimizer: An optimizer of the model, or a function that makes one of a list of parameters. By default AdamW
            with a learning rate that falls along a cosine.
        scheduler: A scheduler of the optimizer, or a function that makes one of it; stepped once per epoch.
        sites: "auto", how many, or names and patterns of submodules after which something may grow; see `find_sites`.
        batch_size: Rows of a batch, where the data is not cut yet.
        forward: (model, batch) -> output. By default `model(inputs)`, or `model(**batch)` for dicts.
        device: Where to train; by default where the model is.
        seed: Decides the order of the data, dropout and the weights of what grows.
        out: Folder for the grown network, its history, a plot and a report. An unfinished run is kept there too.
        resume: Go on with the unfinished run in `out`.
        receipts: Train, for every seed that was kept, a twin on the same batches that never had it, and report the
            difference. A number limits the epochs of each twin. What it will cost is shown before.
        compare: Train the model left alone, the grown network from the start and, with `wider`, a wider model on the
            same batches too, and say whether growing pays. `optimizer` must then be None or a function.
        wider: (factor) -> a fresh model so many times as wide, for `compare`.
        verbose: Show progress and what grows.

    Returns:
        The grown model and how it came about.

    Raises:
        ValueError: Something cannot work. The message says what to do; the model is as it was.
    """
    settings = GrowthSettings(
        budget=budget,
        epochs=epochs,
        loss=loss,
        metric=metric,
        higher_is_better=higher_is_better,
        controller=controller,
        controller_params=controller_params,
        optimizer=optimizer,
        scheduler=scheduler,
        sites=sites,
        batch_size=batch_size,
        forward=forward,
        seed=seed,
        scale=scale,
        test=test,
    )
    check_model(model)
    _check_extras(settings, out=out, resume=resume, receipts=receipts, compare=compare, wider=wider)
    if device is not None:
        model.to(usable_device(device))
    make_model = copies_of(model) if compare else None
    run = GrowthRun(model, train, val, settings)
    folder = None if out is None else Path(out)
    progress = GrowthProgress(epochs, verbose=verbose)
    try:
        with progress:
            result = _run(run, folder, resume, progress, receipts)
            if make_model is not None:
                arms = dict(rivals(make_model, train, val, settings, result, wider, progress.say))
                found = {GROWN: [trained(run, result)], **{name: [arm] for name, arm in arms.items()}}
                result = replace(result, comparison=make_comparison(found, run, has_wider=wider is not None))
    except KeyboardInterrupt:
        progress.stopped(run, folder)
        raise
    finally:
        run.grower.abandon()
    if folder is not None:
        for line in result.write(folder):
            progress.say(line)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return result


def _check_extras(
    settings: GrowthSettings,
    *,
    out: str | Path | None,
    resume: bool,
    receipts: bool | int,
    compare: bool,
    wider: Wider | None,
) -> None:
    if resume and out is None:
        raise ValueError("resume=True goes on with the run in a folder; give the folder with out=")
    if receipts is not True and receipts < 0:
        raise ValueError(f"receipts must be True, False or the most epochs of a twin, got {receipts}")
    if wider is not None and not compare:
        raise ValueError("wider= makes a rival for compare=True; give both, or leave it out")
    if compare:
        check_comparable(settings, wider)


def _run(
    run: GrowthRun, folder: Path | None, resume: bool, progress: GrowthProgress, receipts: bool | int
) -> GrowthResult:
    """All epochs of a run, kept in its folder after each, and receipts where they are wanted."""
    snapshots = {} if folder is None else _open_folder(run, folder, resume)
    progress.begin(run)
    while run.grower.epochs_done < run.settings.epochs:
        before = run.grower.state_dict() if receipts else None
        progress.epoch(run, run.step())
        if before is not None and run.grower.decisions[-1].op is LifecycleOp.GERMINATE:
            snapshots[run.grower.epochs_done - 1] = before
        if folder is not None:
            _save(run, snapshots, folder / CHECKPOINT)
    if not receipts:
        return run.finish()
    twins = planned_twins(run, None if receipts is True else int(receipts))
    progress.announce_receipts(run, twins)
    found = make_receipts(run, snapshots, twins, progress.say)
    return replace(run.finish(), receipts=found)


# ---- unfinished runs


def _open_folder(run: GrowthRun, folder: Path, resume: bool) -> dict[int, dict[str, Any]]:
    """Makes the folder, or goes on with what is in it. Returns the snapshots for receipts so far."""
    file = folder / CHECKPOINT
    if resume:
        if not file.is_file():
            raise ValueError(f"{folder} holds no unfinished run; leave resume out to start one")
        with open(open_regular(file), "rb") as stream:
            return _go_on(run, file, stream)
    if file.exists():
        raise ValueError(
            f"{folder} holds an unfinished run; pass resume=True (--resume) to go on with it, or another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return {}


def _go_on(run: GrowthRun, file: Path, stream: BinaryIO) -> dict[int, dict[str, Any]]:
    try:
        state = torch.load(stream, map_location=device_of(run.model), weights_only=True)
        run.grower.load_state_dict(state["grower"])
        run.training_macs, run.seconds = int(state["training_macs"]), float(state["seconds"])
        return {int(epoch): dict(before) for epoch, before in state["snapshots"].items()}
    except ModelFileError as error:
        raise ModelFileError(f"{file}: {error}") from error
    except Exception as error:  # whatever is wrong with the file, torch has a type for it
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelFileError(
            f"{file} is damaged, or not of a run of this model ({reason}); remove it to start anew"
        ) from error


def _save(run: GrowthRun, snapshots: Mapping[int, Mapping[str, Any]], file: Path) -> None:
    buffer = io.BytesIO()
    state = {
        "grower": run.grower.state_dict(),
        "snapshots": dict(snapshots),
        "training_macs": run.training_macs,
        "seconds": run.seconds,
    }
    torch.save(state, buffer)
    write_atomic(file, buffer.getvalue())
