"""Hosts: networks with named places to grow. They know nothing about seeds."""

from __future__ import annotations

import torch

from esper.kasmina.hosts.base import CHANNEL_AXIS, TOPOLOGIES, Host, HostSpec
from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.hosts.mlp import MLPHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.kasmina.hosts.wrap import wrap_sequential

__all__ = [
    "CHANNEL_AXIS",
    "TOPOLOGIES",
    "CNNHost",
    "Host",
    "HostSpec",
    "MLPHost",
    "TransformerHost",
    "build_host",
    "wrap_sequential",
]

_KINDS: dict[str, type[MLPHost] | type[CNNHost] | type[TransformerHost]] = {
    "mlp": MLPHost,
    "cnn": CNNHost,
    "transformer": TransformerHost,
}


def build_host(spec: HostSpec, generator: torch.Generator) -> Host:
    """Builds a host from its description, with weights from `generator`.

    Raises:
        ValueError: Unknown kind, or arguments the kind does not take.
    """
    if spec.kind not in _KINDS:
        raise ValueError(f"unknown host kind {spec.kind!r}. Known: {', '.join(_KINDS)}")
    try:
        return _KINDS[spec.kind](**spec.kwargs, generator=generator)
    except TypeError as error:
        raise ValueError(f"host {spec.kind!r}: {error}") from error
