"""What the engine costs beside plain PyTorch: the measurements behind `esper bench engine`, one run on one machine."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.plain_loops import Usage, build_bench_worker
from esper.kasmina import HostSpec
from esper.leyline import ActionExecutionResult, ActionSpec, HostLayout, LifecycleOp, record, wait
from esper.runtime.tasks import TaskSpec, get_task_spec, override
from esper.simic.training.action_execution import execute_actions, observe_reset
from esper.simic.training.env_factory import WorkerSpec
from esper.simic.training.rollout import episode_seeds
from esper.tolaria.pool import EnginePool

WARM_UP = 2
MIN_QUIET = 3
FOREIGN_LIMIT = 0.05
"""Share of the machine that other processes may use in a step that counts."""
BLUEPRINTS = {"mlp": "mlp.mlp", "cnn": "cnn.conv", "transformer": "transformer.conv_causal"}
# Three seeds need three slots; the host of digits_mlp has two.
THREE_SLOT_MLP = HostSpec(kind="mlp", kwargs={"inputs": 64, "hidden": [16, 16], "classes": 10, "input_slot": True})


def bench_task(name: str, samples: int | None, steps: int) -> TaskSpec:
    """The task with gates open for every seed and a horizon that no measurement reaches."""
    spec = get_task_spec(name)
    changes: dict[str, Any] = {
        "horizon": 4 * (steps + WARM_UP) + 60,
        "lifecycle": replace(
            spec.lifecycle, max_live=len(spec.slots), harm_tolerance=1e6, max_residual_ratio=1e6, min_live_fraction=0.0
        ),
    }
    if samples is not None:
        changes["samples_per_epoch"] = samples
    if name == "digits_mlp":
        changes |= {"host": THREE_SLOT_MLP, "slots": ("r0c0", "r0c1", "r0c2")}
    return override(spec, **changes)


# ---- controllers


class WaitOnly:
    """Does nothing, ever."""

    def act(self, state: ActionExecutionResult) -> list[ActionSpec]:
        return [wait(report.env_id) for report in state.reports]


class GrowToLimit:
    """Plants a seed wherever one may be planted, until `limit` are alive, and blends each in at once."""

    def __init__(self, layout: HostLayout, limit: int) -> None:
        self.layout = layout
        self.limit = limit
        self.blueprint = BLUEPRINTS[layout.topology]

    def act(self, state: ActionExecutionResult) -> list[ActionSpec]:
        return [self._choose(state, index) for index in range(len(state.reports))]

    def _choose(self, state: ActionExecutionResult, index: int) -> ActionSpec:
        report, masks = state.reports[index], state.post_action_masks[index]
        for position, slot_id in enumerate(self.layout.slot_ids):
            if masks.slot_by_op[LifecycleOp.ADVANCE][position]:
                return self._spec(report.env_id, LifecycleOp.ADVANCE, slot_id)
        column = self.layout.blueprints.index(self.blueprint)
        for position, slot_id in enumerate(self.layout.slot_ids):
            if report.num_live < self.limit and masks.blueprint_by_slot[position][column]:
                return self._spec(report.env_id, LifecycleOp.GERMINATE, slot_id)
        return wait(report.env_id)

    def _spec(self, env_id: int, op: LifecycleOp, slot: str) -> ActionSpec:
        born = op is LifecycleOp.GERMINATE
        blueprint, blend = (self.blueprint, "linear_fast") if born else (None, None)
        return ActionSpec(env_id=env_id, op=op, slot=slot, blueprint=blueprint, blend=blend)


# ---- one measured phase


@record
class Phase:
    """One step of one side. Seconds."""

    wall_s: float
    cpu_s: float
    """Of all workers and this process together."""
    parent_s: float
    """CPU of this process: controller, masks, messages."""
    busiest_s: float
    """Wall time inside the slowest worker."""
    foreign_share: float | None
    """Share of the machine that others used meanwhile; None where the system does not tell."""


class Meter:
    """Times calls to a pool."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self._used = self._usages()

    def _usages(self) -> tuple[Usage, ...]:
        usages: tuple[Usage, ...] = self.pool.ask_all("usage")
        return usages

    def measure(self, work: Callable[..., Any], *arguments: Any) -> tuple[Any, Phase]:
        """Calls something and says what it took."""
        machine, parent, started = _machine_seconds(), time.process_time(), time.perf_counter()
        result = work(*arguments)
        wall = time.perf_counter() - started
        parent_s = time.process_time() - parent
        machine_after = _machine_seconds()
        after = self._usages()
        workers_s = sum(new.cpu_s - old.cpu_s for new, old in zip(after, self._used, strict=True))
        self._used = after
        cpu = parent_s + (workers_s if self.pool.kind == "process" else 0.0)
        foreign = None
        if machine is not None and machine_after is not None:
            total, busy = machine_after[0] - machine[0], machine_after[1] - machine[1]
            foreign = max(0.0, busy - cpu) / total if total > 0 else 0.0
        busiest = max(usage.step_s for usage in after)
        return result, Phase(wall_s=wall, cpu_s=cpu, parent_s=parent_s, busiest_s=busiest, foreign_share=foreign)


def _machine_seconds() -> tuple[float, float] | None:
    """(all, busy) processor seconds of the machine since it started."""
    try:
        fields = [float(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return None
    idle = fields[3] + fields[4]
    return sum(fields) / 100.0, (sum(fields) - idle) / 100.0


# ---- the benchmark


def run_bench(spec: WorkerSpec, envs: int, workers: int, steps: int, console: Console) -> dict[str, Any]:
    """All measurements, as JSON values."""
    started = time.perf_counter()
    with EnginePool(build_bench_worker, spec, kind="process", workers=workers) as pool:
        startup_s = time.perf_counter() - started
        empty = [usage.pss_bytes for usage in _with_envs(pool, 1, 0)]
        with console.status(Text(f"{spec.only.task.name}: {envs} hosts on {workers} workers")):
            side_by_side = compare(pool, envs, steps)
            memory = _memory(pool, envs, empty)
            growth = grow(pool, envs, max(3, steps // 4))
            by_envs = {str(n): _throughput(pool, n, max(3, steps // 4)) for n in _env_counts(envs)}
        versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        hellos = [{"threads": hello.threads, "cores": list(hello.cores)} for hello in pool.hellos]
    with console.status("one worker against all"):
        scaling = scale(spec, envs, workers, max(3, steps // 2)) if workers > 1 else None
    with console.status("one slot against all"):
        by_slots = slot_cost(spec, envs, workers, max(3, steps // 2))
    return {
        "task": spec.only.task.name,
        "host_params": spec.only.context.layout.host_params,
        "slots": len(spec.only.context.layout.slots),
        "envs": envs,
        "workers": workers,
        "steps": steps,
        "startup_s": startup_s,
        "versions": versions,
        "processes": hellos,
        "side_by_side": side_by_side,
        "growth": growth,
        "memory": memory,
        "throughput_by_envs": by_envs,
        "slot_cost": by_slots,
        "scaling": scaling,
    }


def _play(pool: EnginePool, controller: WaitOnly | GrowToLimit, state: ActionExecutionResult) -> ActionExecutionResult:
    """One step as a run takes it: the choice, the messages, the work, the masks."""
    return execute_actions(pool, controller.act(state))


def _env_counts(envs: int) -> list[int]:
    return sorted({max(1, envs // 4), max(1, envs // 2), envs})


def _with_envs(pool: EnginePool, envs: int, episode: int) -> tuple[Usage, ...]:
    observe_reset(pool, episode_seeds(0, episode, envs))
    usages: tuple[Usage, ...] = pool.ask_all("usage")
    return usages


def compare(pool: EnginePool, envs: int, steps: int) -> dict[str, Any]:
    """Plain loops and the waiting engine in turns, on equal hosts that must learn equally."""
    state = observe_reset(pool, episode_seeds(0, 1, envs))
    meter, controller = Meter(pool), WaitOnly()
    pairs: list[tuple[Phase, Phase]] = []
    for epoch in range(steps + WARM_UP):
        plain_first = epoch % 2 == 0
        phases: dict[bool, Phase] = {}
        for is_plain in (plain_first, not plain_first):
            if is_plain:
                answers, phases[True] = meter.measure(pool.ask_all, "plain_epoch", epoch)
            else:
                after, phases[False] = meter.measure(_play, pool, controller, state)
        _check_same_work(answers, after)
        state = after
        if epoch >= WARM_UP:
            pairs.append((phases[True], phases[False]))
    used, counts = _undisturbed(pairs)
    plain, engine = [pair[0] for pair in used], [pair[1] for pair in used]
    return {
        **counts,
        "plain_host_epochs_per_s": spread([envs / phase.wall_s for phase in plain]),
        "engine_host_epochs_per_s": spread([envs / phase.wall_s for phase in engine]),
        "throughput_wall": spread([p.wall_s / e.wall_s for p, e in used]),
        "throughput_cpu": spread([p.cpu_s / e.cpu_s for p, e in used]),
        "parent_ms_per_env_step": spread([1e3 * phase.parent_s / envs for phase in engine]),
        "parent_share": spread([phase.parent_s / phase.wall_s for phase in engine]),
        "waiting_share": spread([1.0 - phase.busiest_s / phase.wall_s for phase in engine]),
        "plain_waiting_share": spread([1.0 - phase.busiest_s / phase.wall_s for phase in plain]),
    }


def _check_same_work(answers: Sequence[Mapping[int, tuple[float, float]]], after: ActionExecutionResult) -> None:
    """Both sides trained the same network on the same rows, or the comparison means nothing."""
    plain = {env_id: result for answer in answers for env_id, result in answer.items()}
    for report in after.reports:
        loss, accuracy = plain[report.env_id]
        same = abs(loss - report.val_loss) <= 1e-6 * abs(loss) and abs(accuracy - report.val_accuracy_pct) < 1e-9
        if not same:
            raise RuntimeError(
                f"env {report.env_id}, epoch {report.epoch}: the plain loop reached loss {loss}, the engine "
                f"{report.val_loss}; the two sides do not do the same work"
            )


def _undisturbed(pairs: list[tuple[Phase, Phase]]) -> tuple[list[tuple[Phase, Phase]], dict[str, Any]]:
    """The pairs that others did not disturb; all of them, and says so, if hardly any is left."""
    kept = [pair for pair in pairs if all(map(_is_quiet, pair))]
    enough = len(kept) >= min(MIN_QUIET, len(pairs))
    counts = {"steps_quiet": len(kept), "steps_disturbed": len(pairs) - len(kept), "disturbed": not enough}
    return (kept if enough else pairs), counts


def _is_quiet(phase: Phase) -> bool:
    return phase.foreign_share is None or phase.foreign_share <= FOREIGN_LIMIT


def grow(pool: EnginePool, envs: int, repeats: int) -> list[dict[str, Any]]:
    """What a step costs with 0 to 3 live seeds, and what measuring their coalitions costs."""
    rows = []
    for limit in range(min(3, len(pool.context.layout.slots)) + 1):
        state = observe_reset(pool, episode_seeds(0, 2 + limit, envs))
        controller = GrowToLimit(pool.context.layout, limit)
        for _ in range(2 * limit + 4):  # long enough to plant and blend every seed
            state = _play(pool, controller, state)
        meter, ratios, gains = Meter(pool), list[float](), list[float]()
        for epoch in range(repeats):
            _, plain = meter.measure(pool.ask_all, "plain_epoch", epoch)
            state, engine = meter.measure(_play, pool, controller, state)
            ratios.append(engine.cpu_s / plain.cpu_s)
            pool.ask_all("pass_through", True)
            state, slow = meter.measure(_play, pool, controller, state)
            pool.ask_all("pass_through", False)
            gains.append(slow.cpu_s / engine.cpu_s)
        times = [row for answer in pool.ask_all("validation_times", 4 * repeats) for row in answer]
        rows.append(
            {
                "live_seeds": state.reports[0].num_live,
                "blended": len(state.reports[0].coalitions.slot_ids),
                "coalitions": len(state.reports[0].coalitions.loss),
                "params_ratio": state.reports[0].total_params / state.reports[0].host_params,
                "step_over_plain_host_cpu": spread(ratios),
                "modules_over_flat_cpu": spread(gains),
                "passes_over_plain_pass": spread([table / plain for plain, _, table in times]),
                "passes_over_own_pass": spread([table / single for _, single, table in times]),
                "validation_ms": spread([1e3 * plain for plain, _, _ in times]),
            }
        )
    return rows


def _throughput(pool: EnginePool, envs: int, steps: int) -> dict[str, float]:
    state = observe_reset(pool, episode_seeds(0, 9, envs))
    meter, controller, phases = Meter(pool), WaitOnly(), []
    for step in range(steps + WARM_UP):
        state, phase = meter.measure(_play, pool, controller, state)
        if step >= WARM_UP:
            phases.append(envs / phase.wall_s)
    return spread(phases)


def scale(spec: WorkerSpec, envs: int, workers: int, steps: int) -> dict[str, Any]:
    """How much faster all workers are than one, beside plain loops in the same processes, and where the rest goes."""
    used, plain, counts = _in_turns((spec, 1), (spec, workers), envs, steps)
    return {
        "workers": workers,
        "speed_up": spread([a.wall_s / b.wall_s for a, b in used]),
        "plain_speed_up": spread([a.wall_s / b.wall_s for a, b in plain]),
        "cpu_all_over_one": spread([b.cpu_s / a.cpu_s for a, b in used]),
        "plain_cpu_all_over_one": spread([b.cpu_s / a.cpu_s for a, b in plain]),
        "waiting_share": spread([1.0 - b.busiest_s / b.wall_s for _, b in used]),
        **counts,
    }


def slot_cost(spec: WorkerSpec, envs: int, workers: int, steps: int) -> dict[str, Any]:
    """What a step costs with all slots empty, against the same hosts with one slot only."""
    entry, task, layout = spec.only, spec.only.task, spec.only.context.layout
    one_slot = replace(layout, slots=layout.slots[:1], cards=layout.cards[:1])
    fewer = replace(entry, task=override(task, slots=task.slots[:1]), context=replace(entry.context, layout=one_slot))
    narrow = replace(spec, tasks={task.name: fewer})
    used, _, counts = _in_turns((narrow, workers), (spec, workers), envs, steps)
    ratio = spread([b.cpu_s / a.cpu_s for a, b in used])
    return {"slots": len(layout.slots), "step_over_one_slot_cpu": ratio, **counts}


def _in_turns(
    left: tuple[WorkerSpec, int], right: tuple[WorkerSpec, int], envs: int, steps: int
) -> tuple[list[tuple[Phase, Phase]], list[tuple[Phase, Phase]], dict[str, Any]]:
    """The same waiting step, and the same plain epoch, by two pools (spec and number of workers), in turns."""
    with (
        EnginePool(build_bench_worker, left[0], kind="process", workers=left[1]) as one,
        EnginePool(build_bench_worker, right[0], kind="process", workers=right[1]) as other,
    ):
        pools, controller = (one, other), WaitOnly()
        states = [observe_reset(pool, episode_seeds(0, 1, envs)) for pool in pools]
        meters = [Meter(pool) for pool in pools]
        pairs, plain_pairs = [], []
        for step in range(steps + WARM_UP):
            phases, plain = [], []
            for index, pool in enumerate(pools):
                states[index], phase = meters[index].measure(_play, pool, controller, states[index])
                phases.append(phase)
            for index, pool in enumerate(pools):
                plain.append(meters[index].measure(pool.ask_all, "plain_epoch", step)[1])
            if step >= WARM_UP:
                pairs.append((phases[0], phases[1]))
                plain_pairs.append((plain[0], plain[1]))
    used, counts = _undisturbed(pairs)
    return used, _undisturbed(plain_pairs)[0], counts


def _memory(pool: EnginePool, envs: int, empty: Sequence[int | None]) -> dict[str, Any]:
    full = [usage.pss_bytes for usage in pool.ask_all("usage")]
    if any(entry is None for entry in (*full, *empty)):
        return {"pss_per_worker_bytes": None, "pss_per_env_bytes": None}
    worker = statistics.median(entry for entry in full if entry is not None)
    base = statistics.median(entry for entry in empty if entry is not None)
    return {
        "pss_per_worker_bytes": int(worker),
        "pss_per_env_bytes": int(max(0.0, worker - base) * len(full) / max(1, envs - len(empty))),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


# ---- display


def show(console: Console, figures: Mapping[str, Any]) -> None:
    """The figures a person asks for first."""
    both = figures["side_by_side"]
    table = Table(
        title=f"{figures['task']}: {figures['envs']} hosts on {figures['workers']} workers", title_justify="left"
    )
    for column in ("measure", "median", "quartiles"):
        table.add_column(column, justify="left" if column == "measure" else "right")
    for name, key in (
        ("plain loops, host-epochs per second", "plain_host_epochs_per_s"),
        ("engine that waits, host-epochs per second", "engine_host_epochs_per_s"),
        ("engine / plain, by wall time", "throughput_wall"),
        ("engine / plain, by CPU time", "throughput_cpu"),
        ("controller and messages, CPU ms per env step", "parent_ms_per_env_step"),
        ("share of a step outside the slowest worker", "waiting_share"),
    ):
        _add(table, name, both[key])
    for row in figures["growth"]:
        _add(table, f"{row['live_seeds']} live seeds: step / plain host, CPU", row["step_over_plain_host_cpu"])
        _add(table, "    through modules / flat, CPU", row["modules_over_flat_cpu"])
        _add(table, f"    {row['coalitions']} coalitions / one pass of the same net", row["passes_over_own_pass"])
    for count, spread in figures["throughput_by_envs"].items():
        _add(table, f"engine with {count} hosts, host-epochs per second", spread)
    slots = figures["slot_cost"]
    _add(table, f"{slots['slots']} empty slots / 1, CPU per step", slots["step_over_one_slot_cpu"])
    if figures["scaling"] is not None:
        scaling, title = figures["scaling"], f"{figures['workers']} workers / 1 worker"
        _add(table, title, scaling["speed_up"])
        _add(table, "    plain loops in the same processes", scaling["plain_speed_up"])
        _add(table, "    CPU time of the same work", scaling["cpu_all_over_one"])
        _add(table, "    share of a step outside the slowest worker", scaling["waiting_share"])
    console.print(table)
    for part in (both, figures["scaling"] or {"steps_disturbed": 0}):
        if part["steps_disturbed"]:
            note = "nearly all, so they count and the wall times mean little" if part["disturbed"] else "left out"
            console.print(f"{part['steps_disturbed']} steps were disturbed by other processes: {note}.")
    per_env = figures["memory"]["pss_per_env_bytes"]
    if per_env is not None:
        worker = figures["memory"]["pss_per_worker_bytes"]
        console.print(f"memory: {worker / 1e6:.0f} MB per worker, {per_env / 1e6:.2f} MB per host.")


def _add(table: Table, name: str, spread: Mapping[str, float]) -> None:
    table.add_row(name, f"{spread['median']:.3g}", f"{spread['low']:.3g} .. {spread['high']:.3g}")
