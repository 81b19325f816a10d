"""Learning gates read a log, pass on a sound one and name what is wrong with any other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.leyline import HEAD_NAMES
from esper.scripts.evidence.gates import check_log
from esper.scripts.evidence.training_log import TrainingLog, read_training_log

Event = dict[str, Any]


def update(number: int) -> Event:
    head = {"entropy_share": 0.6, "grad_norm": 0.1, "num_usable": 50, "kl": 0.01, "clip_share": 0.1, "grad_state": "ok"}
    return {
        "performed": True,
        "joint": {"approx_kl": 0.01},
        "critic": {"explained_variance": 0.5, "return_corr": 0.7},
        "heads": {name: dict(head) for name in HEAD_NAMES},
        "target_kl": 0.03,
    }


def episode(number: int) -> Event:
    return {"end": "completed", "return_raw": number / 100 + 0.1 * (number % 7)}


def sound_log() -> list[Event]:
    """Ten rounds of forty episodes and an update."""
    events: list[tuple[str, Event]] = [("RUN_STARTED", {"slot_ids": ["r0c0", "r0c1"]})]
    for number in range(10):
        events += [("EPISODE_COMPLETED", episode(40 * number + k)) for k in range(40)]
        events.append(("PPO_UPDATE_COMPLETED", update(number)))
    return [{"attempt": 0, "seq": seq, "type": kind, "data": data} for seq, (kind, data) in enumerate(events)]


def failed(events: list[Event]) -> list[str]:
    kept = {event["seq"] for event in events}
    log = TrainingLog(events=tuple(events), num_missing=max(kept) + 1 - len(kept))
    return [check.name for check in check_log(log) if check.passed is not True]


def updates(events: list[Event]) -> list[Event]:
    return [event["data"] for event in events if event["type"] == "PPO_UPDATE_COMPLETED"]


def episodes(events: list[Event]) -> list[Event]:
    return [event["data"] for event in events if event["type"] == "EPISODE_COMPLETED"]


def test_a_sound_log_passes_every_gate() -> None:
    assert failed(sound_log()) == []


def _no_rise(events: list[Event]) -> None:
    for number, data in enumerate(episodes(events)):
        data["return_raw"] = 0.1 * (number % 7)


def _blind_critic(events: list[Event]) -> None:
    for data in updates(events)[-2:]:
        data["critic"]["explained_variance"] = 0.1


def _unrelated_critic(events: list[Event]) -> None:
    for data in updates(events):
        data["critic"] = {"explained_variance": None, "return_corr": 0.2}


def _dead_head(events: list[Event]) -> None:
    for data in updates(events)[:2]:
        data["heads"]["blend"]["grad_norm"] = 0.0


def _nan_head(events: list[Event]) -> None:
    for data in updates(events)[:2]:
        data["heads"]["slot"]["grad_norm"] = None


def _unused_head(events: list[Event]) -> None:
    for data in updates(events):
        data["heads"]["blueprint"].update(num_usable=0, entropy_share=None)


def _collapsed_head(events: list[Event]) -> None:
    updates(events)[3]["heads"]["op"]["entropy_share"] = 0.04


def _standing_still(events: list[Event]) -> None:
    for data in updates(events)[:3]:
        data["joint"]["approx_kl"] = 1e-5


def _leaping(events: list[Event]) -> None:
    for data in updates(events)[:3]:
        data["joint"]["approx_kl"] = 0.091


def _rollbacks(events: list[Event]) -> None:
    for data in episodes(events)[:9]:
        data["end"] = "rolled_back"


def _skipped(events: list[Event]) -> None:
    updates(events)[0]["performed"] = False


def _gap(events: list[Event]) -> None:
    del events[5]


@pytest.mark.parametrize(
    ("breaks", "names"),
    [
        (_no_rise, ["return of the last tenth above the first"]),
        (_blind_critic, ["explained variance, median of the last fifth"]),
        (_unrelated_critic, ["correlation of values and returns"]),
        (_dead_head, ["gradient of head blend"]),
        (_nan_head, ["gradient of head slot"]),
        (_unused_head, ["gradient of head blueprint", "entropy of head blueprint, lowest of the first half"]),
        (_collapsed_head, ["entropy of head op, lowest of the first half"]),
        (_standing_still, ["approximate KL"]),
        (_leaping, ["approximate KL"]),
        (_rollbacks, ["rollbacks per 100 episodes"]),
        (_skipped, ["skipped updates"]),
        (_gap, ["events missing in the log"]),
    ],
)
def test_one_thing_wrong_fails_one_gate(breaks: Callable[[list[Event]], None], names: list[str]) -> None:
    events = sound_log()
    breaks(events)
    assert failed(events) == names


def test_with_one_slot_there_is_no_slot_to_choose() -> None:
    events = sound_log()
    for data in updates(events):
        data["heads"]["slot"].update(num_usable=0, entropy_share=None)
    assert failed(events) == ["gradient of head slot", "entropy of head slot, lowest of the first half"]
    events[0]["data"]["slot_ids"] = ["r0c0"]
    assert failed(events) == []


def test_too_short_a_run_is_not_checked_rather_than_passed() -> None:
    events = [event for event in sound_log() if event["seq"] < 42]
    checks = check_log(TrainingLog(events=tuple(events), num_missing=0))
    assert checks[0].passed is None
    (empty,) = check_log(TrainingLog(events=(), num_missing=0))
    assert empty.passed is None


def lines(events: list[Event]) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def test_a_log_is_read_from_all_its_segments(tmp_path: Path) -> None:
    events = sound_log()
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / "a000-p0000.jsonl").write_text(lines(events[:100]))
    (tmp_path / "events.jsonl").write_text(lines(events[100:]) + '{"torn')
    log = read_training_log(tmp_path)
    assert isinstance(log, TrainingLog)
    assert list(log.events) == events
    assert log.num_missing == 0


def test_what_a_later_attempt_took_back_does_not_count(tmp_path: Path) -> None:
    first = [{"attempt": 0, "seq": seq, "type": "T", "data": {"from": 0}} for seq in range(10)]
    second = [{"attempt": 1, "seq": seq, "type": "T", "data": {"from": 1}} for seq in range(4, 8)]
    (tmp_path / "events.jsonl").write_text(lines([*first, *second]))
    log = read_training_log(tmp_path)
    assert isinstance(log, TrainingLog)
    assert [event["data"]["from"] for event in log.events] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_log_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert read_training_log(tmp_path) == "no log"
    (tmp_path / "events.jsonl").write_text("{}\nnot json\n{}\n")
    assert read_training_log(tmp_path) == "events.jsonl is damaged"
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / "a000-p0000.parquet").write_bytes(b"")
    assert read_training_log(tmp_path) == "a000-p0000.parquet is not a plain segment"
