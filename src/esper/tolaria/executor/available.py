"""Whether compiled code can run on this machine. Cheap to ask: numba is not imported."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from importlib.util import find_spec

BACKENDS: tuple[str, ...] = ("auto", "native", "torch")
"""Who trains hosts: compiled code, torch, or the first if it can."""
VERSION = 1
"""Of the bits that the native executor computes: a change that moves one raises it."""
NOTICE_S = 3.0
"""Loading takes a second at most; what takes longer is compiling."""


def backend_version(name: str) -> str:
    """What the bits of a host depend on, such as "native 1": runs of different ones are never paired or continued."""
    return f"{name} {VERSION}" if name == "native" else name


def why_not_native() -> str | None:
    """Why compiled code cannot run here; None if it can."""
    if find_spec("numba") is None:
        return "numba is not installed"
    if platform.machine().lower() in ("x86_64", "amd64"):
        from llvmlite import binding

        # Emulated, a fused multiply-add is slower than torch.
        if not binding.get_host_cpu_features().get("fma", False):
            return "this CPU has no fused multiply-add"
    elif platform.machine().lower() not in ("aarch64", "arm64"):
        return f"it is not tried on {platform.machine()} machines"
    return None


def warm_up(say: Callable[[str], None] = lambda text: None) -> None:
    """Compiles now, or loads what was compiled before on this machine; says so if it takes long.

    Processes that start at the same time would wait for each other; who starts them calls this first.
    """
    notice = threading.Timer(
        NOTICE_S, say, ["loading the native executor; its first time on a machine, it is compiled (half a minute)"]
    )
    notice.daemon = True
    notice.start()
    try:
        from esper.tolaria.executor.kernels.run import cache_folder, make_ready

        if cache_folder() is None:
            say(
                "no folder for compiled code can be written, so every process compiles for itself (half a minute "
                "each); set NUMBA_CACHE_DIR to one that can, or give --backend torch"
            )
        make_ready()
    finally:
        notice.cancel()
