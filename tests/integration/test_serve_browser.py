"""The pages of `esper serve` in a real browser, while runs go on."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("starlette", reason="esper serve needs the extra `serve`")
pytest.importorskip("playwright.sync_api", reason="browser tests need playwright")

from playwright.sync_api import Browser, Page, expect, sync_playwright

from esper.leyline import Severity
from tests.karn.logs import (
    LogWriter,
    T,
    action_taken,
    coalition,
    epoch_completed,
    gate_evaluated,
    germinated,
    governor_changed,
    slot,
    started,
    write_round,
    write_run,
)
from tests.karn.serving import serving
from tests.karn.test_monitor import as_written

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync")
ROOT_FLAGS = ("--no-sandbox",) if os.geteuid() == 0 else ()
WAIT_MS = 30_000

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as tools:
        started_browser = tools.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, *ROOT_FLAGS])
        yield started_browser
        started_browser.close()


class Visitor:
    """A page whose every complaint is remembered."""

    def __init__(self, browser: Browser, *, width: int = 1200, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        self.context.set_default_timeout(WAIT_MS)
        self.complaints: list[str] = []
        self.page = self.open()

    def open(self) -> Page:
        page = self.context.new_page()
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        return page


def run_url(base: str, run: str, *rest: str) -> str:
    return f"{base}/#/run/{'/'.join(quote(part, safe='') for part in (run, *rest))}"


def test_curves_and_tables_move_while_a_run_goes_on(browser: Browser, tmp_path: Path) -> None:
    log = write_run(tmp_path / "live", rounds=3, finish=False)
    visitor = Visitor(browser)
    page = visitor.page
    with serving(tmp_path) as server:
        page.goto(server.url)
        expect(page.locator("#feed")).to_have_text("live", timeout=WAIT_MS)
        page.get_by_role("link", name="live").click()
        expect(page.locator("label")).to_contain_text("3 of 20 rounds", timeout=WAIT_MS)
        curve = page.locator("svg[data-chart=accuracy] path.line").first
        before = curve.get_attribute("d")
        page.evaluate("window.witness = 'the page was not loaded again'")
        write_round(log, 3)
        expect(page.locator("label")).to_contain_text("4 of 20 rounds", timeout=WAIT_MS)
        expect(curve).not_to_have_attribute("d", before or "", timeout=WAIT_MS)
        page.keyboard.press("2")
        page.get_by_role("link", name="host 1").click()
        expect(page.locator("h2").first).to_have_text("Host 1, episode 3", timeout=WAIT_MS)
        here = {"round": 4, "episode": 4, "env": 1, "epoch": 0}
        log.emit(T.EPOCH_COMPLETED, epoch_completed(val_accuracy_pct=12.5), **here)
        expect(page.locator("tr[data-key='1']")).to_contain_text("12.5", timeout=WAIT_MS)
        expect(page.locator("h2").first).to_have_text("Host 1, episode 4", timeout=WAIT_MS)
        assert page.evaluate("window.witness") == "the page was not loaded again"
        assert visitor.complaints == []
    expect(page.locator("#feed")).to_contain_text("does not answer", timeout=WAIT_MS)
    visitor.context.close()


EVIL = "<img src=x onerror=alert(1)>'\"&{{7*7}}\u202e</script><script>alert(2)</script>"


@pytest.mark.parametrize(("width", "scheme"), [(1200, "dark"), (400, "light")])
def test_names_in_logs_are_text_on_every_screen(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    folder = tmp_path / EVIL.replace("/", "|")
    log = LogWriter(folder, run=EVIL)
    log.group = EVIL
    log.emit(T.RUN_STARTED, started(task=EVIL, slot_ids=(EVIL,), controller=EVIL, epochs_per_episode=3))
    here = {"round": 0, "episode": 0, "env": 0, "epoch": 0}
    log.emit(T.SEED_GERMINATED, germinated(slot_id=EVIL, blueprint=EVIL, seed_id=EVIL), **here)
    state = slot(stage=EVIL, blueprint=EVIL, seed_id=EVIL)
    log.emit(T.EPOCH_COMPLETED, epoch_completed(slots={EVIL: state}), **here)
    log.emit(T.GATE_EVALUATED, gate_evaluated(slot_id=EVIL, seed_id=EVIL), **here)
    log.emit(T.ACTION_TAKEN, action_taken(op=EVIL, slot_id=EVIL, blueprint=EVIL, components={EVIL: 1.0}), **here)
    log.emit(T.COALITION_MEASURED, coalition(slot_ids=(EVIL, "r0c1")), **here)
    log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(reason=EVIL), Severity.CRITICAL, **here)
    write_round(log, 1)
    as_written(folder)
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    (evaluation / "results.csv").write_text("")
    arm = {"arm": EVIL, "num_runs": 1, "num_failed": 0, "figures": {}}
    verdict = {"letter": "A", "words": EVIL, "outcome": EVIL, "reasons": [EVIL]}
    facts = {"task": EVIL, "subject": EVIL, "metric": "accuracy", "num_seeds": 1}
    (evaluation / "summary.json").write_text(json.dumps({**facts, "arms": {EVIL: arm}, "verdicts": [verdict]}))
    visitor = Visitor(browser, width=width, scheme=scheme)
    page = visitor.page
    with serving(tmp_path) as server:
        page.goto(server.url)
        page.locator("tbody a.text").first.click()
        for number, name in enumerate(("overview", "hosts", "policy", "seeds", "events"), 1):
            page.keyboard.press(str(number))
            expect(page.locator("nav a[aria-current=page]")).to_contain_text(name)
            expect(page.locator("main")).not_to_contain_text("Reading", timeout=WAIT_MS)
            _check_harmless(page)
        page.keyboard.press("2")
        page.get_by_role("link", name="host 0").click()
        expect(page.locator("h2").first).to_contain_text("Host 0", timeout=WAIT_MS)
        _check_harmless(page)
        page.goto(f"{server.url}/#/compare/{quote(folder.name, safe='')}")
        expect(page.locator("main table")).to_have_count(1, timeout=WAIT_MS)  # those of the host before are gone
        expect(page.locator("main table")).to_contain_text("<img src=x", timeout=WAIT_MS)
        _check_harmless(page)
        page.goto(f"{server.url}/#/evaluation/evaluation")
        expect(page.locator("main h2").first).to_contain_text("<img src=x", timeout=WAIT_MS)
        _check_harmless(page)
        assert visitor.complaints == []
    visitor.context.close()


def _check_harmless(page: Page) -> None:
    """What the log holds became text: no element of its own, no attribute that acts, no text turned around."""
    assert page.locator("main img[src=x]").count() == 0
    assert page.locator("main script").count() == 0
    attributes = page.evaluate("[...document.querySelectorAll('main *')].flatMap((e) => e.getAttributeNames())")
    assert not [name for name in attributes if name.startswith("on") or name == "style"]
    assert "\u202e" not in page.inner_text("body")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1"), "the page is wider than its window"


def test_everything_can_be_reached_with_keys(browser: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "mine", rounds=5)
    visitor = Visitor(browser)
    page = visitor.page
    with serving(tmp_path) as server:
        page.goto(server.url)
        expect(page.locator("tbody tr")).to_have_count(1, timeout=WAIT_MS)
        page.keyboard.press("/")
        page.keyboard.type("no such run")
        expect(page.locator("main")).to_contain_text("No run fits the filter.")
        page.keyboard.press("Control+A")
        page.keyboard.press("Delete")
        page.locator("tbody input").focus()
        page.keyboard.press("Space")
        page.get_by_role("button", name=re.compile("compare 1")).focus()
        page.keyboard.press("Enter")
        expect(page.locator("#where")).to_contain_text("comparison")
        page.keyboard.press("Escape")
        page.locator("tbody a").focus()
        page.keyboard.press("Enter")
        chart = page.locator("svg[data-chart=accuracy]")
        chart.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        expect(page.locator("figure[data-key=accuracy] .note")).to_contain_text("round 1: mean of hosts 73.000 %")
        page.keyboard.press("5")
        expect(page.locator("main table.events")).to_be_visible()
        page.keyboard.press("/")
        page.keyboard.type("SEED_FOSSILIZED")
        expect(page.locator("main table.events tbody tr")).to_have_count(10)
        page.keyboard.press("Tab")
        page.locator("#theme").focus()
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background
        assert visitor.complaints == []
    visitor.context.close()


@pytest.mark.slow
def test_many_tabs_share_one_stream(browser: Browser, tmp_path: Path) -> None:
    log = write_run(tmp_path / "live", rounds=2, finish=False)
    visitor = Visitor(browser, width=700)
    with serving(tmp_path) as server:
        pages = [visitor.page, *(visitor.open() for _ in range(8))]  # a browser allows six connections to a server
        for page in pages:
            page.goto(run_url(server.url, "live"))
        for page in pages:
            expect(page.locator("label")).to_contain_text("2 of 20 rounds", timeout=WAIT_MS)
        write_round(log, 2)
        for page in pages:
            expect(page.locator("label")).to_contain_text("3 of 20 rounds", timeout=WAIT_MS)
        assert server.num_streams() == 1
        assert visitor.complaints == []
    visitor.context.close()
