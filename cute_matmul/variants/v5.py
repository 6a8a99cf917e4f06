"""V5: overlapping WGMMA groups.

What changes from V4: each warp group keeps one WGMMA group in flight. It issues the next k_tile's products before
it waits for the last one's (`wait_group(1)`), and so gives a stage back one iteration late: when the group after
the one that read it has been issued.

Why: in V4 a warp group has nothing queued at the tensor cores between the last product's retirement and the next one's
issue, with a wait, an arrival and a barrier in between, at every k_tile. Here the next products are already queued.

What it did: with 128x256 tiles, nothing that could be measured, 1.01 of cuBLAS as V4. Two warp groups already
cover each other's pauses, and the board is at its power limit. In the emulator, with tiles of 128 columns, they show.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cute_matmul import epilogue, hopper
from cute_matmul.config import WARP_GROUP, Resources, TileConfig, tx_bytes
from cute_matmul.pipeline import BarrierRing, PipelineState
from cute_matmul.scheduler import TileOrder

CONSUMERS = 2  # warp groups, each with half of the tile's rows
PRODUCER_WARP = 4 * CONSUMERS
RESOURCES = Resources(threads=CONSUMERS * WARP_GROUP + 32, warp_groups=CONSUMERS, barriers_per_stage=2, grid_dims=1)

SPACE = tuple(
    config
    for tile_mn in ((128, 128), (128, 192), (128, 256), (256, 128))
    for num_stages in range(2, 7)
    for raster_group in (1, 8, 12, 16)
    if RESOURCES.refusal(config := TileConfig((*tile_mn, 64), num_stages, raster_group=raster_group)) is None
)
DEFAULT = TileConfig((128, 256, 64), num_stages=3, raster_group=12)


@cute.jit
def host(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream, config: cutlass.Constexpr[TileConfig]):
    """Launch C = A @ B for A (M, K), B (K, N), C (M, N): one CTA per tile of C, in the order of TileOrder."""
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    mB = hopper.transposed(mB)  # (N, K), as CuTe and WGMMA count it
    a_layout = hopper.smem_layout(mA, (tile_m, tile_k), config.num_stages)
    b_layout = hopper.smem_layout(mB, (tile_n, tile_k), config.num_stages)
    a_tma, a_coords = hopper.tma_load(mA, a_layout, (tile_m, tile_k))
    b_tma, b_coords = hopper.tma_load(mB, b_layout, (tile_n, tile_k))
    tiled_mma = hopper.wgmma(mA, mB, tile_n, warp_groups=CONSUMERS)
    m_tiles, n_tiles = cute.ceil_div(mC.shape, (tile_m, tile_n))
    order = TileOrder(m_tiles, n_tiles, config.raster_group)
    matmul_v5_kernel(a_tma, a_coords, b_tma, b_coords, mC, tiled_mma, a_layout, b_layout, order, config).launch(
        grid=(m_tiles * n_tiles, 1, 1),
        block=(RESOURCES.threads, 1, 1),
        min_blocks_per_mp=RESOURCES.ctas_asked_for(config),
        preferred_smem_carveout=100,
        stream=stream,
    )


@cute.kernel
def matmul_v5_kernel(
    a_tma: cute.CopyAtom,
    mA: cute.Tensor,
    b_tma: cute.CopyAtom,
    mB: cute.Tensor,
    mC: cute.Tensor,
    tiled_mma: cute.TiledMma,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
    order: TileOrder,
    config: cutlass.Constexpr[TileConfig],
):
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    tidx, _, _ = cute.arch.thread_idx()
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    m_tile, n_tile = order.locate(cute.arch.block_idx()[0])

    smem = hopper.shared_memory()
    sA = hopper.operand_buffer(smem, mC.element_type, a_layout)  # (bM, bK, num_stages)
    sB = hopper.operand_buffer(smem, mC.element_type, b_layout)  # (bN, bK, num_stages)
    # full[s]: the producer's expect_tx and the bytes of both tiles. empty[s]: every consumer thread, once each.
    ring = BarrierRing(smem, config.num_stages, tx_bytes(config), consumer_arrivals=CONSUMERS * WARP_GROUP)
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
        acc = consumer(tiled_mma, warp_idx // 4, sA, sB, ring, k_tiles, (tile_m, tile_n))
        epilogue.store_direct(tiled_mma.get_slice(tidx), acc, mC, (tile_m, tile_n), (m_tile, n_tile))


@hopper.traced("producer")
@cute.jit
def producer(loads: tuple, ring: BarrierRing, k_tiles: cutlass.Int32):
    """One warp: fill the ring as fast as the consumers empty it."""
    state = PipelineState.in_kernel(ring.num_stages, "producer")
    for k_tile in cutlass.range(k_tiles, unroll=ring.num_stages):
        ring.producer_acquire(state)
        for tma, shared, tiles in loads:
            cute.copy(tma, tiles[None, k_tile], shared[None, state.index], tma_bar_ptr=ring.full + state.index)
        state.advance()


@hopper.traced("consumer")
@cute.jit
def consumer(
    tiled_mma: cute.TiledMma,
    warp_group_idx: cutlass.Int32,
    sA: cute.Tensor,
    sB: cute.Tensor,
    ring: BarrierRing,
    k_tiles: cutlass.Int32,
    tile_mn: cutlass.Constexpr[tuple[int, int]],
) -> cute.Tensor:
    """One of the warp groups: multiply its rows of A with all of B, stage after stage. Returns the accumulators."""
    group_mma = tiled_mma.get_slice(warp_group_idx * WARP_GROUP)
    tCrA = tiled_mma.make_fragment_A(group_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, num_stages)
    tCrB = tiled_mma.make_fragment_B(group_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, num_stages)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(tile_mn), cutlass.Float32)
    acc.fill(0.0)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)

    state = PipelineState.in_kernel(ring.num_stages, "consumer")
    release = state.copy()  # one behind: the stage whose products are still in flight
    multiply(tiled_mma, acc, tCrA, tCrB, ring, state)
    state.advance()
    for _ in cutlass.range(k_tiles - 1, unroll=ring.num_stages):
        multiply(tiled_mma, acc, tCrA, tCrB, ring, state)
        # All groups but the one just committed have retired: the stage before this one has been read.
        warpgroup.wait_group(1)
        ring.consumer_release(release)
        release.advance()
        state.advance()
    warpgroup.wait_group(0)
    return acc


@cute.jit
def multiply(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    tCrA: cute.Tensor,
    tCrB: cute.Tensor,
    ring: BarrierRing,
    state: PipelineState,
):
    """Wait for the stage's bytes and commit its products as one group; it is in flight on return."""
    ring.consumer_wait(state)
    warpgroup.fence()
    for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
        a_block, b_block = tCrA[None, None, k_block, state.index], tCrB[None, None, k_block, state.index]
        cute.gemm(tiled_mma, acc, a_block, b_block, acc)
    warpgroup.commit_group()


if __name__ == "__main__":
    from cute_matmul import harness

    harness.main("v5")
