"""A task of somebody's own: regression with a squared error, a host and data of functions in this file."""

import torch
from torch import nn

from esper.kasmina import wrap_sequential
from esper.leyline import DEFAULT_LIFECYCLE, OptimSpec
from esper.leyline.scale import r2_scale
from esper.runtime.own import user_host
from esper.runtime.tasks import TaskSpec


def make_host():
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    return wrap_sequential(net, slots={"r0c0": 1}, topology="mlp", sample=torch.zeros(2, 2))


def make_data():
    rng = torch.Generator().manual_seed(0)
    inputs = torch.rand(400, 2, generator=rng) * 6.0 - 3.0
    targets = torch.sin(inputs[:, :1] * 2.0) + 0.3 * inputs[:, 1:]
    return tuple((inputs[rows], targets[rows]) for rows in torch.arange(400).split([256, 72, 72]))


def mean_absolute(outputs, targets):
    return (outputs - targets).abs().mean()


def make_task(**changes):
    variance = float(make_data()[0][1].var())
    facts = {
        "name": "sines",
        "description": "a sine and a slope",
        "host": user_host(make_host, "mlp"),
        "slots": ("r0c0",),
        "blueprints": None,
        "data": f"{__file__}:make_data",
        "variant": None,
        "context": None,
        "num_classes": 10,
        "metric": "loss",
        "loss": "torch.nn.functional:mse_loss",
        "scale": r2_scale(variance),
        "batch_size": 32,
        "samples_per_epoch": None,
        "val_samples": None,
        "val_chunk_rows": 512,
        "horizon": 6,
        "optimizer": OptimSpec(kind="adamw", lr=1e-2, weight_decay=0.0, momentum=0.0, schedule="cosine"),
        "lifecycle": DEFAULT_LIFECYCLE,
        "augment": None,
        "channels_last": False,
    }
    return TaskSpec(**{**facts, **changes})


def make_number():
    return 7
