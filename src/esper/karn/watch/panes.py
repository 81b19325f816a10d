"""The screens of a watched run, each a pane that draws a monitor. They judge nothing and read no files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.message import Message
from textual.widgets import DataTable, Input, Static

from esper.karn.console import STAGE_LEGEND, blueprint_table, event_line, render_figures, render_verdict
from esper.karn.diagnosis import Diagnosis
from esper.karn.monitor import RunMonitor
from esper.karn.watch.drawing import host_cells, policy_page, round_plots, seed_timeline
from esper.leyline import LoggedEvent

NUM_WARNINGS = 3
"""Newest warnings on the first screen."""
TALL = 30
"""Rows from which the first screen has all its curves."""


class Pane(VerticalScroll):
    """One screen. `draw` is called when it is shown, and whenever something changed while it is."""

    def draw(self, monitor: RunMonitor, found: Sequence[Diagnosis]) -> None:
        raise NotImplementedError


class Overview(Pane):
    """Verdict, curves, figures and the newest warnings."""

    def compose(self) -> ComposeResult:
        yield Static(id="overview-verdict")
        yield Static(id="overview-curves")
        yield Static(id="overview-figures")

    def draw(self, monitor: RunMonitor, found: Sequence[Diagnosis]) -> None:
        reading = monitor.reading()
        verdict = render_verdict(found) if reading is None else Text(f"{reading}. The verdict comes at its end.")
        self.query_one("#overview-verdict", Static).update(verdict)
        rounds = [data for _, data in monitor.history.rounds]
        curves = round_plots(rounds, self.size.width - 2, all_of_them=self.size.height > TALL)
        self.query_one("#overview-curves", Static).update(curves)
        figures: list[RenderableType] = [render_figures(monitor.view, found[0].state, sparks=False)]
        if warnings := list(monitor.view.warnings)[-NUM_WARNINGS:]:
            figures += [
                Text("Newest warnings, all on screen 5; what to act on is said above", "bold"),
                *map(event_line, warnings),
            ]
        self.query_one("#overview-figures", Static).update(Group(*figures))


class Hosts(Pane):
    """One row per host. Enter shows one of them."""

    class Chosen(Message):
        """A person wants to see one host."""

        def __init__(self, env: int) -> None:
            super().__init__()
            self.env = env

    def compose(self) -> ComposeResult:
        table: DataTable[Text] = DataTable(cursor_type="row")
        for name in ("host", "episode", "epoch", "acc. %", "loss", "params", "slots", "last action"):
            table.add_column(name)
        yield table
        yield Static(Text(f"{STAGE_LEGEND}. Enter shows one host", "dim"))

    def draw(self, monitor: RunMonitor, found: Sequence[Diagnosis]) -> None:
        table = self.query_one(DataTable)
        update_table(table, {str(env): host_cells(monitor, env) for env in sorted(monitor.view.epochs)})

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        if event.row_key.value is not None:
            self.post_message(self.Chosen(int(event.row_key.value)))


def update_table(table: DataTable[Text], rows: dict[str, tuple[Text, ...]]) -> None:
    """Gives a table these rows; one whose rows stay the same keeps its cursor and its place."""
    if [key.value for key in table.rows] != list(rows):
        table.clear()
        for key, cells in rows.items():
            table.add_row(*cells, key=key)
        return
    for row, cells in enumerate(rows.values()):
        for column, cell in enumerate(cells):
            at = Coordinate(row, column)
            if table.get_cell_at(at) != cell:
                table.update_cell_at(at, cell, update_width=True)


class Policy(Pane):
    """The learner."""

    def compose(self) -> ComposeResult:
        yield Static(id="policy-page")

    def draw(self, monitor: RunMonitor, found: Sequence[Diagnosis]) -> None:
        self.query_one("#policy-page", Static).update(policy_page(monitor, self.size.width - 2))


class Seeds(Pane):
    """What became of each blueprint, and the life of every seed of the newest episodes, by host and slot."""

    def compose(self) -> ComposeResult:
        yield Static(id="seeds-page")

    def draw(self, monitor: RunMonitor, found: Sequence[Diagnosis]) -> None:
        page = self.query_one("#seeds-page", Static)
        started, seeds = monitor.view.started, monitor.history.seeds
        if started is None or not seeds:
            page.update(Text("No seed was planted yet."))
            return
        timeline = seed_timeline(seeds, started.epochs_per_episode, self.size.width - 2)
        page.update(Group(blueprint_table(monitor.view), Text(""), timeline))


class Events(Vertical):
    """The newest events. Those about single steps are kept apart, so they cannot push the others out."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings_only = False
        self.steps = False

    def compose(self) -> ComposeResult:
        yield Input(placeholder="/ filters by text, such as GOVERNOR or env 3; Enter leaves the field")
        with VerticalScroll():
            yield Static(id="events-list")

    def draw(self, monitor: RunMonitor, found: Sequence[Diagnosis]) -> None:
        wanted = self.query_one(Input).value.lower().strip()
        lines = [event_line(event) for event in self._events(monitor)]
        shown = [line for line in lines if wanted in line.plain.lower()]
        for line in shown:
            line.no_wrap, line.overflow = True, "ellipsis"
        what = "warnings" if self.warnings_only else "events about single steps" if self.steps else "events"
        head = Text(f"The {len(shown)} newest {what}, newest first (w: warnings only, s: single steps)", "bold")
        self.query_one("#events-list", Static).update(Group(head, *reversed(shown)))

    def _events(self, monitor: RunMonitor) -> Iterable[LoggedEvent]:
        if self.warnings_only:
            return monitor.history.warnings
        return monitor.step_events if self.steps else monitor.events
