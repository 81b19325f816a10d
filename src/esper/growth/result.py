"""What came of growing: the model, what grew in it, and files of both."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from esper.growth.exporting import export_grown, weights_of
from esper.growth.history import GrowthEpoch, GrowthMove, SeedLife, seed_lives
from esper.growth.objective import Score
from esper.growth.sites import Sites
from esper.kasmina.persist import write_file
from esper.leyline import record
from esper.leyline.scale import MetricScale

if TYPE_CHECKING:
    from esper.growth.comparison import Comparison
    from esper.growth.grower import Grower
    from esper.growth.receipts import Receipt

SEED_COLUMNS = ("site", "seed", "parameters", "planted", "kept", "worth when switched off", "receipt")


@record
class Section:
    """A table with a title and a note."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str

    def __str__(self) -> str:
        return "\n".join([self.title, *aligned([self.columns, *self.rows]), self.note])


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthResult:
    """A grown model and how it came about. Epochs count from 0."""

    model: nn.Module
    """The user's own model with what was kept."""
    metric: float
    """Of that model on validation data."""
    loss: float
    untrained: Score
    """Of the model before the first epoch."""
    host_params: int
    params: int
    seeds: tuple[SeedLife, ...]
    """Every seed that was planted."""
    history: tuple[GrowthEpoch, ...]
    moves: tuple[GrowthMove, ...]
    sites: Sites
    scale: MetricScale
    controller: str
    sample: Any = field(repr=False)
    """Rows on which exported files are checked."""

    test: Score | None = None
    """Of that model on data that decided nothing; None if there was none."""
    receipts: tuple[Receipt, ...] | None = None
    """What each kept seed really brought; None if it was not asked for."""
    comparison: Comparison | None = None
    """Whether growing pays; None if it was not asked for."""

    @property
    def kept(self) -> tuple[SeedLife, ...]:
        """The seeds that are part of the model."""
        return tuple(seed for seed in self.seeds if seed.kept is not None and seed.pruned is None)

    def table(self) -> str:
        """What grew where, when, its parameters, and what it brought. Epochs count from 1 here."""
        lines = aligned([SEED_COLUMNS, *self.seed_rows()]) if self.seeds else [self.headline]
        lines += ["", *(f"{name}: {value}" for name, value in self.outcome())]
        if self.comparison is not None:
            lines += ["", str(self.comparison)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    @property
    def headline(self) -> str:
        """What happened, in a sentence."""
        if not self.seeds:
            return f"Nothing was planted: {self.controller} saw no reason, or no time, to grow this model."
        kept = len(self.kept)
        if not kept:
            return f"Nothing was kept: {len(self.seeds)} seeds were tried, and none was worth its place."
        added = self.params - self.host_params
        return f"{kept} of {len(self.seeds)} seeds kept; {added:,} parameters added."

    def seed_rows(self) -> list[tuple[str, ...]]:
        """One row per seed, by SEED_COLUMNS."""
        receipts = {receipt.seed_id: receipt for receipt in self.receipts or ()}
        rows: list[tuple[str, ...]] = []
        for seed in self.seeds:
            kept = "no" if seed.kept is None else f"epoch {seed.kept + 1}"
            worth = "" if seed.worth is None else f"{seed.worth:+.3g}"
            receipt = f"{receipts[seed.seed_id].gain:+.3g}" if seed.seed_id in receipts else "not measured"
            rows.append(
                (seed.site, seed.blueprint, f"{seed.params:,}", f"epoch {seed.planted + 1}", kept, worth, receipt)
            )
        return rows

    def outcome(self) -> list[tuple[str, str]]:
        """Names and values of what came out."""
        before, after = self.untrained.metric, self.metric
        return [
            (
                f"{self.scale.name}, validation",
                f"{before:.4g} before training, {after:.4g} after {len(self.history)} epochs",
            ),
            *([] if self.test is None else [(f"{self.scale.name}, test", f"{self.test.metric:.4g}")]),
            ("parameters", f"{self.host_params:,} before, {self.params:,} after"),
            ("decided by", self.controller),
        ]

    # ---- files

    def save(self, path: str | Path) -> None:
        """Writes the weights, with what has grown, to a safetensors file; `esper.load_grown` reads it."""
        write_file(Path(path), weights_of(self.model))

    def export(self, path: str | Path) -> None:
        """Writes the model as .pt2 (loads with torch alone), .onnx or .safetensors; see `export_grown`."""
        export_grown(self.model, self.sample, path)

    def plot(self, path: str | Path) -> None:
        """Draws the curve of the metric above the life of each seed; needs the extra `plots`."""
        from esper.growth.report import save_growth

        save_growth(self, Path(path))

    def report(self, path: str | Path) -> None:
        """Writes one HTML file about all of it, which needs nothing but itself."""
        from esper.growth.report import make_growth_report

        write_file(Path(path), make_growth_report(self).encode())

    def write(self, folder: str | Path) -> list[str]:
        """Writes everything into a folder. Returns a line for each file, and for what could not be written and why."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self.save(place / "model.safetensors")
        write_file(place / "history.csv", self.history_csv().encode())
        lines = ["model.safetensors (weights, for esper.load_grown)", "history.csv"]
        writers = {"network.pt2": self.export, "growth.png": self.plot, "report.html": self.report}
        words = {"network.pt2": " (runs with torch alone)"}
        for name, write in writers.items():
            try:
                write(place / name)
            except Exception as error:  # a model may resist export in any way, and all else must still be written
                lines.append(f"no {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            else:
                lines.append(name + words.get(name, ""))
        return [f"{place}: {line}" for line in lines]

    def history_csv(self) -> str:
        """The history as comma-separated values, one line per epoch."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = [entry.name for entry in fields(GrowthEpoch)]
        writer.writerow(names)
        for epoch in self.history:
            values = {**asdict(epoch), "stages": " ".join(stage.name for stage in epoch.stages)}
            writer.writerow([values[name] for name in names])
        return text.getvalue()


def grown_result(grower: Grower, score: Score, worth: dict[str, float | None]) -> GrowthResult:
    """The result of a grower that has taken out what was not kept."""
    counts = grower.network.param_counts()
    lives = seed_lives(grower.moves)
    seeds = [life if life.kept is None else replace(life, worth=worth.get(life.slot)) for life in lives]
    return GrowthResult(
        model=grower.model,
        metric=score.metric,
        loss=score.loss,
        untrained=grower.untrained,
        host_params=counts.host,
        params=counts.committed,
        seeds=tuple(seeds),
        history=tuple(grower.history),
        moves=tuple(grower.moves),
        sites=grower.network.sites,
        scale=grower.scale,
        controller=grower.controller_name,
        sample=grower.network.sample,
    )


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines with their columns under each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
