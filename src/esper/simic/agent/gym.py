"""The same learner over any Gymnasium vector env: Discrete or MultiDiscrete actions, optional action masks.

Sampling, recurrence, advantages and update are the ones that train Tamiyo; only the network and the way a rollout is
collected differ. Knows nothing of Esper's hosts. Needs the `gym` extra.
"""

# T steps, N envs, B = T x N rows, D observation, A choices of all heads side by side, H heads, W width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline import ModelFileError, NumericFailure, derive_seed
from esper.simic.agent.advantages import Rollout, with_gae
from esper.simic.agent.agent_files import (
    FACTS_FILE,
    count,
    exactly,
    pack_agent,
    read_facts,
    read_files,
    unpack_,
    write_files,
)
from esper.simic.agent.config import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    STEPS,
    UP_TO_HALF,
    WIDTH,
    PPOConfig,
    option,
    up_to,
)
from esper.simic.agent.gym_envs import MaskSource, Moment, TensorEnvs, call_action_masks
from esper.simic.agent.policy import (
    ForwardPass,
    LSTMState,
    ValueHead,
    empty_linear,
    empty_lstm,
    initialize_,
    scale_output_,
    unroll,
    zero_state,
)
from esper.simic.agent.ppo_update import UpdateSettings, run_epochs
from esper.simic.agent.sampling import Choice, Exploration, choose
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.control.normalization import RunningMeanStd

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

__all__ = ["GymConfig", "RecurrentPPO", "call_action_masks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GymConfig(PPOConfig):
    """PPO on a vector env, with defaults that solve CartPole-v1.

    `epsilon_op` and `op_prior` speak of Tamiyo's op head and are not used.
    """

    steps_per_round: int = option("steps of every env between updates", 128, up_to(1_000_000))
    schedule_steps: int = option("env steps to learn from; the schedules run over them", 75_000, STEPS)
    width: int = option("units of encoder, memory and value", 64, WIDTH)
    gamma: float = option("discount", 0.99, FRACTION)
    # Rewards of any env come in units of their own, so next to nothing may be the whole signal.
    advantage_std_floor: float = option("spread below which advantages are not magnified, in rewards", 1e-3, POSITIVE)
    lr: float = option("Adam's step size at the start", 1e-3, POSITIVE)
    entropy_coef: float = option("KL penalty towards uniform choice, at the start", 0.01, NOT_NEGATIVE)
    epsilon: float = option("share of uniform choices; 0 at the end", 0.0, UP_TO_HALF)


@dataclass(frozen=True, slots=True, kw_only=True)
class GymInputs:
    """T steps of N envs, as the network takes them."""

    obs_TND: Tensor
    legal_TNA: Tensor
    starts_TN: Tensor
    """The LSTM state is cleared before these steps."""
    state: LSTMState
    """LSTM state before the first step."""

    def parts(self, envs: Tensor) -> list[tuple[Tensor, Self]]:
        """The sequences of some envs, which are all of one shape."""
        chosen = type(self)(
            obs_TND=self.obs_TND[:, envs],
            legal_TNA=self.legal_TNA[:, envs],
            starts_TN=self.starts_TN[:, envs],
            state=(self.state[0][:, envs], self.state[1][:, envs]),
        )
        return [(envs, chosen)]


@dataclass(frozen=True, slots=True)
class FlatMasks:
    """Masks of heads that do not depend on each other."""

    legal_BA: Tensor
    sizes: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """B."""
        return self.legal_BA.shape[0]

    @property
    def sampling_order(self) -> tuple[int, ...]:
        """As declared."""
        return tuple(range(len(self.sizes)))

    def legal(self, head: int, actions_BH: Tensor) -> Tensor:
        """The columns of this head."""
        first = sum(self.sizes[:head])
        return self.legal_BA[:, first : first + self.sizes[head]]


class GymNetwork(nn.Module):
    """Encoder, LSTM, one linear head per action dimension, V(s). The trunk is the encoding plus the LSTM's output."""

    def __init__(self, obs_size: int, sizes: tuple[int, ...], width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.sizes = sizes
        self.obs_stats = RunningMeanStd(obs_size)
        self.encoder = nn.Sequential(empty_linear(obs_size, width), nn.Tanh(), empty_linear(width, width), nn.Tanh())
        self.memory = empty_lstm(width, width)
        self.heads = nn.ModuleList(empty_linear(width, size) for size in sizes)
        self.value = ValueHead(width, width)
        initialize_(self, generator)
        for head in self.heads:
            assert isinstance(head, nn.Linear)
            scale_output_(head, 0.01, generator)
        scale_output_(self.value.out, 1.0, generator)

    def forward(self, inputs: GymInputs) -> ForwardPass:
        """Runs T steps of N envs."""
        encoded_TNW = self.encoder(self.obs_stats(inputs.obs_TND))
        memory_TNW, state = unroll(self.memory, encoded_TNW, inputs.state, inputs.starts_TN)
        trunk_BW = (encoded_TNW + memory_TNW).flatten(0, 1)
        return ForwardPass(
            logits_fn=partial(self._logits, trunk_BW),
            masks=FlatMasks(inputs.legal_TNA.flatten(0, 1), self.sizes),
            values_B=self.value(trunk_BW),
            memory_TNW=memory_TNW,
            state=state,
        )

    def head_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The weights of each head, by its number."""
        return {str(number): list(head.parameters()) for number, head in enumerate(self.heads)}

    def _logits(self, trunk_BW: Tensor, head: int, actions_BH: Tensor) -> Tensor:
        logits: Tensor = self.heads[head](trunk_BW)
        return logits


class RecurrentPPO:
    """Recurrent, maskable PPO over a vector env that resets on the step after an episode's end.

    Example:
        ppo = RecurrentPPO(gymnasium.make_vec("CartPole-v1", 16, vectorization_mode="sync"), GymConfig(), run_seed=0)
        for update in ppo.learn():
            print(ppo.env_steps, ppo.episode_returns[-1:], update["approx_kl"])
    """

    def __init__(self, envs: VectorEnv, config: GymConfig, *, run_seed: int, masks: MaskSource | None = None) -> None:
        self.config = config
        self.run_seed = run_seed
        self.env_steps = 0
        """Steps learned from so far; the schedules follow it."""
        self.updates = 0
        self.last_ratios_B: Tensor | None = None
        """Joint probability ratios of all rows of the last update."""
        self.episode_returns: list[float] = []
        """Of the training episodes, in the order they ended."""
        self._envs = TensorEnvs(envs, masks)
        self._masks = masks
        self.network = GymNetwork(self._envs.obs_size, self._envs.sizes, config.width, self._generator("policy"))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=config.lr, eps=1e-5, fused=True)
        # Gymnasium wants seeds below 2^31.
        self._moment = self._envs.reset(derive_seed(run_seed, None, None, None, "envs") % 2**31)
        self._state = zero_state(self.network.memory, self._envs.num_envs)
        self._totals_N = np.zeros(self._envs.num_envs)

    def learn(self) -> Iterator[PPOUpdateMetrics]:
        """Trains until `schedule_steps` are done; yields after every update, so the caller may look or stop.

        Raises:
            NumericFailure: A reward, an observation or a return is not finite. Nothing was learned from its rollout.
        """
        config = self.config
        while self.env_steps < config.schedule_steps:
            rollout = self.collect()
            experience = with_gae(rollout, gamma=config.gamma, lam=config.lam, std_floor=config.advantage_std_floor)
            odd_TN = ~torch.isfinite(experience.returns_TN)  # finite rewards can add up to more than a float holds
            if bool(odd_TN.any()):
                step, env = odd_TN.nonzero()[0].tolist()
                raise NumericFailure(
                    f"env {env}, step {step} of the rollout: expected a finite return, got "
                    f"{experience.returns_TN[step, env].item()}. Nothing was learned from it; scale the rewards of the "
                    "env down"
                )
            self.network.value.rescale(experience.returns_TN[rollout.valid_TN])
            settings = UpdateSettings.at(config, self.env_steps, self._exploration)
            result = run_epochs(self.network, self.optimizer, experience, settings, self._generator("ppo"))
            self.last_ratios_B = result.ratios_B
            # Only now: acting and learning of one rollout see the same scale.
            self.network.obs_stats.update(rollout.inputs.obs_TND[rollout.valid_TN])
            self.env_steps += result.metrics["env_steps"]
            self.updates += 1
            yield result.metrics

    @torch.no_grad()
    def collect(self) -> Rollout[GymInputs]:
        """Plays one rollout and leaves the envs where it ended."""
        initial, generator = self._state, self._generator("acting")
        rows: list[tuple[Tensor, ...]] = []
        for _ in range(self.config.steps_per_round):
            moment = self._moment
            uniforms_NH = torch.rand(self._envs.num_envs, len(self._envs.sizes), generator=generator)
            choice, values_N, self._state = self._decide(moment, self._state, uniforms_NH)
            outcome = self._envs.step(moment, choice.actions_BH)
            seen = (moment.obs_ND, moment.legal_NA, self._starts(moment), ~moment.over_N)
            done = (choice.actions_BH, choice.log_probs_BH, choice.usable_BH, values_N)
            rows.append((*seen, *done, outcome.rewards_N, outcome.terminated_N, outcome.truncated_N))
            self._moment = outcome.moment
            over_N = self._moment.over_N.numpy()
            self._totals_N += outcome.rewards_N.numpy()
            self.episode_returns += self._totals_N[over_N].tolist()
            self._totals_N[over_N] = 0.0
        # The LSTM state does not advance here: the next rollout acts on this moment itself.
        _, beyond_N, _ = self._decide(self._moment, self._state, None)
        obs, legal, starts, valid, actions, log_probs, usable, values, rewards, terminated, truncated = (
            torch.stack(column) for column in zip(*rows, strict=True)
        )
        # The rollout cuts the episodes that go on after it.
        truncated[-1] |= valid[-1] & ~terminated[-1]
        return Rollout(
            inputs=GymInputs(obs_TND=obs, legal_TNA=legal, starts_TN=starts, state=initial),
            actions_TNH=actions,
            log_probs_TNH=log_probs,
            usable_TNH=usable,
            values_TN=values,
            rewards_TN=rewards,
            terminated_TN=terminated,
            truncated_TN=truncated,
            valid_TN=valid,
            # An episode's last observation is the row after its last step, seen with its LSTM state: V(s').
            bootstraps_TN=torch.cat([values[1:], beyond_N[None]]),
        )

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
        write_files(directory, pack_agent(self.network, self.optimizer, facts))

    @classmethod
    def load(cls, directory: str | Path, envs: VectorEnv, *, masks: MaskSource | None = None) -> RecurrentPPO:
        """Goes on with what `save` wrote, in envs that begin anew: their state was not saved.

        Raises:
            ModelFileError: Files are missing or damaged, or the learner was trained in envs with other spaces, or with
                masks where none are given now.
        """
        files = read_files(directory)
        names = {"config", "run_seed", "env_steps", "updates", "obs_size", "sizes", "masked"}
        facts = read_facts(files, names)
        try:
            config, run_seed = exactly(facts["config"], GymConfig), count(facts["run_seed"])
            env_steps, updates = count(facts["env_steps"]), count(facts["updates"])
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

    @property
    def _exploration(self) -> Exploration:
        heads, epsilon = len(self._envs.sizes), self.config.epsilon * self.config.epsilon_share_at(self.env_steps)
        return Exploration(epsilons=(epsilon,) * heads, priors=(None,) * heads)

    def _decide(self, moment: Moment, state: LSTMState, uniforms_NH: Tensor | None) -> tuple[Choice, Tensor, LSTMState]:
        """Choices by the given uniform numbers, or the most likely ones; values in units of reward; new LSTM state."""
        inputs = GymInputs(
            obs_TND=moment.obs_ND[None],
            legal_TNA=moment.legal_NA[None],
            starts_TN=self._starts(moment)[None],
            state=state,
        )
        forward = self.network(inputs)
        choice = choose(forward.logits_fn, forward.masks, self._exploration, uniforms_BH=uniforms_NH)
        return choice, self.network.value.denormalize(forward.values_B), forward.state

    def _starts(self, moment: Moment) -> Tensor:
        """Without memory every step is the first of its episode."""
        return moment.starts_N if self.config.memory else torch.ones_like(moment.starts_N)

    def _generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.run_seed, None, self.updates, None, purpose))
