"""Functions of the user's own by place and name, so that any process finds them: "file.py:name", "module:name"."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

EXPECTED = "expected FILE.py:FUNCTION or package.module:FUNCTION"


def load_function(where: str) -> Callable[..., Any]:
    """A function by its place and name.

    Raises:
        ValueError: There is no such file, module or function, or it cannot be imported.
    """
    place, _, name = where.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(f"{EXPECTED}, got {where!r}")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, where)
    found = getattr(module, name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise ValueError(f"{place} has no function {name!r}; it has {', '.join(known) or 'none'}")
    function: Callable[..., Any] = found
    return function


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; {EXPECTED}")
    place = path.resolve()
    # By its whole path: two files of one name in different folders are two modules.
    name = f"esper_user_{place.stem}_{blake2b(str(place).encode(), digest_size=4).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # so that what it defines can be pickled
        if str(place.parent) not in sys.path:
            sys.path.insert(0, str(place.parent))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _load_module(name: str, where: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"{where}: module {name!r} cannot be imported here ({error}); {EXPECTED}") from error


def name_of(function: Callable[..., Any] | str) -> str:
    """The place and name of a function, under which every process finds it.

    Raises:
        ValueError: Nobody else could find it: it is a lambda, is defined inside another function, or in an
            interactive session.
    """
    if isinstance(function, str):
        load_function(function)
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    if not name.isidentifier():
        raise ValueError(
            f"workers find {name or repr(function)} by its name, so it must be a function at the top level of a file "
            "or module, and no lambda. Give it a name there"
        )
    if module.startswith("esper_user_") or module in ("__main__", "__mp_main__"):
        try:
            where = f"{Path(inspect.getfile(function)).resolve(strict=True)}:{name}"
        except (TypeError, OSError):
            raise ValueError(
                f"workers cannot find {name}: it is defined in an interactive session. Put it into a file"
            ) from None
    else:
        where = f"{module}:{name}"
    load_function(where)
    return where
