"""What the pages of a run show, as plain values for JSON: one function per section. Judges nothing, reads no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from esper.karn.console import action_words, clean, describe_payload, figures_of
from esper.karn.diagnosis import Diagnosis
from esper.karn.history import RunHistory, SeedTimeline
from esper.karn.monitor import RunMonitor
from esper.leyline import HEAD_NAMES, LoggedEvent, Severity

MAX_POINTS = 600
"""Points of a curve that are sent; of a longer one, every second, third, ..."""
MAX_SEEDS = 600
MAX_EPISODES = 12
"""Seeds and episodes of the timeline, newest ones."""
NUM_EVENTS, NUM_STEPS, NUM_WARNINGS = 200, 100, 200


def overview(monitor: RunMonitor, found: Sequence[Diagnosis]) -> dict[str, Any]:
    """Verdict, progress, figures and newest warnings."""
    view = monitor.view
    started, last = view.started, view.last_round
    done = len(view.returns)
    round_s = None if last is None else last.data.duration_s
    num_rounds = None if started is None else started.num_rounds
    over = view.ended is not None
    return {
        "run": view.run,
        "folder": str(monitor.run_dir),
        "group": view.group,
        "attempt": view.attempt,
        "task": None if started is None else started.task,
        "controller": None if started is None else started.controller,
        "seed": None if started is None else started.run_seed,
        "verdict": None if monitor.behind else _diagnosis(found[0]),
        "others": [] if monitor.behind else [_diagnosis(one) for one in found[1:] if one.severity is not Severity.INFO],
        "rounds_done": done,
        "num_rounds": num_rounds,
        "round_s": round_s,
        "left_s": None if over or round_s is None or num_rounds is None else round_s * (num_rounds - done),
        "over": over,
        "figures": [[name, text] for name, text in figures_of(view, found[0].state, sparks=False)],
        "warnings": [_event(event) for event in view.warnings],
        "num_warnings": len(monitor.history.warnings),
        "reading": monitor.reading(),
        "passed_over": monitor.passed_over(),
    }


def _diagnosis(one: Diagnosis) -> dict[str, str]:
    return {
        "state": one.state.value,
        "severity": one.severity.value,
        "headline": clean(one.headline),
        "why": clean(one.why),
        "next": clean(one.next),
    }


def curves(monitor: RunMonitor, found: Sequence[Diagnosis]) -> dict[str, Any]:
    """The run by round: columns of one length, with null where nothing was measured."""
    history = monitor.history
    return {"rounds": _round_curves(history), "updates": _update_curves(history)}


def _round_curves(history: RunHistory) -> dict[str, list[Any]]:
    losses: dict[int, list[float]] = {}
    for at, done in history.episodes:
        losses.setdefault(at, []).append(done.final_loss)
    kept = _thin(history.rounds)
    names = (
        "accuracy_mean_pct",
        "accuracy_best_pct",
        "accuracy_worst_pct",
        "rolling_accuracy_pct",
        "committed_accuracy_pct",
        "return_mean",
        "return_std",
        "params_ratio_mean",
        "num_rollbacks",
    )
    found: dict[str, list[Any]] = {name: [getattr(data, name) for _, data in kept] for name in names}
    ends = [losses.get(at, []) for at, _ in kept]
    return {
        "round": [at for at, _ in kept],
        **found,
        "loss_mean": [sum(own) / len(own) if own else None for own in ends],
        "loss_best": [min(own, default=None) for own in ends],
        "loss_worst": [max(own, default=None) for own in ends],
    }


def _update_curves(history: RunHistory) -> dict[str, list[Any]]:
    kept = _thin(history.updates)
    names = (
        "approx_kl",
        "target_kl",
        "policy_loss",
        "value_loss",
        "value_nrmse",
        "explained_variance",
        "clip_fraction",
        "return_corr",
    )
    found: dict[str, list[Any]] = {name: [metrics[name] for _, metrics in kept] for name in names}
    return {
        "round": [at for at, _ in kept],
        **found,
        "max_grad": [metrics["gradient_stats"]["max_grad"] for _, metrics in kept],
        "clip_norm": [metrics["gradient_stats"]["clip_norm"] for _, metrics in kept],
        **{f"entropy_{head}": [metrics["head_entropies"][head] for _, metrics in kept] for head in HEAD_NAMES},
    }


def _thin(rows: Sequence[Any]) -> Sequence[Any]:
    """Every n-th row, counted from the newest."""
    step = -(-len(rows) // MAX_POINTS) or 1
    return rows[::-step][::-1]


def hosts(monitor: RunMonitor, found: Sequence[Diagnosis]) -> dict[str, Any]:
    """One row per host, as of its newest epoch."""
    view = monitor.view
    return {
        "slot_ids": [] if view.started is None else list(view.started.slot_ids),
        "epochs": None if view.started is None else view.started.epochs_per_episode,
        "rows": [
            {
                "env": env,
                "episode": now.event.episode,
                "epoch": now.event.epoch,
                "accuracy_pct": now.data.val_accuracy_pct,
                "committed_pct": now.data.committed_accuracy_pct,
                "loss": now.data.val_loss,
                "params": now.data.params_total,
                "slots": {slot_id: {"stage": slot.stage} for slot_id, slot in now.data.slots.items()},
                "action": None if (action := view.actions.get(env)) is None else action_words(action),
            }
            for env, now in sorted(view.epochs.items())
        ],
    }


def host(monitor: RunMonitor, env: int) -> dict[str, Any] | None:
    """One host in the episode it is in; None if there is no such host."""
    record, now = monitor.hosts.get(env), monitor.view.epochs.get(env)
    if record is None or now is None:
        return None
    return {
        "env": env,
        "episode": record.episode,
        "epochs": {
            "epoch": [event.epoch for event, _ in record.epochs],
            "accuracy_pct": [data.val_accuracy_pct for _, data in record.epochs],
            "committed_pct": [data.committed_accuracy_pct for _, data in record.epochs],
            "loss": [data.val_loss for _, data in record.epochs],
            "params": [data.params_total for _, data in record.epochs],
        },
        "slots": {slot_id: asdict(slot) for slot_id, slot in now.data.slots.items()},
        "gates": {
            slot_id: {
                "gate": gate.data.gate.value,
                "passed": gate.data.passed,
                "seed_id": gate.data.seed_id,
                "failed": [[one.name, one.value, one.limit] for one in gate.data.checks if not one.passed],
            }
            for slot_id, gate in record.gates.items()
        },
        "actions": [
            {
                "epoch": event.epoch,
                "op": data.op,
                "slot_id": data.slot_id,
                "blueprint": data.blueprint,
                "blend": data.blend,
                "forced": data.forced,
                "prob_share": data.heads["op"].prob_share if "op" in data.heads else None,
                "value": data.value,
                "reward": data.reward_raw,
                "components": dict(data.components),
            }
            for event, data in reversed(record.actions)
        ],
        "coalition": None if record.coalition is None else asdict(record.coalition.data),
        "seeds": [_seed(seed) for seed in monitor.seeds_of(env)],
    }


def policy(monitor: RunMonitor, found: Sequence[Diagnosis]) -> dict[str, Any]:
    """The newest update and what each head did in the newest round."""
    last = monitor.view.last_update
    return {
        "num_updates": monitor.view.num_updates,
        "round": None if last is None else last.event.round,
        "update": None if last is None else _plain(last.data.metrics),
        "choices": {head: asdict(stats) for head, stats in monitor.choices.items()},
    }


def _plain(value: Any) -> Any:
    """Records inside of typed dicts as dicts."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def seeds(monitor: RunMonitor, found: Sequence[Diagnosis]) -> dict[str, Any]:
    """What became of each blueprint, and the seeds of the newest episodes."""
    view, all_seeds = monitor.view, monitor.history.seeds
    newest = max((seed.episode for seed in all_seeds), default=0)
    shown = [seed for seed in all_seeds if seed.episode > newest - MAX_EPISODES][-MAX_SEEDS:]
    first = min((seed.episode for seed in shown), default=0)
    if len(shown) == MAX_SEEDS:  # the oldest episode is not whole
        first += first < newest
    return {
        "epochs": None if view.started is None else view.started.epochs_per_episode,
        "first_episode": first,
        "last_episode": newest,
        "blueprints": [
            {
                "name": name,
                "num_germinated": grown.num_germinated,
                "num_fossilized": grown.num_fossilized,
                "num_pruned": grown.num_pruned,
                "mean_contribution_pp": grown.mean_contribution_pp,
            }
            for name, grown in sorted(view.blueprints.items())
        ],
        "seeds": [_seed(seed) for seed in shown if seed.episode >= first],
    }


def _seed(seed: SeedTimeline) -> dict[str, Any]:
    return {
        "env": seed.env,
        "episode": seed.episode,
        "slot_id": seed.birth.slot_id,
        "seed_id": seed.birth.seed_id,
        "blueprint": seed.birth.blueprint,
        "params": seed.birth.params,
        "contribution_pp": seed.contribution_pp,
        "spans": [[span.stage, span.start, span.stop] for span in seed.spans],
    }


def events(monitor: RunMonitor, found: Sequence[Diagnosis]) -> dict[str, Any]:
    """The newest events, newest first; those about single steps and the warnings apart."""
    return {
        "events": _newest(monitor.events, NUM_EVENTS),
        "steps": _newest(monitor.step_events, NUM_STEPS),
        "warnings": _newest(monitor.history.warnings, NUM_WARNINGS),
    }


def _newest(kept: Iterable[LoggedEvent], limit: int) -> list[dict[str, Any]]:
    return [_event(event) for event in list(kept)[: -limit - 1 : -1]]


def _event(event: LoggedEvent) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "wall": event.wall,
        "type": event.type.value,
        "severity": event.severity.value,
        "round": event.round,
        "env": event.env,
        "epoch": event.epoch,
        "text": clean(describe_payload(event.data)),
    }


Section = Callable[[RunMonitor, Sequence[Diagnosis]], dict[str, Any]]
BY_ROUND: dict[str, Section] = {"curves": curves, "policy": policy}
"""Sections that change when a round is over."""
BY_EVENT: dict[str, Section] = {"hosts": hosts, "seeds": seeds, "events": events}
"""Sections that change whenever something happens."""
