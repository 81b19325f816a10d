"""The order of data depends on its key alone, every row is seen as promised, and nobody can spoil the data set."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.tolaria.batches import _AUGMENT, SharedBatchIterator, crop_flip
from tests.growing import bits, draw

quick = settings(derandomize=True, deadline=None, max_examples=30)


def rows(count: int = 23) -> tuple[Tensor, Tensor]:
    """Rows that carry their own index."""
    index = torch.arange(count)
    return torch.stack([index.float(), -index.float()], dim=1), index * 10


def images(count: int = 12, size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 2, size, size, generator=draw(1)), torch.arange(count)


def epoch_bits(iterator: SharedBatchIterator, episode: int, epoch: int) -> list[tuple[int, bytes, bytes]]:
    return [(b.index, bits(b.inputs), bits(b.targets)) for b in iterator.epoch(episode, epoch)]


# ---- order


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
@quick
def test_equal_keys_give_equal_batches_and_others_do_not(run_seed: int, episode: int, epoch: int) -> None:
    first, second = (SharedBatchIterator(*rows(), batch_size=5, run_seed=run_seed) for _ in range(2))
    expected = epoch_bits(first, episode, epoch)
    list(second.epoch(episode + 1, epoch))  # no cursor: what was asked before does not matter
    assert epoch_bits(second, episode, epoch) == expected
    assert epoch_bits(first, episode + 1, epoch) != expected
    assert epoch_bits(first, episode, epoch + 1) != expected
    assert epoch_bits(SharedBatchIterator(*rows(), batch_size=5, run_seed=run_seed + 1), episode, epoch) != expected


def test_envs_that_take_turns_see_the_same_batches() -> None:
    iterator = SharedBatchIterator(*images(), batch_size=3, run_seed=1, augment="crop_flip")
    streams = [iterator.epoch(0, 2) for _ in range(3)]
    for together in itertools.zip_longest(*streams):
        assert len({(bits(batch.inputs), bits(batch.targets)) for batch in together}) == 1


@given(st.integers(2, 40), st.data())
@quick
def test_an_epoch_visits_each_row_at_most_once(count: int, data: st.DataObject) -> None:
    batch_size = data.draw(st.integers(1, count))
    limit = data.draw(st.one_of(st.none(), st.integers(batch_size, count)))
    iterator = SharedBatchIterator(*rows(count), batch_size=batch_size, run_seed=3, samples_per_epoch=limit)
    batches = list(iterator.epoch(0, 0))
    used = count if limit is None else limit
    assert len(batches) == used // batch_size
    assert [batch.index for batch in batches] == list(range(len(batches)))
    assert all(len(batch.inputs) == len(batch.targets) == batch_size for batch in batches)
    seen = torch.cat([batch.targets for batch in batches]).tolist()
    assert len(set(seen)) == len(seen)
    assert set(seen) <= {10 * i for i in range(count)}
    for batch in batches:
        assert torch.equal(batch.inputs[:, 0] * 10, batch.targets.float())
        assert torch.equal(batch.inputs[:, 1] * -10, batch.targets.float())


def test_a_short_epoch_draws_from_all_rows() -> None:
    iterator = SharedBatchIterator(*rows(20), batch_size=4, run_seed=3, samples_per_epoch=4)
    seen = {int(t) for epoch in range(60) for batch in iterator.epoch(0, epoch) for t in batch.targets}
    assert seen == {10 * i for i in range(20)}


@given(st.integers(1, 40), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)))
@quick
def test_validation_covers_every_row_once_in_order(count: int, batch_size: int, limit: int | None) -> None:
    if batch_size > count:
        batch_size = count
    iterator = SharedBatchIterator(*rows(count), batch_size=batch_size, run_seed=3)
    batches = list(iterator.in_order(limit))
    stop = count if limit is None else min(count, limit)
    assert torch.cat([batch.targets for batch in batches]).tolist() == [10 * i for i in range(stop)]
    assert all(len(batch.targets) == batch_size for batch in batches[:-1])


def test_sums_over_validation_batches_equal_the_whole() -> None:
    inputs, targets = rows(23)
    iterator = SharedBatchIterator(inputs, targets, batch_size=5, run_seed=3)
    total = sum(batch.inputs[:, 0].double().sum().item() for batch in iterator.in_order())
    count = sum(len(batch.targets) for batch in iterator.in_order())
    assert (total, count) == (inputs[:, 0].double().sum().item(), 23)


# ---- the data set is safe


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_the_data_set_is_unchanged_whatever_is_done_to_a_batch(dtype: torch.dtype) -> None:
    inputs, targets = (100 * torch.rand(12, 2, 6, 6, generator=draw(2))).to(dtype), torch.arange(12)
    before = bits(inputs), bits(targets)
    augment = None if dtype is torch.int64 else "crop_flip"
    iterator = SharedBatchIterator(inputs, targets, batch_size=5, run_seed=1, augment=augment)
    for batch in itertools.chain(iterator.epoch(0, 0), iterator.in_order()):
        batch.inputs.fill_(77)
        batch.targets.fill_(-1)
    assert (bits(inputs), bits(targets)) == before


def test_bytes_become_floats_and_tokens_stay() -> None:
    pixels = torch.randint(0, 256, (4, 1, 2, 2), generator=draw(3)).to(torch.uint8)
    assert next(
        SharedBatchIterator(pixels, torch.zeros(4), batch_size=4, run_seed=1).in_order()
    ).inputs.is_floating_point()
    tokens = torch.randint(0, 256, (4, 8), generator=draw(3))
    batch = next(SharedBatchIterator(tokens, tokens, batch_size=4, run_seed=1).in_order())
    assert bits(batch.inputs) == bits(tokens)


def test_iterating_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    iterator = SharedBatchIterator(*images(), batch_size=5, run_seed=1, augment="crop_flip")
    list(iterator.epoch(0, 0))
    list(iterator.in_order())
    assert torch.equal(before, torch.get_rng_state())


def test_batches_come_in_the_asked_memory_format() -> None:
    iterator = SharedBatchIterator(*images(), batch_size=5, run_seed=1, augment="crop_flip", channels_last=True)
    for batch in itertools.chain(iterator.epoch(0, 0), iterator.in_order()):
        assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    plain = SharedBatchIterator(*images(), batch_size=5, run_seed=1, augment="crop_flip")
    for left, right in zip(iterator.epoch(0, 0), plain.epoch(0, 0), strict=True):
        assert torch.equal(left.inputs, right.inputs)


# ---- augmentation


def test_augmentation_is_keyed_by_epoch_and_left_out_of_validation() -> None:
    data, targets = images(4)
    iterator = SharedBatchIterator(data, targets, batch_size=4, run_seed=1, augment="crop_flip")

    def by_row(epoch: int) -> dict[int, bytes]:
        (batch,) = iterator.epoch(0, epoch)
        return {int(t): bits(x) for t, x in zip(batch.targets, batch.inputs, strict=True)}

    assert by_row(0) == by_row(0)
    assert by_row(0) != by_row(1)
    assert by_row(0) != {i: bits(data[i]) for i in range(4)}
    (whole,) = iterator.in_order()
    assert bits(whole.inputs) == bits(data)


def test_augmentation_has_a_key_of_its_own_beside_the_order() -> None:
    same = images(1)[0].expand(8, -1, -1, -1)  # equal rows: only the augmentation can differ

    def drawn(run_seed: int, episode: int, epoch: int) -> bytes:
        iterator = SharedBatchIterator(same, torch.zeros(8), batch_size=4, run_seed=run_seed, augment="crop_flip")
        return b"".join(bits(batch.inputs) for batch in iterator.epoch(episode, epoch))

    made = [drawn(*key) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len(set(made)) == 4
    assert drawn(0, 0, 0) == made[0]


def test_each_image_is_shifted_and_flipped_by_a_draw_of_its_own() -> None:
    data, _ = images(40)
    made = crop_flip(data, draw(5), padding=2)
    assert made.shape == data.shape
    padded = torch.nn.functional.pad(data, (2, 2, 2, 2))
    chosen = set()
    for row, image in enumerate(made):
        found = [
            (top, left, flip)
            for top, left, flip in itertools.product(range(5), range(5), (False, True))
            if torch.equal(image, _window(padded[row], top, left, flip))
        ]
        assert len(found) == 1
        chosen.add(found[0])
    assert len(chosen) > 20
    assert {flip for _, _, flip in chosen} == {False, True}
    assert {top for top, _, _ in chosen} == {left for _, left, _ in chosen} == set(range(5))


def _window(padded: Tensor, top: int, left: int, flip: bool) -> Tensor:
    cut = padded[:, top : top + 6, left : left + 6]
    return cut.flip(2) if flip else cut


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be in 1\.\.23 .*got 0"),
        ({"batch_size": 24}, r"batch_size must be in 1\.\.23 .*got 24"),
        ({"samples_per_epoch": 4}, r"samples_per_epoch must be in 5\.\.23 .*got 4"),
        ({"samples_per_epoch": 24}, r"samples_per_epoch must be in 5\.\.23 .*got 24"),
        ({"augment": "mixup"}, r"unknown augmentation 'mixup'\. Known: crop_flip"),
        ({"mean": torch.zeros(1)}, "mean and std go together"),
        ({"std": torch.ones(1)}, "mean and std go together"),
    ],
)
def test_bad_settings_are_refused_when_the_iterator_is_built(changes: dict[str, object], message: str) -> None:
    settings = {"batch_size": 5, "run_seed": 1} | changes
    with pytest.raises(ValueError, match=message):
        SharedBatchIterator(*rows(), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="23 inputs but 22 targets"):
        SharedBatchIterator(rows()[0], rows()[1][:22], batch_size=5, run_seed=1)


def test_every_augmentation_keeps_shape_and_type() -> None:
    data, _ = images()
    for augment in _AUGMENT.values():
        made = augment(data, draw(1))
        assert (made.shape, made.dtype) == (data.shape, data.dtype)
        assert bits(made) == bits(augment(data, draw(1)))
