"""V6: four consumers, fp16 accumulation, TMA store.

What changes from V5: the tile is 256x256 over four warp groups of 64x256 each, which fits because WGMMA
accumulates in fp16 (`f16.f16.f16`): 64 registers a thread instead of 128. The output leaves through shared memory:
a buffer of a quarter of the tile is filled by all consumers and stored by the producer warp with one bulk copy,
four times.

Why: per product, a 256x256 tile moves two thirds of the bytes that 128x256 does, and under the power limit what is
saved on moving data the tensor cores can use. The price is precision: the sum is rounded to fp16 after every 16
products, so its error, relative to a typical result, grows with sqrt(K). bf16 has no such form of WGMMA and is refused.

What it did: 1.08 of cuBLAS, which adds in fp32. At K = 8192 its mean error is 17 times that of V5, or of
cuBLAS.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_matmul import hopper
from cute_matmul.config import WARP_GROUP, Resources, TileConfig, tx_bytes
from cute_matmul.pipeline import BarrierRing, PipelineState
from cute_matmul.scheduler import TileOrder

CONSUMERS = 4  # warp groups, each with 64 rows of the tile
QUARTERS = 4  # the output tile leaves in this many slices of columns
PRODUCER_WARP = 4 * CONSUMERS
RESOURCES = Resources(
    threads=CONSUMERS * WARP_GROUP + 32,
    warp_groups=CONSUMERS,
    barriers_per_stage=2,
    other_barriers=2 * QUARTERS - 1,
    accumulator_bytes=2,
    epilogue_fraction=QUARTERS,
    grid_dims=1,
)
DTYPES = ("float16",)
ACCUMULATOR = "float16"
OUT_ALIGN = 16  # bytes: TMA stores the output

SPACE = tuple(
    TileConfig((256, 256, 64), num_stages, raster_group=raster_group)
    for num_stages in (2, 3)
    for raster_group in (1, 8, 11, 12, 16)
)
DEFAULT = TileConfig((256, 256, 64), num_stages=3, raster_group=8)


@cute.jit
def host(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream, config: cutlass.Constexpr[TileConfig]):
    """Launch C = A @ B for A (M, K), B (K, N), C (M, N): one CTA per tile of C, in the order of TileOrder."""
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    mB = hopper.transposed(mB)  # (N, K), as CuTe and WGMMA count it
    a_layout = hopper.smem_layout(mA, (tile_m, tile_k), config.num_stages)
    b_layout = hopper.smem_layout(mB, (tile_n, tile_k), config.num_stages)
    a_tma, a_coords = hopper.tma_load(mA, a_layout, (tile_m, tile_k))
    b_tma, b_coords = hopper.tma_load(mB, b_layout, (tile_n, tile_k))
    c_tma, c_coords, c_layout = hopper.tma_store(mC, (tile_m, tile_n // QUARTERS))
    tiled_mma = hopper.wgmma(mA, mB, tile_n, warp_groups=CONSUMERS, acc_dtype=cutlass.Float16)
    quarter_mma = hopper.wgmma(mA, mB, tile_n // QUARTERS, warp_groups=CONSUMERS, acc_dtype=cutlass.Float16)
    m_tiles, n_tiles = cute.ceil_div(mC.shape, (tile_m, tile_n))
    order = TileOrder(m_tiles, n_tiles, config.raster_group)
    matmul_v6_kernel(
        (a_tma, a_coords, a_layout),
        (b_tma, b_coords, b_layout),
        (c_tma, c_coords, c_layout),
        tiled_mma,
        quarter_mma,
        order,
        config,
    ).launch(
        grid=(m_tiles * n_tiles, 1, 1),
        block=(RESOURCES.threads, 1, 1),
        min_blocks_per_mp=RESOURCES.ctas_asked_for(config),
        preferred_smem_carveout=100,
        stream=stream,
    )


@cute.kernel
def matmul_v6_kernel(
    a: tuple[cute.CopyAtom, cute.Tensor, cute.ComposedLayout],
    b: tuple[cute.CopyAtom, cute.Tensor, cute.ComposedLayout],
    c: tuple[cute.CopyAtom, cute.Tensor, cute.ComposedLayout],
    tiled_mma: cute.TiledMma,
    quarter_mma: cute.TiledMma,
    order: TileOrder,
    config: cutlass.Constexpr[TileConfig],
):
    (a_tma, mA, a_layout), (b_tma, mB, b_layout), (c_tma, mC, c_layout) = a, b, c
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    tidx, _, _ = cute.arch.thread_idx()
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    m_tile, n_tile = order.locate(cute.arch.block_idx()[0])

    smem = hopper.shared_memory()
    sA = hopper.operand_buffer(smem, cutlass.Float16, a_layout)  # (bM, bK, num_stages)
    sB = hopper.operand_buffer(smem, cutlass.Float16, b_layout)  # (bN, bK, num_stages)
    sC = hopper.operand_buffer(smem, cutlass.Float16, c_layout)  # (bM, bN / QUARTERS)
    # full[s]: the producer's expect_tx and the bytes of both tiles. empty[s]: every consumer thread, once each.
    ring = BarrierRing(smem, config.num_stages, tx_bytes(config), consumer_arrivals=CONSUMERS * WARP_GROUP)
    # epi_full[q]: every consumer thread has written its part of quarter q to sC.
    # epi_empty[q]: the bulk copy has read quarter q, so that sC may be written again. Each is used once: phase 0.
    epi_full = smem.allocate_array(cutlass.Int64, QUARTERS)
    epi_empty = smem.allocate_array(cutlass.Int64, QUARTERS - 1)
    if tidx == 0:
        for quarter in cutlass.range_constexpr(QUARTERS):
            cute.arch.mbarrier_init(epi_full + quarter, CONSUMERS * WARP_GROUP)
        for quarter in cutlass.range_constexpr(QUARTERS - 1):
            cute.arch.mbarrier_init(epi_empty + quarter, 1)
        ring.init()
    cute.arch.sync_threads()

    gA = cute.local_tile(mA, (tile_m, tile_k), (m_tile, None))  # (bM, bK, RestK)
    gB = cute.local_tile(mB, (tile_n, tile_k), (n_tile, None))  # (bN, bK, RestK)
    k_tiles = cute.size(gA, mode=[2])
    if warp_idx == PRODUCER_WARP:
        loads = ((a_tma, *hopper.tma_slices(a_tma, sA, gA)), (b_tma, *hopper.tma_slices(b_tma, sB, gB)))
        producer(loads, ring, k_tiles)
        gC = cute.local_tile(mC, (tile_m, tile_n // QUARTERS), (m_tile, None))  # (bM, bN / QUARTERS, RestN)
        store(c_tma, sC, gC, n_tile * QUARTERS, epi_full, epi_empty)
    else:
        acc = consumer(tiled_mma, warp_idx // 4, sA, sB, ring, k_tiles, (tile_m, tile_n))
        epilogue(acc, quarter_mma.get_slice(tidx).partition_C(sC), epi_full, epi_empty)


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
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(tile_mn), cutlass.Float16)
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


@hopper.traced("epilogue")
@cute.jit
def epilogue(acc: cute.Tensor, tCsC: cute.Tensor, epi_full: cute.Pointer, epi_empty: cute.Pointer):
    """The consumers: write the tile to shared memory a quarter at a time, each when the last has been read.

    acc: this thread's part of the tile, columns in order; tCsC: its place in a quarter.
    """
    for quarter in cutlass.range_constexpr(QUARTERS):
        if cutlass.const_expr(quarter > 0):
            with hopper.traced("wait"):
                cute.arch.mbarrier_wait(epi_empty + (quarter - 1), 0)
        part = cute.make_tensor(acc.iterator + quarter * cute.size(tCsC), cute.make_layout(tCsC.shape))
        cute.autovec_copy(part, tCsC)
        # NOTE: the bulk copy reads through the async proxy; without the fence it may miss these stores.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(epi_full + quarter)


@hopper.traced("store")
@cute.jit
def store(
    c_tma: cute.CopyAtom,
    sC: cute.Tensor,
    gC: cute.Tensor,
    first: cutlass.Int32,
    epi_full: cute.Pointer,
    epi_empty: cute.Pointer,
):
    """The producer warp, once it has nothing left to load: store each quarter as soon as it is written."""
    quarters = cute.group_modes(gC, 0, 2)
    tCsC, tCgC = cpasync.tma_partition(c_tma, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), quarters)
    for quarter in cutlass.range_constexpr(QUARTERS):
        with hopper.traced("wait"):
            cute.arch.mbarrier_wait(epi_full + quarter, 0)
        # NOTE: a load elects its lane by itself, a store does not; and bulk groups belong to the lane.
        with cute.arch.elect_one():
            cute.copy(c_tma, tCsC, tCgC[None, first + quarter])
            cute.arch.cp_async_bulk_commit_group()
            # Only the reading of sC is waited for; the writes to global memory finish by themselves.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            if cutlass.const_expr(quarter < QUARTERS - 1):
                cute.arch.mbarrier_arrive(epi_empty + quarter)


if __name__ == "__main__":
    from cute_matmul import harness

    harness.main("v6")
