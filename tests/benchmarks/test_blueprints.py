"""The benchmark of blueprints: its plain rivals stand where the seeds do, and what was run is not run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.blueprints import (
    FIELDS,
    NEWBORNS,
    STARTS,
    Start,
    append_rows,
    blueprint_cases,
    plain_rival,
    read_rows,
    run_cases,
    schedule_of,
    started,
)
from esper.leyline import BLENDS
from esper.runtime.tasks import count_host_params, get_task_spec, load_task_data, override
from esper.simic.training.env_factory import task_layout
from esper.tamiyo.schedule import check_schedule

CONV = get_task_spec("digits_conv")
LAYOUT = task_layout(CONV, load_task_data(CONV))


@pytest.mark.parametrize(
    ("slot_id", "key", "channels", "pool"),
    [
        ("r0c0", "cnn.conv", [4, 4, 8], [False, True, False]),
        ("r1c0", "cnn.conv", [4, 4, 8], [True, False, False]),
        ("r0c1", "cnn.conv", [4, 8, 8], [True, False, False]),
        ("r0c1", "cnn.conv_down", [4, 8, 8], [True, True, False]),
        ("r2c0", "cnn.span", [5, 8], [True, False]),
    ],
)
def test_the_rival_is_a_plain_layer_of_that_size_in_that_place(
    slot_id: str, key: str, channels: list[int], pool: list[bool]
) -> None:
    slot, card = LAYOUT.slots[LAYOUT.slot_position(slot_id)], LAYOUT.card(slot_id, key)
    rival = plain_rival(CONV, slot, card)
    assert (rival.kwargs["channels"], rival.kwargs["pool"]) == (channels, pool)
    assert count_host_params(override(CONV, host=rival, slots=("r0c0",))) == pytest.approx(
        LAYOUT.host_params + card.params, rel=0.1
    )


@pytest.mark.parametrize("name", NEWBORNS)
@pytest.mark.parametrize("start", STARTS)
def test_every_way_to_start_is_a_schedule(name: str, start: str) -> None:
    task = get_task_spec(name)
    with started(STARTS[start]):
        entries = schedule_of(NEWBORNS[name], STARTS[start])
        check_schedule(entries, task_layout(task, load_task_data(task)))
        assert entries[-1].epoch < 20
    assert "at_once" not in BLENDS


def test_runs_are_rows_and_are_not_made_twice(tmp_path: Path) -> None:
    task = override(CONV, horizon=1, slots=("r0c1",), blueprints=("cnn.conv",), samples_per_epoch=64)
    cases = list(blueprint_cases(task, 2))
    assert [(case.case, case.variant) for case in cases] == [
        ("host", "host"),
        ("r0c1 cnn.conv", "seed"),
        ("r0c1 cnn.conv", "plain"),
    ]
    rows = run_cases(cases[1:], tmp_path / "runs.csv")
    assert [(row["variant"], row["params"], row["run_seed"]) for row in rows] == [
        ("seed", "1038", "1000"),
        ("seed", "1038", "1001"),
        ("plain", "1030", "1000"),
        ("plain", "1030", "1001"),
    ]
    assert run_cases(cases[1:], tmp_path / "runs.csv") == rows


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"has columns \['a', 'b'\], expected task, epochs"):
        read_rows(tmp_path / "other.csv")
    append_rows(tmp_path / "new.csv", [])
    assert read_rows(tmp_path / "new.csv") == []


def test_a_line_that_a_kill_left_torn_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    append_rows(path, [dict.fromkeys(FIELDS, "1"), dict.fromkeys(FIELDS, "2")])
    path.write_bytes(path.read_bytes()[:-4])
    assert [row["task"] for row in read_rows(path)] == ["1"]
    append_rows(path, [dict.fromkeys(FIELDS, "3")])
    assert [row["task"] for row in read_rows(path)] == ["1", "3"]


def test_a_changed_rate_reaches_seeds_only_and_ends_with_the_block(tmp_path: Path) -> None:
    from benchmarks.blueprints import play_schedule

    task = override(CONV, horizon=3, samples_per_epoch=64)
    entries = schedule_of((("r0c1", "cnn.conv_down"),), Start())[:1]

    def weights() -> list[float]:
        (run,) = play_schedule(task, entries, 1)
        slot = run.model.slot("r0c1")
        return [next(part.parameters()).sum().item() for part in (run.model.host, slot)]

    plain = weights()
    with started(Start(young_rate=3.0)):
        host, seed = weights()
    assert host == plain[0]  # a training seed leaves the host alone
    assert seed != plain[1]
    assert weights() == plain
