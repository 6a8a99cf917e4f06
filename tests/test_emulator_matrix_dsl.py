"""The DSL's own layouts and fragments against the emulator's reading of the instructions it compiles them to.

Each kernel fills shared memory element by element through the DSL's layout algebra and lets the DSL build the
matrix descriptors, fragments and ldmatrix addresses; operands are integers, so results are exact.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator

from cute_matmul import emulator

M, N = 64, 128
DTYPES = {
    "f16": (cutlass.Float16, torch.float16),
    "bf16": (cutlass.BFloat16, torch.bfloat16),
    "e4m3": (cutlass.Float8E4M3FN, torch.float8_e4m3fn),
    "e5m2": (cutlass.Float8E5M2, torch.float8_e5m2),
    "s8": (cutlass.Int8, torch.int8),
    "u8": (cutlass.Uint8, torch.uint8),
}
KINDS = ("INTER", "SW32", "SW64", "SW128")


def shared_layout(dtype, k_major, kind, shape):
    name = f"{'K' if k_major else 'MN'}_{kind}"
    atom = warpgroup.make_smem_layout_atom(getattr(warpgroup.SmemLayoutAtomKind, name), dtype)
    return cute.tile_to_shape(atom, shape, order=(0, 1) if k_major else (1, 0))


@cute.kernel
def wgmma_kernel(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mC: cute.Tensor,
    tiled_mma: cute.TiledMma,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
    depth: cutlass.Constexpr,
    from_registers: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator()
    sA = smem.allocate_tensor(mA.element_type, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
    sB = smem.allocate_tensor(mB.element_type, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
    for i in cutlass.range(thread, M * depth, 128, unroll=1):
        sA[i // depth, i % depth] = mA[i // depth, i % depth]
    for i in cutlass.range(thread, N * depth, 128, unroll=1):
        sB[i // depth, i % depth] = mB[i // depth, i % depth]
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()

    thr_mma = tiled_mma.get_slice(thread)
    tCsA = thr_mma.partition_A(sA)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((M, N)), mC.element_type)
    acc.fill(0)
    if cutlass.const_expr(from_registers):
        tCrA = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((M, depth)))
        for i in cutlass.range(cute.size(tCrA), unroll_full=True):
            tCrA[i] = tCsA[i]
    else:
        tCrA = tiled_mma.make_fragment_A(tCsA)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for k_block in cutlass.range_constexpr(cute.size(tCrB, mode=[2])):
        cute.gemm(tiled_mma, acc, tCrA[None, None, k_block], tCrB[None, None, k_block], acc)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    cute.autovec_copy(acc, thr_mma.partition_C(cute.local_tile(mC, (M, N), (0, 0))))


@cute.jit
def wgmma_host(
    mA, mB, mC, a_k: cutlass.Constexpr, b_k: cutlass.Constexpr, kind: cutlass.Constexpr, registers: cutlass.Constexpr
):
    dtype = mA.element_type
    majors = tuple(OperandMajorMode.K if k_major else OperandMajorMode.MN for k_major in (a_k, b_k))
    source = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
    width = dtype.width
    depth = 1024 // width  # 128 bytes: the widest swizzle
    if cutlass.const_expr(width == 16):
        op = warpgroup.MmaF16BF16Op(dtype, mC.element_type, (M, N, 16), source, *majors)
    elif cutlass.const_expr(dtype in (cutlass.Int8, cutlass.Uint8)):
        op = warpgroup.MmaI8Op(dtype, mB.element_type, mC.element_type, (M, N, 32), source, *majors)
    else:
        op = warpgroup.MmaF8Op(dtype, mB.element_type, mC.element_type, (M, N, 32), source, *majors)
    wgmma_kernel(
        mA,
        mB,
        mC,
        cute.make_tiled_mma(op),
        shared_layout(dtype, a_k, kind, (M, depth)),
        shared_layout(mB.element_type, b_k, kind, (N, depth)),
        depth,
        registers,
    ).launch(grid=(1, 1, 1), block=(128, 1, 1))


def integers(shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype == torch.uint8 else -4
    return torch.randint(low, 5, shape, generator=generator).to(dtype)


def check_wgmma(a_type, b_type, c_type, a_k=True, b_k=True, kind="SW128", registers=False):
    depth = 128 // DTYPES[a_type][1].itemsize
    a, b = integers((M, depth), DTYPES[a_type][1], 1), integers((N, depth), DTYPES[b_type][1], 2)
    c = torch.zeros((M, N), dtype=c_type)
    report = emulator.run(wgmma_host, a, b, c, a_k, b_k, kind, registers)
    assert report.ok, report
    assert torch.equal(c.double(), a.double() @ b.double().T)


MAJORS = [(True, True, kind) for kind in KINDS] + [(False, False, kind) for kind in KINDS]
MAJORS += [(True, False, "SW128"), (False, True, "SW128")]


@pytest.mark.parametrize(("a_k", "b_k", "kind"), MAJORS)
def test_wgmma_16_bit_layouts(a_k, b_k, kind):
    check_wgmma("f16", "f16", torch.float32, a_k, b_k, kind)


BYTES = [("e4m3", "e4m3", kind) for kind in KINDS] + [
    ("e5m2", "e4m3", "SW128"),
    ("s8", "s8", "SW64"),
    ("u8", "s8", "SW32"),
]


@pytest.mark.parametrize(("a_type", "b_type", "kind"), BYTES)
def test_wgmma_8_bit_layouts(a_type, b_type, kind):
    check_wgmma(a_type, b_type, torch.int32 if a_type in ("s8", "u8") else torch.float32, kind=kind)


@pytest.mark.parametrize(
    ("dtype", "c_type"), [("bf16", torch.float32), ("f16", torch.float16), ("e4m3", torch.float32)]
)
def test_wgmma_with_a_in_registers(dtype, c_type):
    check_wgmma(dtype, dtype, c_type, registers=True)


@cute.kernel
def mma_sync_kernel(
    mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, tiled_mma: cute.TiledMma, shape: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    m, n, k = shape
    thr_mma = tiled_mma.get_slice(thread)
    tCgA = thr_mma.partition_A(cute.local_tile(mA, (m, k), (0, 0)))
    tCgB = thr_mma.partition_B(cute.local_tile(mB, (n, k), (0, 0)))
    tCgC = thr_mma.partition_C(cute.local_tile(mC, (m, n), (0, 0)))
    tCrA, tCrB = tiled_mma.make_fragment_A(tCgA), tiled_mma.make_fragment_B(tCgB)
    acc = tiled_mma.make_fragment_C(tCgC)
    for register, source in ((tCrA, tCgA), (tCrB, tCgB), (acc, tCgC)):
        numbers = cute.recast_tensor(register, source.element_type)  # a tf32 fragment is one of integers
        for i in cutlass.range_constexpr(cute.size(register)):
            numbers[i] = source[i]
    cute.gemm(tiled_mma, acc, tCrA, tCrB, acc)
    for i in cutlass.range_constexpr(cute.size(acc)):
        tCgC[i] = acc[i]


@cute.jit
def mma_sync_host(mA, mB, mC, kind: cutlass.Constexpr, k: cutlass.Constexpr):
    if cutlass.const_expr(kind == "tf32"):
        op = warp.MmaTF32Op((16, 8, k))
    elif cutlass.const_expr(kind in ("e4m3", "e5m2")):
        op = warp.MmaFP8Op(mA.element_type, mC.element_type, (16, 8, k))
    else:
        op = warp.MmaF16BF16Op(mA.element_type, mC.element_type, (16, 8, k))
    tiled_mma = cute.make_tiled_mma(op, cute.make_layout((2, 2, 1)))
    mma_sync_kernel(mA, mB, mC, tiled_mma, (32, 16, 2 * k)).launch(grid=(1, 1, 1), block=(128, 1, 1))


MMAS = [("f16", 16, torch.float32), ("f16", 8, torch.float32), ("bf16", 16, torch.float32), ("f16", 16, torch.float16)]
MMAS += [
    ("tf32", 8, torch.float32),
    ("tf32", 4, torch.float32),
    ("e4m3", 32, torch.float32),
    ("e5m2", 16, torch.float32),
]


@pytest.mark.parametrize(("kind", "k", "c_type"), MMAS)
def test_mma_sync_fragments(kind, k, c_type):
    dtype = torch.float32 if kind == "tf32" else DTYPES[kind][1]
    a, b = integers((32, 2 * k), dtype, 3), integers((16, 2 * k), dtype, 4)
    c = integers((32, 16), c_type, 5)
    expected = a.double() @ b.double().T + c.double()
    report = emulator.run(mma_sync_host, a, b, c, kind, k)
    assert report.ok, report
    assert torch.equal(c.double(), expected)
