"""Benchmarks of Esper beside what it is up against: `esper bench NAME` in a checkout, `make bench` for all of them.

They are not part of the installed package. Modules with a `*_command` load no torch before the command runs.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.alarms import bench_alarms_command
from benchmarks.blueprints import bench_blueprints_command, bench_newborns_command
from benchmarks.cluster import bench_cluster_command
from benchmarks.coalitions import bench_coalitions_command
from benchmarks.engine import bench_engine_command
from benchmarks.grow import bench_grow_command
from benchmarks.grow_env import bench_gym_command
from benchmarks.ppo import bench_ppo_command
from benchmarks.rounds import bench_rounds_command
from benchmarks.telemetry import bench_telemetry_command
from benchmarks.viewers import bench_viewers_command

BENCHMARKS: dict[str, Callable[..., None]] = {
    "engine": bench_engine_command,
    "cluster": bench_cluster_command,
    "coalitions": bench_coalitions_command,
    "grow": bench_grow_command,
    "blueprints": bench_blueprints_command,
    "newborns": bench_newborns_command,
    "ppo": bench_ppo_command,
    "rounds": bench_rounds_command,
    "gym": bench_gym_command,
    "telemetry": bench_telemetry_command,
    "alarms": bench_alarms_command,
    "viewers": bench_viewers_command,
}
