"""How often tensors are read as numbers in a step: engine, policy and log each read once for all envs.

What the hosts measured, gradients included, is one read of the engine at every level (`tests/tolaria/test_reads.py`).
"""

from collections import Counter
from dataclasses import replace

import pytest
from torch import Tensor

from esper.leyline import TelemetryLevel
from esper.nissa import Hub
from esper.simic.client import SimicClient
from esper.simic.run.recorder import RunRecorder
from esper.tolaria.pool import EnginePool
from tests.simic.training.runs import TINY
from tests.telemetry.logs import run_with

STEPS = 3
READS = ("tolist", "item", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__")
PARTS = {"act": (SimicClient, "act"), "price": (SimicClient, "store"), "record": (RunRecorder, "stored")}
PARTS["train"] = (EnginePool, "step")
OFF, NORMAL = TelemetryLevel.OFF, TelemetryLevel.NORMAL


def reads_of_a_round(backend, num_envs, level):
    """By part of the step and way to read, how often that happened in a round."""
    found, inside = Counter(), []

    def counting(name, read):
        def wrapped(tensor, *arguments, **options):
            found.update([(inside[-1], name)] if inside else [])
            return read(tensor, *arguments, **options)

        return wrapped

    def entering(part, call):
        def wrapped(*arguments):
            inside.append(part)
            try:
                return call(*arguments)
            finally:
                inside.pop()

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
        for part, (kind, name) in PARTS.items():
            patch.setattr(kind, name, entering(part, getattr(kind, name)))
        run = replace(TINY, backend=backend, rounds=1, envs=num_envs, episode_length=STEPS)
        run_with(Hub(), run, level, escalation_epochs=0)
    if backend == "native":
        del found["train", "numpy"]  # how compiled code gets at memory of the CPU: a view, for which nothing waits
    return found


@pytest.fixture(scope="module", params=["torch", "native"])
def reads(request):
    return {(envs, level): reads_of_a_round(request.param, envs, level) for envs in (2, 8) for level in (OFF, NORMAL)}


def of(found, *parts):
    return {key: count for key, count in found.items() if key[0] in parts}


@pytest.mark.parametrize("level", [OFF, NORMAL])
def test_a_step_reads_as_often_for_many_envs_as_for_few(reads, level):
    few, many = (
        {key: count for key, count in reads[envs, level].items() if key != ("train", "__bool__")} for envs in (2, 8)
    )  # new seeds are probed before they reach a device, and how many there are is a matter of the policy
    assert few == many
    assert few["train", "tolist"] == STEPS, "what all hosts measured at once"
    assert few["act", "tolist"] == STEPS, "the choices of all envs at once"


@pytest.mark.parametrize("num_envs", [2, 8])
def test_a_log_adds_four_reads_of_the_decision_to_a_step_and_no_other(reads, num_envs):
    """Of tensors that are in the CPU's memory already; nothing is fetched from a device."""
    added = reads[num_envs, NORMAL] - reads[num_envs, OFF]
    assert added == {("record", "tolist"): 4 * STEPS}
    assert of(reads[num_envs, NORMAL], "train") == of(reads[num_envs, OFF], "train")
