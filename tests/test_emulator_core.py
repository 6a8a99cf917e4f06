"""Instructions of the emulator against their meaning in the PTX ISA, stated in plain Python integers and floats."""

from __future__ import annotations

import dataclasses
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from emulator_ptx import kernel_text, lanes, launch, run

from cute_matmul.emulator import launches, printf, ptx
from cute_matmul.emulator.api import run_launch
from cute_matmul.emulator.errors import EmulatorError, UnknownInstruction

RNG = np.random.default_rng(20240607)
EDGES = [0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 255, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def words(bits: int, n: int = 96) -> np.ndarray:
    """n unsigned integers: edge values first, then random ones."""
    mask = (1 << bits) - 1
    edges = [e & mask for e in [*EDGES, (1 << (bits - 1)), mask, mask - 1]]
    rest = RNG.integers(0, mask, n - len(edges), dtype=np.uint64, endpoint=True)
    return np.concatenate([np.array(edges, np.uint64), rest]).astype(f"u{bits // 8}")


def shuffled(a: np.ndarray) -> np.ndarray:
    return RNG.permutation(a)


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def as_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def quotient(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def extract(a: int, start: int, length: int, bits: int, is_signed: bool) -> int:
    """bfe as the ISA's loop: bits beyond the width are the sign (or zero)."""
    msb = bits - 1
    pos, n = start & 255, length & 255
    sign = 0 if not is_signed or n == 0 else (a >> min(pos + n - 1, msb)) & 1
    out = 0
    for i in range(bits):
        bit = (a >> (pos + i)) & 1 if i < n and pos + i <= msb else sign
        out |= bit << i
    return out


def insert(a: int, b: int, start: int, length: int, bits: int) -> int:
    pos, n = start & 255, length & 255
    for i in range(n):
        if pos + i < bits:
            b = (b & ~(1 << (pos + i))) | (((a >> i) & 1) << (pos + i))
    return b


def permute(a: int, b: int, selector: int) -> int:
    both = (b << 32) | a
    out = 0
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = both >> (8 * (nibble & 7)) & 255
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << (8 * i)
    return out


M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF

# name, instruction, widths of the inputs, width of the output, meaning
INTEGER = [
    ("add.s32", "add.s32 $0, $1, $2;", (32, 32), 32, lambda a, b: a + b),
    ("add.u64", "add.s64 $0, $1, $2;", (64, 64), 64, lambda a, b: a + b),
    ("add.s16", "add.s16 $0, $1, $2;", (16, 16), 16, lambda a, b: a + b),
    ("sub.s32", "sub.s32 $0, $1, $2;", (32, 32), 32, lambda a, b: a - b),
    ("add.sat", "add.sat.s32 $0, $1, $2;", (32, 32), 32,
     lambda a, b: max(-(2**31), min(2**31 - 1, signed(a, 32) + signed(b, 32)))),
    ("neg.s32", "neg.s32 $0, $1;", (32,), 32, lambda a: -a),
    ("abs.s32", "abs.s32 $0, $1;", (32,), 32, lambda a: abs(signed(a, 32))),
    ("mul.lo.s32", "mul.lo.s32 $0, $1, $2;", (32, 32), 32, lambda a, b: a * b),
    ("mul.hi.u32", "mul.hi.u32 $0, $1, $2;", (32, 32), 32, lambda a, b: a * b >> 32),
    ("mul.hi.s32", "mul.hi.s32 $0, $1, $2;", (32, 32), 32, lambda a, b: signed(a, 32) * signed(b, 32) >> 32),
    ("mul.hi.u64", "mul.hi.u64 $0, $1, $2;", (64, 64), 64, lambda a, b: a * b >> 64),
    ("mul.hi.s64", "mul.hi.s64 $0, $1, $2;", (64, 64), 64, lambda a, b: signed(a, 64) * signed(b, 64) >> 64),
    ("mul.wide.u32", "mul.wide.u32 $0, $1, $2;", (32, 32), 64, lambda a, b: a * b),
    ("mul.wide.s32", "mul.wide.s32 $0, $1, $2;", (32, 32), 64, lambda a, b: signed(a, 32) * signed(b, 32)),
    ("mul.wide.s16", "mul.wide.s16 $0, $1, $2;", (16, 16), 32, lambda a, b: signed(a, 16) * signed(b, 16)),
    ("mad.lo.s32", "mad.lo.s32 $0, $1, $2, $3;", (32, 32, 32), 32, lambda a, b, c: a * b + c),
    ("mad.lo.s64", "mad.lo.s64 $0, $1, $2, $3;", (64, 64, 64), 64, lambda a, b, c: a * b + c),
    ("mad.wide.s32", "mad.wide.s32 $0, $1, $2, $3;", (32, 32, 64), 64,
     lambda a, b, c: signed(a, 32) * signed(b, 32) + c),
    ("mad.hi.u32", "mad.hi.u32 $0, $1, $2, $3;", (32, 32, 32), 32, lambda a, b, c: (a * b >> 32) + c),
    ("div.u32", "div.u32 $0, $1, $2;", (32, 32), 32, lambda a, b: a // b if b else M32),
    ("div.s32", "div.s32 $0, $1, $2;", (32, 32), 32,
     lambda a, b: quotient(signed(a, 32), signed(b, 32)) if b else M32),
    ("div.s64", "div.s64 $0, $1, $2;", (64, 64), 64,
     lambda a, b: quotient(signed(a, 64), signed(b, 64)) if b else M64),
    ("rem.u32", "rem.u32 $0, $1, $2;", (32, 32), 32, lambda a, b: a % b if b else a),
    ("rem.s32", "rem.s32 $0, $1, $2;", (32, 32), 32,
     lambda a, b: math.fmod(signed(a, 32), signed(b, 32)) if b else a),
    ("min.s32", "min.s32 $0, $1, $2;", (32, 32), 32, lambda a, b: min(signed(a, 32), signed(b, 32))),
    ("max.u32", "max.u32 $0, $1, $2;", (32, 32), 32, max),
    ("max.s64", "max.s64 $0, $1, $2;", (64, 64), 64, lambda a, b: max(signed(a, 64), signed(b, 64))),
    ("and.b32", "and.b32 $0, $1, $2;", (32, 32), 32, lambda a, b: a & b),
    ("or.b64", "or.b64 $0, $1, $2;", (64, 64), 64, lambda a, b: a | b),
    ("xor.b16", "xor.b16 $0, $1, $2;", (16, 16), 16, lambda a, b: a ^ b),
    ("not.b32", "not.b32 $0, $1;", (32,), 32, lambda a: ~a),
    ("shl.b32", "shl.b32 $0, $1, $2;", (32, 32), 32, lambda a, b: a << b if b < 32 else 0),
    ("shr.u32", "shr.u32 $0, $1, $2;", (32, 32), 32, lambda a, b: a >> b if b < 32 else 0),
    ("shr.s32", "shr.s32 $0, $1, $2;", (32, 32), 32, lambda a, b: signed(a, 32) >> min(b, 31)),
    ("shr.s64", "shr.s64 $0, $1, $2;", (64, 32), 64, lambda a, b: signed(a, 64) >> min(b, 63)),
    ("shl.b64 literal", "shl.b64 $0, $1, 13;", (64,), 64, lambda a: a << 13),
    ("shr.s16 literal", "shr.s16 $0, $1, 3;", (16,), 16, lambda a: signed(a, 16) >> 3),
    ("shf.l.wrap", "shf.l.wrap.b32 $0, $1, $2, $3;", (32, 32, 32), 32,
     lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32),
    ("shf.r.wrap", "shf.r.wrap.b32 $0, $1, $2, $3;", (32, 32, 32), 32, lambda a, b, c: (b << 32 | a) >> (c & 31)),
    ("shf.l.clamp", "shf.l.clamp.b32 $0, $1, $2, $3;", (32, 32, 32), 32,
     lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32),
    ("shf.r.clamp", "shf.r.clamp.b32 $0, $1, $2, $3;", (32, 32, 32), 32, lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    ("lop3 0x96", "lop3.b32 $0, $1, $2, $3, 0x96;", (32, 32, 32), 32, lambda a, b, c: a ^ b ^ c),
    ("lop3 0xE8", "lop3.b32 $0, $1, $2, $3, 0xE8;", (32, 32, 32), 32, lambda a, b, c: a & b | a & c | b & c),
    ("lop3 0xCA", "lop3.b32 $0, $1, $2, $3, 0xCA;", (32, 32, 32), 32, lambda a, b, c: a & b | ~a & c),
    ("prmt", "prmt.b32 $0, $1, $2, $3;", (32, 32, 32), 32, permute),
    ("bfe.u32", "bfe.u32 $0, $1, $2, $3;", (32, 32, 32), 32, lambda a, b, c: extract(a, b, c, 32, False)),
    ("bfe.s32", "bfe.s32 $0, $1, $2, $3;", (32, 32, 32), 32, lambda a, b, c: extract(a, b, c, 32, True)),
    ("bfe.s64", "bfe.s64 $0, $1, $2, $3;", (64, 32, 32), 64, lambda a, b, c: extract(a, b, c, 64, True)),
    ("bfi.b32", "bfi.b32 $0, $1, $2, $3, $4;", (32, 32, 32, 32), 32, lambda a, b, c, d: insert(a, b, c, d, 32)),
    ("popc.b32", "popc.b32 $0, $1;", (32,), 32, lambda a: a.bit_count()),
    ("popc.b64", "popc.b64 $0, $1;", (64,), 32, lambda a: a.bit_count()),
    ("clz.b32", "clz.b32 $0, $1;", (32,), 32, lambda a: 32 - a.bit_length()),
    ("clz.b64", "clz.b64 $0, $1;", (64,), 32, lambda a: 64 - a.bit_length()),
    ("brev.b32", "brev.b32 $0, $1;", (32,), 32, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("bfind.u32", "bfind.u32 $0, $1;", (32,), 32, lambda a: a.bit_length() - 1 if a else M32),
    ("bfind.s32", "bfind.s32 $0, $1;", (32,), 32,
     lambda a: (lambda x: x.bit_length() - 1 if x else M32)(~a & M32 if a >> 31 else a)),
    ("bfind.shiftamt", "bfind.shiftamt.u32 $0, $1;", (32,), 32, lambda a: 32 - a.bit_length() if a else M32),
    ("sad.u32", "sad.u32 $0, $1, $2, $3;", (32, 32, 32), 32, lambda a, b, c: c + abs(a - b)),
    ("cnot", "cnot.b32 $0, $1;", (32,), 32, lambda a: int(a == 0)),
    ("dp4a.s32.s32", "dp4a.s32.s32 $0, $1, $2, $3;", (32, 32, 32), 32,
     lambda a, b, c: c + sum(signed(a >> 8 * i, 8) * signed(b >> 8 * i, 8) for i in range(4))),
    ("dp4a.u32.s32", "dp4a.u32.s32 $0, $1, $2, $3;", (32, 32, 32), 32,
     lambda a, b, c: c + sum((a >> 8 * i & 255) * signed(b >> 8 * i, 8) for i in range(4))),
    ("cvt.u64.u32", "cvt.u64.u32 $0, $1;", (32,), 64, lambda a: a),
    ("cvt.s64.s32", "cvt.s64.s32 $0, $1;", (32,), 64, lambda a: signed(a, 32)),
    ("cvt.u32.u64", "cvt.u32.u64 $0, $1;", (64,), 32, lambda a: a),
    ("cvt.u32.u16", "cvt.u32.u16 $0, $1;", (16,), 32, lambda a: a),
    ("cvt.s32.s16", "cvt.s32.s16 $0, $1;", (16,), 32, lambda a: signed(a, 16)),
    ("cvt.s32.s8", "cvt.s32.s8 $0, $1;", (32,), 32, lambda a: signed(a, 8)),
    ("cvt.u16.u32", "cvt.u16.u32 $0, $1;", (32,), 16, lambda a: a),
    ("mov pack", "mov.b64 $0, {$1, $2};", (32, 32), 64, lambda a, b: a | b << 32),
    ("mov unpack", "mov.b64 {_, $0}, $1;", (64,), 32, lambda a: a >> 32),
    ("mov pack halves", "mov.b32 $0, {$1, $2};", (16, 16), 32, lambda a, b: a | b << 16),
    ("selp", "setp.lt.s32 $P, $1, $2;\nselp.b32 $0, $1, $2, $P;", (32, 32), 32,
     lambda a, b: a if signed(a, 32) < signed(b, 32) else b),
    ("slct", "slct.b32.s32 $0, $1, $2, $3;", (32, 32, 32), 32, lambda a, b, c: a if signed(c, 32) >= 0 else b),
    ("set", "set.lt.u32.u32 $0, $1, $2;", (32, 32), 32, lambda a, b: M32 if a < b else 0),
    ("guard", "mov.b32 $0, $1;\nsetp.gt.u32 $P, $1, $2;\n@!$P mov.b32 $0, $2;", (32, 32), 32, max),
    ("add.cc", "add.cc.u32 $0, $1, $2;\naddc.u32 $0, $3, $4;", (32, 32, 32, 32), 32,
     lambda a, b, c, d: c + d + (a + b >> 32)),
    ("mul24.lo", "mul24.lo.u32 $0, $1, $2;", (32, 32), 32, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    ("mul24.hi", "mul24.hi.s32 $0, $1, $2;", (32, 32), 32, lambda a, b: signed(a, 24) * signed(b, 24) >> 16),
    ("mad24.lo", "mad24.lo.s32 $0, $1, $2, $3;", (32, 32, 32), 32,
     lambda a, b, c: signed(a, 24) * signed(b, 24) + c),
    ("mad.lo.cc", "mad.lo.cc.u32 $0, $1, $2, $3;\nmadc.hi.u32 $0, $1, $2, $4;", (32, 32, 32, 32), 32,
     lambda a, b, c, d: (a * b >> 32) + d + ((a * b & M32) + c >> 32)),
    ("sub.cc", "sub.cc.u32 $0, $1, $2;\nsubc.u32 $0, $3, $4;", (32, 32, 32, 32), 32,
     lambda a, b, c, d: c - d - (a < b)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "widths", "out", "meaning"), [c[1:] for c in INTEGER], ids=[c[0] for c in INTEGER])
def test_integer_instructions(text, widths, out, meaning):
    inputs = [shuffled(words(bits)) for bits in widths]
    if any(name in text for name in ("shl", "shr.", "bfe", "bfi")):
        # Small shift counts and lengths are the interesting ones.
        first = 2 if "bfi" in text else 1
        for i in range(first, len(inputs)):
            inputs[i][::2] %= 70
    got = lanes(text, inputs, f"u{out // 8}")
    mask = (1 << out) - 1
    for i, values in enumerate(zip(*(a.tolist() for a in inputs), strict=True)):
        assert int(got[i]) == int(meaning(*values)) & mask, f"{text} of {[hex(v) for v in values]}"


COMPARE = [
    ("eq", lambda a, b: a == b),
    ("ne", lambda a, b: a != b),
    ("lt", lambda a, b: a < b),
    ("le", lambda a, b: a <= b),
    ("gt", lambda a, b: a > b),
    ("ge", lambda a, b: a >= b),
]


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "u16"])
@pytest.mark.parametrize(("name", "meaning"), COMPARE, ids=[c[0] for c in COMPARE])
def test_setp_of_integers(kind, name, meaning):
    bits = int(kind[1:])
    a, b = shuffled(words(bits)), shuffled(words(bits))
    b[:20] = a[:20]
    got = lanes(f"setp.{name}.{kind} $0, $1, $2;", [a, b], np.bool_)
    read = (lambda v: signed(v, bits)) if kind[0] == "s" else int
    assert got.tolist() == [meaning(read(x), read(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def floats() -> np.ndarray:
    special = [0.0, -0.0, 1.0, -1.0, 1.5, math.inf, -math.inf, math.nan, 2.0**-126, 2.0**-149, 3.4e38, 1 + 2.0**-23]
    return np.array(special * 4 + list(RNG.standard_normal(48)), np.float32)


@pytest.mark.parametrize(
    "name", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
def test_setp_of_floats_orders_nan(name):
    a, b = shuffled(floats()), shuffled(floats())
    b[:16] = a[:16]
    got = lanes(f"setp.{name}.f32 $0, $1, $2;", [a, b], np.bool_)
    table = dict(COMPARE)
    for x, y, result in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        unordered = math.isnan(x) or math.isnan(y)
        if name in ("num", "nan"):
            expected = unordered == (name == "nan")
        elif name in table:
            expected = not unordered and table[name](x, y)
        else:
            expected = unordered or table[name[:-1]](x, y)
        assert result == expected, (name, x, y)


def test_setp_combines_with_a_predicate():
    a, b = shuffled(words(32)), shuffled(words(32))
    got = lanes("setp.lt.u32 $P, $1, 1000;\nsetp.gt.and.u32 $0, $1, $2, $P;", [a, b], np.bool_)
    assert got.tolist() == [x > y and x < 1000 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    got = lanes("setp.lt.u32 $P, $1, 1000;\nsetp.gt.or.u32 $0|%p3, $1, $2, $P;", [a, b], np.bool_)
    assert got.tolist() == [x > y or x < 1000 for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def round_to_float32(exact: Fraction, mode: str) -> float:
    """One rounding of an exact number to float32, normal range, computed in integers."""
    if exact == 0:
        return 0.0
    sign = -1 if exact < 0 else 1
    magnitude = abs(exact)
    exponent = max(math.floor(math.log2(magnitude)) - 23, -149)
    while magnitude >= Fraction(2) ** (exponent + 24):
        exponent += 1
    while exponent > -149 and magnitude < Fraction(2) ** (exponent + 23):
        exponent -= 1
    scaled = magnitude / Fraction(2) ** exponent
    down = scaled.numerator // scaled.denominator
    rest = scaled - down
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down & 1),
        "rz": False,
        "rm": sign < 0 and rest > 0,
        "rp": sign > 0 and rest > 0,
    }[mode]
    return sign * float((down + up) * Fraction(2) ** exponent)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(
    ("name", "count", "meaning"),
    [
        ("add", 2, lambda a, b: a + b),
        ("sub", 2, lambda a, b: a - b),
        ("mul", 2, lambda a, b: a * b),
        ("fma", 3, lambda a, b, c: a * b + c),
    ],
)
def test_float32_arithmetic_rounds_once(mode, name, count, meaning):
    inputs = [RNG.standard_normal(128).astype(np.float32) for _ in range(count)]
    if count == 3:
        # Products that nearly cancel, and addends that fall on half-way points: where rounding twice would show.
        inputs[2][:64] = (-inputs[0][:64].astype(np.float64) * inputs[1][:64]).astype(np.float32)
        inputs[0][64:96], inputs[1][64:96] = 1 + 2.0**-23, 1 + np.float32(2.0**-23) * np.arange(32)
        inputs[2][64:96] = 2.0**-24
    operands = ", ".join(f"${i + 1}" for i in range(count))
    got = lanes(f"{name}.{mode}.f32 $0, {operands};", inputs, np.float32)
    for i, values in enumerate(zip(*(a.tolist() for a in inputs), strict=True)):
        expected = round_to_float32(meaning(*(Fraction(v) for v in values)), mode)
        assert float(got[i]) == expected, (name, mode, values)


def test_float32_functions():
    x = np.abs(RNG.standard_normal(64)).astype(np.float32) + np.float32(0.01)
    for text, meaning in [
        ("rcp.approx.ftz.f32", lambda v: 1 / v),
        ("rsqrt.approx.f32", lambda v: 1 / math.sqrt(v)),
        ("sqrt.rn.f32", math.sqrt),
        ("ex2.approx.ftz.f32", lambda v: 2**v),
        ("lg2.approx.f32", math.log2),
        ("tanh.approx.f32", math.tanh),
        ("sin.approx.f32", math.sin),
    ]:
        got = lanes(f"{text} $0, $1;", [x], np.float32)
        expected = np.array([meaning(v) for v in x.tolist()], np.float32)
        np.testing.assert_array_equal(got, expected, err_msg=text)
    got = lanes("div.rn.f32 $0, $1, $2;", [x, x[::-1].copy()], np.float32)
    expected = [
        round_to_float32(Fraction(a) / Fraction(b), "rn") for a, b in zip(x.tolist(), x[::-1].tolist(), strict=True)
    ]
    assert got.tolist() == expected


def test_min_max_of_floats_prefer_numbers_and_order_zeros():
    a = np.array([math.nan, 1.0, 0.0, -0.0, math.nan, 3.0] * 6, np.float32)
    b = np.array([2.0, math.nan, -0.0, 0.0, math.nan, -4.0] * 6, np.float32)
    low = lanes("min.f32 $0, $1, $2;", [a, b], np.float32)
    high = lanes("max.f32 $0, $1, $2;", [a, b], np.float32)
    assert low[:2].tolist() == [2.0, 1.0] and high[:2].tolist() == [2.0, 1.0]
    assert np.signbit(low[2:4]).all() and not np.signbit(high[2:4]).any()
    assert np.isnan(low[4]) and np.isnan(high[4]) and low[5] == -4 and high[5] == 3
    assert np.isnan(lanes("max.NaN.f32 $0, $1, $2;", [a, b], np.float32)[:2]).all()


def test_float64_fma_rounds_once():
    n = 64
    a, b, c = (RNG.standard_normal(n) for _ in range(3))
    c[:32] = -a[:32] * b[:32]  # what is left is the product's own rounding error
    a[32:48], b[32:48], c[32:48] = 1 + 2.0**-52, 1 + 2.0**-52 * np.arange(16), 2.0**-53
    got = lanes("fma.rn.f64 $0, $1, $2, $3;", [a, b, c], np.float64)
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        # Python's int / int division rounds correctly, to nearest even.
        assert result == exact.numerator / exact.denominator, (x, y, z)


def test_xorsign_takes_the_sign_of_both():
    a = np.array([1.5, -2.0, 3.0, -4.0] * 8, np.float32)
    b = np.array([-2.5, -1.0, 2.0, 5.0] * 8, np.float32)
    assert lanes("max.xorsign.abs.f32 $0, $1, $2;", [a, b], np.float32)[:4].tolist() == [-2.5, 2.0, 3.0, -5.0]
    assert lanes("min.xorsign.abs.f32 $0, $1, $2;", [a, b], np.float32)[:4].tolist() == [-1.5, 1.0, 2.0, -4.0]


def test_neg_abs_and_saturate():
    x = np.array([1.5, -2.0, 0.0, -0.0, math.nan, 0.25, math.inf, -math.inf] * 4, np.float32)
    bits = lanes("neg.f32 $0, $1;", [x], np.uint32)
    assert (bits == x.view(np.uint32) ^ np.uint32(0x80000000)).all()
    np.testing.assert_array_equal(lanes("abs.f32 $0, $1;", [x], np.float32), np.abs(x))
    got = lanes("add.sat.f32 $0, $1, $2;", [x, np.zeros_like(x)], np.float32)
    assert got[:8].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.25, 1.0, 0.0]


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_halves(kind):
    import torch

    dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
    torch.manual_seed(1)
    values = [torch.randn(64, 2).to(dtype) for _ in range(3)]
    packed = [v.view(torch.int16).numpy().view(np.uint16).reshape(-1).view(np.uint32).copy() for v in values]
    wide = [v.double() for v in values]

    def check(text: str, expected: torch.Tensor) -> None:
        got = lanes(text, packed[: text.count("$") - 1], np.uint32)
        exact = expected.to(dtype).view(torch.int16).numpy().view(np.uint16).reshape(-1).view(np.uint32)
        np.testing.assert_array_equal(got, exact, err_msg=text)

    check(f"add.{kind} $0, $1, $2;", wide[0] + wide[1])
    check(f"mul.{kind} $0, $1, $2;", wide[0] * wide[1])
    check(f"fma.rn.{kind} $0, $1, $2, $3;", wide[0] * wide[1] + wide[2])
    check(f"max.{kind} $0, $1, $2;", torch.maximum(wide[0], wide[1]))
    check(f"neg.{kind} $0, $1;", -wide[0])


# --- Across lanes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "b", "c", "source"),
    [
        ("idx", 5, 31, lambda lane: 5),
        ("idx", 3, (24 << 8) | 31, lambda lane: (lane & 24) | 3),
        ("bfly", 7, 31, lambda lane: lane ^ 7),
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else None),
        ("down", 9, 31, lambda lane: lane + 9 if lane + 9 <= 31 else None),
        ("down", 2, (28 << 8) | 31, lambda lane: lane + 2 if lane % 4 < 2 else None),
    ],
)
def test_shfl(mode, b, c, source):
    x = words(32, 64)
    got = lanes(f"shfl.sync.{mode}.b32 $0|$P, $1, {b}, {c}, -1;", [x], np.uint32)
    inside = lanes(f"shfl.sync.{mode}.b32 %r40|$0, $1, {b}, {c}, -1;", [x], np.bool_)
    for lane in range(64):
        at = source(lane % 32)
        assert inside[lane] == (at is not None)
        assert got[lane] == x[lane if at is None else lane // 32 * 32 + at]


def test_votes_match_redux_elect():
    x = np.concatenate([RNG.integers(0, 4, 32), np.full(32, 7)]).astype(np.uint32)
    warps = x.reshape(2, 32)
    ballot = lanes("setp.gt.u32 $P, $1, 1;\nvote.sync.ballot.b32 $0, $P, -1;", [x], np.uint32)
    for w in range(2):
        assert ballot[32 * w] == sum(int(v > 1) << i for i, v in enumerate(warps[w]))
    any_of = lanes("setp.eq.u32 $P, $1, 3;\nvote.sync.any.pred $0, $P, -1;", [x], np.bool_)
    all_of = lanes("setp.eq.u32 $P, $1, 7;\nvote.sync.all.pred $0, $P, -1;", [x], np.bool_)
    assert any_of.reshape(2, 32).all(axis=1).tolist() == [(warps[w] == 3).any() for w in range(2)]
    assert all_of[:32].any() == (warps[0] == 7).all() and all_of[32:].all()
    match = lanes("match.any.sync.b32 $0, $1, -1;", [x], np.uint32)
    for lane in range(64):
        same = warps[lane // 32] == x[lane]
        assert match[lane] == sum(int(s) << i for i, s in enumerate(same))
    uniform = lanes("match.all.sync.b32 %r40|$0, $1, -1;", [x], np.bool_)
    assert not uniform[:32].any() and uniform[32:].all()
    for name, function in [("add", np.sum), ("min", np.min), ("max", np.max)]:
        got = lanes(f"redux.sync.{name}.u32 $0, $1, -1;", [x], np.uint32)
        assert got.reshape(2, 32).tolist() == [[int(function(row))] * 32 for row in warps]
    signs = (x - 2).astype(np.uint32)
    got = lanes("redux.sync.min.s32 $0, $1, -1;", [signs], np.uint32)
    assert int(got[0]) == int(signs[:32].view(np.int32).min()) & M32
    elected = lanes("elect.sync %r40|$0, -1;", [x], np.bool_)
    assert np.flatnonzero(elected).tolist() == [0, 32]


def test_elect_among_the_lanes_of_a_branch():
    out = np.zeros(32, np.uint32)
    body = """
	setp.lt.u32 %p0, %r0, 5;
	@%p0 bra DONE;
	activemask.b32 %r1;
	elect.sync %r2|%p1, %r1;
	selp.b32 %r3, 1, 2, %p1;
	mad.wide.u32 %d10, %r0, 4, %d0;
	st.global.b32 [%d10], %r3;
DONE:
"""
    assert run(body, {"out": out}).ok
    assert out.tolist() == [0] * 5 + [1] + [2] * 26


def test_a_member_mask_that_names_absent_lanes_is_reported():
    out = np.zeros(32, np.uint32)
    body = """
	setp.lt.u32 %p0, %r0, 5;
	@%p0 bra DONE;
	shfl.sync.idx.b32 %r1, %r0, 7, 31, -1;
DONE:
"""
    report = run(body, {"out": out})
    assert [h.kind for h in report.hazards] == ["sync-lanes-missing"]


# --- Control flow ------------------------------------------------------------------------------------------


def test_divergent_loops_and_nested_branches_reconverge():
    """Collatz lengths: every lane leaves the loop at its own time, with a branch inside."""
    n = 64
    out, votes = np.zeros(n, np.uint32), np.zeros(n, np.uint32)
    body = """
	add.u32 %r1, %r0, 1;
	mov.b32 %r2, 0;
LOOP:
	setp.eq.u32 %p0, %r1, 1;
	@%p0 bra DONE;
	and.b32 %r3, %r1, 1;
	setp.eq.u32 %p1, %r3, 0;
	@%p1 bra EVEN;
	mad.lo.u32 %r1, %r1, 3, 1;
	bra NEXT;
EVEN:
	shr.u32 %r1, %r1, 1;
NEXT:
	add.u32 %r2, %r2, 1;
	bra LOOP;
DONE:
	activemask.b32 %r4;
	mad.wide.u32 %d10, %r0, 4, %d0;
	st.global.b32 [%d10], %r2;
	mad.wide.u32 %d10, %r0, 4, %d1;
	st.global.b32 [%d10], %r4;
"""
    assert run(body, {"out": out, "votes": votes}, threads=n).ok

    def length(x: int) -> int:
        steps = 0
        while x != 1:
            x = x // 2 if x % 2 == 0 else 3 * x + 1
            steps += 1
        return steps

    assert out.tolist() == [length(i + 1) for i in range(n)]
    assert (votes == M32).all(), "all lanes meet again after the loop"


def test_lanes_may_exit_early_and_blocks_need_not_fill_warps():
    out = np.zeros(50, np.uint32)
    body = """
	and.b32 %r1, %r0, 1;
	setp.eq.u32 %p0, %r1, 1;
	@%p0 exit;
	bar.sync 0;
	mad.wide.u32 %d10, %r0, 4, %d0;
	st.global.b32 [%d10], 9;
"""
    assert run(body, {"out": out}, threads=50).ok
    assert out.tolist() == [9, 0] * 25


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_a_lane_may_wait_for_another_lane_of_its_warp(schedule):
    """Threads make progress by themselves (sm_70 on): lane 0 waits for what lane 1 does after the branch."""
    out = np.zeros(1, np.uint32)
    smem = "\t.shared .align 8 .b8 bar[8];\n"
    body = """
	mov.b32 %r1, bar;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra AFTER_INIT;
	mbarrier.init.shared.b64 [%r1], 1;
AFTER_INIT:
	bar.sync 0;
	@%p0 bra OTHERS;
WAIT:
	mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
	@!%p1 bra WAIT;
	st.global.b32 [%d0], 1;
	bra DONE;
OTHERS:
	setp.ne.u32 %p2, %r0, 1;
	@%p2 bra DONE;
	mbarrier.arrive.shared.b64 _, [%r1];
DONE:
"""
    report = run(body, {"out": out}, smem=smem, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out[0] == 1


# --- Memory ------------------------------------------------------------------------------------------------


def test_vectors_and_widths_of_global_memory():
    data = RNG.integers(0, 256, 32 * 16, dtype=np.uint8)
    out = np.zeros_like(data)
    body = """
	mad.wide.u32 %d10, %r0, 16, %d0;
	mad.wide.u32 %d11, %r0, 16, %d1;
	ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d10];
	mov.b64 %d12, {%r2, %r1};
	mov.b64 %d13, {%r4, %r3};
	st.global.v2.b64 [%d11], {%d12, %d13};
"""
    report = run(body, {"data": data, "out": out})
    assert report.ok
    expected = data.view(np.uint32).reshape(32, 4)[:, [1, 0, 3, 2]].reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(out, expected)
    signs = data.view(np.int8)[:32]
    np.testing.assert_array_equal(
        lanes("cvt.s32.s8 $0, $1;", [signs.astype(np.uint32)], np.int32), signs.astype(np.int32)
    )
    wide = np.zeros(32, np.int32)
    body = """
	cvt.u64.u32 %d9, %r0;
	add.u64 %d10, %d0, %d9;
	ld.global.s8 %r1, [%d10];
	ld.global.u8 %r2, [%d10];
	sub.s32 %r3, %r2, %r1;
	mad.wide.u32 %d11, %r0, 4, %d1;
	st.global.b32 [%d11], %r3;
"""
    assert run(body, {"data": data, "wide": wide}).ok
    assert set(wide.tolist()) <= {0, 256} and (wide == 256).sum() == (signs < 0).sum()


def test_shared_generic_local_and_constant_addressing():
    out = np.zeros(64, np.uint32)
    smem = "\t.shared .align 16 .b8 tile[256];\n\t.local .align 16 .b8 depot[16];\n"
    module = ".const .align 4 .b32 table[4] = {10, 20, 30, 40};\n.global .align 4 .b32 counter = 5;\n"
    body = """
	shl.b32 %r1, %r0, 2;
	mov.b32 %r2, tile;
	add.s32 %r3, %r2, %r1;
	st.shared.b32 [%r3], %r0;
	bar.sync 0;
	xor.b32 %r4, %r1, 252;
	add.s32 %r5, %r2, %r4;
	cvt.u64.u32 %d10, %r5;
	cvta.shared.u64 %d11, %d10;
	isspacep.shared %p0, %d11;
	ld.b32 %r6, [%d11];
	and.b32 %r7, %r0, 3;
	mul.wide.u32 %d12, %r7, 4;
	mov.b64 %d13, depot;
	add.u64 %d14, %d13, %d12;
	st.local.b32 [%d14], %r6;
	cvta.local.u64 %d15, %d14;
	ld.b32 %r8, [%d15];
	mov.b64 %d16, table;
	add.u64 %d17, %d16, %d12;
	ld.const.b32 %r9, [%d17];
	mov.b64 %d18, counter;
	ld.global.b32 %r10, [%d18];
	add.u32 %r11, %r8, %r9;
	add.u32 %r11, %r11, %r10;
	selp.b32 %r12, 1000, 0, %p0;
	add.u32 %r11, %r11, %r12;
	mad.wide.u32 %d19, %r0, 4, %d0;
	st.b32 [%d19], %r11;
"""
    report = run(body, {"out": out}, smem=smem, module=module, threads=64)
    assert report.ok, str(report)
    assert out.tolist() == [(63 - i) + (10, 20, 30, 40)[i % 4] + 5 + 1000 for i in range(64)]


@pytest.mark.parametrize(
    ("instruction", "start", "expected"),
    [
        ("atom.global.add.u32 %r2, [%d0], 1;", 0, 64),
        ("atom.global.min.s32 %r2, [%d0], %r0;", 1000, 0),
        ("atom.global.max.u32 %r2, [%d0], %r0;", 5, 63),
        ("atom.global.inc.u32 %r2, [%d0], 9;", 0, 64 % 10),
        ("atom.global.or.b32 %r2, [%d0], %r0;", 0, 63),
        ("red.global.add.u32 [%d0], %r0;", 0, 64 * 63 // 2),
    ],
)
def test_atomics_take_effect_lane_by_lane(instruction, start, expected):
    cell, old = np.array([start], np.uint32), np.zeros(64, np.uint32)
    body = f"""
	mov.b32 %r2, 0;
	{instruction}
	mad.wide.u32 %d10, %r0, 4, %d1;
	st.global.b32 [%d10], %r2;
"""
    assert run(body, {"cell": cell, "old": old}, threads=64).ok
    assert cell[0] == expected
    if "add.u32 %r2" in instruction:
        assert sorted(old.tolist()) == list(range(64))


@pytest.mark.parametrize("space", [".global", ""])
@pytest.mark.parametrize("start", [1, 2, 3, 4, 6])
def test_an_atomic_in_memory_that_begins_between_its_multiples(space, start):
    """As of a 16-bit tensor's view: the address is aligned, the allocation's begin is not."""
    words = np.zeros(8, np.uint32)
    inside = words.view(np.uint8)[start:]
    at = -start % 4
    body = f"""
	red{space}.add.u32 [%d0+{at + 4}], %r0;
	atom{space}.add.u32 %r2, [%d0+{at}], 1;
	mad.wide.u32 %d10, %r0, 4, %d1;
	st.global.b32 [%d10], %r2;
"""
    old = np.zeros(32, np.uint32)
    report = run(body, {"inside": inside, "old": old})
    assert report.ok, str(report)
    first = -(-start // 4)
    assert words.tolist() == [{first: 32, first + 1: 496}.get(i, 0) for i in range(8)]
    assert sorted(old.tolist()) == list(range(32))


def test_compare_and_swap_lock_and_float_atomics():
    cell = np.array([0, 0], np.uint32)
    total = np.zeros(1, np.float32)
    body = """
	cvt.rn.f32.u32 %f1, %r0;
	atom.global.add.f32 %f2, [%d1], %f1;
	atom.global.cas.b32 %r2, [%d0], 0, 7;
	setp.eq.u32 %p0, %r2, 0;
	@%p0 red.global.add.u32 [%d0+4], 1;
"""
    assert run(body, {"cell": cell, "total": total}).ok
    assert cell.tolist() == [7, 1] and total[0] == 31 * 32 / 2


def test_vector_atomics_add_element_by_element():
    total = np.zeros(4, np.float32)
    body = """
	cvt.rn.f32.u32 %f1, %r0;
	mov.f32 %f2, 0f3F800000;
	red.global.add.v4.f32 [%d0], {%f1, %f2, %f1, %f2};
"""
    assert run(body, {"total": total}).ok
    assert total.tolist() == [496.0, 32.0, 496.0, 32.0]


def test_initialisers_and_internal_errors_name_their_place(monkeypatch):
    out = np.zeros(2, np.float32)
    module = ".const .align 4 .f32 table[2] = {0f3F800000, -2};\n.const .align 4 .b32 more[1] = {0xFF};\n"
    body = "\tmov.b64 %d1, table;\n\tld.const.v2.b32 {%r1, %r2}, [%d1];\n\tst.global.v2.b32 [%d0], {%r1, %r2};"
    assert run(body, {"out": out}, module=module).ok
    assert out[0] == 1.0 and out.view(np.int32)[1] == -2
    from cute_matmul.emulator import ops

    monkeypatch.setattr(ops, "popc", lambda a: 1 / 0)
    with pytest.raises(EmulatorError, match=r"kernel k: ZeroDivisionError .* PTX line \d+"):
        run("\tpopc.b32 %r1, %r0;\n\tst.global.b32 [%d0], %r1;", {"out": out})


def test_out_of_bounds_and_misaligned_accesses_stop_with_their_place():
    out = np.zeros(8, np.uint32)
    report = run("\tmad.wide.u32 %d10, %r0, 4, %d0;\n\tst.global.b32 [%d10], %r0;", {"out": out})
    assert report.stopped and [h.kind for h in report.hazards] == ["global-out-of-bounds"]
    assert "past the end of out" in str(report.hazards[0]) and "st.global" in str(report.hazards[0])
    report = run("\tld.global.b32 %r1, [%d0+2];", {"out": out})
    assert [h.kind for h in report.hazards] == ["misaligned-access"]
    report = run("\tmov.b32 %r1, 64;\n\tst.shared.b32 [%r1], 0;", {"out": out}, smem_bytes=256)
    assert [h.kind for h in report.hazards] == ["shared-out-of-bounds"]
    for check in (True, False):
        report = run("\tst.global.b32 [%d0+32], %r0;", {"out": out}, options={"check": check})
        assert [h.kind for h in report.hazards] == ["global-out-of-bounds"]


def test_printf(capsys):
    module = ".extern .func (.param .b32 result) vprintf (.param .b64 a, .param .b64 b);\n"
    text = b"%d: %5.2f%% %x %lld %s\n\0"
    numbers = ", ".join(map(str, text))
    module += f".global .align 1 .b8 format[{len(text)}] = {{{numbers}}};\n"
    module += ".global .align 1 .b8 word[3] = {104, 105, 0};\n"
    body = """
	setp.gt.u32 %p0, %r0, 1;
	@%p0 bra DONE;
	mov.b64 %d10, depot;
	cvta.local.u64 %d11, %d10;
	st.local.b32 [%d10], %r0;
	mov.b64 %d12, 0d3FF8000000000000;
	st.local.b64 [%d10+8], %d12;
	st.local.b32 [%d10+16], 255;
	mov.b64 %d13, -5;
	st.local.b64 [%d10+24], %d13;
	mov.b64 %d14, word;
	cvta.global.u64 %d15, %d14;
	st.local.b64 [%d10+32], %d15;
	{
	.param .b64 param0;
	.param .b64 param1;
	.param .b32 retval0;
	mov.b64 %d16, format;
	cvta.global.u64 %d17, %d16;
	st.param.b64 [param0], %d17;
	st.param.b64 [param1], %d11;
	call.uni (retval0), vprintf, (param0, param1);
	ld.param.b32 %r5, [retval0];
	}
DONE:
"""
    report = run(body, {"out": np.zeros(1, np.uint32)}, module=module, smem="\t.local .align 8 .b8 depot[64];\n")
    assert report.ok, str(report)
    assert capsys.readouterr().out == "0:  1.50% ff -5 hi\n1:  1.50% ff -5 hi\n"


# --- Registers that nothing has set ------------------------------------------------------------------------


PACKED = "mov.b16 %h1, 3;\nmov.b32 %r3, {{%h1, %h9}};\n"  # the upper half is of a register that nothing sets
WIDEN = "\ncvt.u32.u16 %r2, %h2;\n{store}"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("add.u32 %r2, %r1, 1;\n{store}", True),
        ("mov.b32 %r2, %r1;\nxor.b32 %r2, %r0, %r0;\n{store}", False),
        ("setp.lt.u32 %p0, %r0, 7;\n@%p0 mov.b32 %r2, 5;\n{store}", True),
        ("setp.lt.u32 %p0, %r0, 7;\n@%p0 mov.b32 %r2, 5;\n@!%p0 mov.b32 %r2, 6;\n{store}", False),
        ("setp.lt.u32 %p0, %r0, 99;\nselp.b32 %r2, %r0, %r1, %p0;\n{store}", False),
        ("setp.lt.u32 %p0, %r0, 31;\nselp.b32 %r2, %r0, %r1, %p0;\n{store}", True),
        (PACKED + "mov.b32 {{%h2, _}}, %r3;" + WIDEN, False),
        (PACKED + "mov.b32 {{_, %h2}}, %r3;" + WIDEN, True),
        (PACKED + "mov.b32 %r3, %r1;\nmov.b32 {{%h2, _}}, %r3;" + WIDEN, True),
        (PACKED + "mov.b16 %h1, %h9;\nmov.b32 {{%h2, _}}, %r3;" + WIDEN, True),  # whole: the origin is not what it was
        (PACKED + "mov.b32 %r2, %r3;\n{store}", True),
        ("mov.b32 %r2, 0;\n@%p3 bra SKIP;\nadd.u32 %r2, %r2, 1;\nSKIP:\n{store}", True),
        ("cvt.u64.u32 %d9, %r1;\nadd.u64 %d9, %d9, %d0;\nmov.b32 %r2, 1;\n@%p4 st.global.b32 [%d9], %r2;", True),
    ],
)
def test_registers_that_nothing_has_set(body, found):
    out = np.zeros(32, np.uint32)
    store = "mad.wide.u32 %d10, %r0, 4, %d0;\nst.global.b32 [%d10], %r2;"
    report = run(body.format(store=store), {"out": out})
    assert {h.kind for h in report.hazards} == ({"uninitialised-register"} if found else set()), str(report)


# --- What it does not know ---------------------------------------------------------------------------------


def test_an_unknown_instruction_names_itself():
    text = kernel_text("\ttex.1d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%d0, {%f1}];", 1)
    with pytest.raises(UnknownInstruction, match=r"kernel k: not implemented.*tex\.1d.*PTX line \d+"):
        run_launch(launch(text, {"out": np.zeros(4, np.uint32)}))
    text = kernel_text("\tadd.frobnicate.s32 %r1, %r0, %r0;", 1)
    with pytest.raises(UnknownInstruction, match="frobnicate"):
        run_launch(launch(text, {"out": np.zeros(4, np.uint32)}))
    text = kernel_text("\tmov.u32 %r1, %pm0;", 1)
    with pytest.raises(EmulatorError, match="pm0"):
        run_launch(launch(text, {"out": np.zeros(4, np.uint32)}))


def test_parser_scopes_labels_and_errors():
    text = kernel_text(
        "\t{\n\t.reg .pred q;\n\tAGAIN:\n\tsetp.eq.u32 q, %r0, %r0;\n\t@q bra.uni OUT;\n\tbra.uni AGAIN;\n\tOUT:\n\t}\n"
        "\t{\n\t.reg .pred q;\n\tAGAIN:\n\tsetp.ne.u32 q, %r0, %r0;\n\t@!q bra.uni OUT;\n\tbra.uni AGAIN;\n\tOUT:\n\t}",
        1,
    )
    kernel = ptx.parse(text).kernels["k"]
    targets = [i.target for i in kernel.instructions if i.opcode == "bra.uni"]
    assert targets == [5, 2, 8, 5]
    assert run_launch(launch(text, {"out": np.zeros(4, np.uint32)})).ok
    with pytest.raises(ptx.PtxError, match="PTX line 16: no label 'NOWHERE'"):
        ptx.parse(kernel_text("\tbra NOWHERE;", 1))
    with pytest.raises(ptx.PtxError, match="unexpected"):
        ptx.parse(kernel_text("\tadd.s32 %r1 %r2;", 1))


def test_source_lines_come_from_loc_and_not_from_inline_assembly():
    text = kernel_text(
        '\t.loc 1 12 4\n\tadd.s32 %r1, %r0, 1;\n\t// begin inline asm\n\t.loc 1 13 4\n\tadd.s32 %r2, %r1, 1;\n'
        "\t// end inline asm\n\t.loc 1 3 0\n\tadd.s32 %r3, %r2, 1;\n\t.loc 1 15 4\n\tadd.s32 %r4, %r2, 1;",
        1,
    ) + '\t.file 1 "/src/kernel.py"\n'  # fmt: skip
    adds = [i for i in ptx.parse(text).kernels["k"].instructions if i.opcode == "add.s32"]
    assert [i.source for i in adds] == [("/src/kernel.py", line) for line in (12, 12, 15, 15)]


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("s8", -128, 127), ("u8", 0, 255), ("s16", -(2**15), 2**15 - 1), ("u16", 0, 2**16 - 1)]
)
def test_saturating_integer_conversions(kind: str, low: int, high: int):
    x = words(32)
    got = lanes(f"cvt.sat.{kind}.s32 $0, $1;", [x], np.int32)
    assert got.tolist() == [max(low, min(high, signed(v, 32))) for v in x.tolist()]


def test_carries_run_through_three_limbs():
    """The middle limbs are equal or all ones, so that the carry that came in decides the one that goes out."""
    a, b, c, d, e, f = (words(32) for _ in range(6))
    a, b = RNG.permutation(a), RNG.permutation(b)
    d[::2] = c[::2]
    got = lanes(
        "sub.cc.u32 %r40, $1, $2;\nsubc.cc.u32 %r41, $3, $4;\nsubc.u32 $0, $5, $6;", [a, b, c, d, e, f], np.uint32
    )
    columns = [v.tolist() for v in (a, b, c, d, e, f)]
    for i, (u, v, w, x, y, z) in enumerate(zip(*columns, strict=True)):
        assert int(got[i]) == ((w << 32 | u | y << 64) - (x << 32 | v | z << 64) >> 64) & M32
    d[::2] = ~c[::2]
    got = lanes(
        "add.cc.u32 %r40, $1, $2;\naddc.cc.u32 %r41, $3, $4;\naddc.u32 $0, $5, $6;", [a, b, c, d, e, f], np.uint32
    )
    columns = [v.tolist() for v in (a, b, c, d, e, f)]
    for i, (u, v, w, x, y, z) in enumerate(zip(*columns, strict=True)):
        assert int(got[i]) == ((w << 32 | u | y << 64) + (x << 32 | v | z << 64) >> 64) & M32


def test_setp_second_predicate_is_of_the_negated_comparison():
    a, b = RNG.permutation(words(32)), RNG.permutation(words(32))
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    for how, combine in (("and", lambda x, y: x and y), ("or", lambda x, y: x or y), ("xor", lambda x, y: x != y)):
        text = f"setp.lt.u32 $P, $1, 1000;\nsetp.gt.{how}.u32 %p3|$0, $1, $2, $P;"
        assert lanes(text, [a, b], np.bool_).tolist() == [combine(x <= y, x < 1000) for x, y in pairs], how
    assert lanes("setp.gt.u32 %p3|$0, $1, $2;", [a, b], np.bool_).tolist() == [x <= y for x, y in pairs]


@pytest.mark.parametrize("kind", ["u16", "u32", "u64"])
def test_setp_lower_and_higher(kind: str):
    bits = int(kind[1:])
    a, b = RNG.permutation(words(bits)), RNG.permutation(words(bits))
    b[:20] = a[:20]
    table = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
    for name, meaning in table.items():
        np.testing.assert_array_equal(lanes(f"setp.{name}.{kind} $0, $1, $2;", [a, b], np.bool_), meaning(a, b), name)


def test_ftz_flushes_operands_and_results():
    tiny, small = np.full(32, -(2.0**-130), np.float32), np.full(32, 2.0**-100, np.float32)
    for text, inputs in (
        ("mul.ftz.f32 $0, $1, $2;", [small, np.full(32, -(2.0**-40), np.float32)]),  # a subnormal result
        (
            "fma.rn.ftz.f32 $0, $1, $2, $3;",
            [small, np.full(32, -(2.0**-40), np.float32), np.full(32, -0.0, np.float32)],
        ),
        ("mul.ftz.f32 $0, $1, $2;", [tiny, np.full(32, 2.0**60, np.float32)]),  # a subnormal operand
    ):
        assert (lanes(text, inputs, np.uint32) == 0x80000000).all(), text
    assert (lanes("mul.f32 $0, $1, $2;", [small, np.full(32, 2.0**-40, np.float32)], np.float32) == 2.0**-140).all()


def test_a_guard_in_a_branch_counts_for_the_lanes_of_the_branch_only():
    out = np.zeros(32, np.uint32)
    body = """
	and.b32 %r1, %r0, 1;
	setp.eq.u32 %p1, %r1, 0;
	mad.wide.u32 %d10, %r0, 4, %d0;
	setp.lt.u32 %p0, %r0, 5;
	@%p0 bra DONE;
	@%p1 st.global.b32 [%d10], 7;
DONE:
"""
    assert run(body, {"out": out}).ok
    assert out.tolist() == [7 * (lane >= 5 and lane % 2 == 0) for lane in range(32)]


def test_votes_and_matches_of_mixed_and_uniform_warps():
    """Warp 0 is mixed, in warp 1 no lane has the predicate, in warp 2 all have it."""
    x = np.concatenate([RNG.integers(0, 4, 32), np.full(32, 1), np.full(32, 7)]).astype(np.uint32)
    x[0], x[1] = 0, 3
    uniform = lanes("setp.gt.u32 $P, $1, 2;\nvote.sync.uni.pred $0, $P, -1;", [x], np.bool_)
    assert uniform.reshape(3, 32).tolist() == [[False] * 32, [True] * 32, [True] * 32]
    match = lanes("match.all.sync.b32 $0|$P, $1, -1;", [x], np.uint32)
    assert match.reshape(3, 32).tolist() == [[0] * 32, [M32] * 32, [M32] * 32]


def test_an_access_is_in_bounds_with_all_its_bytes():
    """Elements of 2 bytes at a stride of 4: a 4-byte access takes two bytes that belong to no tensor."""
    data = np.zeros(64, np.uint16)
    for instruction, found in (
        ("st.global.b16 [%d0+4], 1", []),
        ("st.global.b32 [%d0+4], 1", ["global-out-of-bounds"]),
    ):
        once = launch(kernel_text(f"\t{instruction};", 1), {"data": data})
        (block,) = once.allocations
        block = dataclasses.replace(block, views=(dataclasses.replace(block.views[0], shape=(32,), stride=(2,)),))
        report = run_launch(dataclasses.replace(once, allocations=(block,)))
        assert [h.kind for h in report.hazards] == found, str(report)


@pytest.mark.parametrize(("nbytes", "found"), [(16, []), (8, ["shared-out-of-bounds"])])
@pytest.mark.parametrize(
    "instruction", ["st.shared.v4.b32 [%r1], {%r0, %r0, %r0, %r0}", "ld.shared.v2.b64 {%d1, %d2}, [%r1]"]
)
def test_a_shared_access_may_not_reach_beyond_the_end(instruction: str, nbytes: int, found: list):
    body = f"\tmov.b32 %r1, 1024;\n\tsetp.ne.u32 %p0, %r0, 0;\n\t@%p0 bra DONE;\n\t{instruction};\nDONE:"
    report = run(body, {"out": np.zeros(1, np.uint32)}, smem_bytes=nbytes)
    assert [h.kind for h in report.hazards if h.kind != "uninitialised-shared-memory"] == found


@pytest.mark.parametrize(
    ("instruction", "start", "expected"),
    [
        ("atom.global.dec.u32 %r2, [%d0], 9;", 1000, 9 - 63 % 10),  # beyond the limit: the limit comes next
        ("atom.global.dec.u32 %r2, [%d0], 9;", 0, 9 - 63 % 10),
        ("atom.global.xor.b32 %r2, [%d0], %r0;", 5, 5),
        ("atom.global.and.b32 %r2, [%d0], 12;", 0xFF, 12),
        ("atom.global.exch.b32 %r2, [%d0], %r0;", 5, 63),
    ],
)
def test_further_atomics_take_effect_lane_by_lane(instruction: str, start: int, expected: int):
    cell = np.array([start], np.uint32)
    assert run(f"\t{instruction}\n", {"cell": cell}, threads=64).ok
    assert cell[0] == expected


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_subtraction_and_minimum(kind: str):
    dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
    torch.manual_seed(2)
    values = [torch.randn(64, 2).to(dtype) for _ in range(2)]
    packed = [v.view(torch.int16).numpy().view(np.uint16).reshape(-1).view(np.uint32).copy() for v in values]
    wide = [v.double() for v in values]
    for text, expected in (("sub", wide[0] - wide[1]), ("min", torch.minimum(*wide))):
        got = lanes(f"{text}.{kind} $0, $1, $2;", packed, np.uint32)
        exact = expected.to(dtype).view(torch.int16).numpy().view(np.uint16).reshape(-1).view(np.uint32)
        np.testing.assert_array_equal(got, exact, err_msg=text)


def test_shfl_up_stays_in_its_segment():
    x = words(32, 64)
    got = lanes("shfl.sync.up.b32 $0|$P, $1, 3, 6144, -1;", [x], np.uint32)  # 24 << 8: segments of eight lanes
    inside = lanes("shfl.sync.up.b32 %r40|$0, $1, 3, 6144, -1;", [x], np.bool_)
    assert inside.tolist() == [lane % 8 >= 3 for lane in range(64)]
    assert got.tolist() == [int(x[lane - 3 if lane % 8 >= 3 else lane]) for lane in range(64)]


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("and.b32", np.bitwise_and.reduce),
        ("or.b32", np.bitwise_or.reduce),
        ("xor.b32", np.bitwise_xor.reduce),
        ("add.u32", np.sum),
        ("min.u32", np.min),
        ("max.u32", np.max),
        ("min.s32", lambda v: v.view(np.int32).min()),
        ("max.s32", lambda v: v.view(np.int32).max()),
    ],
)
def test_redux_of_some_lanes(name: str, meaning):
    """Only the lanes of the member mask count, whichever side of zero their values are on."""
    for x in (RNG.integers(1, 2**31, 32), RNG.integers(2**31, 2**32, 32)):
        x, out = x.astype(np.uint32) | np.uint32(0x80), np.zeros(32, np.uint32)
        body = f"""
	mad.wide.u32 %d10, %r0, 4, %d0;
	ld.global.b32 %r1, [%d10];
	setp.lt.u32 %p0, %r0, 5;
	@%p0 bra DONE;
	redux.sync.{name} %r2, %r1, 0xFFFFFFE0;
	mad.wide.u32 %d10, %r0, 4, %d1;
	st.global.b32 [%d10], %r2;
DONE:
"""
        report = run(body, {"x": x, "out": out})
        assert report.ok, str(report)
        assert out.tolist() == [0] * 5 + [int(meaning(x[5:])) & M32] * 27


def test_lane_masks():
    x = np.zeros(64, np.uint32)
    masks = {
        "eq": lambda lane: 1 << lane,
        "lt": lambda lane: (1 << lane) - 1,
        "le": lambda lane: (2 << lane) - 1,
        "gt": lambda lane: M32 & -(2 << lane),
        "ge": lambda lane: M32 & -(1 << lane),
    }
    for name, meaning in masks.items():
        got = lanes(f"mov.u32 $0, %lanemask_{name};\nadd.u32 $0, $0, $1;", [x], np.uint32)
        assert got.tolist() == [meaning(i % 32) for i in range(64)], name


def test_printf_conversions_of_integers():
    data = (0xFFFFFFFE).to_bytes(4, "little") * 4 + (2**64 - 3).to_bytes(8, "little") * 2
    text = printf.render(
        "%d %u %x %5i|%llu %lld", lambda offset, size: data[offset : offset + size], lambda address: ""
    )
    assert text == "-2 4294967294 fffffffe    -2|18446744073709551613 -3"


def test_static_shared_memory_counts_towards_the_limit():
    text = kernel_text("", 0, smem="\t.shared .align 16 .b8 fixed[1024];\n")
    (signature,) = launches.kernel_signatures(text).values()
    launches._check_limits(launch(text, {}, smem_bytes=232_448 - 1024), signature)
    with pytest.raises(launches.LaunchError, match="231425 bytes of dynamic shared memory, at most 231424"):
        launches._check_limits(launch(text, {}, smem_bytes=232_448 - 1023), signature)


def test_static_shared_memory_of_another_kernel_does_not_count():
    text = kernel_text("", 0, smem="\t.shared .align 16 .b8 fixed[1024];\n")
    both = text + text.split(".address_size 64\n")[1].replace("entry k(", "entry other(")
    signature = launches.kernel_signatures(both)["k"]
    launches._check_limits(launch(both, {}, smem_bytes=232_448 - 1024), signature)
