"""Pictures of runs. They need the `plots` extra; everything else works without it."""

from __future__ import annotations

from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.karn.charts import BLUE, GREEN, PINK, SKY, VERMILION, YELLOW
from esper.leyline import SeedStage
from esper.leyline.files import write_atomic

if TYPE_CHECKING:
    from esper.evidence.host_runs import HostRun
    from esper.runtime.tasks import TaskSpec

DRAWN_STAGES = {
    SeedStage.TRAINING: (YELLOW, "trains behind the host"),
    SeedStage.BLENDING: (SKY, "blends in"),
    SeedStage.HOLDING: (PINK, "fully blended"),
    SeedStage.FOSSILIZED: (GREEN, "kept"),
}


def plot_growth(path: Path, spec: TaskSpec, alone: HostRun, grown: HostRun) -> bool:
    """Draws both learning curves above the life of each seed. False, and no file, if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, stages) = plt.subplots(
        2,
        1,
        figsize=(7.5, 5),
        sharex=True,
        layout="constrained",
        height_ratios=[4, 0.5 + 0.4 * len(grown.model.slots)],
    )
    _draw_curves(curves, spec, alone, grown)
    _draw_stages(stages, spec.horizon, grown)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    plt.close(figure)
    write_atomic(path, picture.getvalue())
    return True


def _draw_curves(axes: Any, spec: TaskSpec, alone: HostRun, grown: HostRun) -> None:
    accuracy = spec.metric == "accuracy"
    for label, run, color in (("left alone", alone, BLUE), ("grown", grown, VERMILION)):
        values = [report.val_accuracy_pct if accuracy else report.val_loss for report in run.reports]
        params = run.reports[-1].committed_params
        axes.plot(range(1, len(values) + 1), values, color=color, label=f"{label}: {params:,} parameters")
    axes.set(
        ylabel="validation accuracy (%)" if accuracy else "validation loss (nats)",
        title=f"{spec.name}: the same host, left alone and grown",
    )
    axes.legend()


def _draw_stages(axes: Any, horizon: int, run: HostRun) -> None:
    slot_ids = list(run.model.slots)
    for row, slot_id in enumerate(slot_ids):
        for stage, start, stop in _stage_spans(run, slot_id, horizon):
            axes.barh(row, stop - start, left=start, height=0.7, color=DRAWN_STAGES[stage][0])
    axes.set(xlabel="epoch", ylim=(len(slot_ids) - 0.4, -0.6), xlim=(0, horizon + 1))
    axes.set_yticks(range(len(slot_ids)), slot_ids)
    handles = [axes.barh(-9, 0, color=color) for color, _ in DRAWN_STAGES.values()]
    words = [words for _, words in DRAWN_STAGES.values()]
    axes.legend(handles, words, ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.45))


def _stage_spans(run: HostRun, slot_id: str, horizon: int) -> list[tuple[SeedStage, int, int]]:
    """(stage, first epoch, epoch after the last) of every drawn stage in one slot; epochs count from 1."""
    position = list(run.model.slots).index(slot_id)
    stages = [report.slots[position].stage for report in run.reports]
    spans = []
    epoch = 1
    for stage, same in groupby(stages):
        length = len(list(same))
        if stage in DRAWN_STAGES:
            spans.append((stage, epoch, min(epoch + length, horizon + 1)))
        epoch += length
    return spans
