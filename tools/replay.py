"""Compares seeded training runs, weights, history and events, with the stored ones: did a change alter any result?

    make replay            compare
    make replay UPDATE=1   store what this build does, after a change that is meant to alter results

Bits are promised for one kind of processor and one torch version, so the stored runs say where they were made. Events
and history are compared by their values, per event type and without the names of their fields: a rename is no result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from esper.karn.replay import replay
from esper.leyline import EVENTS, TIMING_SUFFIXES, LoggedEvent, TelemetryLevel
from esper.nissa import TelemetryHub
from esper.runtime.data.cifar import FILES as CIFAR_FILES
from esper.simic.run.environment import identity, identity_differences
from esper.simic.run.recorder import open_recorder
from esper.simic.run.run_state import STATE_FILE, run_files
from esper.simic.run.session import RunStart
from esper.simic.telemetry.telemetry_config import TelemetryConfig
from esper.simic.training.config import TrainingConfig
from esper.simic.training.vectorized import open_trainer

STORED = Path(__file__).parent / "replay.json"
DIGITS = TrainingConfig(
    task="digits_blind",
    backend="torch",
    rounds=3,
    envs=4,
    episode_length=10,
    calibration_runs=0,
    worker_kind="inline",
    seed=1,
)
DIGITS_NATIVE = replace(DIGITS, backend="native")
CIFAR_SHAPED = TrainingConfig(
    task="cifar_baseline",
    backend="torch",
    rounds=2,
    envs=2,
    minibatches=2,
    episode_length=8,
    calibration_runs=0,
    worker_kind="inline",
    seed=1,
)
NUM_IMAGES = 60
"""In each file of the CIFAR-shaped data."""


def play_all() -> dict[str, str]:
    """All runs as hashes, by what they cover."""
    with TemporaryDirectory(prefix="esper-") as folder:
        write_noise_as_cifar(Path(folder))
        cifar = play(CIFAR_SHAPED, Path(folder))
    native = {f"native {name}": value for name, value in play(DIGITS_NATIVE).items()}
    return play(DIGITS) | native | {f"cifar {name}": value for name, value in cifar.items()}


def write_noise_as_cifar(folder: Path) -> None:
    """Files in the layout of CIFAR-10, the same every time."""
    draw = np.random.default_rng(7)
    for name in CIFAR_FILES:
        images = draw.integers(0, 256, (NUM_IMAGES, 3072), dtype=np.uint8)
        labels = [row % 10 for row in range(NUM_IMAGES)]
        (folder / name).write_bytes(pickle.dumps({"labels": labels, "data": images}, protocol=2))


def play(config: TrainingConfig, data_dir: Path | None = None) -> dict[str, str]:
    """One run as a few hashes, by what they cover."""
    with TemporaryDirectory(prefix="esper-") as folder:
        with TelemetryHub(Path(folder), run_id="replay") as hub:
            telemetry = TelemetryConfig(level=TelemetryLevel.NORMAL)
            record = partial(open_recorder, RunStart(config=config), hub, telemetry, None)
            with open_trainer(config, record, sink=hub, data_dir=data_dir) as trainer:
                trainer.run()
                files = run_files(trainer)
            assert hub.close().complete, "events were lost"
        events = [event for event in replay(Path(folder)) if isinstance(event, LoggedEvent)]
    history = [asdict(row) for row in trainer.history]
    weights = {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != STATE_FILE}
    return {**weights, "history": _hash([_values(row) for row in history]), **_event_hashes(events)}


def _event_hashes(events: list[LoggedEvent]) -> dict[str, str]:
    """Count and hash of the events of each type that states a training fact."""
    facts = defaultdict(list)
    for event in events:
        if EVENTS[event.type].training_fact:
            ids = [event.round, event.episode, event.env, event.epoch]
            facts[event.type.value].append([*ids, _values(asdict(event.data))])  # type: ignore[call-overload]
    return {f"event {name}": f"{len(rows)} {_hash(rows)}" for name, rows in sorted(facts.items())}


def _values(value: Any) -> list[str]:
    """The measured values anywhere inside, sorted; times differ between runs and are left out."""
    return sorted(json.dumps(leaf, default=str) for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = [part for key, part in value.items() if not str(key).endswith(TIMING_SUFFIXES)]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    elif value is not None:
        yield value


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="store what this build does")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compares, or stores; 0 if nothing differs, 1 if something does, 2 if that cannot be known here."""
    torch.set_num_threads(1)  # sums of several threads have bits of their own
    if parsed(argv).update:
        content = {"identity": identity(), "hashes": play_all()}
        STORED.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sys.stdout.write(f"stored: {STORED.name}\n")
        return 0
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    if differences := identity_differences(stored["identity"], identity()):
        sys.stdout.write(f"not comparable, the stored run was made elsewhere: {'; '.join(differences)}\n")
        return 2
    found = play_all()
    known = stored["hashes"]
    differing = [name for name in {**known, **found} if known.get(name) != found.get(name)]
    sys.stdout.write(f"differs in {', '.join(differing)}\n" if differing else "same bits\n")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
