"""Fixed networks are what they are said to be, and train like any host."""

from dataclasses import replace

import pytest

from esper.evidence.host_runs import HostRunner
from esper.evidence.static_networks import SeedChoice, StaticNetwork, can_widen, widened
from esper.leyline import EpisodeSeed
from esper.runtime.tasks import TASKS, count_host_params, get_task_spec, load_task_data, override

SEEDS = [EpisodeSeed(env_id=n, episode=0, run_seed=20_000 + n) for n in range(2)]


def test_a_network_of_kept_seeds_trains_from_the_first_epoch() -> None:
    task = override(get_task_spec("digits_blind"), horizon=3, param_budget=900)
    data = load_task_data(task)
    kept = (
        SeedChoice(slot="r0c0", blueprint="cnn.conv", blend="linear"),
        SeedChoice(slot="r0c1", blueprint="cnn.depthwise", blend="gated"),
    )
    networks = {20_000: StaticNetwork(host=task.host, kept=kept), 20_001: StaticNetwork(host=task.host, kept=())}
    with HostRunner(task, data, networks=networks) as runner:
        grown, bare = runner.run(runner.controller("wait_only"), SEEDS)
    with HostRunner(task, data) as runner:
        _, alone = runner.run(runner.controller("wait_only"), SEEDS)
    assert [(slot.slot_id, slot.blueprint, slot.blend) for slot in grown.reports[0].slots if slot.seed_id] == [
        (seed.slot, seed.blueprint, seed.blend) for seed in kept
    ]
    params = {report.committed_params for report in grown.reports}
    assert len(params) == 1
    assert params.pop() > 194 + 600
    assert not any(report.events for report in grown.reports)
    assert grown.reports[0].train_loss != bare.reports[0].train_loss
    losses = [[report.val_loss for report in run.reports] for run in (bare, alone)]
    assert losses[0] == losses[1], "with nothing in it, it is the host that waits, bit for bit"
    state = grown.model.state_dict()
    assert all(state[f"slots.{seed.slot}.seed.gamma"].abs().sum() > 0 for seed in kept), "its seeds have trained"


def test_every_run_seed_may_have_a_host_of_its_own() -> None:
    task = override(get_task_spec("digits_blind"), horizon=2, param_budget=200)
    wide = widened(task, 700)
    networks = {20_000: StaticNetwork(host=wide, kept=()), 20_001: StaticNetwork(host=task.host, kept=())}
    with HostRunner(task, load_task_data(task), networks=networks) as runner:
        runs = runner.run(runner.controller("wait_only"), SEEDS)
    assert [run.reports[-1].committed_params for run in runs] == [
        count_host_params(replace(task, host=wide, lifecycle=replace(task.lifecycle, param_budget=None))),
        194,
    ]


@pytest.mark.parametrize("slots", [("r0c0", "r0c1"), ("r0c1",)])
def test_a_shallower_network_has_the_slots_that_it_can_have(slots: tuple[str, ...]) -> None:
    task = override(get_task_spec("digits_conv"), horizon=1, slots=slots)
    shallow = replace(task.host, kwargs={**task.host.kwargs, "channels": [4], "pool": [True]})
    networks = {20_000: StaticNetwork(host=shallow, kept=()), 20_001: StaticNetwork(host=task.host, kept=())}
    with HostRunner(task, load_task_data(task), networks=networks) as runner:
        runs = runner.run(runner.controller("wait_only"), SEEDS)
    assert [[slot.slot_id for slot in run.reports[-1].slots] for run in runs] == [["r0c0"], list(slots)]


@pytest.mark.parametrize("name", [name for name in TASKS if name != "tinystories"])
def test_the_wide_host_is_the_narrowest_that_is_large_enough(name: str) -> None:
    task = get_task_spec(name)
    params = int(1.7 * count_host_params(task))
    if not can_widen(task.host):
        with pytest.raises(ValueError, match="cannot be widened: it has no hidden layer"):
            widened(task, params)
        return
    host = widened(task, params)
    found = count_host_params(replace(task, host=host))
    assert found >= params
    assert host.kwargs.keys() == task.host.kwargs.keys()
    assert widened(task, found) == host
    assert widened(task, found + 1) != host
    assert widened(task, 1) == task.host


def test_only_a_host_without_hidden_layers_has_no_width() -> None:
    assert [name for name, task in TASKS.items() if not can_widen(task.host)] == ["digits_limited"]


def test_layers_keep_their_proportions() -> None:
    host = widened(get_task_spec("fashion_tiny"), 9_000)
    first, second, third = host.kwargs["channels"]
    assert (second, third) == (2 * first, 4 * first)
    assert first > 8
