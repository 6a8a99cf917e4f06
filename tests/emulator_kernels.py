"""Small kernels for tests of the emulator's entry, written with public DSL calls only."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm

THREADS = 64


@cute.kernel
def scale_kernel(x: cute.Tensor, out: cute.Tensor, factor: Float32):
    """out = x * factor, one element a thread."""
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    i = bidx * THREADS + tidx
    if i < cute.size(x):
        out[i] = x[i] * factor


@cute.kernel
def sum_kernel(x: cute.Tensor, out: cute.Tensor):
    """One block: out[0] = sum of x, by a tree in shared memory."""
    tidx, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    partial = smem.allocate_tensor(Float32, cute.make_layout(THREADS), byte_alignment=16)
    total = Float32(0.0)
    for i in cutlass.range(tidx, cute.size(x), THREADS):
        total += x[i]
    partial[tidx] = total
    cute.arch.sync_threads()
    half = Int32(THREADS // 2)
    while half > 0:
        if tidx < half:
            partial[tidx] = partial[tidx] + partial[tidx + half]
        cute.arch.sync_threads()
        half = half // 2
    if tidx == 0:
        out[0] = partial[0]


@cute.jit
def scale_then_sum(x: cute.Tensor, scaled: cute.Tensor, total: cute.Tensor, factor: Float32, stream):
    """Two launches: the second reads what the first wrote."""
    blocks = cute.ceil_div(cute.size(x), THREADS)
    scale_kernel(x, scaled, factor).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)
    sum_kernel(scaled, total).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def inline_kernel(x: cute.Tensor, out: cute.Tensor, table_size: cutlass.Constexpr[int]):
    """Inline PTX with its own scope, labels and registers; a register array indexed at run time; printf."""
    tidx, _, _ = cute.arch.thread_idx()
    table = cute.make_rmem_tensor(table_size, Int32)
    for i in cutlass.range_constexpr(table_size):
        table[i] = 10 * i
    value = Int32(
        llvm.inline_asm(
            Int32.mlir_type,
            [x[tidx].ir_value()],
            "{\n.reg .pred p;\n.reg .b32 n;\nmov.b32 n, 0;\nAGAIN:\nadd.s32 n, n, $1;\nsetp.lt.s32 p, n, 100;\n"
            "@p bra AGAIN;\nmov.b32 $0, n;\n}",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )
    if tidx == 3:
        cute.printf("lane %d has %d", tidx, value)
    out[tidx] = value + table[x[tidx] % table_size]


@cute.jit
def inline(x: cute.Tensor, out: cute.Tensor, table_size: cutlass.Constexpr[int]):
    inline_kernel(x, out, table_size).launch(grid=(1, 1, 1), block=(32, 1, 1))
