"""The agent: acts for N envs at once, learns from a rollout, saves and loads. It knows no hosts, reports or rewards."""

# T steps, N envs, H heads; other axes as in tamiyo_inputs

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from esper.leyline import HEAD_NAMES, ModelFileError, derive_seed
from esper.simic.agent.advantages import Rollout, with_gae
from esper.simic.agent.agent_files import (
    FACTS_FILE,
    POLICY_FILE,
    count,
    exactly,
    pack_agent,
    read_facts,
    read_files,
    read_tensors,
    unpack_,
    write_files,
)
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.policy import LSTMState
from esper.simic.agent.ppo_update import UpdateSettings, observation_health, run_epochs, skipped_metrics
from esper.simic.agent.sampling import Choice, Exploration, choose, join_choices
from esper.simic.agent.tamiyo_buffer import TamiyoRolloutBuffer
from esper.simic.agent.tamiyo_inputs import OP, Cards, EnvGroup, Observation, RolloutInputs, one_step
from esper.simic.agent.tamiyo_network import ColumnNorm, NetworkShape, TamiyoNetwork
from esper.simic.agent.types import ActionDict, HeadLogProbs, PPOUpdateMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """What the agent chose for N envs at one moment, and how sure it was."""

    choice: Choice
    """Its rows are envs."""
    values_N: Tensor
    """In units of scaled reward."""
    state: LSTMState

    def actions(self) -> list[ActionDict]:
        """The choice of every env, by one read for all of them."""
        rows = self.choice.actions_BH.tolist()  # sync: they must reach the workers
        return [cast(ActionDict, dict(zip(HEAD_NAMES, row, strict=True))) for row in rows]

    def log_probs(self) -> list[HeadLogProbs]:
        """Log-probabilities of the choices of every env, by one read for all of them."""
        rows = self.choice.log_probs_BH.tolist()
        return [cast(HeadLogProbs, dict(zip(HEAD_NAMES, row, strict=True))) for row in rows]


class PPOAgent:
    """Recurrent masked PPO. The policy is small, so it runs on the CPU in single precision."""

    def __init__(self, shape: NetworkShape, config: PPOConfig, *, run_seed: int) -> None:
        self.shape = shape
        self.config = config
        self.run_seed = run_seed
        self.env_steps = 0
        """Valid steps learned from so far; all schedules follow it."""
        self.updates = 0
        self.last_ratios_B: Tensor | None = None
        """Joint probability ratios of all rows that the last update looked at; None if it looked at none."""
        self._clip_factor = 1.0
        self._round_steps = 0
        """Valid steps of the rollout that was learned from since the last `end_round`."""
        generator = torch.Generator().manual_seed(derive_seed(run_seed, None, None, None, "policy"))
        self.network = TamiyoNetwork(shape, width=config.width, op_prior=config.op_prior, generator=generator)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=config.lr, eps=1e-5, fused=True)

    @property
    def exploration(self) -> Exploration:
        """Mixture and prior, the same from the first step of a rollout to its last update."""
        share = self.config.epsilon_share_at(self.env_steps)
        heads = range(len(HEAD_NAMES))
        return Exploration(
            epsilons=tuple(share * (self.config.epsilon_op if head == OP else self.config.epsilon) for head in heads),
            priors=tuple(self.config.op_prior if head == OP else None for head in heads),
        )

    @torch.inference_mode()
    def act(
        self,
        observation: Observation,
        cards: Cards,
        state: LSTMState | None,
        uniforms_NH: Tensor | None,
        actions_NH: Tensor | None = None,
    ) -> PolicyOutput:
        """Chooses for all envs: samples by draws in [0, 1), or, without them, takes the most likely choices.

        `state` is the LSTM state from the last decision; None at the start of the episodes. Given `actions_NH`, says
        what it thinks of those instead.
        """
        forward = self.network(self._with_memory(one_step(observation, cards, state)))
        choice = choose(
            forward.logits_fn, forward.masks, self.exploration, uniforms_BH=uniforms_NH, actions_BH=actions_NH
        )
        values_N = self.network.value.denormalize(forward.values_B)
        return PolicyOutput(choice=choice, values_N=values_N, state=forward.state)

    def act_in_groups(
        self,
        groups: Sequence[EnvGroup],
        state: LSTMState | None,
        uniforms_NH: Tensor | None,
        actions_NH: Tensor | None = None,
    ) -> PolicyOutput:
        """Chooses for envs of several layouts, with one pass for each. What comes back is in the order of the envs."""
        if len(groups) == 1:
            return self.act(groups[0].observation, groups[0].cards, state, uniforms_NH, actions_NH)
        outputs = []
        for group in groups:
            envs_G = group.envs_G
            memory = None if state is None else (state[0][:, envs_G], state[1][:, envs_G])
            uniforms_GH = None if uniforms_NH is None else uniforms_NH[envs_G]
            actions_GH = None if actions_NH is None else actions_NH[envs_G]
            outputs.append(self.act(group.observation, group.cards, memory, uniforms_GH, actions_GH))
        order_N = torch.cat([group.envs_G for group in groups]).argsort()
        return PolicyOutput(
            choice=join_choices([output.choice for output in outputs], order_N),
            values_N=torch.cat([output.values_N for output in outputs])[order_N],
            state=(
                torch.cat([output.state[0] for output in outputs], dim=1)[:, order_N],
                torch.cat([output.state[1] for output in outputs], dim=1)[:, order_N],
            ),
        )

    @torch.no_grad()
    def deviations(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """How far an observation is from the usual, in standard deviations under the statistics in force.

        Returns:
            One figure per env and column, and one per env, slot and column. Flags and one-hots are never unusual.
        """
        obs_norm, slot_norm = self.network.obs_norm, self.network.slot_norm
        return obs_norm.deviations(observation.obs_ND), slot_norm.deviations(observation.slot_obs_NSF)

    def update(self, buffer: TamiyoRolloutBuffer, *, imitate: bool = False) -> PPOUpdateMetrics:
        """Learns from a rollout. The buffer is left as it is; several updates over it may follow each other.

        With `imitate` the actions in it are a teacher's: the policy learns to choose them, whatever they brought.
        If no row is valid, or a return is not finite, nothing changes and the metrics say why.
        """
        self.last_ratios_B = None
        rollout, config = buffer.rollout(), self.config
        settings = UpdateSettings.at(config, self.env_steps, self.exploration, imitate=imitate)
        if not bool(rollout.valid_TN.any()):
            return skipped_metrics("no valid step", settings, HEAD_NAMES)
        experience = with_gae(
            replace(rollout, inputs=self._with_memory(rollout.inputs)),
            gamma=config.gamma,
            lam=config.lam,
            std_floor=config.advantage_std_floor,
        )
        if not bool(torch.isfinite(experience.returns_TN).all()):
            return skipped_metrics("a return is not finite", settings, HEAD_NAMES)
        if not self._round_steps:
            # Predictions survive this, so it may come first: even the first rollout then learns in sensible units.
            self.network.value.rescale(experience.returns_TN[rollout.valid_TN])
        generator = torch.Generator().manual_seed(derive_seed(self.run_seed, None, self.updates, None, "ppo"))
        result = run_epochs(self.network, self.optimizer, experience, settings, generator)
        self.last_ratios_B, self._clip_factor = result.ratios_B, result.clip_factor
        seen = ((norm.stats, norm.normalised, rows) for norm, rows in self._observed(rollout))
        result.metrics["observations"] = observation_health(seen)
        self._round_steps = result.metrics["env_steps"]
        self.updates += 1
        return result.metrics

    def end_round(self, buffer: TamiyoRolloutBuffer) -> None:
        """After the last update over a rollout: schedules move on, observation statistics take it in.

        Nothing happens if no update could learn from it.
        """
        if self._round_steps:
            for norm, rows in self._observed(buffer.rollout()):
                norm.stats.update(rows[torch.isfinite(rows).all(dim=1)])
        self.env_steps += self._round_steps
        self._round_steps = 0

    def clip_factors(self) -> dict[nn.Parameter, float]:
        """What clipping multiplied each gradient by that the parameters hold now."""
        return dict.fromkeys(self.network.parameters(), self._clip_factor)

    def to_files(self) -> dict[str, bytes]:
        """Everything an exact continuation needs, by file name."""
        facts = {
            "shape": asdict(self.shape),
            "config": asdict(self.config),
            "run_seed": self.run_seed,
            "env_steps": self.env_steps,
            "updates": self.updates,
        }
        return pack_agent(self.network, self.optimizer, facts)

    def save(self, directory: str | Path) -> None:
        """Writes the files into a directory, which is made if needed. Run checkpoints add hashes and atomicity."""
        write_files(directory, self.to_files())

    @classmethod
    def load(cls, source: str | Path | Mapping[str, bytes]) -> PPOAgent:
        """Rebuilds an agent from the directory that `save` wrote, or from what `to_files` returned.

        Its next update gives the bits the original's would have given.

        Raises:
            ModelFileError: Files are missing or damaged, or were written by an agent this code cannot build.
        """
        files = source if isinstance(source, Mapping) else read_files(source)
        facts = read_facts(files, {"shape", "config", "run_seed", "env_steps", "updates"})
        try:
            shape, config = exactly(facts["shape"], NetworkShape), exactly(facts["config"], PPOConfig)
            # Before anything is built: a width that is not that of the weights may take all memory.
            if read_tensors(files, POLICY_FILE)["trunk.0.weight"].shape[0] != config.width:
                raise ValueError(f"width {config.width} is not that of {POLICY_FILE}")
            agent = cls(shape, config, run_seed=count(facts["run_seed"]))
            agent.env_steps, agent.updates = count(facts["env_steps"]), count(facts["updates"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ModelFileError(f"{FACTS_FILE}: does not describe an agent of this release ({error})") from error
        unpack_(agent.network, agent.optimizer, files)
        return agent

    def _with_memory(self, inputs: RolloutInputs) -> RolloutInputs:
        """Without memory every step is the first of its episode."""
        return inputs if self.config.memory else inputs.forgetful()

    def _observed(self, rollout: Rollout[RolloutInputs]) -> list[tuple[ColumnNorm, Tensor]]:
        """Valid raw rows, with the statistics they belong to."""
        obs_BD, slots_BF = rollout.inputs.rows(rollout.valid_TN)
        return [(self.network.obs_norm, obs_BD), (self.network.slot_norm, slots_BF)]
