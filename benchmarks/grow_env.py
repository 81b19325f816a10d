"""`esper bench gym`: learners on esper/Grow-v0, each with the same processor time, beside random legal actions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table

from benchmarks.figures_file import check_out, write_figures
from esper.leyline import derive_seed, record
from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    import gymnasium

RANDOM, MASKABLE, ESPER = "random legal actions", "sb3-contrib MaskablePPO", "Esper's recurrent PPO"
NUM_ENVS = 8
NUM_EPISODES = 20
"""Episodes behind every result, on hosts that nobody trained with."""
CURVE_EPISODES = 40
"""Training episodes that a point of a curve is the mean of."""


@record
class Episode:
    """One finished episode."""

    num_steps: int
    total: float
    """Its return."""
    committed_pct: float | None
    """Validation accuracy of what was kept at its end."""


@record
class Setting:
    """Which env is played, and for how long learners may learn."""

    task: str
    budget: int | None
    horizon: int | None
    minutes: float

    def make(self, episodes: list[Episode]) -> gymnasium.Env[Any, Any]:
        """One env that notes its finished episodes."""
        import gymnasium

        import esper.gym  # noqa: F401 (registers it)

        env = gymnasium.make("esper/Grow-v0", task=self.task, budget=self.budget, horizon=self.horizon)
        return noting(env, episodes)


def noting(env: gymnasium.Env[Any, Any], episodes: list[Episode]) -> gymnasium.Env[Any, Any]:
    """The env, with a note about every episode that ends."""
    import gymnasium

    class Noting(gymnasium.Wrapper[Any, Any, Any, Any]):
        def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
            self.num_steps, self.total = 0, 0.0
            found: tuple[Any, dict[str, Any]] = self.env.reset(**given)
            return found

        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            obs, reward, terminated, truncated, info = self.env.step(action)
            self.num_steps, self.total = self.num_steps + 1, self.total + float(reward)
            if terminated or truncated:
                committed = info["report"].committed_accuracy_pct
                episodes.append(Episode(num_steps=self.num_steps, total=self.total, committed_pct=committed))
            return obs, reward, terminated, truncated, info

        def action_masks(self) -> Any:
            return self.env.get_wrapper_attr("action_masks")()

    return Noting(env)


@record
class LearnerResult:
    """What one learner came to."""

    learner: str
    cpu_s: float
    """Of its training."""
    trained: tuple[Episode, ...]
    """In the order they ended."""
    tested: tuple[Episode, ...]
    """On fresh hosts, after training, without exploring."""

    @property
    def env_steps(self) -> int:
        """Steps that were learned from."""
        return sum(episode.num_steps for episode in self.trained)

    @property
    def mean_return(self) -> float:
        """Over the test episodes."""
        return statistics.fmean(episode.total for episode in self.tested)

    @property
    def mean_committed_pct(self) -> float:
        """The same of the accuracy of what was kept."""
        return statistics.fmean(float(episode.committed_pct or 0.0) for episode in self.tested)


def bench_gym_command(
    minutes: Annotated[float, tyro.conf.arg(help="Processor time that each learner, with its hosts, may use.")] = 15.0,
    task: Annotated[str, tyro.conf.arg(help="What hosts are trained on.")] = "digits_blind",
    budget: Annotated[int | None, tyro.conf.arg(help="Most parameters; None: the task's own.")] = 1_300,
    horizon: Annotated[int | None, tyro.conf.arg(help="Epochs of an episode; None: the task's own.")] = 20,
    seed: Annotated[int, tyro.conf.arg(help="Of the learners; hosts follow from it.")] = 0,
    out: Annotated[Path | None, tyro.conf.arg(help="Write the figures as JSON to this file.")] = None,
    plot: Annotated[Path | None, tyro.conf.arg(help="Write the learning curves as a picture to this file.")] = None,
) -> None:
    """Measure learners on esper/Grow-v0, through the interface that any Gymnasium learner has.

    Random legal actions, sb3-contrib's MaskablePPO and Esper's recurrent PPO play the same env, one after the other;
    then each plays 20 episodes on hosts that nobody trained with.
    """
    if minutes <= 0.0:
        raise ValueError(f"--minutes must be positive, got {minutes:g}")
    for path in (out, plot):
        check_out(path)
    import torch

    torch.set_num_threads(1)
    setting, console = Setting(task=task, budget=budget, horizon=horizon, minutes=minutes), plain_console()
    results = []
    with console.status("learning") as status:
        for learner, run in LEARNERS.items():
            status.update(f"{learner}, {minutes:g} minutes")
            results.append(run(setting, seed))
            console.print(_line(results[-1]), highlight=False, soft_wrap=True)
    console.print(_table(setting, results))
    if out is not None:
        write_figures(out, {"setting": asdict(setting), "results": [asdict(result) for result in results]})
    if plot is not None:
        draw(setting, results, plot)


def _seed_of(seed: int, purpose: str) -> int:
    return derive_seed(seed, None, None, None, purpose) % 2**31


def run_random(setting: Setting, seed: int) -> LearnerResult:
    """Draws among the legal actions alone."""
    import numpy as np

    rng, tested = np.random.default_rng(seed), list[Episode]()
    env = setting.make(tested)
    for episode in range(NUM_EPISODES):
        _, info = env.reset(seed=None if episode else _seed_of(seed, "test"))
        while len(tested) == episode:
            *_, info = env.step(rng.choice(np.flatnonzero(info["action_mask"])))
    env.close()
    return LearnerResult(learner=RANDOM, cpu_s=0.0, trained=(), tested=tuple(tested))


def run_maskable(setting: Setting, seed: int) -> LearnerResult:
    """sb3-contrib's learner, which has no memory: its defaults, but for rounds of two episodes and the env's gamma."""
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.evaluation import evaluate_policy
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    trained, tested = list[Episode](), list[Episode]()
    envs = make_vec_env(lambda: setting.make(trained), n_envs=NUM_ENVS, seed=_seed_of(seed, "train"))
    gamma, horizon = float(envs.get_attr("gamma")[0]), setting.horizon or 20
    model = MaskablePPO(
        "MlpPolicy", envs, seed=seed, device="cpu", gamma=gamma, n_steps=2 * horizon, batch_size=4 * horizon
    )
    started = time.process_time()

    class UntilTime(BaseCallback):
        def _on_step(self) -> bool:
            return time.process_time() - started < 60.0 * setting.minutes

    model.learn(10**9, callback=UntilTime())
    cpu_s = time.process_time() - started
    envs.close()
    test = make_vec_env(lambda: setting.make(tested), n_envs=1, seed=_seed_of(seed, "test"))
    evaluate_policy(model, test, n_eval_episodes=NUM_EPISODES, deterministic=True)
    test.close()
    return LearnerResult(learner=MASKABLE, cpu_s=cpu_s, trained=tuple(trained), tested=tuple(tested))


def run_esper(setting: Setting, seed: int) -> LearnerResult:
    """Esper's own learner with the defaults that it has for any env, but for rounds of two episodes."""
    from gymnasium.vector import SyncVectorEnv

    from esper.simic.agent.gym import GymConfig, RecurrentPPO, call_action_masks

    trained, tested = list[Episode](), list[Episode]()
    envs = SyncVectorEnv([lambda: setting.make(trained)] * NUM_ENVS)
    (gamma, *_) = envs.get_attr("gamma")
    # Nobody knows beforehand how many steps fit into the time, so the schedules stay near their start.
    config = GymConfig(gamma=gamma, steps_per_round=2 * (setting.horizon or 20), schedule_steps=1_000_000)
    ppo = RecurrentPPO(envs, config, run_seed=seed, masks=call_action_masks)
    started = time.process_time()
    for _ in ppo.learn():
        if time.process_time() - started >= 60.0 * setting.minutes:
            break
    cpu_s = time.process_time() - started
    envs.close()
    test = SyncVectorEnv([lambda: setting.make(tested)] * NUM_EPISODES)
    ppo.evaluate(test, env_seed=_seed_of(seed, "test"))
    test.close()
    return LearnerResult(learner=ESPER, cpu_s=cpu_s, trained=tuple(trained), tested=tuple(tested[:NUM_EPISODES]))


LEARNERS: dict[str, Callable[[Setting, int], LearnerResult]] = {
    RANDOM: run_random,
    MASKABLE: run_maskable,
    ESPER: run_esper,
}


# ---- display


def _line(result: LearnerResult) -> str:
    learned = f" after {result.env_steps:,} steps in {result.cpu_s / 60:.1f} CPU min" if result.trained else ""
    return f"{result.learner}: return {result.mean_return:.3f}, kept {result.mean_committed_pct:.1f} %{learned}"


def _table(setting: Setting, results: Sequence[LearnerResult]) -> Table:
    title = f"esper/Grow-v0 on {setting.task}, {NUM_EPISODES} episodes on fresh hosts"
    table = Table(title=title, title_justify="left")
    for column in ("learner", "env steps", "CPU min", "return", "kept, %"):
        table.add_column(column, justify="left" if column == "learner" else "right")
    for result in results:
        spread = statistics.stdev(episode.total for episode in result.tested)
        table.add_row(
            result.learner,
            f"{result.env_steps:,}",
            f"{result.cpu_s / 60:.1f}",
            f"{result.mean_return:.3f} ± {spread:.3f}",
            f"{result.mean_committed_pct:.1f}",
        )
    return table


def draw(setting: Setting, results: Sequence[LearnerResult], path: Path) -> None:
    """Return by env steps while learning, beside that of random actions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for result in results:
        if not result.trained:
            axes.axhline(result.mean_return, color="gray", linestyle="--", label=result.learner)
            continue
        totals, steps = [episode.total for episode in result.trained], 0
        points = []
        for first in range(0, len(totals) - CURVE_EPISODES + 1, CURVE_EPISODES):
            part = result.trained[first : first + CURVE_EPISODES]
            steps += sum(episode.num_steps for episode in part)
            points.append((steps, statistics.fmean(episode.total for episode in part)))
        axes.plot(*zip(*points, strict=True), label=result.learner)
    axes.set_xlabel("env steps (host epochs)")
    axes.set_ylabel(f"return, mean of {CURVE_EPISODES} episodes")
    axes.set_title(f"esper/Grow-v0, {setting.task}, {setting.minutes:g} CPU minutes each", loc="left", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
