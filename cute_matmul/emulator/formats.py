"""Number formats of PTX and the `cvt` instruction, vectorised and bit-exact.

Bits are unsigned arrays (uint8, uint16, uint32, uint64), values float32 or float64 arrays; every format here is a
subset of float32, so decoding is exact. Encoders take any float array and round its exact value once.

Facts are those of the PTX ISA, "Data Movement and Conversion Instructions: cvt" and "Alternate Floating-Point Data
Formats": NaN results are canonical (f16 and bf16 0x7FFF, f32 and tf32 0x7FFFFFFF, e4m3 and e5m2 0x7F); e4m3 has
no infinity and its largest number is 448; .satfinite turns what exceeds the largest finite number into that number
with its sign; .relu turns negative results and -0 into +0 and keeps NaN; .sat clamps to [0, 1] and turns NaN into
+0; float to integer always clamps to the destination's range, NaN giving 0 for destinations up to 32 bits from
sources up to 32 bits, else 1 << (width - 1).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


class FormatError(ValueError):
    """A conversion that PTX does not have on sm_90 or that this module does not know."""


# --- Decoding: bits -> float32 -----------------------------------------------------------------------------


def f16_to_f32(bits: np.ndarray) -> np.ndarray:
    """float32 values of IEEE binary16 bits (uint16)."""
    return bits.view(np.float16).astype(np.float32)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bits (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def tf32_to_f32(bits: np.ndarray) -> np.ndarray:
    """float32 values of tf32 bits (uint32): the low 13 bits are not part of the number and are dropped."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _e4m3_table() -> np.ndarray:
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * np.exp2(np.maximum(exponent, 1) - 10.0))
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3_table()
_E5M2 = (np.arange(256, dtype=np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)


def e4m3_to_f32(bits: np.ndarray) -> np.ndarray:
    """float32 values of e4m3 bits (uint8): bias 7, no infinities, NaN only 0x7F and 0xFF."""
    return _E4M3[bits]


def e5m2_to_f32(bits: np.ndarray) -> np.ndarray:
    """float32 values of e5m2 bits (uint8): the upper byte of binary16."""
    return _E5M2[bits]


# --- Encoding: values -> bits ------------------------------------------------------------------------------


@dataclass(frozen=True)
class FloatFormat:
    """A binary format narrower than f32, stored in the upper bits of `storage`-sized words (tf32) or all of them."""

    name: str
    storage: type
    fraction: int  # explicit significand bits
    min_exponent: int  # of normal numbers
    largest: float
    infinity: bool
    nan: int


_FORMATS = {
    "f16": FloatFormat("f16", np.uint16, 10, -14, 65504.0, True, 0x7FFF),
    "bf16": FloatFormat("bf16", np.uint16, 7, -126, float(np.uint32(0x7F7F0000).view(np.float32)), True, 0x7FFF),
    "tf32": FloatFormat("tf32", np.uint32, 10, -126, float(np.uint32(0x7F7FE000).view(np.float32)), True, 0x7FFFFFFF),
    "e4m3": FloatFormat("e4m3", np.uint8, 3, -6, 448.0, False, 0x7F),
    "e5m2": FloatFormat("e5m2", np.uint8, 2, -14, 57344.0, True, 0x7F),
}

_TO_INTEGER = {
    "rn": np.rint,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
    "rna": lambda x: np.trunc(x + np.copysign(0.5, x)),
}


def _quantise(x: np.ndarray, form: FloatFormat, mode: str) -> np.ndarray:
    """float64 values of `form` nearest to finite x in `mode`; overflow becomes infinity or `largest` as IEEE says."""
    _, exponent = np.frexp(x)
    unit = np.ldexp(1.0, np.maximum(exponent - 1, form.min_exponent) - form.fraction)
    y = _TO_INTEGER[mode](x / unit) * unit
    beyond = np.abs(y) > form.largest
    if beyond.any():
        outward = {"rn": True, "rna": True, "rz": False, "rm": y < 0, "rp": y > 0}[mode]
        y = np.where(beyond, np.copysign(np.where(outward, np.inf, form.largest), y), y)
    return y


def _encode_exact(y: np.ndarray, form: FloatFormat) -> np.ndarray:
    """Bits of float64 values that `form` represents (finite, or infinite where it has infinities)."""
    if form.name == "f16":
        return y.astype(np.float16).view(np.uint16)
    if form.name == "e5m2":
        return (y.astype(np.float16).view(np.uint16) >> np.uint16(8)).astype(np.uint8)
    if form.name == "bf16":
        return (y.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if form.name == "tf32":
        return y.astype(np.float32).view(np.uint32)
    sign = np.signbit(y).astype(np.uint8) << np.uint8(7)
    # Shifted up by 120 binades, e4m3's bit pattern is the top of a float32's, subnormals included.
    pattern = (np.abs(y).astype(np.float32) * np.float32(2.0**-120)).view(np.uint32) >> np.uint32(20)
    return sign | pattern.astype(np.uint8)


def encode(
    x: np.ndarray, name: str, mode: str = "rn", *, relu: bool = False, saturate: str | None = None
) -> np.ndarray:
    """Round float values to format `name` ("f16", "bf16", "tf32", "e4m3", "e5m2") and return its bits.

    mode: "rn", "rz", "rm", "rp", or "rna" (ties away from zero). saturate: None, "satfinite" or "sat". e4m3 has
    no infinity: without "satfinite" it raises `FormatError`, as PTX has no such conversion.
    """
    form = _FORMATS[name]
    if not form.infinity and saturate != "satfinite":
        raise FormatError(f"{name}: only satfinite conversions exist, got saturate={saturate!r}")
    x = np.asarray(x)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if mode == "rn" and name == "f16" and x.dtype == np.float32:
            y = x.astype(np.float16).astype(np.float64) if saturate else x
            bits = x.astype(np.float16).view(np.uint16)
        elif mode == "rn" and name == "bf16" and x.dtype == np.float32:
            word = x.view(np.uint32)
            y = x
            odd = word >> np.uint32(16) & np.uint32(1)
            bits = ((word + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
        else:
            wide = x.astype(np.float64)
            finite = np.where(np.isfinite(wide), wide, 0.0)
            y = np.where(np.isfinite(wide), _quantise(finite, form, mode), wide)
            bits = None
        nan = np.isnan(x)
        if saturate == "satfinite":
            y = np.clip(np.where(nan, 0.0, y), -form.largest, form.largest)
            bits = None
        elif saturate == "sat":
            y = np.clip(np.where(nan, 0.0, y), 0.0, 1.0) + 0.0
            nan = np.zeros_like(nan)
            bits = None
        if bits is None:
            bits = _encode_exact(np.where(nan, 0.0, y), form)
        if nan.any():
            bits = np.where(nan, form.storage(form.nan), bits)
        if relu:
            bits = np.where(np.signbit(x) & ~nan, form.storage(0), bits)
    return bits


def f32_to_f16(x: np.ndarray, mode: str = "rn", relu: bool = False, saturate: str | None = None) -> np.ndarray:
    """binary16 bits (uint16) of float values."""
    return encode(x, "f16", mode, relu=relu, saturate=saturate)


def f32_to_bf16(x: np.ndarray, mode: str = "rn", relu: bool = False, saturate: str | None = None) -> np.ndarray:
    """bfloat16 bits (uint16) of float values."""
    return encode(x, "bf16", mode, relu=relu, saturate=saturate)


def f32_to_tf32(x: np.ndarray, mode: str = "rna", relu: bool = False, saturate: str | None = None) -> np.ndarray:
    """tf32 bits (uint32, low 13 bits zero) of float values."""
    return encode(x, "tf32", mode, relu=relu, saturate=saturate)


def f32_to_e4m3(x: np.ndarray, relu: bool = False) -> np.ndarray:
    """e4m3 bits (uint8), rounded to nearest even, saturated to +-448."""
    return encode(x, "e4m3", relu=relu, saturate="satfinite")


def f32_to_e5m2(x: np.ndarray, relu: bool = False) -> np.ndarray:
    """e5m2 bits (uint8), rounded to nearest even, saturated to +-57344."""
    return encode(x, "e5m2", relu=relu, saturate="satfinite")


# --- cvt ---------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"([su])(8|16|32|64)$")
_SCALAR_FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_PACKED = {"f16x2": ("f16", 16), "bf16x2": ("bf16", 16), "e4m3x2": ("e4m3", 8), "e5m2x2": ("e5m2", 8)}


def decode_scalar(bits: np.ndarray, name: str) -> np.ndarray:
    """Values of scalar type `name`: float32 (f64: float64), or int64 / uint64 for integers, from register bits.

    Bits above the type's width are ignored.
    """
    integer = _INTEGER.match(name)
    if integer:
        signed, width = integer[1] == "s", int(integer[2])
        narrow = bits.astype(_UNSIGNED[width])
        return narrow.view(_SIGNED[width]).astype(np.int64) if signed else narrow.astype(np.uint64)
    narrow = np.ascontiguousarray(bits.astype(_UNSIGNED[_SCALAR_FLOATS[name]]))
    if name == "f16":
        return f16_to_f32(narrow)
    if name == "bf16":
        return bf16_to_f32(narrow)
    return narrow.view(np.float32 if name == "f32" else np.float64)


def _encode_scalar(values: np.ndarray, name: str, mode: str, saturate: str | None, relu: bool) -> np.ndarray:
    if name in _FORMATS:
        return encode(values, name, mode, relu=relu, saturate=saturate)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if name == "f64":
            result = values.astype(np.float64)
        elif values.dtype == np.float64 and mode != "rn":
            result = _directed_f32(values, mode)
        else:
            result = values.astype(np.float32)
    nan = np.isnan(result)
    if saturate == "sat":
        result = np.clip(np.where(nan, 0, result), 0, 1) + result.dtype.type(0)
    bits = np.ascontiguousarray(result).view(_UNSIGNED[_SCALAR_FLOATS[name]])
    if nan.any() and saturate != "sat":
        canonical = 0x7FFFFFFF if name == "f32" else 0x7FF8000000000000
        bits = np.where(nan, bits.dtype.type(canonical), bits)
    return bits


def _directed_f32(values: np.ndarray, mode: str) -> np.ndarray:
    """float64 -> float32 in mode rz, rm or rp."""
    nearest = values.astype(np.float32)
    back = nearest.astype(np.float64)
    lower, upper = np.float32(-np.inf), np.float32(np.inf)
    up, down = np.nextafter(nearest, upper), np.nextafter(nearest, lower)
    above, below = back > values, back < values
    if mode == "rm":
        return np.where(above, down, nearest)
    if mode == "rp":
        return np.where(below, up, nearest)
    return np.where(above & (values > 0), down, np.where(below & (values < 0), up, nearest))


def _to_integer(values: np.ndarray, name: str, mode: str, from_64: bool) -> np.ndarray:
    signed, width = name[0] == "s", int(name[1:])
    lo, hi = (-(1 << width - 1), (1 << width - 1) - 1) if signed else (0, (1 << width) - 1)
    rounded = _TO_INTEGER[mode](values.astype(np.float64))
    nan = np.isnan(rounded)
    rounded = np.where(nan, 0.0, rounded)
    inside = (rounded >= lo) & (rounded < hi + 1)
    within = np.where(inside, rounded, 0)
    out = within.astype(np.int64).view(np.uint64) if signed else within.astype(np.uint64)
    out = np.where(rounded < lo, np.uint64(lo & (1 << 64) - 1), out)
    out = np.where(rounded >= hi + 1, np.uint64(hi), out)
    nan_value = 1 << width - 1 if from_64 or width == 64 else 0
    return np.where(nan, np.uint64(nan_value), out)


def _integer_bits(values: np.ndarray, name: str, saturate: bool) -> np.ndarray:
    """int64 or uint64 values -> uint64 holding them modulo 2**64, clamped to `name` first where asked."""
    signed, width = name[0] == "s", int(name[1:])
    if saturate:
        lo, hi = (-(1 << width - 1), (1 << width - 1) - 1) if signed else (0, (1 << width) - 1)
        if values.dtype == np.uint64:
            values = np.minimum(values, np.uint64(hi))
        else:
            values = np.clip(values, lo, min(hi, (1 << 63) - 1))
    return values.view(np.uint64)


def _extend(bits: np.ndarray, name: str, destination: int) -> np.ndarray:
    """Low bits of uint64 `bits` as type `name`, sign- or zero-extended to a register of `destination` bits."""
    width = int(name[1:])
    narrow = bits.astype(_UNSIGNED[width])
    if name[0] == "s":
        return narrow.view(_SIGNED[width]).astype(_SIGNED[destination]).view(_UNSIGNED[destination])
    return narrow.astype(_UNSIGNED[destination])


def _flush(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < 2.0**-126, np.copysign(values.dtype.type(0), values), values)


_MODES = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")


@functools.lru_cache(maxsize=512)
def cvt(opcode: str, destination: int | None = None) -> Callable[..., np.ndarray]:
    """A function that executes `opcode`, e.g. "cvt.rn.f16x2.f32", on arrays of register bits.

    It takes one unsigned array per source operand, in PTX order, and returns an unsigned array of the destination
    register's width: `destination` bits, by default the type's own (16 for 8-bit integers, which PTX keeps in wider
    registers; 16 for pairs of fp8). Integer results are sign- or zero-extended to it. Raises `FormatError`.
    """
    parts = opcode.split(".")
    if parts[0] != "cvt" or len(parts) < 3:
        raise FormatError(f"not a cvt with two types: {opcode}")
    *modifiers, d_type, a_type = parts[1:]
    mode = next((part for part in modifiers if part in _MODES), None)
    flags = [part for part in modifiers if part != mode]
    unknown = set(flags) - {"ftz", "sat", "satfinite", "relu"}
    if unknown:
        raise FormatError(f"{opcode}: unknown modifier .{sorted(unknown)[0]}")
    ftz, relu = "ftz" in flags, "relu" in flags
    saturate = "satfinite" if "satfinite" in flags else "sat" if "sat" in flags else None

    if d_type in _PACKED or a_type in _PACKED:
        return _packed(opcode, d_type, a_type, mode, relu, saturate, destination)
    if d_type == "tf32":
        if a_type != "f32" or mode not in ("rna", "rn", "rz"):
            raise FormatError(f"PTX has no {opcode}")
        return lambda bits: encode(decode_scalar(bits, "f32"), "tf32", mode, relu=relu, saturate=saturate)

    d_int, a_int = _INTEGER.match(d_type), _INTEGER.match(a_type)
    for name, integer in ((d_type, d_int), (a_type, a_int)):
        if not integer and name not in _SCALAR_FLOATS:
            raise FormatError(f"{opcode}: unknown type .{name}")
    if d_int:
        width = destination or max(int(d_int[2]), 16)
        if width not in _UNSIGNED or width < int(d_int[2]):
            raise FormatError(f"{opcode}: a register of {width} bits cannot hold .{d_type}")
        if a_int:
            return lambda bits: _extend(
                _integer_bits(decode_scalar(bits, a_type), d_type, saturate == "sat"), d_type, width
            )
        if mode is None or not mode.endswith("i"):
            raise FormatError(f"{opcode}: float to integer needs .rni, .rzi, .rmi or .rpi")

        def float_to_integer(bits: np.ndarray) -> np.ndarray:
            values = decode_scalar(bits, a_type)
            values = _flush(values) if ftz and a_type == "f32" else values
            return _extend(_to_integer(values, d_type, mode[:2], a_type == "f64"), d_type, width)

        return float_to_integer

    if a_int:
        if mode is None or mode not in ("rn", "rz", "rm", "rp"):
            raise FormatError(f"{opcode}: integer to float needs .rn, .rz, .rm or .rp")

        def integer_to_float(bits: np.ndarray) -> np.ndarray:
            values = decode_scalar(bits, a_type)
            return _encode_integers(values, d_type, mode, saturate)

        return integer_to_float

    to_integral = mode is not None and mode.endswith("i")
    if to_integral and d_type != a_type:
        raise FormatError(f"{opcode}: integer rounding needs equal float types")
    narrowing = _SCALAR_FLOATS[d_type] < _SCALAR_FLOATS[a_type] or {d_type, a_type} == {"f16", "bf16"}
    if narrowing and mode is None:
        raise FormatError(f"{opcode}: a narrowing conversion needs a rounding mode")

    def float_to_float(bits: np.ndarray) -> np.ndarray:
        values = decode_scalar(bits, a_type)
        if ftz and a_type == "f32":
            values = _flush(values)
        if to_integral:
            with np.errstate(invalid="ignore"):
                values = _TO_INTEGER[mode[:2]](values)
        encoded = _encode_scalar(values, d_type, "rn" if mode is None or to_integral else mode, saturate, relu)
        if ftz and d_type == "f32":
            encoded = np.ascontiguousarray(_flush(encoded.view(np.float32))).view(np.uint32)
        return encoded

    return float_to_float


def _encode_integers(values: np.ndarray, d_type: str, mode: str, saturate: str | None) -> np.ndarray:
    """int64 or uint64 values -> float bits, rounded once."""
    exact = values.astype(np.float64)
    if d_type == "f64" or bool((np.abs(exact) < 2.0**53).all()):
        if d_type == "f64" and mode != "rn" and bool((np.abs(exact) >= 2.0**53).any()):
            raise FormatError(f"cvt.{mode}.f64 of 64-bit integers beyond 2**53 is not modelled")
        return _encode_scalar(exact, d_type, mode, saturate, False)
    # Beyond 2**53 make float64 hold a value on the same side of every narrower rounding boundary: round to odd.
    magnitude = np.where(values < 0, (~values.view(np.uint64)) + np.uint64(1), values.view(np.uint64))
    if values.dtype == np.uint64:
        magnitude = values
    kept = magnitude >> np.uint64(12) << np.uint64(12)
    sticky = np.where(magnitude != kept, kept | np.uint64(1 << 12), kept)
    chosen = np.where(magnitude >= np.uint64(1 << 53), sticky, magnitude).astype(np.float64)
    return _encode_scalar(np.where(values < 0, -chosen, chosen), d_type, mode, saturate, False)


def _packed(
    opcode: str,
    d_type: str,
    a_type: str,
    mode: str | None,
    relu: bool,
    saturate: str | None,
    destination: int | None,
) -> Callable[..., np.ndarray]:
    """The x2 forms: f16x2 or bf16x2 from two f32, fp8x2 from two f32 or f16x2, f16x2 from fp8x2."""
    if d_type in ("f16x2", "bf16x2") and a_type == "f32":
        element, width = _PACKED[d_type]
        if mode not in ("rn", "rz") or saturate == "sat":
            raise FormatError(f"PTX has no {opcode}")
    elif d_type in ("e4m3x2", "e5m2x2") and a_type in ("f32", "f16x2"):
        element, width = _PACKED[d_type]
        if mode != "rn" or saturate != "satfinite":
            raise FormatError(f"PTX has no {opcode}: fp8 conversions are .rn.satfinite")
    elif d_type == "f16x2" and a_type in ("e4m3x2", "e5m2x2"):
        if mode != "rn" or saturate:
            raise FormatError(f"PTX has no {opcode}")
        table = _E4M3 if a_type == "e4m3x2" else _E5M2

        def widen(bits: np.ndarray) -> np.ndarray:
            low, high = (
                encode(table[(bits >> bits.dtype.type(shift)).astype(np.uint8)], "f16", relu=relu).astype(np.uint32)
                for shift in (0, 8)
            )
            return high << np.uint32(16) | low

        return widen
    else:
        raise FormatError(f"PTX has no {opcode} on sm_90")

    word = _UNSIGNED[destination or 2 * width]

    def convert(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        high = encode(upper, element, mode, relu=relu, saturate=saturate).astype(word)
        return high << word(width) | encode(lower, element, mode, relu=relu, saturate=saturate).astype(word)

    if a_type == "f32":
        return lambda a, b: convert(decode_scalar(a, "f32"), decode_scalar(b, "f32"))
    return lambda a: convert(decode_scalar(a >> a.dtype.type(16), "f16"), decode_scalar(a, "f16"))
