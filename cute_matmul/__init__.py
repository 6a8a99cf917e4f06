"""Hopper matrix multiplication in the CuTe Python DSL, as a ladder of readable kernels.

Public names are resolved on first use, so that importing the package loads neither torch nor the DSL and
touches no GPU.
"""

__version__ = "0.1.0"

_HOMES = {
    "TileConfig": "cute_matmul.config",
    "Unsupported": "cute_matmul.launch",
    "Variant": "cute_matmul.registry",
    "matmul": "cute_matmul.launch",
    "register": "cute_matmul.registry",
    "use": "cute_matmul.registry",
}

__all__ = ["TileConfig", "Unsupported", "Variant", "__version__", "matmul", "register", "use", "variants"]


def __getattr__(name: str):
    from importlib import import_module

    if name == "variants":
        # NOTE: also the folder of kernels. Importing any of them binds that folder's package here, so the
        # package itself is what is callable.
        return import_module("cute_matmul.variants")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
