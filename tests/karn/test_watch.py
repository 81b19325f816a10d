"""`esper watch` in a terminal of 80 columns and 24 rows, driven by its keys."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("textual", reason="esper watch needs the extra `watch`")

from textual.pilot import Pilot

from esper.karn.watch.app import WatchApp
from esper.leyline import Severity
from tests.karn.logs import (
    LogWriter,
    T,
    action_taken,
    anomaly,
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

Visit = Callable[[WatchApp, "Pilot[None]"], Awaitable[None]]
SIZE = (80, 24)
CHARACTER_WIDTH = 12.2
"""Of a screenshot."""


def shown(app: WatchApp) -> str:
    """The screen as text."""
    rows: dict[float, str] = {}
    placed = re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', app.export_screenshot())
    for x, y, text in sorted(placed, key=lambda one: (float(one[1]), float(one[0]))):
        row = rows.get(float(y), "").ljust(round(float(x) / CHARACTER_WIDTH))
        rows[float(y)] = row + unescape(text).replace("\xa0", " ")
    return "\n".join(row for _, row in sorted(rows.items()))


def visit(run: Path, what: Visit, size: tuple[int, int] = SIZE) -> WatchApp:
    """Opens the screen on a run, does something there, and closes it."""
    app = WatchApp(run)

    async def drive() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await what(app, pilot)

    asyncio.run(drive())
    return app


async def see(app: WatchApp, pilot: Pilot[None], *keys: str) -> str:
    """The screen after some keys."""
    await pilot.press(*keys)
    app.follow()
    app.draw()
    await pilot.pause()
    return shown(app)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = write_run(tmp_path, rounds=6, finish=False)
    here = {"round": 6, "episode": 6, "env": 0}
    log.emit(T.SEED_GERMINATED, germinated(seed_id="0.6.r0c0.0"), epoch=0, **here)
    log.emit(T.EPOCH_COMPLETED, epoch_completed(slots={"r0c0": slot(seed_id="0.6.r0c0.0")}), epoch=0, **here)
    log.emit(T.GATE_EVALUATED, gate_evaluated(seed_id="0.6.r0c0.0"), epoch=0, **here)
    log.emit(T.COALITION_MEASURED, coalition(), epoch=0, **here)
    log.emit(T.ACTION_TAKEN, action_taken(), epoch=0, **here)
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=6)
    return tmp_path


def test_every_screen_shows_its_part_of_the_run(run: Path) -> None:
    async def look(app: WatchApp, pilot: Pilot[None]) -> None:
        overview = await see(app, pilot, "1")
        assert "6 of 20 rounds" in overview
        assert "77.0 %" in overview  # the accuracy of the last round
        assert re.search("[\u2801-\u28ff]", overview), "no curve"
        assert "also" in overview  # the verdict is that the writer is gone; the alarm comes after it
        hosts = await see(app, pilot, "2")
        assert re.search(r"0 +6 +0 +80.0 +0.6 +1,200 +t· +GERMINATE r0c0 mlp.lora", hosts), hosts
        assert re.search(r"1 +5 +2 +78.0", hosts), hosts
        policy = await see(app, pilot, "3")
        assert re.search(r"op +0.70 +0.01 +0.10 +0.5 +40 +ok", policy), policy
        assert "WAIT 67 %, GERMINATE 33 %" in policy
        seeds = await see(app, pilot, "4")
        assert re.search(r"mlp.lora +13 +12 +0 +1.25", seeds), seeds
        assert re.search(r"host 0 r0c0 +(ttF│)+g··│", seeds), seeds
        events = await see(app, pilot, "5")
        assert "ANOMALY_DETECTED round 6: entered: clip_fraction 0.4, limit 0.3" in events
        assert "EPOCH_COMPLETED" not in events
        assert "EPOCH_COMPLETED" in await see(app, pilot, "s")

    visit(run, look)


def test_one_host_is_shown_with_its_seeds_decisions_and_coalitions(run: Path) -> None:
    async def look(app: WatchApp, pilot: Pilot[None]) -> None:
        await see(app, pilot, "2")
        host = await see(app, pilot, "enter")
        assert "Host 0, episode 6, epoch 0: 80.0 %, loss 0.6, 1,200 parameters" in host
        assert re.search(r"r0c0 +t training +mlp.lora +0.25 +200 +\+0.50", host), host
        assert "r0c0 waits for epochs 1 (limit 2), gradient - (limit 0.1)" in host
        assert re.search(r"0 +GERMINATE r0c0 mlp.lora +0.50 +\+0.500", host), host
        assert re.search(r"none +78.0 +0.7", host), host
        assert "Host 1, episode 5" in await see(app, pilot, "n")
        assert "host  episode" in await see(app, pilot, "escape")

    visit(run, look, (80, 34))


def test_the_screen_follows_the_run_without_being_asked(run: Path) -> None:
    async def look(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "6 of 20 rounds" in shown(app)
        log = LogWriter(run, first_seq=0)
        log.seq = 1000
        write_round(log, 6)
        for _ in range(40):
            await pilot.pause(0.1)
            if "7 of 20 rounds" in shown(app):
                return
        raise AssertionError(shown(app))

    visit(run, look)


def test_events_are_filtered_by_words_and_severity(run: Path) -> None:
    async def look(app: WatchApp, pilot: Pilot[None]) -> None:
        await see(app, pilot, "slash")
        found = await see(app, pilot, *"round", "space", *"5", "space", *"env")
        assert "The 8 newest events" in found  # of two hosts: planted, moved, kept, episode over
        assert "SEED_FOSSILIZED round 5 env 1" in found
        assert "PPO_UPDATE_COMPLETED" not in found
        await see(app, pilot, *["backspace"] * 11, "enter")
        warnings = await see(app, pilot, "w")
        assert "The 1 newest warnings" in warnings

    visit(run, look)


def test_names_in_a_log_are_text_and_nothing_else(tmp_path: Path) -> None:
    evil = "[red]x[/red] \x1b[2J\u202e[/]"
    log = LogWriter(tmp_path, run=evil)
    log.group = evil
    log.emit(T.RUN_STARTED, started(task=evil, slot_ids=(evil,)))
    here = {"round": 0, "episode": 0, "env": 0, "epoch": 0}
    log.emit(T.SEED_GERMINATED, germinated(slot_id=evil, blueprint=evil, seed_id=evil), **here)
    log.emit(T.EPOCH_COMPLETED, epoch_completed(slots={evil: slot(stage=evil, blueprint=evil)}), **here)
    log.emit(T.ACTION_TAKEN, action_taken(op=evil, slot_id=evil, blueprint=evil), **here)
    log.emit(T.COALITION_MEASURED, coalition(slot_ids=(evil, "r0c1")), **here)
    log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(reason=evil), Severity.CRITICAL, **here)

    async def look(app: WatchApp, pilot: Pilot[None]) -> None:
        screens = [await see(app, pilot, key) for key in ("1", "2", "3", "4", "5", "s", "2", "enter")]
        assert all("\x1b" not in screen and "\u202e" not in screen for screen in screens)
        assert "[red]x[/red]" in screens[0]

    visit(tmp_path, look)


@pytest.mark.parametrize("size", [(40, 10), (200, 60)])
def test_an_empty_run_and_any_window_can_be_looked_at(tmp_path: Path, size: tuple[int, int]) -> None:
    (tmp_path / "events").mkdir()

    async def look(app: WatchApp, pilot: Pilot[None]) -> None:
        for key in ("2", "enter", "3", "4", "5", "question_mark", "escape", "t"):
            await see(app, pilot, key)
        write_run(tmp_path, rounds=2)
        assert "completed after 2 rounds" in await see(app, pilot, "1")

    visit(tmp_path, look, size)


def test_a_log_that_cannot_be_read_ends_the_screen_with_a_message(run: Path) -> None:
    async def look(app: WatchApp, pilot: Pilot[None]) -> None:
        (run / "events.jsonl").touch()  # the mark of an older format
        app.follow()
        await pilot.pause()

    app = visit(run, look)
    assert app.return_code == 2
