"""Two kernels that know nothing of this package, written with public DSL calls only, for the emulator's tests.

`broadcast`: a cluster of CTAs loads a tile together, each its slice, multicast to all. `row_sums`: a persistent,
warp-specialised reduction over TMA-fed stages with `cutlass.pipeline`.
"""

from __future__ import annotations

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
from cutlass import pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

TILE = (64, 64)


@cute.kernel
def broadcast_kernel(
    atom: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    layout: cute.Layout,
    tiles: cutlass.Int32,
    cluster: cutlass.Constexpr,
):
    """Every CTA of a cluster receives each tile of the cluster's row of tiles and writes it to its own copy."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    _, tile_row, _ = cute.arch.block_idx()
    tile_bytes = cute.size(TILE) * target.element_type.width // 8

    smem = SmemAllocator()
    shared = smem.allocate_tensor(target.element_type, layout, byte_alignment=128)
    landed = smem.allocate_array(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(landed, 1)
    cute.arch.mbarrier_init_fence()
    # Peers write this CTA's shared memory and its barrier: nobody starts before all have initialised.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()

    row_of_tiles = cute.local_tile(source, TILE, (tile_row, None))  # (rows, columns, tiles)
    to, come_from = cpasync.tma_partition(
        atom,
        rank,
        cute.make_layout(cluster),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(row_of_tiles, 0, 2),
    )
    mine = cute.local_tile(target, (*TILE, 1), (tile_row, None, rank))  # (rows, columns, 1, tiles)

    for tile in cutlass.range(tiles, unroll=1):
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(landed, tile_bytes)
            cute.copy(atom, come_from[None, tile], to, tma_bar_ptr=landed, mcast_mask=cutlass.Int16((1 << cluster) - 1))
        cute.arch.mbarrier_wait(landed, tile % 2)
        for i in cutlass.range(cute.size(TILE) // 128):
            element = i * 128 + thread
            at = (element // TILE[1], element % TILE[1])
            mine[at[0], at[1], 0, tile] = shared[at]
        # The next tile overwrites every CTA's buffer: not before all of them have read this one.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def broadcast(source: cute.Tensor, target: cute.Tensor, cluster: cutlass.Constexpr, stream: driver.CUstream):
    """target[:, :, r] = source for every r < cluster. source (M, N), target (M, N, cluster); M, N multiples of 64."""
    layout = cute.make_ordered_layout(TILE, order=(1, 0))
    op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    atom, coordinates = cpasync.make_tiled_tma_atom(op, source, layout, TILE, num_multicast=cluster)
    tile_rows, tiles = source.shape[0] // TILE[0], source.shape[1] // TILE[1]
    broadcast_kernel(atom, coordinates, target, layout, tiles, cluster).launch(
        grid=[cluster, tile_rows, 1], block=[128, 1, 1], cluster=[cluster, 1, 1], stream=stream
    )


ROWS, COLUMNS, STAGES = 128, 32, 3
WARPS = 4  # of the consumers: one thread a row


@cute.kernel
def row_sums_kernel(
    atom: cute.CopyAtom,
    coordinates: cute.Tensor,
    sums: cute.Tensor,
    layout: cute.ComposedLayout,
    row_tiles: cutlass.Int32,
):
    """A producer warp group, of which one warp loads; a consumer warp group that sums, one thread a row."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()

    smem = SmemAllocator()
    shared = smem.allocate_tensor(cutlass.Float32, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    barriers = smem.allocate_array(cutlass.Int64, 2 * STAGES)
    ring = pipeline.PipelineTmaAsync.create(
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS),
        tx_count=ROWS * COLUMNS * 4,
        barrier_storage=barriers,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )

    if warp < 4:
        cute.arch.setmaxregister_decrease(40)
        if warp == 0:
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            for row_tile in cutlass.range(first, row_tiles, step, unroll=1):
                tiles = cute.local_tile(coordinates, (ROWS, COLUMNS), (row_tile, None))
                to, come_from = cpasync.tma_partition(
                    atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
                )
                for tile in cutlass.range(cute.size(tiles, mode=[2]), unroll=1):
                    ring.producer_acquire(state)
                    barrier = ring.producer_get_barrier(state)
                    cute.copy(atom, come_from[None, tile], to[None, state.index], tma_bar_ptr=barrier)
                    ring.producer_commit(state)
                    state.advance()
            ring.producer_tail(state)
    else:
        cute.arch.setmaxregister_increase(232)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        row = thread - 128
        for row_tile in cutlass.range(first, row_tiles, step, unroll=1):
            total = cutlass.Float32(0.0)
            tiles = cute.local_tile(coordinates, (ROWS, COLUMNS), (row_tile, None))
            for _ in cutlass.range(cute.size(tiles, mode=[2]), unroll=1):
                ring.consumer_wait(state)
                for column in cutlass.range(COLUMNS, unroll=4):
                    total += shared[row, column, state.index]
                cute.arch.sync_warp()
                ring.consumer_release(state)
                state.advance()
            if row_tile * ROWS + row < cute.size(sums):
                sums[row_tile * ROWS + row] = total


@cute.jit
def row_sums(matrix: cute.Tensor, sums: cute.Tensor, ctas: cutlass.Constexpr, stream: driver.CUstream):
    """sums[i] = sum over j of matrix[i, j], in order of j. matrix (M, N) float32, row-major; sums (M,) float32."""
    outer = cute.make_ordered_layout((ROWS, COLUMNS, STAGES), order=(1, 0, 2))
    layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)
    one_stage = cute.slice_(layout, (None, None, 0))
    op = cpasync.CopyBulkTensorTileG2SOp()
    atom, coordinates = cpasync.make_tiled_tma_atom(op, matrix, one_stage, (ROWS, COLUMNS))
    row_tiles = cute.ceil_div(matrix.shape[0], ROWS)
    row_sums_kernel(atom, coordinates, sums, layout, row_tiles).launch(
        grid=[ctas, 1, 1], block=[256, 1, 1], stream=stream
    )
