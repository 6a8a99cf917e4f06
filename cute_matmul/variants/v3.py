"""V3: warp specialization.

What changes from V2: a fifth warp, the producer, does nothing but start TMA loads; the warp group, the consumer,
does nothing but WGMMA. They meet at two barriers per stage instead of at `sync_threads`: `full` (the bytes have
landed) and `empty` (nobody reads them any more). Each role keeps one stage index and one phase bit, which flips
when the index wraps; loops are unrolled by `num_stages`, so the index is a constant in the unrolled body.

Why: in V2 all 128 threads meet twice per k_tile, so nobody runs ahead. Here the producer runs ahead as far as the
ring allows, and what a consumer waits for is the data alone.

What it did: 0.90 of cuBLAS, hardly more than V2. The tensor cores still drain at the end of every k_tile, and the tiles
are still walked in an order that L2 does not like; V4 and V5 take these up.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cute_matmul import epilogue, hopper
from cute_matmul.config import WARP_GROUP, Resources, TileConfig, tx_bytes
from cute_matmul.pipeline import BarrierRing, PipelineState

RESOURCES = Resources(threads=160, barriers_per_stage=2)
PRODUCER_WARP = 4  # warps 0-3 are the consumer: a warp group starts at a multiple of four

SPACE = tuple(
    config
    for tile_m in (64, 128)
    for tile_k in (32, 64)
    for num_stages in range(2, 8)
    if RESOURCES.refusal(config := TileConfig((tile_m, 128, tile_k), num_stages)) is None
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
    matmul_v3_kernel(a_tma, a_coords, b_tma, b_coords, mC, tiled_mma, a_layout, b_layout, config).launch(
        grid=(*cute.ceil_div(mC.shape, (tile_m, tile_n)), 1),
        block=(RESOURCES.threads, 1, 1),
        min_blocks_per_mp=RESOURCES.ctas_asked_for(config),
        preferred_smem_carveout=100,
        stream=stream,
    )


@cute.kernel
def matmul_v3_kernel(
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
    sA = hopper.operand_buffer(smem, mC.element_type, a_layout)  # (bM, bK, num_stages)
    sB = hopper.operand_buffer(smem, mC.element_type, b_layout)  # (bN, bK, num_stages)
    # full[s]: the producer's expect_tx and the bytes of both tiles. empty[s]: every consumer thread, once each.
    ring = BarrierRing(smem, config.num_stages, tx_bytes(config), consumer_arrivals=WARP_GROUP)
    if tidx == 0:
        ring.init()
    cute.arch.sync_threads()

    gA = cute.local_tile(mA, (tile_m, tile_k), (m_tile, None))  # (bM, bK, RestK)
    gB = cute.local_tile(mB, (tile_n, tile_k), (n_tile, None))  # (bN, bK, RestK)
    k_tiles = cute.size(gA, mode=[2])
    if warp_idx == PRODUCER_WARP:
        loads = ((a_tma, *hopper.tma_slices(a_tma, sA, gA)), (b_tma, *hopper.tma_slices(b_tma, sB, gB)))
        producer(loads, ring, k_tiles)
    else:
        thr_mma = tiled_mma.get_slice(tidx)
        acc = consumer(tiled_mma, thr_mma, sA, sB, ring, k_tiles, (tile_m, tile_n))
        epilogue.store_direct(thr_mma, acc, mC, (tile_m, tile_n), (m_tile, n_tile))


@hopper.traced("producer")
@cute.jit
def producer(loads: tuple, ring: BarrierRing, k_tiles: cutlass.Int32):
    """One warp: wait until a stage is empty, announce its bytes, start its copies."""
    state = PipelineState.in_kernel(ring.num_stages, "producer")
    for k_tile in cutlass.range(k_tiles, unroll=ring.num_stages):
        with hopper.traced("wait"):
            cute.arch.mbarrier_wait(ring.empty + state.index, state.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full + state.index, ring.tx_bytes)
        for tma, shared, tiles in loads:
            cute.copy(tma, tiles[None, k_tile], shared[None, state.index], tma_bar_ptr=ring.full + state.index)
        state.advance()


@hopper.traced("consumer")
@cute.jit
def consumer(
    tiled_mma: cute.TiledMma,
    thr_mma: cute.core.ThrMma,
    sA: cute.Tensor,
    sB: cute.Tensor,
    ring: BarrierRing,
    k_tiles: cutlass.Int32,
    tile_mn: cutlass.Constexpr[tuple[int, int]],
) -> cute.Tensor:
    """One warp group: wait for a stage's bytes, multiply, give the stage back. Returns the accumulators."""
    tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, num_stages)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, num_stages)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(tile_mn), cutlass.Float32)
    acc.fill(0.0)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)

    state = PipelineState.in_kernel(ring.num_stages, "consumer")
    for _ in cutlass.range(k_tiles, unroll=ring.num_stages):
        with hopper.traced("wait"):
            cute.arch.mbarrier_wait(ring.full + state.index, state.phase)
        warpgroup.fence()
        for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            a_block, b_block = tCrA[None, None, k_block, state.index], tCrB[None, None, k_block, state.index]
            cute.gemm(tiled_mma, acc, a_block, b_block, acc)
        warpgroup.commit_group()
        # Still one group at a time: the stage may go back only once WGMMA has read it.
        warpgroup.wait_group(0)
        cute.arch.mbarrier_arrive(ring.empty + state.index)
        state.advance()
    return acc


if __name__ == "__main__":
    from cute_matmul import harness

    harness.main("v3")
