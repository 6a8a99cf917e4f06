"""Arithmetic of PTX instructions on arrays of register bits, one lane per element.

Every function takes and returns NumPy arrays of the instruction's own type (unsigned for .b and .u, signed for .s,
float for .f32 and .f64; half types as bit patterns) and broadcasts. Integers wrap. Semantics are those of the PTX
ISA's instruction pages. The approximate functions (.approx) are computed in float64 and rounded once to float32:
hardware results differ in the last bits within the bounds that the ISA gives.
"""

from __future__ import annotations

import numpy as np

from cute_matmul.emulator import formats

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i32, i64, f32, f64 = np.int32, np.int64, np.float32, np.float64


# --- Integers ----------------------------------------------------------------------------------------------


def mul_hi(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper half of the product of two equal integer types."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = i64 if a.dtype.kind == "i" else u64
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)
    x, y = a.view(u64), b.view(u64)
    mask, shift = u64(0xFFFFFFFF), u64(32)
    xl, xh, yl, yh = x & mask, x >> shift, y & mask, y >> shift
    middle = xh * yl + ((xl * yl) >> shift)
    second = (middle & mask) + xl * yh
    high = xh * yh + (middle >> shift) + (second >> shift)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, u64(0)) - np.where(b < 0, x, u64(0))
        return high.view(i64)
    return high


def div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer quotient, rounded to zero. Division by zero gives all ones, as hardware does."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "i":
        with np.errstate(over="ignore"):
            quotient = a // divisor
            inexact = (quotient * divisor != a) & ((a < 0) != (divisor < 0))
            quotient = quotient + inexact.astype(a.dtype)
    else:
        quotient = a // divisor
    return np.where(zero, np.invert(np.zeros_like(quotient)), quotient)


def rem(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer remainder with the sign of the dividend. The remainder by zero is the dividend."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    result = np.fmod(a, divisor)
    return np.where(zero, a, result)


def shl(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
    bits = a.dtype.itemsize * 8
    shifted = a << np.minimum(amount, bits - 1).astype(a.dtype)
    return np.where(amount >= bits, a.dtype.type(0), shifted)


def shr(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Logical for unsigned, arithmetic for signed; amounts beyond the width act like the width."""
    bits = a.dtype.itemsize * 8
    clamped = np.minimum(amount, bits - 1).astype(a.dtype)
    if a.dtype.kind == "i":
        return a >> clamped
    return np.where(amount >= bits, a.dtype.type(0), a >> clamped)


def funnel(low: np.ndarray, high: np.ndarray, amount: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    """shf.{l,r}.{wrap,clamp}.b32 of high:low."""
    count = (amount & u32(31) if wrap else np.minimum(amount, u32(32))).astype(u64)
    both = (high.astype(u64) << u64(32)) | low.astype(u64)
    if left:
        return ((both << count) >> u64(32)).astype(u32)
    return (both >> count).astype(u32)


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Any function of three bits: bit i of `table` is its value where (a, b, c) spell i."""
    zero = a ^ a
    out = zero | (b ^ b) | (c ^ c)
    for i in range(8):
        if table >> i & 1:
            out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return out


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Default mode: each selector nibble picks one of eight bytes, its top bit replicates the sign."""
    both = (b.astype(u64) << u64(32)) | a.astype(u64)
    out = np.zeros(np.broadcast(a, b, selector).shape, u32)
    for i in range(4):
        nibble = (selector >> u32(4 * i)) & u32(15)
        byte = (both >> ((nibble & u32(7)).astype(u64) * u64(8))) & u64(255)
        sign = np.where(byte & u64(128), u64(255), u64(0))
        byte = np.where(nibble & u32(8), sign, byte)
        out |= byte.astype(u32) << u32(8 * i)
    return out


def bfe(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Bit field extract; the field is sign-extended for signed types."""
    bits = a.dtype.itemsize * 8
    unsigned = a.view(f"u{a.dtype.itemsize}").astype(u64)
    position, count = (start & u32(255)).astype(u64), (length & u32(255)).astype(u64)
    inside = position < bits
    field = np.where(inside, unsigned >> np.minimum(position, u64(bits - 1)), u64(0))
    mask = np.where(count >= 64, ~u64(0), (u64(1) << np.minimum(count, u64(63))) - u64(1))
    out = field & mask
    if a.dtype.kind == "i":
        top = np.minimum(position + count - u64(1), u64(bits - 1))
        sign = ((unsigned >> top) & u64(1)).astype(bool) & (count > 0)
        available = np.where(inside, u64(bits) - np.minimum(position, u64(bits)), u64(0))
        present = np.minimum(count, available)
        fill = ~np.where(present >= 64, ~u64(0), (u64(1) << np.minimum(present, u64(63))) - u64(1))
        out = np.where(sign, out | fill, out)
    return out.astype(f"u{a.dtype.itemsize}").view(a.dtype)


def bfi(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Insert the low `length` bits of a into b at `start`."""
    bits = a.dtype.itemsize * 8
    position, count = (start & u32(255)).astype(u64), (length & u32(255)).astype(u64)
    field = np.where(count >= 64, ~u64(0), (u64(1) << np.minimum(count, u64(63))) - u64(1))
    mask = np.where(position < bits, field << np.minimum(position, u64(63)), u64(0))
    moved = np.where(position < bits, a.astype(u64) << np.minimum(position, u64(63)), u64(0))
    return ((b.astype(u64) & ~mask) | (moved & mask)).astype(a.dtype)


def popc(a: np.ndarray) -> np.ndarray:
    x = a.astype(u64)
    x = x - ((x >> u64(1)) & u64(0x5555555555555555))
    x = (x & u64(0x3333333333333333)) + ((x >> u64(2)) & u64(0x3333333333333333))
    x = (x + (x >> u64(4))) & u64(0x0F0F0F0F0F0F0F0F)
    return ((x * u64(0x0101010101010101)) >> u64(56)).astype(u32)


def _fill_right(x: np.ndarray) -> np.ndarray:
    for shift in (1, 2, 4, 8, 16, 32):
        x = x | (x >> u64(shift))
    return x


def clz(a: np.ndarray) -> np.ndarray:
    return u32(a.dtype.itemsize * 8) - popc(_fill_right(a.astype(u64)))


def bfind(a: np.ndarray, shift_amount: bool) -> np.ndarray:
    """Position of the highest bit that differs from the sign, all ones if there is none."""
    bits = a.dtype.itemsize * 8
    x = np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a
    position = popc(_fill_right(x.view(f"u{a.dtype.itemsize}").astype(u64)))
    found = u32(bits) - position if shift_amount else position - u32(1)
    return np.where(position == 0, u32(0xFFFFFFFF), found)


def brev(a: np.ndarray) -> np.ndarray:
    bits = a.dtype.itemsize * 8
    x = a.astype(u64)
    out = np.zeros_like(x)
    for i in range(bits):
        out |= ((x >> u64(i)) & u64(1)) << u64(bits - 1 - i)
    return out.astype(a.dtype)


def dp4a(a: np.ndarray, b: np.ndarray, c: np.ndarray, a_signed: bool, b_signed: bool) -> np.ndarray:
    total = c.astype(i64)
    for i in range(4):
        x = (a >> u32(8 * i)).astype(u8)
        y = (b >> u32(8 * i)).astype(u8)
        total = total + (x.view(np.int8) if a_signed else x).astype(i64) * (y.view(np.int8) if b_signed else y).astype(
            i64
        )
    return total.astype(u64).astype(u32)


# --- Floating point ----------------------------------------------------------------------------------------


def to_odd(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """`value` (float64, nearest) turned into the round-to-odd result, given the sign of what rounding dropped.

    Rounding that once more to a narrower format then equals one rounding of the exact number.
    """
    bits = np.ascontiguousarray(value).view(i64)
    even = (bits & 1) == 0
    step = np.where((error > 0) == (value > 0), i64(1), i64(-1))
    adjust = even & (error != 0) & np.isfinite(value) & (value != 0)
    return np.where(adjust, bits + step, bits).view(f64)


def _sum_exact(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y in float64, rounded to odd."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    return to_odd(total, error)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn") -> np.ndarray:
    """a * b + c rounded once to float32 (the product of two float32 is exact in float64)."""
    return round32(_sum_exact(a.astype(f64) * b.astype(f64), c.astype(f64)), mode)


def _split64(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Veltkamp's splitting: two halves of 26 bits whose sum is a."""
    big = a * 134217729.0
    high = big - (big - a)
    return high, a - high


def _two_sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once to float64: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008).

    Products beyond 2**996 or below 2**-969 are rounded twice.
    """
    product = a * b
    (ah, al), (bh, bl) = _split64(a), _split64(b)
    error = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    th, tl = _two_sum(c, error)
    vh, vl = _two_sum(product, th)
    result = vh + _sum_exact(tl, vl)
    return np.where(np.isfinite(error) & np.isfinite(result), result, product + c)


def mul24(a: np.ndarray, b: np.ndarray, high: bool) -> np.ndarray:
    """Product of the low 24 bits of each (sign-extended for signed types): its low 32 bits, or bits 16 to 47."""
    if a.dtype.kind == "i":
        x, y = ((v << i32(8)) >> i32(8) for v in (a, b))
        product = x.astype(i64) * y.astype(i64)
        return ((product >> i64(16)) if high else product).astype(i32)
    product = (a & u32(0xFFFFFF)).astype(u64) * (b & u32(0xFFFFFF)).astype(u64)
    return ((product >> u64(16)) if high else product).astype(u32)


def xorsign(a: np.ndarray, b: np.ndarray, low: bool, nan: bool) -> np.ndarray:
    """min or max of the magnitudes, with the exclusive or of the signs."""
    magnitude = (fmin if low else fmax)(np.abs(a), np.abs(b), nan)
    return np.where(np.signbit(a) ^ np.signbit(b), -magnitude, magnitude)


def add32(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    return round32(_sum_exact(a.astype(f64), b.astype(f64)), mode)


def mul32(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    return round32(a.astype(f64) * b.astype(f64), mode)


def round32(exact: np.ndarray, mode: str = "rn") -> np.ndarray:
    """float64 to float32 in one of PTX's rounding modes rn, rz, rm, rp."""
    near = exact.astype(f32)
    if mode == "rn":
        return near
    back = near.astype(f64)
    if mode == "rz":
        away = np.abs(back) > np.abs(exact)
        return np.where(away, np.nextafter(near, f32(0)), near)
    if mode == "rm":
        return np.where(back > exact, np.nextafter(near, f32(-np.inf)), near)
    if mode == "rp":
        return np.where(back < exact, np.nextafter(near, f32(np.inf)), near)
    raise ValueError(f"rounding mode {mode!r}; accepted: rn, rz, rm, rp")


def flush(a: np.ndarray) -> np.ndarray:
    """.ftz: subnormal float32 values become zeros of their sign."""
    return np.where(np.abs(a) < f32(2.0**-126), np.copysign(f32(0), a), a)


def saturate(a: np.ndarray) -> np.ndarray:
    """.sat: clamp to [0, 1], NaN becomes +0."""
    return np.where(np.isnan(a), a.dtype.type(0), np.clip(a, a.dtype.type(0), a.dtype.type(1)))


def fmin(a: np.ndarray, b: np.ndarray, nan: bool = False) -> np.ndarray:
    out = np.minimum(a, b) if nan else np.fmin(a, b)
    negative = (a == 0) & (b == 0) & (np.signbit(a) | np.signbit(b))
    return np.where(negative, a.dtype.type(-0.0), out)


def fmax(a: np.ndarray, b: np.ndarray, nan: bool = False) -> np.ndarray:
    out = np.maximum(a, b) if nan else np.fmax(a, b)
    positive = (a == 0) & (b == 0) & ~(np.signbit(a) & np.signbit(b))
    return np.where(positive, a.dtype.type(0.0), out)


def approx(name: str, a: np.ndarray) -> np.ndarray:
    """Transcendental and reciprocal functions of float32 or float64."""
    x = a.astype(f64)
    if name == "ex2":
        out = np.exp2(x)
    elif name == "lg2":
        out = np.log2(x)
    elif name == "rcp":
        out = 1.0 / x
    elif name == "rsqrt":
        out = 1.0 / np.sqrt(x)
    elif name == "sqrt":
        out = np.sqrt(x)
    elif name == "sin":
        out = np.sin(x)
    elif name == "cos":
        out = np.cos(x)
    elif name == "tanh":
        out = np.tanh(x)
    else:
        raise ValueError(f"function {name!r}; accepted: ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh")
    return out


def halves(a: np.ndarray) -> np.ndarray:
    """uint32 (..., n) -> uint16 (..., n, 2): the lower half first."""
    return np.stack((a.astype(u16), (a >> u32(16)).astype(u16)), axis=-1)


def join_halves(a: np.ndarray) -> np.ndarray:
    """uint16 (..., n, 2) -> uint32 (..., n)."""
    return a[..., 0].astype(u32) | (a[..., 1].astype(u32) << u32(16))


def half_op(name: str, kind: str, args: tuple[np.ndarray, ...], relu: bool = False, sat: bool = False) -> np.ndarray:
    """add, sub, mul, fma, min, max, neg, abs, ex2, tanh of f16 or bf16 bit patterns (uint16), rounded once."""
    decode = formats.f16_to_f32 if kind == "f16" else formats.bf16_to_f32
    encode = formats.f32_to_f16 if kind == "f16" else formats.f32_to_bf16
    if name == "neg":
        return args[0] ^ u16(0x8000)
    if name == "abs":
        return args[0] & u16(0x7FFF)
    x = [decode(np.ascontiguousarray(a)).astype(f64) for a in args]
    if name == "add":
        exact = _sum_exact(x[0], x[1])
    elif name == "sub":
        exact = _sum_exact(x[0], -x[1])
    elif name == "mul":
        exact = x[0] * x[1]
    elif name == "fma":
        exact = _sum_exact(x[0] * x[1], x[2])
    elif name in ("min", "max"):
        exact = (fmin if name == "min" else fmax)(x[0], x[1])
    elif name in ("min.nan", "max.nan"):
        exact = (fmin if name[:3] == "min" else fmax)(x[0], x[1], nan=True)
    else:
        exact = approx(name, x[0])
    if sat:
        exact = saturate(exact)
    if relu:
        exact = np.where(exact < 0, 0.0, exact)
    return encode(exact)


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def compare(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """setp's comparisons of floats: ordered names are false with a NaN, unordered ones (equ, ...) true."""
    unordered = np.isnan(a) | np.isnan(b)
    if name == "num":
        return ~unordered
    if name == "nan":
        return unordered
    if name.endswith("u"):
        return COMPARISONS[name[:-1]](a, b) | unordered
    return COMPARISONS[name](a, b) & ~unordered


# --- Across the lanes of a warp ----------------------------------------------------------------------------

LANES = np.arange(32, dtype=u32)[None, :]


def shuffle(mode: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """shfl.sync: (value from the source lane, whether that lane was in range). a is (w, 32) bits."""
    bval, cval, segment = b & u32(31), c & u32(31), (c >> u32(8)) & u32(31)
    upper = (LANES & segment) | (cval & ~segment)
    lower = LANES & segment
    if mode == "up":
        source = LANES.astype(i64) - bval
        inside = source >= upper
    elif mode == "down":
        source = LANES.astype(i64) + bval
        inside = source <= upper
    elif mode == "bfly":
        source = (LANES ^ bval).astype(i64)
        inside = source <= upper
    elif mode == "idx":
        source = (lower | (bval & ~segment)).astype(i64)
        inside = source <= upper
    else:
        raise ValueError(f"shfl mode {mode!r}; accepted: up, down, bfly, idx")
    shape = np.broadcast_shapes(source.shape, inside.shape, a.shape, (1, 32))
    lanes = np.where(inside, source, LANES.astype(i64))
    values = np.take_along_axis(np.broadcast_to(a, shape), np.broadcast_to(lanes, shape), axis=-1)
    return values, np.broadcast_to(inside, shape)


def ballot(p: np.ndarray) -> np.ndarray:
    """bool (w, 32) -> uint32 (w, 1)."""
    return (p.astype(u32) << LANES).sum(axis=-1, keepdims=True, dtype=u32)


def members(mask: np.ndarray) -> np.ndarray:
    """A member mask (w or 1, 32 or 1) uint32 -> bool (.., 32): the lanes it names."""
    return (mask >> LANES) & u32(1) != 0


def redux(name: str, a: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Reduction over the active lanes, (w, 32) -> (w, 1)."""
    info = np.iinfo(a.dtype)
    neutral = {"add": 0, "and": -1, "or": 0, "xor": 0, "min": info.max, "max": info.min}
    if name not in neutral:
        raise ValueError(f"redux operation {name!r}; accepted: {', '.join(neutral)}")
    fill = np.array(neutral[name] & ((1 << info.bits) - 1), f"u{a.dtype.itemsize}").astype(a.dtype)
    function = {"add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
                "min": np.minimum, "max": np.maximum}[name]  # fmt: skip
    return function.reduce(np.where(active, a, fill), axis=-1, keepdims=True, dtype=a.dtype)


def match_any(a: np.ndarray, active: np.ndarray) -> np.ndarray:
    """For each lane, the mask of active lanes holding the same value. (w, 32) -> (w, 32)."""
    same = (a[:, :, None] == a[:, None, :]) & active[:, None, :]
    return (same.astype(u32) << LANES[:, None, :]).sum(axis=-1, dtype=u32)


def elect(active: np.ndarray) -> np.ndarray:
    """The lowest active lane of each row, (w, 32) bool -> (w, 1) int64."""
    return active.argmax(axis=-1)[:, None]
