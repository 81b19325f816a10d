"""TensorBoard files of a run that was killed and resumed, as TensorBoard itself reads them."""

import shutil

import pytest

from esper.leyline.rundir import METRICS_DIR
from esper.scripts.cli import main
from tests.integration.kills import FLAGS, ROUNDS, canonical, checkpoints, kill_when, launch

pytest.importorskip("tensorboardX", reason="TensorBoard files need the extra `metrics`")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
event_file_loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")

TAG = "host/accuracy_mean_pct"
STEPS_PER_ROUND = 10
"""Two envs of five epochs."""


def points_in_files(folder):
    """All points that were ever written, in order, those that a resume made void included."""
    found = []
    for path in sorted(folder.iterdir()):
        for event in event_file_loader.EventFileLoader(str(path)).Load():
            found += [event.step for value in event.summary.value if value.tag == TAG]
    return found


def curve(folder):
    accumulator = event_accumulator.EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in tags}


def test_a_resumed_run_has_every_point_once(tmp_path):
    run = tmp_path / "a"
    process = launch(
        "ppo", *FLAGS, "--keep-checkpoints", ROUNDS, "--exporters", "tensorboard", "--runs", tmp_path, "--run-id", "a",
        "--workers", 1,
    )  # fmt: skip
    kill_when(lambda: len(checkpoints(run)) >= 3, process)
    for later in checkpoints(run)[1:]:  # as if they were damaged, so that points on disk come again
        shutil.rmtree(later.parent)
    main(["train", "--resume", str(run)])

    written = points_in_files(run / METRICS_DIR)
    assert len(written) > len(set(written)), "otherwise this run shows nothing: no point came again"
    found = curve(run / METRICS_DIR)
    for points in found.values():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps))
    rounds = [event["data"] for event in canonical(run) if event["type"] == "ROUND_COMPLETED"]
    assert [step for step, _ in found[TAG]] == [STEPS_PER_ROUND * (index + 1) for index in range(ROUNDS)]
    assert [value for _, value in found[TAG]] == pytest.approx([data["accuracy_mean_pct"] for data in rounds])
    assert len(found["train/approx_kl"]) == ROUNDS
