"""Nissa: carries events to the log of a run and to whoever listens. It does not know what events mean."""

from esper.nissa.backends import Backend, BackendReport
from esper.nissa.codec import encode
from esper.nissa.hub import Hub, HubHealth, HubLimits, TelemetryHub, get_hub, set_hub
from esper.nissa.log_file import new_run_id
from esper.nissa.writer import complain
