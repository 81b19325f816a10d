"""Where data comes from: the table of sources, the search for their files, and loading.

Nothing is downloaded and nothing is made up: data that is not there raises with every place that was searched and how
to get it.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from esper.leyline import DataNotFound, check_known, record
from esper.runtime.data import cifar, digits, fashion, text
from esper.runtime.data.splits import Content, Dataset
from esper.runtime.data.variants import DataVariant, vary

USUAL_FOLDER = "data"
"""Searched in the current directory when nothing else is said."""


@record
class Source:
    """One kind of data: how to recognise it on disk and how to read it."""

    name: str
    title: str
    read: Callable[..., Content]
    """Takes the place that `locate` found and, for text, the context."""
    row_shape: tuple[int, ...] | None
    """Channels, height and width of an image; None for text, whose rows are as long as the task wants."""
    locate: Callable[[Path], Path | None]
    """The data at or directly below a path, or None. Looks at names only."""
    standard_places: tuple[str, ...]
    variable: str | None
    """Environment variable that names another place. None: comes with Esper or Python, no other place is searched."""
    expected: str
    remedy: str

    @property
    def is_text(self) -> bool:
        """True if rows are windows of a token stream."""
        return self.row_shape is None


@record
class DataStatus:
    """Whether a source is on this machine, found without reading it."""

    source: Source
    place: Path | None
    """Where it is; None: not found."""
    searched: tuple[str, ...]

    @property
    def found(self) -> bool:
        """True if the files are there; whether they are sound shows when they are loaded."""
        return self.place is not None


def _locate_digits(place: Path) -> Path | None:
    path = place / digits.FILE
    return path if path.is_file() else None


def _locate_pydoc(place: Path) -> Path | None:
    package, _, _ = text.PYDOC_MODULE.partition(".")
    if find_spec(package) is None or find_spec(text.PYDOC_MODULE) is None:
        return None
    return place / package


def _locate_fashion(place: Path) -> Path | None:
    for folder in (place, place / "fashion-mnist"):
        if all(fashion.find_file(folder, name) for name in fashion.FILES):
            return folder
    return None


def _locate_cifar(place: Path) -> Path | None:
    if place.is_file():
        return place if place.name.endswith((".tar.gz", ".tgz")) else None
    for folder in (place, place / cifar.FOLDER):
        if all((folder / name).is_file() for name in cifar.FILES):
            return folder
    archive = place / cifar.ARCHIVE
    return archive if archive.is_file() else None


def _locate_text(place: Path) -> Path | None:
    if place.is_file():
        return None if place.suffix in (".gz", ".tgz") else place
    files = [path for path in place.glob("*.txt") if path.is_file()]
    return files[0] if len(files) == 1 else None


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="digits",
            title="digits",
            read=digits.read_digits,
            row_shape=(1, digits.SIDE, digits.SIDE),
            locate=_locate_digits,
            standard_places=(str(Path(digits.__file__).parent),),
            variable=None,
            expected=digits.FILE,
            remedy="it comes with Esper: install Esper again",
        ),
        Source(
            name="pydoc",
            title="Python's help topics",
            read=text.read_pydoc,
            row_shape=None,
            locate=_locate_pydoc,
            standard_places=(sysconfig.get_path("stdlib"),),
            variable=None,
            expected=f"the module {text.PYDOC_MODULE}",
            remedy="it comes with Python: install the complete standard library",
        ),
        Source(
            name="fashion",
            title="Fashion-MNIST",
            read=fashion.read_fashion,
            row_shape=(1, fashion.SIDE, fashion.SIDE),
            locate=_locate_fashion,
            standard_places=(USUAL_FOLDER, "/usr/share/datasets/fashion-mnist"),
            variable="ESPER_FASHION_MNIST",
            expected=f"{', '.join(fashion.FILES)}, each plain or .gz",
            remedy="apt-get install dataset-fashion-mnist on Debian, or the four files from "
            "https://github.com/zalandoresearch/fashion-mnist",
        ),
        Source(
            name="cifar10",
            title="CIFAR-10",
            read=cifar.read_cifar,
            row_shape=cifar.SHAPE,
            locate=_locate_cifar,
            standard_places=(USUAL_FOLDER,),
            variable="ESPER_CIFAR10",
            expected=f"the folder {cifar.FOLDER} or the file {cifar.ARCHIVE}",
            remedy='the "python version" from https://www.cs.toronto.edu/~kriz/cifar.html',
        ),
        Source(
            name="text",
            title="text file",
            read=text.read_text_file,
            row_shape=None,
            locate=_locate_text,
            standard_places=(USUAL_FOLDER,),
            variable="ESPER_TEXT",
            expected="one UTF-8 .txt file",
            remedy="any text will do; TinyStories is at https://huggingface.co/datasets/roneneldan/TinyStories",
        ),
    )
}


def get_source(name: str) -> Source:
    """Looks a source up by name.

    Raises:
        ValueError: No source has that name; the message lists the known ones.
    """
    check_known("data source", name, SOURCES)
    return SOURCES[name]


def find_data(name: str, data_dir: str | Path | None = None) -> DataStatus:
    """Looks for a source: in `data_dir`, where its environment variable points, then where it usually is.

    Args:
        name: A key of SOURCES.
        data_dir: A folder that holds the data, or a folder above it, or the archive or text file itself.
    """
    source = get_source(name)
    named = () if source.variable is None else (data_dir, os.environ.get(source.variable))
    places = [Path(place).expanduser().absolute() for place in (*named, *source.standard_places) if place]
    found = (source.locate(place) for place in places)
    return DataStatus(
        source=source,
        place=next((place for place in found if place is not None), None),
        searched=tuple(str(place) for place in places),
    )


def load_dataset(
    name: str,
    *,
    context: int | None = None,
    data_dir: str | Path | None = None,
    variant: DataVariant | None = None,
) -> Dataset:
    """Reads a source, checks all of it and returns it with the test split closed.

    Args:
        name: A key of SOURCES.
        context: Bytes per window; text sources need it and the others take None.
        data_dir: See `find_data`.
        variant: What is done to all splits after reading.

    Raises:
        DataNotFound: The files are in none of the places searched.
        DataDamaged: The files are there but are not what they claim to be.
        ValueError: Unknown source, or a context where none belongs.
    """
    source = get_source(name)
    if source.is_text != (context is not None) or (context is not None and context < 1):
        wanted = "a context of at least 1 byte" if source.is_text else "no context"
        raise ValueError(f"data source {name!r} takes {wanted}, got {context}")
    status = find_data(name, data_dir)
    if status.place is None:
        raise DataNotFound(not_found_message(status))
    reread = partial(source.read, status.place, *(() if context is None else (context,)))
    if variant is not None:
        reread = partial(_read_varied, reread, variant)
    return Dataset.load(name, str(status.place), reread)


def _read_varied(read: Callable[[], Content], variant: DataVariant) -> Content:
    return vary(read(), variant)


def not_found_message(status: DataStatus) -> str:
    """What was looked for, where, and how to get it."""
    source = status.source
    other = "" if source.variable is None else f" Then pass --data-dir or set {source.variable}."
    return (
        f"{source.title} not found. Looked in: {', '.join(status.searched)}. Expected {source.expected}. "
        f"Get it: {source.remedy}.{other}"
    )
