"""Reading run directories: torn tails, damage, attempts, and logs that grow while they are read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from esper.karn.codec import NewerSchema
from esper.karn.integrity import check_run
from esper.karn.replay import BadLine, Follower, LogItem, find_run, find_runs, replay
from esper.karn.view import RunView
from esper.leyline import SCHEMA_VERSION, LoggedEvent
from tests.karn.logs import LogWriter, T, ended, read_view, started, write_round, write_run


def places(items: list[LogItem]) -> list[tuple[int, int]]:
    assert all(isinstance(item, LoggedEvent) for item in items)
    return [(item.attempt, item.seq) for item in items if isinstance(item, LoggedEvent)]


def test_what_follows_the_last_newline_is_no_event_and_no_damage(tmp_path: Path) -> None:
    log = write_run(tmp_path, finish=False)
    whole = list(replay(tmp_path))
    line = log.line(T.RUN_ENDED, ended())
    for cut in (1, 40, len(line) - 1):  # the last one is complete but for its newline
        before = log.path.read_bytes()
        log.write(line[:cut])
        assert list(replay(tmp_path)) == whole
        log.path.write_bytes(before)


def test_damage_in_the_middle_is_named_by_file_and_byte(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    size = log.path.stat().st_size
    log.write(b'{"v":1,"run"\n')
    log.emit(T.RUN_ENDED, ended())
    first, bad, last = replay(tmp_path)
    assert isinstance(bad, BadLine)
    assert (bad.file, bad.offset) == ("events/a000-s0.jsonl", size)
    assert places([first, last]) == [(0, 0), (0, 1)]


def checked(folder: Path) -> list[LogItem]:
    """The events that a check of the run counts."""
    counted: list[LogItem] = []
    check_run(folder, lambda event, _: counted.append(event))
    return counted


def resumed(folder: Path, *, starts: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """A run with several attempts; returns what counts, found by asking for each number who wrote it last."""
    owner: dict[int, int] = {}
    for attempt, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        log = LogWriter(folder, attempt=attempt, first_seq=start)
        owner = {seq: who for seq, who in owner.items() if seq < start}
        for _ in range(length):
            owner[log.emit(T.RUN_STARTED, started())] = attempt
    return sorted((who, seq) for seq, who in owner.items())


def test_what_a_later_attempt_wrote_again_counts_once(tmp_path: Path) -> None:
    # The second attempt goes back to 4, the third further back to 2: of the second nothing is left.
    wanted = resumed(tmp_path, starts=[0, 4, 2], lengths=[9, 3, 5])
    assert wanted == [(0, 0), (0, 1), (2, 2), (2, 3), (2, 4), (2, 5), (2, 6)]
    assert places(list(replay(tmp_path))) == wanted


@pytest.mark.parametrize("case", range(20))
def test_attempts_of_any_kind_read_once(case: int, tmp_path: Path) -> None:
    rng = random.Random(case)
    starts, lengths = [0], [rng.randint(1, 12)]
    for _ in range(rng.randint(0, 4)):
        starts.append(rng.randint(0, starts[-1] + lengths[-1]))
        lengths.append(rng.randint(1, 12))
    wanted = resumed(tmp_path, starts=starts, lengths=lengths)
    assert places(list(replay(tmp_path))) == wanted


def spoil(path: Path, place: int) -> None:
    """Damages one line of a file."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[place] = b"{}" + lines[place][2:]
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    "read", [replay, lambda folder: Follower(folder).poll().items, checked], ids=["replay", "follower", "verify"]
)
def test_an_attempt_begins_where_the_name_of_its_file_says_though_its_first_line_is_damaged(
    read: Callable[[Path], Iterable[LogItem]], tmp_path: Path
) -> None:
    wanted = resumed(tmp_path, starts=[0, 4], lengths=[9, 3])
    assert places(list(read(tmp_path))) == wanted == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6)]
    spoil(tmp_path / "events" / "a001-s4.jsonl", 0)
    kept = [item for item in read(tmp_path) if isinstance(item, LoggedEvent)]
    assert places(list(kept)) == [place for place in wanted if place != (1, 4)]


def test_a_follower_starts_afresh_as_soon_as_an_attempt_begins_and_when_it_is_withdrawn(tmp_path: Path) -> None:
    resumed(tmp_path, starts=[0], lengths=[6])
    follower = Follower(tmp_path)
    assert len(follower.poll().items) == 6
    LogWriter(tmp_path, attempt=1, first_seq=4).path.touch()
    batch = follower.poll()
    assert (batch.restarted, places(list(batch.items))) == (True, [(0, 0), (0, 1), (0, 2), (0, 3)])
    assert not follower.poll().restarted
    (tmp_path / "events" / "a001-s4.jsonl").unlink()
    batch = follower.poll()
    assert (batch.restarted, len(batch.items)) == (True, 6)


def of_version(line: bytes, version: int) -> bytes:
    return line.replace(f'"v": {SCHEMA_VERSION}'.encode(), f'"v": {version}'.encode(), 1)


@pytest.mark.parametrize("version", [1, -3, SCHEMA_VERSION + 1])
@pytest.mark.parametrize("place", [0, 2])
def test_a_line_of_another_version_among_good_ones_is_damage(place: int, version: int, tmp_path: Path) -> None:
    path = write_run(tmp_path, rounds=1).path
    lines = path.read_bytes().splitlines(keepends=True)
    lines[place] = of_version(lines[place], version)
    path.write_bytes(b"".join(lines))
    bad = [item for item in replay(tmp_path) if isinstance(item, BadLine)]
    assert [(item.file, item.offset) for item in bad] == [("events/a000-s0.jsonl", len(b"".join(lines[:place])))]
    assert f"{version}" in bad[0].reason
    assert [item for item in Follower(tmp_path).poll().items if isinstance(item, BadLine)] == bad
    found = check_run(tmp_path)
    assert found.num_malformed == 1
    assert any(f"a000-s0.jsonl at byte {bad[0].offset}: " in problem for problem in found.problems)


@pytest.mark.parametrize("read", [replay, lambda folder: Follower(folder).poll().items, check_run])
def test_a_file_of_a_newer_esper_is_refused_by_name(read: Callable[[Path], object], tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    newer = LogWriter(tmp_path, attempt=1, first_seq=1)
    newer.write(b"damage\n")
    for _ in range(2):
        newer.write(of_version(newer.line(T.RUN_STARTED, started()), SCHEMA_VERSION + 1))
    with pytest.raises(NewerSchema, match=rf"{newer.path} at byte 7: .* version {SCHEMA_VERSION + 1}"):
        list(read(tmp_path))  # type: ignore[call-overload]


def test_a_follower_sees_each_event_once_however_the_bytes_arrive(tmp_path: Path) -> None:
    source = write_run(tmp_path / "source", rounds=3)
    rest = source.path.read_bytes()
    target = LogWriter(tmp_path / "live")
    follower, seen = Follower(tmp_path / "live"), []
    rng = random.Random(0)
    while rest:
        cut = rng.randint(1, 900)
        target.write(rest[:cut])
        rest = rest[cut:]
        batch = follower.poll()
        assert not batch.restarted
        seen += batch.items
    seen += follower.poll().items
    assert seen == list(replay(tmp_path / "source"))
    assert follower.poll().items == ()


def test_a_follower_starts_afresh_when_a_new_attempt_takes_over(tmp_path: Path) -> None:
    follower, view = Follower(tmp_path), RunView()
    first = LogWriter(tmp_path)
    first.emit(T.RUN_STARTED, started())
    for number in range(3):
        write_round(first, number)
        if number == 1:
            resume_at = first.seq
        for item in follower.poll().items:
            view.add(item)
    assert len(view.returns) == 3
    second = LogWriter(tmp_path, attempt=1, first_seq=resume_at)
    second.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000002"))
    write_round(second, 2)
    batch = follower.poll()
    assert batch.restarted
    view = read_view(batch.items)
    assert view == read_view(replay(tmp_path))
    assert len(view.returns) == 3
    assert view.num_missing == 0


def test_of_a_folder_with_many_runs_only_the_last_are_named(tmp_path: Path) -> None:
    for number in range(12):
        LogWriter(tmp_path / f"run{number:02}").emit(T.RUN_STARTED, started())
    with pytest.raises(ValueError, match=r"Runs inside it: 12, the last \S+/run07, .*/run11$"):
        find_run(tmp_path)


def test_paths_that_are_no_runs_are_refused_with_advice(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    write_run(tmp_path / "runs" / "two")
    assert find_run(tmp_path / "runs" / "one") == tmp_path / "runs" / "one"
    assert [run.name for run in find_runs(tmp_path / "runs")] == ["one", "two"]
    with pytest.raises(ValueError, match=r"no event log .*one.*two"):
        find_run(tmp_path / "runs")
    with pytest.raises(ValueError, match="not a folder"):
        find_run(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no runs in"):
        find_runs(tmp_path / "empty")
