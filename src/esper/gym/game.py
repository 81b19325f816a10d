"""Episodes in a pool of workers, each of which begins and ends by itself, as observations, masks and rewards.

Knows nothing of Gymnasium: envs and vector envs are made of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from esper.evidence.sandbox_training import SandboxPricing
from esper.evidence.sandboxes import SANDBOXES
from esper.gym.choices import joint_choices, legal_choices
from esper.leyline import (
    ActionMasks,
    ActionOutcome,
    ActionSpec,
    EpisodeSeed,
    EpochReport,
    FeatureContext,
    check_known,
    record,
    wait,
)
from esper.leyline.files import scratch_folder
from esper.runtime.data.splits import Dataset
from esper.runtime.nursery import HELD_OUT, NURSERY, heldout_list
from esper.runtime.tasks import TaskSpec, get_task_spec, load_tasks_data, override
from esper.simic.rewards import RewardWeights, default_gamma
from esper.simic.training.action_execution import execute_actions, observe_reset
from esper.simic.training.backend import choose_backend
from esper.simic.training.calibration import load_or_calibrate, reward_config
from esper.simic.training.env_factory import build_worker, make_context, make_worker_spec
from esper.simic.training.episode_rewards import ModePricing, Pricing, StepReward
from esper.simic.training.simulated import build_simulated_worker
from esper.tamiyo.features import GLOBAL_COLUMNS, SLOT_COLUMNS, EnvView, global_row, slot_rows
from esper.tolaria.executor.available import why_not_native
from esper.tolaria.pool import EnginePool

NUM_NURSERY = 32
"""Nursery tasks that an env trains with."""
BUNDLED = ("digits", "pydoc")
"""Data that every machine has: held-out tasks on other data are left out, so spaces are the same everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One env after its reset, or after one step."""

    report: EpochReport
    context: FeatureContext
    legal: npt.NDArray[np.bool_]
    observation: npt.NDArray[np.float32]
    outcome: ActionOutcome | None = None
    """What became of the choice; None at reset."""
    reward: StepReward | None = None
    """What it paid; None at reset, and where the worker was lost."""
    lost: bool = False
    """True if the episode was given up with its worker: it is cut off, not over."""


class Game:
    """Hosts that are grown by numbered choices.

    Args:
        resources: Holds the pool and whatever else has to be closed.
        pool: Where the hosts live.
        contexts: What is known of the tasks. Choices and observations have room for all of them.
        pricings: By task, what a transition is worth.
        gamma: The discount that its terms were made for.
    """

    def __init__(
        self,
        resources: ExitStack,
        pool: EnginePool,
        contexts: Sequence[FeatureContext],
        *,
        pricings: Mapping[str, Pricing],
        gamma: float,
    ) -> None:
        self._pool, self._pricings = pool, pricings
        self.close = weakref.finalize(self, resources.close)
        """Ends the workers; done by itself when the process ends, or nobody has the game any more."""
        self.gamma = gamma
        self.choices = joint_choices([context.layout for context in contexts])
        self._slot_ids = tuple(dict.fromkeys(slot_id for context in contexts for slot_id in context.layout.slot_ids))
        self.columns = _columns(self._slot_ids)
        """Names of the observation's numbers. Those of a slot that a host does not have are all 0."""
        self.tasks = tuple(pricings)
        self._turns: dict[int, Turn] = {}

    def begin(self, seeds: Sequence[EpisodeSeed]) -> dict[int, Turn]:
        """Starts an episode per seed. Other envs stay where they are."""
        begun = {seed.env_id for seed in seeds}
        staying = {} if begun >= self._turns.keys() else self._pool.snapshot()
        with _learning():
            state = observe_reset(self._pool, seeds)
            if staying:
                self._pool.restore({**staying, **self._pool.snapshot()})
        rows = zip(state.reports, state.post_action_masks, state.contexts, strict=True)
        turns = {report.env_id: self._turn(report, masks, context) for report, masks, context in rows}
        self._turns |= turns
        return turns

    def play(self, choices: Mapping[int, int]) -> dict[int, Turn]:
        """One choice and one epoch in every env that is named; the episodes of all others must be over.

        A choice that is not legal is carried out as WAIT.
        """
        before = self._turns
        specs = [self._spec(env_id, choices.get(env_id)) for env_id in sorted(before)]
        with _learning():
            state = execute_actions(self._pool, specs)
        rows = zip(state.reports, state.post_action_masks, state.outcomes, strict=True)
        turns = {
            report.env_id: self._turn(
                report, masks, before[report.env_id].context, before=before[report.env_id], outcome=outcome
            )
            for report, masks, outcome in rows
            if report.env_id in choices
        }
        self._turns = before | turns
        return turns

    def _spec(self, env_id: int, choice: int | None) -> ActionSpec:
        turn = self._turns[env_id]
        if choice is None or not turn.legal[choice]:
            return wait(env_id)
        chosen = self.choices[choice]
        return ActionSpec(env_id=env_id, op=chosen.op, slot=chosen.slot, blueprint=chosen.blueprint, blend=chosen.blend)

    def _turn(
        self,
        report: EpochReport,
        masks: ActionMasks,
        context: FeatureContext,
        *,
        before: Turn | None = None,
        outcome: ActionOutcome | None = None,
    ) -> Turn:
        view = EnvView(
            report=report,
            signals=report.signals,
            slots=report.slots,
            masks=masks,
            previous=None if before is None else before.report,
            outcome=outcome,
            context=context,
        )
        lost, reward = report.env_id in self._pool.lost_envs, None
        if before is not None and outcome is not None and not lost:
            ledger = None if before.reward is None else before.reward.ledger
            reward = self._pricings[context.task].price(ledger, before.report, outcome, report)
        slots = dict(zip(context.layout.slot_ids, slot_rows(view), strict=True))
        row = [*global_row(view), *chain(*(slots.get(slot_id, _NO_SLOT) for slot_id in self._slot_ids))]
        return Turn(
            report=report,
            context=context,
            legal=legal_choices(self.choices, context.layout, masks),
            observation=np.array(row, dtype=np.float32),
            outcome=outcome,
            reward=reward,
            lost=lost,
        )


_NO_SLOT = (0.0,) * len(SLOT_COLUMNS)


@contextmanager
def _learning() -> Iterator[None]:
    """Hosts that live in this process learn, also where a learner plays them without gradients of its own."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _columns(slot_ids: Sequence[str]) -> tuple[str, ...]:
    slots = (f"{slot_id}.{column.name}" for slot_id in slot_ids for column in SLOT_COLUMNS)
    return (*(column.name for column in GLOBAL_COLUMNS), *slots)


@record
class TaskChoice:
    """Which tasks an env plays."""

    tasks: tuple[TaskSpec, ...]
    """Episodes take them in turn."""
    room: tuple[TaskSpec, ...]
    """Tasks that choices and observations have room for, in the order in which they make room."""


def choose_tasks(
    names: str | Sequence[str], *, budget: int | None, horizon: int | None, use_test_set: bool
) -> TaskChoice:
    """Tasks by name. "nursery" stands for a set of small drawn ones, and with `use_test_set` for those held out.

    Raises:
        ValueError: A task is unknown, or has no test set.
    """
    listed = (names,) if isinstance(names, str) else tuple(names)
    if listed == (NURSERY,):
        train = tuple(get_task_spec(f"{NURSERY}:{number}") for number in range(NUM_NURSERY))
        held = tuple(
            get_task_spec(f"{HELD_OUT}:{number}")
            for number, row in enumerate(heldout_list())
            if row.task.data in BUNDLED
        )
        return TaskChoice(tasks=held if use_test_set else train, room=(*train, *held))
    if use_test_set or not listed:
        raise ValueError(f"only the task {NURSERY!r} has a test set, got {', '.join(listed) or 'no task'}")
    tasks = [get_task_spec(name) for name in listed]
    if horizon is not None:
        tasks = [override(task, horizon=horizon) for task in tasks]
    if budget is not None:
        tasks = [override(task, param_budget=budget) for task in tasks]
    return TaskChoice(tasks=tuple(tasks), room=tuple(tasks))


def open_tasks(
    chosen: TaskChoice, *, reward_mode: str, calibration_runs: int, workers: int, backend: str, data_dir: Path | None
) -> Game:
    """Hosts of tasks, rewarded as `esper train` does.

    Raises:
        ValueError: The mode or the backend is none, or a scale is to be measured on several tasks at once.
        DataNotFound: A task's data is not on this machine.
    """
    tasks, data = chosen.tasks, load_tasks_data(chosen.tasks, data_dir)
    if calibration_runs and len(tasks) > 1:
        raise ValueError(
            f"calibration_runs must be 0 with several tasks, got {calibration_runs} and {len(tasks)} tasks"
        )
    with ExitStack() as opening:
        scratch = opening.enter_context(scratch_folder())
        spec = make_worker_spec(tasks, data, scratch=scratch, backend=_backend(backend, tasks, data))
        kind = "process" if workers > 1 else "inline"
        pool = opening.enter_context(EnginePool(build_worker, spec, kind=kind, workers=workers))
        scale = load_or_calibrate(pool, tasks[0], data[0], calibration_runs, None) if calibration_runs else None
        gamma = default_gamma(max(task.horizon for task in tasks))
        pricings = {
            task.name: ModePricing(mode=reward_mode, config=reward_config(task, gamma, RewardWeights(), scale))
            for task in tasks
        }
        rooms = zip(chosen.room, load_tasks_data(chosen.room, data_dir), strict=True)
        contexts = [
            spec.tasks[task.name].context if task.name in spec.tasks else make_context(task, rows)
            for task, rows in rooms
        ]
        return Game(opening.pop_all(), pool, contexts, pricings=pricings, gamma=gamma)


def _backend(wanted: str, tasks: Sequence[TaskSpec], data: Sequence[Dataset]) -> str:
    """One task: as `esper train` chooses. Several: compiled code wherever it can train a host, torch for the others."""
    if len(tasks) == 1 or wanted == "torch":
        return choose_backend(wanted, tasks[0], data[0]).name
    return "torch" if why_not_native() else "native"


def open_world(name: str) -> Game:
    """A simulated world of the sandboxes.

    Raises:
        ValueError: No sandbox has that name.
    """
    found = {sandbox.name: sandbox for sandbox in SANDBOXES}
    check_known("world", name, found)
    sandbox = found[name]
    with ExitStack() as opening:
        pool = opening.enter_context(EnginePool(build_simulated_worker, sandbox.world))
        pricings = {pool.context.task: SandboxPricing(sandbox.reward)}
        return Game(opening.pop_all(), pool, [pool.context], pricings=pricings, gamma=sandbox.config.gamma)
