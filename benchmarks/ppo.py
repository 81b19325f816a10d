"""`esper bench ppo`: the learner of Esper on Gymnasium envs, beside sb3-contrib where that is installed.

All learners run one after the other in this process, on one thread, with the same number of envs. Speed is env steps
per second of processor time spent on learning; evaluation is not counted.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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

NUM_EPISODES = 100
"""Greedy episodes behind every return."""
ESPER = "Esper"
CARTPOLE = "CartPole-v1"
CUE = "CueRecall"
ENVS = (CARTPOLE, CUE)
SOLVED = 475.0
"""Mean return at which CartPole-v1 counts as solved; every seed of Esper's learner must get there."""
LEAST_STEPS_PER_CPU_S = 1_000.0
"""Env steps per second of processor time that each of these runs must learn from."""


@record
class LearnerRun:
    """One learner on one env from one seed."""

    learner: str
    env: str
    run_seed: int
    num_envs: int
    env_steps: int
    cpu_s: float
    mean_return: float
    """Of greedy episodes after training, in envs that were not trained in."""

    @property
    def steps_per_cpu_s(self) -> float:
        """Speed of learning."""
        return self.env_steps / self.cpu_s


def bench_ppo_command(
    env_steps: Annotated[int, tyro.conf.arg(help="Env steps that Esper's learner trains for.")] = 75_000,
    rival_steps: Annotated[
        int, tyro.conf.arg(help="Least env steps of each sb3-contrib learner, which ends with a whole round; 0: none.")
    ] = 4_000,
    envs: Annotated[int, tyro.conf.arg(help="Envs side by side, for every learner.")] = 16,
    seeds: Annotated[int, tyro.conf.arg(help="Run seeds of Esper's learner; rivals run once.")] = 3,
    out: Annotated[Path | None, tyro.conf.arg(help="Write the figures as JSON to this file.")] = None,
) -> None:
    """Measure recurrent masked PPO on Gymnasium envs: speed and return.

    CartPole-v1 is solved at a mean return of 475. CueRecall shows a cue that says which of 8 actions is right 7 steps
    later, under masks that leave half of them: 1.0 is perfect, 0.25 is what masks without memory reach, 0.125 is
    chance. Rivals run with their own default settings.

    Exit code 1 says that Esper's learner missed a limit on CartPole-v1: a mean return of 475 with every seed, 1,000
    steps per CPU-second in every run.
    """
    least = {"env-steps": (env_steps, 1), "rival-steps": (rival_steps, 0), "envs": (envs, 1), "seeds": (seeds, 1)}
    for name, (value, bound) in least.items():
        if value < bound:
            raise ValueError(f"--{name} must be at least {bound}, got {value}")
    check_out(out)
    _require_gymnasium()
    import torch

    torch.set_num_threads(1)
    console = plain_console()
    runs = []
    with console.status("learning") as status:
        for run in _all_runs(env_steps, rival_steps, envs, seeds, status.update):
            console.print(_line(run), highlight=False, soft_wrap=True)
            runs.append(run)
    console.print(_table(runs))
    if rival_steps and not _have_rivals():
        console.print("sb3-contrib is not installed, so nothing to compare with; pip install 'esper-growth[bench]'")
    if out is not None:
        write_figures(out, _figures(runs))
        console.print(f"written: {out}", soft_wrap=True)
    if missed := missed_limits(runs):
        console.print(f"Missed: {'; '.join(missed)}", highlight=False, soft_wrap=True)
        raise SystemExit(1)


def missed_limits(runs: Sequence[LearnerRun]) -> list[str]:
    """What Esper's learner fell short of on CartPole. Other envs and learners are there to compare with."""
    missed = []
    for run in runs:
        if (run.env, run.learner) != (CARTPOLE, ESPER):
            continue
        if not run.mean_return >= SOLVED:
            missed.append(
                f"seed {run.run_seed} reached a return of {run.mean_return:.1f}, at least {SOLVED:g} expected"
            )
        if not run.steps_per_cpu_s >= LEAST_STEPS_PER_CPU_S:
            missed.append(
                f"seed {run.run_seed} learned from {run.steps_per_cpu_s:,.0f} steps per CPU s, at least "
                f"{LEAST_STEPS_PER_CPU_S:,.0f} expected"
            )
    return missed


def _require_gymnasium() -> None:
    import esper.simic.agent.gym_envs  # noqa: F401 (says what to install)


def _have_rivals() -> bool:
    return importlib.util.find_spec("sb3_contrib") is not None


def _all_runs(
    env_steps: int, rival_steps: int, num_envs: int, seeds: int, tell: Callable[[str], None]
) -> Iterator[LearnerRun]:
    for env in ENVS:
        for run_seed in range(seeds):
            tell(f"{env}: Esper, seed {run_seed}")
            yield run_esper(env, env_steps, num_envs, run_seed, memory=True)
        if env == CUE:
            tell(f"{env}: Esper without memory")
            yield run_esper(env, env_steps, num_envs, 0, memory=False)
        if rival_steps and _have_rivals():
            for learner in ("RecurrentPPO", "MaskablePPO"):
                tell(f"{env}: sb3-contrib {learner}")
                yield run_rival(learner, env, rival_steps, num_envs, 0)


def _maker(env: str) -> Callable[[], gymnasium.Env[Any, Any]]:
    import gymnasium

    from benchmarks.cue_recall import CueRecall

    return CueRecall if env == CUE else lambda: gymnasium.make(env)


def _test_seed(run_seed: int) -> int:
    return derive_seed(run_seed, None, None, None, "test envs") % 2**31


def run_esper(env: str, env_steps: int, num_envs: int, run_seed: int, *, memory: bool) -> LearnerRun:
    """Trains Esper's learner with its default settings."""
    from gymnasium.vector import SyncVectorEnv

    from esper.simic.agent.gym import GymConfig, RecurrentPPO, call_action_masks

    maker = _maker(env)
    config = GymConfig(schedule_steps=env_steps, memory=memory)
    masks = call_action_masks if env == CUE else None
    ppo = RecurrentPPO(SyncVectorEnv([maker] * num_envs), config, run_seed=run_seed, masks=masks)
    started = time.process_time()
    for _ in ppo.learn():
        pass
    cpu_s = time.process_time() - started
    returns = ppo.evaluate(SyncVectorEnv([maker] * NUM_EPISODES), env_seed=_test_seed(run_seed))
    return LearnerRun(
        learner=ESPER if memory else f"{ESPER} without memory",
        env=env,
        run_seed=run_seed,
        num_envs=num_envs,
        env_steps=ppo.env_steps,
        cpu_s=cpu_s,
        mean_return=statistics.fmean(returns),
    )


def run_rival(learner: str, env: str, env_steps: int, num_envs: int, run_seed: int) -> LearnerRun:
    """Trains a learner of sb3-contrib with its default settings. RecurrentPPO sees no masks, MaskablePPO no past."""
    import sb3_contrib
    from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_masked
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    maker = _maker(env)
    train = make_vec_env(maker, n_envs=num_envs, seed=run_seed)
    test = make_vec_env(maker, n_envs=NUM_EPISODES, seed=_test_seed(run_seed))
    model: Any
    evaluate: Any
    masked: dict[str, bool] = {}
    if learner == "RecurrentPPO":
        model, evaluate = sb3_contrib.RecurrentPPO("MlpLstmPolicy", train, seed=run_seed, device="cpu"), evaluate_policy
    else:
        model, evaluate = sb3_contrib.MaskablePPO("MlpPolicy", train, seed=run_seed, device="cpu"), evaluate_masked
        masked["use_masking"] = env == CUE
    started = time.process_time()
    model.learn(env_steps, **masked)
    cpu_s = time.process_time() - started
    mean_return, _ = evaluate(model, test, n_eval_episodes=NUM_EPISODES, deterministic=True, **masked)
    return LearnerRun(
        learner=f"sb3-contrib {learner}",
        env=env,
        run_seed=run_seed,
        num_envs=num_envs,
        env_steps=int(model.num_timesteps),
        cpu_s=cpu_s,
        mean_return=float(mean_return),
    )


# ---- display


def _line(run: LearnerRun) -> str:
    return (
        f"{run.env}, {run.learner}, seed {run.run_seed}: return {run.mean_return:.2f} after {run.env_steps:,} steps, "
        f"{run.steps_per_cpu_s:,.0f} steps per CPU s"
    )


def _table(runs: Sequence[LearnerRun]) -> Table:
    title = f"PPO on {runs[0].num_envs} envs, one thread; returns over {NUM_EPISODES} greedy episodes per seed"
    limits = f"at least {SOLVED:g} by every seed, {LEAST_STEPS_PER_CPU_S:,.0f} steps per CPU s in every run"
    table = Table(
        title=title, title_justify="left", caption=f"limits of {ESPER} on {CARTPOLE}: {limits}", caption_justify="left"
    )
    for column in ("env", "learner", "env steps", "steps per CPU s", "return by seed"):
        table.add_column(column, justify="left" if column in ("env", "learner") else "right")
    for env, learner in dict.fromkeys((run.env, run.learner) for run in runs):
        own = [run for run in runs if (run.env, run.learner) == (env, learner)]
        table.add_row(
            env,
            learner,
            f"{own[0].env_steps:,}",
            f"{statistics.median(run.steps_per_cpu_s for run in own):,.0f}",
            ", ".join(f"{run.mean_return:.2f}" for run in own),
        )
    return table


def _figures(runs: Sequence[LearnerRun]) -> dict[str, Any]:
    import torch

    return {
        "versions": {
            "torch": torch.__version__,
            "sb3_contrib": importlib.metadata.version("sb3_contrib") if _have_rivals() else None,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "threads": torch.get_num_threads(),
        "episodes": NUM_EPISODES,
        "limits": {"env": CARTPOLE, "mean_return": SOLVED, "steps_per_cpu_s": LEAST_STEPS_PER_CPU_S},
        "runs": [asdict(run) | {"steps_per_cpu_s": run.steps_per_cpu_s} for run in runs],
    }
