"""The tables that `esper query` offers, as SQL over the lines of the log. Columns come from the payload records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from esper.karn.columns import flat_columns, line_type, struct_type
from esper.leyline import (
    EVENTS,
    Check,
    ChoiceCount,
    CoalitionRow,
    HeadDecision,
    HeadUpdate,
    LoggedEvent,
    PhaseTime,
    Scope,
    SlotState,
    TelemetryEventType,
)

T = TelemetryEventType
MIN_EPISODES = 10
"""Episodes below which a correlation says nothing."""

_PER_COALITION = ("rows", "contribution_pp", "interaction_pp", "shapley_pp")
_STAMP = 'run, "group", seq, wall'
_IDS = {
    Scope.RUN: "",
    Scope.ROUND: ", round",
    Scope.ENV: ", round, env, episode, epoch",
    Scope.ROUND_OR_ENV: ", round, env, episode, epoch",
}


def view_statements() -> Iterator[str]:
    """Every CREATE VIEW, in an order in which each finds what it needs."""
    for kind in T:
        yield f"CREATE VIEW {typed(kind)} AS {_typed(kind)}"
    for name, text in VIEWS.items():
        yield f"CREATE VIEW {name} AS {text}"


def typed(kind: TelemetryEventType) -> str:
    """The name of the view with all events of one type, payload as a struct."""
    return f"typed.{kind.value.lower()}"


def _typed(kind: TelemetryEventType) -> str:
    shape = json.dumps(line_type(EVENTS[kind].payload))
    assert "'" not in shape
    return f"SELECT line.* FROM (SELECT from_json(line, '{shape}') AS line FROM lines WHERE type = '{kind.value}')"


def _plain(kind: TelemetryEventType, *, without: tuple[str, ...] = (), also: str = "") -> str:
    """One row per event: who, when, where, and the payload's fields."""
    spec = EVENTS[kind]
    columns = ", ".join(flat_columns(spec.payload, without=without))
    return f"SELECT {_STAMP}{_IDS[spec.scope]}, {columns}{also} FROM {typed(kind)} ORDER BY run, seq"


def _graded(kind: TelemetryEventType, *, without: tuple[str, ...] = (), also: str = "") -> str:
    """The same, with how urgently a person should look: for events of which some are urgent."""
    return _plain(kind, without=without, also=f"{also}, severity")


def _each(kind: TelemetryEventType, parts: str, columns: str) -> str:
    """One row per entry of a list in the payload, in its order; the entry is called `part`."""
    ids = _IDS[EVENTS[kind].scope]
    entries = f"unnest({parts}) WITH ORDINALITY AS parts(part, place)"
    return f"SELECT {_STAMP}{ids}, {columns} FROM {typed(kind)}, {entries} ORDER BY run, seq, place"


def _by_key(kind: TelemetryEventType, mapping: str, key: str, record: Any) -> str:
    """One row per entry of a mapping of records in the payload."""
    columns = ", ".join((f"part.key AS {key}", *flat_columns(record, path="part.value")))
    return _each(kind, f"map_entries(data.{mapping})", columns)


_RUNS = f"""
WITH begun AS (SELECT * FROM {typed(T.RUN_STARTED)} QUALIFY row_number() OVER (PARTITION BY run ORDER BY seq DESC) = 1),
     ended AS (SELECT * FROM {typed(T.RUN_ENDED)} QUALIFY row_number() OVER (PARTITION BY run ORDER BY seq DESC) = 1)
SELECT begun.run, begun."group", begun.seq, begun.wall, begun.attempt,
       {", ".join(flat_columns(EVENTS[T.RUN_STARTED].payload, path="begun.data"))},
       {", ".join(flat_columns(EVENTS[T.RUN_ENDED].payload, path="ended.data"))}
FROM begun LEFT JOIN ended ON ended.run = begun.run AND ended.attempt = begun.attempt
ORDER BY begun.run
"""

_SEEDS = f"""
SELECT born.run, born."group", born.seq, born.wall, born.round, born.env, born.episode,
       born.data.seed_id AS seed_id, born.data.slot_id AS slot_id, born.data.blueprint AS blueprint,
       born.data.blend AS blend, born.data.params AS params, born.epoch AS born_epoch, gone.epoch AS end_epoch,
       coalesce(gone.fate, 'alive') AS fate, gone.data.from_stage AS end_stage,
       gone.data.epochs_total AS epochs_total, gone.data.contribution_pp AS contribution_pp
FROM {typed(T.SEED_GERMINATED)} AS born
LEFT JOIN (SELECT *, 'fossilized' AS fate FROM {typed(T.SEED_FOSSILIZED)}
           UNION ALL SELECT *, 'pruned' AS fate FROM {typed(T.SEED_PRUNED)}) AS gone
ON gone.run = born.run AND gone.data.seed_id = born.data.seed_id
ORDER BY born.run, born.seq
"""

_SEED_HISTORY = f"""
SELECT {_STAMP}{_IDS[Scope.ENV]}, data.seed_id AS seed_id, data.slot_id AS slot_id, from_stage, to_stage, cause
FROM (SELECT *, 'DORMANT' AS from_stage, 'GERMINATED' AS to_stage, data.initiator AS cause
      FROM {typed(T.SEED_GERMINATED)}
      UNION ALL BY NAME
      SELECT *, data.from_stage AS from_stage, data.to_stage AS to_stage, data.cause AS cause
      FROM {typed(T.SEED_STAGE_CHANGED)}
      UNION ALL BY NAME
      SELECT *, data.from_stage AS from_stage, 'FOSSILIZED' AS to_stage, data.initiator AS cause
      FROM {typed(T.SEED_FOSSILIZED)}
      UNION ALL BY NAME
      SELECT *, data.from_stage AS from_stage, 'PRUNED' AS to_stage, data.initiator AS cause
      FROM {typed(T.SEED_PRUNED)})
ORDER BY run, seq
"""

_SAFETY = f"""
SELECT *, 'governor' AS source FROM ({_graded(T.GOVERNOR_STATE_CHANGED)})
UNION ALL BY NAME
SELECT *, 'reward_hacking' AS source FROM ({_graded(T.REWARD_HACKING_SUSPECTED)})
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

_CHOICES = _each(
    T.CHOICE_STATS,
    "map_entries(data.choices)",
    "data.head AS head, data.num_decisions AS num_decisions, data.num_forced AS num_forced, part.key AS choice, "
    + ", ".join(flat_columns(ChoiceCount, path="part.value")),
)

_PROFILE = _each(
    T.PROFILE_MEASURED,
    "map_entries(data.phases)",
    ", ".join(flat_columns(EVENTS[T.PROFILE_MEASURED].payload, without=("phases", "cuda")))
    + ", part.key AS phase, "
    + ", ".join(flat_columns(PhaseTime, path="part.value")),
)

_DECISION_HEADS = _each(
    T.ACTION_TAKEN,
    "map_entries(data.heads)",
    "part.key AS head, CASE part.key WHEN 'op' THEN data.op WHEN 'slot' THEN data.slot_id "
    "WHEN 'blueprint' THEN data.blueprint ELSE data.blend END AS choice, "
    + ", ".join(flat_columns(HeadDecision, path="part.value")),
)

_GATES = _each(
    T.GATE_EVALUATED,
    "CASE WHEN len(data.checks) = 0 THEN [NULL] ELSE data.checks END",  # a gate that has opened is a row as well
    "data.seed_id AS seed_id, data.slot_id AS slot_id, data.gate AS gate, data.target_stage AS target_stage, "
    "data.passed AS gate_passed, " + ", ".join(flat_columns(Check, path="part")),
)

_COALITIONS = _each(
    T.COALITION_MEASURED,
    "data.rows",
    ", ".join(flat_columns(EVENTS[T.COALITION_MEASURED].payload, without=_PER_COALITION))
    + ", "
    + ", ".join(flat_columns(CoalitionRow, path="part")),
)

_ATTRIBUTIONS = _each(
    T.COALITION_MEASURED,
    "map_entries(data.contribution_pp)",
    "part.key AS slot_id, part.value AS contribution_pp, data.shapley_pp[part.key] AS shapley_pp",
)

_ENVELOPE = struct_type(LoggedEvent, data="JSON")
_EVENTS = f"""
SELECT run, "group", seq, wall, mono, attempt, type, severity, round, env, episode, epoch, data
FROM (SELECT line.* FROM (SELECT from_json(line, '{json.dumps(_ENVELOPE)}') AS line FROM lines)) ORDER BY run, seq
"""

VIEWS: dict[str, str] = {
    "events": _EVENTS,
    "runs": _RUNS,
    "rounds": _plain(T.ROUND_COMPLETED),
    "episodes": _plain(T.EPISODE_COMPLETED),
    "trends": _graded(T.TREND_DETECTED),
    "epochs": _plain(T.EPOCH_COMPLETED, without=("slots", "debug")),
    "slots": _by_key(T.EPOCH_COMPLETED, "slots", "slot_id", SlotState),
    "decisions": _plain(T.ACTION_TAKEN, without=("heads", "components")),
    "decision_heads": _DECISION_HEADS,
    "reward_terms": _each(T.ACTION_TAKEN, "map_entries(data.components)", "part.key AS term, part.value AS amount"),
    "seeds": _SEEDS,
    "seed_history": _SEED_HISTORY,
    "gates": _GATES,
    "coalitions": _COALITIONS,
    "attributions": _ATTRIBUTIONS,
    "ppo_updates": _graded(T.PPO_UPDATE_COMPLETED, without=("heads", "layers")),
    "ppo_heads": _by_key(T.PPO_UPDATE_COMPLETED, "heads", "head", HeadUpdate),
    "choices": _CHOICES,
    "anomalies": _graded(T.ANOMALY_DETECTED, without=("debug",)),
    "safety": _SAFETY,
    "workers": _graded(T.WORKER_STATE_CHANGED),
    "checkpoints": _graded(T.CHECKPOINT_RECORDED, without=("round",), also=", data.round AS num_rounds"),
    "profile": _PROFILE,
    "drops": _graded(T.EVENTS_DROPPED),
    "blueprint_yield": _BLUEPRINT_YIELD,
    "reward_calibration": _REWARD_CALIBRATION,
}
"""Name -> query. `integrity`, which is no matter of single events, is a table beside them."""
