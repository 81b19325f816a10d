"""Everything shown follows from the files, to the byte, whatever the order of their lines."""

import csv
import json
import math
import os
import resource
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from esper.evidence.claims import ClaimOutcome
from esper.evidence.figures import _mean_curves
from esper.evidence.manifest import MANIFEST, EvaluationManifest
from esper.evidence.publication import publish
from esper.evidence.results import CURVE_COLUMNS, CURVES, RESULTS, TOPOLOGIES, ResultStore, Topology, read_results
from esper.leyline.rundir import EVALUATION_PICTURES
from tests.evidence.made_up import FOUND, MEANS, manifest, row, rows, write

DERIVED = (
    "summary.json",
    "report.md",
    "report.html",
    "frontier.csv",
    "compute.csv",
    "paired.csv",
    "mean_curves.csv",
    "growth.csv",
    *EVALUATION_PICTURES,
)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in DERIVED}


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plot library, so no figures, which take long."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_the_same_rows_in_any_order_make_the_same_bytes(published: Path, tmp_path: Path) -> None:
    write(tmp_path, FOUND, rows(FOUND, MEANS), order=lambda made: made.reverse())
    publish(tmp_path, tmp_path)
    assert files(tmp_path) == files(published)


def test_one_changed_row_changes_what_is_shown(published: Path, tmp_path: Path) -> None:
    made = rows(FOUND, MEANS)
    other = [*made[:-1], row(made[-1].arm, made[-1].run_seed, 10.0)]
    write(tmp_path / "other", FOUND, other)
    publish(tmp_path / "other", tmp_path / "other")
    same = [name for name in DERIVED if files(published)[name] == files(tmp_path / "other")[name]]
    assert same == ["growth.csv", "growth.png"], "what grew when is the same, every figure of merit is not"


def test_the_report_names_all_that_a_reader_must_know(published: Path) -> None:
    report = (published / "report.md").read_text()
    for words in ("A. growing pays: BETTER", "20 pairs", "opened 1 times", "esper evaluate", "nothing was tuned"):
        assert words in report
    summary = json.loads((published / "summary.json").read_text())
    assert summary["verdicts"][0]["outcome"] == "BETTER"
    (pair,) = [pair for pair in summary["subject_against"] if pair["second"] == "wait_only"]
    assert pair["mean"] == pytest.approx(44.0, abs=0.5)
    assert pair["low"] < pair["mean"] < pair["high"]
    assert summary["arms"]["schedule"]["figures"]["params"]["mean"] == 100


@pytest.mark.usefixtures("undrawn")
def test_a_lost_row_is_reported_and_invalid(tmp_path: Path) -> None:
    write(tmp_path, FOUND, rows(FOUND, MEANS)[1:])
    published = publish(tmp_path, tmp_path)
    assert published.verdicts[0].outcome is ClaimOutcome.INVALID
    assert "1 runs are missing" in (tmp_path / "report.md").read_text()
    assert not published.summary.against_baseline, "no arm is compared with an incomplete one"


@pytest.mark.usefixtures("undrawn")
def test_a_failed_run_stays_in_its_pair_and_is_named(tmp_path: Path) -> None:
    made = rows(FOUND, MEANS)
    made[25] = row("schedule", made[25].run_seed, 10.0, status="failed: it broke")
    write(tmp_path, FOUND, made)
    published = publish(tmp_path, tmp_path)
    (pair,) = [pair for pair in published.summary.against_baseline if pair.first == "schedule"]
    assert pair.difference.num_pairs == 20
    assert pair.difference.losses == 1
    assert f"schedule, run seed {made[25].run_seed}: failed: it broke." in (tmp_path / "report.md").read_text()


def test_figures_are_also_numbers(published: Path) -> None:
    with (published / "frontier.csv").open() as file:
        points = {point["arm"]: point for point in csv.DictReader(file)}
    assert float(points["schedule"]["score"]) == pytest.approx(84, abs=2)
    with (published / "mean_curves.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(FOUND.arms) * FOUND.horizon
    with (published / "growth.csv").open() as file:
        assert {line["blueprint"] for line in csv.DictReader(file)} == {"cnn.conv"}
    assert all((published / name).read_bytes().startswith(b"\x89PNG") for name in EVALUATION_PICTURES)


@pytest.mark.usefixtures("undrawn")
def test_without_the_plot_library_all_else_is_written(published: Path, tmp_path: Path) -> None:
    assert not publish(published, tmp_path).drawn
    assert "pip install 'esper-growth[plots]'" in (tmp_path / "report.md").read_text()
    assert not (tmp_path / EVALUATION_PICTURES[0]).exists()


def test_rows_of_two_setups_are_refused(tmp_path: Path) -> None:
    made = rows(FOUND, MEANS)
    write(tmp_path, FOUND, [*made[:-1], row(made[-1].arm, made[-1].run_seed, 1.0, setup="other")])
    with pytest.raises(ValueError, match=r"other setups \(other\)"):
        publish(tmp_path, tmp_path)


def test_a_line_that_was_cut_off_never_counted(tmp_path: Path) -> None:
    made = rows(FOUND, MEANS)
    write(tmp_path, FOUND, made)
    whole = (tmp_path / RESULTS).read_bytes()
    (tmp_path / RESULTS).write_bytes(whole[:-7])
    store = ResultStore(tmp_path)
    assert set(store.results) == {result.key for result in made[:-1]}
    last = made[-1]
    bare = Topology(arm=last.arm, policy_id="", run_seed=last.run_seed, host={}, kept=(), lives=())
    store.add(last, bare, pd.DataFrame(columns=list(CURVE_COLUMNS)))
    assert list(ResultStore(tmp_path).results.values()) == made


def test_epochs_of_seeds_count_from_one_in_files(published: Path) -> None:
    line = json.loads((published / TOPOLOGIES).read_text().splitlines()[-1])
    (written,) = line["lives"]
    (known,) = ResultStore(published).topologies[line["arm"], line["policy_id"], line["run_seed"]].lives
    drawn = pd.read_csv(published / "growth.csv").iloc[0]
    for name, epoch in {"planted": 0, "blended": 1, "kept": 2}.items():
        assert (getattr(known, name), written[name], drawn[name]) == (epoch, epoch + 1, epoch + 1)
    assert known.pruned is None


def test_a_run_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path, FOUND, rows(FOUND, MEANS))
    lines = (tmp_path / RESULTS).read_text().splitlines(keepends=True)
    (tmp_path / RESULTS).write_text("".join([*lines, lines[-1]]))
    with pytest.raises(ValueError, match="twice"):
        read_results(tmp_path / RESULTS)


def test_a_row_that_lacks_its_last_fields_is_refused(tmp_path: Path) -> None:
    write(tmp_path, FOUND, rows(FOUND, MEANS))
    lines = (tmp_path / RESULTS).read_text().splitlines()
    (tmp_path / RESULTS).write_text("\n".join([*lines[:-1], lines[-1].rpartition(",")[0]]) + "\n")
    with pytest.raises(ValueError, match="not a results file of this version"):
        read_results(tmp_path / RESULTS)


def test_manifests_of_the_format_before_are_read_and_others_refused(tmp_path: Path) -> None:
    found = manifest(FOUND.arms)
    found.save(tmp_path)
    facts = json.loads((tmp_path / MANIFEST).read_text())
    assert EvaluationManifest.load(tmp_path) == found
    facts["gates"] = facts.pop("learning_checks")
    (tmp_path / MANIFEST).write_text(json.dumps({**facts, "schema_version": 1}))
    assert EvaluationManifest.load(tmp_path) == found
    (tmp_path / MANIFEST).write_text(json.dumps({**facts, "schema_version": 3}))
    with pytest.raises(ValueError, match="format 3, this version of Esper reads 2"):
        EvaluationManifest.load(tmp_path)


# ---- folders that were killed in, damaged, or made by others


def test_cutting_a_torn_line_needs_no_room_and_cannot_lose_the_others(tmp_path: Path) -> None:
    """Under a size limit of nothing a file can be cut and not written anew, as on a disk that fails meanwhile."""
    made = rows(FOUND, MEANS)
    write(tmp_path, FOUND, made)
    (tmp_path / RESULTS).write_bytes((tmp_path / RESULTS).read_bytes()[:-7])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        store = ResultStore(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(store.results) == len(made) - 1


@pytest.mark.parametrize("line", [b"{", b"[" * 4000, b'{"arm": "x"}', b"\xff"])
def test_a_damaged_topology_is_named_by_its_line(line: bytes, tmp_path: Path) -> None:
    write(tmp_path, FOUND, rows(FOUND, MEANS))
    path = tmp_path / TOPOLOGIES
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], line, *lines[2:]]) + b"\n")
    with pytest.raises(ValueError, match=r"topologies.jsonl line 2 is damaged"):
        ResultStore(tmp_path)


def test_runs_whose_networks_are_lost_are_refused_before_an_arm_fails_for_lack_of_them(tmp_path: Path) -> None:
    write(tmp_path, FOUND, rows(FOUND, MEANS))
    (tmp_path / TOPOLOGIES).unlink()
    with pytest.raises(ValueError, match=r"topologies.jsonl lacks \d+ runs of results.csv, such as"):
        ResultStore(tmp_path)


@pytest.mark.parametrize("text", ["[" * 4000, '{"schema_version": NaN}', "{}"])
def test_a_manifest_that_no_reader_can_hold_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="is not a manifest of this version"):
        EvaluationManifest.load(tmp_path)


def test_links_in_a_folder_of_results_are_not_written_through(published: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra `plots`")
    results, mine = tmp_path / "theirs", tmp_path / "mine"
    shutil.copytree(published, results)
    made = [path for path in results.iterdir() if path.name not in (RESULTS, CURVES, TOPOLOGIES, "manifest.json")]
    assert len(made) > 5
    mine.write_text("precious")
    for path in made:
        path.unlink()
        path.symlink_to(mine)
    publish(results, results)
    assert mine.read_text() == "precious"
    assert not any(path.is_symlink() for path in made)


@pytest.mark.parametrize("name", [RESULTS, CURVES, TOPOLOGIES, MANIFEST])
@pytest.mark.parametrize("kind", ["link", "pipe", "endless"])
def test_what_is_no_file_of_an_evaluation_is_neither_read_cut_nor_waited_for(
    kind: str, name: str, tmp_path: Path
) -> None:
    results, mine, few = (
        tmp_path / "theirs",
        tmp_path / "mine",
        manifest(FOUND.arms[:2], num_seeds=1, subject="schedule"),
    )
    write(results, few, rows(few, MEANS))
    mine.write_text("a line\nand one without an end")
    (results / name).unlink()
    if kind == "pipe":
        os.mkfifo(results / name)
    else:
        (results / name).symlink_to(mine if kind == "link" else "/dev/zero")
    with pytest.raises(OSError, match="regular files only"):
        publish(results, results)
    with pytest.raises(OSError, match="regular files only") if name != MANIFEST else nullcontext():
        ResultStore(results)
    assert mine.read_text() == "a line\nand one without an end"


@pytest.mark.parametrize(
    ("column", "word", "message"),
    [
        ("test_loss", "1e400", "a figure that is not finite"),
        ("val_accuracy_pct", "nan", "a figure that is not finite"),
        ("params", "9" * 400, "is not a results file of this version"),
        ("arm", "nobody", "unknown arm 'nobody'"),
    ],
)
def test_rows_that_no_evaluation_wrote_are_refused(column: str, word: str, message: str, tmp_path: Path) -> None:
    few = manifest(FOUND.arms[:2], num_seeds=1, subject="schedule")
    write(tmp_path, few, rows(few, MEANS))
    if column == "arm":
        replace(few, arms=(*few.arms, word)).save(tmp_path)
    table = pd.read_csv(tmp_path / RESULTS, dtype=str, keep_default_na=False)
    if column != "arm":
        table.loc[0, column] = word
    table.to_csv(tmp_path / RESULTS, index=False)
    with pytest.raises(ValueError, match=message):
        publish(tmp_path, tmp_path)


def test_a_curve_through_a_network_that_diverged_has_no_spread_there() -> None:
    curves = pd.DataFrame([{"arm": "schedule", "epoch": 1, "committed_loss": loss} for loss in (1.0, float("inf"))])
    (found,) = _mean_curves(manifest(FOUND.arms[:2], subject="schedule", metric="loss"), curves).itertuples()
    assert (found.mean, math.isnan(found.sd)) == (float("inf"), True)


def test_nothing_is_appended_through_a_link_that_came_meanwhile(tmp_path: Path) -> None:
    mine, last = tmp_path / "mine", rows(FOUND, MEANS)[-1]
    write(tmp_path, FOUND, rows(FOUND, MEANS))
    store = ResultStore(tmp_path)
    mine.write_text("precious")
    (tmp_path / RESULTS).unlink()
    (tmp_path / RESULTS).symlink_to(mine)
    bare = Topology(arm=last.arm, policy_id="", run_seed=last.run_seed, host={}, kept=(), lives=())
    with pytest.raises(OSError, match="is a link"):
        store.add(last, bare, pd.DataFrame(columns=list(CURVE_COLUMNS)))
    assert mine.read_text() == "precious"
