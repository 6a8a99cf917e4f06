"""V1: WGMMA, fed from shared memory.

What changes from V0: the warp group multiplies with `wgmma.mma_async`, which reads both operands from shared
memory itself. The copies shared -> registers, and the registers they needed, are gone.

Why: one m64n128k16 WGMMA does the work of 64 mma.sync m16n8k16, with one instruction issued per warp and no
ldmatrix in between, so the tensor cores no longer wait for the issue slots and the shared-memory pipe.

What it did: 0.80 of cuBLAS where V0 has 0.56. All of the overlap is between CTAs: three share an SM, which
`min_blocks_per_mp` holds the compiler to. With two, an earlier build ran at 0.59.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cute_matmul import epilogue, hopper
from cute_matmul.config import Resources, TileConfig, tx_bytes

RESOURCES = Resources(threads=128)

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
    tiled_mma = hopper.wgmma(mA, mB, tile_n)
    matmul_v1_kernel(a_tma, a_coords, b_tma, b_coords, mC, tiled_mma, a_layout, b_layout, config).launch(
        grid=(*cute.ceil_div(mC.shape, (tile_m, tile_n)), 1),
        block=(RESOURCES.threads, 1, 1),
        min_blocks_per_mp=RESOURCES.ctas_asked_for(config),
        preferred_smem_carveout=100,
        stream=stream,
    )


@cute.kernel
def matmul_v1_kernel(
    a_tma: cute.CopyAtom,
    mA: cute.Tensor,
    b_tma: cute.CopyAtom,
    mB: cute.Tensor,
    mC: cute.Tensor,
    tiled_mma: cute.TiledMma,
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
    tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, 1): descriptors
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, 1)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tile_m, tile_n)), cutlass.Float32)
    acc.fill(0.0)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)

    phase = cutlass.Int32(0)
    for k_tile in cutlass.range(cute.size(gA, mode=[2]), unroll=1):
        if warp_idx == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, tx_bytes(config))
            cute.copy(a_tma, tAgA[None, k_tile], tAsA[None, 0], tma_bar_ptr=full)
            cute.copy(b_tma, tBgB[None, k_tile], tBsB[None, 0], tma_bar_ptr=full)
        cute.arch.mbarrier_wait(full, phase)
        phase ^= 1

        # The fence orders the accumulators' earlier register accesses before WGMMA's.
        warpgroup.fence()
        for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            cute.gemm(tiled_mma, acc, tCrA[None, None, k_block, 0], tCrB[None, None, k_block, 0], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.sync_threads()

    epilogue.store_direct(thr_mma, acc, mC, (tile_m, tile_n), (m_tile, n_tile))


if __name__ == "__main__":
    from cute_matmul import harness

    harness.main("v1")
