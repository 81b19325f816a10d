"""What `esper verify` accepts and refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.karn.integrity import check_run
from tests.karn.logs import RUN_ID, LogWriter, T, ended, events_dropped, seal, started, write_round


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A sound run of two attempts: the first died in the middle of a line, the second went on from a checkpoint."""
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    write_round(log, 0)
    resume_at = log.seq
    write_round(log, 1)
    log.write(b'{"v":1,"ru')
    log = LogWriter(tmp_path, attempt=1, first_seq=resume_at)
    log.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000001"))
    write_round(log, 1)
    log.emit(T.RUN_ENDED, ended())
    seal(tmp_path)
    return tmp_path


def test_a_sound_run_is_complete_torn_tail_and_second_attempt_included(run: Path) -> None:
    found = check_run(run)
    assert found.problems == ()
    assert found.complete
    assert found.torn_tail_bytes == 10
    assert found.num_superseded > 0
    assert (found.run, found.group, found.has_end, found.num_missing_seq) == (RUN_ID, "main", True, 0)
    lines = sum(path.read_bytes().count(b"\n") for path in run.glob("events/*.jsonl"))
    assert found.num_lines == lines


FIRST = "events/a000-s0.jsonl"


def second(run: Path) -> Path:
    """The log of the second attempt."""
    (path,) = run.glob("events/a001-*.jsonl")
    return path


def flip_bit(run: Path) -> None:
    path = run / FIRST
    content = bytearray(path.read_bytes())
    content[content.index(b"digits_mlp")] ^= 1
    path.write_bytes(content)


def cut_file(run: Path) -> None:
    path = run / FIRST
    path.write_bytes(path.read_bytes()[:-20])


def spoil_line(run: Path) -> None:
    path = second(run)
    path.write_bytes(path.read_bytes().replace(b'"type": "ROUND_COMPLETED"', b'"type": "ROUND_COMPLETEX"'))


def drop_line(run: Path) -> None:
    path = second(run)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[5:]))


def repeat_line(run: Path) -> None:
    path = second(run)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[2:]))


def drop_end(run: Path) -> None:
    path = second(run)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def other_attempt(run: Path) -> None:
    path = second(run)
    path.write_bytes(path.read_bytes().replace(b'"attempt": 1', b'"attempt": 7', 1))


def stranger(run: Path) -> None:
    path = second(run)
    path.write_bytes(path.read_bytes().replace(RUN_ID.encode(), b"20260101-000000-ffffff"))


def superseded(old: bytes, new: bytes) -> Callable[[Path], object]:
    """Changes the last event of the first attempt, which the second one wrote again, and makes the checksum fit."""

    def change(run: Path) -> None:
        path = run / FIRST
        head, found, tail = path.read_bytes().rpartition(old)
        assert found
        path.write_bytes(head + new + tail)
        seal(run)

    return change


def rename_in_checksum(run: Path) -> None:
    path = run / f"{FIRST}.sha256"
    path.write_text(path.read_text().replace("a000", "a007"))


BREAKS: list[tuple[Callable[[Path], object], str]] = [
    (flip_bit, "a000-s0.jsonl: sha256 mismatch"),
    (cut_file, "a000-s0.jsonl: sha256 mismatch"),
    (lambda run: (run / FIRST).unlink(), "a000-s0.jsonl is missing, although its checksum is there"),
    (lambda run: [path.unlink() for path in run.glob("events/a000*")], "the log of attempt 0 is missing"),
    (lambda run: (run / f"{FIRST}.sha256").unlink(), "a000-s0.jsonl has no checksum"),
    (lambda run: (run / f"{FIRST}.sha256").write_text("{"), "a000-s0.jsonl: sha256 mismatch"),
    (rename_in_checksum, "a000-s0.jsonl: its checksum is that of another file, a007-s0.jsonl"),
    (lambda run: second(run).with_suffix(".jsonl.sha256").unlink(), "a001-s.* has no checksum"),
    (spoil_line, r"a001-s\d+.jsonl at byte \d+: .*ROUND_COMPLETEX"),
    (drop_line, r"seq \d+ to \d+ are missing, and EVENTS_DROPPED does not explain"),
    (repeat_line, r"a001-s\d+.jsonl at byte \d+: seq \d+ comes twice or too late"),
    (drop_end, "no end marker"),
    (other_attempt, r"a001-s\d+.jsonl at byte \d+: attempt 7 in the file of attempt 1"),
    (
        superseded(b'"group": "main"', b'"group": "pilot"'),
        r"a000-s0.jsonl at byte \d+: run .* of group pilot in the log",
    ),
    (superseded(RUN_ID.encode(), b"other"), r"a000-s0.jsonl at byte \d+: run other of group main in the log of"),
    (superseded(b'"attempt": 0', b'"attempt": 9'), r"a000-s0.jsonl at byte \d+: attempt 9 in the file of attempt 0"),
    (stranger, r"run 20260101-000000-ffffff of group main in the log of"),
]


@pytest.mark.parametrize(("damage", "message"), BREAKS, ids=lambda part: part if isinstance(part, str) else "")
def test_every_kind_of_damage_is_found_and_named(damage: Callable[[Path], object], message: str, run: Path) -> None:
    damage(run)
    found = check_run(run)
    assert not found.complete
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("; ".join(found.problems))


@pytest.mark.parametrize(("counts", "sound"), [({"ACTION_TAKEN": 2, "EPOCH_COMPLETED": 1}, True), ({"A": 2}, False)])
def test_a_gap_is_sound_exactly_if_the_log_explains_it(counts: dict[str, int], sound: bool, tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.seq += 1
    log.emit(T.RUN_STARTED, started())
    log.seq += 2
    log.emit(T.EVENTS_DROPPED, events_dropped(counts=counts, first_seq=1, last_seq=4))
    log.emit(T.RUN_ENDED, ended())
    seal(tmp_path)
    found = check_run(tmp_path)
    assert found.num_missing_seq == 3
    assert found.complete is sound, found.problems


def test_a_log_that_is_being_written_needs_no_checksum_yet(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    write_round(log, 0)
    assert check_run(tmp_path).damage == ()
    log.emit(T.RUN_ENDED, ended())
    seal(tmp_path)
    LogWriter(tmp_path, attempt=1, first_seq=log.seq).path.touch()
    assert check_run(tmp_path).complete, "a new attempt that has written nothing yet"


def log_with_a_gap(folder: Path, reported: list[range], *, lost: int) -> None:
    """A run that lost events from seq 1 on, and what it tells about that."""
    log = LogWriter(folder)
    log.emit(T.RUN_STARTED, started())
    log.seq += lost
    for seqs in reported:
        drop = events_dropped(counts={"ACTION_TAKEN": len(seqs)}, first_seq=seqs.start, last_seq=seqs.stop - 1)
        log.emit(T.EVENTS_DROPPED, drop)
    log.emit(T.RUN_ENDED, ended())
    seal(folder)


def test_a_gap_that_is_explained_in_part_is_not_explained(tmp_path: Path) -> None:
    log_with_a_gap(tmp_path, [range(1, 3)], lost=3)
    (problem,) = check_run(tmp_path).problems
    assert problem == "seq 1 to 3 are missing, and EVENTS_DROPPED does not explain all of them"


def test_a_loss_that_is_reported_twice_does_not_explain_another(tmp_path: Path) -> None:
    log_with_a_gap(tmp_path, [range(1, 3), range(1, 3)], lost=4)
    (problem,) = check_run(tmp_path).problems
    assert problem.startswith("EVENTS_DROPPED reports seq 1 twice")


def test_an_end_that_something_follows_is_no_end(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.emit(T.RUN_ENDED, ended())
    write_round(log, 0)
    seal(tmp_path)
    assert check_run(tmp_path).problems == ("no end marker: the last event is not RUN_ENDED",)


@given(lost=st.sets(st.integers(1, 60)), reported=st.sets(st.integers(1, 60)))
def test_any_gaps_are_sound_exactly_if_every_loss_is_reported(
    lost: set[int], reported: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Losses are told one by one here, each as a range of its own."""
    folder = tmp_path_factory.mktemp("gaps")
    log = LogWriter(folder)
    lines = [log.line(T.RUN_STARTED, started()) for _ in range(61)]
    lines += [
        log.line(T.EVENTS_DROPPED, events_dropped(counts={"ACTION_TAKEN": 1}, first_seq=seq, last_seq=seq))
        for seq in sorted(reported)
    ]
    lines.append(log.line(T.RUN_ENDED, ended()))
    log.write(b"".join(line for seq, line in enumerate(lines) if seq not in lost))
    seal(folder)
    found = check_run(folder)
    assert found.complete is (lost == reported), found.problems
    assert (found.num_missing_seq, found.num_dropped) == (len(lost), len(reported))
