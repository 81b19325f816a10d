"""What an evaluation is asked to be. Light: the command line reads it before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """The flags of `esper evaluate` that say what is compared; what is written below each is its help."""

    task: str = "digits_blind"
    """What to evaluate on; `esper tasks` lists them."""
    arms: tuple[str, ...] = ()
    """What to compare with wait_only: schedule, periodic, plateau, fragrow, heuristic, random, static_final,
    static_wide, ppo_greedy, ppo_sampled, all, or a policy's folder. Default: fixed controllers."""
    seeds: int = 5
    """Paired run seeds per arm; a claim needs 20."""
    policy: tuple[str, ...] = ()
    """Runs or checkpoints of trained policies."""
    subject: str | None = None
    """Arm whose growth is judged; default: ppo_greedy, or schedule if there is no policy."""
    blueprint: str | None = None
    """Seed that the schedule plants; default: one that suits the host."""
    epochs: int | None = None
    """Epochs of every run; default: those of the policy's training, or the task's."""
    budget: int | None = None
    """Most parameters a host and its seeds may have together, in every arm."""
    tuned: Path | None = None
    """A tuned.json whose parameters fixed controllers use."""
    data_dir: Path | None = None
    """Where the data lies, if not in a usual place."""
    out: Path | None = None
    """Folder for results; default: runs/evaluate-TASK."""

    @property
    def folder(self) -> Path:
        """Where results are."""
        return Path("runs") / f"evaluate-{self.task}" if self.out is None else self.out
