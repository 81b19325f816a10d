"""The HTML report of an evaluation: complete, self-contained, harmless whatever a folder holds, shown by a browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from esper.evidence.manifest import EvaluationSession
from esper.evidence.publication import CAPTIONS, report_page
from esper.scripts.cli import main
from tests.evidence.made_up import FOUND, MEANS, rows, write
from tests.karn.test_report import Page, needs_browser, show

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def test_the_page_has_claims_arms_figures_and_provenance(published: Path) -> None:
    page = Page((published / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    text = " ".join(page.words)
    for words in (
        "A. growing pays: BETTER",
        "schedule",
        "83.76 ± 2.43",
        "nothing was tuned",
        "esper evaluate",
        "p (Holm)",
    ):
        assert words in text, words
    assert len(page.sources) == len(CAPTIONS)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)


def test_it_can_be_made_again_from_the_folder(published: Path, tmp_path: Path) -> None:
    main(["report", str(published), "--out", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_bytes() == (published / "report.html").read_bytes()


def test_figures_that_are_missing_are_reported(tmp_path: Path) -> None:
    write(tmp_path, FOUND, rows(FOUND, MEANS))
    page = Page(report_page(tmp_path))
    assert page.sources == []
    assert "frontier.png was not drawn" in " ".join(page.words)


def test_a_folder_that_is_neither_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    assert "holds no event log" in capsys.readouterr().err


@needs_browser
def test_what_a_folder_holds_is_text_and_nothing_else(tmp_path: Path) -> None:
    session = EvaluationSession(argv=(EVIL,), started=EVIL, ended=None, opened_test=True)
    odd = replace(FOUND, description=EVIL, notes=(EVIL,), data=EVIL, machine={EVIL: EVIL}, sessions=(session,))
    write(tmp_path, odd, rows(odd, MEANS))
    (tmp_path / "report.html").write_text(report_page(tmp_path), encoding="utf-8")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert "img" not in page.tags
    _, complaints = show(tmp_path / "report.html", tmp_path)
    assert complaints == []
