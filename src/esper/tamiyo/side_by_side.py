"""One controller for each host: hosts that run side by side may differ, and none decides by what its neighbours do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from esper.leyline import ActionExecutionResult, ActionSpec, FeatureContext, PolicyProtocol


class SideBySide:
    """One controller per host, each seeing its own only: what it decides does not depend on who runs beside it.

    A policy that decides for several hosts in one matrix product may round differently than for one alone.
    """

    def __init__(self, controllers: Mapping[int, PolicyProtocol]) -> None:
        self._controllers = controllers

    def begin(self, state: ActionExecutionResult) -> None:
        """Starts every controller with its own host."""
        for env_id, own in _by_env(state).items():
            self._controllers[env_id].begin(own)

    def act(self, state: ActionExecutionResult) -> list[ActionSpec]:
        """Asks each for its own host."""
        return [spec for env_id, own in _by_env(state).items() for spec in self._controllers[env_id].act(own)]

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """Hands each what became of its own host."""
        later = _by_env(after)
        for env_id, own in _by_env(before).items():
            self._controllers[env_id].store(own, later[env_id])


def _by_env(state: ActionExecutionResult) -> dict[int, ActionExecutionResult]:
    """The state of every env alone, by env id."""
    return {
        report.env_id: ActionExecutionResult(
            outcomes=state.outcomes[position : position + 1],
            reports=(report,),
            contexts=state.contexts[position : position + 1],
            post_action_masks=state.post_action_masks[position : position + 1],
            truncated_bootstrap_targets={
                env_id: target
                for env_id, target in state.truncated_bootstrap_targets.items()
                if env_id == report.env_id
            },
        )
        for position, report in enumerate(state.reports)
    }


class OnePerHost(SideBySide):
    """A controller on hosts that differ: each gets one of its own, made for its layout and horizon."""

    def __init__(self, make: Callable[[FeatureContext, int], PolicyProtocol]) -> None:
        super().__init__({})
        self._make = make

    def begin(self, state: ActionExecutionResult) -> None:
        """Looks at the hosts."""
        self._controllers = {
            report.env_id: self._make(context, report.signals.horizon)
            for report, context in zip(state.reports, state.contexts, strict=True)
        }
        super().begin(state)
