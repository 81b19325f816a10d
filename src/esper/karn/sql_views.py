"""The tables that `esper query` offers, as SQL over the lines of the log.

Columns come from the payload records, so that a renamed field is an error and not a column of NULLs.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from esper.leyline import (
    EVENTS,
    HEAD_NAMES,
    Check,
    ChoiceCount,
    CoalitionRow,
    HeadDecision,
    HeadUpdate,
    LoggedEvent,
    PhaseTime,
    PPOUpdateMetrics,
    Scope,
    SlotState,
    SlotTally,
    TelemetryEventType,
)

_T = TelemetryEventType
MIN_EPISODES = 10
"""Episodes below which a correlation says nothing."""

SEVERITY = ("severity",)
"""For tables of events of which some are urgent."""
_STAMP = 'run, "group", seq, wall'
_IDS = {
    Scope.RUN: "",
    Scope.ROUND: ", round",
    Scope.ENV: ", round, env, episode, epoch",
    Scope.ROUND_OR_ENV: ", round, env, episode, epoch",
}
_SCALARS: dict[Any, str] = {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", str: "VARCHAR"}


def sql_type(annotation: Any) -> str:
    """The DuckDB type of a field: None disappears, records become structs, mappings become maps."""
    annotation = without_none(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if origin is Literal or (
        isinstance(annotation, type) and issubclass(annotation, str) and issubclass(annotation, Enum)
    ):
        return "VARCHAR"
    if origin is tuple and args[1:] == (Ellipsis,):
        return f"{sql_type(args[0])}[]"
    if origin is not None and issubclass(origin, Mapping):
        return f"MAP({sql_type(args[0])}, {sql_type(args[1])})"
    if is_dataclass(annotation) or is_typeddict(annotation):
        return struct_type(annotation)
    raise TypeError(f"no SQL type for {annotation}")


def struct_type(record: Any, **instead: str) -> str:
    """The struct of a record; `instead` gives fields another type."""
    hints = get_type_hints(record)
    parts = (f"{quoted(name)} {instead[name] if name in instead else sql_type(hints[name])}" for name in hints)
    return f"STRUCT({', '.join(parts)})"


def without_none(annotation: Any) -> Any:
    """The annotation of the value when it is measured."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (arg for arg in get_args(annotation) if arg is not type(None))
    return annotation


def flat_columns(payload: Any, *, without: tuple[str, ...] = (), path: str = "data", prefix: str = "") -> Iterator[str]:
    """A select list with one column per field; a nested record gives one per field of its own, as in `lstm_h_rms`."""
    hints = get_type_hints(payload)
    unknown = set(without) - set(hints)
    assert not unknown, f"{payload.__name__} has no {unknown}"
    for name in hints:
        if name in without:
            continue
        inner, place = without_none(hints[name]), f"{path}.{quoted(name)}"
        if is_dataclass(inner) or is_typeddict(inner):
            yield from flat_columns(inner, path=place, prefix=f"{prefix}{name}_")
        else:
            yield f"{place} AS {quoted(prefix + name)}"


def quoted(name: str) -> str:
    """A name that SQL takes as a name, whatever it means otherwise: `limit` and `group` are among them."""
    return f'"{name}"'


def view_statements() -> Iterator[str]:
    """Every CREATE VIEW, in an order in which each finds what it needs."""
    for kind in _T:
        shape = struct_type(LoggedEvent, data=struct_type(EVENTS[kind].payload))
        lines = _decoded(shape, where=f"type = '{kind.value}'")
        yield f"CREATE VIEW {_typed(kind)} AS {lines}"
    for name, text in VIEWS.items():
        yield f"CREATE VIEW {name} AS {text}"


def _decoded(shape: str, *, where: str) -> str:
    """The lines of the log as structs of this shape."""
    return f"SELECT line.* FROM (SELECT from_json(line, '{json.dumps(shape)}') AS line FROM lines WHERE {where})"


def _typed(kind: TelemetryEventType) -> str:
    """The name of the view with all events of one type, payload as a struct."""
    return f"typed.{kind.value.lower()}"


def _payload(kind: TelemetryEventType, *without: str) -> Iterator[str]:
    return flat_columns(EVENTS[kind].payload, without=without)


def _each_event(kind: TelemetryEventType, *without: str, also: Iterable[str] = ()) -> str:
    """One row per event: run, time, place, and the payload's fields."""
    columns = ", ".join((*_payload(kind, *without), *also))
    return f"SELECT {_STAMP}{_IDS[EVENTS[kind].scope]}, {columns} FROM {_typed(kind)} ORDER BY run, seq"


def _each_part(kind: TelemetryEventType, parts: str, *columns: str) -> str:
    """One row per entry of a list in the payload, in its order; the entry is called `part`."""
    entries = f"unnest({parts}) WITH ORDINALITY AS parts(part, place)"
    chosen = f"{_STAMP}{_IDS[EVENTS[kind].scope]}, {', '.join(columns)}"
    return f"SELECT {chosen} FROM {_typed(kind)}, {entries} ORDER BY run, seq, place"


def _each_key(kind: TelemetryEventType, mapping: str, key: str, record: type, *columns: str) -> str:
    """One row per entry of a mapping of records in the payload: columns of the event, the key, the record's fields."""
    values = flat_columns(record, path="part.value")
    return _each_part(kind, f"map_entries(data.{mapping})", *columns, f"part.key AS {key}", *values)


def _newest(kind: TelemetryEventType) -> str:
    return f"SELECT * FROM {_typed(kind)} QUALIFY row_number() OVER (PARTITION BY run ORDER BY seq DESC) = 1"


_RUNS = f"""
WITH begun AS ({_newest(_T.RUN_STARTED)}), ended AS ({_newest(_T.RUN_ENDED)})
SELECT begun.run, begun."group", begun.seq, begun.wall, begun.attempt,
       {", ".join(flat_columns(EVENTS[_T.RUN_STARTED].payload, path="begun.data"))},
       {", ".join(flat_columns(EVENTS[_T.RUN_ENDED].payload, path="ended.data"))}
FROM begun LEFT JOIN ended ON ended.run = begun.run AND ended.attempt = begun.attempt
ORDER BY begun.run
"""

_SEEDS = f"""
SELECT born.run, born."group", born.seq, born.wall, born.round, born.env, born.episode,
       born.data.seed_id AS seed_id, born.data.slot_id AS slot_id, born.data.blueprint AS blueprint,
       born.data.blend AS blend, born.data.params AS params, born.epoch AS born_epoch, gone.epoch AS end_epoch,
       coalesce(gone.fate, 'alive') AS fate, gone.data.from_stage AS end_stage,
       gone.data.epochs_total AS epochs_total, gone.data.contribution_pp AS contribution_pp
FROM {_typed(_T.SEED_GERMINATED)} AS born
LEFT JOIN (SELECT *, 'fossilized' AS fate FROM {_typed(_T.SEED_FOSSILIZED)}
           UNION ALL SELECT *, 'pruned' AS fate FROM {_typed(_T.SEED_PRUNED)}) AS gone
ON gone.run = born.run AND gone.data.seed_id = born.data.seed_id
ORDER BY born.run, born.seq
"""

_SEED_HISTORY = f"""
SELECT {_STAMP}{_IDS[Scope.ENV]}, data.seed_id AS seed_id, data.slot_id AS slot_id, from_stage, to_stage, cause
FROM (SELECT *, 'DORMANT' AS from_stage, 'GERMINATED' AS to_stage, data.cause AS cause
      FROM {_typed(_T.SEED_GERMINATED)}
      UNION ALL BY NAME
      SELECT *, data.from_stage AS from_stage, data.to_stage AS to_stage, data.cause AS cause
      FROM {_typed(_T.SEED_STAGE_CHANGED)}
      UNION ALL BY NAME
      SELECT *, data.from_stage AS from_stage, 'FOSSILIZED' AS to_stage, data.cause AS cause
      FROM {_typed(_T.SEED_FOSSILIZED)}
      UNION ALL BY NAME
      SELECT *, data.from_stage AS from_stage, 'PRUNED' AS to_stage, data.cause AS cause
      FROM {_typed(_T.SEED_PRUNED)})
ORDER BY run, seq
"""

_SAFETY = f"""
SELECT *, 'governor' AS source FROM ({_each_event(_T.GOVERNOR_STATE_CHANGED, also=SEVERITY)})
UNION ALL BY NAME
SELECT *, 'reward_hacking' AS source FROM ({_each_event(_T.REWARD_HACKING_SUSPECTED, also=SEVERITY)})
ORDER BY run, seq
"""

_BLUEPRINT_YIELD = """
SELECT run, "group", max(seq) AS seq, max(wall) AS wall, blueprint, count(*) AS num_germinated,
       count(*) FILTER (fate = 'fossilized') AS num_fossilized, count(*) FILTER (fate = 'pruned') AS num_pruned,
       avg(contribution_pp) FILTER (fate = 'fossilized') AS mean_contribution_pp
FROM seeds GROUP BY run, "group", blueprint ORDER BY run, blueprint
"""

_REWARD_CALIBRATION = f"""
SELECT run, "group", max(seq) AS seq, max(wall) AS wall, count(*) AS num_episodes,
       CASE WHEN count(*) >= {MIN_EPISODES} THEN corr(return_raw, final_accuracy_pct) END AS pearson_r
FROM episodes WHERE final_accuracy_pct IS NOT NULL GROUP BY run, "group" ORDER BY run
"""

_HEAD_ENTROPY = " ".join(
    [
        "CASE part.key",
        *(f"WHEN '{head}' THEN data.metrics.head_entropies.{head}" for head in HEAD_NAMES),
        "END AS entropy_share",
    ]
)

_UPDATE_METRICS = tuple(flat_columns(PPOUpdateMetrics, without=("heads",), path="data.metrics"))

VIEWS: dict[str, str] = {
    "events": f"""
SELECT run, "group", seq, wall, mono, attempt, type, severity, round, env, episode, epoch, data
FROM ({_decoded(struct_type(LoggedEvent, data="JSON"), where="true")}) ORDER BY run, seq
""",
    "runs": _RUNS,
    "rounds": _each_event(_T.ROUND_COMPLETED),
    "episodes": _each_event(_T.EPISODE_COMPLETED, "slots"),
    "episode_slots": _each_key(_T.EPISODE_COMPLETED, "slots", "slot_id", SlotTally),
    "trends": _each_event(_T.TREND_DETECTED, also=SEVERITY),
    "epochs": _each_event(_T.EPOCH_COMPLETED, "slots", "debug"),
    "slots": _each_key(_T.EPOCH_COMPLETED, "slots", "slot_id", SlotState),
    "decisions": _each_event(_T.ACTION_TAKEN, "heads", "components"),
    "decision_heads": _each_part(
        _T.ACTION_TAKEN,
        "map_entries(data.heads)",
        "part.key AS head",
        "CASE part.key WHEN 'op' THEN data.op WHEN 'slot' THEN data.slot_id "
        "WHEN 'blueprint' THEN data.blueprint ELSE data.blend END AS choice",
        *flat_columns(HeadDecision, path="part.value"),
    ),
    "reward_terms": _each_part(
        _T.ACTION_TAKEN, "map_entries(data.components)", "part.key AS term", "part.value AS amount"
    ),
    "seeds": _SEEDS,
    "seed_history": _SEED_HISTORY,
    "gates": _each_part(
        _T.GATE_EVALUATED,
        "CASE WHEN len(data.checks) = 0 THEN [NULL] ELSE data.checks END",  # a gate that has opened is a row as well
        "data.seed_id AS seed_id, data.slot_id AS slot_id, data.gate AS gate, data.target_stage AS target_stage",
        "data.passed AS gate_passed",
        *flat_columns(Check, path="part"),
    ),
    "coalitions": _each_part(
        _T.COALITION_MEASURED,
        "data.rows",
        *_payload(_T.COALITION_MEASURED, "rows", "contribution_pp", "interaction_pp", "shapley_pp"),
        *flat_columns(CoalitionRow, path="part"),
    ),
    "attributions": _each_part(
        _T.COALITION_MEASURED,
        "map_entries(data.contribution_pp)",
        "part.key AS slot_id, part.value AS contribution_pp, data.shapley_pp[part.key] AS shapley_pp",
    ),
    "ppo_updates": _each_event(_T.PPO_UPDATE_COMPLETED, "metrics", "layers", also=(*_UPDATE_METRICS, *SEVERITY)),
    "ppo_heads": _each_key(_T.PPO_UPDATE_COMPLETED, "metrics.heads", "head", HeadUpdate, _HEAD_ENTROPY),
    "choices": _each_key(_T.CHOICE_STATS, "choices", "choice", ChoiceCount, *_payload(_T.CHOICE_STATS, "choices")),
    "anomalies": _each_event(_T.ANOMALY_DETECTED, "debug", also=SEVERITY),
    "safety": _SAFETY,
    "workers": _each_event(_T.WORKER_STATE_CHANGED, also=SEVERITY),
    "checkpoints": _each_event(_T.CHECKPOINT_RECORDED, "round", also=("data.round AS num_rounds", *SEVERITY)),
    "profile": _each_key(
        _T.PROFILE_MEASURED, "phases", "phase", PhaseTime, *_payload(_T.PROFILE_MEASURED, "phases", "cuda")
    ),
    "drops": _each_event(_T.EVENTS_DROPPED, also=SEVERITY),
    "blueprint_yield": _BLUEPRINT_YIELD,
    "reward_calibration": _REWARD_CALIBRATION,
}
"""Name -> query. `integrity`, which is not made of single events, is a table beside them."""
