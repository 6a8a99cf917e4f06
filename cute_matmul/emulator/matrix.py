"""What the matrix instructions of PTX compute: wgmma.mma_async, mma.sync, ldmatrix, stmatrix, movmatrix.

Everything is batched: one call executes the same instruction for many warps or warp groups at once.

Registers travel as `uint32` arrays `(R, W, 32)`: R registers in operand order, W warps, 32 lanes; a sequence of R
arrays `(W, 32)` is taken as well. For warp groups W = 4 * G and four consecutive warps are one group. Shared
memory is `uint8 (ctas, nbytes)`, or a sequence of `(nbytes,)` arrays, indexed by the address in the CTA's shared
window; `rows` says which CTA each warp or warp group reads. Nothing here masks lanes and nothing here is
asynchronous: an instruction reads shared memory when it is called, so a caller that wants a late read calls late.

Layouts are those of the PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "Warp Level Matrix
Instructions"; a fragment's place in its matrix is always `lane = 4 * g + q` (the ISA's groupID and
threadID_in_group).

How products are summed is an argument, an `Arithmetic`: `FAST` by default, `TRUNCATING` for Hopper's own sums.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cute_matmul.emulator import formats
from cute_matmul.emulator.arithmetic import FAST, FP8, Arithmetic

GRANULE = 16  # bytes: what a matrix descriptor, a swizzle and a ldmatrix row count in
WINDOW = 1 << 18  # bytes that a matrix descriptor can address: 14 bits of 16-byte units

Registers = np.ndarray | Sequence[np.ndarray]
SharedMemory = np.ndarray | Sequence[np.ndarray]


class MatrixError(ValueError):
    """A matrix instruction that is malformed, not supported, or executed with operands the ISA forbids.

    `rule` is a short id: "syntax", "unsupported", "uniform", "descriptor", "alignment", "bounds", "operands".
    """

    def __init__(self, rule: str, message: str):
        super().__init__(message)
        self.rule = rule


@dataclass(frozen=True)
class ElementType:
    """How one multiplicand type lies in memory and in registers, and how it becomes a number."""

    name: str
    storage: type
    decode: Callable[[np.ndarray], np.ndarray]  # storage bits -> float32, exact

    @property
    def size(self) -> int:
        return np.dtype(self.storage).itemsize


ELEMENTS = {
    kind.name: kind
    for kind in (
        ElementType("f16", np.uint16, formats.f16_to_f32),
        ElementType("bf16", np.uint16, formats.bf16_to_f32),
        ElementType("tf32", np.uint32, formats.tf32_to_f32),
        ElementType("e4m3", np.uint8, formats.e4m3_to_f32),
        ElementType("e5m2", np.uint8, formats.e5m2_to_f32),
        ElementType("s8", np.uint8, lambda bits: bits.view(np.int8).astype(np.float32)),
        ElementType("u8", np.uint8, lambda bits: bits.astype(np.float32)),
    )
}
INTEGERS = ("s8", "u8")


# --- Registers ---------------------------------------------------------------------------------------------


def _stack(registers: Registers, count: int, what: str) -> np.ndarray:
    stacked = registers if isinstance(registers, np.ndarray) else np.stack(registers)
    if stacked.shape[0] != count or stacked.ndim != 3 or stacked.shape[2] != 32:
        raise MatrixError(
            "operands", f"{what}: expected {count} registers as ({count}, warps, 32), got shape {stacked.shape}"
        )
    if stacked.dtype != np.uint32:
        raise MatrixError("operands", f"{what}: expected uint32 registers, got {stacked.dtype}")
    return stacked


def _multiplicand_a(registers: np.ndarray, kind: ElementType) -> np.ndarray:
    """Fragments (R, W, 32) of 16-row A matrices -> float32 (W, 16, K), K = 8 * R / size.

    Register 2 * h + r holds row g + 8 * r and the columns that start at byte 16 * h + 4 * q of the row.
    """
    halves = registers.shape[0] // 2
    warps = registers.shape[1]
    per_word = 4 // kind.size
    parts = np.ascontiguousarray(registers).view(kind.storage).reshape(halves, 2, warps, 8, 4, per_word)
    return kind.decode(parts.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, halves * 4 * per_word))


def _multiplicand_b(registers: np.ndarray, kind: ElementType) -> np.ndarray:
    """Fragments (R, W, 32) of K x 8 B matrices -> float32 (W, 8, K): column g, K from byte 16 * h + 4 * q."""
    halves, warps = registers.shape[:2]
    per_word = 4 // kind.size
    parts = np.ascontiguousarray(registers).view(kind.storage).reshape(halves, warps, 8, 4, per_word)
    return kind.decode(parts.transpose(1, 2, 0, 3, 4).reshape(warps, 8, halves * 4 * per_word))


def _from_fragments(registers: np.ndarray, storage: type) -> np.ndarray:
    """Accumulator fragments (R, W, 32) -> (W, 16, N) of `storage` (32-bit, or 16-bit packed in pairs).

    Elements 4 * j + 2 * r + b of a lane are row g + 8 * r, column 8 * j + 2 * q + b.
    """
    warps = registers.shape[1]
    bits = np.ascontiguousarray(registers)
    if np.dtype(storage).itemsize == 4:
        tiles = registers.shape[0] // 4
        parts = bits.view(storage).reshape(tiles, 2, 2, warps, 8, 4).transpose(3, 1, 4, 0, 5, 2)
    else:
        tiles = registers.shape[0] // 2
        parts = bits.view(storage).reshape(tiles, 2, warps, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
    return parts.reshape(warps, 16, 8 * tiles)


def _to_fragments(matrix: np.ndarray) -> np.ndarray:
    """The inverse of `_from_fragments`: (W, 16, N) of 32-bit or 16-bit elements -> uint32 (R, W, 32)."""
    warps, _, columns = matrix.shape
    parts = matrix.reshape(warps, 2, 8, columns // 8, 4, 2)
    if matrix.dtype.itemsize == 4:
        ordered = np.ascontiguousarray(parts.transpose(3, 1, 5, 0, 2, 4))
        return ordered.view(np.uint32).reshape(columns // 2, warps, 32)
    ordered = np.ascontiguousarray(parts.transpose(3, 1, 0, 2, 4, 5))
    return ordered.view(np.uint32).reshape(columns // 4, warps, 32)


# --- Shared memory -----------------------------------------------------------------------------------------


def _check_bounds(highest: int, nbytes: int, what: str) -> None:
    if highest > nbytes:
        raise MatrixError("bounds", f"{what} reaches byte {highest} of a shared window of {nbytes} bytes")


def _take(smem: SharedMemory, unit: type, rows: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Elements `index` (G, ...), counted in `unit`s, of each group's CTA; index may be (1, ...) for all groups."""
    if isinstance(smem, np.ndarray):
        units = smem.view(unit)
        rows = rows.reshape(-1, *[1] * (index.ndim - 1))
        if units.flags.c_contiguous:
            return units.reshape(-1).take(rows * units.shape[1] + index)
        return units[rows, index]
    many = np.broadcast_to(index, (len(rows), *index.shape[1:]))
    return np.stack([smem[row].view(unit).take(one) for row, one in zip(rows, many, strict=True)])


def _window_bytes(smem: SharedMemory) -> int:
    nbytes = smem.shape[1] if isinstance(smem, np.ndarray) else min(len(window) for window in smem)
    if nbytes % GRANULE:
        raise MatrixError("operands", f"smem: its size must be a multiple of {GRANULE} bytes, got {nbytes}")
    return nbytes


# --- wgmma.mma_async ---------------------------------------------------------------------------------------

_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}


@dataclass(frozen=True)
class Descriptor:
    """A decoded shared-memory matrix descriptor; every field in bytes, but base_offset in rows of 128 bytes.

    PTX ISA, "Matrix Descriptor Format" of wgmma: bits 13-0 start address, 29-16 leading dimension byte offset,
    45-32 stride dimension byte offset (each in units of 16 bytes), 51-49 base offset, 63-62 swizzle mode.
    """

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int

    @classmethod
    def decode(cls, bits: int) -> Descriptor:
        bits = int(bits)
        return cls(
            start=(bits & 0x3FFF) << 4,
            leading=(bits >> 16 & 0x3FFF) << 4,
            stride=(bits >> 32 & 0x3FFF) << 4,
            base_offset=bits >> 49 & 7,
            swizzle=_SWIZZLES[bits >> 62],
        )


@functools.lru_cache(maxsize=4096)
def _granules(bits: int, rows: int, per_granule: int, k_granules: int, mn_major: bool) -> np.ndarray:
    """16-byte granules of an operand of `rows` (M or N) rows and 32 bytes of K per row.

    K-major: (rows, 2), each granule a piece of one row. MN-major: (k, rows / per_granule), each granule
    `per_granule` consecutive rows of one k. Strides are those of the ISA's canonical layouts: with a swizzle of
    W granules the first W (K-major: 2) granules follow one another; the leading offset joins swizzle atoms along
    the contiguous dimension, the stride offset groups of eight along the other. Without a swizzle K-major's two
    granules are `leading` apart, and MN-major uses `stride` along M or N and `leading` along K.
    The swizzle XORs address bits 4-6 with bits 7-9 (as many as it has), so it depends on the start address; a base
    offset moves the pattern's origin by that many 128-byte lines. Confirmed on an H200 for 672 descriptors (see
    `tests/gpu_probes/tensor_cores.py`).
    """
    desc = Descriptor.decode(bits)
    width = max(desc.swizzle, GRANULE) // GRANULE
    if mn_major:
        mn = np.arange(rows // per_granule, dtype=np.int64)
        k = np.arange(k_granules * per_granule, dtype=np.int64)
        along_mn, along_k = (desc.leading, desc.stride) if desc.swizzle else (desc.stride, desc.leading)
        columns = mn % width * GRANULE + mn // width * along_mn
        lines = k % 8 * width * GRANULE + k // 8 * along_k
    else:
        mn = np.arange(rows, dtype=np.int64)
        lines = mn % 8 * width * GRANULE + mn // 8 * desc.stride
        columns = np.arange(k_granules, dtype=np.int64) * (GRANULE if desc.swizzle else desc.leading)
    address = desc.start + lines[:, None] + columns[None, :]
    pattern = address - (desc.base_offset << 7)
    address ^= (pattern >> 7 & width - 1) << 4
    index = address // GRANULE
    index.setflags(write=False)
    return index


_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)(\.satfinite)?\.(f16|f32|s32)\.(\w+)\.(\w+)$")


@dataclass(frozen=True)
class Wgmma:
    """One wgmma.mma_async: D (64 x n) = A (64 x k) * B (k x n) (+ D), by warp groups of 128 threads.

    `parse` it from the opcode and the integer literals after the scale-d operand; then `execute` it on batches.
    """

    n: int
    k: int
    d: str
    a: str
    b: str
    scale_a: int = 1
    scale_b: int = 1
    a_mn_major: bool = False
    b_mn_major: bool = False
    a_in_registers: bool = False
    saturate: bool = False

    m = 64

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def parse(cls, opcode: str, tail: tuple[int, ...] = (), a_in_registers: bool = False) -> Wgmma:
        """From the opcode and the immediates that follow scale-d, in the order of the PTX text.

        tail is (imm-scale-a, imm-scale-b, imm-trans-a, imm-trans-b) for 16-bit types, without imm-trans-a when A
        is in registers; (imm-scale-a, imm-scale-b) for tf32 and fp8; empty for integers. Raises `MatrixError`.
        """
        match = _WGMMA.match(opcode)
        if not match:
            raise MatrixError("unsupported", f"not a dense wgmma.mma_async this emulator knows: {opcode}")
        m, n, k = (int(match[i]) for i in (1, 2, 3))
        saturate, d, a, b = bool(match[4]), match[5], match[6], match[7]
        for name in (a, b):
            if name not in ELEMENTS:
                raise MatrixError("unsupported", f"{opcode}: element type {name}; known: {', '.join(ELEMENTS)}")
        integer = a in INTEGERS
        pair_ok = a == b or (a in FP8 and b in FP8) or (integer and b in INTEGERS)
        d_ok = d in {"f16": ("f16", "f32"), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32")}.get(
            a, ("s32",) if integer else ("f32",)
        )
        if not pair_ok or not d_ok or (saturate and not integer):
            raise MatrixError("syntax", f"{opcode}: PTX has no wgmma with D {d}, A {a}, B {b}")
        if m != 64 or n % 8 or not 8 <= n <= 256 or k * ELEMENTS[a].size != 32:
            raise MatrixError("syntax", f"{opcode}: shape must be m64, n8 to n256 by 8, k of 32 bytes")
        if integer and (n % 16 and n not in (8, 24)):
            raise MatrixError("syntax", f"{opcode}: integer wgmma takes n 8, 24 and multiples of 16")
        sixteen_bit = a in ("f16", "bf16")
        expected = 0 if integer else 2 if not sixteen_bit else 3 if a_in_registers else 4
        if len(tail) != expected:
            raise MatrixError("syntax", f"{opcode}: expected {expected} immediates after scale-d, got {tail}")
        scale_a, scale_b = tail[:2] if expected else (1, 1)
        trans_a, trans_b = {0: (0, 0), 2: (0, 0), 3: (0, *tail[2:]), 4: tail[2:]}[expected]
        if {scale_a, scale_b} - {1, -1} or {trans_a, trans_b} - {0, 1}:
            raise MatrixError("syntax", f"{opcode}: scales must be 1 or -1 and transposes 0 or 1, got {tail}")
        return cls(n, k, d, a, b, scale_a, scale_b, bool(trans_a), bool(trans_b), a_in_registers, saturate)

    @property
    def d_registers(self) -> int:
        """Accumulator registers per thread."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    @property
    def a_registers(self) -> int:
        """Registers of A per thread: 4, or 0 when A is in shared memory."""
        return 4 if self.a_in_registers else 0

    @property
    def flops(self) -> int:
        """Multiplications and additions of one warp group's instruction."""
        return 2 * self.m * self.n * self.k

    def _operand_granules(self, which: str, bits: int) -> np.ndarray:
        kind = ELEMENTS[self.a if which == "a" else self.b]
        rows, mn_major = (self.m, self.a_mn_major) if which == "a" else (self.n, self.b_mn_major)
        return _granules(int(bits), rows, GRANULE // kind.size, 2, mn_major)

    def load(self, which: str, descriptors: np.ndarray, smem: SharedMemory, rows: np.ndarray) -> np.ndarray:
        """Operand "a" or "b" of every warp group as float32: (G, 64 or n, k). Signs (imm-scale) are not applied.

        descriptors: (G,) uint64. Raises `MatrixError` where a matrix leaves the shared window.
        """
        kind = ELEMENTS[self.a if which == "a" else self.b]
        mn_major = self.a_mn_major if which == "a" else self.b_mn_major
        first = int(descriptors[0])
        same = len(descriptors) == 1 or bool((descriptors == first).all())
        each = [self._operand_granules(which, bits) for bits in (descriptors[:1] if same else descriptors)]
        index = each[0][None] if same else np.stack(each)
        nbytes = _window_bytes(smem)
        if index.max(initial=0) >= nbytes // GRANULE or index.min(initial=0) < 0:
            _check_bounds(int(index.max() + 1) * GRANULE, nbytes, f"wgmma operand {which.upper()}")
        # complex128 is NumPy's only 16-byte type that is moved as one item; nothing computes with it.
        raw = _take(smem, np.complex128, rows, index).view(kind.storage)
        numbers = kind.decode(raw.reshape(len(rows), index.shape[1], -1))
        return numbers.transpose(0, 2, 1) if mn_major else numbers

    def execute(
        self,
        d: Registers,
        a: np.ndarray | Registers,
        b: np.ndarray,
        smem: SharedMemory,
        rows: np.ndarray | Sequence[int],
        scale_d: bool | np.ndarray = True,
        arithmetic: Arithmetic = FAST,
    ) -> np.ndarray:
        """New accumulator registers (R, 4G, 32) of G warp groups.

        d: (R, 4G, 32). a: descriptors, or four registers (4, 4G, 32). b: descriptors. Descriptors are uint64 (G,),
        or per thread (4G, 32), then checked to be equal in a group. smem and rows (G,): see the module. scale_d:
        one truth value or (G,); where false, D = A * B and the old D is not read as a number.
        """
        rows = np.asarray(rows, dtype=np.int64)
        groups = len(rows)
        d = _stack(d, self.d_registers, "D")
        if d.shape[1] != 4 * groups:
            raise MatrixError("operands", f"D: {d.shape[1]} warps for {groups} warp groups, expected {4 * groups}")
        if self.a_in_registers:
            left = _multiplicand_a(_stack(a, 4, "A"), ELEMENTS[self.a]).reshape(groups, self.m, self.k)
        else:
            left = self.load("a", uniform(a, groups, "A"), smem, rows)
        right = self.load("b", uniform(b, groups, "B"), smem, rows)
        if self.scale_a * self.scale_b < 0:
            left = -left
        keep = np.broadcast_to(np.asarray(scale_d, dtype=bool), (groups,))
        d = _multiply_accumulate(self, left, right, d, keep, arithmetic)
        return d

    def reads(self, a: int | None, b: int) -> np.ndarray:
        """Shared bytes one warp group's instruction reads: sorted, merged (start, nbytes) rows, int64 (n, 2).

        a is None when A is in registers.
        """
        return _ranges(self, None if a is None or self.a_in_registers else int(a), int(b))

    def read_granules(self, a: int | None, b: int) -> np.ndarray:
        """The same bytes as sorted addresses of 16-byte granules, int64 (n,), read-only."""
        return _read_granules(self, None if a is None or self.a_in_registers else int(a), int(b))


def uniform(values: np.ndarray | Sequence[int], groups: int, what: str) -> np.ndarray:
    """Descriptors (G,) from (G,) or per-thread (4G, 32) values; raises `MatrixError` where threads differ."""
    values = np.asarray(values, dtype=np.uint64)
    if values.shape == (groups,):
        return values
    if values.shape != (4 * groups, 32):
        raise MatrixError(
            "operands", f"descriptor {what}: expected ({groups},) or ({4 * groups}, 32), got {values.shape}"
        )
    per_group = values.reshape(groups, 128)
    differs = (per_group != per_group[:, :1]).any(axis=1)
    if differs.any():
        raise MatrixError(
            "uniform", f"descriptor {what} differs among the threads of warp group {int(differs.argmax())}"
        )
    return per_group[:, 0]


@functools.lru_cache(maxsize=4096)
def _read_granules(op: Wgmma, a: int | None, b: int) -> np.ndarray:
    parts = [op._operand_granules("b", b).ravel()]
    if a is not None:
        parts.append(op._operand_granules("a", a).ravel())
    addresses = np.unique(np.concatenate(parts)) * GRANULE
    addresses.setflags(write=False)
    return addresses


@functools.lru_cache(maxsize=4096)
def _ranges(op: Wgmma, a: int | None, b: int) -> np.ndarray:
    addresses = _read_granules(op, a, b)
    breaks = np.flatnonzero(np.diff(addresses) != GRANULE) + 1
    starts = addresses[np.concatenate(([0], breaks))]
    ends = addresses[np.concatenate((breaks - 1, [len(addresses) - 1]))] + GRANULE
    ranges = np.stack((starts, ends - starts), axis=1)
    ranges.setflags(write=False)
    return ranges


def _multiply_accumulate(
    op: Wgmma | Mma,
    left: np.ndarray,
    right: np.ndarray,
    registers: np.ndarray,
    keep: np.ndarray | None,
    arithmetic: Arithmetic,
) -> np.ndarray:
    """D = left @ right.T + C for (G, M, K) and (G, N, K), C and D in accumulator fragments; `keep` (G,) or all."""
    groups, m, _ = left.shape
    n = right.shape[1]
    c_kind = getattr(op, "c", op.d)
    storage = {"f16": np.float16, "f32": np.float32, "s32": np.int32}
    c = None
    if keep is None or keep.any():
        c = _from_fragments(registers, storage[c_kind]).reshape(groups, m, n)
        if keep is not None and not keep.all():
            c = np.where(keep[:, None, None], c, c.dtype.type(0))
    if op.d == "s32":
        # Exact in float32: at most 32 products below 2**16 each.
        total = np.matmul(left, right.transpose(0, 2, 1)).astype(np.int64)
        if c is not None:
            total += c
        if op.saturate:
            np.clip(total, -(1 << 31), (1 << 31) - 1, out=total)
        result = total.astype(np.int32)
    else:
        if c is not None and c.dtype != np.float32:
            c = c.astype(np.float32)
        result = arithmetic(left, right, c, op.a, op.d)
    return _to_fragments(result.reshape(groups * m // 16, 16, n))


# --- mma.sync ----------------------------------------------------------------------------------------------

_MMA = re.compile(
    r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.row\.col(\.satfinite)?\.(f16|f32|s32)\.(\w+)\.(\w+)\.(f16|f32|s32)$"
)
_MMA_K = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "e4m3": (16, 32), "e5m2": (16, 32)}


@dataclass(frozen=True)
class Mma:
    """One dense mma.sync m16n8kK: D = A * B + C per warp."""

    k: int
    d: str
    a: str
    b: str
    c: str
    saturate: bool = False

    m = 16
    n = 8

    @classmethod
    @functools.lru_cache(maxsize=256)
    def parse(cls, opcode: str) -> Mma:
        """From the opcode, e.g. "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32". Raises `MatrixError`."""
        match = _MMA.match(opcode)
        if not match or match[6] not in ELEMENTS or match[7] not in ELEMENTS:
            raise MatrixError("unsupported", f"not a dense mma.sync this emulator knows: {opcode}")
        m, n, k = (int(match[i]) for i in (1, 2, 3))
        saturate, d, a, b, c = bool(match[4]), *(match[i] for i in (5, 6, 7, 8))
        integer = a in INTEGERS
        pair_ok = a == b or (a in FP8 and b in FP8) or (integer and b in INTEGERS)
        if integer:
            types_ok = d == c == "s32"
        elif a in ("bf16", "tf32"):
            types_ok = d == c == "f32" and not saturate
        else:
            types_ok = {d, c} <= {"f16", "f32"} and not saturate
        if not (pair_ok and types_ok and (m, n) == (16, 8) and k in _MMA_K.get(a, (16, 32))):
            raise MatrixError("syntax", f"PTX has no {opcode} on sm_90")
        return cls(k, d, a, b, c, saturate)

    @property
    def a_registers(self) -> int:
        return self.k * ELEMENTS[self.a].size // 8

    @property
    def b_registers(self) -> int:
        return self.k * ELEMENTS[self.b].size // 16

    @property
    def c_registers(self) -> int:
        return 2 if self.c == "f16" else 4

    @property
    def d_registers(self) -> int:
        return 2 if self.d == "f16" else 4

    @property
    def k_bytes(self) -> int:
        """Bytes of one row of A."""
        return self.k * ELEMENTS[self.a].size

    @property
    def flops(self) -> int:
        """Multiplications and additions of one warp's instruction."""
        return 2 * self.m * self.n * self.k

    def execute(self, a: Registers, b: Registers, c: Registers, arithmetic: Arithmetic = FAST) -> np.ndarray:
        """D registers (R, W, 32) from A, B and C registers of W warps."""
        left = _multiplicand_a(_stack(a, self.a_registers, "A"), ELEMENTS[self.a])
        right = _multiplicand_b(_stack(b, self.b_registers, "B"), ELEMENTS[self.b])
        c = _stack(c, self.c_registers, "C")
        if self.a in FP8:
            return self._execute_fp8(left, right, c, arithmetic)
        return _multiply_accumulate(self, left, right, c, None, arithmetic)

    def _execute_fp8(self, left: np.ndarray, right: np.ndarray, c: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
        """sm_90 has no fp8 mma.sync: ptxas (13.0) widens to f16 and emits two HMMA and an addition of C.

        The first takes the lower two of every four bytes of K, the second the upper two, both rounding to D's type.
        """
        lower = np.arange(self.k) % 4 < 2
        partial = arithmetic(left[:, :, lower], right[:, :, lower], None, "f16", self.d)
        partial = arithmetic(
            left[:, :, ~lower], right[:, :, ~lower], partial.astype(np.float32, copy=False), "f16", self.d
        )
        addend = _from_fragments(c, np.float16 if self.c == "f16" else np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            wide = partial.astype(np.float64) + addend.astype(np.float64)
            return _to_fragments(wide.astype(np.float16 if self.d == "f16" else np.float32))


# --- ldmatrix, stmatrix, movmatrix -------------------------------------------------------------------------

_LDST = re.compile(r"(ldmatrix|stmatrix)\.sync\.aligned\.m8n8\.x([124])(\.trans)?(\.shared(?:::cta)?)?\.b16$")


@dataclass(frozen=True)
class _MatrixMove:
    """ldmatrix or stmatrix of `count` 8x8 matrices of 16-bit elements; lane 8 * i + r addresses row r of matrix i."""

    count: int
    transpose: bool

    @classmethod
    def _parse(cls, opcode: str, verb: str):
        match = _LDST.match(opcode)
        if not match or match[1] != verb:
            raise MatrixError("unsupported", f"not a {verb} that sm_90 has: {opcode}")
        return cls(int(match[2]), bool(match[3]))

    def rows(self, address: np.ndarray) -> np.ndarray:
        """Start addresses (8 * count, W) of the 16-byte rows that lanes' addresses (W, 32) name."""
        return address[:, : 8 * self.count].T

    def _words(self, address: np.ndarray, smem: SharedMemory) -> np.ndarray:
        """Index of every row's 16-bit elements, counted in elements: (W, count, 8 rows, 8 columns)."""
        used = address[:, : 8 * self.count].astype(np.int64)
        if (used % GRANULE).any():
            raise MatrixError("alignment", f"row address {int(used[used % GRANULE != 0][0])} is not 16-byte aligned")
        nbytes = _window_bytes(smem)
        _check_bounds(int(used.max(initial=0)) + GRANULE, nbytes, "a matrix row")
        return (used // 2).reshape(-1, self.count, 8, 1) + np.arange(8)


class LdMatrix(_MatrixMove):
    """ldmatrix.sync.aligned.m8n8.x{1,2,4}{.trans}.shared.b16."""

    @classmethod
    @functools.lru_cache(maxsize=64)
    def parse(cls, opcode: str) -> LdMatrix:
        return cls._parse(opcode, "ldmatrix")

    def execute(self, address: np.ndarray, smem: SharedMemory, rows: np.ndarray | Sequence[int]) -> np.ndarray:
        """Registers (count, W, 32) from lanes' addresses (W, 32) in the windows of CTAs `rows` (W,)."""
        index = self._words(address, smem)
        warps = len(index)
        matrices = _take(smem, np.uint16, np.asarray(rows, dtype=np.int64), index)
        # Lane (g, q) receives row g, columns 2q and 2q + 1; of the transpose where asked.
        matrices = matrices.transpose(1, 0, 3, 2) if self.transpose else matrices.transpose(1, 0, 2, 3)
        return np.ascontiguousarray(matrices).view(np.uint32).reshape(self.count, warps, 32)


class StMatrix(_MatrixMove):
    """stmatrix.sync.aligned.m8n8.x{1,2,4}{.trans}.shared.b16."""

    @classmethod
    @functools.lru_cache(maxsize=64)
    def parse(cls, opcode: str) -> StMatrix:
        return cls._parse(opcode, "stmatrix")

    def execute(
        self, address: np.ndarray, values: Registers, smem: SharedMemory, rows: np.ndarray | Sequence[int]
    ) -> None:
        """Store registers `values` (count, W, 32) to the rows that lanes' addresses (W, 32) name, in place."""
        values = _stack(values, self.count, "values")
        index = self._words(address, smem)
        matrices = np.ascontiguousarray(values).view(np.uint16).reshape(self.count, -1, 8, 8).swapaxes(0, 1)
        if self.transpose:
            matrices = matrices.swapaxes(2, 3)
        if isinstance(smem, np.ndarray):
            smem.view(np.uint16)[np.asarray(rows).reshape(-1, 1, 1, 1), index] = matrices
        else:
            for row, one, data in zip(rows, index, matrices, strict=True):
                smem[row].view(np.uint16)[one] = data


def movmatrix(values: np.ndarray) -> np.ndarray:
    """movmatrix.sync.aligned.m8n8.trans.b16: transpose one 8x8 matrix of 16-bit elements per warp, (W, 32)."""
    halves = np.ascontiguousarray(values, dtype=np.uint32).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(-1, 32)
