"""The flags of `esper train`, derived from the training configuration: one per field, grouped, unset unless given."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import tyro

from esper.simic.training.config import TrainingConfig, preset, read_config, with_overrides

GROUPS: tuple[str, ...] = ("run", "machine", "reward", "policy", "records")
_NOT_FLAGS = ("controller", "reward_weights")
"""The controller is the command's word; prices are for configuration files."""


def _default(entry: Field[Any]) -> Any:
    assert entry.default is not MISSING, f"{entry.name} needs a default"
    return entry.default


def _metavar(hint: Any) -> str:
    kinds = {kind.__name__ for kind in get_args(hint) or (hint,) if isinstance(kind, type)} - {"NoneType"}
    if get_origin(hint) is not tuple:
        return " ".join(sorted(kinds)).upper()
    return "LOGIT LOGIT ..." if float in get_args(hint) else "NAME NAME ..."


def _flag(entry: Field[Any], hint: Any) -> tuple[str, Any, None]:
    default = _default(entry)
    shown = "" if default is None else f"(default: {default})"
    note = tyro.conf.arg(help=entry.metadata["help"], help_behavior_hint=shown, metavar=_metavar(hint))
    return entry.name, Annotated[hint | None, note], None


def _group(group: str) -> type[Any]:
    hints = get_type_hints(TrainingConfig)
    chosen = [entry for entry in fields(TrainingConfig) if entry.name not in _NOT_FLAGS]
    flags = [_flag(entry, hints[entry.name]) for entry in chosen if entry.metadata["group"] == group]
    made = make_dataclass(group, [(name, hint, default) for name, hint, default in flags], frozen=True, kw_only=True)
    made.__doc__ = ""
    return made


RunFlags, MachineFlags, RewardFlags, PolicyFlags, RecordFlags = (_group(group) for group in GROUPS)

if TYPE_CHECKING:  # made at run time, so a type checker cannot know them
    Run: TypeAlias = Any
    Machine: TypeAlias = Any
    Reward: TypeAlias = Any
    Policy: TypeAlias = Any
    Records: TypeAlias = Any
else:
    Run, Machine, Reward, Policy, Records = (
        Annotated[flags, tyro.conf.OmitArgPrefixes]
        for flags in (RunFlags, MachineFlags, RewardFlags, PolicyFlags, RecordFlags)
    )


def given(*groups: Any) -> dict[str, Any]:
    """The flags that were set, by field name."""
    return {
        entry.name: getattr(group, entry.name)
        for group in groups
        for entry in fields(group)
        if getattr(group, entry.name) is not None
    }


def resolve(base: str | None, config_json: Path | None, flags: dict[str, Any]) -> TrainingConfig:
    """The configuration of a new run: a preset, changed by a file, changed by what was said on the command line.

    Raises:
        ValueError: A name is unknown or a value is out of range.
    """
    config = TrainingConfig() if base is None else preset(base)
    if config_json is not None:
        config = read_config(config_json, config)
    return with_overrides(config, flags)
