"""How a matrix instruction sums its products: interchangeable models of the tensor cores' adder.

A model is a function `(a, b, c, a_type, d_type) -> d`: a (G, M, K) and b (G, N, K) float32 holding exact values of
the multiplicand type, c (G, M, N) float32 or None for zero, d float32 or float16 as d_type says. K is one
instruction's. Integer instructions are exact and do not come here.

`TRUNCATING` is Hopper's adder as published (F. Khattak, M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores",
arXiv:2512.07004, and their models of H100 and H200): all products of an instruction (16 for f16 and bf16, 8 for
tf32, 32 for fp8) and c are aligned to the largest exponent among them, truncated there two bits below a 24-bit
significand (fp8: at 13 fractional bits), added exactly, and the sum is truncated to f32, or rounded to nearest even
for f16. An f32 result of fp8 operands keeps only 13 fractional bits. `tests/gpu_probes/tensor_cores.py` compared it
with an H200: equal in every bit of 7.8 million results of wgmma and mma.sync in all types, random operands of
several distributions, subnormal ones included; for f32 from fp8 wgmma the 13 bits were learned there and 2,560
results agree. So f16 accumulators are rounded once per instruction.

`FAST` adds in f32 in whatever order BLAS likes, and rounds f16 results once. Against the H200 one instruction
differs by at most 4 * 2**-23 * (|c| + sum |a_i b_i|) (largest of those results: 3.7; the H200 from the exact sum:
2.7), so a chain of s instructions by at most 4 s * 2**-23 * sum |a_i b_i|. fp8 wgmma is too coarse for such a bound
and takes `TRUNCATING` in both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Arithmetic = Callable[[np.ndarray, np.ndarray, "np.ndarray | None", str, str], np.ndarray]

FP8 = ("e4m3", "e5m2")
CANONICAL_NAN = {"f32": np.uint32(0x7FFFFFFF), "f16": np.uint16(0x7FFF)}

_MIN_EXPONENT = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}
_PRODUCT_MIN_EXPONENT = -133  # the model's lower limit for the common exponent
_BLOCK = 1 << 14  # sums per block
_FRACTION_BITS = {"f16": 25, "bf16": 25, "tf32": 25, "e4m3": 13, "e5m2": 13}


def _canonical(d: np.ndarray, d_type: str) -> np.ndarray:
    nan = np.isnan(d)
    if nan.any():
        d.view(CANONICAL_NAN[d_type].dtype)[nan] = CANONICAL_NAN[d_type]
    return d


def fast(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, a_type: str, d_type: str) -> np.ndarray:
    """Sums in f32 (f16 results: in f64, then rounded once to nearest even); fp8 as `truncating`."""
    if a_type in FP8:
        return truncating(a, b, c, a_type, d_type)
    wide = np.float64 if d_type == "f16" else np.float32
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False).transpose(0, 2, 1))
        if c is not None:
            d += c
        if d_type == "f16":
            d = d.astype(np.float16)
    return _canonical(d, d_type)


def _power_below(x: np.ndarray, lowest: int) -> np.ndarray:
    """2**max(exponent of x, lowest), and 0 where x is 0; for float64 without subnormals."""
    power = (x.view(np.uint64) & np.uint64(0x7FF0000000000000)).view(np.float64)
    return np.where(power == 0, 0.0, np.maximum(power, 2.0**lowest))


def _aligned_sum(left: np.ndarray, right: np.ndarray, addend: np.ndarray, a_type: str) -> np.ndarray:
    """Sum of products and addend, each truncated below the largest exponent among them; finite float64 throughout."""
    lowest = _MIN_EXPONENT[a_type]
    left_power, right_power = _power_below(left, lowest), _power_below(right, lowest)
    common = np.maximum(_power_below(addend, -126), 2.0**_PRODUCT_MIN_EXPONENT)
    scratch = np.empty_like(addend)
    for i in range(left.shape[2]):
        np.multiply(left_power[:, :, None, i], right_power[:, None, :, i], out=scratch)
        np.maximum(common, scratch, out=common)
    quantum = common * 2.0 ** -_FRACTION_BITS[a_type]
    per_quantum = 1 / quantum  # exact: a power of two
    total = np.trunc(addend * per_quantum)
    for i in range(left.shape[2]):
        np.multiply(left[:, :, None, i], right[:, None, :, i], out=scratch)
        scratch *= per_quantum
        np.trunc(scratch, out=scratch)
        total += scratch
    total *= quantum
    return total


def truncating(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, a_type: str, d_type: str) -> np.ndarray:
    """Hopper's alignment and truncation (see the module), bit for bit; about five times slower than `fast`."""
    groups, m, _ = a.shape
    n = b.shape[1]
    finite = np.isfinite(a).all() and np.isfinite(b).all() and (c is None or np.isfinite(c).all())
    left = (a if finite else np.nan_to_num(a, nan=0, posinf=0, neginf=0)).astype(np.float64)
    right = (b if finite else np.nan_to_num(b, nan=0, posinf=0, neginf=0)).astype(np.float64)
    addend = np.zeros((groups, m, n)) if c is None else c.astype(np.float64)
    if not finite:
        addend = np.nan_to_num(addend, nan=0, posinf=0, neginf=0)

    total = np.empty((groups, m, n))
    step = max(1, _BLOCK // (m * n))  # so that the arrays of a block stay in cache
    for first in range(0, groups, step):
        block = slice(first, first + step)
        total[block] = _aligned_sum(left[block], right[block], addend[block], a_type)

    with np.errstate(over="ignore", invalid="ignore"):
        if d_type == "f16":
            d = total.astype(np.float16)
        else:
            d = total.astype(np.float32)
            too_far = np.abs(d.astype(np.float64)) > np.abs(total)
            d[too_far] = np.nextafter(d[too_far], np.float32(0))
            if a_type in FP8:
                d = (d.view(np.uint32) & ~np.uint32(0x3FF)).view(np.float32)
            d[np.abs(total) >= 2.0**128] = np.inf
            d = np.copysign(d, total.astype(np.float32)) if np.isinf(d).any() else d
        if not finite:
            exceptional = np.matmul(a, b.transpose(0, 2, 1)) if c is None else np.matmul(a, b.transpose(0, 2, 1)) + c
            special = ~np.isfinite(a).all(axis=2)[:, :, None] | ~np.isfinite(b).all(axis=2)[:, None, :]
            if c is not None:
                special |= ~np.isfinite(c)
            d[special] = exceptional[special]
    return _canonical(d, d_type)


FAST: Arithmetic = fast
TRUNCATING: Arithmetic = truncating
