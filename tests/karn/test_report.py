"""The report: complete, self-contained, safe against what a log may hold, and shown by a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="reports need the extra `runs`")
pytest.importorskip("jinja2", reason="reports need the extra `runs`")

from esper.karn.charts import BLUE, GREEN, VERMILION
from esper.karn.report import make_report
from esper.leyline import Severity
from tests.karn.logs import (
    RUN_ID,
    WALL,
    LogWriter,
    T,
    anomaly,
    checkpoint,
    ended,
    germinated,
    governor_changed,
    started,
    write_round,
    write_run,
)

SECTIONS = ("verdict", "outcome", "curves", "parameters", "seeds", "policy", "safety", "integrity", "provenance")


class Page(HTMLParser):
    """What a report consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.sources: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attrs)
        self.sources += [given[name] or "" for name in ("src", "href", "srcset", "action") if name in given]
        if tag == "section":
            self.sections.append(given["id"] or "")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = write_run(tmp_path, rounds=8, finish=False)
    where = {"round": 7, "episode": 7, "env": 1, "epoch": 2}
    log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(), Severity.CRITICAL, **where)
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=7)
    log.emit(T.RUN_ENDED, ended(num_rounds_total=8))
    return tmp_path


def test_a_report_has_all_its_parts_and_well_formed_markup(run: Path) -> None:
    page = Page(make_report(run, WALL))
    assert tuple(page.sections) == SECTIONS
    assert page.open == []
    assert len(page.sources) == 4  # the four charts
    text = " ".join(page.words)
    for words in (RUN_ID, "completed after 8 rounds", "91.50 %", "mlp.lora", "divergence", "clip_share", "c0ffee"):
        assert words in text, words
    assert "manifest.json is missing" in text  # the writer of these tests makes none: the record is not whole
    assert "The record is NOT whole." in text


def test_a_report_needs_nothing_but_itself(run: Path) -> None:
    text = make_report(run, WALL)
    page = Page(text)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "form"}
    assert re.search(r"@import|url\(", text) is None


def test_the_same_log_gives_the_same_report(run: Path) -> None:
    assert make_report(run, WALL) == make_report(run, WALL)


def test_what_a_log_holds_cannot_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    log = LogWriter(tmp_path, run=evil)
    log.emit(T.RUN_STARTED, started(task=evil, argv=(evil,), split_sizes={evil: 1}))
    log.emit(T.SEED_GERMINATED, germinated(blueprint=evil, slot_id=evil), round=0, episode=0, env=0, epoch=0)
    log.emit(T.CHECKPOINT_RECORDED, checkpoint(action="save_failed", error=evil), Severity.ERROR)
    log.emit(T.RUN_ENDED, ended(status="failed", error_type=evil, error_message=evil))
    log.write(b'{"v":1,"run":"<script>alert(2)</script>"}\n')
    text = make_report(tmp_path, WALL)
    assert "<script" not in text
    assert "script" not in Page(text).tags
    assert text.count("&lt;script&gt;alert(1)") >= 6


@pytest.mark.parametrize("num_events", [0, 1])
def test_a_run_that_hardly_began_has_a_report_that_says_what_is_missing(num_events: int, tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.write(b"")
    if num_events:
        log.emit(T.RUN_STARTED, started())
    page = Page(make_report(tmp_path, WALL))
    assert page.sources == []
    text = " ".join(page.words)
    for words in ("No round was completed", "No seed was planted", "No policy was trained", "No warning was logged"):
        assert words in text


def test_resumes_are_part_of_the_provenance(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    write_round(log, 0)
    log.rotate()
    again = LogWriter(tmp_path, attempt=1, first_seq=log.seq)
    again.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000001"))
    assert "ckpt-00000001" in " ".join(Page(make_report(tmp_path, WALL)).words)


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the report is not shown")


def show(page: Path, folder: Path) -> tuple[Path, list[str]]:
    """Opens a page in a headless browser; returns a screenshot and what the page had to complain about."""
    assert CHROMIUM is not None
    shot = folder / "shot.png"
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            *sandbox,
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--window-size=1100,3600",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            f"--screenshot={shot}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return shot, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def near(pixels: object, color: str) -> int:
    """How many pixels of a picture have a colour, but for rounding."""
    import numpy as np

    wanted = np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)])
    return int((np.abs(np.asarray(pixels)[..., :3] * 255 - wanted).max(axis=-1) < 3).sum())


@needs_browser
def test_a_browser_shows_the_charts_and_has_nothing_to_complain_about(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from matplotlib.image import imread

    (run / "report.html").write_text(make_report(run, WALL))
    shot, complaints = show(run / "report.html", tmp_path_factory.mktemp("browser"))
    assert complaints == []
    pixels = imread(shot)
    assert pixels.shape[:2] == (3600, 1100)
    # Accuracy, return and fossils have colours that nothing but the charts shows.
    assert near(pixels, BLUE) > 500
    assert near(pixels, VERMILION) > 200
    assert near(pixels, GREEN) > 2000


@needs_browser
def test_that_check_would_hear_a_complaint_and_miss_a_picture(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from matplotlib.image import imread

    spoilt = make_report(run, WALL).replace("data:image/svg+xml;base64,", "https://localhost:1/")
    (run / "report.html").write_text(spoilt)
    shot, complaints = show(run / "report.html", tmp_path_factory.mktemp("browser"))
    assert len(complaints) >= 4  # the page's own policy forbids each of the four
    assert near(imread(shot), BLUE) == 0
