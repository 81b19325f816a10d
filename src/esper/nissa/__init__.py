"""Nissa: carries events to the log of a run and to whoever listens. It does not know what events mean."""

from esper.nissa.backends import Backend, BackendReport
from esper.nissa.codec import encode
from esper.nissa.hub import TelemetryHub, complain
from esper.nissa.null import NULL_HUB, Hub, NullHub, get_hub, set_hub
from esper.nissa.reports import HubHealth, HubReport
from esper.nissa.segments import begin_attempt, new_run_id, read_manifest, rebuild_manifest

__all__ = [
    "NULL_HUB",
    "Backend",
    "BackendReport",
    "Hub",
    "HubHealth",
    "HubReport",
    "NullHub",
    "TelemetryHub",
    "begin_attempt",
    "complain",
    "encode",
    "get_hub",
    "new_run_id",
    "read_manifest",
    "rebuild_manifest",
    "set_hub",
]
