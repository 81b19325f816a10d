"""The table of worker kinds: what is in it, how others add to it, and what is said about a name that is not there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from esper.leyline import wait
from esper.simic.training.config import TrainingConfig
from esper.simic.training.rollout import episode_seeds
from esper.simic.training.simulated import build_simulated_worker
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tolaria import kinds
from esper.tolaria.handles import Handle, InlineHandle
from esper.tolaria.kinds import (
    WORKER_KINDS,
    WorkerKind,
    Workers,
    find_worker_kind,
    register_worker_kind,
    worker_kind_names,
)
from esper.tolaria.pool import EnginePool
from esper.tolaria.worker import BuildWorker, Hello
from tests.fakes import world
from tests.simic.training.runs import TINY

OPENED: list[tuple[int | None, str]] = []


@contextmanager
def open_elsewhere(build: BuildWorker, spec: Any, workers: int | None, place: str = "") -> Iterator[Sequence[Handle]]:
    OPENED.append((workers, place))
    yield [InlineHandle(i, build, spec) for i in range(workers or 2)]
    OPENED.append((None, "closed"))


ELSEWHERE = WorkerKind(name="elsewhere", description="a stranger's", open=open_elsewhere, options=("place",))


@pytest.fixture(autouse=True)
def a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "WORKER_KINDS", dict(WORKER_KINDS))
    OPENED.clear()


@pytest.mark.parametrize("name", list(WORKER_KINDS))
def test_every_row_says_what_it_is(name: str) -> None:
    row = find_worker_kind(name)
    assert row.name == name
    assert row.description


def test_a_registered_kind_runs_workers_with_its_options_and_is_closed() -> None:
    register_worker_kind(ELSEWHERE)
    options = {"place": "moon"}
    with EnginePool(build_simulated_worker, world(), kind="elsewhere", workers=3, options=options) as pool:
        pool.reset(episode_seeds(0, 0, 3))
        assert sorted(pool.step([wait(i) for i in range(3)]).reports) == [0, 1, 2]
        assert len(pool.hellos) == 3
    assert OPENED == [(3, "moon"), (None, "closed")]
    with pytest.raises(ValueError, match="already"):
        register_worker_kind(ELSEWHERE)


class OnFirstCore(InlineHandle):
    """A worker in a process of its own that may use one core only."""

    def greet(self) -> Hello:
        return replace(super().greet(), pid=self.worker_id, cores=(0,))


@contextmanager
def open_on_first_core(build: Any, spec: Any, workers: int | None) -> Iterator[list[Handle]]:
    yield [OnFirstCore(worker_id, build, spec) for worker_id in range(workers or 1)]


@pytest.mark.parametrize("one_machine", [True, False])
def test_workers_that_share_a_core_are_reported_where_they_share_a_machine(
    one_machine: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    register_worker_kind(WorkerKind(name="narrow", description="", open=open_on_first_core, shares_files=one_machine))
    EnginePool(build_simulated_worker, world(), kind="narrow", workers=2).close()
    assert ("2 workers share 1 cores" in capsys.readouterr().err) == one_machine


def test_a_training_run_takes_any_registered_kind_and_learns_the_same() -> None:
    register_worker_kind(ELSEWHERE)
    expected, _ = train_ppo_vectorized(TINY)
    agent, _ = train_ppo_vectorized(TINY, worker_kind="elsewhere")
    assert agent.to_files() == expected.to_files()
    assert OPENED[0] == (None, "")


def test_an_installed_distribution_can_offer_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        EntryPoint(name="elsewhere", value="tests.tolaria.test_kinds:ELSEWHERE", group=kinds.ENTRY_POINTS),
        EntryPoint(name="broken", value="tests.tolaria.test_kinds:OPENED", group=kinds.ENTRY_POINTS),
    ]
    monkeypatch.setattr(
        kinds, "entry_points", lambda group, name=None: [e for e in found if name is None or e.name == name]
    )
    assert {"elsewhere", "broken"} <= set(worker_kind_names())
    assert find_worker_kind("elsewhere") is ELSEWHERE
    TrainingConfig(worker_kind="elsewhere")
    with pytest.raises(ValueError, match=r"entry point 'broken' .* must be a WorkerKind"):
        find_worker_kind("broken")


@pytest.mark.parametrize(
    ("place", "words"), [("no_such_module:open", "No module named"), ("esper.leyline:nothing", "nothing")]
)
def test_a_kind_whose_module_is_missing_says_so(place: str, words: str) -> None:
    register_worker_kind(WorkerKind(name="missing", description="not installed", open=place))
    with pytest.raises(ValueError, match=f"worker kind 'missing' cannot be used here: .*{words}"):
        EnginePool(build_simulated_worker, world(), kind="missing")


def test_options_and_counts_that_a_kind_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'inline' has no options address\. Known: none"):
        EnginePool(build_simulated_worker, world(), options={"address": "here"})
    with pytest.raises(ValueError, match="workers must be 1 for kind 'inline', got 2"):
        EnginePool(build_simulated_worker, world(), workers=2)
    with pytest.raises(
        ValueError, match=r"worker_kind must be one of auto, inline, process, ray, simulated.*, got 'thread'"
    ):
        TrainingConfig(worker_kind="thread")


def test_simulated_workers_rehearse_a_task_but_have_no_networks() -> None:
    _, history = train_ppo_vectorized(TINY, worker_kind="simulated", workers=2)
    assert len(history) == TINY.rounds
    with pytest.raises(ValueError, match="'simulated' trains no networks"):
        EnginePool(build_simulated_worker, object(), kind="simulated")


def test_the_table_loads_no_torch() -> None:
    code = "import sys, esper.tolaria.kinds; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_commands_ask_for_is_checked_before_anything_starts() -> None:
    assert [Workers.of(count).row.name for count in (1, 2)] == ["inline", "process"]
    assert Workers(count=3, kind="ray", ray_address="auto").options == {"address": "auto"}
    with pytest.raises(ValueError, match="--workers must be at least 1, got 0"):
        Workers.of(0)
    with pytest.raises(ValueError, match="--ray-address goes with --worker-kind ray, got --worker-kind process"):
        Workers(count=2, kind="process", ray_address="auto")
    with pytest.raises(ValueError, match="unknown worker kind 'thread'"):
        Workers(count=2, kind="thread")
