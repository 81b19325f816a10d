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
from esper.leyline import ActionMasks, ActionOutcome, ActionSpec, EpisodeSeed, EpochReport, wait
from esper.leyline.files import scratch_folder
from esper.runtime.tasks import get_task_spec, load_task_data, override
from esper.simic.rewards import RewardWeights, default_gamma
from esper.simic.training.action_execution import execute_actions, observe_reset
from esper.simic.training.calibration import load_or_calibrate, reward_config
from esper.simic.training.env_factory import build_worker, make_worker_spec
from esper.simic.training.episode_rewards import ModePricing, Pricing, StepReward
from esper.simic.training.simulated import build_simulated_worker
from esper.tamiyo.features import GLOBAL_COLUMNS, SLOT_COLUMNS, EnvView, global_row, slot_rows
from esper.tolaria.pool import EnginePool


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One env after its reset, or after one step."""

    report: EpochReport
    masks: ActionMasks
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
        pricing: What a transition is worth.
        gamma: The discount that its terms were made for.
    """

    def __init__(self, resources: ExitStack, pool: EnginePool, *, pricing: Pricing, gamma: float) -> None:
        self._pool, self._pricing = pool, pricing
        self.close = weakref.finalize(self, resources.close)
        """Ends the workers; done by itself when the process ends, or nobody has the game any more."""
        self.gamma = gamma
        self.context = pool.context
        self.choices = joint_choices([pool.context.layout])
        self.columns = _columns(pool.context.layout.slot_ids)
        """Names of the observation's numbers."""
        self._turns: dict[int, Turn] = {}

    def begin(self, seeds: Sequence[EpisodeSeed]) -> dict[int, Turn]:
        """Starts an episode per seed. Other envs stay where they are."""
        begun = {seed.env_id for seed in seeds}
        staying = {} if begun >= self._turns.keys() else self._pool.snapshot()
        with _learning():
            state = observe_reset(self._pool, seeds)
            if staying:
                self._pool.restore({**staying, **self._pool.snapshot()})
        turns = {
            report.env_id: self._turn(report, masks)
            for report, masks in zip(state.reports, state.post_action_masks, strict=True)
        }
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
            report.env_id: self._turn(report, masks, before[report.env_id], outcome)
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
            context=self.context,
        )
        lost, reward = report.env_id in self._pool.lost_envs, None
        if before is not None and outcome is not None and not lost:
            ledger = None if before.reward is None else before.reward.ledger
            reward = self._pricing.price(ledger, before.report, outcome, report)
        return Turn(
            report=report,
            masks=masks,
            legal=legal_choices(self.choices, self.context.layout, masks),
            observation=np.array([*global_row(view), *chain(*slot_rows(view))], dtype=np.float32),
            outcome=outcome,
            reward=reward,
            lost=lost,
        )


@contextmanager
def _learning() -> Iterator[None]:
    """Hosts that live in this process learn, also where a learner plays them without gradients of its own."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _columns(slot_ids: Sequence[str]) -> tuple[str, ...]:
    slots = (f"{slot_id}.{column.name}" for slot_id in slot_ids for column in SLOT_COLUMNS)
    return (*(column.name for column in GLOBAL_COLUMNS), *slots)


def open_task(
    name: str,
    *,
    budget: int | None,
    horizon: int | None,
    reward_mode: str,
    calibration_runs: int,
    workers: int,
    data_dir: Path | None,
) -> Game:
    """Hosts of a task, rewarded as `esper train` does.

    Raises:
        ValueError: The task, the mode or a limit is none.
        DataNotFound: The task's data is not on this machine.
    """
    task = get_task_spec(name)
    if horizon is not None:
        task = override(task, horizon=horizon)
    if budget is not None:
        task = override(task, param_budget=budget)
    data = load_task_data(task, data_dir)
    with ExitStack() as opening:
        spec = make_worker_spec(task, data, scratch=opening.enter_context(scratch_folder()))
        kind = "process" if workers > 1 else "inline"
        pool = opening.enter_context(EnginePool(build_worker, spec, kind=kind, workers=workers))
        scale = load_or_calibrate(pool, task, data, calibration_runs, None) if calibration_runs else None
        gamma = default_gamma(task.horizon)
        pricing = ModePricing(mode=reward_mode, config=reward_config(task, gamma, RewardWeights(), scale))
        return Game(opening.pop_all(), pool, pricing=pricing, gamma=gamma)


def open_world(name: str) -> Game:
    """A simulated world of the sandboxes.

    Raises:
        ValueError: No sandbox has that name.
    """
    found = {sandbox.name: sandbox for sandbox in SANDBOXES}
    if name not in found:
        raise ValueError(f"unknown world {name!r}. Known: {', '.join(found)}")
    sandbox = found[name]
    with ExitStack() as opening:
        pool = opening.enter_context(EnginePool(build_simulated_worker, sandbox.world))
        pricing = SandboxPricing(sandbox.reward)
        return Game(opening.pop_all(), pool, pricing=pricing, gamma=sandbox.config.gamma)
