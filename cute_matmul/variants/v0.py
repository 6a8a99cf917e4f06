"""V0: TMA loads, mma.sync.

The foot of the ladder. One CTA of 128 threads computes one tile of C. For each k_tile, one thread asks the copy
engine (TMA) for the tiles of A and B; an mbarrier tells everyone when their bytes have landed; each warp copies
its share from shared memory to registers with ldmatrix and multiplies it with mma.sync.

What it shows: TMA does addressing, bounds and the swizzle, so the kernel has no load loop and no masks. All the
rest is serial: load, wait, copy to registers, multiply, meet, next.

What it did: 0.56 of cuBLAS (H200, 8192^3, fp16, bursts, as are the figures of the other rungs; docs/v0.md has the
table that they are from).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_matmul import epilogue, hopper
from cute_matmul.config import Resources, TileConfig, tx_bytes

RESOURCES = Resources(threads=128)
WARPS_MN = (2, 2)  # each warp computes a quarter of the tile

SPACE = tuple(TileConfig((tile_m, 128, tile_k)) for tile_m in (64, 128) for tile_k in (16, 32, 64))
DEFAULT = TileConfig((128, 128, 64))


@cute.jit
def host(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream, config: cutlass.Constexpr[TileConfig]):
    """Launch C = A @ B for A (M, K), B (K, N), C (M, N): one CTA per tile of C."""
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    mB = hopper.transposed(mB)  # (N, K), as CuTe and WGMMA count it
    a_layout = hopper.smem_layout(mA, (tile_m, tile_k), 1)
    b_layout = hopper.smem_layout(mB, (tile_n, tile_k), 1)
    a_tma, a_coords = hopper.tma_load(mA, a_layout, (tile_m, tile_k))
    b_tma, b_coords = hopper.tma_load(mB, b_layout, (tile_n, tile_k))
    tiled_mma = hopper.mma_sync(mA.element_type, WARPS_MN, tile_n)
    a_ldmatrix = cute.make_tiled_copy_A(hopper.ldmatrix(mA), tiled_mma)
    b_ldmatrix = cute.make_tiled_copy_B(hopper.ldmatrix(mB), tiled_mma)
    matmul_v0_kernel(
        a_tma, a_coords, b_tma, b_coords, mC, tiled_mma, a_ldmatrix, b_ldmatrix, a_layout, b_layout, config
    ).launch(
        grid=(*cute.ceil_div(mC.shape, (tile_m, tile_n)), 1),
        block=(RESOURCES.threads, 1, 1),
        stream=stream,
    )


@cute.kernel
def matmul_v0_kernel(
    a_tma: cute.CopyAtom,
    mA: cute.Tensor,
    b_tma: cute.CopyAtom,
    mB: cute.Tensor,
    mC: cute.Tensor,
    tiled_mma: cute.TiledMma,
    a_ldmatrix: cute.TiledCopy,
    b_ldmatrix: cute.TiledCopy,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
    config: cutlass.Constexpr[TileConfig],
):
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    tidx, _, _ = cute.arch.thread_idx()
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    m_tile, n_tile, _ = cute.arch.block_idx()

    smem = hopper.shared_memory()
    sA = hopper.operand_buffer(smem, mC.element_type, a_layout)  # (bM, bK, 1)
    sB = hopper.operand_buffer(smem, mC.element_type, b_layout)  # (bN, bK, 1)
    # One arrival (the elected lane's expect_tx) and the bytes of both tiles per phase.
    full = smem.allocate_array(cutlass.Int64, 1)
    if tidx == 0:
        cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    gA = cute.local_tile(mA, (tile_m, tile_k), (m_tile, None))  # (bM, bK, RestK)
    gB = cute.local_tile(mB, (tile_n, tile_k), (n_tile, None))  # (bN, bK, RestK)
    tAsA, tAgA = hopper.tma_slices(a_tma, sA, gA)
    tBsB, tBgB = hopper.tma_slices(b_tma, sB, gB)

    thr_mma = tiled_mma.get_slice(tidx)
    tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA)[None, None, None, 0])  # (MMA, MMA_M, MMA_K)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB)[None, None, None, 0])  # (MMA, MMA_N, MMA_K)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tile_m, tile_n)), cutlass.Float32)
    acc.fill(0.0)

    # The same registers and bytes as ldmatrix sees them: (CPY, CPY_MN, CPY_K)
    thr_a, thr_b = a_ldmatrix.get_slice(tidx), b_ldmatrix.get_slice(tidx)
    tXsA, tXrA = thr_a.partition_S(sA)[None, None, None, 0], thr_a.retile(tCrA)
    tXsB, tXrB = thr_b.partition_S(sB)[None, None, None, 0], thr_b.retile(tCrB)

    phase = cutlass.Int32(0)
    for k_tile in cutlass.range(cute.size(gA, mode=[2]), unroll=1):
        if warp_idx == 0:
            # NOTE: a TMA load elects its lane by itself, an arrival does not.
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, tx_bytes(config))
            cute.copy(a_tma, tAgA[None, k_tile], tAsA[None, 0], tma_bar_ptr=full)
            cute.copy(b_tma, tBgB[None, k_tile], tBsB[None, 0], tma_bar_ptr=full)
        cute.arch.mbarrier_wait(full, phase)
        phase ^= 1

        for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            cute.copy(a_ldmatrix, tXsA[None, None, k_block], tXrA[None, None, k_block])
            cute.copy(b_ldmatrix, tXsB[None, None, k_block], tXrB[None, None, k_block])
            cute.gemm(tiled_mma, acc, tCrA[None, None, k_block], tCrB[None, None, k_block], acc)
        # Nobody may still be reading the tiles when the next ones arrive.
        cute.arch.sync_threads()

    epilogue.store_direct(thr_mma, acc, mC, (tile_m, tile_n), (m_tile, n_tile))


if __name__ == "__main__":
    from cute_matmul import harness

    harness.main("v0")
