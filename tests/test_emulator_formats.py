"""Conversions against torch, against exact rational rounding, and against the ISA's rules for special values."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from cute_matmul.emulator import formats
from cute_matmul.emulator.formats import FormatError, cvt

ALL_16 = np.arange(1 << 16, dtype=np.uint16)
ALL_8 = np.arange(1 << 8, dtype=np.uint8)


def samples(seed: int = 0) -> np.ndarray:
    """float32 of every exponent, the neighbourhood of every binary16 value, ties between them, and specials."""
    rng = np.random.default_rng(seed)
    random = rng.integers(0, 1 << 32, 50_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    halves = ALL_16[(ALL_16 & 0x7C00) != 0x7C00].view(np.float16).astype(np.float32)[::7]
    up, down = np.float32(np.inf), np.float32(-np.inf)
    ties = ((halves.astype(np.float64)[:-1] + halves[1:]) / 2).astype(np.float32)
    specials = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 448, 449, 464, 480, 57344, 61440, 65504, 65520], np.float32
    )
    with np.errstate(all="ignore"):
        near = [halves, np.nextafter(halves, up), np.nextafter(halves, down), ties]
    return np.concatenate([*near, specials, -specials, random])


TORCH = {
    "f16": (torch.float16, np.uint16),
    "bf16": (torch.bfloat16, np.uint16),
    "e4m3": (torch.float8_e4m3fn, np.uint8),
    "e5m2": (torch.float8_e5m2, np.uint8),
}


@pytest.mark.parametrize("name", TORCH)
def test_decoding_matches_torch(name):
    dtype, storage = TORCH[name]
    bits = ALL_16 if storage is np.uint16 else ALL_8
    expected = torch.from_numpy(bits.view(np.int16 if storage is np.uint16 else np.uint8)).view(dtype).float().numpy()
    got = getattr(formats, f"{name}_to_f32")(bits)
    assert got.dtype == np.float32 and np.array_equal(got, expected, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("name", TORCH)
def test_rounding_to_nearest_matches_torch(name):
    dtype, storage = TORCH[name]
    x = samples()
    nan = np.isnan(x)
    saturate = None
    clipped = x
    if storage is np.uint8:
        saturate, largest = "satfinite", {"e4m3": 448, "e5m2": 57344}[name]
        clipped = np.clip(x, -largest, largest)
    expected = torch.from_numpy(clipped).to(dtype).view(torch.uint8).numpy().view(storage)
    got = formats.encode(x, name, saturate=saturate)
    assert np.array_equal(got[~nan], expected[~nan])
    assert set(got[nan].tolist()) == {0x7F if storage is np.uint8 else 0x7FFF}, "NaN becomes the canonical NaN"


FORMATS = {  # fraction bits, smallest normal exponent, largest finite
    "f16": (10, -14, Fraction(65504)),
    "bf16": (7, -126, (2 - Fraction(1, 128)) * 2**127),
    "tf32": (10, -126, (2 - Fraction(1, 1024)) * 2**127),
}


def rounded(x: float, name: str, mode: str) -> float:
    """The definition of rounding, in rationals: infinity where the result is beyond the largest number."""
    fraction, lowest, largest = FORMATS[name]
    exact = Fraction(x)
    magnitude = abs(exact)
    exponent = lowest
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - fraction)
    low, rest = divmod(magnitude, unit)
    half = Fraction(1, 2) * unit
    away = {
        "rz": False,
        "rn": rest > half or (rest == half and low % 2 == 1),
        "rna": rest >= half,
    }[mode]
    result = (low + away) * unit
    if result > largest:
        return float(np.copysign(np.inf if mode != "rz" else float(largest), x))
    return float(np.copysign(float(result), x))


@pytest.mark.parametrize(
    ("name", "mode"), [("f16", "rz"), ("bf16", "rz"), ("tf32", "rna"), ("tf32", "rn"), ("tf32", "rz")]
)
def test_rounding_modes_match_their_definition(name, mode):
    x = samples(1)[::37]
    x = x[np.isfinite(x)]
    got = formats.encode(x, name, mode)
    decode = {"f16": formats.f16_to_f32, "bf16": formats.bf16_to_f32, "tf32": lambda bits: bits.view(np.float32)}[name]
    values = decode(got).astype(np.float64)
    expected = np.array([rounded(float(value), name, mode) for value in x])
    assert np.array_equal(values, expected) and np.array_equal(np.signbit(values), np.signbit(expected))
    if name == "tf32":
        assert not (got & 0x1FFF).any()


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def test_satfinite_relu_and_sat():
    x = f32(1e6, -1e6, np.inf, -np.inf, np.nan, -2.0, -0.0, 0.5)
    half = cvt("cvt.rn.satfinite.f16.f32")(x)
    assert half.tolist() == [0x7BFF, 0xFBFF, 0x7BFF, 0xFBFF, 0x7FFF, 0xC000, 0x8000, 0x3800]
    relu = cvt("cvt.rn.relu.f16.f32")(x)
    assert relu.tolist() == [0x7C00, 0, 0x7C00, 0, 0x7FFF, 0, 0, 0x3800]
    both = cvt("cvt.rz.relu.satfinite.bf16.f32")(x)
    assert both.tolist() == [0x4974, 0, 0x7F7F, 0, 0x7FFF, 0, 0, 0x3F00]
    sat = cvt("cvt.rn.sat.f16.f32")(x)
    assert sat.tolist() == [0x3C00, 0, 0x3C00, 0, 0, 0, 0, 0x3800], ".sat clamps to [0, 1] and makes NaN 0"
    e4m3 = cvt("cvt.rn.satfinite.e4m3x2.f32")(x, f32(*[448.0] * 8))
    assert (e4m3 >> 8).tolist() == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0xC0, 0x80, 0x30]
    assert (e4m3 & 0xFF).tolist() == [0x7E] * 8
    tf32 = cvt("cvt.rna.satfinite.tf32.f32")(x)
    assert tf32[2] == 0x7F7FE000 and tf32[4] == 0x7FFFFFFF


def test_packed_forms_put_the_first_operand_high():
    assert cvt("cvt.rn.f16x2.f32")(f32(1.0), f32(2.0)).tolist() == [0x3C004000]
    assert cvt("cvt.rn.bf16x2.f32")(f32(1.0), f32(2.0)).tolist() == [0x3F804000]
    packed = cvt("cvt.rn.satfinite.e5m2x2.f32")(f32(1.0), f32(2.0))
    assert packed.dtype == np.uint16 and packed.tolist() == [0x3C40]
    # From f16x2: upper half to upper byte; back again exactly.
    pairs = np.array([0x3C00C000], np.uint32)
    assert cvt("cvt.rn.satfinite.e4m3x2.f16x2")(pairs).tolist() == [0x38C0]
    for kind in ("e4m3x2", "e5m2x2"):
        down = cvt(f"cvt.rn.satfinite.{kind}.f16x2")(pairs)
        assert cvt(f"cvt.rn.f16x2.{kind}")(down).tolist() == pairs.tolist()
    assert cvt("cvt.rn.relu.f16x2.e4m3x2")(np.array([0x38C0], np.uint16)).tolist() == [0x3C000000]


def test_float_to_integer_clamps_and_rounds():
    x = f32(2.5, -2.5, 3e9, -3e9, np.nan, np.inf, 0.999)
    s32 = lambda mode: cvt(f"cvt.{mode}.s32.f32")(x).view(np.int32).tolist()  # noqa: E731
    assert s32("rzi")[:2] == [2, -2] and s32("rni")[:2] == [2, -2]
    assert s32("rmi")[:2] == [2, -3] and s32("rpi")[:2] == [3, -2]
    assert s32("rzi")[2:] == [2**31 - 1, -(2**31), 0, 2**31 - 1, 0]
    assert cvt("cvt.rzi.u32.f32")(x).tolist() == [2, 0, 3_000_000_000, 0, 0, 2**32 - 1, 0]
    assert cvt("cvt.rzi.u64.f32")(f32(np.nan, np.inf, 1e19)).tolist() == [1 << 63, 2**64 - 1, int(np.float32(1e19))]
    assert cvt("cvt.rzi.s64.f64")(np.array([1e300]).view(np.uint64)).view(np.int64).tolist() == [2**63 - 1]
    assert cvt("cvt.rzi.s32.f64")(np.array([np.nan]).view(np.uint64)).tolist() == [1 << 31]
    # An s8 result is sign-extended to its register.
    assert cvt("cvt.rni.s8.f32")(f32(-3.0, 200.0)).view(np.int16).tolist() == [-3, 127]
    assert cvt("cvt.rni.s8.f32", 32)(f32(-3.0)).tolist() == [0xFFFFFFFD]


def test_integer_widths_and_saturation():
    word = np.array([0x8000_00FF], np.uint32)
    assert cvt("cvt.u64.u32")(word).tolist() == [0x8000_00FF]
    assert cvt("cvt.s64.s32")(word).tolist() == [0xFFFF_FFFF_8000_00FF]
    assert cvt("cvt.u16.u32")(word).tolist() == [0x00FF]
    assert cvt("cvt.u32.u16")(word).tolist() == [0x00FF], "bits above the source's width are ignored"
    assert cvt("cvt.s32.s8", 32)(word).view(np.int32).tolist() == [-1]
    assert cvt("cvt.sat.u8.s32", 32)(np.array([-5, 300], np.int32).view(np.uint32)).tolist() == [0, 255]
    assert cvt("cvt.sat.s16.u64")(np.array([2**63], np.uint64)).view(np.int16).tolist() == [32767]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integer_to_float_rounds_once(mode):
    values = [0, 1, -1, 2**24 + 1, -(2**24) - 1, 2**62 + 2**38 + 1, -(2**62) - 2**38 - 1, 2**63 - 1, -(2**63)]
    got = cvt(f"cvt.{mode}.f32.s64")(np.array(values, np.int64).view(np.uint64)).view(np.float32)
    for value, result in zip(values, got, strict=True):
        below, above = Fraction(value), Fraction(value)
        shift = max(abs(value).bit_length() - 24, 0)
        below = (value >> shift) << shift
        above = below if below == value else below + (1 << shift)
        if mode == "rn":
            middle = 2 * value - below - above
            expected = below if middle < 0 or (middle == 0 and (below >> shift) % 2 == 0) else above
        else:
            expected = {"rz": below if value >= 0 else above, "rm": below, "rp": above}[mode]
        assert int(result) == expected, value
    assert cvt("cvt.rn.f32.u64")(np.array([2**64 - 1], np.uint64)).view(np.float32).tolist() == [2.0**64]
    assert cvt("cvt.rn.f16.s32")(np.array([2049], np.uint32)).tolist() == [0x6800]


def test_float_widths():
    assert cvt("cvt.f32.f16")(np.array([0x3C00, 0x7E01], np.uint16)).tolist() == [0x3F800000, 0x7FFFFFFF]
    assert cvt("cvt.f64.f32")(f32(1.5)).view(np.float64).tolist() == [1.5]
    tight = np.array([1 + 2.0**-30, -1 - 2.0**-30], np.float64).view(np.uint64)
    ulp = float(np.float32(2.0**-23))
    expect = {"rn": [1, -1], "rz": [1, -1], "rm": [1, -1 - ulp], "rp": [1 + ulp, -1]}
    for mode, values in expect.items():
        assert cvt(f"cvt.{mode}.f32.f64")(tight).view(np.float32).tolist() == values
    assert cvt("cvt.rni.f32.f32")(f32(2.5, -0.4)).view(np.float32).tolist() == [2.0, -0.0]
    assert cvt("cvt.rn.bf16.f16")(np.array([0x3C01], np.uint16)).tolist() == [0x3F80]
    assert cvt("cvt.ftz.f64.f32")(f32(1e-40)).view(np.float64).tolist() == [0.0]
    assert cvt("cvt.f64.f32")(f32(1e-40)).view(np.float64)[0] > 0


@pytest.mark.parametrize(
    "opcode",
    [
        "cvt.f16.f32",
        "cvt.rn.e4m3x2.f32",
        "cvt.rn.satfinite.e4m3.f32",
        "cvt.rs.f16x2.f32",
        "cvt.rm.f16x2.f32",
        "cvt.s32.f32",
        "cvt.f32.s32",
        "cvt.rn.satfinite.e2m1x2.f32",
        "cvt.rn.scaled.f16.f32",
        "cvt.rni.f16.f32",
        "mov.b32",
    ],
)
def test_what_ptx_does_not_have_is_refused(opcode):
    with pytest.raises(FormatError):
        cvt(opcode)


def test_encode_refuses_e4m3_without_saturation():
    with pytest.raises(FormatError, match="satfinite"):
        formats.encode(np.ones(1, np.float32), "e4m3")


def test_overflow_goes_the_way_of_the_rounding_mode():
    """IEEE 754: beyond the largest number, infinity only where the mode rounds away from zero."""
    x = np.array([1e6, -1e6], np.float32).view(np.uint32)
    expected = {"rn": (0x7C00, 0xFC00), "rz": (0x7BFF, 0xFBFF), "rm": (0x7BFF, 0xFC00), "rp": (0x7C00, 0xFBFF)}
    for mode, bits in expected.items():
        assert tuple(cvt(f"cvt.{mode}.f16.f32")(x).tolist()) == bits, mode
