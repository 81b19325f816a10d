"""`esper bench blueprints` and `esper bench newborns`: what a seed is worth, and how it should start.

The first builds every blueprint into every slot from the start and trains it as a plain network, beside a plain layer
of its size in the same place. The second grows the same seeds under one changed setting at a time. Same initial hosts,
same batches: differences are paired by run seed. Every run is a row of a CSV file, and is not made again once there.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any
from unittest.mock import patch

import tyro
from rich.progress import track
from rich.table import Table

from esper.leyline import BLENDS, BlendSpec, BlueprintCard, LifecycleOp, SlotSpec, record
from esper.leyline.files import append_durable, cut_torn_line, read_regular
from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    from esper.evidence.host_runs import HostRun, HostRunner
    from esper.evidence.static_networks import StaticNetwork
    from esper.kasmina import HostSpec
    from esper.runtime.tasks import TaskSpec
    from esper.tamiyo.schedule import ScheduleEntry

FIELDS = ("task", "epochs", "case", "variant", "params", "run_seed", "accuracy_pct", "grad_ratio")
MAX_BYTES = 2**28
FIRST_SEED = 1000
YOUNG_EPOCHS = 5
"""Epochs of a seed over which its gradient is averaged."""

Row = dict[str, str]


# ---- the file of runs


def read_rows(path: Path) -> list[Row]:
    """All runs that were made before; a line that a killed process left torn is removed.

    Raises:
        ValueError: The file holds something else.
        OSError: It is no regular file, or cannot be read.
    """
    cut_torn_line(path, MAX_BYTES)
    if not path.exists() or not (content := read_regular(path, MAX_BYTES)):
        return []
    reader = csv.DictReader(io.StringIO(content.decode(), newline=""))
    if tuple(reader.fieldnames or ()) != FIELDS:
        raise ValueError(f"{path} has columns {reader.fieldnames}, expected {', '.join(FIELDS)}; name another --out")
    return list(reader)


def append_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Adds runs to the file; it is whole, and on disk, after each call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    if not path.exists() or not path.stat().st_size:
        writer.writeheader()
    writer.writerows(rows)
    append_durable(path, text.getvalue().encode())


@record
class Case:
    """Runs that differ in their run seed only."""

    task: TaskSpec
    case: str
    variant: str
    play: Callable[[], Sequence[HostRun]]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What its rows are found by."""
        return self.task.name, str(self.task.horizon), self.case, self.variant


def run_cases(cases: Sequence[Case], path: Path) -> list[Row]:
    """Makes the runs that the file lacks and returns all its rows."""
    made = {(row["task"], row["epochs"], row["case"], row["variant"]) for row in read_rows(path)}
    console = plain_console()
    for case in track([case for case in cases if case.key not in made], "training", console=console, transient=True):
        append_rows(path, [_row(case, run) for run in case.play()])
    return read_rows(path)


def _row(case: Case, run: HostRun) -> dict[str, object]:
    task, epochs, name, variant = case.key
    ratio = young_gradient(run)
    return {
        "task": task,
        "epochs": epochs,
        "case": name,
        "variant": variant,
        "params": run.model.param_counts().committed,
        "run_seed": run.run_seed,
        "accuracy_pct": f"{run.committed_scores[1]:.4f}",
        "grad_ratio": "" if ratio is None else f"{ratio:.4f}",
    }


def young_gradient(run: HostRun) -> float | None:
    """Gradient per weight of seeds in their first epochs, as a multiple of the host's; None without a seed."""
    slots = [slot for report in run.reports for slot in report.slots if 0 < slot.age_epochs <= YOUNG_EPOCHS]
    found = [slot.grad_ratio for slot in slots if slot.grad_ratio is not None]
    return fmean(found) if found else None


# ---- networks that are whole from the start


def play_static(task: TaskSpec, network: StaticNetwork, num_seeds: int) -> Sequence[HostRun]:
    """Trains a network that only waits."""
    seeds = _seeds(num_seeds)
    networks = {seed.run_seed: network for seed in seeds}
    if network.host != task.host:
        task = replace(task, slots=("r0c0",))  # a plain rival has other slots, and nothing grows in it
    with _runner(task, networks) as runner:
        return runner.run(runner.controller("wait_only"), seeds)


def play_schedule(task: TaskSpec, entries: Sequence[ScheduleEntry], num_seeds: int) -> Sequence[HostRun]:
    """Grows hosts by a schedule."""
    from esper.tamiyo.controllers import make_controller

    with _runner(task, None) as runner:
        controller = make_controller("schedule", runner.setting(0), entries=tuple(entries))
        return runner.run(controller, _seeds(num_seeds))


def _runner(task: TaskSpec, networks: Mapping[int, StaticNetwork] | None) -> HostRunner:
    from esper.evidence.host_runs import HostRunner
    from esper.runtime.tasks import load_task_data
    from esper.simic.training.backend import choose_backend

    data = load_task_data(task)
    return HostRunner(task, data, networks=networks, backend=choose_backend("auto", task, data).name)


def _seeds(num_seeds: int) -> list[Any]:
    from esper.leyline import EpisodeSeed

    return [EpisodeSeed(env_id=number, episode=0, run_seed=FIRST_SEED + number) for number in range(num_seeds)]


def plain_rival(task: TaskSpec, slot: SlotSpec, card: BlueprintCard) -> HostSpec:
    """The host with a plain layer where the slot is, of the width that comes closest to the parameters of a seed.

    Its kernel is 3 if the seed mixes positions, else 1, and it comes behind a pool if the seed works at half size. In
    place of a span, which goes around layers, the layer that it goes around is wider.
    """
    from esper.runtime.tasks import count_host_params

    wanted = count_host_params(task) + card.params
    if task.host.kind == "cnn":
        kernel, half_size = 3 if card.mixing == "local" else 1, card.blueprint == "cnn.conv_down"
        shapes = _cnn_shapes(task.host, slot, kernel, half_size)
    else:
        shapes = _mlp_shapes(task.host, slot)
    best, best_off = task.host, math.inf
    for host in shapes:  # ever wider
        off = abs(count_host_params(replace(task, host=host)) - wanted)
        if off >= best_off:
            break
        best, best_off = host, off
    return best


def _place(slot: SlotSpec) -> tuple[int, int]:
    row, _, column = slot.slot_id[1:].partition("c")
    return int(row), int(column)


def _mlp_shapes(host: HostSpec, slot: SlotSpec) -> Iterator[HostSpec]:
    (row, column), hidden = _place(slot), list(host.kwargs["hidden"])
    at = min(column, len(hidden) - 1)
    for width in count(1):
        if row == 0:
            widths = [*hidden[:column], width, *hidden[column:]]
        else:
            widths = [*hidden[:at], hidden[at] + width, *hidden[at + 1 :]]
        yield replace(host, kwargs={**host.kwargs, "hidden": widths})


def _cnn_shapes(host: HostSpec, slot: SlotSpec, size: int, half_size: bool) -> Iterator[HostSpec]:
    row, column = _place(slot)
    channels, pool, kernel = host.kwargs["channels"], host.kwargs["pool"], host.kwargs["kernel"]
    kernel = [kernel] * len(channels) if isinstance(kernel, int) else kernel
    if row > 1:
        at = min(column, len(channels) - 1)
        for width in count(1):
            yield _cnn(host, [*channels[:at], channels[at] + width, *channels[at + 1 :]], pool, kernel)
    # Before the pool of its block, the new layer takes the pool over; after it, or at half size, it comes behind one.
    before, own = (pool[column], False) if row == 1 or half_size else (False, pool[column])
    before = before or half_size
    pools = [*pool[:column], before, own, *pool[column + 1 :]]
    for width in count(1):
        widths = [*channels[: column + 1], width, *channels[column + 1 :]]
        yield _cnn(host, widths, pools, [*kernel[: column + 1], size, *kernel[column + 1 :]])


def _cnn(host: HostSpec, channels: list[int], pool: list[bool], kernel: list[int]) -> HostSpec:
    return replace(host, kwargs={**host.kwargs, "channels": channels, "pool": pool, "kernel": kernel})


def blueprint_cases(task: TaskSpec, num_seeds: int) -> Iterator[Case]:
    """The bare host, and every blueprint in every slot beside its plain rival."""
    from esper.evidence.static_networks import SeedChoice, StaticNetwork
    from esper.runtime.tasks import load_task_data
    from esper.simic.training.env_factory import task_layout

    def case(name: str, variant: str, network: StaticNetwork) -> Case:
        return Case(task=task, case=name, variant=variant, play=lambda: play_static(task, network, num_seeds))

    layout = task_layout(task, load_task_data(task))
    yield case("host", "host", StaticNetwork(host=task.host, kept=()))
    for slot in layout.slots:
        for key in task.blueprint_keys:
            card = layout.card(slot.slot_id, key)
            if not card.fits:
                continue
            name = f"{slot.slot_id} {key}"
            kept = SeedChoice(slot=slot.slot_id, blueprint=key, blend="linear_fast")
            rival = plain_rival(task, slot, card)
            yield case(name, "seed", StaticNetwork(host=task.host, kept=(kept,)))
            yield case(name, "plain", StaticNetwork(host=rival, kept=()))


def bench_blueprints_command(
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(help="Tasks whose slots are tried.")] = (
        "digits_conv",
        "digits_blind",
        "digits_mlp",
    ),
    seeds: Annotated[int, tyro.conf.arg(help="Paired run seeds.")] = 10,
    epochs: Annotated[int, tyro.conf.arg(help="Epochs of every run.")] = 20,
    rows: Annotated[int | None, tyro.conf.arg(help="Most training rows per epoch; default: the task's.")] = None,
    slots: Annotated[tuple[str, ...] | None, tyro.conf.arg(help="Slots to try; default: all of a task.")] = None,
    blueprints: Annotated[tuple[str, ...] | None, tyro.conf.arg(help="Seeds to try; default: all of a task.")] = None,
    out: Annotated[Path, tyro.conf.arg(help="File of runs; continued if it exists.")] = Path("blueprints.csv"),
) -> None:
    """Compare every blueprint, built in from the start, with a plain layer of its size in the same place.

    Validation accuracy after the last epoch. The difference is paired by run seed; its interval is a bootstrap over
    seeds. Stop it at any time: what was run is in the file.
    """
    cases = [case for name in tasks for case in blueprint_cases(_task(name, epochs, rows, slots, blueprints), seeds)]
    found = run_cases(cases, out)
    show(
        found, {case.key[:3] for case in cases}, "seed", "plain", "seed, built in from the start, against a plain layer"
    )


def _task(
    name: str,
    epochs: int,
    rows: int | None = None,
    slots: tuple[str, ...] | None = None,
    blueprints: tuple[str, ...] | None = None,
) -> TaskSpec:
    from esper.runtime.tasks import get_task_spec, override

    changes = {"horizon": epochs, "samples_per_epoch": rows, "slots": slots, "blueprints": blueprints}
    return override(get_task_spec(name), **{field: value for field, value in changes.items() if value is not None})


# ---- how a seed starts

NEWBORNS: dict[str, tuple[tuple[str, str], ...]] = {
    "digits_conv": (("r0c1", "cnn.conv_down"), ("r0c0", "cnn.conv")),
    "digits_blind": (("r0c0", "cnn.conv"), ("r0c1", "cnn.conv")),
    "digits_mlp": (("r3c0", "mlp.span"),),
}
"""What is grown in each task: planted one after the other, each blended in as soon as it may be."""
AT_ONCE = BlendSpec(name="at_once", operator="add", curve="linear", steepness=0.0, ramp_epochs=1)


@record
class Start:
    """One way in which seeds start. The product restarts the learning rate, and otherwise has these defaults."""

    blend: str = "linear_fast"
    first_epoch: int = 0
    young_rate: float = 1.0
    """Factor of the learning rate while a seed is not kept."""
    restarts: bool = False
    """The learning rate of a seed falls from its birth on, not from that of the host."""
    rho: float | None = None


BASE = "rate of the host"
"""What the other starts are compared with."""
STARTS: dict[str, Start] = {
    BASE: Start(),
    "ramp of 1": Start(blend="at_once"),
    "ramp of 5": Start(blend="linear"),
    "ramp of 8": Start(blend="sigmoid_slow"),
    "planted at 3": Start(first_epoch=3),
    "planted at 6": Start(first_epoch=6),
    "rate x0.5": Start(young_rate=0.5),
    "rate x2": Start(young_rate=2.0),
    "restart": Start(restarts=True),
    "restart, planted at 6": Start(restarts=True, first_epoch=6),
    "rho 0.1": Start(rho=0.1),
    "rho 1": Start(rho=1.0),
}


def schedule_of(seeds: Sequence[tuple[str, str]], start: Start) -> list[ScheduleEntry]:
    """Plants and blends one seed after the other, and keeps each as soon as its ramp is done."""
    from esper.tamiyo.schedule import ScheduleEntry

    ramp, epoch = BLENDS[start.blend].ramp_epochs, start.first_epoch
    entries, taken = [], set[int]()
    for slot, key in seeds:
        entries.append(
            ScheduleEntry(epoch=epoch, op=LifecycleOp.GERMINATE, slot=slot, blueprint=key, blend=start.blend)
        )
        entries.append(ScheduleEntry(epoch=epoch + 1, op=LifecycleOp.ADVANCE, slot=slot))
        taken |= {epoch, epoch + 1}
        epoch += 2
    for position, (slot, _) in enumerate(seeds):
        kept = start.first_epoch + 2 * position + 1 + ramp
        while kept in taken:
            kept += 1
        taken.add(kept)
        entries.append(ScheduleEntry(epoch=kept, op=LifecycleOp.FOSSILIZE, slot=slot))
    return sorted(entries, key=lambda entry: entry.epoch)


@contextmanager
def started(start: Start) -> Iterator[None]:
    """Seeds of this process start this way for the block: what is no default has no setting in the product."""
    from esper.leyline import lr_factor
    from esper.simic.training.action_execution import apply_action
    from esper.tolaria.optim import GrowingOptimizer

    rates = GrowingOptimizer.rates
    young: dict[int, set[str]] = {}

    def apply(env: Any, spec: Any) -> Any:
        outcome = apply_action(env, spec)
        young[id(env.optimizer)] = {slot.spec.slot_id for slot in env.model.all_slots() if slot.stage.is_live}
        if not start.restarts:
            task = env.recipe.task
            env.optimizer.set_lr_factor(lr_factor(task.optimizer.schedule, env.epoch, task.horizon))
        return outcome

    def own_rates(optimizer: GrowingOptimizer, name: str) -> tuple[float, float]:
        rate, decay = rates(optimizer, name)
        return rate * (start.young_rate if name in young.get(id(optimizer), ()) else 1.0), decay

    with (
        patch("esper.simic.training.env_factory.apply_action", apply),
        patch.object(GrowingOptimizer, "rates", own_rates),
        patch.dict(BLENDS, {AT_ONCE.name: AT_ONCE}),
    ):
        yield


def newborn_cases(task: TaskSpec, num_seeds: int) -> Iterator[Case]:
    """The task's seeds built in from the start, and grown in every way."""
    from esper.evidence.static_networks import SeedChoice, StaticNetwork

    grown = NEWBORNS[task.name]
    kept = tuple(SeedChoice(slot=slot, blueprint=key, blend="linear_fast") for slot, key in grown)
    whole = StaticNetwork(host=task.host, kept=kept)
    yield Case(task=task, case="built in", variant="start", play=lambda: play_static(task, whole, num_seeds))
    for name, start in STARTS.items():
        yield Case(task=task, case=name, variant="start", play=lambda start=start: _grow(task, grown, start, num_seeds))  # type: ignore[misc]


def _grow(task: TaskSpec, grown: Sequence[tuple[str, str]], start: Start, num_seeds: int) -> Sequence[HostRun]:
    from esper.runtime.tasks import override

    changed = task if start.rho is None else override(task, rho=start.rho)
    with started(start):
        return play_schedule(changed, schedule_of(grown, start), num_seeds)


def bench_newborns_command(
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(help="Tasks to grow in.")] = tuple(NEWBORNS),
    seeds: Annotated[int, tyro.conf.arg(help="Paired run seeds.")] = 20,
    epochs: Annotated[int, tyro.conf.arg(help="Epochs of every run.")] = 20,
    out: Annotated[Path, tyro.conf.arg(help="File of runs; continued if it exists.")] = Path("newborns.csv"),
) -> None:
    """Grow the same seeds under one changed setting at a time: ramp, epoch of planting, learning rate, audition.

    Validation accuracy after the last epoch, paired by run seed with seeds that learn at the rate of the host; the
    gradient of young seeds per weight, as a multiple of the host's, beside it.
    """
    unknown = [name for name in tasks if name not in NEWBORNS]
    if unknown:
        raise ValueError(f"nothing is said about what grows in {unknown[0]!r}. Known: {', '.join(NEWBORNS)}")
    cases = [case for name in tasks for case in newborn_cases(_task(name, epochs), seeds)]
    found = run_cases(cases, out)
    paired = [{**row, "variant": BASE} for row in found if row["case"] == BASE]
    others = [row for row in found if row["case"] != BASE]
    rows = [{**row, "case": case} for case in {row["case"] for row in others} for row in paired] + others
    show(
        rows,
        {case.key[:3] for case in cases},
        "start",
        BASE,
        "seeds that start otherwise, against those that learn at the rate of the host",
    )


# ---- what was found


def show(rows: Sequence[Row], wanted: set[tuple[str, str, str]], ours: str, theirs: str, title: str) -> None:
    """A table of the cases: both means, sizes, and the paired difference."""
    from esper.evidence.statistics import paired_difference

    table = Table(title=title, title_justify="left")
    for column in ("task", "case", ours, "params", theirs, "params", "difference", "95 % interval", "gradient"):
        table.add_column(column, justify="left" if column in ("task", "case") else "right")
    for task, epochs, case in sorted(wanted):
        own = [row for row in rows if (row["task"], row["epochs"], row["case"]) == (task, epochs, case)]
        first = {row["run_seed"]: row for row in own if row["variant"] == ours}
        second = {row["run_seed"]: row for row in own if row["variant"] == theirs}
        both = sorted(first.keys() & second.keys())
        if not both:
            continue
        found = paired_difference([_accuracy(first[seed]) - _accuracy(second[seed]) for seed in both])
        interval = "" if found.low is None else f"{found.low:+.2f} .. {found.high:+.2f}"
        gradients = [float(row["grad_ratio"]) for row in first.values() if row["grad_ratio"]]
        table.add_row(
            task,
            case,
            f"{fmean(_accuracy(first[seed]) for seed in both):.2f}",
            f"{int(first[both[0]]['params']):,}",
            f"{fmean(_accuracy(second[seed]) for seed in both):.2f}",
            f"{int(second[both[0]]['params']):,}",
            f"{found.mean:+.2f}",
            interval,
            f"{fmean(gradients):.2f}" if gradients else "",
        )
    plain_console().print(table)


def _accuracy(row: Row) -> float:
    return float(row["accuracy_pct"])
