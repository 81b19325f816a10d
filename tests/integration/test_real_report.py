"""The report of a run that the trainer itself wrote, in a real browser."""

from esper.scripts.cli import main
from esper.simic.run.session import start_new
from tests.karn.test_report import (
    BLUE,
    DOT,
    SCALE_AT,
    SECTIONS,
    VERMILION,
    YELLOW,
    Page,
    near,
    needs_browser,
    only,
    show,
)
from tests.telemetry.sessions import BLIND, play_session

DRAWN = (("curves", VERMILION, 100), ("parameters", DOT, 20), ("seeds", YELLOW, 200), ("policy", BLUE, 200))
"""A colour that each chart of this run draws."""


@needs_browser
def test_a_browser_shows_the_report_of_a_real_run(tmp_path):
    from matplotlib.image import imread

    play_session(start_new(BLIND, tmp_path, "real"))
    main(["report", str(tmp_path / "real")])
    path = tmp_path / "real" / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert tuple(page.sections) == SECTIONS
    words = " ".join(page.words)
    assert "completed after 2 rounds" in words
    assert "The record is whole." in words
    shot, complaints = show(path, tmp_path)
    assert complaints == []
    assert imread(shot).shape[:2] == (3600, 1100)
    for section, color, num_pixels in DRAWN:
        alone = tmp_path / f"{section}.html"
        alone.write_text(only(section, path.read_text(encoding="utf-8")), encoding="utf-8")
        shot, complaints = show(alone, tmp_path, height=900)
        assert complaints == []
        assert near(imread(shot)[:, :SCALE_AT], color) > num_pixels, f"{section} does not show {color}"
