"""The parts of telemetry as a real session connects them: one run that meets an alarm, stops, and goes on."""

import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from esper.leyline import LoggedEvent
from esper.leyline.rundir import STATUS_FILE
from esper.simic.run.session import start_again, start_new
from esper.simic.telemetry.emitters import brief
from esper.simic.training import vectorized
from tests.telemetry.sessions import BLIND, events_of, nonsense_once, of, play_session
from tests.tolaria.worlds import around_training

FIRST = replace(BLIND, rounds=1, level="debug", exporters=("tensorboard",))
LATER = {"rounds": 3, "level": "normal"}
STEPS = FIRST.envs * FIRST.episode_length
"""Of a round."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What two sessions of one run left."""

    run: Path
    events: list[LoggedEvent]
    lrs: dict[tuple[int, int, int], float]
    """By episode, env and epoch: what the host was trained with."""
    purged: list[int | None]
    """From which env step on each session hid what TensorBoard knew."""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A round at level DEBUG whose update cannot be performed, then two more at NORMAL, in a second session."""
    lrs, purged = {}, []
    build = vectorized.build_worker

    def build_watched(spec, beat):
        worker = build(spec, beat)

        def note_lr(env):
            lrs[env.episode, env.env_id, env.epoch] = env.optimizer.lr

        around_training(worker, before=note_lr)
        return worker

    start = start_new(FIRST, tmp_path_factory.mktemp("runs"), "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectorized, "build_worker", build_watched)
        patch.setitem(sys.modules, "tensorboardX", files_library(purged))
        with nonsense_once():
            play_session(start)
        play_session(start_again(start.run.path, LATER))
    return Resumed(start.run.path, events_of(start.run.path), lrs, purged)


def files_library(purged):
    """Stands in for the library that writes TensorBoard files."""

    class Files:
        def __init__(self, folder, purge_step):
            purged.append(purge_step)

        def add_scalar(self, name, value, step, wall):
            """Nobody looks."""

        flush = close = lambda self: None

    library = ModuleType("tensorboardX")
    library.SummaryWriter = Files
    return library


def test_a_round_is_reported_last_of_all_that_belongs_to_it(resumed):
    assert of(resumed.events, "ANOMALY_DETECTED")
    for number in range(LATER["rounds"]):
        mine = [event.type.value for event in resumed.events if event.round == number]
        assert mine.index("ROUND_COMPLETED") == len(mine) - 1


def test_an_alarm_at_level_debug_brings_its_evidence(resumed):
    alarms = [event for event in of(resumed.events, "ANOMALY_DETECTED") if event.data.kind == "skipped_updates"]
    raised, cleared = (event.data for event in alarms)
    assert (raised.state, cleared.state) == ("entered", "cleared")
    assert raised.debug.stability is not None
    assert raised.debug.ratios is None, "the update looked at none"
    assert cleared.debug is None


def test_a_closer_look_goes_on_where_a_run_is_resumed(resumed):
    """The alarm of the last update before the checkpoint covers the whole next round, which nobody asked to see."""
    looked = [event.data.debug is not None for event in of(resumed.events, "EPOCH_COMPLETED") if event.round == 1]
    assert looked == [True] * STEPS
    (update,) = [event for event in of(resumed.events, "PPO_UPDATE_COMPLETED") if event.round == 1]
    assert update.data.layers


def test_the_learning_rate_reported_of_an_epoch_is_the_one_the_host_was_trained_with(resumed):
    reported = {(e.episode, e.env, e.epoch): e.data.lr for e in of(resumed.events, "EPOCH_COMPLETED")}
    assert reported == {place: brief(lr) for place, lr in resumed.lrs.items()}
    assert len(set(reported.values())) == FIRST.episode_length


def test_points_of_tensorboard_beyond_the_checkpoint_are_hidden_on_resume(resumed):
    assert resumed.purged == [None, STEPS + 1]


def test_the_end_marker_has_the_best_of_all_rounds_and_the_last(resumed):
    rounds = [event.data for event in of(resumed.events, "ROUND_COMPLETED")]
    ended = resumed.events[-1].data
    best = [data.accuracy_best_pct for data in rounds]
    assert ended.best_accuracy_pct == max(best) > min(best)
    assert ended.final_accuracy_pct == rounds[-1].accuracy_mean_pct
    assert (ended.num_rounds_total, ended.num_env_steps_total) == (3, 3 * STEPS)


def test_a_profile_has_the_room_left_where_the_run_lies(resumed):
    total = shutil.disk_usage(resumed.run).total
    room = [event.data.disk_free_bytes for event in of(resumed.events, "PROFILE_MEASURED")]
    assert len(room) == 3
    assert all(0 < free <= total for free in room)


def test_the_last_heartbeat_tells_where_training_was(resumed):
    status = json.loads((resumed.run / STATUS_FILE).read_bytes())
    assert (status["closed"], status["phase"], status["round"]) == (True, "save", 3)
    assert status["last_seq"] == resumed.events[-1].seq
    assert status["median_epoch_s"] > 0.0
