"""Runs the PTX of CuTe DSL kernels for sm_90a on the CPU, and finds their races and deadlocks.

`run(host_fn, *args)` executes any `@cute.jit` host function on CPU tensors and returns a `Report`. The package
knows nothing of matmul. Importing it imports nothing else.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "run": "api",
    "run_launch": "api",
    "EmulatorError": "errors",
    "UnknownInstruction": "errors",
    "Hazard": "hazards",
    "HostError": "host",
    "LaunchError": "host",
    "Program": "host",
    "stream": "host",
    "Deadlock": "report",
    "Report": "report",
    "Suppression": "report",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
