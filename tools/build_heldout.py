"""Draws the list of held-out tasks and stores it whole. It was run once, before anything was measured on the list.

python tools/build_heldout.py

A list that is there is never replaced. Blueprints that came later are offered to new draws, so they would differ.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path

import esper.runtime
from esper.leyline import derive_seed
from esper.runtime import nursery
from esper.runtime.nursery import HELD_OUT, HELD_OUT_FILE, MAX_BLOCKS, MAX_BUDGET, MAX_TRIES, NEVER_OFFERED
from esper.runtime.tasks import TaskSpec, adamw_spec

HELD_OUT_KINDS: tuple[tuple[str, int], ...] = (
    ("fashion", 16),
    ("cifar10", 4),
    ("deeper", 8),
    ("budget", 8),
    ("blueprint", 6),
    ("family", 10),
)


def _draw_held_out(kind: str, number: int) -> TaskSpec:
    position = number + sum(count for name, count in HELD_OUT_KINDS[: _kind_index(kind)])
    name, rng = f"{HELD_OUT}:{position}", random.Random(derive_seed(0, None, number, None, f"{HELD_OUT}:{kind}"))
    if kind in ("fashion", "cifar10"):
        return nursery.finish_task(rng, name, _photos(rng, kind, number))
    for _ in range(MAX_TRIES):
        draft = _draft(rng, kind)
        budget = (MAX_BUDGET, 2 * MAX_BUDGET) if kind == "budget" else None
        must_offer = NEVER_OFFERED[draft.host.kind] if kind == "blueprint" else None
        task = nursery.finish_task(rng, name, draft, budget=budget, must_offer=must_offer)
        if kind != "family" or nursery.is_held_out(nursery.family_of(task)):
            return task
    raise AssertionError("a fifth of the families is held out")


def _kind_index(kind: str) -> int:
    return [name for name, _ in HELD_OUT_KINDS].index(kind)


def _draft(rng: random.Random, kind: str) -> TaskSpec:
    if kind == "deeper":
        classes = nursery.draw_classes(rng)
        host = nursery.draw_cnn(rng, len(classes), rng.randint(MAX_BLOCKS + 1, MAX_BLOCKS + 2), widths=(3, 8))
        return nursery.image_draft(rng, "grow", host, nursery.draw_variant(rng, classes))
    draft = nursery.draw_draft(rng)
    while draft.host.kind == "transformer" and kind == "blueprint":
        draft = nursery.draw_draft(rng)
    return draft


def _photos(rng: random.Random, data: str, number: int) -> TaskSpec:
    """Photographs of clothes or things: 28 or 32 pixels wide. Every fourth host has little left to gain."""
    side, in_channels = (28, 1) if data == "fashion" else (32, 3)
    classes, saturated = nursery.draw_classes(rng), number % 4 == 3
    if saturated or number % 4 == 1:
        inputs = in_channels * side**2
        host = nursery.draw_mlp(rng, len(classes), layers=1, widths=(32, 48) if saturated else (2, 6), inputs=inputs)
    else:
        host = nursery.draw_cnn(
            rng, len(classes), rng.randint(2, 3), widths=(3, 10), side=side, in_channels=in_channels, pools=2
        )
    variant = replace(nursery.draw_variant(rng, classes), train_rows=1_500, pixel_noise=0.0)
    if saturated:
        variant = replace(variant, label_noise=0.0)
    draft = nursery.image_draft(rng, "saturated" if saturated else "grow", host, variant)
    horizon = rng.randint(8, 14)
    return replace(
        draft,
        data=data,
        optimizer=adamw_spec(nursery.log_uniform(rng, 3e-3, 1e-2)),
        horizon=horizon,
        batch_size=50,
        val_samples=800,
    )


def main() -> None:
    """Writes the list, unless there is one."""
    place = Path(esper.runtime.__file__).parent / "data" / HELD_OUT_FILE
    if place.exists():
        sys.exit(f"{place.name} is fixed; nothing was written. A new list is a new study: move the old one away first")
    rows = []
    for kind, count in HELD_OUT_KINDS:
        for number in range(count):
            task = _draw_held_out(kind, number)
            row = {"family": nursery.family_of(task), "why": kind, "sha256": nursery.task_sha256(task)}
            rows.append({**row, "task": asdict(task)})
    place.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
