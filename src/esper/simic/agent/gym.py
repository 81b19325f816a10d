"""The same learner over any Gymnasium vector env: Discrete or MultiDiscrete actions, optional action masks.

Sampling, recurrence, advantages and update are the ones that train Tamiyo; only the network and the way a rollout is
collected differ. Knows nothing of Esper's hosts. Needs the `bench` extra.
"""

# T steps, N envs, B = T x N rows, H heads

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from esper.leyline import ModelFileError, NumericFailure, derive_seed
from esper.simic.agent.config import COUNT, FRACTION, NOT_NEGATIVE, POSITIVE, SHARE, check_ranges, option
from esper.simic.agent.experience import Experience, Rollout, price
from esper.simic.agent.files import FACTS_FILE, pack, read_facts, read_files, unpack_, write_files
from esper.simic.agent.gym_envs import MaskSource, Moment, Outcome, TensorEnvs, call_action_masks
from esper.simic.agent.gym_network import GymInputs, GymNetwork
from esper.simic.agent.losses import UpdateSettings
from esper.simic.agent.ppo_update import UpdateResult, run_epochs
from esper.simic.agent.recurrence import LSTMState, zero_state
from esper.simic.agent.sampling import Choice, Exploration, choose

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

__all__ = ["GymConfig", "RecurrentPPO", "call_action_masks"]

# Rewards of any env come in units of their own, so next to nothing may be the whole signal.
ADVANTAGE_STD_FLOOR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class GymConfig:
    """Hyper-parameters of PPO on a vector env. The defaults solve CartPole-v1."""

    total_steps: int = option("env steps to learn from; over them the learning rate falls to a tenth", 75_000, COUNT)
    steps_per_round: int = option("steps of every env between updates", 128, COUNT)
    memory: bool = option("without it every step is taken as the first of its episode", True)
    width: int = option("units of encoder, memory and value", 64, COUNT)
    gamma: float = option("discount per step", 0.99, FRACTION)
    lam: float = option("trace decay of the advantage estimate", 0.95, SHARE)
    ppo_epochs: int = option("passes over each round", 4, COUNT)
    minibatches: int = option("parts of a pass, each of whole env sequences; at most one per env", 4, COUNT)
    clip_ratio: float = option("how far a probability ratio may move before its gradient ends", 0.2, FRACTION)
    target_kl: float = option("mean KL from the rollout's policy that ends a round's passes", 0.03, POSITIVE)
    lr: float = option("Adam's step size at the start", 1e-3, POSITIVE)
    entropy_coef: float = option("weight of the pull towards uniform choices", 0.01, NOT_NEGATIVE)
    value_coef: float = option("weight of the value loss", 0.5, NOT_NEGATIVE)
    max_grad_norm: float = option("gradients are clipped to this norm", 0.5, POSITIVE)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of N envs: what was seen, done and got."""

    moment: Moment
    choice: Choice
    values_N: Tensor
    outcome: Outcome


class RecurrentPPO:
    """Recurrent, maskable PPO over a vector env that resets on the step after an episode's end.

    Example:
        ppo = RecurrentPPO(gymnasium.make_vec("CartPole-v1", 16, vectorization_mode="sync"), GymConfig(), run_seed=0)
        for update in ppo.learn():
            print(ppo.env_steps, ppo.episode_returns[-1:], update.approx_kl)
    """

    def __init__(self, envs: VectorEnv, config: GymConfig, *, run_seed: int, masks: MaskSource | None = None) -> None:
        self.config = config
        self.run_seed = run_seed
        self.env_steps = 0
        """Steps learned from so far; the schedule follows it."""
        self.updates = 0
        self.episode_returns: list[float] = []
        """Of the training episodes, in the order they ended."""
        self._envs = TensorEnvs(envs, masks)
        self._masks = masks
        self.network = GymNetwork(self._envs.obs_size, self._envs.sizes, config.width, self._generator("policy"))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=config.lr, eps=1e-5, fused=True)
        num_heads = len(self._envs.sizes)
        self._exploration = Exploration(epsilons=(0.0,) * num_heads, priors=(None,) * num_heads)
        # Gymnasium wants seeds below 2^31.
        self._moment = self._envs.reset(derive_seed(run_seed, None, None, None, "envs") % 2**31)
        self._state = zero_state(self.network.memory, self._envs.num_envs)
        self._totals_N = np.zeros(self._envs.num_envs)

    def learn(self) -> Iterator[UpdateResult]:
        """Trains until `total_steps` are done; yields after every update, so the caller may look or stop.

        Raises:
            NumericFailure: A reward, an observation or a return is not finite. Nothing was learned from its round.
        """
        while self.env_steps < self.config.total_steps:
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.lr * (1.0 - 0.9 * self.env_steps / self.config.total_steps)
            rollout = self.collect()
            experience = price(rollout, gamma=self.config.gamma, lam=self.config.lam, std_floor=ADVANTAGE_STD_FLOOR)
            _check_returns(experience)
            self.network.value.rescale(experience.returns_TN[rollout.valid_TN])
            result = run_epochs(self.network, self.optimizer, experience, self._settings(), self._generator("ppo"))
            # Only now: acting and learning of one round see the same scale.
            self.network.obs_stats.update(rollout.inputs.obs_TND[rollout.valid_TN])
            self.env_steps += int(rollout.valid_TN.sum())
            self.updates += 1
            yield result

    @torch.no_grad()
    def collect(self) -> Rollout[GymInputs]:
        """Plays one round and leaves the envs where it ended."""
        initial, generator = self._state, self._generator("acting")
        steps = []
        for _ in range(self.config.steps_per_round):
            uniforms_NH = torch.rand(self._envs.num_envs, len(self._envs.sizes), generator=generator)
            choice, values_N, self._state = self._decide(self._moment, self._state, uniforms_NH)
            outcome = self._envs.step(self._moment, choice.actions_BH)
            steps.append(_Step(self._moment, choice, values_N, outcome))
            self._moment = outcome.moment
            self._count_returns(outcome)
        # The memory does not advance here: the next round acts on this moment itself.
        _, beyond_N, _ = self._decide(self._moment, self._state, None)
        return self._rollout(steps, initial, beyond_N)

    @torch.no_grad()
    def evaluate(self, envs: VectorEnv, *, env_seed: int, max_steps: int = 100_000) -> list[float]:
        """Returns of one greedy episode in each of other envs.

        Raises:
            ValueError: The envs have other spaces, or an episode is not over after `max_steps`.
        """
        others = TensorEnvs(envs, self._masks)
        if (others.obs_size, others.sizes) != (self._envs.obs_size, self._envs.sizes):
            raise ValueError(
                f"expected envs like those trained in, with {self._envs.obs_size} observed numbers and "
                f"{self._envs.sizes} choices, got {others.obs_size} and {others.sizes}"
            )
        moment, state = others.reset(env_seed), zero_state(self.network.memory, others.num_envs)
        totals_N, playing_N = torch.zeros(others.num_envs), torch.ones(others.num_envs, dtype=torch.bool)
        for _ in range(max_steps):
            choice, _, state = self._decide(moment, state, None)
            outcome = others.step(moment, choice.actions_BH)
            totals_N += torch.where(playing_N, outcome.rewards_N, 0.0)
            moment = outcome.moment
            playing_N &= ~moment.over_N
            if not bool(playing_N.any()):
                return [float(total) for total in totals_N]
        raise ValueError(
            f"{int(playing_N.sum())} of {others.num_envs} episodes are not over after {max_steps:,} steps; "
            "give the envs a gymnasium.wrappers.TimeLimit, or raise max_steps"
        )

    def save(self, directory: str | Path) -> None:
        """Writes weights, statistics and optimizer into a directory, which is made if needed."""
        facts = {
            "obs_size": self._envs.obs_size,
            "sizes": self._envs.sizes,
            "masked": self._masks is not None,
            "config": asdict(self.config),
            "run_seed": self.run_seed,
            "env_steps": self.env_steps,
            "updates": self.updates,
        }
        write_files(directory, pack(self.network, self.optimizer, facts))

    @classmethod
    def load(cls, directory: str | Path, envs: VectorEnv, *, masks: MaskSource | None = None) -> RecurrentPPO:
        """Goes on with what `save` wrote, in envs that begin anew: their state was not saved.

        Raises:
            ModelFileError: Files are missing or damaged, or the learner was trained in envs with other spaces, or with
                masks where none are given now.
        """
        files = read_files(directory)
        facts = read_facts(files)
        try:
            config, run_seed = GymConfig(**facts["config"]), int(facts["run_seed"])
            env_steps, updates = int(facts["env_steps"]), int(facts["updates"])
            spaces, masked = (facts["obs_size"], tuple(facts["sizes"])), bool(facts["masked"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{FACTS_FILE}: does not describe a learner of this release ({error})") from error
        if masked and masks is None:
            raise ModelFileError(f"{directory}: trained with action masks. Give `masks` here too, or it breaks them")
        ppo = cls(envs, config, run_seed=run_seed, masks=masks)
        if spaces != (ppo._envs.obs_size, ppo._envs.sizes):
            raise ModelFileError(
                f"{directory}: trained with {spaces[0]} observed numbers and {spaces[1]} choices, but the envs have "
                f"{ppo._envs.obs_size} and {ppo._envs.sizes}"
            )
        unpack_(ppo.network, ppo.optimizer, files)
        ppo.env_steps, ppo.updates = env_steps, updates
        return ppo

    def _decide(self, moment: Moment, state: LSTMState, uniforms_NH: Tensor | None) -> tuple[Choice, Tensor, LSTMState]:
        """Choices by the given uniform numbers, or the most likely ones; values in units of reward; new memory."""
        inputs = GymInputs(
            obs_TND=moment.obs_ND[None],
            legal_TNA=moment.legal_NA[None],
            starts_TN=self._forget(moment.starts_N[None]),
            state=state,
        )
        forward = self.network(inputs)
        choice = choose(forward.logits_fn, forward.masks, self._exploration, uniforms_BH=uniforms_NH)
        return choice, self.network.value.denormalize(forward.values_B), forward.state

    def _rollout(self, steps: list[_Step], initial: LSTMState, beyond_N: Tensor) -> Rollout[GymInputs]:
        values_TN = torch.stack([step.values_N for step in steps])
        valid_TN = ~torch.stack([step.moment.over_N for step in steps])
        terminated_TN = torch.stack([step.outcome.terminated_N for step in steps])
        truncated_TN = torch.stack([step.outcome.truncated_N for step in steps])
        # The round cuts the episodes that go on after it.
        truncated_TN[-1] |= valid_TN[-1] & ~terminated_TN[-1]
        inputs = GymInputs(
            obs_TND=torch.stack([step.moment.obs_ND for step in steps]),
            legal_TNA=torch.stack([step.moment.legal_NA for step in steps]),
            starts_TN=self._forget(torch.stack([step.moment.starts_N for step in steps])),
            state=initial,
        )
        return Rollout(
            inputs=inputs,
            actions_TNH=torch.stack([step.choice.actions_BH for step in steps]),
            log_probs_TNH=torch.stack([step.choice.log_probs_BH for step in steps]),
            usable_TNH=torch.stack([step.choice.usable_BH for step in steps]),
            values_TN=values_TN,
            rewards_TN=torch.stack([step.outcome.rewards_N for step in steps]),
            terminated_TN=terminated_TN,
            truncated_TN=truncated_TN,
            valid_TN=valid_TN,
            # An episode's last observation is the row after its last step, seen with its memory: V(s').
            bootstraps_TN=torch.cat([values_TN[1:], beyond_N[None]]),
        )

    def _forget(self, starts: Tensor) -> Tensor:
        return starts if self.config.memory else torch.ones_like(starts)

    def _count_returns(self, outcome: Outcome) -> None:
        over_N = outcome.moment.over_N.numpy()
        self._totals_N += outcome.rewards_N.numpy()
        self.episode_returns += self._totals_N[over_N].tolist()
        self._totals_N[over_N] = 0.0

    def _settings(self) -> UpdateSettings:
        config = self.config
        return UpdateSettings(
            epochs=config.ppo_epochs,
            minibatches=config.minibatches,
            clip_ratio=config.clip_ratio,
            target_kl=config.target_kl,
            entropy_coef=config.entropy_coef,
            value_coef=config.value_coef,
            max_grad_norm=config.max_grad_norm,
            exploration=self._exploration,
        )

    def _generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.run_seed, None, self.updates, None, purpose))


def _check_returns(experience: Experience[GymInputs]) -> None:
    """Finite rewards can still add up to more than a float holds."""
    odd_TN = ~torch.isfinite(experience.returns_TN)
    if bool(odd_TN.any()):
        step, env = odd_TN.nonzero()[0].tolist()
        raise NumericFailure(
            f"env {env}, step {step} of the round: expected a finite return, got "
            f"{experience.returns_TN[step, env].item()}. Nothing was learned from it; scale the rewards of the env down"
        )
