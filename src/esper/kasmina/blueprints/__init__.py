"""The registry of blueprints: append, never reorder or rename, because files and policies refer to the rows.

To add one: write its body beside the others of its topology and append a row there or here. Its tests, its card, its
mask and its listing come from the row.
"""

from __future__ import annotations

from esper.kasmina.blueprints.base import GAMMA_SCALE, Blueprint, Residual
from esper.kasmina.blueprints.cnn import CNN_BLUEPRINTS, CNN_CONTROLS, CNN_LATER
from esper.kasmina.blueprints.mlp import MLP_BLUEPRINTS, MLP_CONTROLS
from esper.kasmina.blueprints.span import SPAN_BLUEPRINTS
from esper.kasmina.blueprints.transformer import TRANSFORMER_BLUEPRINTS
from esper.leyline import check_known

__all__ = ["BLUEPRINTS", "GAMMA_SCALE", "Blueprint", "Residual", "blueprints_for", "get_blueprint"]

BLUEPRINTS: dict[str, Blueprint] = {
    blueprint.key: blueprint
    for blueprint in (
        *MLP_BLUEPRINTS,
        *CNN_BLUEPRINTS,
        *TRANSFORMER_BLUEPRINTS,
        *MLP_CONTROLS,
        *CNN_CONTROLS,
        *CNN_LATER,
        *SPAN_BLUEPRINTS,
    )
}


def get_blueprint(key: str, version: int | None = None) -> Blueprint:
    """Looks a blueprint up by key such as "cnn.conv", and by the version of a saved seed if there is one.

    Raises:
        ValueError: No blueprint has that key, or it builds seeds of another version; the message says what is known.
    """
    check_known("blueprint", key, BLUEPRINTS)
    found = BLUEPRINTS[key]
    if version is not None and version != found.version:
        raise ValueError(
            f"a seed of blueprint {key!r} was saved in version {version}, and this Esper builds version "
            f"{found.version}, which is built otherwise: load it with the Esper that saved it, or grow it anew"
        )
    return found


def blueprints_for(topology: str) -> tuple[str, ...]:
    """Keys that a host of this topology offers unless its task says otherwise."""
    return tuple(key for key, row in BLUEPRINTS.items() if row.topology == topology and not row.control)
