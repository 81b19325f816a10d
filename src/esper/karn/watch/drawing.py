"""What the screens of `esper watch` show, drawn from a monitor. No widgets, no files, no judgement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from esper.karn.braille import Curve, plot
from esper.karn.console import STAGE_LEGEND, STAGE_MARKS, action_words, clean, env_cells, figure
from esper.karn.history import SeedTimeline
from esper.karn.monitor import RunMonitor
from esper.karn.view import Cited
from esper.leyline import (
    HEAD_NAMES,
    ActionTaken,
    BatchSummary,
    CoalitionMeasured,
    EpochCompleted,
    GateEvaluated,
    PPOUpdateMetrics,
    SeedStage,
)

STAGE_STYLES = {
    SeedStage.GERMINATED.name: "white",
    SeedStage.TRAINING.name: "yellow",
    SeedStage.BLENDING.name: "cyan",
    SeedStage.HOLDING.name: "magenta",
    SeedStage.FOSSILIZED.name: "bold green",
    SeedStage.PRUNED.name: "red",
}
SIDE_BY_SIDE = 70
"""Columns from which two plots share a row."""


def mark(stage: str) -> Text:
    """The letter of a stage in its colour."""
    return Text(STAGE_MARKS.get(stage, "?"), STAGE_STYLES.get(stage, "red"))


def _table(*left: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in left:
        table.add_column(name, no_wrap=True)
    return table


def _figures(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right")


def plots(titled: Sequence[tuple[str, Sequence[Curve]]], width: int, height: int) -> RenderableType:
    """Titled plots in one or two columns."""
    per_row = 2 if width >= SIDE_BY_SIDE else 1
    each = width // per_row - (per_row - 1)
    grid = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(per_row):
        grid.add_column(width=each)
    cells = [Group(_heading(title, curves), plot(curves, each, height)) for title, curves in titled]
    for start in range(0, len(cells), per_row):
        grid.add_row(*cells[start : start + per_row])
    return grid


def _heading(title: str, curves: Sequence[Curve]) -> Text:
    """The title, and each curve's name and newest value in its colour."""
    text = Text(title, "bold", no_wrap=True, overflow="ellipsis")
    for curve in curves:
        newest = next((value for value in reversed(curve.values) if value is not None), None)
        text.append(f"  {curve.name} {figure(newest, '.3g')}".rstrip(), f"not bold {curve.style}")
    return text


def round_plots(rounds: Sequence[BatchSummary], width: int, *, all_of_them: bool) -> RenderableType:
    """The run by round; without `all_of_them`, accuracy and return only."""
    shown: list[tuple[str, Sequence[Curve]]] = [
        (
            "accuracy %",
            (
                Curve(name="worst", values=[r.accuracy_worst_pct for r in rounds], style="grey50"),
                Curve(name="mean", values=[r.accuracy_mean_pct for r in rounds], style="cyan"),
                Curve(name="kept", values=[r.committed_accuracy_pct for r in rounds], style="green"),
            ),
        ),
        ("return", (Curve(name="mean", values=[r.return_mean for r in rounds], style="yellow"),)),
    ]
    if all_of_them:
        sizes = [r.params_ratio_mean for r in rounds]
        shown.append(("parameters, times the host's", (Curve(name="", values=sizes, style="magenta"),)))
        rollbacks = [float(r.num_rollbacks) for r in rounds]
        shown.append(("rollbacks", (Curve(name="", values=rollbacks, style="red"),)))
    return plots(shown, width, 6)


def host_cells(monitor: RunMonitor, env: int) -> tuple[Text, ...]:
    """The row of one host."""
    state = monitor.view.epochs[env].data
    slot_ids = monitor.view.started.slot_ids if monitor.view.started is not None else tuple(state.slots)
    marks = [mark(state.slots[slot_id].stage) if slot_id in state.slots else Text("·") for slot_id in slot_ids]
    *cells, _, action = env_cells(monitor.view, env)
    return (*map(Text, cells), Text().join(marks), Text(action))


def policy_page(monitor: RunMonitor, width: int) -> RenderableType:
    """The learner: what each head does, and the health of update, memory and observations."""
    updates = [metrics for _, metrics in monitor.history.updates]
    if not updates:
        return Text("No policy was updated yet; a fixed controller never has an update.")
    curves = list(_policy_curves(updates))
    heads, newest = _heads_table(updates[-1]), _health(updates[-1])
    return Group(heads, _choices_line(monitor), Text(""), plots(curves, width, 5), newest)


def _heads_table(update: PPOUpdateMetrics) -> Table:
    table = _table("head")
    _figures(table, "entropy share", "kl", "clipped", "gradient", "usable", "state")
    for head, data in update["heads"].items():
        entropy = update["head_entropies"].get(head)
        table.add_row(
            Text(clean(head)),
            figure(entropy if isinstance(entropy, float) else None, ".2f"),
            figure(data.kl, ".2g"),
            figure(data.clip_fraction, ".2f"),
            figure(data.grad_norm, ".2g"),
            str(data.num_usable),
            Text(clean(data.grad_state)),
        )
    return table


def _choices_line(monitor: RunMonitor) -> Text:
    ops = monitor.choices.get("op")
    if ops is None or not ops.num_decisions:
        return Text("")
    shares = (
        f"{clean(name)} {100 * count.num_chosen / ops.num_decisions:.0f} %" for name, count in ops.choices.items()
    )
    return Text(f"ops of the last round: {', '.join(shares)}", "dim")


def _policy_curves(updates: Sequence[PPOUpdateMetrics]) -> Iterator[tuple[str, Sequence[Curve]]]:
    yield (
        "kl",
        (
            Curve(name="target", values=[u["target_kl"] for u in updates], style="grey50"),
            Curve(name="now", values=[u["approx_kl"] for u in updates], style="cyan"),
        ),
    )
    colors = ("cyan", "yellow", "green", "magenta")
    yield (
        "entropy",
        tuple(
            Curve(name=head, values=[u["head_entropies"][head] for u in updates], style=color)
            for head, color in zip(HEAD_NAMES, colors, strict=False)
        ),
    )
    yield (
        "critic",
        (
            Curve(name="error", values=[u["value_nrmse"] for u in updates], style="yellow"),
            Curve(name="explained", values=[u["explained_variance"] for u in updates], style="cyan"),
        ),
    )
    yield (
        "gradient norm",
        (
            Curve(name="clip", values=[u["gradient_stats"]["clip_norm"] for u in updates], style="grey50"),
            Curve(name="max", values=[u["gradient_stats"]["max_grad"] for u in updates], style="magenta"),
        ),
    )


def _health(update: PPOUpdateMetrics) -> Text:
    lines = [
        f"losses: policy {figure(update['policy_loss'], '.3g')}, value {figure(update['value_loss'], '.3g')}; "
        f"clipped {figure(update['clip_fraction'], '.2f')}, ratio {figure(update['ratio_min'], '.2g')} "
        f"to {figure(update['ratio_max'], '.2g')}"
    ]
    if (lstm := update["lstm"]) is not None:
        lines.append(
            f"memory: output rms {lstm.h_rms:.2g}, cell rms {lstm.c_rms:.2g}, saturated {lstm.saturated_share:.2f}, "
            f"dead units {lstm.dead_share:.2f}"
        )
    if (seen := update["observations"]) is not None:
        lines.append(
            f"observations: outliers {seen.outlier_share:.3f}, clipped {seen.clipped_share:.3f}, drift {seen.drift:.2g}"
        )
    return Text("\n".join(lines))


def seed_timeline(
    seeds: Sequence[SeedTimeline], epochs: int, width: int, *, one_episode: bool = False
) -> RenderableType:
    """A row per host and slot, a column per epoch, and as many of the newest episodes as there is room for."""
    names = sorted({(seed.env, seed.birth.slot_id) for seed in seeds})
    label = max(len(clean(f"host {env} {slot_id}")) for env, slot_id in names)
    num_shown = 1 if one_episode else max((width - label - 2) // (epochs + 1), 1)
    newest = max(seed.episode for seed in seeds)
    first = max(newest - num_shown + 1, 0)
    rows: dict[tuple[int, str], list[list[tuple[str, str]]]] = {
        name: [[("·", "dim")] * epochs for _ in range(newest - first + 1)] for name in names
    }
    for seed in seeds:
        if seed.episode >= first:
            _draw_life(rows[seed.env, seed.birth.slot_id][seed.episode - first], seed, epochs)
    lines = [Text(f"{'episode':<{label}} ", "bold")]
    for episode in range(first, newest + 1):
        lines[0].append(f"{episode:<{epochs + 1}}")
    for (env, slot_id), episodes in rows.items():
        line = Text(f"{clean(f'host {env} {slot_id}'):<{label}} ", no_wrap=True)
        for cells in episodes:
            for letter, style in cells:
                line.append(letter, style)
            line.append("│", "dim")
        lines.append(line)
    lines.append(Text(f"{STAGE_LEGEND}, x pruned. A column is an epoch", "dim"))
    return Group(*lines)


def _draw_life(cells: list[tuple[str, str]], seed: SeedTimeline, epochs: int) -> None:
    for span in seed.spans:
        for epoch in range(span.start, min(max(span.stop, span.start + 1), epochs)):
            cells[epoch] = (STAGE_MARKS.get(span.stage, "?"), STAGE_STYLES.get(span.stage, "red"))


def host_page(monitor: RunMonitor, env: int, width: int) -> RenderableType:
    """One host: its curve, its slots over time, what each seed brings, its last decisions and its coalitions."""
    host, now = monitor.hosts.get(env), monitor.view.epochs.get(env)
    if host is None or now is None:
        return Text(f"Host {env} has not finished an epoch yet.")
    parts: list[RenderableType] = [
        Text(
            f"Host {env}, episode {host.episode}, epoch {figure(now.event.epoch)}: {now.data.val_accuracy_pct:.1f} %, "
            f"loss {now.data.val_loss:.3g}, {now.data.params_total:,} parameters",
            "bold",
        ),
        plots(
            (
                (
                    "accuracy % by epoch",
                    (
                        Curve(name="kept", values=[e.data.committed_accuracy_pct for e in host.epochs], style="green"),
                        Curve(name="all", values=[e.data.val_accuracy_pct for e in host.epochs], style="cyan"),
                    ),
                ),
                ("loss by epoch", (Curve(name="", values=[e.data.val_loss for e in host.epochs], style="yellow"),)),
            ),
            width,
            4,
        ),
    ]
    epochs = monitor.view.started.epochs_per_episode if monitor.view.started is not None else len(host.epochs)
    if seeds := monitor.seeds_of(env):
        parts += [Text(""), seed_timeline(seeds, epochs, width, one_episode=True)]
    if now.data.slots:
        parts += [Text(""), _slots_table(now.data), *_waiting(monitor, env)]
    if host.actions:
        parts += [Text(""), _actions_table(list(host.actions))]
    if host.coalition is not None:
        parts += [Text(""), _coalition_table(host.coalition.data)]
    return Group(*parts)


def _slots_table(now: EpochCompleted) -> Table:
    table = _table("slot", "stage", "blueprint")
    _figures(table, "blended in", "params", "brings pp")
    for slot_id, slot in now.slots.items():
        table.add_row(
            Text(clean(slot_id)),
            mark(slot.stage).append(clean(f" {slot.stage.lower()}"), "default"),
            Text(clean(slot.blueprint)),
            f"{slot.alpha_share:.2f}",
            f"{slot.params:,}",
            figure(slot.contribution_pp, "+.2f"),
        )
    return table


def _waiting(monitor: RunMonitor, env: int) -> Iterator[Text]:
    """What holds up the seeds of a host: checks of the gate before each that failed when it last answered."""
    gates, slots = monitor.hosts[env].gates, monitor.view.epochs[env].data.slots
    for slot_id, slot in slots.items():
        gate = gates.get(slot_id)
        if gate is None or gate.data.passed or gate.data.seed_id != slot.seed_id:
            continue
        if slot.stage not in (gate.data.target_stage, SeedStage.FOSSILIZED.name):
            yield Text(clean(f"{slot_id} waits for {_failed_checks(gate.data)}"), "dim")


def _failed_checks(gate: GateEvaluated) -> str:
    failed = [one for one in gate.checks if not one.passed]
    checks = (f"{one.name} {figure(one.value, '.3g')} (limit {one.limit:g})" for one in failed)
    return clean(", ".join(checks))


def _actions_table(actions: Sequence[Cited[ActionTaken]]) -> Table:
    table = _table("epoch", "last decisions, newest first")
    _figures(table, "probability", "reward")
    for event, action in reversed(actions):
        head = action.heads.get("op")
        table.add_row(
            figure(event.epoch),
            Text(clean(action_words(action)) + (" (only choice)" if action.forced else "")),
            figure(None if head is None else head.prob_share, ".2f"),
            figure(action.reward_raw, "+.3f"),
        )
    return table


def _coalition_table(measured: CoalitionMeasured) -> Table:
    table = _table("coalition of seeds")
    _figures(table, "acc. %", "loss")
    for row in measured.rows:
        on = [slot_id for slot_id, bit in zip(measured.slot_ids, row.mask, strict=False) if bit == "1"]
        table.add_row(Text(clean("+".join(on) or "none")), figure(row.accuracy_pct, ".1f"), figure(row.loss, ".3g"))
    return table
