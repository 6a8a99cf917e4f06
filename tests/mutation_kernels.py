"""Kernels for the mutation tests, with what the ladder lacks: a cluster that fills and frees one ring together,
two warp groups that take turns on named barriers and stage their output, non-bulk copies.

Each is a class: `host`, a `@cute.jit` function; `arguments(stream)`, what to call it with; `out`, the output among
them; `expected()`, what that must hold then.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

ROWS, COLUMNS = 32, 32  # of a tile
TILE_BYTES = ROWS * COLUMNS * 4


def _tiles(count: int) -> torch.Tensor:
    return torch.randn(count * ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def _row_major(*extents: int) -> cute.Layout:
    return cute.make_ordered_layout(extents, order=(1, 0, 2)[: len(extents)])


# A cluster of two sums tiles. Each CTA loads half of every tile and sends it to both; a stage is free again when
# both CTAs have read it.

CLUSTER = 2
STAGES = 2
READERS = 2  # warps of a CTA that sum, half of the rows each
LOADER = READERS  # the warp that loads


@cute.kernel
def cluster_sum_kernel(
    load: cute.CopyAtom, source: cute.Tensor, sums: cute.Tensor, layout: cute.Layout, tiles: cutlass.Int32
):
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    smem = SmemAllocator()
    ring = smem.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)  # (ROWS, COLUMNS, STAGES)
    # full[s]: this CTA's announcement, and the bytes of both halves. empty[s]: every reading warp of both CTAs.
    full = smem.allocate_array(cutlass.Int64, STAGES)
    empty = smem.allocate_array(cutlass.Int64, STAGES)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, CLUSTER * READERS)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()

    if warp == LOADER:
        come_from = cute.local_tile(source, (ROWS, COLUMNS), (None, 0))  # (ROWS, COLUMNS, tiles)
        to, box = cpasync.tma_partition(
            load,
            rank,
            cute.make_layout(CLUSTER),
            cute.group_modes(ring, 0, 2),
            cute.group_modes(come_from, 0, 2),
        )
        for tile in cutlass.range(tiles, unroll=1):
            stage, phase = tile % STAGES, tile // STAGES % 2
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_BYTES)
            cute.copy(load, box[None, tile], to[None, stage], tma_bar_ptr=full + stage, mcast_mask=cutlass.Int16(0b11))
    else:
        row = thread // 2  # two threads a row, half of the columns each
        total = cutlass.Float32(0.0)
        for tile in cutlass.range(tiles, unroll=1):
            stage, phase = tile % STAGES, tile // STAGES % 2
            cute.arch.mbarrier_wait(full + stage, phase)
            for column in cutlass.range(COLUMNS // 2, unroll_full=True):
                total += ring[row, thread % 2 * (COLUMNS // 2) + column, stage]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                for peer in cutlass.range_constexpr(CLUSTER):
                    cute.arch.mbarrier_arrive(empty + stage, peer)
        sums[row, thread % 2, rank] = total
    # Nobody leaves while a peer may still arrive here.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


class ClusterSum:
    """sums[i, h, r] = the sum of row i, half h, over all tiles; the same for both CTAs r of the cluster."""

    def __init__(self) -> None:
        self.source = _tiles(6)
        self.out = torch.empty(ROWS, 2, CLUSTER)

    @staticmethod
    @cute.jit
    def host(source: cute.Tensor, sums: cute.Tensor, stream):
        layout = _row_major(ROWS, COLUMNS, STAGES)
        one_stage = cute.slice_(layout, (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        load, coordinates = cpasync.make_tiled_tma_atom(op, source, one_stage, (ROWS, COLUMNS), num_multicast=CLUSTER)
        cluster_sum_kernel(load, coordinates, sums, layout, source.shape[0] // ROWS).launch(
            grid=(CLUSTER, 1, 1), block=(32 * (READERS + 1), 1, 1), cluster=(CLUSTER, 1, 1), stream=stream
        )

    def arguments(self, stream) -> tuple:
        return self.source, self.out, stream

    def expected(self) -> torch.Tensor:
        rows = self.source.view(-1, ROWS, 2, COLUMNS // 2).sum((0, 3))
        return rows.unsqueeze(2).expand(ROWS, 2, CLUSTER)


# Persistent CTAs double tiles. Two warp groups take every other tile; each loads it, writes the result to a staging
# buffer of its own and stores it from there.

GROUPS = 2
GROUP_THREADS = 64


@cute.kernel
def doubled_kernel(
    load: cute.CopyAtom,
    source: cute.Tensor,
    store: cute.CopyAtom,
    target: cute.Tensor,
    layout: cute.Layout,
    tiles: cutlass.Int32,
):
    thread = cute.arch.thread_idx()[0]
    group = cute.arch.make_warp_uniform(thread // GROUP_THREADS)
    lane = thread % GROUP_THREADS
    leads = cute.arch.make_warp_uniform(lane // 32) == 0  # the warp of each group that loads and stores
    smem = SmemAllocator()
    landing = smem.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)  # (ROWS, COLUMNS, GROUPS)
    staging = smem.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)  # (ROWS, COLUMNS, GROUPS)
    full = smem.allocate_array(cutlass.Int64, GROUPS)
    if thread == 0:
        for each in cutlass.range_constexpr(GROUPS):
            cute.arch.mbarrier_init(full + each, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    one = cute.make_layout(1)
    come_from = cute.group_modes(cute.local_tile(source, (ROWS, COLUMNS), (None, 0)), 0, 2)
    go_to = cute.group_modes(cute.local_tile(target, (ROWS, COLUMNS), (None, 0)), 0, 2)
    s_in, g_in = cpasync.tma_partition(load, 0, one, cute.group_modes(landing, 0, 2), come_from)
    s_out, g_out = cpasync.tma_partition(store, 0, one, cute.group_modes(staging, 0, 2), go_to)

    phase = cutlass.Int32(0)
    first = cute.arch.block_idx()[0] * GROUPS + group
    for tile in cutlass.range(first, tiles, cute.arch.grid_dim()[0] * GROUPS, unroll=1):
        if leads:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + group, TILE_BYTES)
            cute.copy(load, g_in[None, tile], s_in[None, group], tma_bar_ptr=full + group)
            # The staging buffer is free when the last store has read it.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=GROUP_THREADS)
        cute.arch.mbarrier_wait(full + group, phase)
        phase ^= 1
        for i in cutlass.range(ROWS * COLUMNS // GROUP_THREADS, unroll=4):
            at = i * GROUP_THREADS + lane
            staging[at // COLUMNS, at % COLUMNS, group] = 2 * landing[at // COLUMNS, at % COLUMNS, group]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=GROUP_THREADS)
        if leads:
            cute.copy(store, s_out[None, group], g_out[None, tile])
            cute.arch.cp_async_bulk_commit_group()
    if leads:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


class Doubled:
    """target = 2 * source, tile by tile, on two persistent CTAs."""

    def __init__(self) -> None:
        self.source = _tiles(10)
        self.out = torch.empty_like(self.source)

    @staticmethod
    @cute.jit
    def host(source: cute.Tensor, target: cute.Tensor, stream):
        layout = _row_major(ROWS, COLUMNS, GROUPS)
        one = cute.slice_(layout, (None, None, 0))
        tile = (ROWS, COLUMNS)
        load, come_from = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, one, tile)
        store, go_to = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), target, one, tile)
        doubled_kernel(load, come_from, store, go_to, layout, source.shape[0] // ROWS).launch(
            grid=(2, 1, 1), block=(GROUPS * GROUP_THREADS, 1, 1), stream=stream
        )

    def arguments(self, stream) -> tuple:
        return self.source, self.out, stream

    def expected(self) -> torch.Tensor:
        return 2 * self.source


# One CTA reverses the order of the elements within each tile, which it copies with cp.async, two tiles ahead.

THREADS = 64
PER_THREAD = ROWS * COLUMNS // 4 // THREADS  # 16-byte pieces


@cute.jit
def copy_tile(atom: cute.CopyAtom, source: cute.Tensor, ring: cute.Tensor, tile: cutlass.Int32):
    """Start this thread's part of a tile's copy into its stage."""
    thread = cute.arch.thread_idx()[0]
    for i in cutlass.range_constexpr(PER_THREAD):
        piece = i * THREADS + thread
        cute.copy(atom, source[None, piece, tile], ring[None, piece, tile % STAGES])


@cute.kernel
def reversed_kernel(atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, tiles: cutlass.Int32):
    thread = cute.arch.thread_idx()[0]
    smem = SmemAllocator()
    layout = cute.make_layout((4, ROWS * COLUMNS // 4, STAGES))
    ring = smem.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)  # (4, pieces, STAGES)
    for tile in cutlass.range_constexpr(STAGES - 1):
        copy_tile(atom, source, ring, tile)
        cute.arch.cp_async_commit_group()
    for tile in cutlass.range(tiles, unroll=1):
        if tile + STAGES - 1 < tiles:
            copy_tile(atom, source, ring, tile + STAGES - 1)
        cute.arch.cp_async_commit_group()
        # A thread's wait is for its own copies; the sync makes it everybody's.
        cute.arch.cp_async_wait_group(STAGES - 1)
        cute.arch.sync_threads()
        for i in cutlass.range(ROWS * COLUMNS // THREADS, unroll=4):
            at = i * THREADS + thread
            mirrored = ROWS * COLUMNS - 1 - at
            target[at, tile] = ring[mirrored % 4, mirrored // 4, tile % STAGES]
        # The next copies land where this tile lies.
        cute.arch.sync_threads()


class Reversed:
    """target[i, t] = source[last - i, t]: each column, a tile, in reverse order."""

    def __init__(self) -> None:
        self.source = _tiles(5).view(5, -1)
        self.out = torch.empty_like(self.source)

    @staticmethod
    @cute.jit
    def host(source: cute.Tensor, target: cute.Tensor, stream):
        tiles = source.shape[0]
        pieces = cute.make_tensor(
            source.iterator.align(16),
            cute.make_layout((4, ROWS * COLUMNS // 4, tiles), stride=(1, 4, ROWS * COLUMNS)),
        )
        out = cute.make_tensor(target.iterator, cute.make_layout((ROWS * COLUMNS, tiles), stride=(1, ROWS * COLUMNS)))
        op = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(op, cutlass.Float32, num_bits_per_copy=128)
        reversed_kernel(atom, pieces, out, tiles).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    def arguments(self, stream) -> tuple:
        return self.source, self.out, stream

    def expected(self) -> torch.Tensor:
        return self.source.flip(1)
