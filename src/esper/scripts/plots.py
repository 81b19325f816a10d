"""Pictures of runs. They need the `plots` extra; everything else works without it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.leyline import SeedStage

if TYPE_CHECKING:
    from esper.runtime.tasks import TaskSpec
    from esper.scripts.host_run import HostRun

# Okabe and Ito's palette: told apart with any colour vision.
ALONE, GROWN = "#0072B2", "#D55E00"
STAGE_COLORS = {
    SeedStage.TRAINING: "#F0E442",
    SeedStage.BLENDING: "#56B4E9",
    SeedStage.HOLDING: "#CC79A7",
    SeedStage.FOSSILIZED: "#009E73",
}
STAGE_WORDS = {
    SeedStage.TRAINING: "trains behind the host",
    SeedStage.BLENDING: "blends in",
    SeedStage.HOLDING: "fully blended",
    SeedStage.FOSSILIZED: "kept",
}


def plot_growth(path: Path, spec: TaskSpec, alone: HostRun, grown: HostRun) -> bool:
    """Draws both learning curves above the life of each seed. False, and no file, if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, lanes) = plt.subplots(
        2,
        1,
        figsize=(7.5, 5),
        sharex=True,
        layout="constrained",
        height_ratios=[4, 0.5 + 0.4 * len(grown.model.slots)],
    )
    _draw_curves(curves, spec, alone, grown)
    _draw_lives(lanes, spec.horizon, grown)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def _draw_curves(axes: Any, spec: TaskSpec, alone: HostRun, grown: HostRun) -> None:
    accuracy = spec.metric == "accuracy"
    for label, run, color in (("left alone", alone, ALONE), ("grown", grown, GROWN)):
        values = [row.val_accuracy_pct if accuracy else row.val_loss for row in run.history]
        params = run.model.param_counts().committed
        axes.plot(range(1, len(values) + 1), values, color=color, label=f"{label}: {params:,} parameters")
    axes.set(
        ylabel="validation accuracy (%)" if accuracy else "validation loss (nats)",
        title=f"{spec.name}: the same host, left alone and grown",
    )
    axes.legend()


def _draw_lives(axes: Any, horizon: int, run: HostRun) -> None:
    slot_ids = list(run.model.slots)
    for lane, slot_id in enumerate(slot_ids):
        for stage, start, stop in _stays(run, slot_id, horizon):
            axes.barh(lane, stop - start, left=start, height=0.7, color=STAGE_COLORS[stage])
    axes.set(xlabel="epoch", ylim=(len(slot_ids) - 0.4, -0.6), xlim=(0, horizon + 1))
    axes.set_yticks(range(len(slot_ids)), slot_ids)
    handles = [axes.barh(-9, 0, color=color) for color in STAGE_COLORS.values()]
    axes.legend(handles, STAGE_WORDS.values(), ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.45))


def _stays(run: HostRun, slot_id: str, horizon: int) -> list[tuple[SeedStage, float, float]]:
    """(stage, first epoch, epoch after the last) of every drawn stage in one slot; epochs count from 1."""
    entered = [(move.target, _first_epoch(epoch, move.target)) for epoch, move in run.moves if move.slot_id == slot_id]
    border = (SeedStage.DORMANT, horizon + 1)
    return [
        (stage, start, stop)
        for (stage, start), (_, stop) in pairwise([*entered, border])
        if stage in STAGE_COLORS and stop > start
    ]


def _first_epoch(epoch: int, target: SeedStage) -> int:
    # HOLDING and what follows a prune begin when an epoch has ended, everything else before it starts.
    ends_epoch = target in (SeedStage.HOLDING, SeedStage.EMBARGOED, SeedStage.DORMANT)
    return epoch + 2 if ends_epoch else epoch + 1
