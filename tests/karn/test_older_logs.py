"""Logs of older builds: optional fields that these did not know are not measured, everything else is as it was.

`v1_run` is a run of schema version 1 as the trainer wrote it, from whose lines fields that were null are taken out by
hand. It is never made again: it stands for the logs that people have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from esper.karn.codec import LineError, decode_line
from esper.karn.columns import without_none
from esper.karn.integrity import check_run
from esper.karn.process import read_heartbeat
from esper.karn.replay import replay
from esper.leyline import (
    ActionTaken,
    AnomalyDebug,
    EpochCompleted,
    LayerHealth,
    LoggedEvent,
    NumericalStability,
    PPOUpdateCompleted,
    TelemetryEventType,
)
from esper.scripts.cli import main
from tests.karn.logs import PAYLOADS, WALL, LogWriter, T, anomaly, ids_of, layer_stats, ppo_update, read_view
from tests.karn.test_process import write as write_status

OLD = Path(__file__).parent / "v1_run"
TYPES = ("ACTION_TAKEN", "EPOCH_COMPLETED", "SEED_GERMINATED", "SEED_PRUNED", "PPO_UPDATE_COMPLETED")


def of(kind: TelemetryEventType) -> list[Any]:
    return [item.data for item in replay(OLD) if isinstance(item, LoggedEvent) and item.type is kind]


def test_the_stored_log_lacks_fields_of_today() -> None:
    """Otherwise the tests below show nothing."""
    lines = [json.loads(line) for line in (OLD / "events.jsonl").read_text().splitlines()]
    assert {line["v"] for line in lines} == {1}
    assert set(TYPES) <= {line["type"] for line in lines}
    for kind, record, field in (
        ("ACTION_TAKEN", ActionTaken, "seen"),
        ("EPOCH_COMPLETED", EpochCompleted, "debug"),
        ("PPO_UPDATE_COMPLETED", PPOUpdateCompleted, "layers"),
    ):
        assert field in get_type_hints(record)
        assert all(field not in line["data"] for line in lines if line["type"] == kind)
    heads = [head for line in lines if line["type"] == "ACTION_TAKEN" for head in line["data"]["heads"].values()]
    assert heads
    assert all("probs" not in head for head in heads)


def test_it_is_read_whole() -> None:
    items = list(replay(OLD))
    assert len(items) == 27
    assert all(isinstance(item, LoggedEvent) for item in items)
    assert [action.seen for action in of(T.ACTION_TAKEN)] == [None] * 4
    assert {head.probs for action in of(T.ACTION_TAKEN) for head in action.heads.values()} == {None}
    assert [epoch.debug for epoch in of(T.EPOCH_COMPLETED)] == [None] * 4
    assert next(epoch.slots["r0c1"].contribution_pp for epoch in of(T.EPOCH_COMPLETED) if epoch.slots) is None
    assert [action.op for action in of(T.ACTION_TAKEN)] == ["GERMINATE", "ADVANCE", "WAIT", "PRUNE"]


def test_status_tells_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    main(["status", "--json", str(OLD)])
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["state"], told["num_events"], told["num_rounds"]) == ("first", "completed", 27, 1)
    assert told["accuracy_mean_pct"] == pytest.approx(84.24069)
    view = read_view(replay(OLD))
    assert (view.num_bad, view.num_missing, view.num_updates) == (0, 0, 1)
    main(["status", str(OLD)])
    assert "mlp.mlp_wide        1     0       1" in capsys.readouterr().out


def test_queries_answer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb", reason="queries need the extra `runs`")
    text = (
        "select (select count(*) from epochs) as epochs, "
        "(select count(*) from decisions where seen_worst_column is null) as decisions, "
        "(select fate from seeds) as fate, (select round(accuracy_mean_pct, 1) from rounds) as accuracy"
    )
    main(["query", str(OLD), text, "--format", "json"])
    told = capsys.readouterr()
    assert json.loads(told.out) == [{"epochs": 4, "decisions": 4, "fate": "pruned", "accuracy": 84.2}]
    assert told.err == ""


def test_its_record_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_run(OLD).problems == ()
    main(["verify", str(OLD)])
    assert "sound" in capsys.readouterr().out


# ---- every optional field of every payload


def optional_paths(record: Any, tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a tree of JSON values has a field that may be null."""
    for name, hint in get_type_hints(record).items():
        if without_none(hint) is not hint:
            yield (*path, name)
        yield from _inside(without_none(hint), tree[name], (*path, name))


def _inside(hint: Any, tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if tree is None:
        return
    if is_dataclass(hint):
        yield from optional_paths(hint, tree, path)
    elif isinstance(tree, list):
        for place, part in enumerate(tree):
            yield from _inside(hint.__args__[0], part, (*path, place))
    elif isinstance(tree, dict):
        for key, part in tree.items():
            yield from _inside(hint.__args__[1], part, (*path, key))


def parent_of(tree: Any, path: tuple[Any, ...]) -> Any:
    for part in path[:-1]:
        tree = tree[part]
    return tree


def full(kind: TelemetryEventType) -> object:
    """A payload with as many nested records as there can be."""
    if kind is T.PPO_UPDATE_COMPLETED:
        return ppo_update(layers=(layer_stats(),))
    if kind is T.ANOMALY_DETECTED:
        layers = LayerHealth(
            num_layers=2, num_dead=0, num_exploding=0, num_nonfinite=0, min_norm=0.1, max_norm=0.2, worst_layer="a"
        )
        stability = NumericalStability(
            num_tensors=2,
            num_nonfinite_weights=0,
            num_nonfinite_gradients=0,
            max_abs_weight=1.0,
            max_abs_gradient=2.0,
            nonfinite_tensors=(),
        )
        return anomaly(debug=AnomalyDebug(layers=layers, stability=stability, ratios=(7.0,), num_ratios_out_of_range=1))
    return PAYLOADS[kind]()


@pytest.mark.parametrize("kind", list(TelemetryEventType))
def test_any_optional_field_may_be_absent_and_no_other(kind: TelemetryEventType, tmp_path: Path) -> None:
    payload = full(kind)
    line = LogWriter(tmp_path).line(kind, payload, **ids_of(kind))
    optional = set(optional_paths(type(payload), json.loads(line)["data"]))
    for path in optional:
        null, absent = json.loads(line), json.loads(line)
        parent_of(null["data"], path)[path[-1]] = None
        del parent_of(absent["data"], path)[path[-1]]
        assert decode_line(json.dumps(absent).encode()) == decode_line(json.dumps(null).encode()), path
    for name in get_type_hints(type(payload)):
        if (name,) not in optional:
            entry = json.loads(line)
            del entry["data"][name]
            with pytest.raises(LineError, match=f"missing required field `{name}`"):
                decode_line(json.dumps(entry).encode())


def test_fields_may_be_absent_beside_numbers_that_are_not_finite(tmp_path: Path) -> None:
    entry = json.loads(LogWriter(tmp_path).line(T.PPO_UPDATE_COMPLETED, ppo_update(), round=0))
    entry["data"]["losses"]["value"] = None
    entry["nonfinite"] = {"/losses/value": "inf"}
    del entry["data"]["lstm"], entry["data"]["heads"]["op"]["kl"]
    back = decode_line(json.dumps(entry).encode()).data
    assert isinstance(back, PPOUpdateCompleted)
    assert (back.losses.value, back.lstm, back.heads["op"].kl) == (float("inf"), None, None)


def test_a_heartbeat_of_an_older_build_is_read(tmp_path: Path) -> None:
    write_status(tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    del status["median_epoch_s"]
    (tmp_path / "status.json").write_text(json.dumps(status))
    found = read_heartbeat(tmp_path, WALL)
    assert found is not None
    assert found.status.median_epoch_s is None
