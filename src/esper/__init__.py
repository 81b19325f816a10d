"""Esper grows neural networks while they train."""

from importlib.metadata import version

__version__ = version("esper-growth")
