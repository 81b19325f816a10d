"""The agent: recurrent PPO over factored, masked actions. Importing this package loads no torch."""

from esper.simic.agent.types import ActionDict, GradientStats, HeadEntropies, HeadLogProbs, PPOUpdateMetrics
