"""The terminal screen of a run: tabs over one monitor, redrawn when something changed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Input, Static, TabbedContent, TabPane

from esper.karn.console import STAGE_LEGEND, STYLES, clean
from esper.karn.diagnosis import Diagnosis
from esper.karn.monitor import RunMonitor
from esper.karn.watch.drawing import host_page
from esper.karn.watch.panes import Events, Hosts, Overview, Pane, Policy, Seeds
from esper.leyline import THRESHOLDS

FOLLOW_S = 0.25
"""Between two looks at the log."""
DRAW_S = 0.5
"""Between two drawings while events come in."""
CLOCK_S = 2.0
"""Between two drawings while nothing does: times and the process still change."""
TABS = ("overview", "hosts", "policy", "seeds", "events")


class HostScreen(Screen[None]):
    """One host, redrawn as it trains."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Back"),
        Binding("p", "step(-1)", "Previous host"),
        Binding("n", "step(1)", "Next host"),
    ]

    def __init__(self, env: int) -> None:
        super().__init__()
        self.env = env

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="host-page")
        yield Footer()

    def draw(self, monitor: RunMonitor) -> None:
        self.query_one("#host-page", Static).update(host_page(monitor, self.env, self.size.width - 4))

    def action_step(self, by: int) -> None:
        app = self.app
        assert isinstance(app, WatchApp)
        envs = sorted(app.monitor.view.epochs)
        if envs:
            self.env = envs[(envs.index(self.env) + by) % len(envs) if self.env in envs else 0]
            self.draw(app.monitor)


class HelpScreen(ModalScreen[None]):
    """Keys, words and limits."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss", "Back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(Group(Text(HELP), _thresholds()))
        yield Footer()


HELP = f"""\
1 to 5   overview, hosts, policy, seeds, events
Enter    one host, on the screen hosts; n and p the others, Esc back
/        filter events by text; Enter leaves the field
w, s     events: warnings only, those about single steps
t        light or dark
q        quit; the run goes on

round    one episode in every host, then one update of the policy
return   what the policy was paid in an episode
kept     the network that would be delivered: host and fossils
brings   points of accuracy lost when a seed alone is switched off
{STAGE_LEGEND.replace(": ", "    ").replace(", h", "," + chr(10) + "         h")}

Everything is read from the run's log. Limits of the alarms:
"""


def _thresholds() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("metric", no_wrap=True)
    for name in ("warning", "critical"):
        table.add_column(name, justify="right")
    table.add_column("means")
    for row in THRESHOLDS.values():
        sign = "<" if row.direction == "below" else ">" if row.direction == "above" else "≥"
        limits = ("-" if limit is None else f"{sign} {limit:g}" for limit in (row.warn, row.critical))
        table.add_row(row.metric, *limits, row.reason)
    return table


class WatchApp(App[None]):
    """Shows one run until a person has seen enough.

    Args:
        run_dir: The run directory.
    """

    CSS = """
    #title { height: 1; padding: 0 1; background: $panel; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0 1; }
    Events Input { height: 3; }
    #help { margin: 1 2; padding: 1 2; background: $panel; border: round $primary; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"tab('{name}')", name.capitalize(), show=False) for number, name in enumerate(TABS, 1)),
        Binding("slash", "filter", "Filter", show=False),
        Binding("w", "warnings", "Warnings", show=False),
        Binding("s", "steps", "Steps", show=False),
        Binding("t", "theme", "Light/dark"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.monitor = RunMonitor(run_dir)
        self._found: tuple[Diagnosis, ...] = self.monitor.diagnose()
        self._drawn_at = 0.0
        self._stale = True

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        with TabbedContent(initial=TABS[0]):
            for number, (name, pane) in enumerate(zip(TABS, (Overview, Hosts, Policy, Seeds, Events), strict=True), 1):
                with TabPane(f"{number} {name}", id=name):
                    yield pane()
        yield Footer()

    def on_mount(self) -> None:
        self.title = "esper watch"
        self.follow()
        self.set_interval(FOLLOW_S, self.follow)

    def follow(self) -> None:
        """Reads on and draws if that is due. A log that cannot be read any more ends the screen, not the run."""
        try:
            news = self.monitor.poll()
        except (OSError, ValueError) as error:
            self.exit(return_code=2, message=f"esper: error: {clean(str(error))}")
            return
        if self.monitor.behind:
            self.call_later(self.follow)
        self._stale |= news
        since = time.monotonic() - self._drawn_at
        if (self._stale and since >= DRAW_S) or since >= CLOCK_S:
            self.draw()

    def draw(self) -> None:
        """Draws what is on the screen now."""
        self._stale, self._drawn_at = False, time.monotonic()
        self._found = self.monitor.diagnose()
        self.query_one("#title", Static).update(self._title_line())
        if isinstance(self.screen, HostScreen):
            self.screen.draw(self.monitor)
        elif len(self.screen_stack) == 1:
            self._pane().draw(self.monitor, self._found)

    def _pane(self) -> Pane | Events:
        name = self.query_one(TabbedContent).active or TABS[0]
        pane = self.query_one(f"#{name}", TabPane).children[0]
        assert isinstance(pane, Pane | Events)
        return pane

    def _title_line(self) -> Text:
        view, verdict = self.monitor.view, self._found[0]
        text = Text(clean(view.run or self.monitor.run_dir.name), "bold", no_wrap=True, overflow="ellipsis")
        if view.started is not None:
            text.append(clean(f"  {view.started.task}"), "not bold")
            text.append(f"  round {len(view.returns)}/{view.started.num_rounds}", "not bold")
        if (reading := self.monitor.reading()) is not None:
            return text.append(f"  {reading}", "not bold yellow")
        return text.append(clean(f"  {verdict.headline}"), f"not bold {STYLES[verdict.severity]}")

    def on_tabbed_content_tab_activated(self) -> None:
        self.draw()

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def on_screen_resume(self) -> None:
        self.draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.draw()

    def on_input_submitted(self) -> None:
        self.set_focus(None)

    def on_hosts_chosen(self, message: Hosts.Chosen) -> None:
        self.push_screen(HostScreen(message.env))
        self.call_after_refresh(self.draw)

    def action_tab(self, name: str) -> None:
        tabs = self.query_one(TabbedContent)
        tabs.active = name
        pane = self._pane()
        focus = pane.query("DataTable").first() if isinstance(pane, Hosts) else pane
        self.set_focus(focus)

    def action_filter(self) -> None:
        self.action_tab("events")
        self.query_one(Input).focus()

    def action_warnings(self) -> None:
        events = self.query_one(Events)
        events.warnings_only, events.steps = not events.warnings_only, False
        self.draw()

    def action_steps(self) -> None:
        events = self.query_one(Events)
        events.steps, events.warnings_only = not events.steps, False
        self.draw()

    def action_theme(self) -> None:
        self.theme = "textual-light" if self.theme != "textual-light" else "textual-dark"

    def action_help(self) -> None:
        self.push_screen(HelpScreen())
