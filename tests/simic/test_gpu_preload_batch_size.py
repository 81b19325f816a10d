"""Rows that lie on a device from the start are batched as the task says, however many envs share them."""

import pytest
import torch

from esper.runtime.tasks import get_task_spec, load_task_data, override
from esper.simic.training.env_factory import build_worker, make_batches, make_worker_spec
from esper.simic.training.rollout import episode_seeds
from esper.tolaria.batches import SharedBatchIterator


@pytest.fixture(scope="module")
def data():
    return load_task_data(get_task_spec("digits_mlp"))


@pytest.mark.parametrize("batch_size", [16, 64, 100])
def test_training_batches_have_the_size_of_the_task(data, batch_size):
    task = override(get_task_spec("digits_mlp"), batch_size=batch_size)
    train, _ = make_batches(task, data)
    sizes = [len(batch.targets) for batch in train.keyed(3).epoch(0, 0)]
    assert set(sizes) == {batch_size}
    assert len(sizes) == len(data.train) // batch_size


def test_validation_covers_every_row_in_chunks_of_the_task(data):
    task = override(get_task_spec("digits_mlp"), val_chunk_rows=100)
    _, val = make_batches(task, data)
    sizes = [len(batch.targets) for batch in val.in_order()]
    assert sum(sizes) == len(data.val)
    assert all(size == 100 for size in sizes[:-1])
    assert 0 < sizes[-1] <= 100


@pytest.mark.parametrize("scratch", [False, True])
def test_mapped_and_sent_rows_give_the_same_batches(data, tmp_path, scratch):
    task = get_task_spec("digits_mlp")
    train, _ = make_batches(task, make_worker_spec(task, data, scratch=tmp_path if scratch else None).only.open())
    reference, _ = make_batches(task, data)
    for mine, theirs in zip(train.keyed(1).epoch(0, 2), reference.keyed(1).epoch(0, 2), strict=True):
        assert torch.equal(mine.inputs, theirs.inputs)
        assert torch.equal(mine.targets, theirs.targets)


def test_a_run_may_bring_its_own_gatherer(data):
    class Counting(SharedBatchIterator):
        made = 0

        def __init__(self, *arguments, **options):
            Counting.made += 1
            super().__init__(*arguments, **options)

    spec = make_worker_spec(get_task_spec("digits_mlp"), data, batches=Counting)
    build_worker(spec, lambda epoch, batch: None).reset(episode_seeds(0, 0, 2))
    assert Counting.made == 2
