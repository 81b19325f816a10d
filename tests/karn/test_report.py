"""The report: complete, self-contained, safe against what a log may hold, and shown by a real browser."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="reports need the extra `runs`")
pytest.importorskip("jinja2", reason="reports need the extra `runs`")

from esper.karn import charts, report
from esper.karn.charts import BLUE, GREEN, ORANGE, PINK, VERMILION, YELLOW
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
    episode_completed,
    germinated,
    governor_changed,
    head_update,
    ppo_update,
    round_completed,
    seal,
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


def write_whole_run(folder: Path) -> Path:
    """A completed run whose record is whole."""
    log = write_run(folder, rounds=8, finish=False)
    where = {"round": 7, "episode": 7, "env": 1, "epoch": 2}
    log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(), Severity.CRITICAL, **where)
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=7)
    log.emit(T.RUN_ENDED, ended(num_rounds_total=8))
    seal(folder)
    (folder / "config.json").write_text('{"task": "digits_mlp", "seed": 7}')
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_whole_run(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be read only."""
    return write_whole_run(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def text(whole: Path) -> str:
    return make_report(whole, WALL)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are what takes long, and many tests read words only."""
    monkeypatch.setattr(charts, "svg_of", lambda figure: "<svg/>")


only_words = pytest.mark.usefixtures("undrawn")


def pictures_of(run: Path) -> list[str]:
    return [b64decode(source.partition(",")[2]).decode() for source in Page(make_report(run, WALL)).sources]


def texts_in(picture: str) -> list[str]:
    """What a picture says; raises if it is no picture."""
    return [
        "".join(text.itertext()) for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    ]


def words_of(run: Path) -> str:
    return words_in(make_report(run, WALL))


def words_in(text: str) -> str:
    return " ".join(Page(text).words)


def opening(text: str) -> tuple[str, str]:
    """How the page begins: the colour of the verdict and its first line."""
    found = re.search(r'<div class="verdict (\w+)">\s*<p class="now">(.*?)</p>', text)
    assert found is not None
    return found[1], found[2]


def test_a_report_has_all_its_parts_and_well_formed_markup(text: str) -> None:
    page = Page(text)
    assert tuple(page.sections) == SECTIONS
    assert page.open == []
    assert len(page.sources) == 4  # the four charts
    words = " ".join(page.words)
    for part in (RUN_ID, "completed after 8 rounds", "91.50 %", "mlp.lora", "divergence", "clip_fraction", "c0ffee"):
        assert part in words, part
    assert "The record is whole." in words
    assert opening(text) == ("info", "completed after 8 rounds, best accuracy 91.5 % (best single host)")


LOG = "events/a000-s0.jsonl"


def lose_checksum(run: Path) -> None:
    (run / f"{LOG}.sha256").unlink()


def damage_line(run: Path) -> None:
    with (run / LOG).open("ab") as log:
        log.write(b"damage\n")


def lose_line(run: Path) -> None:
    lines = (run / LOG).read_bytes().splitlines(keepends=True)
    (run / LOG).write_bytes(b"".join(lines[:5] + lines[6:]))


@only_words
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lose_checksum, "a000-s0.jsonl has no checksum"),
        (damage_line, "a000-s0.jsonl at byte"),
        (lose_line, "seq 5 to 5 are missing"),
    ],
)
def test_a_page_about_a_damaged_record_opens_with_that(damage: Callable[[Path], None], problem: str, run: Path) -> None:
    damage(run)
    text = make_report(run, WALL)
    assert opening(text) == ("error", "evidence broken: the record is not whole")
    words = words_in(text)
    assert "The record is NOT whole." in words
    assert "Why: " in words
    assert problem in words
    assert f"esper verify {run}" in words
    assert words.count("evidence broken") == 1  # what the events alone can tell of it is not said again


@only_words
def test_all_problems_are_counted_and_listed(run: Path) -> None:
    lose_checksum(run)
    lose_line(run)
    assert "; and 1 more problems" in words_of(run)


@only_words
def test_a_failed_run_whose_record_is_damaged_failed_first_of_all(tmp_path: Path) -> None:
    log = write_run(tmp_path, rounds=1, finish=False)
    log.emit(T.RUN_ENDED, ended(status="failed", error_type="Oops", error_message="it broke"), Severity.ERROR)
    text = make_report(tmp_path, WALL)
    assert opening(text) == ("critical", "failed: Oops: it broke")
    assert "evidence broken: the record is not whole" in words_in(text)


@only_words
def test_a_run_that_goes_on_is_not_damaged(tmp_path: Path) -> None:
    log = write_run(tmp_path, rounds=6, finish=False)
    seal(tmp_path)
    text = make_report(tmp_path, WALL + log.seq)
    assert opening(text)[1].startswith("steady")
    assert "Nothing is damaged, but the run has no end marker yet." in words_in(text)


@only_words
def test_of_many_warnings_the_newest_are_shown(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_WARNINGS", 1)
    words = words_of(run)
    assert "The newest 1 of 2." in words
    assert "ANOMALY_DETECTED" in words
    assert "GOVERNOR_STATE_CHANGED" not in words


@only_words
def test_a_traceback_can_be_read(tmp_path: Path) -> None:
    log = write_run(tmp_path, rounds=1, finish=False)
    tail = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nOops: it broke\n'
    failed = ended(status="failed", error_type="Oops", error_message="it broke", traceback_tail=tail)
    log.emit(T.RUN_ENDED, failed, Severity.ERROR)
    text = make_report(tmp_path, WALL)
    (shown,) = re.findall("<pre>(Trace.*?)</pre>", text, re.DOTALL)
    assert unescape(shown) == tail
    assert text.count("most recent call last") == 1
    assert "failed after 20 rounds: Oops: it broke" in words_in(text)


@only_words
def test_advice_names_the_run_and_not_the_report_itself(run: Path) -> None:
    assert "esper report" not in words_of(run)
    log = LogWriter(run / "it's [odd]")
    log.emit(T.RUN_STARTED, started())
    log.emit(T.CHECKPOINT_RECORDED, checkpoint())
    log.emit(T.RUN_ENDED, ended(status="interrupted"))
    seal(log.folder)
    assert f"esper train --resume {shlex.quote(str(log.folder))}" in words_of(log.folder)


def facts_of(text: str) -> dict[str, str]:
    rows = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td>', text)
    return {unescape(name): unescape(value) for name, value in rows}


def test_figures_say_what_they_are_of(text: str) -> None:
    facts = facts_of(text)
    assert facts["best accuracy (best single host)"] == "91.50 %"
    assert facts["final accuracy (mean over envs)"] == "90.00 %"
    assert facts["rounds"] == "8 of 20"
    assert facts["time"] == "61 s"


def test_the_time_of_a_resumed_run_is_that_of_its_last_attempt(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    again = LogWriter(tmp_path, attempt=1, first_seq=1)
    again.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000001"))
    again.emit(T.RUN_ENDED, ended())
    facts = facts_of(make_report(tmp_path, WALL))
    assert facts["time of the last attempt"] == "61 s"
    assert "time" not in facts


def test_what_is_known_to_be_absent_is_not_called_unknown(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    absent = {"param_budget": None, "reward_mode": None, "data_sha256": None, "git_commit": None, "git_dirty": True}
    log.emit(T.RUN_STARTED, started(**absent, argv=("esper", "train", "--runs", "my runs"), devices=("cuda:0", "cpu")))
    facts = facts_of(make_report(tmp_path, WALL))
    assert [facts[name] for name in ("cuda version", "amp dtype", "resumed from")] == ["no"] * 3
    assert (facts["param budget"], facts["reward mode"]) == ("no limit", "none")
    assert (facts["data sha256"], facts["git commit"], facts["git dirty"]) == ("unknown", "unknown", "yes")
    assert facts["argv"] == "esper train --runs 'my runs'"
    assert facts["devices"] == "cuda:0, cpu"


@only_words
def test_the_whole_configuration_is_there_to_be_opened(run: Path) -> None:
    (run / "config.json").write_text('{"task": "<b>", "seed": 7}')
    (shown,) = re.findall(r"<details>.*?<pre>(.*?)</pre></details>", make_report(run, WALL), re.DOTALL)
    assert unescape(shown) == '{"task": "<b>", "seed": 7}'
    (run / "config.json").unlink()
    assert "has no config.json" in words_of(run)


def test_names_with_dollar_signs_are_names(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started(slot_ids=("$\\x$",)))
    log.emit(T.SEED_GERMINATED, germinated(slot_id="$\\x$"), round=0, episode=0, env=0, epoch=0)
    pictures = pictures_of(tmp_path)
    assert any("$\\x$" in picture for picture in pictures)


def test_control_characters_spoil_no_chart_and_turn_no_line_around(tmp_path: Path) -> None:
    evil = "r0\x1b[31m\x07\u202ec0"
    log = LogWriter(tmp_path, run=evil)
    log.emit(T.RUN_STARTED, started(slot_ids=(evil,), task=evil))
    log.emit(T.SEED_GERMINATED, germinated(slot_id=evil), round=0, episode=0, env=0, epoch=0)
    log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(heads={evil: head_update()}), round=0)
    for picture in pictures_of(tmp_path):
        texts_in(picture)
    text = make_report(tmp_path, WALL)
    assert "r0 [31m  c0" in text
    assert not {"\x1b", "\x07", "\u202e"} & {*text}


def test_a_run_of_one_round_has_no_fractions_of_rounds(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=1)
    curves, outcomes, *_ = map(texts_in, pictures_of(tmp_path))
    axis = curves.index("round")
    assert curves[axis - 2 : axis] == ["mean over envs", "0"]  # the end of a legend, and the only mark on the axis
    assert outcomes[-3:] == ["final validation accuracy (%)", "0", "round"]


def test_the_losses_of_a_round_are_those_its_hosts_ended_with(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    for env, loss in enumerate((0.2, 0.6)):
        done = episode_completed(final_loss=loss)
        log.emit(T.EPISODE_COMPLETED, done, round=0, episode=0, env=env, epoch=2)
    log.emit(T.ROUND_COMPLETED, round_completed(), round=0)
    unfinished = {"round": 1, "episode": 1, "env": 0, "epoch": 2}
    log.emit(T.EPISODE_COMPLETED, episode_completed(final_loss=9.0), **unfinished)
    texts = texts_in(pictures_of(tmp_path)[0])
    marks = texts[texts.index("committed network") + 1 : texts.index("validation loss")]
    assert (float(marks[0]), float(marks[-1])) == (0.2, 0.6)


def test_tables_too_wide_for_the_page_scroll_or_break(text: str) -> None:
    tables = re.findall(r'(<div class="wide">)?<table( class="facts")?>', text)
    assert len(tables) == 5
    assert all(scrolls or breaks for scrolls, breaks in tables)


def test_a_report_needs_nothing_but_itself(text: str) -> None:
    page = Page(text)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "form"}
    assert re.search(r"@import|url\(", text) is None


def test_the_same_log_gives_the_same_report(whole: Path, text: str) -> None:
    assert make_report(whole, WALL) == text


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


@only_words
def test_resumes_are_part_of_the_provenance(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    write_round(log, 0)
    again = LogWriter(tmp_path, attempt=1, first_seq=log.seq)
    again.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000001"))
    assert "ckpt-00000001" in " ".join(Page(make_report(tmp_path, WALL)).words)


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the report is not shown")


def show(page: Path, folder: Path, *, height: int = 3600) -> tuple[Path, list[str]]:
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
            f"--window-size=1100,{height}",
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


DOT = "#693476"
"""Of the first round in the chart of outcomes: the darkest colour of its scale, drawn four fifths opaque on white."""
CHARTS: dict[str, dict[str, int]] = {
    "curves": {BLUE: 500, ORANGE: 200, GREEN: 200, PINK: 200, VERMILION: 200},
    "parameters": {DOT: 20},
    "seeds": {YELLOW: 2000, GREEN: 2000},
    "policy": {BLUE: 500, ORANGE: 200},
}
"""What each chart draws: colours, with fewer pixels than any run that has something to show."""
SCALE_AT = 840
"""Where the colour scale of the chart of outcomes begins, in pixels from the left: it has the colours of the dots."""


def only(section: str, text: str) -> str:
    """The page with nothing but the chart of one section: colours of other charts and of the verdict are gone."""
    found = re.search(rf'<section id="{section}">.*?(<figure>.*?</figure>)', text, re.DOTALL)
    assert found is not None, f"{section} has no chart"
    return f"{text[: text.index('<body>')]}<body>{found[1]}</body></html>"


def missing_colors(section: str, text: str, folder: Path) -> dict[str, int]:
    """Which colours of a chart a browser shows too little of, with the pixels they have."""
    from matplotlib.image import imread

    page = folder / f"{section}.html"
    page.write_text(only(section, text), encoding="utf-8")
    shot, complaints = show(page, folder, height=900)
    assert complaints == []
    pixels = imread(shot)[:, :SCALE_AT]
    counts = {color: near(pixels, color) for color in CHARTS[section]}
    return {color: count for color, count in counts.items() if count < CHARTS[section][color]}


@needs_browser
@pytest.mark.parametrize("section", [*CHARTS])
def test_a_browser_draws_every_chart(section: str, text: str, tmp_path: Path) -> None:
    assert missing_colors(section, text, tmp_path) == {}


@needs_browser
def test_that_check_would_miss_a_blank_chart(text: str, tmp_path: Path) -> None:
    """The other charts are on the page, and their colours do not count."""
    blank = b64encode(b'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="400"></svg>').decode()
    (picture,) = re.findall(r'src="([^"]+)"', only("curves", text))
    spoilt = text.replace(picture, f"data:image/svg+xml;base64,{blank}")
    assert missing_colors("curves", spoilt, tmp_path) == dict.fromkeys(CHARTS["curves"], 0)


@needs_browser
def test_a_complaint_of_the_browser_would_be_heard(text: str, tmp_path: Path) -> None:
    spoilt = text.replace("data:image/svg+xml;base64,", "https://localhost:1/")
    (tmp_path / "report.html").write_text(spoilt)
    _, complaints = show(tmp_path / "report.html", tmp_path)
    assert len(complaints) >= 4  # the page's own policy forbids each of the four
