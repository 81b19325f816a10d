"""The scale of scores on disk: measured once, filed durably, and never taken from a file that is none of ours."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from esper.runtime.tasks import get_task_spec, load_task_data
from esper.simic.rewards import Calibration
from esper.simic.training import calibration

TASK = get_task_spec("digits_mlp")
SCALE = Calibration(family="contribution", floor=10.0, ceiling=90.0, reference=(10.0, 20.0))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a scale was measured; nothing is played for it."""
    times: list[int] = []

    def measure(pool: object, task: object, runs: int) -> Calibration:
        times.append(runs)
        return SCALE

    monkeypatch.setattr(calibration, "measure_scale", measure)
    return times


def load(folder: Path) -> Calibration:
    return calibration.load_or_calibrate(None, TASK, load_task_data(TASK), 5, folder)  # type: ignore[arg-type]


def test_a_scale_is_measured_once_and_read_from_then_on(tmp_path: Path, measured: list[int]) -> None:
    assert [load(tmp_path / "scales"), load(tmp_path / "scales")] == [SCALE, SCALE]
    assert measured == [5]


def test_a_scale_is_durable_before_it_has_its_name(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(stat.S_ISDIR(os.fstat(fd).st_mode)) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda old, new: calls.append("replace") or replace(old, new))
    load(tmp_path)
    assert calls == [False, "replace", True]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"family": "contribution", "floor": NaN, "ceiling": 90.0, "reference": null}',
        b'{"family": "contribution", "floor": 1e400, "ceiling": 90.0, "reference": null}',
        b'{"family": "moon", "floor": 10.0, "ceiling": 90.0, "reference": null}',
        b'{"family": "contribution", "floor": "10", "ceiling": 90.0, "reference": null}',
    ],
)
def test_a_damaged_scale_is_named_and_not_used(content: bytes, tmp_path: Path, measured: list[int]) -> None:
    load(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path.name} is not a calibration .*; delete it and it is measured again"):
        load(tmp_path)
    assert measured == [5]


@pytest.mark.parametrize("kind", ["pipe", "link", "zeros"])
def test_what_is_no_file_in_place_of_a_scale_is_refused_and_waited_for_by_nobody(
    kind: str, tmp_path: Path, measured: list[int]
) -> None:
    load(tmp_path / "scales")
    (path,) = (tmp_path / "scales").iterdir()
    kept = path.rename(tmp_path / "kept")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kept if kind == "link" else "/dev/zero")
    with pytest.raises(ValueError, match="Esper opens regular files only"):
        load(tmp_path / "scales")
