"""A world without networks: the real stages, gates and coalition arithmetic over a host that is a formula.

It serves tests of rewards and controllers, and the sandboxes in which a policy must find a known optimum. It must not
know who decides or what is rewarded.
"""

from esper.tamiyo.simulation.worker import SimulatedWorker
from esper.tamiyo.simulation.world import Cue, HostCurve, SimulatedBlueprint, SimulationSpec, Synergy
