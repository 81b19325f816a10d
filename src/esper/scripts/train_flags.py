"""The flags of `esper train`, derived from the training configuration: one per field, grouped, unset unless given."""

from __future__ import annotations

from dataclasses import Field, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import tyro

from esper.simic.training.config import TrainingConfig, preset, read_config, with_overrides

GROUPS: tuple[str, ...] = ("run", "machine", "reward", "policy", "records")
_NOT_FLAGS = ("controller", "reward_weights")
"""The controller is the command's word; prices are for configuration files."""
_HINTS = get_type_hints(TrainingConfig)


def _flag(entry: Field[Any]) -> tuple[str, Any, None]:
    hint = _HINTS[entry.name]
    kinds = {kind.__name__ for kind in get_args(hint) or (hint,) if isinstance(kind, type)} - {"NoneType"}
    metavar = " ".join(sorted(kinds)).upper()
    if get_origin(hint) is tuple:
        metavar = "LOGIT LOGIT ..." if float in get_args(hint) else "NAME NAME ..."
    shown = "" if entry.default is None else f"(default: {entry.default})"
    note = tyro.conf.arg(help=entry.metadata["help"], help_behavior_hint=shown, metavar=metavar)
    return entry.name, Annotated[hint | None, note], None


def _group(group: str) -> tuple[str, type[Any], Any]:
    entries = [entry for entry in fields(TrainingConfig) if entry.metadata["group"] == group]
    flags = [_flag(entry) for entry in entries if entry.name not in _NOT_FLAGS]
    made = make_dataclass(group, flags, frozen=True, kw_only=True)
    made.__doc__ = ""
    return group, made, field(default_factory=made)


_made: Any = make_dataclass("config", [_group(group) for group in GROUPS], frozen=True, kw_only=True)
_made.__doc__ = ""
NO_FLAGS: Any = _made()
if TYPE_CHECKING:  # made at run time, so a type checker cannot know it
    ConfigFlags: TypeAlias = Any
else:
    ConfigFlags = Annotated[_made, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes]


def given(flags: Any) -> dict[str, Any]:
    """The flags that were set, by field name."""
    groups = [getattr(flags, group) for group in GROUPS]
    values = {entry.name: getattr(group, entry.name) for group in groups for entry in fields(group)}
    return {name: value for name, value in values.items() if value is not None}


def resolve(base: str | None, config_json: Path | None, flags: dict[str, Any]) -> TrainingConfig:
    """The configuration of a new run: a preset, changed by a file, changed by what was said on the command line.

    Raises:
        ValueError: A name is unknown or a value is out of range.
    """
    config = TrainingConfig() if base is None else preset(base)
    if config_json is not None:
        config = read_config(config_json, config)
    return with_overrides(config, flags)
