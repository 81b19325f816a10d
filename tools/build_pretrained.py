"""Chooses a checkpoint of a run over the nursery and makes it the policy that comes with Esper, with its card.

    python tools/build_pretrained.py runs/pretrained --held-out docs/evidence_data/nursery/universal.csv

The checkpoint is the one with the highest mean gain over waiting on draws of the training families that no training
sees. A policy that is not at least as good as the best rule there is not shipped: nothing is written then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pandas as pd

import esper.simic
from esper.evidence.arms import GREEDY, TUNABLE
from esper.evidence.draws import (
    CHOSEN,
    VALIDATION_DRAWS,
    choose_checkpoint,
    judge,
    rule_on_all,
    validation_hosts,
)
from esper.evidence.manifest import code_version
from esper.evidence.many_tasks import estimate, score_runs
from esper.evidence.plan import policy_id
from esper.leyline.files import loads_json
from esper.runtime.nursery import MAX_BUDGET, MAX_HORIZON, MIN_HORIZON, heldout_list
from esper.simic.agent.agent_files import FACTS_FILE, POLICY_FILE
from esper.simic.run.pretrained import CARD_FILE, Card, KnownRange
from esper.simic.run.run_state import LoadedPolicy, load_policy
from esper.simic.training.config import IMITATED_RULE, PRETRAINED


def main() -> None:
    """Judges, chooses, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory of `esper train ppo --preset nursery`")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--held-out", type=Path, help="rows.csv of a study of this policy, for the card")
    asked = parser.parse_args()
    best = choose_checkpoint(asked.run, asked.workers, print)
    gain: float = loads_json((asked.run / CHOSEN).read_bytes())[best.name]
    with validation_hosts(asked.workers) as hosts:
        rules = judge(hosts, {name: rule_on_all(name, {}) for name in TUNABLE}, print)
    rule = max(rules, key=rules.__getitem__)
    if gain < rules[rule]:
        sys.exit(f"not shipped: {best.name} gains {gain:.2f} points over waiting, {rule} {rules[rule]:.2f}")
    policy = load_policy(best)
    scores = {} if asked.held_out is None else held_out_scores(pd.read_csv(asked.held_out), policy_id(policy))
    _write(policy, {**rules, PRETRAINED: gain}, scores)


def held_out_scores(rows: pd.DataFrame, policy: str) -> dict[str, float]:
    """Interquartile means of the scores of this policy and of the rules; empty if the study is of other policies."""
    scored = score_runs(rows.fillna({"policy_id": "", "kept": ""}))
    own = scored[(scored.arm != GREEDY) | (scored.policy_id == policy)]
    if GREEDY not in set(own.arm):
        return {}
    return {PRETRAINED: estimate(own, GREEDY).value} | {name: estimate(own, name).value for name in TUNABLE}


def _write(policy: LoadedPolicy, validation: dict[str, float], held_out: dict[str, float]) -> None:
    config, folder = policy.config, Path(esper.simic.__file__).parent / PRETRAINED
    unseen = json.dumps([[row.task.name, row.sha256] for row in heldout_list()])
    card = Card(
        trained_on="draws of the nursery: digits with variants, teachers, short texts; MLP, CNN and small transformers",
        recipe=(
            f"{config.imitate_rounds} rounds of imitating the rule {IMITATED_RULE!r}, then PPO; {config.groups} tasks "
            f"x {config.envs // config.groups} hosts per round, rewards relative to {config.relative_to}; of four late "
            f"checkpoints the one with the highest gain on {VALIDATION_DRAWS} validation draws"
        ),
        code=code_version(),
        nursery_sha256=hashlib.sha256(unseen.encode()).hexdigest(),
        run_seed=config.seed,
        rounds=policy.rounds,
        episodes=policy.rounds * config.envs,
        host_epochs=policy.host_epochs,
        cpu_hours=policy.training_s / 3600,
        range=KnownRange(
            topologies=("mlp", "cnn"),
            max_budget_ratio=2 * MAX_BUDGET,
            min_horizon=MIN_HORIZON,
            max_horizon=MAX_HORIZON,
            max_classes=10,
        ),
        validation=validation,
        held_out=held_out,
        limits="small hosts of up to about ten thousand parameters; transformers were seldom seen",
    )
    folder.mkdir(exist_ok=True)
    content = policy.agent.to_files()
    for name in (POLICY_FILE, FACTS_FILE):
        (folder / name).write_bytes(content[name])
    (folder / CARD_FILE).write_text(json.dumps(asdict(card), indent=2) + "\n")


if __name__ == "__main__":
    main()
