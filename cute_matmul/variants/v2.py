"""V2: multi-stage software pipelining.

What changes from V1: shared memory becomes a ring of `num_stages` buffers, each with its own barrier and its
own phase. The first `num_stages` k_tiles are loaded before the main loop without waiting; after that, each
iteration computes on one stage and loads k_tile `k_tile + num_stages` into the stage it has just freed.

Why: in V1 the copy engine idles during the MMA and the tensor cores idle during the load. With a ring, the
loads of the next stages are in flight while WGMMA reads this one.

What it costs: the phases are indexed at run time, so they live in local memory: one store of all of them before the
loop, two loads and one store in it, the same in PTX and SASS, no spill (`inspect v2`). What it did (H200, 8192^3,
fp16, bursts): 0.90 of cuBLAS where V1 has 0.80. With three CTAs per SM, as V1 has, it was a tenth slower, below V1:
the ring does the overlapping that V1 leaves to other CTAs; why a third one harms is open. Hence `max_ctas_per_sm`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cute_matmul import epilogue, hopper
from cute_matmul.config import Resources, TileConfig, tx_bytes
from cute_matmul.pipeline import BarrierRing, StagePhases

RESOURCES = Resources(threads=128, max_ctas_per_sm=2)

SPACE = tuple(
    TileConfig((tile_m, 128, tile_k), num_stages)
    for tile_m in (64, 128)
    for tile_k in (16, 32, 64)
    for num_stages in (2, 3, 4)
)
DEFAULT = TileConfig((128, 128, 64), num_stages=2)


@cute.jit
def host(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream, config: cutlass.Constexpr[TileConfig]):
    """Launch C = A @ B for A (M, K), B (K, N), C (M, N): one CTA per tile of C."""
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    mB = hopper.transposed(mB)  # (N, K), as CuTe and WGMMA count it
    a_layout = hopper.smem_layout(mA, (tile_m, tile_k), config.num_stages)
    b_layout = hopper.smem_layout(mB, (tile_n, tile_k), config.num_stages)
    a_tma, a_coords = hopper.tma_load(mA, a_layout, (tile_m, tile_k))
    b_tma, b_coords = hopper.tma_load(mB, b_layout, (tile_n, tile_k))
    tiled_mma = hopper.wgmma(mA, mB, tile_n)
    matmul_v2_kernel(a_tma, a_coords, b_tma, b_coords, mC, tiled_mma, a_layout, b_layout, config).launch(
        grid=(*cute.ceil_div(mC.shape, (tile_m, tile_n)), 1),
        block=(RESOURCES.threads, 1, 1),
        smem=RESOURCES.smem_bytes(config),
        preferred_smem_carveout=100,
        stream=stream,
    )


@cute.kernel
def matmul_v2_kernel(
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
    num_stages = config.num_stages
    tidx, _, _ = cute.arch.thread_idx()
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    m_tile, n_tile, _ = cute.arch.block_idx()

    smem = hopper.shared_memory()
    sA = hopper.operand_buffer(smem, mC.element_type, a_layout)  # (bM, bK, num_stages)
    sB = hopper.operand_buffer(smem, mC.element_type, b_layout)  # (bN, bK, num_stages)
    # One barrier per stage: one arrival (the elected lane's expect_tx) and the bytes of both tiles.
    ring = BarrierRing(smem, num_stages, tx_bytes(config))
    if tidx == 0:
        ring.init()
    cute.arch.sync_threads()

    gA = cute.local_tile(mA, (tile_m, tile_k), (m_tile, None))  # (bM, bK, RestK)
    gB = cute.local_tile(mB, (tile_n, tile_k), (n_tile, None))  # (bN, bK, RestK)
    tAsA, tAgA = hopper.tma_slices(a_tma, sA, gA)
    tBsB, tBgB = hopper.tma_slices(b_tma, sB, gB)

    thr_mma = tiled_mma.get_slice(tidx)
    tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, num_stages)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, num_stages)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tile_m, tile_n)), cutlass.Float32)
    acc.fill(0.0)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)

    # Prologue: fill the ring, without waiting for anything.
    k_tiles = cute.size(gA, mode=[2])
    if warp_idx == 0:
        for stage in cutlass.range(cutlass.min(num_stages, k_tiles), unroll=1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, ring.tx_bytes)
            cute.copy(a_tma, tAgA[None, stage], tAsA[None, stage], tma_bar_ptr=ring.full + stage)
            cute.copy(b_tma, tBgB[None, stage], tBsB[None, stage], tma_bar_ptr=ring.full + stage)

    phases = StagePhases.in_kernel(num_stages)
    for k_tile in cutlass.range(k_tiles, unroll=1):
        stage = k_tile % num_stages

        # One thread waits; the sync publishes what it saw to the CTA.
        if tidx == 0:
            cute.arch.mbarrier_wait(ring.full + stage, phases[stage])
        cute.arch.sync_threads()

        warpgroup.fence()
        for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            cute.gemm(tiled_mma, acc, tCrA[None, None, k_block, stage], tCrB[None, None, k_block, stage], acc)
        warpgroup.commit_group()
        # NOTE: the stage is refilled below, so no WGMMA may still be reading it: nothing stays in flight.
        warpgroup.wait_group(0)
        phases.flip(stage)

        preload = k_tile + num_stages
        if warp_idx == 0 and preload < k_tiles:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, ring.tx_bytes)
            cute.copy(a_tma, tAgA[None, preload], tAsA[None, stage], tma_bar_ptr=ring.full + stage)
            cute.copy(b_tma, tBgB[None, preload], tBsB[None, stage], tma_bar_ptr=ring.full + stage)
        # The tutorial's. No hazard needs it: warp 0 refills, and has itself waited for the readers (docs/v2.md).
        cute.arch.sync_threads()

    epilogue.store_direct(thr_mma, acc, mC, (tile_m, tile_n), (m_tile, n_tile))


if __name__ == "__main__":
    from cute_matmul import harness

    harness.main("v2")
