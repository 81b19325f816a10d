"""Pictures of runs. They need the `plots` extra; everything else works without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    slots = zip(*([slot.stage for slot in report.slots] for report in grown.reports), strict=True)
    draw_stages(stages, dict(zip(grown.model.slots, slots, strict=True)))
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


def draw_stages(axes: Any, lives: Mapping[str, Sequence[SeedStage]]) -> None:
    """Draws the stage of every slot, epoch by epoch. An epoch ends below the point that a curve has for it."""
    for row, stages in enumerate(lives.values()):
        end = 0
        for stage, same in groupby(stages):
            start, end = end, end + len(list(same))
            if stage in DRAWN_STAGES:
                axes.barh(row, end - start, left=start, height=0.7, color=DRAWN_STAGES[stage][0])
    axes.set(xlabel="epoch", ylim=(len(lives) - 0.4, -0.6))
    axes.set_yticks(range(len(lives)), list(lives))
    handles = [axes.barh(-9, 0, color=color) for color, _ in DRAWN_STAGES.values()]
    words = [words for _, words in DRAWN_STAGES.values()]
    axes.legend(handles, words, ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.45))
