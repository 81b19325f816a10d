"""`esper bench alarms`: how often each alarm speaks in healthy runs, and how soon where a fault was planted.

Faults are planted between two rounds of a run that is otherwise real: its session, its log, its verdict and its
console. An alarm counts if a person at the console sees it.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.figures_file import check_out, write_figures
from esper.leyline import LoggedEvent, NumericFailure, record
from esper.leyline.thresholds import WARMUP_UPDATES
from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    from esper.karn.live import LiveConsole
    from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer

ONSET = WARMUP_UPDATES
"""Rounds before a fault of the policy is planted: by then no row is in its warm-up."""
SOON = 3
"""Rounds within which an alarm has to be seen."""
FIRST_SEED = 10
"""Run seed of the first run that is made here: limits, and the strength of faults, were chosen with lower ones."""
Plant = Callable[["VectorizedPPOTrainer"], None]


@record
class Fault:
    """Something wrong, and what is to be seen of it."""

    name: str
    what: str
    plant: Plant
    """Called before every round from the onset on."""
    shown: tuple[str, ...]
    """Metrics or states, one of which the console must name."""
    world: str = "simulated"
    """Kind of the workers."""
    onset: int = ONSET
    """Rounds before it."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of the configuration that differ."""


@record
class Watched:
    """What one run showed at its console."""

    name: str
    run_seed: int
    lines: tuple[tuple[int, str], ...]
    """(round, text) of every warning."""
    num_rounds: int
    events: dict[str, int]
    """Events in the log that are warnings or worse, by kind: what the console would have shown if it showed all."""

    def first(self, shown: Sequence[str], since: int) -> int | None:
        """Rounds from the onset until one of these is named; None if none is."""
        found = [at for at, text in self.lines if at >= since and any(word in text for word in shown)]
        return min(found) - since + 1 if found else None


def bench_alarms_command(
    healthy: Annotated[
        tuple[Path, ...], tyro.conf.arg(help="Directories of runs that ended well; their logs are shown once more.")
    ] = (),
    seeds: Annotated[int, tyro.conf.arg(help="Runs with each planted fault, and as many without any.")] = 3,
    out: Annotated[Path | None, tyro.conf.arg(help="Write the figures as JSON to this file.")] = None,
) -> None:
    """Measure what alarms are worth: how often they speak without cause, and how soon with one.

    Logs of healthy runs are read; runs with faults are made, on simulated hosts, in seconds, and the same without a
    fault. Run seeds begin at 10: limits were set with lower ones. Counted are the warnings that the console of
    `esper train` prints. Exit code 1 says that a fault was not seen within three rounds.
    """
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    check_out(out)
    console = plain_console()
    calm = [watch_log(path, path.name, 0) for path in healthy]
    faulty: list[Watched] = []
    with console.status("planting faults") as status, TemporaryDirectory(prefix="esper-") as folder:
        for fault in (NO_FAULT, *FAULTS):
            for run_seed in range(FIRST_SEED, FIRST_SEED + seeds):
                status.update(f"{fault.name}, seed {run_seed}")
                faulty.append(run_fault(fault, run_seed, Path(folder)))
    if calm:
        console.print(_healthy_table(calm))
    small = [run for run in faulty if run.name == NO_FAULT.name]
    table, missed = _fault_table([*calm, *small], faulty)
    console.print(table)
    if out is not None:
        write_figures(out, {"healthy": [asdict(run) for run in calm], "faulty": [asdict(run) for run in faulty]})
    if missed:
        console.print(f"Not seen within {SOON} rounds: {', '.join(missed)}", highlight=False, soft_wrap=True)
        raise SystemExit(1)


# ---- runs


def run_fault(fault: Fault, run_seed: int, folder: Path) -> Watched:
    """A short run with a fault in it."""
    from esper.simic.run.session import start_new
    from esper.simic.training.config import preset, with_overrides
    from esper.simic.training.vectorized import open_session

    config = with_overrides(
        preset("demo"), {"seed": run_seed, "rounds": fault.onset + SOON, **SMALL, **dict(fault.changes)}
    )
    with _worlds():
        run_id = f"{fault.name}-{run_seed}".replace(" ", "-")
        start = start_new(replace(config, worker_kind=fault.world), folder, run_id)
        try:
            with open_session(start) as session:
                trainer = session.trainer
                while trainer.next_round < config.rounds:
                    if trainer.next_round >= fault.onset:
                        fault.plant(trainer)
                    trainer.run_round()
        except NumericFailure:
            pass  # it stopped the run, which the log says; what was shown before counts
    return watch_log(folder / run_id, fault.name, run_seed)


def watch_log(run: Path, name: str, run_seed: int) -> Watched:
    """What the console would have printed while this log was written."""
    from esper.karn.live import LiveConsole, RunProgress
    from esper.karn.replay import replay
    from esper.karn.view import ATTENTION

    file, events, rounds = io.StringIO(), Counter[str](), 0
    screen: LiveConsole = LiveConsole(
        RunProgress(Console(file=file, force_terminal=False, width=200)), label="run", rounds=0, horizon=1, done=0
    )
    screen.start()
    lines: list[tuple[int, str]] = []
    for event in replay(run):
        if isinstance(event, LoggedEvent):
            written = len(file.getvalue())
            screen.write(event)
            texts = file.getvalue()[written:].splitlines()
            lines += [(event.round or 0, text) for text in texts if _WARNING.match(text)]
            rounds += event.type.value == "ROUND_COMPLETED"
            if event.severity in ATTENTION:
                events[_kind(event)] += 1
    screen.close()
    return Watched(name=name, run_seed=run_seed, lines=tuple(lines), num_rounds=rounds, events=dict(events))


def _kind(event: LoggedEvent) -> str:
    kind = getattr(event.data, "kind", None) or getattr(event.data, "pattern", None)
    return event.type.value if kind is None else f"{event.type.value} {kind}"


_WARNING = re.compile(r"run round \S+: (warning|error|critical): ")


SMALL: dict[str, Any] = {
    "envs": 4,
    "episode_length": 14,
    "width": 32,
    "calibration_runs": 5,
    "escalation_epochs": 0,
    "checkpoint_s": 1e6,
}
"""Makes runs with faults short."""


@contextmanager
def _worlds() -> Iterator[None]:
    """Adds workers whose hosts are at fault."""
    from esper.simic.training import simulated
    from esper.tolaria.handles import InlineHandle
    from esper.tolaria.kinds import WORKER_KINDS, WorkerKind

    def kind(name: str, change: Callable[[Any], Any]) -> WorkerKind:
        @contextmanager
        def opened(build: Any, spec: Any, workers: int | None) -> Iterator[list[InlineHandle]]:
            world = change(simulated.rehearsal(spec.only.task, spec.only.context.layout))
            yield [InlineHandle(0, simulated.build_simulated_worker, world)]

        return WorkerKind(name=name, description="for measuring alarms", open=opened, several=False)

    known = dict(WORKER_KINDS)
    WORKER_KINDS["parasites"] = kind("parasites", _with_parasites)
    try:
        yield
    finally:
        WORKER_KINDS.clear()
        WORKER_KINDS.update(known)


def _with_parasites(world: Any) -> Any:
    """Every seed harms its host, which learns to lean on it."""
    harm = [
        replace(blueprint, gain_pp=tuple(-4.0 for _ in blueprint.gain_pp), dependence_pp=25.0)
        for blueprint in world.blueprints
    ]
    return replace(world, blueprints=tuple(harm), lifecycle=replace(world.lifecycle, min_contribution=-100.0))


# ---- faults


def _nothing(trainer: VectorizedPPOTrainer) -> None:
    """The run is at fault from its beginning."""


def _agent(trainer: VectorizedPPOTrainer) -> Any:
    client: Any = trainer.client
    return client.agent


def _with_settings(**changes: Any) -> Plant:
    def plant(trainer: VectorizedPPOTrainer) -> None:
        agent = _agent(trainer)
        agent.config = replace(agent.config, **changes)

    return plant


def _op_biased(**biases: float) -> Plant:
    """The op head says the same whatever it sees."""

    def plant(trainer: VectorizedPPOTrainer) -> None:
        from esper.leyline import LifecycleOp

        output = _agent(trainer).network.op_head[-1]
        output.weight.data.zero_()
        for name, bias in biases.items():
            output.bias.data[LifecycleOp[name]] = bias

    return plant


def _nan_critic(trainer: VectorizedPPOTrainer) -> None:
    _agent(trainer).network.value.out.bias.data.fill_(math.nan)


def _deaf_critic(trainer: VectorizedPPOTrainer) -> None:
    """Its weights are thrown, so values have nothing to do with returns."""
    import torch

    generator = torch.Generator().manual_seed(trainer.next_round)
    output = _agent(trainer).network.value.out
    output.weight.data = 3.0 * torch.randn(output.weight.shape, generator=generator)


def _stale_statistics(trainer: VectorizedPPOTrainer) -> None:
    for norm in (_agent(trainer).network.obs_norm, _agent(trainer).network.slot_norm):
        norm.stats.mean += 20.0 * norm.stats.std


def _saturated_memory(trainer: VectorizedPPOTrainer) -> None:
    for parameter in _agent(trainer).network.memory.parameters():
        parameter.data *= 100.0


def _farmed(trainer: VectorizedPPOTrainer) -> None:
    """A level is paid for every seed that is held, in every epoch: holding pays better than keeping."""
    from esper.leyline import SeedStage

    rewards: Any = trainer.client.rewards
    real = rewards.pricing
    if hasattr(real, "real"):
        return

    class Farmed:
        def __init__(self) -> None:
            self.real = real

        def price(self, ledger: Any, before: Any, outcome: Any, after: Any) -> Any:
            step = real.price(ledger, before, outcome, after)
            held = sum(slot.stage is SeedStage.HOLDING for slot in after.slots)
            paid = {**step.components.amounts, "held": 0.5 * held}
            return replace(step, components=replace(step.components, amounts=paid))

    rewards.pricing = Farmed()


def _exploded(trainer: VectorizedPPOTrainer) -> None:
    pool: Any = trainer.pool
    real = getattr(pool.step, "real", pool.step)

    def step(*given: Any, **named: Any) -> Any:
        for env in pool._members[0].handle._worker.envs.values():
            if env.epoch == 9:
                for parameter in env.model.host.parameters():
                    parameter.data *= 100.0
        return real(*given, **named)

    step.real = real  # type: ignore[attr-defined]
    pool.step = step


def _reports_with(**facts: Any) -> Plant:
    """Hosts whose live seeds are reported so."""

    def plant(trainer: VectorizedPPOTrainer) -> None:
        pool: Any = trainer.pool
        if hasattr(pool.step, "real"):
            return
        real = pool.step

        def step(*given: Any, **named: Any) -> Any:
            result = real(*given, **named)
            reports = {
                env_id: replace(
                    report,
                    slots=tuple(replace(slot, **facts) if slot.stage.is_live else slot for slot in report.slots),
                )
                for env_id, report in result.reports.items()
            }
            return replace(result, reports=reports)

        step.real = real  # type: ignore[attr-defined]
        pool.step = step

    return plant


NO_FAULT = Fault(name="no fault", what="the same small runs as they are", plant=_nothing, shown=())
FAULTS: tuple[Fault, ...] = (
    Fault(
        name="parasites",
        what="every seed harms its host, which learns to lean on it",
        plant=_nothing,
        world="parasites",
        onset=0,
        shown=("reward hacking",),
    ),
    Fault(
        name="hold farming",
        what="the reward pays for every epoch that a seed is held",
        plant=_farmed,
        shown=("shaping_share",),
    ),
    Fault(
        name="diverging hosts",
        what="in the tenth epoch the weights of every host, a real one here, grow a hundredfold",
        plant=_exploded,
        world="inline",
        changes=(("envs", 2), ("minibatches", 2), ("calibration_runs", 0)),
        onset=0,
        shown=("unsafe",),
    ),
    Fault(
        name="steps too large",
        what="the policy's learning rate is a thousand times too high",
        plant=_with_settings(lr=0.3),
        shown=("kl_over_target", "ratio_max", "ratio_min", "clip_fraction", "grad_norm_over_clip"),
    ),
    Fault(
        name="frozen policy",
        what="the policy's learning rate is next to nothing",
        plant=_with_settings(lr=1e-12),
        shown=("approx_kl",),
    ),
    Fault(
        name="passive policy",
        what="it waits whatever it sees",
        plant=_op_biased(WAIT=20.0),
        shown=("wait_share",),
    ),
    Fault(
        name="collapsed policy",
        what="it does what comes first in one order, whatever it sees",
        plant=_op_biased(PRUNE=-20.0, WAIT=0.0, ADVANCE=20.0, FOSSILIZE=40.0, GERMINATE=60.0),
        shown=("entropy_share",),
    ),
    Fault(
        name="not a number",
        what="the critic answers NaN",
        plant=_nan_critic,
        onset=0,
        shown=("not finite", "did not learn"),
    ),
    Fault(
        name="deaf critic",
        what="values have nothing to do with returns",
        plant=_deaf_critic,
        shown=("value_nrmse", "return_corr"),
    ),
    Fault(
        name="stale statistics",
        what="observations are far from what the normaliser knows",
        plant=_stale_statistics,
        shown=("observation_outlier_share", "observation_clipped_share", "observation_drift"),
    ),
    Fault(
        name="saturated memory",
        what="weights of the memory are a hundred times too large",
        plant=_saturated_memory,
        shown=("lstm_saturated_share", "lstm_c_rms"),
    ),
    Fault(
        name="nothing to decide",
        what="the budget allows no seed",
        plant=_nothing,
        onset=0,
        changes=(("param_budget", 200),),
        shown=("decision_share",),
    ),
    Fault(
        name="dormant seeds",
        what="no gradient reaches any seed",
        plant=_reports_with(grad_ratio=0.0),
        onset=0,
        shown=("seed_grad_ratio",),
    ),
    Fault(
        name="sick seeds",
        what="the gradients of all seeds vanish or explode",
        plant=_reports_with(grad_health=0.1),
        onset=0,
        shown=("seed_grad_health",),
    ),
)


# ---- display


def _healthy_table(calm: Sequence[Watched]) -> Table:
    rounds = sum(run.num_rounds for run in calm)
    if not rounds:
        raise ValueError("--healthy: no log has a completed round")
    table = Table(title=f"{len(calm)} healthy runs, {rounds} rounds", title_justify="left")
    for column in ("in the log, warnings of", "times", "per round", "runs with it"):
        table.add_column(column, justify="left" if column.startswith("in") else "right")
    total: Counter[str] = sum((Counter(run.events) for run in calm), Counter())
    for kind, count in total.most_common():
        table.add_row(kind, str(count), f"{count / rounds:.2f}", str(sum(kind in run.events for run in calm)))
    table.add_section()
    printed = sum(len(run.lines) for run in calm)
    table.add_row(
        "printed at the console",
        str(printed),
        f"{printed / rounds:.3f}",
        str(sum(bool(run.lines) for run in calm)),
    )
    return table


def _fault_table(calm: Sequence[Watched], faulty: Sequence[Watched]) -> tuple[Table, list[str]]:
    table = Table(title=f"Planted faults, beside {len(calm)} runs without any", title_justify="left")
    for column in ("fault", "alarm", "seen", "after rounds", "false", "precision", "recall"):
        table.add_column(column, justify="left" if column in ("fault", "alarm") else "right")
    missed = []
    for fault in FAULTS:
        own = [run for run in faulty if run.name == fault.name]
        after = [run.first(fault.shown, fault.onset) for run in own]
        seen = [rounds for rounds in after if rounds is not None and rounds <= SOON]
        false = sum(run.first(fault.shown, 0) is not None for run in calm)
        precision = len(seen) / (len(seen) + false) if seen or false else None
        table.add_row(
            fault.name,
            ", ".join(fault.shown[:2]),
            f"{len(seen)} of {len(own)}",
            ", ".join("-" if rounds is None else str(rounds) for rounds in after),
            f"{false} of {len(calm)}",
            "-" if precision is None else f"{precision:.2f}",
            f"{len(seen) / len(own):.2f}",
        )
        if len(seen) < len(own):
            missed.append(fault.name)
    return table, missed
