"""Epilogues: accumulators to global memory.

`store_direct` stores from registers, without shared memory. Nothing outside the output is written whatever its extents
and strides.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.typing import AddressSpace

from . import hopper

QUAD = 4  # lanes that hold a row of an MMA's 8x8 block of sums between them, two columns each
VECTOR = 8  # elements of a block's row: 16 bytes, the most that one instruction of a thread stores


@hopper.traced("epilogue")
@cute.jit
def store_direct(
    thr_mma: cute.core.ThrMma,
    acc: cute.Tensor,
    mC: cute.Tensor,
    tile_mn: cutlass.Constexpr[tuple[int, int]],
    coord_mn: tuple,
):
    """Convert this warp's accumulators to mC's 16-bit type and store those that lie inside mC.

    acc is the thread's fragment of a tile_mn tile, mC the whole (M, N) output with unit stride along N, coord_mn
    the tile's index. A tile that lies inside mC is stored 16 bytes at a time where the output's address and row stride
    are multiples of that; anything else element by element, under a mask.
    """
    out = cute.make_rmem_tensor_like(acc, mC.element_type)
    out.store(acc.load().to(mC.element_type))

    rows, columns = mC.shape
    row_stride = mC.stride[0]
    whole = (coord_mn[0] + 1) * tile_mn[0] <= rows and (coord_mn[1] + 1) * tile_mn[1] <= columns
    tCgC = thr_mma.partition_C(cute.local_tile(mC, tile_mn, coord_mn))
    if whole and row_stride % VECTOR == 0 and mC.iterator.toint() % 16 == 0:
        store_blocks(out, tCgC)
    else:
        tiles = cute.local_tile(cute.make_identity_tensor(mC.shape), tile_mn, coord_mn)
        tCcC = thr_mma.partition_C(tiles)  # the (m, n) of each accumulator, same shape as acc
        for i in cutlass.range(cute.size(out), unroll_full=True):
            if cute.elem_less(tCcC[i], mC.shape):
                tCgC[i] = out[i]


@cute.jit
def store_blocks(out: cute.Tensor, tCgC: cute.Tensor):
    """Store a whole fragment, 16 bytes at a time: of four blocks along N each lane of a quad stores the row of one.

    An MMA leaves two columns of a block's row with each lane. Stored as they are, they would take four times as many
    instructions, each through the same eight rows. So the quad exchanges: a lane gives its columns of three blocks
    away and gets the other six of the fourth.
    """
    words, places = by_block(cute.recast_tensor(out, cutlass.Int32)), by_block(tCgC)
    _, halves, m_blocks, n_blocks = places.shape
    if cutlass.const_expr(n_blocks % QUAD):
        cute.autovec_copy(out, tCgC)  # too narrow a tile to exchange
    else:
        lane = cute.arch.lane_idx() % QUAD
        _, to_half, to_m, to_n = places.stride
        # One address, of the first row that this lane stores, from that of its own two columns; the rest are offsets
        # from it, most of them known now. An address for each row would cost registers.
        first = places.iterator.toint() + lane * (to_n - 2) * (out.element_type.width // 8)
        rows = cute.make_tensor(
            cute.make_ptr(out.element_type, first, AddressSpace.gmem, assumed_align=16),
            cute.make_layout((VECTOR, halves, m_blocks, n_blocks // QUAD), stride=(1, to_half, to_m, QUAD * to_n)),
        )
        row = cute.make_rmem_tensor(QUAD, cutlass.Int32)
        for m in cutlass.range_constexpr(m_blocks):
            for n in cutlass.range_constexpr(n_blocks // QUAD):
                for half in cutlass.range_constexpr(halves):
                    exchange([words[0, half, m, QUAD * n + i] for i in range(QUAD)], row, lane)
                    cute.autovec_copy(cute.recast_tensor(row, out.element_type), rows[None, half, m, n])


def by_block(fragment: cute.Tensor) -> cute.Tensor:
    """An accumulator fragment as (columns of a pair, rows r and r + 8, blocks along M, blocks of 8 columns along N).

    WGMMA has the blocks along N inside the instruction, ((2, 2, N), M, 1), mma.sync outside, ((2, 2), M, N).
    """
    (pair, half, *inside), m, n = fragment.shape
    (to_column, to_half, *to_inside), to_m, to_n = fragment.stride
    if inside:
        if n != 1:
            raise ValueError(f"acc must be of one WGMMA along N, got a fragment of shape {fragment.shape}")
        n, to_n = inside[0], to_inside[0]
    layout = cute.make_layout((pair, half, m, n), stride=(to_column, to_half, to_m, to_n))
    return cute.make_tensor(fragment.iterator, layout)


def exchange(words: list[cutlass.Int32], row: cute.Tensor, lane: cutlass.Int32) -> None:
    """Transpose the 4x4 words of a quad: word i of `row` becomes word number `lane` of lane i."""
    for distance in (1, 2):
        upper = lane & distance != 0
        for i in range(QUAD):
            j = i | distance
            if i != j:
                # The lower lane of a pair keeps word i and gives word j for the upper's word i.
                got = cute.arch.shuffle_sync_bfly(hopper.select(upper, words[i], words[j]), distance)
                words[i], words[j] = hopper.select(upper, got, words[i]), hopper.select(upper, words[j], got)
    for i in range(QUAD):
        row[i] = words[i]
