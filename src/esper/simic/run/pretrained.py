"""The controller that comes with Esper: a policy trained over the nursery, its card, and the range it knows.

The card lies beside the weights and says what it was trained on, how it did where, and for which hosts it is meant.
Outside that range it must not decide: who uses it says so and lets the default rule decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from esper.leyline import HostLayout, LifecycleConfig, ModelFileError, record
from esper.leyline.files import loads_json
from esper.simic.agent.agent_files import FACTS_FILE, OPTIMIZER_FILE, POLICY_FILE, exactly
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.tamiyo_network import NetworkShape
from esper.simic.training.config import PRETRAINED

CARD_FILE = "card.json"


@record
class KnownRange:
    """Hosts that it was trained on."""

    topologies: tuple[str, ...]
    max_budget_ratio: float
    """Budget in units of the host; training had one on every host."""
    min_horizon: int
    max_horizon: int
    max_classes: int


@record
class Card:
    """What there is to know about the shipped policy."""

    trained_on: str
    recipe: str
    """How it was trained and chosen, in words."""
    code: str
    """Version of the code that trained it."""
    nursery_sha256: str
    """Over the names and hashes of the held-out list: what it must not have seen."""
    run_seed: int
    rounds: int
    episodes: int
    host_epochs: int
    cpu_hours: float
    range: KnownRange
    validation: Mapping[str, float]
    """Mean points over waiting on draws of the training families, by controller."""
    held_out: Mapping[str, float]
    """Score on held-out tasks, by controller; empty until they are measured."""
    limits: str


def card_folder() -> Traversable:
    """Where the files are."""
    return files("esper.simic").joinpath(PRETRAINED)


def is_shipped() -> bool:
    """True if this release has a pretrained policy."""
    return card_folder().joinpath(CARD_FILE).is_file()


def load_pretrained() -> tuple[PPOAgent, Card]:
    """The shipped policy and its card.

    Raises:
        ValueError: This release has none.
        ModelFileError: The files are damaged, or of another release.
    """
    folder = card_folder()
    if not is_shipped():
        raise ValueError(
            "this release has no pretrained controller; leave controller out for the default rule, or name a run that "
            "you have trained (esper train ppo --preset nursery)"
        )
    content = {name: folder.joinpath(name).read_bytes() for name in (POLICY_FILE, FACTS_FILE)}
    return read_agent(content), msgspec.json.decode(folder.joinpath(CARD_FILE).read_bytes(), type=Card)


def read_agent(content: Mapping[str, bytes]) -> PPOAgent:
    """An agent from its weights and facts alone; it can be played, and trained on from a fresh optimizer.

    Raises:
        ModelFileError: The files are damaged, or of another release.
    """
    try:
        facts: Any = loads_json(content[FACTS_FILE])
        fresh = PPOAgent(exactly(facts["shape"], NetworkShape), exactly(facts["config"], PPOConfig), run_seed=0)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{FACTS_FILE}: does not describe an agent of this release ({error})") from error
    return PPOAgent.load({**content, OPTIMIZER_FILE: fresh.to_files()[OPTIMIZER_FILE]})


def why_outside(
    known: KnownRange, layout: HostLayout, lifecycle: LifecycleConfig, *, horizon: int, num_classes: int
) -> str | None:
    """What of a host is outside the range of the policy, in words; None if it knows such hosts."""
    if layout.topology not in known.topologies:
        return f"it has learned on {', '.join(known.topologies)} hosts, and this one is {layout.topology}"
    if not known.min_horizon <= horizon <= known.max_horizon:
        return f"it has learned episodes of {known.min_horizon} to {known.max_horizon} epochs, and this has {horizon}"
    if num_classes > known.max_classes:
        return f"it has learned up to {known.max_classes} classes, and these are {num_classes}"
    if lifecycle.param_budget is None:
        return "it has learned to grow within a budget, and there is none"
    ratio = lifecycle.param_budget / layout.host_params
    if ratio > known.max_budget_ratio:
        return f"it has learned budgets of up to {known.max_budget_ratio:.0f} times the host, and this is {ratio:.1f}"
    return None
