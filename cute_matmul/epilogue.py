"""Epilogues: accumulators to global memory.

`store_direct` stores from registers, without shared memory. Nothing outside the output is written whatever its extents
and strides.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.typing import AddressSpace

from . import hopper

QUAD = 4  # lanes that hold a row of an MMA's 8x8 block of sums between them
PAIR = 2  # columns of it that each has: in 16 bits a word, and a row is 16 bytes, the most that a thread stores at once


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
    the tile's index. What a store writes goes by the output's address, row stride and columns: 16 bytes where all are
    multiples of that, 4 bytes likewise, else one element.
    """
    out = cute.make_rmem_tensor_like(acc, mC.element_type)
    out.store(acc.load().to(mC.element_type))

    tCgC = thr_mma.partition_C(cute.local_tile(mC, tile_mn, coord_mn))
    tiles = cute.local_tile(cute.make_identity_tensor(mC.shape), tile_mn, coord_mn)
    tCcC = thr_mma.partition_C(tiles)  # the (m, n) of each accumulator, same shape as acc
    if starts_at_multiples(mC, PAIR * QUAD):
        store_rows(out, tCgC, tCcC, mC.shape, QUAD)
    elif starts_at_multiples(mC, PAIR):
        store_rows(out, tCgC, tCcC, mC.shape, 1)
    else:
        for i in cutlass.range(cute.size(out), unroll_full=True):
            if cute.elem_less(tCcC[i], mC.shape):
                tCgC[i] = out[i]


def starts_at_multiples(mC: cute.Tensor, elements: int) -> cutlass.Boolean:
    """Whether every row begins, and ends, at a multiple of so many elements, a power of two."""
    address = mC.iterator.toint() // (mC.element_type.width // 8)
    return (mC.shape[1] | mC.stride[0] | address) % elements == 0


@cute.jit
def store_rows(out: cute.Tensor, tCgC: cute.Tensor, tCcC: cute.Tensor, shape: tuple, lanes: cutlass.Constexpr[int]):
    """Store a fragment by the columns that `lanes` lanes hold of a block's row: QUAD, the whole row, or 1, a pair.

    Stored as the MMA leaves them, pairs take four times as many instructions as rows do, each through the same eight
    rows. So the quad exchanges: a lane gives its pairs of three blocks away and gets the other three of the fourth. All
    four lanes take part, whatever the output's extents; of a block's row either all columns are inside or none.
    """
    words, places, where = (by_block(t) for t in (cute.recast_tensor(out, cutlass.Int32), tCgC, tCcC))
    _, halves, m_blocks, n_blocks = places.shape
    _, to_half, to_m, to_n = places.stride
    if cutlass.const_expr(n_blocks % lanes):
        lanes = 1  # too narrow a tile to exchange
    lane = cute.arch.lane_idx() % lanes
    shift = lane * (to_n - PAIR)  # columns from this lane's own pair to the row that it stores
    # One address, of the first row that this lane stores; the rest are offsets from it, most of them known now. An
    # address for each row would cost registers.
    first = places.iterator.toint() + shift * (out.element_type.width // 8)
    rows = cute.make_tensor(
        cute.make_ptr(out.element_type, first, AddressSpace.gmem, assumed_align=4 * lanes),
        cute.make_layout((PAIR * lanes, halves, m_blocks, n_blocks // lanes), stride=(1, to_half, to_m, lanes * to_n)),
    )
    row = cute.make_rmem_tensor(PAIR * lanes, out.element_type)
    for m in cutlass.range_constexpr(m_blocks):
        for n in cutlass.range_constexpr(n_blocks // lanes):
            for half in cutlass.range_constexpr(halves):
                pairs = [words[0, half, m, lanes * n + i] for i in range(lanes)]
                exchange(pairs, cute.recast_tensor(row, cutlass.Int32), lane)
                at_m, at_n = where[0, half, m, lanes * n]
                if cute.elem_less((at_m, at_n + shift), shape):
                    cute.autovec_copy(row, rows[None, half, m, n])


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
    """Transpose the words of as many lanes as there are words: word i of `row` becomes word number `lane` of lane i."""
    for distance in (1, 2):
        upper = lane & distance != 0
        for i in range(len(words)):
            j = i | distance
            if i != j and j < len(words):
                # The lower lane of a pair keeps word i and gives word j for the upper's word i.
                got = cute.arch.shuffle_sync_bfly(hopper.select(upper, words[i], words[j]), distance)
                words[i], words[j] = hopper.select(upper, got, words[i]), hopper.select(upper, words[j], got)
    for i, word in enumerate(words):
        row[i] = word
