"""A RunView and its diagnosis as text for a terminal. Judges nothing and reads no files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from esper.karn.diagnosis import Diagnosis, RunCondition
from esper.karn.view import ATTENTION, RunView
from esper.leyline import (
    HEAD_NAMES,
    ActionTaken,
    AnomalyDetected,
    ChoiceCount,
    GovernorStateChanged,
    LoggedEvent,
    PhaseTime,
    RunEnded,
    Severity,
)

MAX_ENVS = 16
SPARK_WIDTH = 24
_BARS = "▁▂▃▄▅▆▇█"
STYLES = {
    Severity.DEBUG: "dim",
    Severity.INFO: "green",
    Severity.WARNING: "yellow",
    Severity.ERROR: "red",
    Severity.CRITICAL: "bold red",
}
STAGE_MARKS = {"GERMINATED": "g", "TRAINING": "t", "BLENDING": "b", "HOLDING": "h", "FOSSILIZED": "F", "PRUNED": "x"}
STAGE_LEGEND = "slots: g germinated, t training, b blending, h holding, F fossilized, · no seed"


def clean(text: str) -> str:
    """The text without control characters: a log may hold anything, a terminal obeys some of it."""
    return "".join(char if char.isprintable() else " " for char in text)


def clean_lines(text: str) -> str:
    """The same of a text of several lines, which it keeps."""
    return "\n".join(map(clean, text.split("\n")))


def render_status(view: RunView, found: Sequence[Diagnosis]) -> RenderableType:
    """The whole screen: which run, its verdict, how far it is, and the details."""
    parts = [_title(view), render_verdict(found), render_figures(view, found[0].state)]
    if view.epochs:
        parts.append(_envs(view))
    if view.blueprints:
        parts.append(blueprint_table(view))
    if view.warnings:
        parts.append(
            Group(Text("Newest warnings; what to act on is said above", style="bold"), *map(event_line, view.warnings))
        )
    return Group(parts[0], *(piece for part in parts[1:] for piece in (Text(""), part)))


def render_line(view: RunView, verdict: Diagnosis) -> str:
    """One line for a pipe: how far the run is and its verdict."""
    last = view.last_round
    accuracy = "" if last is None else f"  accuracy {last.data.accuracy_mean_pct:.1f} %"
    return clean(f"{_rounds_done(view)}{accuracy}  {verdict.headline}")


def render_verdict(found: Sequence[Diagnosis]) -> RenderableType:
    """What is the case, why, what to do, and what else was found."""
    return _grid(_verdict(found))


def render_figures(view: RunView, state: RunCondition, *, sparks: bool = True) -> RenderableType:
    """How far the run is, and its newest figures; `sparks` adds curves of characters to some."""
    return _grid(figures_of(view, state, sparks=sparks))


def _title(view: RunView) -> RenderableType:
    title = Text(clean(view.run or "a run without events"), style="bold")
    begun = view.started
    if begun is not None:
        facts = f"  {begun.task}, {begun.controller}, seed {begun.run_seed}, group {view.group}"
        title.append(clean(facts), style="not bold")
    if view.attempt:
        title.append(f"  attempt {view.attempt}", style="yellow")
    return title


def _grid(rows: Iterable[tuple[str, str | Text]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column()
    for name, cell in rows:
        table.add_row(name, Text(clean(cell)) if isinstance(cell, str) else cell)
    return table


def _verdict(found: Sequence[Diagnosis]) -> Iterator[tuple[str, str | Text]]:
    verdict, *others = found
    yield "now", Text(clean(verdict.headline), style=STYLES[verdict.severity])
    yield "why", verdict.why
    yield "next", verdict.next
    for other in others:
        if other.severity is not Severity.INFO:
            text = Text(clean(other.headline), style=STYLES[other.severity])
            yield "also", text.append(clean(f"  [{other.why}]"), style="dim")


def figures_of(view: RunView, state: RunCondition, *, sparks: bool = True) -> Iterator[tuple[str, str]]:
    """Names and texts of the newest figures; `sparks` adds curves of characters to some."""
    yield "progress", _progress(view, state)
    if view.last_round is not None:
        data = view.last_round.data
        accuracy = f"{data.accuracy_mean_pct:.1f} % ({data.accuracy_worst_pct:.1f} to {data.accuracy_best_pct:.1f})"
        committed = f"committed {figure(data.committed_accuracy_pct, '.1f')} %"
        curves = (f"  {spark(view.accuracies_pct)}", f"  {spark(view.returns)}") if sparks else ("", "")
        yield "accuracy", f"{accuracy}, {committed}{curves[0]}"
        yield "return", f"{data.return_mean:.3g} ± {data.return_std:.2g}{curves[1]}"
        yield "parameters", f"{data.params_ratio_mean:.2f} times the host's own"
    if view.last_update is not None:
        update = view.last_update.data.metrics
        kl = f"kl {figure(update['approx_kl'], '.2g')} (target {update['target_kl']:g})"
        clipped, error = figure(update["clip_fraction"], ".2f"), figure(update["value_nrmse"], ".2f")
        yield "policy", f"{kl}, clipped {clipped}, value error {error}, {view.num_updates} updates"
        heads = ", ".join(f"{head} {figure(update['head_entropies'][head], '.2f')}" for head in HEAD_NAMES)
        yield "entropy", f"{heads} (share of the maximum)"
    yield "safety", f"{view.num_rollbacks} rollbacks, {len(view.alarms)} open alarms"
    saved = view.saved
    yield "checkpoint", "none" if saved is None else f"{saved.data.path}, {figure(saved.data.round)} rounds"
    passed = f", {view.num_passed_over:,} of a long past counted and not read" if view.num_passed_over else ""
    yield "log", f"{view.num_events:,} events, {view.num_missing} lost, {view.num_bad} damaged lines{passed}"


def _progress(view: RunView, state: RunCondition) -> str:
    if view.started is None:
        return "not started"
    text = _rounds_done(view)
    if view.ended is None and state is not RunCondition.DIED and view.last_round is not None:
        round_s = view.last_round.data.duration_s
        left_s = (view.started.num_rounds - len(view.returns)) * round_s
        text += f", {round_s:.1f} s each, about {duration(left_s)} left"
    if view.profile is not None:
        text += f", {view.profile.data.env_steps_per_s:.1f} env steps/s"
    return text


def _rounds_done(view: RunView) -> str:
    done = len(view.returns)
    return f"{done} rounds" if view.started is None else f"{done} of {view.started.num_rounds} rounds"


def _envs(view: RunView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", caption=STAGE_LEGEND, caption_justify="left")
    for name in ("env", "episode", "epoch", "acc. %", "loss", "params"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("slots", no_wrap=True)
    table.add_column("last action")  # the one column that may be narrowed: figures are never cut
    for env in sorted(view.epochs)[:MAX_ENVS]:
        *cells, action = env_cells(view, env)
        table.add_row(*map(Text, cells), Text(action, no_wrap=True, overflow="ellipsis"))
    if len(view.epochs) > MAX_ENVS:
        table.add_row(f"+{len(view.epochs) - MAX_ENVS}")
    return table


def env_cells(view: RunView, env: int) -> tuple[str, ...]:
    """The row of one host: env, episode, epoch, accuracy, loss, parameters, slots and what was done last."""
    now, action = view.epochs[env], view.actions.get(env)
    state = now.data
    marks = {slot_id: STAGE_MARKS.get(slot.stage, "?") for slot_id, slot in state.slots.items()}
    slot_ids = view.started.slot_ids if view.started is not None else ()
    return (
        str(env),
        figure(now.event.episode),
        figure(now.event.epoch),
        f"{state.val_accuracy_pct:.1f}",
        f"{state.val_loss:.3g}",
        f"{state.params_total:,}",
        clean("".join(marks.get(slot_id, "·") for slot_id in slot_ids or state.slots)),
        "" if action is None else clean(action_words(action)),
    )


def action_words(action: ActionTaken) -> str:
    """What was done, where, and with what."""
    return " ".join(filter(None, (action.op, action.slot_id, action.blueprint)))


def blueprint_table(view: RunView) -> Table:
    """What became of the seeds of each blueprint."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("blueprint", no_wrap=True)
    for name in ("planted", "kept", "pruned", "mean contribution pp"):
        table.add_column(name, justify="right")
    for name, grown in sorted(view.blueprints.items()):
        counts = (grown.num_germinated, grown.num_fossilized, grown.num_pruned)
        table.add_row(Text(clean(name)), *map(str, counts), figure(grown.mean_contribution_pp, ".2f"))
    return table


def event_line(event: LoggedEvent) -> Text:
    """One event in one line of any length: its number, type, place and content."""
    ids = (("round", event.round), ("env", event.env), ("epoch", event.epoch))
    where = "".join(f" {name} {value}" for name, value in ids if value is not None)
    text = Text(f"{event.seq:>8} ", style="dim")
    style = STYLES[event.severity] if event.severity in ATTENTION else ""
    text.append(clean(event.type.value), style or "bold")
    return text.append(clean(f"{where}: {describe_payload(event.data)}"), style)


def describe_payload(data: object) -> str:
    """A payload in one line: worded for the most frequent types, a list of its fields for the others."""
    match data:
        case AnomalyDetected():
            return f"{data.state}: {data.metric} {data.value:.4g}, limit {data.limit:.4g}; {data.detail}"
        case GovernorStateChanged():
            back = "; the host was rolled back" if data.rolled_back else ""
            limit = "" if data.limit is None else f", limit {data.limit:.4g}"
            moved = f"{data.from_state} to {data.to_state}"
            return f"{moved}: {data.reason or 'recovered'}, validation loss {data.value:.4g}{limit}{back}"
        case RunEnded():  # its traceback is in the report
            error = "" if data.error_type is None else f": {data.error_type}: {data.error_message}"
            return f"{data.status} after {data.num_rounds_total} rounds{error}"
    fields = ((name, getattr(data, name)) for name in data.__dataclass_fields__)  # type: ignore[attr-defined]
    return ", ".join(f"{name} {_short(value)}" for name, value in fields if value not in (None, "", (), {}))


def _short(value: object) -> str:
    match value:
        case float():
            return f"{value:.4g}"
        case dict():
            return " ".join(f"{name} {_short(part)}" for name, part in value.items())
        case PhaseTime():
            return f"{value.wall_ms:.4g} ms"
        case ChoiceCount():
            return str(value.num_chosen)
    return str(getattr(value, "value", value))


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


def figure(value: float | None, form: str = "", unit: str = "", missing: str = "-") -> str:
    """A number with its unit; what was not measured is never 0."""
    return missing if value is None else format(value, form) + unit


def duration(seconds: float) -> str:
    """A time in words: seconds while they matter, then minutes, then hours too."""
    hours, minutes = divmod(round(seconds) // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{round(seconds)} s" if minutes < 2 else f"{minutes} min"
