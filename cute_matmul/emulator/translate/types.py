"""PTX types as NumPy computes them, and where the state spaces lie in generic addresses."""

from __future__ import annotations

import numpy as np

from cute_matmul.emulator import ops

SHARED_START = 1024  # bytes at the start of the shared window that sm_90 keeps for itself
IKET_MODULE = "__iket_meta_info"  # the variable by which a module says that it was compiled with event tracing
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56
CONST_WINDOW = 4 << 56
WINDOW_MASK = (1 << 56) - 1

BITS = {"pred": 1, "f16x2": 32, "bf16x2": 32, "bf16": 16, "tf32": 32, "b128": 128}
BITS |= {f"{k}{b}": b for k in "busf" for b in (8, 16, 32, 64)}
PREFIX = {1: "p", 16: "h", 32: "r", 64: "d"}
FILE = {1: "A1", 16: "A16", 32: "A32", 64: "A64"}
UNSIGNED = {1: "b1", 8: "u1", 16: "u2", 32: "u4", 64: "u8"}

NAMESPACE = {
    "np": np,
    "ops": ops,
    "where": np.where,
    "b1": np.bool_,
    "u1": np.uint8,
    "u2": np.uint16,
    "u4": np.uint32,
    "u8": np.uint64,
    "i1": np.int8,
    "i2": np.int16,
    "i4": np.int32,
    "i8": np.int64,
    "f4": np.float32,
    "f8": np.float64,
}


def numpy_type(kind: str) -> str:
    """The short name of the NumPy type in which values of a PTX type are computed; half types stay bits."""
    if kind == "pred":
        return "b1"
    if kind in ("f16x2", "bf16x2", "tf32"):
        return "u4"
    if kind in ("f16", "bf16"):
        return "u2"
    letter = {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]]
    return f"{letter}{int(kind[1:]) // 8}"


def numpy_dtype(kind: str) -> np.dtype:
    """The NumPy type in which values of a PTX type are computed."""
    return np.dtype(NAMESPACE[numpy_type(kind)])
