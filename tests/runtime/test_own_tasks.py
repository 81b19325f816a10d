"""Tasks of the user's own: found by name in any process, trained like the bundled ones, refused with words."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.leyline import EpisodeSeed, wait
from esper.leyline.references import load_function, name_of
from esper.leyline.scale import MetricScale
from esper.runtime.own import user_host
from esper.runtime.tasks import get_task_spec, load_task_data, load_tasks_data
from esper.simic.training.action_execution import execute_actions, observe_reset
from esper.simic.training.env_factory import build_worker, make_worker_spec
from esper.simic.training.native_executor import NativeExecutor
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tolaria.pool import EnginePool
from tests.runtime import sines
from tests.simic.training.runs import TINY
from tests.tolaria.worlds import act, digest

FILE = Path(sines.__file__)
TASK = f"{FILE}:make_task"


def play(kind: str, workers: int, task: object = None, epochs: int = 6) -> tuple[list[object], dict[int, str]]:
    spec = get_task_spec(TASK) if task is None else task
    with EnginePool(build_worker, make_worker_spec(spec, load_task_data(spec)), kind=kind, workers=workers) as pool:
        state = observe_reset(pool, [EpisodeSeed(env_id=i, episode=0, run_seed=3) for i in range(2)])
        seen = [state.reports]
        for epoch in range(epochs):
            first = {0: act(0, "GERMINATE", "r0c0", "mlp.mlp", "linear_fast"), 1: act(0, "ADVANCE", "r0c0")}
            state = execute_actions(pool, [first.get(epoch, wait(0)), wait(1)])
            seen.append(state.reports)
        return seen, digest(pool)


def test_a_regression_is_trained_and_measured_on_the_scale_of_controllers() -> None:
    seen, _ = play("inline", 1)
    task = get_task_spec(TASK)
    data = load_task_data(task)
    untrained, last = seen[0][1], seen[-1][1]
    assert last.val_loss < 0.6 * untrained.val_loss
    floor = 100.0 / 10
    share = (last.val_accuracy_pct - floor) / (100.0 - floor)
    mse = last.val_loss / task.scale.nats_per_loss
    assert share == pytest.approx(1.0 - mse / float(data.train.targets.var()), abs=1e-6), "R² of the validation rows"
    assert untrained.train_loss is None
    assert 0.0 < last.train_accuracy_pct < 100.0
    grown = seen[-1][0]
    assert grown.slots[0].contribution_pp is not None
    assert grown.coalitions.loss[0] != grown.coalitions.loss[1]


def test_workers_in_other_processes_find_it_by_name_and_get_the_same_bits() -> None:
    inline, process = play("inline", 1, epochs=3), play("process", 1, epochs=3)
    assert inline[1] == process[1]
    assert pickle.loads(pickle.dumps(get_task_spec(TASK))) == get_task_spec(TASK)


def test_the_controller_learns_on_it_and_compiled_code_leaves_it_to_torch(capsys: pytest.CaptureFixture[str]) -> None:
    _, history = train_ppo_vectorized(TINY, task=TASK, backend="auto")
    assert [summary.update_performed for summary in history] == [True, True]
    worker = build_worker(make_worker_spec(get_task_spec(TASK), load_task_data(get_task_spec(TASK))), lambda e, b: None)
    worker.reset([EpisodeSeed(env_id=0, episode=0, run_seed=0)])
    assert NativeExecutor().why_not(worker.envs[0]) == "it has a loss or metric of the user's own"


def test_a_metric_of_ones_own_is_read_on_its_scale() -> None:
    scale = MetricScale(name="error", guess=2.0, best=0.0, guess_loss=1.0)
    task = sines.make_task(metric=f"{FILE}:mean_absolute", scale=scale)
    seen, _ = play("inline", 1, task, epochs=1)
    last = seen[-1][1]
    error = 2.0 - (last.val_accuracy_pct - 10.0) / 90.0 * 2.0
    assert 0.1 < error < 2.5
    assert error**2 < last.val_loss / scale.nats_per_loss, "the mean error is below the root of the mean squared one"


def test_weights_follow_from_the_seed_and_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    seen, other = play("inline", 1, epochs=0), play("inline", 1, epochs=0)
    assert seen[1] == other[1]
    assert seen[1][0] != seen[1][1]
    assert torch.equal(torch.get_rng_state(), state)


def test_it_shares_a_pool_with_bundled_tasks() -> None:
    tasks = [get_task_spec(TASK), get_task_spec("digits_limited")]
    with EnginePool(build_worker, make_worker_spec(tasks, load_tasks_data(tasks))) as pool:
        seeds = [EpisodeSeed(env_id=i, episode=0, run_seed=3, task=task.name) for i, task in enumerate(tasks)]
        state = observe_reset(pool, seeds)
        assert [context.num_classes for context in state.contexts] == [10, 10]
        execute_actions(pool, [wait(0), wait(1)])


# ---- names


def nested():
    def inner():
        return None

    return inner


@pytest.mark.parametrize(
    ("thing", "words"), [(lambda: None, "no lambda"), (nested(), "at the top level"), (torch.nn.Linear(1, 1), "by its")]
)
def test_what_no_worker_could_find_is_refused(thing: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        name_of(thing)


def test_a_function_of_an_interactive_session_is_refused() -> None:
    space = {"__name__": "__main__"}
    exec("def make(): return None", space)
    with pytest.raises(ValueError, match=r"interactive session\. Put it into a file"):
        name_of(space["make"])


def test_functions_of_files_and_modules_have_names() -> None:
    loaded = load_function(f"{FILE}:make_host")
    assert name_of(loaded) == f"{FILE.resolve()}:make_host"
    assert name_of(torch.nn.functional.mse_loss) == "torch.nn.functional:mse_loss"
    assert load_function(name_of(sines.make_host)) is sines.make_host


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("nowhere.py:make", "there is no such file"),
        ("no_such_package:make", "module 'no_such_package' cannot be imported here"),
        (f"{FILE}:nothing", "has no function 'nothing'; it has .*make_task"),
        (f"{FILE}:make_number", "must return a TaskSpec, got int"),
        ("nameless", "your own as FILE.py:FUNCTION"),
    ],
)
def test_a_task_that_cannot_be_found_is_refused_with_words(where: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get_task_spec(where)


def bad_data():
    return 1, 2, 3


def wrong_shape(outputs, targets):
    return (outputs - targets).square()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": None}, "needs scale="),
        ({"num_classes": 3}, "num_classes must be that of the scale, 10, got 3"),
        ({"metric": "beauty"}, "unknown metric 'beauty'"),
        ({"data": f"{__name__}:bad_data"}, "train must be .inputs, targets., two tensors"),
        ({"data": f"{FILE}:make_number"}, "must return .train, validation. .*got int"),
        ({"loss": f"{__name__}:wrong_shape"}, "must return the mean over rows, a finite scalar"),
        ({"loss": "torch.nn.functional:nll_loss"}, "cannot take outputs"),
        ({"slots": ("r0c1",)}, "slots of sines must be among those of its host"),
        ({"host": user_host(sines.make_host, "cnn"), "blueprints": ("cnn.conv",)}, "must return a cnn host"),
        ({"host": user_host(sines.make_number, "mlp")}, "such as one by wrap_sequential; got int"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_words(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_task_data(sines.make_task(**changes))


def test_rows_of_another_width_are_refused_with_words() -> None:
    task = sines.make_task()
    with pytest.raises(ValueError, match="the host of sines cannot take rows"):
        load_task_data(replace(task, data=f"{__name__}:wide_data"))


def wide_data():
    (inputs, targets), *rest = sines.make_data()
    return [(inputs.repeat(1, 2), targets), *rest]
