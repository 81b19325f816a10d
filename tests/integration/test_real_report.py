"""The report of a run that the trainer itself wrote, in a real browser."""

from esper.scripts.cli import main
from esper.simic.training.session import start_new
from tests.karn.test_report import BLUE, SECTIONS, VERMILION, Page, near, needs_browser, show
from tests.telemetry.sittings import BLIND, sit


@needs_browser
def test_a_browser_shows_the_report_of_a_real_run(tmp_path):
    from matplotlib.image import imread

    sit(start_new(BLIND, tmp_path, "real"))
    main(["report", str(tmp_path / "real")])
    path = tmp_path / "real" / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert tuple(page.sections) == SECTIONS
    words = " ".join(page.words)
    assert "completed after 2 rounds" in words
    assert "The record is whole." in words
    shot, complaints = show(path, tmp_path)
    assert complaints == []
    pixels = imread(shot)
    assert near(pixels, BLUE) > 200, "the curve of accuracy"
    assert near(pixels, VERMILION) > 100, "the curve of returns"
