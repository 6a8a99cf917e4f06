"""Matrix instructions against a plain-loop statement of the PTX ISA's layout figures.

The loops below place and read one element at a time and share no code with the emulator: numbers become bits
through torch, addresses come from the canonical layouts of the ISA as written, fragments from the figures' formulas.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cute_matmul.emulator import arithmetic
from cute_matmul.emulator.matrix import (
    ELEMENTS,
    Descriptor,
    LdMatrix,
    MatrixError,
    Mma,
    StMatrix,
    Wgmma,
    movmatrix,
    uniform,
)

TORCH = {
    "f16": (torch.float16, np.uint16),
    "bf16": (torch.bfloat16, np.uint16),
    "tf32": (torch.float32, np.uint32),
    "e4m3": (torch.float8_e4m3fn, np.uint8),
    "e5m2": (torch.float8_e5m2, np.uint8),
    "s8": (torch.int8, np.uint8),
    "u8": (torch.uint8, np.uint8),
}
SWIZZLE_FIELD = {0: 0, 128: 1, 64: 2, 32: 3}


def operand(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Random (values float64, bits) of a type; values are exactly what the bits mean."""
    if kind in ("s8", "u8"):
        low, high = (-128, 128) if kind == "s8" else (0, 256)
        numbers = torch.from_numpy(rng.integers(low, high, shape)).to(TORCH[kind][0])
    else:
        numbers = torch.from_numpy(rng.standard_normal(shape)).to(TORCH[kind][0])
        if kind == "tf32":
            numbers = (numbers.view(torch.int32) & ~0x1FFF).view(torch.float32)
    bits = numbers.contiguous().view(torch.uint8).numpy().view(TORCH[kind][1])
    return numbers.to(torch.float64).numpy(), bits.reshape(shape)


def swizzled(address: int, width: int) -> int:
    """The ISA's swizzle: 16-byte units within `width` bytes, permuted by the number of the 128-byte line."""
    line = address // 128
    return address ^ ((line % (width // 16)) * 16 if width else 0)


def address_k_major(row: int, byte: int, start: int, leading: int, stride: int, swizzle: int) -> int:
    """Address of byte `byte` of the 32 bytes of K of row `row`."""
    core, inner = row // 8, row % 8
    if swizzle == 0:
        return start + core * stride + inner * 16 + (byte // 16) * leading + byte % 16
    return swizzled(start + core * stride + inner * swizzle + (byte // 16) * 16, swizzle) + byte % 16


def address_mn_major(row: int, k: int, size: int, start: int, leading: int, stride: int, swizzle: int) -> int:
    """Address of element (row, k) when rows are contiguous."""
    byte = row * size
    if swizzle == 0:
        return start + (byte // 16) * stride + (k // 8) * leading + (k % 8) * 16 + byte % 16
    block, within = byte // swizzle, byte % swizzle
    linear = start + block * leading + (k // 8) * stride + (k % 8) * swizzle + within // 16 * 16
    return swizzled(linear, swizzle) + byte % 16


def store(smem: np.ndarray, address: int, bits) -> None:
    raw = np.array([bits]).view(np.uint8)
    smem[address : address + len(raw)] = raw


def make_descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLE_FIELD[swizzle] << 62


def place(smem, bits, start, mn_major, swizzle, rng):
    """Write an (rows, k) operand in a canonical layout; returns its descriptor and every byte address used."""
    rows, k = bits.shape
    size = bits.dtype.itemsize
    addresses = set()
    if mn_major:
        blocks = -(-rows * size // max(swizzle, 16))
        if swizzle:
            stride, leading = 8 * swizzle, k // 8 * 8 * swizzle
        else:
            leading, stride = 128, 128 * (k // 8)
        assert blocks * max(leading, stride) < 1 << 18
        where = lambda r, c: address_mn_major(r, c, size, start, leading, stride, swizzle)  # noqa: E731
    else:
        stride = 8 * max(swizzle, 16)
        leading = 128 * (rows // 8) if swizzle == 0 else 16
        where = lambda r, c: address_k_major(r, c * size, start, leading, stride, swizzle)  # noqa: E731
    for r in range(rows):
        for c in range(k):
            address = where(r, c)
            store(smem, address, bits[r, c])
            addresses |= set(range(address, address + size))
    return make_descriptor(start, leading, stride, swizzle), addresses


def accumulator_position(thread: int, i: int) -> tuple[int, int]:
    """Row and column of element i of a thread's D fragment (figure "register fragment layout for accumulator")."""
    warp, lane = divmod(thread, 32)
    return 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


def pack(elements: list[int], size: int) -> list[int]:
    """Elements of `size` bytes, low to high, in 32-bit registers."""
    per = 4 // size
    return [
        sum(int(e) << (8 * size * j) for j, e in enumerate(elements[i : i + per])) for i in range(0, len(elements), per)
    ]


def accumulators(matrix: np.ndarray) -> np.ndarray:
    """(64 or 16, n) float32, float16 or int32 -> registers (R, warps, 32) by the figure."""
    rows, n = matrix.shape
    size = matrix.dtype.itemsize
    bits = matrix.view({2: np.uint16, 4: np.uint32}[size])
    warps = rows // 16
    out = np.zeros((n // 2 * size // 4, warps, 32), np.uint32)
    for thread in range(32 * warps):
        elements = [bits[accumulator_position(thread, i)] for i in range(n // 2)]
        out[:, thread // 32, thread % 32] = pack(elements, size)
    return out


def unpack_accumulators(registers: np.ndarray, n: int, kind) -> np.ndarray:
    warps = registers.shape[1]
    size = np.dtype(kind).itemsize
    out = np.zeros((16 * warps, n), kind)
    for thread in range(32 * warps):
        words = np.ascontiguousarray(registers[:, thread // 32, thread % 32])
        for i, value in enumerate(words.view(kind) if size == 4 else words.view(np.uint16).view(kind)):
            out[accumulator_position(thread, i)] = value
    return out


def a_fragment(bits: np.ndarray) -> np.ndarray:
    """(rows, k) -> four (or two) registers of A per thread, from the figures of each type."""
    rows, k = bits.shape
    size = bits.dtype.itemsize
    warps = rows // 16
    count = k * size // 8
    out = np.zeros((count, warps, 32), np.uint32)
    per = 4 // size
    for thread in range(32 * warps):
        warp, lane = divmod(thread, 32)
        group, inner = lane // 4, lane % 4
        elements = []
        for i in range(count * per):
            register = i // per
            row = 16 * warp + group + (8 if register % 2 else 0)
            column = inner * per + i % per + (16 // size if register >= 2 else 0)
            elements.append(bits[row, column])
        out[:, warp, lane] = pack(elements, size)
    return out


def b_fragment(bits: np.ndarray) -> np.ndarray:
    """(8, k) -> registers of B for one warp, thread (g, q) holding column g."""
    _, k = bits.shape
    size = bits.dtype.itemsize
    per = 4 // size
    count = k * size // 16
    out = np.zeros((count, 1, 32), np.uint32)
    for lane in range(32):
        elements = [bits[lane // 4, (lane % 4) * per + i % per + (16 // size) * (i // per)] for i in range(count * per)]
        out[:, 0, lane] = pack(elements, size)
    return out


def check_close(got, a, b, c, scale=1.0, kind="f16"):
    exact = scale * (a @ b.T) + c
    # fp8 sums keep 13 fractional bits of the largest term, everything else 24 bits or more.
    terms, unit = (a.shape[1] + 2, 2.0**-13) if kind in arithmetic.FP8 else (a.shape[1], 2.0**-22)
    bound = terms * unit * (np.abs(a) @ np.abs(b).T + np.abs(c))
    assert np.all(np.abs(got.astype(np.float64) - exact) <= bound)


K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


def tail_for(kind, a_in_registers=False, trans=(0, 0), scales=(1, 1)):
    if kind in ("s8", "u8"):
        return ()
    if kind in ("f16", "bf16"):
        return (*scales, *(trans[1:] if a_in_registers else trans))
    return scales


LAYOUTS = [
    pytest.param(kind, a_mn, b_mn, swizzle, id=f"{kind}-{'mn' if a_mn else 'k'}{'mn' if b_mn else 'k'}-{swizzle}")
    for kind in ("f16", "bf16", "tf32", "e4m3", "e5m2")
    for a_mn in ((False, True) if kind in ("f16", "bf16") else (False,))
    for b_mn in ((False, True) if kind in ("f16", "bf16") else (False,))
    for swizzle in (0, 32, 64, 128)
]


@pytest.mark.parametrize(("kind", "a_mn", "b_mn", "swizzle"), LAYOUTS)
def test_wgmma_reads_canonical_layouts(kind, a_mn, b_mn, swizzle):
    rng = np.random.default_rng(1)
    n, k = 64, K[kind]
    a, a_bits = operand(rng, (64, k), kind)
    b, b_bits = operand(rng, (n, k), kind)
    c = rng.standard_normal((64, n)).astype(np.float32)
    smem = np.zeros((1, 65536), np.uint8)
    a_desc, a_bytes = place(smem[0], a_bits, 1024, a_mn, swizzle, rng)
    # Inside a pattern, as a second k_block is: K-major operands start at a line's later granules.
    b_start = 32768 + (32 if swizzle in (64, 128) and not b_mn else 0)
    b_desc, b_bytes = place(smem[0], b_bits, b_start, b_mn, swizzle, rng)
    op = Wgmma.parse(
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind}", tail_for(kind, trans=(int(a_mn), int(b_mn)))
    )
    registers = op.execute(accumulators(c), np.array([a_desc], np.uint64), np.array([b_desc], np.uint64), smem, [0])
    check_close(unpack_accumulators(registers, n, np.float32), a, b, c, kind=kind)

    read = {byte for start, size in op.reads(a_desc, b_desc) for byte in range(start, start + size)}
    assert read == a_bytes | b_bytes
    assert set(op.read_granules(a_desc, b_desc)) == {byte // 16 * 16 for byte in read}


@pytest.mark.parametrize("n", [8, 24, 128, 200, 256])
def test_wgmma_takes_every_width(n):
    rng = np.random.default_rng(n)
    a, a_bits = operand(rng, (64, 16), "bf16")
    b, b_bits = operand(rng, (n, 16), "bf16")
    c = rng.standard_normal((64, n)).astype(np.float32)
    smem = np.zeros((1, 65536), np.uint8)
    a_desc, _ = place(smem[0], a_bits, 0, False, 128, rng)
    b_desc, _ = place(smem[0], b_bits, 16384, False, 32, rng)
    op = Wgmma.parse(f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16", (1, 1, 0, 0))
    assert op.d_registers == n // 2
    got = op.execute(accumulators(c), np.array([a_desc], np.uint64), np.array([b_desc], np.uint64), smem, [0])
    check_close(unpack_accumulators(got, n, np.float32), a, b, c)


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e4m3", "e5m2"])
def test_wgmma_takes_a_from_registers(kind):
    rng = np.random.default_rng(2)
    n, k = 32, K[kind]
    a, a_bits = operand(rng, (64, k), kind)
    b, b_bits = operand(rng, (n, k), kind)
    c = rng.standard_normal((64, n)).astype(np.float32)
    smem = np.zeros((1, 16384), np.uint8)
    b_desc, b_bytes = place(smem[0], b_bits, 4096, False, 64, rng)
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind}"
    op = Wgmma.parse(opcode, tail_for(kind, a_in_registers=True), a_in_registers=True)
    got = op.execute(accumulators(c), a_fragment(a_bits), np.array([b_desc], np.uint64), smem, [0])
    check_close(unpack_accumulators(got, n, np.float32), a, b, c, kind=kind)
    read = {byte for start, size in op.reads(None, b_desc) for byte in range(start, start + size)}
    assert read == b_bytes


def test_wgmma_batches_groups_with_their_own_descriptors_and_windows():
    rng = np.random.default_rng(3)
    n = 16
    smem = np.zeros((2, 16384), np.uint8)
    a_descs, b_descs, expected, c_all, rows = [], [], [], [], [1, 0, 1]
    for group, row in enumerate(rows):
        a, a_bits = operand(rng, (64, 16), "f16")
        b, b_bits = operand(rng, (n, 16), "f16")
        c = rng.standard_normal((64, n)).astype(np.float32)
        a_descs.append(place(smem[row], a_bits, 4096 * group, False, 32, rng)[0])
        b_descs.append(place(smem[row], b_bits, 4096 * group + 2048, False, 32, rng)[0])
        expected.append((a, b, c))
        c_all.append(accumulators(c))
    op = Wgmma.parse("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", (1, 1, 0, 0))
    d = np.concatenate(c_all, axis=1)
    per_thread = np.repeat(np.array(a_descs, np.uint64), 128).reshape(12, 32)
    for windows in (smem, [smem[0], smem[1]]):
        got = op.execute(list(d), per_thread, np.array(b_descs, np.uint64), windows, rows)
        for group, (a, b, c) in enumerate(expected):
            check_close(unpack_accumulators(got[:, 4 * group : 4 * group + 4], n, np.float32), a, b, c)

    per_thread[5, 7] += np.uint64(2)
    with pytest.raises(MatrixError, match="warp group 1") as caught:
        op.execute(d, per_thread, np.array(b_descs, np.uint64), smem, rows)
    assert caught.value.rule == "uniform"


def wgmma_case(kind="f16", d="f32", n=16, scales=(1, 1), c=None, seed=4):
    rng = np.random.default_rng(seed)
    k = K[kind]
    a, a_bits = operand(rng, (64, k), kind)
    b, b_bits = operand(rng, (n, k), kind)
    smem = np.zeros((1, 16384), np.uint8)
    a_desc, _ = place(smem[0], a_bits, 0, False, 32, rng)
    b_desc, _ = place(smem[0], b_bits, 8192, False, 32, rng)
    op = Wgmma.parse(f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{kind}.{kind}", tail_for(kind, scales=scales))

    def run(c, scale_d=True, arithmetic=arithmetic.FAST):
        got = op.execute(
            accumulators(c),
            np.array([a_desc], np.uint64),
            np.array([b_desc], np.uint64),
            smem,
            [0],
            scale_d,
            arithmetic,
        )
        return unpack_accumulators(got, n, c.dtype.type)

    return a, b, run


def test_scale_d_false_ignores_the_old_accumulator_even_if_nan():
    a, b, run = wgmma_case()
    c = np.full((64, 16), np.nan, np.float32)
    check_close(run(c, scale_d=False), a, b, np.zeros((64, 16)))
    assert np.isnan(run(c)).all()


@pytest.mark.parametrize("scales", [(-1, 1), (1, -1), (-1, -1)])
def test_immediate_scales_negate_operands(scales):
    a, b, run = wgmma_case(scales=scales)
    c = np.ones((64, 16), np.float32)
    check_close(run(c), a, b, c.astype(np.float64), scale=scales[0] * scales[1])


def test_f16_accumulator_rounds_once_to_nearest_even():
    a, b, run = wgmma_case(d="f16")
    c = np.random.default_rng(5).standard_normal((64, 16)).astype(np.float16)
    # float64 holds the sum of sixteen exact products and c exactly for these magnitudes.
    assert np.array_equal(run(c), (a @ b.T + c.astype(np.float64)).astype(np.float16))


@pytest.mark.parametrize("kind", ["s8", "u8"])
def test_integer_wgmma_is_exact_and_wraps(kind):
    a, b, run = wgmma_case(kind=kind, d="s32")
    c = np.random.default_rng(6).integers(-(2**31), 2**31, (64, 16)).astype(np.int32)
    c[0] = 2**31 - 1
    assert np.array_equal(run(c), ((a @ b.T).astype(np.int64) + c).astype(np.int32))


def test_special_values_propagate():
    for model in (arithmetic.FAST, arithmetic.TRUNCATING):
        a = np.zeros((1, 16, 16), np.float32)
        b = np.ones((1, 8, 16), np.float32)
        c = np.zeros((1, 16, 8), np.float32)
        a[0, 0, 3] = np.inf
        a[0, 1, 3], a[0, 1, 4] = np.inf, -np.inf
        a[0, 2, 0] = np.nan
        c[0, 3, :] = -np.inf
        a[0, 4, 0] = np.inf
        b[0, 5, 0] = 0
        d = model(a, b, c, "f16", "f32")[0]
        assert np.all(d[0] == np.inf)
        assert np.all(d[1].view(np.uint32) == 0x7FFFFFFF), "inf - inf is the canonical NaN"
        assert np.all(d[2].view(np.uint32) == 0x7FFFFFFF)
        assert np.all(d[3] == -np.inf)
        assert np.isnan(d[4, 5]) and d[4, 4] == np.inf, "inf * 0 is NaN, inf * 1 is not"
        assert np.all(d[5] == 0)


def test_f16_accumulator_overflows_to_infinity():
    for model in (arithmetic.FAST, arithmetic.TRUNCATING):
        a = np.full((1, 16, 16), 256, np.float32)
        b = np.full((1, 8, 16), 256, np.float32)
        d = model(a, b, None, "f16", "f16")
        assert d.dtype == np.float16 and np.all(d == np.inf)


def truncated_sum(a, b, c, fraction, lowest):
    """Hopper's adder, one element, in exact integers."""
    from fractions import Fraction

    def exponent(x, low):
        x = abs(Fraction(float(x)))
        e = 0
        while x >= 2:
            x, e = x / 2, e + 1
        while x < 1:
            x, e = x * 2, e - 1
        return max(e, low)

    terms = [
        (Fraction(float(x)) * Fraction(float(y)), exponent(x, lowest) + exponent(y, lowest))
        for x, y in zip(a, b, strict=True)
        if x and y
    ]
    if c:
        terms.append((Fraction(float(c)), exponent(c, -126)))
    if not terms:
        return 0.0
    quantum = Fraction(2) ** (max([e for _, e in terms] + [-133]) - fraction)
    total = sum(int(value / quantum) for value, _ in terms) * quantum  # int() truncates toward zero
    if total == 0:
        return 0.0
    ulp = Fraction(2) ** (exponent(total, -126) - (13 if fraction == 13 else 23))
    return float(int(total / ulp) * ulp)


@pytest.mark.parametrize(("kind", "fraction", "lowest"), [("f16", 25, -14), ("bf16", 25, -126), ("e4m3", 13, -6)])
def test_truncating_model_matches_its_definition(kind, fraction, lowest):
    rng = np.random.default_rng(7)
    k = K[kind]
    a, _ = operand(rng, (1, 8, k), kind)
    b, _ = operand(rng, (1, 4, k), kind)
    a[0, 0] = 0
    a[0, 1, 1:] *= 0
    c = (rng.standard_normal((1, 8, 4)) * 10.0 ** rng.integers(-6, 4, (1, 8, 4))).astype(np.float32)
    c[0, 2] = 0
    got = arithmetic.TRUNCATING(a.astype(np.float32), b.astype(np.float32), c, kind, "f32")
    for i in range(8):
        for j in range(4):
            assert got[0, i, j] == truncated_sum(a[0, i], b[0, j], c[0, i, j], fraction, lowest), (i, j)


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32"])
def test_models_differ_by_no_more_than_their_bound(kind):
    rng = np.random.default_rng(8)
    k = K[kind]
    a, _ = operand(rng, (2, 64, k), kind)
    b, _ = operand(rng, (2, 64, k), kind)
    c = (rng.standard_normal((2, 64, 64)) * 100).astype(np.float32)
    arguments = (a.astype(np.float32), b.astype(np.float32), c, kind, "f32")
    fast, truncating = arithmetic.FAST(*arguments), arithmetic.TRUNCATING(*arguments)
    magnitude = np.abs(a) @ np.abs(b).transpose(0, 2, 1) + np.abs(c)
    difference = np.abs(fast.astype(np.float64) - truncating)
    assert np.all(difference <= 2 * k * 2.0**-23 * magnitude)
    assert difference.max() > 0, "the two models are meant to differ"


MMAS = [
    ("f16", 16, "f32", "f32"),
    ("f16", 8, "f32", "f32"),
    ("f16", 16, "f16", "f16"),
    ("f16", 8, "f16", "f16"),
    ("f16", 16, "f32", "f16"),
    ("bf16", 16, "f32", "f32"),
    ("bf16", 8, "f32", "f32"),
    ("tf32", 4, "f32", "f32"),
    ("tf32", 8, "f32", "f32"),
    ("e4m3", 16, "f32", "f32"),
    ("e4m3", 32, "f32", "f32"),
    ("e5m2", 32, "f16", "f16"),
    ("s8", 16, "s32", "s32"),
    ("s8", 32, "s32", "s32"),
    ("u8", 32, "s32", "s32"),
]


@pytest.mark.parametrize(("kind", "k", "d", "c_type"), MMAS)
def test_mma_sync_fragments(kind, k, d, c_type):
    rng = np.random.default_rng(9)
    op = Mma.parse(f"mma.sync.aligned.m16n8k{k}.row.col.{d}.{kind}.{kind}.{c_type}")
    a_regs, b_regs, c_regs, cases = [], [], [], []
    storage = {"f32": np.float32, "f16": np.float16, "s32": np.int32}
    for _ in range(3):
        a, a_bits = operand(rng, (16, k), kind)
        b, b_bits = operand(rng, (8, k), kind)
        c = (10 * rng.standard_normal((16, 8))).astype(storage[c_type])
        a_regs.append(a_fragment(a_bits))
        b_regs.append(b_fragment(b_bits))
        c_regs.append(accumulators(c))
        cases.append((a, b, c.astype(np.float64)))
    got = op.execute(*(np.concatenate(parts, axis=1) for parts in (a_regs, b_regs, c_regs)))
    assert got.shape == (op.d_registers, 3, 32)
    for warp, (a, b, c) in enumerate(cases):
        result = unpack_accumulators(got[:, warp : warp + 1], 8, storage[d])
        if d == "s32":
            assert np.array_equal(result, (a @ b.T + c).astype(np.int32))
        elif d == "f16" and kind in ("e4m3", "e5m2"):
            lower = np.arange(k) % 4 < 2
            half = np.float16
            partial = (a[:, lower] @ b[:, lower].T).astype(half).astype(np.float64)
            partial = (a[:, ~lower] @ b[:, ~lower].T + partial).astype(half).astype(np.float64)
            assert np.array_equal(result, (partial + c).astype(half)), "three roundings: two HMMA and an addition"
        elif d == "f16":
            assert np.array_equal(result, (a @ b.T + c).astype(np.float16))
        else:
            check_close(result, a, b, c)


def test_mma_sync_satfinite_clamps():
    wrap = Mma.parse("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32")
    clamp = Mma.parse("mma.sync.aligned.m16n8k16.row.col.satfinite.s32.s8.s8.s32")
    a = np.full((2, 1, 32), 0x7F7F7F7F, np.uint32)
    b = np.full((1, 1, 32), 0x7F7F7F7F, np.uint32)
    c = np.full((4, 1, 32), 2**31 - 1, np.uint32)
    assert np.all(clamp.execute(a, b, c) == 2**31 - 1)
    assert np.all(wrap.execute(a, b, c) == np.uint32((2**31 - 1 + 127 * 127 * 16) % 2**32))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count, transpose):
    rng = np.random.default_rng(10)
    smem = rng.integers(0, 256, (2, 4096)).astype(np.uint8)
    warps, windows = 3, [1, 0, 1]
    address = rng.permutation(256)[: 32 * 3].reshape(warps, 32).astype(np.uint32) * 16
    suffix = f".m8n8.x{count}{'.trans' if transpose else ''}.shared.b16"
    op = LdMatrix.parse("ldmatrix.sync.aligned" + suffix)
    got = op.execute(address, smem, windows)
    assert got.shape == (count, warps, 32)
    for warp, window in enumerate(windows):
        for i in range(count):
            for lane in range(32):
                for half in range(2):
                    row, column = lane // 4, 2 * (lane % 4) + half
                    if transpose:
                        row, column = column, row
                    at = int(address[warp, 8 * i + row]) + 2 * column
                    expected = int(smem[window, at]) | int(smem[window, at + 1]) << 8
                    assert int(got[i, warp, lane]) >> 16 * half & 0xFFFF == expected
    assert np.array_equal(op.rows(address), address[:, : 8 * count].T)

    store_op = StMatrix.parse("stmatrix.sync.aligned" + suffix)
    target = np.zeros_like(smem)
    store_op.execute(address, got, target, windows)
    written = np.zeros(smem.shape, bool)
    for warp, window in enumerate(windows):
        for lane in range(8 * count):
            written[window, address[warp, lane] : address[warp, lane] + 16] = True
    assert np.array_equal(target, np.where(written, smem, 0)), "stmatrix undoes ldmatrix and touches nothing else"
    assert np.array_equal(op.execute(address, [smem[0], smem[1]], windows), got), (
        "a list of windows reads like one array"
    )


def test_movmatrix_transposes():
    values = np.random.default_rng(11).integers(0, 2**32, (2, 32), dtype=np.uint32)
    got = movmatrix(values)
    for warp in range(2):
        for row in range(8):
            for column in range(8):
                before = int(values[warp, 4 * row + column // 2]) >> 16 * (column % 2) & 0xFFFF
                after = int(got[warp, 4 * column + row // 2]) >> 16 * (row % 2) & 0xFFFF
                assert before == after


def test_descriptor_fields():
    # What the DSL emits for a K-major 128-byte swizzled operand: SBO 1024, LBO 16 (not used), swizzle 128.
    assert Descriptor.decode(0x4000004000010000 | 0x123) == Descriptor(0x1230, 16, 1024, 0, 128)
    assert Descriptor.decode(3 << 62 | 5 << 49).base_offset == 5
    assert [Descriptor.decode(i << 62).swizzle for i in range(4)] == [0, 128, 64, 32]


@pytest.mark.parametrize(
    ("opcode", "tail", "rule"),
    [
        ("wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16", (1, 1, 0, 0), "syntax"),
        ("wgmma.mma_async.sync.aligned.m64n16k8.f32.f16.f16", (1, 1, 0, 0), "syntax"),
        ("wgmma.mma_async.sync.aligned.m64n16k16.f16.bf16.bf16", (1, 1, 0, 0), "syntax"),
        ("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.bf16", (1, 1, 0, 0), "syntax"),
        ("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", (1, 1), "syntax"),
        ("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", (2, 1, 0, 0), "syntax"),
        ("wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32", (1, 1, 0, 0), "syntax"),
        ("wgmma.mma_async.sync.aligned.m64n16k256.s32.b1.b1.and.popc", (), "unsupported"),
        ("wgmma.mma_async.sp.sync.aligned.m64n16k32.f32.f16.f16", (1, 1, 0, 0), "unsupported"),
    ],
)
def test_wgmma_refuses(opcode, tail, rule):
    with pytest.raises(MatrixError) as caught:
        Wgmma.parse(opcode, tail)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    "opcode",
    [
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16",
        "mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64",
    ],
)
def test_mma_refuses(opcode):
    with pytest.raises(MatrixError):
        Mma.parse(opcode)


def test_addresses_outside_the_window_and_misaligned_rows_are_errors():
    op = Wgmma.parse("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", (1, 1, 0, 0))
    smem = np.zeros((1, 4096), np.uint8)
    inside = np.array([make_descriptor(0, 16, 256, 32)], np.uint64)
    outside = np.array([make_descriptor(4096 - 256, 16, 256, 32)], np.uint64)
    d = np.zeros((8, 4, 32), np.uint32)
    op.execute(d, inside, inside, smem, [0])
    with pytest.raises(MatrixError) as caught:
        op.execute(d, outside, inside, smem, [0])
    assert caught.value.rule == "bounds"
    load = LdMatrix.parse("ldmatrix.sync.aligned.m8n8.x1.shared.b16")
    address = np.zeros((1, 32), np.uint32)
    address[0, 31] = 3  # not used by x1
    load.execute(address, smem, [0])
    address[0, 7] = 8
    with pytest.raises(MatrixError) as caught:
        load.execute(address, smem, [0])
    assert caught.value.rule == "alignment"
    address[0, 7] = 4096
    with pytest.raises(MatrixError) as caught:
        load.execute(address, smem, [0])
    assert caught.value.rule == "bounds"


# --- What an H200 did (tests/gpu_probes/tensor_cores.py) ------------------------------------------------------

DATA = Path(__file__).parent / "data"
SUMS = np.load(DATA / "tensor_cores_arithmetic.npz")
INSTRUCTIONS = sorted({name.rsplit(".", 1)[0] for name in SUMS.files})


def recorded(name: str):
    """(operand bits a, b, c and d of a recorded instruction, its multiplicand type, its result type)."""
    *_, d_type, kind = name.split(".")
    return (*(SUMS[f"{name}.{letter}"] for letter in "abcd"), kind, d_type)


def replay(name: str, model: arithmetic.Arithmetic) -> np.ndarray:
    """The recorded products again, by the model (wgmma) or by the instruction (mma.sync)."""
    a, b, c, d, kind, d_type = recorded(name)
    if name.startswith("wgmma"):
        decode = ELEMENTS[kind].decode
        return model(decode(a), decode(b), c.astype(np.float32), kind, d_type)
    k = int(name.split(".")[1][1:])
    op = Mma.parse(f"mma.sync.aligned.m16n8k{k}.row.col.{d_type}.{kind}.{kind}.{d_type}")
    fragments = ([a_fragment(x) for x in a], [b_fragment(x) for x in b], [accumulators(x) for x in c])
    got = op.execute(*(np.concatenate(parts, axis=1) for parts in fragments), arithmetic=model)
    return np.stack([unpack_accumulators(got[:, i : i + 1], 8, d.dtype.type) for i in range(len(d))])


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_truncating_equals_the_gpu_in_every_bit(name):
    d = recorded(name)[3]
    got = replay(name, arithmetic.TRUNCATING)
    bits = {2: np.uint16, 4: np.uint32}[d.itemsize]
    assert np.array_equal(got.view(bits), d.view(bits))


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_fast_is_within_four_units_of_the_gpu(name):
    a, b, c, d, kind, d_type = recorded(name)
    if d_type == "f16":
        same = (replay(name, arithmetic.FAST) == d) | np.isnan(d)
        # One rounding per instruction, of a sum that the GPU truncated before: rarely and only ever one step apart,
        # except where a sum cancels.
        assert same[0].mean() > 0.8 if kind in arithmetic.FP8 else same[0].mean() > 0.99
        return
    decode = ELEMENTS[kind].decode
    x, y = decode(a).astype(np.float64), decode(b).astype(np.float64)
    magnitude = np.abs(x) @ np.abs(y).transpose(0, 2, 1) + np.abs(c)
    difference = np.abs(replay(name, arithmetic.FAST).astype(np.float64) - d)
    assert np.all(difference <= 4 * 2.0**-23 * magnitude)


def test_descriptors_name_the_elements_that_the_gpu_read():
    recorded = np.load(DATA / "tensor_cores_descriptors.npz")
    assert len(recorded["cases"]) == 672
    smem = np.arange(8192 // 2, dtype=np.uint16).view(np.uint8)[None]
    for case, elements in zip(recorded["cases"].tolist(), recorded["elements"], strict=True):
        start, leading, stride, base_offset, swizzle_field, mn_major = case
        bits = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base_offset << 49 | swizzle_field << 62
        op = Wgmma.parse("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", (1, 1, 0, mn_major))
        # As f16, element i of the window is whatever its bits mean: compare what was read by those.
        values = np.arange(8192 // 2, dtype=np.uint16).view(np.float16).astype(np.float32)
        read = op.load("b", np.array([bits], np.uint64), smem, np.array([0]))[0]
        assert np.array_equal(read, values[elements.reshape(16, 16)]), case


@pytest.mark.parametrize("thread", [1, 31, 32, 127])
def test_every_thread_of_a_warp_group_has_the_same_descriptor(thread: int):
    values = np.full((8, 32), 7, np.uint64)
    assert uniform(values, 2, "A").tolist() == [7, 7]
    values.reshape(-1)[128 + thread] = 8
    with pytest.raises(MatrixError, match="differs among the threads of warp group 1"):
        uniform(values, 2, "A")


@pytest.mark.parametrize("model", ["FAST", "TRUNCATING"])
def test_infinite_and_nan_addends_stay_what_they_are(model: str):
    a, b = np.ones((1, 2, 16), np.float32), np.ones((1, 3, 16), np.float32)
    c = np.array([[[np.inf, -np.inf, np.nan], [1, 2, 3]]], np.float32)
    d = getattr(arithmetic, model)(a, b, c, "f16", "f32")
    np.testing.assert_array_equal(d, c + 16)


def test_scale_d_is_each_warp_groups_own():
    """Two warp groups in one call, of which one adds to the old accumulator: A and B are zeros, D was ones."""
    op = Wgmma.parse("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16", (1, 1, 0, 0))
    ones = np.ones((op.d_registers, 8, 32), np.float32).view(np.uint32)
    descriptors = np.full(2, 0x4000004000010000, np.uint64)
    smem = np.zeros((1, 1 << 14), np.uint8)
    for keep in ([True, False], [False, True]):
        d = op.execute(ones, descriptors, descriptors, smem, [0, 0], np.array(keep)).view(np.float32)
        assert (d[:, :4] == keep[0]).all() and (d[:, 4:] == keep[1]).all()
