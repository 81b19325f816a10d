"""A run in full: the stages of seeds, and everything a report counts."""

from __future__ import annotations

from pathlib import Path

from esper.karn.history import RunHistory, SeedTimeline, StageSpan, read_history
from esper.karn.replay import replay
from esper.leyline import Severity
from tests.karn.logs import (
    LogWriter,
    T,
    anomaly,
    episode_completed,
    epoch_completed,
    germinated,
    seed_ended,
    stage_changed,
    started,
    write_run,
)


def spans(seed: SeedTimeline) -> list[tuple[str, int, int]]:
    return [(span.stage, span.start, span.stop) for span in seed.spans]


def live(log: LogWriter, slot: str, moves: list[tuple[int, str]], *, env: int = 0, episode: int = 0) -> None:
    """Plants a seed and moves it; each move is an epoch and the stage that begins there."""
    seed_id = f"{env}.{episode}.{slot}.0"
    stage = "GERMINATED"
    for epoch, target in moves:
        where = {"round": episode, "episode": episode, "env": env, "epoch": epoch}
        if target == "GERMINATED":
            log.emit(T.SEED_GERMINATED, germinated(seed_id=seed_id, slot_id=slot), **where)
        elif target in ("FOSSILIZED", "PRUNED"):
            kind = T.SEED_FOSSILIZED if target == "FOSSILIZED" else T.SEED_PRUNED
            log.emit(kind, seed_ended(seed_id=seed_id, slot_id=slot, from_stage=stage), **where)
        else:
            moved = stage_changed(seed_id=seed_id, slot_id=slot, from_stage=stage, to_stage=target)
            log.emit(T.SEED_STAGE_CHANGED, moved, **where)
        stage = target


def read(folder: Path) -> RunHistory:
    return read_history(replay(folder))


def test_a_seed_lives_through_its_stages_and_a_fossil_stays_to_the_end(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started(epochs_per_episode=9))
    live(log, "r0c0", [(0, "GERMINATED"), (0, "TRAINING"), (2, "BLENDING"), (5, "HOLDING"), (6, "FOSSILIZED")])
    live(log, "r0c1", [(1, "GERMINATED"), (1, "TRAINING"), (3, "PRUNED"), (4, "EMBARGOED"), (6, "DORMANT")])
    live(log, "r0c2", [(7, "GERMINATED"), (7, "TRAINING")])
    log.emit(T.EPISODE_COMPLETED, episode_completed(num_epochs=9), round=0, episode=0, env=0, epoch=8)
    fossil, pruned, alive = read(tmp_path).seeds
    assert spans(fossil) == [
        ("GERMINATED", 0, 0),
        ("TRAINING", 0, 2),
        ("BLENDING", 2, 5),
        ("HOLDING", 5, 6),
        ("FOSSILIZED", 6, 9),
    ]
    # What the slot does after the prune is no longer the seed's life.
    assert spans(pruned) == [("GERMINATED", 1, 1), ("TRAINING", 1, 3), ("PRUNED", 3, 3)]
    assert spans(alive) == [("GERMINATED", 7, 7), ("TRAINING", 7, 9)]


def test_an_episode_that_ends_ends_only_the_seeds_of_its_env(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    live(log, "r0c0", [(0, "GERMINATED"), (1, "TRAINING")], env=0)
    live(log, "r0c0", [(0, "GERMINATED"), (1, "TRAINING")], env=1)
    log.emit(T.EPISODE_COMPLETED, episode_completed(num_epochs=2), round=0, episode=0, env=0, epoch=1)
    live(log, "r0c0", [(0, "GERMINATED")], env=0, episode=1)
    first, other, second = read(tmp_path).seeds
    assert first.spans[-1] == StageSpan(stage="TRAINING", start=1, stop=2)
    assert other.spans[-1] == StageSpan(stage="TRAINING", start=1, stop=1)
    assert second.episode == 1


def test_seeds_of_an_episode_without_end_reach_to_its_newest_epoch(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    live(log, "r0c0", [(0, "GERMINATED"), (1, "TRAINING")], env=0)
    live(log, "r0c0", [(0, "GERMINATED")], env=1)
    for epoch in range(5):
        log.emit(T.EPOCH_COMPLETED, epoch_completed(), round=0, episode=0, env=0, epoch=epoch)
    log.emit(T.EPOCH_COMPLETED, epoch_completed(), round=0, episode=0, env=1, epoch=0)
    first, other = read(tmp_path).seeds
    assert first.spans[-1] == StageSpan(stage="TRAINING", start=1, stop=5)
    assert other.spans[-1] == StageSpan(stage="GERMINATED", start=0, stop=1)


def test_everything_is_counted(tmp_path: Path) -> None:
    log = write_run(tmp_path, rounds=3)
    log.write(b"damage\n")
    history = read(tmp_path)
    assert [number for number, _ in history.rounds] == [0, 1, 2]
    assert [number for number, _ in history.updates] == [0, 1, 2]
    assert len(history.episodes) == 6
    assert len(history.seeds) == 6
    assert history.warnings == []
    assert history.view.num_bad == 1
    seq = log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=3)
    assert [event.seq for event in read(tmp_path).warnings] == [seq]
