"""The variants in ladder order: name -> module, title, one-line change, constraints.

Nothing here imports a kernel, torch or the DSL: `Variant.load()` does, when a variant is used. Which variant
`cute_matmul.matmul` takes when none is named is, first that applies: the innermost `use(...)` block, the
environment variable `CUTE_MATMUL_VARIANT`, `BUILTIN_DEFAULT`.

Another package adds its own with an entry point in the group `cute_matmul.variants` that names a `Variant`::

    [project.entry-points."cute_matmul.variants"]
    mine = "my_package.entry:VARIANT"
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

ENTRY_POINT_GROUP = "cute_matmul.variants"
ENVIRONMENT = "CUTE_MATMUL_VARIANT"
BUILTIN_DEFAULT = "v5"

DTYPES = ("float16", "bfloat16")
"""Types of the operands and the output that a variant takes unless its module names fewer in `DTYPES`."""

MODULE_ATTRIBUTES = ("RESOURCES", "SPACE", "DEFAULT", "host")
"""What a variant's module must define: its CTA, its configurations, the one used untuned, its `@cute.jit` function."""


@dataclass(frozen=True)
class Variant:
    """One rung: where its kernel is, and what it changes against the rung below.

    `change` is one line. `constraints` are sentences on what the kernel needs of its operands, beyond what
    `matmul` checks for every variant.
    """

    name: str
    module: str
    title: str
    change: str
    constraints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("name", "module", "title", "change"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{field} of a Variant must be a non-empty string, got {value!r}")
        if any(c.isspace() or c == "," for c in self.name):
            raise ValueError(f"name of a Variant must hold no space or comma, got {self.name!r}")
        if isinstance(self.constraints, str):
            raise ValueError(f"constraints of {self.name!r} must be a tuple of strings, got one string")

    def load(self) -> ModuleType:
        """The kernel's module, imported. Raises ImportError where it is missing or not a variant's module."""
        module = import_module(self.module)
        missing = [name for name in MODULE_ATTRIBUTES if not hasattr(module, name)]
        if missing:
            raise ImportError(
                f"module {self.module!r} of variant {self.name!r} does not define {', '.join(missing)}; "
                f"a variant's module defines {', '.join(MODULE_ATTRIBUTES)}"
            )
        return module

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The types it takes: its module's DTYPES, all where it names none. Imports it."""
        return getattr(self.load(), "DTYPES", DTYPES)

    @property
    def accumulator(self) -> str:
        """The type the kernel adds in: its module's ACCUMULATOR, "float32" where it names none. Imports it."""
        return getattr(self.load(), "ACCUMULATOR", "float32")


_TMA = "of A and of B, the stride that is not 1 and the address must be multiples of 16 bytes (TMA)"
_TYPES = "float16 or bfloat16 in and out, fp32 accumulation; A and B each in either major order"

BUILTIN = (
    Variant(
        "v0",
        "cute_matmul.variants.v0",
        "TMA loads, mma.sync",
        "TMA brings one A and one B tile per step to shared memory; ldmatrix and mma.sync multiply them",
        (_TYPES, _TMA),
    ),
    Variant(
        "v1",
        "cute_matmul.variants.v1",
        "WGMMA",
        "one warp group issues WGMMA, which reads both operands from shared memory; no ldmatrix",
        (_TYPES, _TMA),
    ),
    Variant(
        "v2",
        "cute_matmul.variants.v2",
        "multi-stage pipeline",
        "a ring of num_stages shared buffers with a barrier each, so that loads run ahead of the multiply",
        (_TYPES, _TMA),
    ),
    Variant(
        "v3",
        "cute_matmul.variants.v3",
        "warp specialization",
        "a producer warp loads, a consumer warp group multiplies; full and empty barriers instead of block syncs",
        (_TYPES, _TMA),
    ),
    Variant(
        "v4",
        "cute_matmul.variants.v4",
        "two consumer warp groups",
        "the tile's rows split over two warp groups that share B; tiles walked in groups that stay in L2",
        (_TYPES, _TMA),
    ),
    Variant(
        "v5",
        "cute_matmul.variants.v5",
        "overlapping WGMMA groups",
        "one WGMMA group always in flight; a stage is released one iteration late",
        (_TYPES, _TMA),
    ),
    Variant(
        "v6",
        "cute_matmul.variants.v6",
        "256x256 tiles, fp16 accumulation, TMA store",
        "four consumer warp groups that accumulate in fp16; the output leaves through a shared buffer by TMA",
        (
            "float16 in and out, fp16 accumulation (WGMMA has no bf16 form of it); A and B each in either major order",
            _TMA,
            "the output's rows must start at and be multiples of 16 bytes: N a multiple of 8 (TMA)",
        ),
    ),
)

generation = 0
"""Counts changes of what a name means; part of the key of whatever is cached per name."""

_lock = threading.RLock()
_variants: dict[str, Variant] = {variant.name: variant for variant in BUILTIN}
_entry_points: str = "unread"  # then "reading", then "read"
_active: ContextVar[str | None] = ContextVar("cute_matmul_variant", default=None)


def names() -> tuple[str, ...]:
    """All names: the ladder bottom to top, then variants of other packages, then registered ones."""
    return tuple(_all())


def get(name: str) -> Variant:
    """The variant of that name. Raises ValueError with the names there are."""
    variant = _variants.get(name) or _all().get(name)
    if variant is None:
        raise ValueError(f"variant must be one of {', '.join(_all())}; got {name!r}")
    return variant


def register(variant: Variant, *, replace: bool = False) -> Variant:
    """Add a variant at the end of the order; with `replace`, in the place of the one of the same name.

    Raises TypeError for anything but a `Variant`, ValueError for a name that is taken.
    """
    if not isinstance(variant, Variant):
        raise TypeError(f"variant must be a cute_matmul.Variant, got {type(variant).__name__}")
    global generation
    with _lock:
        taken = _all().get(variant.name)
        if taken is not None and not replace:
            raise ValueError(
                f"variant name {variant.name!r} is taken by {taken.module}; "
                "pass replace=True to swap it, or choose another name"
            )
        _variants[variant.name] = variant
        generation += 1
    return variant


def unregister(name: str) -> None:
    """Take a variant out; a built-in one that was replaced comes back. Built-in ones themselves stay.

    Raises ValueError for a name that is not there or is built in.
    """
    global generation
    builtin = {variant.name: variant for variant in BUILTIN}
    with _lock:
        variant = get(name)
        generation += 1
        if name not in builtin:
            del _variants[name]
        elif variant is not builtin[name]:
            _variants[name] = builtin[name]
        else:
            raise ValueError(f"variant {name!r} is built in and cannot be taken out")


def default_name() -> str:
    """The name of the variant that `matmul` takes when none is given (see the top of this module)."""
    return _active.get() or os.environ.get(ENVIRONMENT) or BUILTIN_DEFAULT


def default() -> Variant:
    """The variant of that name. Raises ValueError where `CUTE_MATMUL_VARIANT` names none that there is."""
    name = default_name()
    try:
        return get(name)
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT}: {error}" if _active.get() is None else str(error)) from None


@contextmanager
def use(name: str) -> Iterator[Variant]:
    """`with use("v1"):` makes v1 the default inside the block, for this thread or asyncio task only.

    Blocks nest. A thread started inside the block does not inherit it.
    """
    variant = get(name)
    token = _active.set(name)
    try:
        yield variant
    finally:
        _active.reset(token)


def _all() -> dict[str, Variant]:
    """All variants; the first call reads the entry points."""
    global _entry_points
    if _entry_points != "read":
        with _lock:
            if _entry_points == "unread":  # "reading": one of the packages being loaded asks for the names
                _entry_points = "reading"
                _read_entry_points()
                _entry_points = "read"
    return _variants


def _read_entry_points() -> None:
    from importlib.metadata import entry_points

    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
        where = f"entry point {point.name!r} = {point.value!r} in group {ENTRY_POINT_GROUP}"
        try:
            variant = point.load()
        except Exception as error:  # another package's fault must not take this one's kernels away
            warnings.warn(f"{where} is left out: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=4)
            continue
        if not isinstance(variant, Variant):
            what = type(variant).__name__
            warnings.warn(f"{where} is left out: it names a {what}, not a Variant", RuntimeWarning, stacklevel=4)
        elif variant.name in _variants:
            taken = _variants[variant.name].module
            warnings.warn(
                f"{where} is left out: the name {variant.name!r} is taken by {taken}",
                RuntimeWarning,
                stacklevel=4,
            )
        else:
            _variants[variant.name] = variant
