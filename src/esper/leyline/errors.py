"""Errors that more than one package raises or handles."""

from __future__ import annotations


class IllegalOperation(RuntimeError):
    """An op reached a model whose gate refuses it. Masks rule this out, so it is a defect, not an outcome."""


class GerminationError(RuntimeError):
    """A seed could not be built or attached. The model, its optimizer and the slot are as they were before."""


class DataNotFound(FileNotFoundError):
    """A data set is not on this machine. The message lists the places searched and how to get it."""


class DataDamaged(ValueError):
    """A data file is there but is not what it claims to be. The message says what was expected and found."""


class ModelFileError(ValueError):
    """A saved model cannot be read or does not match this code. Nothing was loaded."""
