"""Variants of a data set: fewer classes, fewer rows, noise, permuted pixels, or labels by a teacher network.

A variant is plain values, so a task with one can be built again anywhere; everything random in it follows from its own
seed. Images only: text has no classes to leave out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline import check_known, derive_seed, record
from esper.runtime.data.splits import Content, Split, digest, make_content

TEACHERS: tuple[str, ...] = ("linear", "mlp", "conv")
"""What decides a label: every pixel by its own weight, hidden units over all pixels, or small patterns anywhere."""
TEACHER_HIDDEN = 32


@record
class DataVariant:
    """What is done to a data set of images before anyone sees it.

    Raises:
        ValueError: A value is out of range.
    """

    classes: tuple[int, ...]
    """Classes that stay, renumbered from 0; of a teacher, as many classes as are named here."""
    train_rows: int
    """Most training rows."""
    label_noise: float
    """Share of training labels that are drawn anew. Validation and test keep theirs."""
    pixel_noise: float
    """Noise on the pixels of all splits, in standard deviations of the data."""
    permuted: bool
    """True: pixels in one random order, the same for all rows, so that neighbours mean nothing."""
    teacher: str | None
    """One of TEACHERS: rows become random patterns labelled by such a network. None: the source's own rows."""
    rng_seed: int

    def __post_init__(self) -> None:
        if len(set(self.classes)) < 2 or len(set(self.classes)) != len(self.classes):
            raise ValueError(f"a variant keeps at least 2 different classes, got {self.classes}")
        if self.train_rows < 1:
            raise ValueError(f"train_rows must be at least 1, got {self.train_rows}")
        if not 0.0 <= self.label_noise <= 1.0:
            raise ValueError(f"label_noise must be in [0, 1], got {self.label_noise}")
        if not 0.0 <= self.pixel_noise <= 10.0:
            raise ValueError(f"pixel_noise must be in [0, 10], got {self.pixel_noise}")
        if self.teacher is not None:
            check_known("teacher", self.teacher, TEACHERS)


def vary(content: Content, variant: DataVariant) -> Content:
    """The variant of what a reader found. Equal values give equal bits.

    Raises:
        ValueError: A class is not there.
    """
    if max(variant.classes) >= content.num_classes:
        raise ValueError(f"classes {variant.classes} of a data set with {content.num_classes}")
    splits = {name: getattr(content, name) for name in ("train", "val", "test")}
    if variant.teacher is not None:
        splits = _taught(splits, variant)
    else:
        splits = {name: _keep_classes(split, variant.classes) for name, split in splits.items()}
    splits["train"] = _fewer(splits["train"], variant)
    # Before the noise, so that noise is noise and not another scale.
    scale = float(splits["train"].inputs.float().std())
    splits = {name: _disturbed(name, split, variant, scale) for name, split in splits.items()}
    hashes = {name: digest(split.inputs.numpy(), split.targets.numpy()) for name, split in splits.items()}
    keeps_scale = variant.teacher is None
    return make_content(
        f"{content.description}; {describe_variant(variant)}",
        len(variant.classes),
        splits,
        hashes,
        content.mean if keeps_scale else None,
        content.std if keeps_scale else None,
    )


def describe_variant(variant: DataVariant) -> str:
    """In words, for lists."""
    parts = [f"{len(variant.classes)} classes", f"{variant.train_rows:,} rows"]
    parts += [f"teacher {variant.teacher}"] if variant.teacher else []
    parts += [f"{variant.label_noise:.0%} labels redrawn"] if variant.label_noise else []
    parts += [f"pixel noise {variant.pixel_noise:.1f}"] if variant.pixel_noise else []
    parts += ["pixels permuted"] if variant.permuted else []
    return ", ".join(parts)


def _generator(variant: DataVariant, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(variant.rng_seed, None, None, None, purpose))


def _keep_classes(split: Split, classes: tuple[int, ...]) -> Split:
    rows = torch.isin(split.targets, torch.tensor(classes))
    renumber = {label: number for number, label in enumerate(classes)}
    targets = torch.tensor([renumber[label] for label in split.targets[rows].tolist()])
    return Split(inputs=split.inputs[rows], targets=targets)


def _fewer(split: Split, variant: DataVariant) -> Split:
    rows = torch.randperm(len(split), generator=_generator(variant, "rows"))[: variant.train_rows]
    return Split(inputs=split.inputs[rows], targets=split.targets[rows])


def _disturbed(name: str, split: Split, variant: DataVariant, scale: float) -> Split:
    inputs, targets = split.inputs, split.targets
    if variant.pixel_noise:
        noise = torch.randn(inputs.shape, generator=_generator(variant, f"pixels:{name}"))
        noisy = inputs.float() + variant.pixel_noise * scale * noise
        inputs = noisy.round().clamp(0, 255).byte() if inputs.dtype is torch.uint8 else noisy
    if variant.permuted:
        order = torch.randperm(inputs[0, 0].numel(), generator=_generator(variant, "permutation"))
        inputs = inputs.flatten(2)[:, :, order].view_as(inputs)
    if variant.label_noise and name == "train":
        generator = _generator(variant, "labels")
        drawn = torch.randint(len(variant.classes), targets.shape, generator=generator)
        targets = torch.where(torch.rand(targets.shape, generator=generator) < variant.label_noise, drawn, targets)
    return Split(inputs=inputs, targets=targets)


# ---- teachers


def _taught(splits: dict[str, Split], variant: DataVariant) -> dict[str, Split]:
    """As many rows of noise as the source has, labelled by a random network."""
    patterns = {
        name: torch.randn(split.inputs.shape, generator=_generator(variant, f"patterns:{name}"))
        for name, split in splits.items()
    }
    scores = {name: _teach(rows, variant) for name, rows in patterns.items()}
    # In units of its own spread, or one loud class would be the answer to everything.
    mean, std = scores["train"].mean(0), scores["train"].std(0).clamp(min=1e-6)
    return {name: Split(inputs=patterns[name], targets=((scores[name] - mean) / std).argmax(1)) for name in splits}


def _teach(rows: Tensor, variant: DataVariant) -> Tensor:
    """Scores `[rows, classes]`."""
    generator, classes = _generator(variant, "teacher"), len(variant.classes)
    if variant.teacher == "conv":
        kernels = torch.randn(classes, rows.shape[1], 3, 3, generator=generator)
        return F.conv2d(rows, kernels, padding=1).relu().mean((2, 3))
    flat = rows.flatten(1)
    if variant.teacher == "mlp":
        flat = (flat @ torch.randn(flat.shape[1], TEACHER_HIDDEN, generator=generator)).relu()
    return flat @ torch.randn(flat.shape[1], classes, generator=generator)
