"""A RunView and its verdict as text for a terminal. Judges nothing and reads no files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from esper.karn.finding import Finding, State
from esper.karn.verdict import Verdict
from esper.karn.view import EnvNow, RunView
from esper.leyline import AnomalyDetected, GovernorStateChanged, LoggedEvent, RunEnded, Severity

MAX_ENVS = 16
MAX_NOTES = 8
SPARK_WIDTH = 24
_BARS = "▁▂▃▄▅▆▇█"
STYLES = {
    Severity.DEBUG: "dim",
    Severity.INFO: "green",
    Severity.WARNING: "yellow",
    Severity.ERROR: "red",
    Severity.CRITICAL: "bold red",
}
_STAGE_MARKS = {"GERMINATED": "g", "TRAINING": "t", "BLENDING": "b", "HOLDING": "h", "FOSSILIZED": "F"}
STAGE_LEGEND = "slots: g germinated, t training, b blending, h holding, F fossilized, · no seed"


def clean(text: str) -> str:
    """The text without control characters: a log may hold anything, a terminal obeys some of it."""
    return "".join(char if char.isprintable() else " " for char in text)


def clean_lines(text: str) -> str:
    """The same of a text of several lines, which it keeps."""
    return "\n".join(map(clean, text.split("\n")))


def render_status(view: RunView, found: Verdict) -> RenderableType:
    """The whole screen: who, what is the matter, how far, and the details."""
    parts: list[RenderableType] = [_title(view), Text(""), _verdict(found), Text(""), _figures(view, found.state)]
    if view.growth.envs:
        parts += [Text(""), _envs(view)]
    if view.growth.blueprints:
        parts += [Text(""), _blueprints(view)]
    if view.safety.notes:
        parts += [Text(""), Text("Newest warnings", style="bold"), *map(_note, view.safety.notes[-MAX_NOTES:])]
    return Group(*parts)


def render_line(view: RunView, found: Verdict) -> str:
    """One line for a pipe: how far the run is and what is said about it."""
    last = view.progress.last_round
    accuracy = "" if last is None else f"  accuracy {last.data.accuracy_mean_pct:.1f} %"
    return clean(f"{_rounds_done(view)}{accuracy}  {found.headline}")


def _title(view: RunView) -> Text:
    title = Text(clean(view.log.run or "a run without events"), style="bold")
    begun = view.progress.started
    if begun is not None:
        title.append(
            clean(f"  {begun.task}, {begun.controller}, seed {begun.run_seed}, group {view.log.group}"),
            style="not bold",
        )
    if view.log.attempt:
        title.append(f"  attempt {view.log.attempt}", style="yellow")
    return title


def _verdict(found: Verdict) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column()
    table.add_row("now", Text(clean(found.headline), style=STYLES[found.severity]))
    table.add_row("why", Text(clean(found.why)))
    table.add_row("next", Text(clean(found.next)))
    for other in found.findings[1:]:
        if other.severity is not Severity.INFO:
            table.add_row("also", _other(other))
    return table


def _other(finding: Finding) -> Text:
    text = Text(clean(finding.headline), style=STYLES[finding.severity])
    text.append(clean(f"  [{finding.why}]"), style="dim")
    return text


def _figures(view: RunView, state: State) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column()
    for name, figure in _rows(view, state):
        table.add_row(name, Text(clean(figure)))
    return table


def _rows(view: RunView, state: State) -> Iterator[tuple[str, str]]:
    yield "progress", _progress(view, state)
    last = view.progress.last_round
    if last is not None:
        data, rounds = last.data, [point for _, point in view.progress.rounds.points]
        yield (
            "accuracy",
            f"{data.accuracy_mean_pct:.1f} % ({data.accuracy_worst_pct:.1f} to {data.accuracy_best_pct:.1f}), "
            f"committed {_figure(data.committed_accuracy_pct, '.1f')} %  "
            + spark([point.accuracy_mean_pct for point in rounds]),
        )
        yield (
            "return",
            f"{data.return_mean:.3g} ± {data.return_std:.2g}  {spark([point.return_mean for point in rounds])}",
        )
        yield "parameters", f"{data.params_ratio_mean:.2f} times the host's own"
    yield from _policy(view)
    yield "safety", f"{view.safety.num_rollbacks} rollbacks, {len(view.safety.alarms)} open alarms"
    saved = view.machine.saved
    yield "checkpoint", "none" if saved is None else f"{saved.data.path}, {_count(saved.data.round)} rounds"
    log = view.log
    yield "log", f"{log.num_events:,} events, {log.num_missing} lost, {log.num_bad} damaged lines"


def _progress(view: RunView, state: State) -> str:
    progress, begun = view.progress, view.progress.started
    if begun is None:
        return "not started"
    text = _rounds_done(view)
    last = progress.last_round
    if progress.ended is None and state is not State.DIED and last is not None:
        left_s = (begun.num_rounds - progress.rounds.num_seen) * last.data.duration_s
        text += f", {last.data.duration_s:.1f} s each, about {duration(left_s)} left"
    if view.machine.profile is not None:
        text += f", {view.machine.profile.data.env_steps_per_s:.1f} env steps/s"
    return text


def _rounds_done(view: RunView) -> str:
    done, begun = view.progress.rounds.num_seen, view.progress.started
    return f"{done} rounds" if begun is None else f"{done} of {begun.num_rounds} rounds"


def _policy(view: RunView) -> Iterator[tuple[str, str]]:
    if view.policy.last is None:
        return
    data = view.policy.last.data
    yield (
        "policy",
        f"kl {_figure(data.joint.approx_kl, '.2g')} (target {data.target_kl:g}), "
        f"clipped {_figure(data.joint.clip_share, '.2f')}, value error {_figure(data.critic.value_nrmse, '.2f')}, "
        f"{view.policy.num_updates} updates",
    )
    heads = ", ".join(f"{head} {_figure(stats.entropy_share, '.2f')}" for head, stats in data.heads.items())
    yield "entropy", f"{heads} (share of the maximum)"


def _envs(view: RunView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", caption=STAGE_LEGEND, caption_justify="left")
    for name in ("env", "episode", "epoch", "acc. %", "loss", "params"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("slots", no_wrap=True)
    table.add_column("last action")  # the one column that may be narrowed: figures are never cut
    slot_ids = () if view.progress.started is None else view.progress.started.slot_ids
    for env in sorted(view.growth.envs)[:MAX_ENVS]:
        *cells, action = (clean(cell) for cell in _env_cells(view.growth.envs[env], slot_ids))
        table.add_row(str(env), *map(Text, cells), Text(action, no_wrap=True, overflow="ellipsis"))
    if len(view.growth.envs) > MAX_ENVS:
        table.add_row(f"+{len(view.growth.envs) - MAX_ENVS}")
    return table


def _env_cells(now: EnvNow, slot_ids: Sequence[str]) -> tuple[str, ...]:
    state, action = now.state, now.last_action
    marks = {slot_id: _STAGE_MARKS.get(slot.stage, "?") for slot_id, slot in state.slots.items()}
    return (
        _count(now.episode),
        _count(now.epoch),
        f"{state.val_accuracy_pct:.1f}",
        f"{state.val_loss:.3g}",
        f"{state.params_total:,}",
        "".join(marks.get(slot_id, "·") for slot_id in slot_ids or state.slots),
        "" if action is None else " ".join(filter(None, (action.op, action.slot_id, action.blueprint))),
    )


def _blueprints(view: RunView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("blueprint", no_wrap=True)
    for name in ("planted", "kept", "pruned", "mean contribution pp"):
        table.add_column(name, justify="right")
    for name, grown in sorted(view.growth.blueprints.items()):
        mean = grown.sum_contribution_pp / grown.num_measured if grown.num_measured else None
        counts = (grown.num_germinated, grown.num_fossilized, grown.num_pruned)
        table.add_row(clean(name), *map(str, counts), _figure(mean, ".2f"))
    return table


def _note(event: LoggedEvent) -> Text:
    where = "".join(
        f" {name} {value}" for name, value in (("round", event.round), ("env", event.env)) if value is not None
    )
    text = Text(f"{event.seq:>8} ", style="dim")
    text.append(clean(f"{event.type.value}{where}: {describe(event.data)}"), style=STYLES[event.severity])
    return text


def describe(data: object) -> str:
    """A payload in one line. Those that are met most have words of their own; of others, what is set is listed."""
    match data:
        case AnomalyDetected():
            return f"{data.state}: {data.metric} {data.value:.4g}, limit {data.limit:.4g}; {data.detail}"
        case GovernorStateChanged():
            back = "; the host was set back" if data.rolled_back else ""
            limit = "" if data.limit is None else f", limit {data.limit:.4g}"
            moved = f"{data.from_state} to {data.to_state}"
            return f"{moved}: {data.reason or 'recovered'}, validation loss {data.value:.4g}{limit}{back}"
        case RunEnded():  # its traceback is in the report
            error = "" if data.error_type is None else f": {data.error_type}: {data.error_message}"
            return f"{data.status} after {data.num_rounds_total} rounds{error}"
    fields = ((name, getattr(data, name)) for name in data.__dataclass_fields__)  # type: ignore[attr-defined]
    return ", ".join(f"{name} {_short(value)}" for name, value in fields if value not in (None, "", (), {}))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(getattr(value, "value", value))


def spark(values: Sequence[float]) -> str:
    """A curve in one line of characters; values that are not finite leave a gap."""
    step = -(-len(values) // SPARK_WIDTH) or 1
    shown = values[::-step][::-1]
    finite = [value for value in shown if abs(value) < float("inf")]
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    heights = ((value - low) / span if span else 0.0 for value in shown)
    return "".join(_BARS[min(int(h * len(_BARS)), len(_BARS) - 1)] if 0 <= h <= 1 else " " for h in heights)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def duration(seconds: float) -> str:
    """A time in words: seconds while they matter, then hours and minutes."""
    minutes = round(seconds) // 60
    return f"{round(seconds)} s" if minutes < 2 else f"{minutes // 60} h {minutes % 60} min"
